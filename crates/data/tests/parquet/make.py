"""Writes the parquet files of this folder and their contents (expected.json). Needs pyarrow.

    python crates/data/tests/parquet/make.py
"""

import json
import pathlib

import pyarrow as pa
import pyarrow.parquet as pq

HERE = pathlib.Path(__file__).parent

WORDS = "the captain who the actor admired brought a new costume to the theatre ß 東京 🦊".split()


def text(number, length):
    return " ".join(WORDS[(number * 7 + at * at) % len(WORDS)] for at in range(length))


LINES = [text(number, 3 + number % 9) for number in range(60)]
REPEATED = [LINES[number % 5] for number in range(60)]
NULLS = [None if number % 3 == 1 else line for number, line in enumerate(LINES)]
MANY = [f"{number:04}" * (number % 4) + "." for number in range(300)]
LISTS = {"lines": LINES, "repeated": REPEATED, "nulls": NULLS, "sorted": sorted(LINES), "many": MANY}

expected = {}


def write(name, values, kind=pa.string(), nullable=True, **options):
    # Other columns before and after: the reader has to find the right one.
    fields = [pa.field("id", pa.int64()), pa.field("text", kind, nullable), pa.field("meta", pa.string())]
    count = len(values)
    columns = [pa.array(range(count)), pa.array(values, kind), pa.array(["x"] * count)]
    table = pa.Table.from_arrays(columns, schema=pa.schema(fields))
    options = {"compression": "none", "use_dictionary": False, "row_group_size": 1000, **options}
    pq.write_table(table, HERE / f"{name}.parquet", store_schema=False, **options)
    expected[name] = next((known for known, list in LISTS.items() if list == values), None)


for codec in ["none", "snappy", "gzip", "zstd"]:
    write(f"plain-{codec}", LINES, compression=codec)
    write(f"dictionary-{codec}", REPEATED, compression=codec, use_dictionary=True)
write("nulls", NULLS)
write("nulls-dictionary", NULLS, use_dictionary=True, compression="snappy")
write("required", LINES, nullable=False)
write("groups", LINES, row_group_size=7, compression="zstd", use_dictionary=True)
write("pages", LINES, data_page_size=64, write_batch_size=4, compression="snappy")
write("pages-dictionary", REPEATED, data_page_size=8, write_batch_size=4, use_dictionary=True)
# The dictionary exceeds its limit, so later pages are PLAIN.
write("fallback", LINES, dictionary_pagesize_limit=200, data_page_size=200, write_batch_size=4, use_dictionary=True)
write("v2", NULLS, data_page_version="2.0", compression="zstd")
write("v2-dictionary", NULLS, data_page_version="2.0", compression="snappy", use_dictionary=True)
write("v2-required", LINES, data_page_version="2.0", compression="gzip", nullable=False)
write("delta-length", NULLS, column_encoding={"text": "DELTA_LENGTH_BYTE_ARRAY"}, compression="zstd")
write("delta", sorted(LINES), column_encoding={"text": "DELTA_BYTE_ARRAY"})
write("delta-many", MANY, column_encoding={"text": "DELTA_BYTE_ARRAY"})
write("checksums", LINES, write_page_checksum=True, compression="snappy")
write("large-string", LINES, kind=pa.large_string(), compression="snappy")
write("binary", [line.encode() for line in LINES], kind=pa.binary())
expected["binary"] = "lines"
write("large", ["long " * 30_000, "ß" * 50_000, "short"], compression="zstd")

# Files that must be refused, by name.
write("lz4", LINES, compression="lz4")
write("brotli", LINES, compression="brotli")
schema = {
    "other": pa.table({"content": LINES, "title": LINES, "n": range(60)}),
    "integers": pa.table({"text": range(60), "body": LINES}),
    "list": pa.table({"text": [[line] for line in LINES]}),
    "structure": pa.table({"text": [{"a": line} for line in LINES], "body": LINES}),
    "no-rows": pa.table({"text": pa.array([], pa.string())}),
    "not-utf8": pa.table({"text": pa.array([b"fine", b"caf\xe9", b"fine again"], pa.binary())}),
    "empty-text": pa.table({"text": ["fine", "", " \n", "fine again"]}),
    "nul": pa.table({"text": ["fine", "a\0b", "fine again"]}),
}
for name, table in schema.items():
    pq.write_table(table, HERE / f"{name}.parquet", compression="snappy", store_schema=False)
for name in ["lz4", "brotli"]:
    del expected[name]
del expected["large"]
(HERE / "expected.json").write_text(
    json.dumps({"lists": LISTS, "files": expected}, ensure_ascii=False, indent=0) + "\n"
)
