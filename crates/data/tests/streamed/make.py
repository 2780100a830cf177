"""Writes two parquet files of random sentences in small row groups, for tests of streaming. Needs pyarrow.

    python crates/data/tests/streamed/make.py
"""

import pathlib
import random

import pyarrow as pa
import pyarrow.parquet as pq

HERE = pathlib.Path(__file__).parent
WORDS = "the captain who the actor admired brought a new costume to the old theatre near a quiet harbour ß 東京".split()

draw = random.Random(5)
for name, count, rows in (("a", 700, 40), ("b", 500, 90)):
    texts = [f"{name}{number} " + " ".join(draw.choices(WORDS, k=draw.randint(3, 60))) for number in range(count)]
    table = pa.table({"id": list(range(count)), "text": texts, "url": [f"http://{name}/{n}" for n in range(count)]})
    pq.write_table(table, HERE / f"{name}.parquet", row_group_size=rows, compression="zstd", data_page_size=2048)
