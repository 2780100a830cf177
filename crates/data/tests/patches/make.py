"""Writes images of unusual sizes, and their patches and those of ../pictures by transformers' processor for Qwen3-VL.

    pip install torch torchvision transformers pillow numpy xxhash
    python make.py

expected.json has one entry per case: the image, the limits of its area, the grid, the hash of all bytes (XXH3, 128 bits) and the
indices of the patches whose bytes are concatenated in expected.bin.z. Bytes of a patch are in rows, three (red, green, blue) per
pixel, as the processor has them before normalisation."""

import json
import zlib
from io import BytesIO
from pathlib import Path

import numpy as np
import xxhash
from PIL import Image, ImageOps
from transformers import Qwen2VLImageProcessor

HERE = Path(__file__).parent
PICTURES = HERE.parent / "pictures"
PATCH, MERGE = 16, 2
PUBLISHED = (65536, 16777216)
# Sides of at least 32 pixels, so that small images stay small.
SMALL = (1024, 16777216)
SAMPLES = 4
random = np.random.default_rng(7)


def noise(width, height, levels=256):
    return Image.fromarray((random.integers(0, levels, (height, width, 3)) * (255 // (levels - 1))).astype(np.uint8))


def gradient(width, height):
    y, x = np.mgrid[:height, :width]
    return Image.fromarray(np.stack([x * 255 // max(width - 1, 1), y * 255 // max(height - 1, 1), (x + y) % 256], -1).astype(np.uint8))


def scene(width, height):
    """A synthetic photograph with edges, waves and colours, which compresses better than a real one."""
    y, x = np.mgrid[:height, :width]
    disc = ((x - width / 2) ** 2 + (y - height / 3) ** 2) < (min(width, height) / 4) ** 2
    waves = [128 + 100 * np.sin(x / 17.0), 128 + 90 * np.cos(y / 9.0 + x / 31.0), 60 + 180 * disc]
    return Image.fromarray(np.stack(waves, -1).clip(0, 255).astype(np.uint8))


def checks(width, height):
    """Black and white squares of three pixels: every filter overshoots."""
    y, x = np.mgrid[:height, :width]
    return Image.fromarray((((x // 3 + y // 3) % 2) * 255).astype(np.uint8))


for old in [*HERE.glob("*.jpg"), *HERE.glob("*.png")]:
    old.unlink()


def png(name, image, **options):
    image.save(HERE / f"{name}.png", optimize=True, **options)


def jpeg(name, image, quality=85, **options):
    image.save(HERE / f"{name}.jpg", quality=quality, optimize=True, **options)


def turned(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif.tobytes()


png("one", noise(1, 1))
png("tall-1x200", noise(1, 200))
png("wide-200x1", noise(200, 1))
png("wide-900x33", noise(900, 33, 2))
png("tall-33x900", gradient(33, 900))
png("noise-enlarged", noise(50, 40))
png("noise-shrunk", noise(96, 70))
png("checks-shrunk", checks(700, 500))
png("checks-enlarged", checks(60, 90))
png("gradient-shrunk", gradient(640, 480))
png("fits-as-it-is", noise(64, 96, 6))
png("fits-across", noise(64, 83, 6))
png("fits-down", noise(77, 96, 6))
png("shrunk-thirty-times", Image.fromarray(np.asarray(checks(2000, 1500)) // 5 * np.uint8(3)))
png("palette", scene(120, 80).quantize(32))
png("grey", scene(130, 75).convert("L"))
fade = Image.fromarray((np.mgrid[:70, :110][1] * 255 // 109).astype(np.uint8))
png("alpha", Image.merge("RGBA", (*scene(110, 70).split(), fade)))
png("grey-alpha", Image.merge("LA", (scene(110, 70).convert("L"), fade)))
png("turned8", gradient(100, 60), exif=turned(8))
for orientation in (2, 4, 5, 8):
    jpeg(f"turned{orientation}", scene(90, 60), exif=turned(orientation))
jpeg("scene-420", scene(333, 250))
jpeg("scene-444-shrunk", scene(400, 300), subsampling=0)
jpeg("progressive", scene(301, 203), progressive=True)
jpeg("grey-progressive", scene(301, 203).convert("L"), progressive=True)
jpeg("noise-coarse", noise(70, 60), quality=40)
jpeg("cmyk", scene(150, 110).convert("CMYK"))

# YCCK, which Pillow does not write: luminance and chroma in the channels of CMYK, with Adobe's marker for it.
light, blue, red = scene(150, 110).convert("YCbCr").split()
black = Image.fromarray(np.full((110, 150), 40, np.uint8))
stored = Image.merge("CMYK", [Image.fromarray(255 - np.asarray(part)) for part in (light, blue, red, black)])
buffer = BytesIO()
stored.save(buffer, "JPEG", quality=85)
ycck = bytearray(buffer.getvalue())
note = ycck.index(b"Adobe")
assert ycck[note + 11] == 0
ycck[note + 11] = 2
(HERE / "ycck.jpg").write_bytes(ycck)

CASES = [(path, SMALL) for path in sorted(PICTURES.glob("*.*g")) if path.suffix in (".jpg", ".png")]
small = {"noise-shrunk", "checks-shrunk", "gradient-shrunk", "fits-as-it-is", "fits-across", "fits-down", "scene-444-shrunk"}
limits = {"checks-shrunk": (1024, 40000), "gradient-shrunk": (1024, 20000), "noise-shrunk": (1024, 3000)}
limits |= {"scene-444-shrunk": (1024, 30000), "shrunk-thirty-times": (1024, 4096)}
for path in sorted([*HERE.glob("*.jpg"), *HERE.glob("*.png")]):
    CASES.append((path, limits.get(path.stem, SMALL if path.stem in small else PUBLISHED)))


def opened(path):
    image = ImageOps.exif_transpose(Image.open(path))
    if path.name in ("rgb16.png", "grey16.png"):
        # The upper 8 of 16 bits, which the library leaves to the reader of the file.
        pixels = np.asarray(Image.open(path).convert("I")) >> 8 if path.name == "grey16.png" else np.asarray(image)
        image = Image.fromarray(pixels.astype(np.uint8))
    return image


described, kept = [], b""
for path, (least, most) in CASES:
    processor = Qwen2VLImageProcessor(
        patch_size=PATCH, merge_size=MERGE, size={"shortest_edge": least, "longest_edge": most},
        image_mean=[0.5] * 3, image_std=[0.5] * 3,
    )
    made = processor(opened(path), return_tensors="np")
    time, rows, columns = (int(count) for count in made["image_grid_thw"][0])
    values = made["pixel_values"].reshape(rows * columns, 3, 2, PATCH, PATCH)
    assert time == 1 and (values[:, :, 0] == values[:, :, 1]).all(), "a still image is twice the same"
    levels = values[:, :, 0].astype(np.float64) * 127.5 + 127.5
    assert np.abs(levels - levels.round()).max() < 1e-4, "the processor normalises bytes"
    patches = levels.round().astype(np.uint8).transpose(0, 2, 3, 1)
    samples = sorted({int(at) for at in np.linspace(0, len(patches) - 1, SAMPLES).round()})
    kept += patches[samples].tobytes()
    described.append({
        "image": path.name, "folder": path.parent.name, "least": least, "most": most, "grid": [rows, columns],
        "hash": xxhash.xxh3_128_hexdigest(np.ascontiguousarray(patches).tobytes()), "samples": samples,
    })
lines = ",\n".join(json.dumps(case) for case in described)
(HERE / "expected.json").write_text(f"[\n{lines}\n]\n")
(HERE / "expected.bin.z").write_bytes(zlib.compress(kept, 9))
print(f"{len(described)} cases, {len(kept)} bytes of samples")
