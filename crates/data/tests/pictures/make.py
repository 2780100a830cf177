"""Writes the images of this folder and their pixels as decoded by Pillow (`expected.bin`): pip install pillow numpy; python make.py

Every stored image is 45 x 30 (not a multiple of a block) and of the same scene, so all together stay small.
expected.bin has, by name, width and height (u16, little-endian) and the RGB pixels."""

import struct
import zlib
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

here = Path(__file__).parent
W, H = 45, 30
y, x = np.mgrid[:H, :W]
scene = np.stack([128 + 100 * np.sin(x / 7.0), 128 + 90 * np.cos(y / 5.0 + x / 11.0), 255 * (((x - 22) ** 2 + (y - 14) ** 2) < 100)], -1)
rgb = Image.fromarray(scene.clip(0, 255).astype(np.uint8))
grey = rgb.convert("L")
alpha = Image.fromarray((x * 255 // (W - 1)).astype(np.uint8))
FORMS = ("*.jpg", "*.png", "*.webp")
for old in [path for form in FORMS for path in here.glob(form)]:
    old.unlink()


def jpeg(name, image=rgb, **options):
    image.save(here / f"{name}.jpg", quality=92, **options)


jpeg("420")
jpeg("422", subsampling=1)
jpeg("444", subsampling=0)
jpeg("progressive", progressive=True)
jpeg("restarts", restart_marker_blocks=4)
jpeg("grey", grey)
jpeg("cmyk", rgb.convert("CMYK"))
for orientation in (3, 6, 7):
    exif = Image.Exif()
    exif[0x0112] = orientation
    jpeg(f"turned{orientation}", exif=exif.tobytes())


def png(name, image=rgb, **options):
    image.save(here / f"{name}.png", **options)


png("rgb")
png("rgba", Image.merge("RGBA", (*rgb.split(), alpha)))
png("grey", grey)
png("greyalpha", Image.merge("LA", (grey, alpha)))
png("bits", grey.convert("1"))
palette = rgb.quantize(16)
png("palette", palette)
png("seethrough", palette, transparency=3)
png("animated", save_all=True, append_images=[grey.convert("RGB")], duration=100)


def chunk(kind, body):
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def raw(name, depth, colour, lines, interlace=0):
    """A PNG of a kind that Pillow does not write: 16 bits, or interlaced."""
    header = struct.pack(">IIBBBBB", W, H, depth, colour, 0, 0, interlace)
    body = zlib.compress(b"".join(b"\0" + line for line in lines), 9)
    (here / f"{name}.png").write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b""))


bytes8 = np.asarray(rgb)
wide = bytes8.astype(np.uint16) * 256 + np.arange(W, dtype=np.uint16)[None, :, None] * 5
raw("rgb16", 16, 2, [line.astype(">u2").tobytes() for line in wide])
raw("grey16", 16, 0, [line.astype(">u2").tobytes() for line in wide[..., 0]])
passes = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)]
raw("interlaced", 8, 2, [line.tobytes() for left, top, dx, dy in passes for line in bytes8[top::dy, left::dx]], 1)



def webp(name, image=rgb, **options):
    image.save(here / f"{name}.webp", **options)


rgba = Image.merge("RGBA", (*rgb.split(), alpha))
webp("lossy", quality=90)
webp("coarse", quality=10, method=6)
webp("lossy_alpha", rgba, quality=80)
webp("lossless", lossless=True)
webp("lossless_alpha", rgba, lossless=True, exact=True)
webp("few_colours", palette.convert("RGB"), lossless=True)
webp("moving", rgba, save_all=True, append_images=[rgba.rotate(180)], duration=100, lossless=True)
exif = Image.Exif()
exif[0x0112] = 6
webp("turned", exif=exif.tobytes(), quality=90)

with open(here / "expected.bin", "wb") as out:
    for path in sorted([path for form in FORMS for path in here.glob(form)], key=lambda path: path.name):
        image = ImageOps.exif_transpose(Image.open(path))
        if path.name in ("rgb16.png", "grey16.png"):
            upper = np.asarray(wide) >> 8
            pixels = upper if path.name == "rgb16.png" else np.repeat(upper[..., :1], 3, 2)
            image = Image.fromarray(pixels.astype(np.uint8))
        elif image.mode in ("RGBA", "LA") or "transparency" in image.info:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
        image = image.convert("RGB")
        out.write(struct.pack("<HH", *image.size) + image.tobytes())
        print(path.name, image.size)
