"""Writes parquet files with lists and structures, and their expected rows (expected.json): null fields of structures
are omitted, as in JSON. Needs pyarrow.

    python crates/data/tests/rows/make.py
"""

import json
import pathlib

import pyarrow as pa
import pyarrow.parquet as pq

HERE = pathlib.Path(__file__).parent

CALL = pa.struct([("name", pa.string()), ("arguments", pa.string())])
MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string()), ("tool_calls", pa.list_(CALL))])


def talk(number):
    turns = [{"role": "user", "content": f"question {number} ß", "tool_calls": None}]
    if number % 3 == 1:
        calls = [{"name": "look", "arguments": f"{{\"at\": {at}}}"} for at in range(number % 4)]
        turns.append({"role": "assistant", "content": None, "tool_calls": calls})
        turns.append({"role": "tool", "content": "seen", "tool_calls": None})
    turns.append({"role": "assistant", "content": "answer " * (number % 5), "tool_calls": None})
    return turns


ROWS = 40
COLUMNS = {
    "messages": (pa.list_(MESSAGE), [None if n % 11 == 5 else [] if n % 11 == 7 else talk(n) for n in range(ROWS)]),
    "label": (pa.int64(), [None if n % 7 == 3 else n - 5 for n in range(ROWS)]),
    "small": (pa.int32(), [n % 3 for n in range(ROWS)]),
    "flag": (pa.bool_(), [n % 2 == 0 for n in range(ROWS)]),
    "score": (pa.float64(), [n / 4 for n in range(ROWS)]),
    "half": (pa.float32(), [n / 2 for n in range(ROWS)]),
    "tags": (pa.list_(pa.string()), [[f"t{at}" for at in range(n % 4)] for n in range(ROWS)]),
    "deep": (pa.list_(pa.list_(pa.int64())), [[[at] * at for at in range(n % 4)] for n in range(ROWS)]),
    "meta": (pa.struct([("id", pa.string()), ("n", pa.struct([("x", pa.int64())]))]),
             [None if n % 5 == 0 else {"id": f"d{n % 6}", "n": None if n % 5 == 1 else {"x": n}} for n in range(ROWS)]),
    "map": (pa.map_(pa.string(), pa.int64()), [[(f"k{at}", at) for at in range(n % 3)] for n in range(ROWS)]),
    "day": (pa.date32(), [None] * ROWS),
    "bytes": (pa.binary(4), [b"abcd"] * ROWS),
}


def bare(value):
    """A value as JSON, in which null fields of structures are omitted."""
    if isinstance(value, dict):
        return {name: bare(held) for name, held in value.items() if held is not None}
    if isinstance(value, list):
        if value and isinstance(value[0], tuple):
            return dict(value)
        return [bare(held) for held in value]
    return value


def write(name, **options):
    fields = [pa.field(column, kind) for column, (kind, _) in COLUMNS.items()]
    arrays = [pa.array(values, kind) for kind, values in COLUMNS.values()]
    table = pa.Table.from_arrays(arrays, schema=pa.schema(fields))
    options = {"compression": "zstd", "row_group_size": 1000, **options}
    pq.write_table(table, HERE / f"{name}.parquet", store_schema=False, **options)


write("plain", use_dictionary=False, compression="none")
write("dictionary", use_dictionary=True)
write("groups", row_group_size=7)
write("pages", use_dictionary=False, data_page_size=32, write_batch_size=3, compression="snappy")
write("v2", data_page_version="2.0")
write("delta", use_dictionary=False, data_page_version="2.0",
      column_encoding={"label": "DELTA_BINARY_PACKED", "small": "DELTA_BINARY_PACKED"})

rows = []
for row in range(ROWS):
    fields = {}
    for column, (_, values) in COLUMNS.items():
        if column != "bytes":
            held = values[row]
            fields[column] = {} if column == "map" and not held else bare(held)
    rows.append(fields)
(HERE / "expected.json").write_text(json.dumps(rows, ensure_ascii=False, separators=(",", ":")) + "\n")
