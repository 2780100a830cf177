"""Writes the results of published image processors: expected.json with one entry per case, and their pixels in expected.bin.

    pip install torch torchvision transformers timm pillow numpy
    python make.py

The images are those of ../pictures. Processors are those of `transformers`, with both of its backends, and timm's evaluation
transform. None rescales or normalises, so results are bytes: rows from the top, three (red, green, blue) per pixel."""

import json
from pathlib import Path

import numpy as np
from PIL import Image
from timm.data import create_transform
from transformers import BitImageProcessor, BitImageProcessorPil, ViTImageProcessor, ViTImageProcessorPil

HERE = Path(__file__).parent
FILTERS = {"lanczos": 1, "bilinear": 2, "bicubic": 3}
PLAIN = dict(do_rescale=False, do_normalize=False, do_convert_rgb=True)


def processed(processor, picture):
    pixels = np.asarray(processor(picture, return_tensors="np")["pixel_values"][0])
    return pixels.transpose(1, 2, 0)


def cut(kind, shorter, side, name):
    return kind(size={"shortest_edge": shorter}, crop_size=side, resample=FILTERS[name], **PLAIN)


def stretched(kind, side, name):
    return kind(size={"height": side, "width": side}, resample=FILTERS[name], **PLAIN)


def timm(shorter, side, name):
    transform = create_transform(side, is_training=False, interpolation=name, crop_pct=side / shorter, normalize=False)
    return lambda picture, **_: {"pixel_values": np.asarray(transform(picture))[None]}


CASES = []
for name in FILTERS:
    for shorter, side in [(20, 16), (44, 32), (30, 30)]:
        makers = {"Bit": BitImageProcessor, "BitPil": BitImageProcessorPil}
        # The fast backend has no filter of this kind.
        makers = {"BitPil": BitImageProcessorPil} if name == "lanczos" else makers
        CASES += [(kind, cut(made, shorter, side, name), name, [shorter], side) for kind, made in makers.items()]
CASES += [("ViT", stretched(ViTImageProcessor, 24, "bilinear"), "bilinear", [24, 24], 24)]
CASES += [("ViTPil", stretched(ViTImageProcessorPil, 40, "bicubic"), "bicubic", [40, 40], 40)]
# With an odd number of pixels to crop, timm cuts at the even offset and the others at the lower one: here it is even.
CASES += [("timm", timm(20, 16, "bicubic"), "bicubic", [20], 16)]

described, pixels = [], b""
for picture in ["rgb.png", "444.jpg", "420.jpg"]:
    for kind, processor, name, resize, side in CASES:
        out = processed(processor, Image.open(HERE.parent / "pictures" / picture).convert("RGB"))
        out = out if out.dtype == np.uint8 else out.round().clip(0, 255).astype(np.uint8)
        assert out.shape == (side, side, 3), (kind, out.shape)
        pixels += out.tobytes()
        described.append({"picture": picture, "kind": kind, "filter": name, "resize": resize, "side": side})
(HERE / "expected.json").write_text(json.dumps(described, indent=1) + "\n")
(HERE / "expected.bin").write_bytes(pixels)
print(f"{len(described)} cases, {len(pixels)} bytes")
