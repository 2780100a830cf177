"""Images per second of one core: `flatout data inspect --task images --time`, Pillow and torchvision on the same files, in interleaved rounds.

Two jobs are timed. `decode` decodes a JPEG or PNG to RGB. `fed` is the preprocessing for training: decoding, a random crop of 8% to
100% of the area, resizing to 224 x 224 with antialiasing, and a random flip, as bytes. The peers are written to win: files are in
memory, one process, one thread, no conversion that the next step does not need, and torchvision runs on tensors as well as on
Pillow's images. Time is CPU time of the process, which other programs on the machine disturb less.

The files are made here: scenes with the spectrum of photographs (1/f noise, edges, grain), 500 x 375 and alike at quality
90, similar to ImageNet's files, and larger ones of 2048 x 1536.

    pip install pillow torchvision numpy
    python bench/images_cpu.py target/ship/flatout --rounds 3
"""

import argparse
import io
import json
import pathlib
import statistics
import subprocess
import tempfile
import time

import numpy as np
import torch
from PIL import Image, features
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import v2


def scene(draw, width, height):
    """An image: noise with the spectrum of photographs, discs with hard edges, and grain."""
    out = np.zeros((height, width, 3))
    for cells in (2, 4, 8, 16, 32, 64, 128):
        shape = (max(2, height * cells // 256 + 2), max(2, width * cells // 256 + 2), 3)
        noise = draw.normal(size=shape)
        noise = 0.8 * noise.mean(2, keepdims=True) + 0.35 * noise
        planes = [Image.fromarray(noise[..., c].astype(np.float32)).resize((width, height), Image.BICUBIC) for c in range(3)]
        out += np.stack([np.asarray(plane) for plane in planes], -1) * cells**-0.75
    y, x = np.mgrid[:height, :width]
    for _ in range(12):
        centre = draw.integers(0, width), draw.integers(0, height)
        out[(x - centre[0]) ** 2 + (y - centre[1]) ** 2 < draw.integers(10, 80) ** 2] += draw.normal(size=3) * 0.5
    out = (out - out.mean()) / out.std() * 55 + 120 + draw.normal(size=out.shape) * 7
    return Image.fromarray(out.clip(0, 255).astype(np.uint8))


def write(folder):
    draw = np.random.default_rng(0)
    usual = [scene(draw, *size) for size in [(500, 375), (375, 500), (500, 333), (640, 480)] * 12]
    large = [scene(draw, 2048, 1536) for _ in range(6)]
    kinds = {
        "JPEG 4:2:0": (usual, "jpg", dict(quality=90)),
        "JPEG 4:4:4": (usual, "jpg", dict(quality=90, subsampling=0)),
        "JPEG progressive": (usual, "jpg", dict(quality=90, progressive=True)),
        "JPEG 2048 x 1536": (large, "jpg", dict(quality=90)),
        "PNG": (usual[:12], "png", dict()),
    }
    for kind, (images, ending, options) in kinds.items():
        for at, image in enumerate(images):
            # A folder per class; nothing is trained here, and two are the minimum.
            path = folder / kind.replace(" ", "-").replace(":", "") / str(at % 2) / f"{at:03}.{ending}"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path, **options)
    return list(kinds)


def rate(job, items, seconds):
    """Calls per second of the process's CPU time."""
    for item in items[:8]:
        job(item)
    done, began = 0, time.process_time()
    while (spent := time.process_time() - began) < seconds:
        job(items[done % len(items)])
        done += 1
    return done / spent


def peers(files, seconds):
    tensors = [torch.frombuffer(bytearray(file), dtype=torch.uint8) for file in files]
    crop = v2.Compose([v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip()])

    def pillow(file):
        image = Image.open(io.BytesIO(file))
        image.load()
        return image

    def vision(tensor):
        return decode_image(tensor, ImageReadMode.RGB)

    return {
        "Pillow": (rate(pillow, files, seconds), rate(lambda file: np.asarray(crop(pillow(file))), files, seconds)),
        "torchvision": (rate(vision, tensors, seconds), rate(lambda tensor: crop(vision(tensor)), tensors, seconds)),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("flatout", help="the program, as shipped")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.5, help="seconds per measurement")
    parser.add_argument("--folder", help="keep the files here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(arguments.folder or scratch)
        rows = []
        for kind in write(folder):
            where = folder / kind.replace(" ", "-").replace(":", "")
            files = [path.read_bytes() for path in sorted(where.rglob("*.*"))]
            seen = {}
            for _ in range(arguments.rounds):
                command = [arguments.flatout, "data", "inspect", "--task", "images", str(where), "--time", str(arguments.seconds), "--json"]
                speed = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["speed"]
                round_ = {"flatout": (speed["decoded"], speed["fed"]), **peers(files, arguments.seconds)}
                for name, pair in round_.items():
                    seen.setdefault(name, []).append(pair)
            middle = {name: [statistics.median(pair[at] for pair in pairs) for at in (0, 1)] for name, pairs in seen.items()}
            rows.append((kind, len(files[0]) // 1024, middle))
    print(f"Pillow {Image.__version__} with libjpeg-turbo {features.version('libjpeg_turbo')}, torch {torch.__version__}; "
          f"images per second of one core, median of {arguments.rounds} rounds")
    print("| files | job | flatout | Pillow | torchvision | against the faster |")
    print("|---|---|---|---|---|---|")
    for kind, kilobytes, middle in rows:
        for at, job in enumerate(("decode", "fed")):
            ours, others = middle["flatout"][at], [middle[name][at] for name in ("Pillow", "torchvision")]
            print(f"| {kind}, {kilobytes} KiB | {job} | {ours:.0f} | {others[0]:.0f} | {others[1]:.0f} | {ours / max(others):.2f} |")


if __name__ == "__main__":
    main()
