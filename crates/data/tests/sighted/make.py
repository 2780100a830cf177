"""Writes parquet files whose rows contain images: bytes, structures of bytes and path, lists of them, paths. The images are
those of ../pictures. Needs pyarrow.

    python crates/data/tests/sighted/make.py
"""

import pathlib

import pyarrow as pa
import pyarrow.parquet as pq

HERE = pathlib.Path(__file__).parent
NAMES = ["grey.jpg", "grey.png"]
IMAGES = [(HERE.parent / "pictures" / name).read_bytes() for name in NAMES]
ASKED = [("What is it?", "A scene"), ("And this?", "The same"), ("Why?", "Thus")]

STORED = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
TURN = pa.struct([("user", pa.string()), ("assistant", pa.string()), ("source", pa.string())])
PART = pa.struct([("type", pa.string()), ("text", pa.string())])
HELD = pa.struct([("type", pa.string()), ("text", pa.string()), ("image", STORED)])


def message(part):
    return pa.list_(pa.struct([("role", pa.string()), ("content", pa.list_(part))]))


def stored(at):
    """An image as the library `datasets` stores it: its bytes, and a name that is not the path of a file."""
    return {"bytes": IMAGES[at], "path": f"elsewhere/{NAMES[at]}"}


def talk(at, image):
    asked, answer = ASKED[at]
    parts = ([image] if image else []) + [{"type": "text", "text": asked}]
    answer = {"role": "assistant", "content": [{"type": "text", "text": answer}]}
    return [{"role": "user", "content": parts}, answer]


def write(name, columns, **options):
    fields = [pa.field(column, kind) for column, (kind, _) in columns.items()]
    arrays = [pa.array(values, kind) for kind, values in columns.values()]
    table = pa.Table.from_arrays(arrays, schema=pa.schema(fields))
    pq.write_table(table, HERE / f"{name}.parquet", store_schema=False, **{"compression": "zstd", **options})


questions = {
    "question": (pa.string(), [asked for asked, _ in ASKED]),
    "answer": (pa.string(), [answer for _, answer in ASKED]),
}
write("bytes", {"image": (pa.binary(), [*IMAGES, None]), **questions})
write("stored", {"image": (STORED, [stored(0), stored(1), None]), **questions},
      use_dictionary=False, compression="snappy")
write("paths", {"image": (STORED, [{"path": name} for name in NAMES] + [None]), **questions})
write("names", {"image_filename": (pa.string(), [*NAMES, None]), **questions}, compression="none")
write("lists", {"images": (pa.list_(STORED), [[stored(0)], [stored(1)], []]), **questions},
      data_page_version="2.0", row_group_size=2)
places = [{"type": "image"}, {"type": "image"}, None]
write("column", {
    "messages": (message(PART), [talk(at, place) for at, place in enumerate(places)]),
    "images": (pa.list_(pa.binary()), [[IMAGES[0]], [IMAGES[1]], None]),
}, use_dictionary=False)
held = [{"type": "image", "image": stored(0)}, {"type": "image", "image": stored(1)}, None]
write("parts", {"messages": (message(HELD), [talk(at, part) for at, part in enumerate(held)])}, compression="gzip")
turn = [{"user": asked, "assistant": answer, "source": "made"} for asked, answer in ASKED]
write("turns", {
    "images": (pa.list_(STORED), [[stored(0)], [stored(1)], []]),
    "texts": (pa.list_(TURN), [[turn[0], turn[2]], [turn[1]], [turn[2]]]),
})
write("broken", {"image": (STORED, [{"bytes": b"", "path": "a"}, {"bytes": IMAGES[0][:40]}, stored(1)]), **questions})
