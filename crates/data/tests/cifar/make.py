"""Writes tiny files of CIFAR in their Python form, by several protocols: pip install numpy; python make.py

The published files were written by Python 2, whose texts are bytes: `old` is of that kind. Python 3 writes the same dictionary
to the others. Byte p of plane c of image i is (7 p + 31 i + 50 c) mod 256."""

import io
import pickle
from pathlib import Path

import numpy as np

here = Path(__file__).parent
PLACES = np.arange(1024)


def images(count):
    return np.stack([np.concatenate([(7 * PLACES + 31 * i + 50 * c) % 256 for c in range(3)]) for i in range(count)]).astype(np.uint8)


class Old(pickle._Pickler):
    """Texts and bytes as Python 2 writes them."""

    dispatch = dict(pickle._Pickler.dispatch)

    def save_old(self, text):
        text = text.encode() if isinstance(text, str) else text
        self.write(b"U" + bytes([len(text)]) + text if len(text) < 256 else b"T" + len(text).to_bytes(4, "little") + text)
        self.memoize(text)

    dispatch[str] = dispatch[bytes] = save_old


def old(value):
    out = io.BytesIO()
    Old(out, 2, fix_imports=False).dump(value)
    return out.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


ten = {b"batch_label": b"training batch 1 of 5", b"labels": [3, 9], b"data": images(2), b"filenames": [b"a_s_000001.png", b"b_s_000002.png"]}
hundred = {b"filenames": [b"x.png", b"y.png"], b"batch_label": b"training batch 1 of 1", b"fine_labels": [77, 5], b"coarse_labels": [1, 19], b"data": images(2)}
turned = {b"labels": [3, 9], b"data": np.asfortranarray(images(2))}
(here / "ten-old").write_bytes(old(ten))
(here / "hundred-old").write_bytes(old(hundred))
(here / "turned-old").write_bytes(old(turned))
for protocol in (2, 4, 5):
    (here / f"ten-{protocol}").write_bytes(pickle.dumps(ten, protocol))
names = [b"airplane", b"automobile", b"bird", b"cat", b"deer", b"dog", b"frog", b"horse", b"ship", b"truck"]
(here / "meta-old").write_bytes(old({b"num_cases_per_batch": 10000, b"label_names": names, b"num_vis": 3072}))


class Harm:
    """An object whose pickle would call a function in a usual reader."""

    def __reduce__(self):
        import os

        return os.system, ("echo called",)


(here / "harm").write_bytes(pickle.dumps({b"labels": [1, 2], b"data": Harm()}, 2))
for path in sorted(here.glob("*-*")):
    print(path.name, path.stat().st_size)
