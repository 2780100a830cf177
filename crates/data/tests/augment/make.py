"""Writes the results of timm for every operation of RandAugment on an image, and the rectangles that it erases: pip install timm pillow numpy; python make.py

expected.bin has the pixels of the image and of every result, three bytes (red, green, blue) each. expected.json has the operation,
level, argument and filter of every result, and the random numbers behind every erased rectangle."""

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from timm.data import auto_augment, random_erasing

here = Path(__file__).parent
W, H = 25, 18
FILL = (124, 116, 104)
y, x = np.mgrid[:H, :W]
draw = np.random.default_rng(3)
scene = np.stack([90 + 60 * np.sin(x / 4.0), 120 + 50 * np.cos(y / 3.0 + x / 7.0), 40 + 150 * (((x - 12) ** 2 + (y - 8) ** 2) < 36)], -1)
scene = (scene + draw.normal(size=scene.shape) * 9).clip(0, 255).astype(np.uint8)
image = Image.fromarray(scene)
FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
MOVES = ("Rotate", "ShearX", "ShearY", "TranslateXRel", "TranslateYRel")
SIGNED = MOVES + ("ColorIncreasing", "ContrastIncreasing", "BrightnessIncreasing", "SharpnessIncreasing")

results, blobs = [], [image.tobytes()]
for place, name in enumerate(auto_augment._RAND_INCREASING_TRANSFORMS):
    level_of = auto_augment.LEVEL_TO_ARG[name]
    for level in (2.0, 9.3) if level_of else (9.0,):
        for negative in (False, True) if name in SIGNED else (False,):
            auto_augment._randomly_negate = lambda value, negative=negative: -value if negative else value
            arguments = level_of(level, {}) if level_of else ()
            for filter in FILTERS if name in MOVES else ("bilinear",):
                made = auto_augment.NAME_TO_OP[name](image, *arguments, fillcolor=FILL, resample=FILTERS[filter])
                results.append({"operation": place, "name": name, "level": level, "sign": -1 if negative else 1, "filter": filter, "argument": float(arguments[0]) if arguments else 0.0})
                blobs.append(made.tobytes())

rectangles = []
for area, ratio in (((0.02, 1 / 3), 0.3), ((0.3, 0.9), 0.1)):
    for _ in range(12):
        drawn = [round(float(number), 5) for number in draw.random(40)]
        left = iter([0.0, *drawn])
        # Fixed random numbers, of which the first decides whether anything is erased.
        random_erasing.random.random = lambda: next(left)
        random_erasing.random.uniform = lambda low, high: low + (high - low) * next(left)
        random_erasing.random.randint = lambda low, high: low + int((high - low + 1) * next(left))
        erase = random_erasing.RandomErasing(probability=1.0, min_area=area[0], max_area=area[1], min_aspect=ratio, device="cpu")
        gone = erase(torch.ones(3, H, W))[0] == 0
        rows, columns = gone.any(1).nonzero().flatten(), gone.any(0).nonzero().flatten()
        box = [int(columns[0]), int(rows[0]), len(columns), len(rows)] if len(rows) else None
        rectangles.append({"area": area, "ratio": [ratio, 1 / ratio], "drawn": drawn, "rectangle": box})

(here / "expected.bin").write_bytes(b"".join(blobs))
text = {"width": W, "height": H, "fill": FILL, "results": results, "rectangles": rectangles}
(here / "expected.json").write_text(json.dumps(text) + "\n")
print(len(results), "results", len(rectangles), "rectangles", sum(box["rectangle"] is None for box in rectangles), "of them none")
