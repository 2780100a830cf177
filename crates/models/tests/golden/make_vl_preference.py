"""Generates the golden fixture of preferences about images: ten steps of DPO on the tiny Qwen3-VL beside this file, in PyTorch.

    pip install torch transformers safetensors numpy pillow
    python make_vl_preference.py            # writes vl-preference.safetensors beside this file
    python make_vl_preference.py --check    # recomputes and compares with the file instead of writing

The model is `qwen3-vl` of make_vl.py. A prompt is some words, an image and more words, and every pair has one. Each answer is
evaluated separately after its prompt, in f64; the reference is the model before the first step. The loss of a pair is
-log s(0.1 d), d = (a_c - a0_c) - (a_r - a0_r) with a the sum of an answer's log-probabilities under the model and a0 that under the
reference, and the loss of a step is the mean over all pairs. AdamW has rate 1e-3, betas 0.9 and 0.999, no decay and no clipping, and
trains everything, the tower too.

vl-preference.safetensors contains
    png.N                  u8   image N as the bytes of a PNG file
    tokens                 i32  the examples one after the other: for each pair the chosen answer after its prompt, then the rejected one
    lengths, prompts       i32  [2 P] tokens of each example, and of its prompt
    shown, starts          i32  [2 P] the image of each example, and the first of its tokens
    logp                   f32  [2 P] sums of log-probabilities under the reference
    grad.<name>            f32  the gradient of the first step, stored as in make_vl.py
    loss                   f32  [10]
"""

import argparse
import io
import math

import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import Qwen3VLForConditionalGeneration

import make_vl
from make_vl import HERE, IMAGE, MERGE, PATCH

FILE = HERE / "vl-preference.safetensors"
GRIDS = [(4, 6), (6, 2)]  # patches of each image: rows and columns
# For every pair: its image, words before and after it, and words of the chosen and the rejected answer.
PAIRS = [(0, 3, 2, 4, 4), (1, 1, 5, 2, 6), (0, 0, 4, 5, 1), (1, 4, 1, 3, 3)]
STEPS, RATE, BETA = 10, 1e-3, 0.1


def patches(pixels):
    """[P, rows columns channels] of an image [rows, columns, channels], block by block."""
    rows, columns = (side // (PATCH * MERGE) for side in pixels.shape[:2])
    parts = pixels.view(rows, MERGE, PATCH, columns, MERGE, PATCH, 3)
    return parts.permute(0, 3, 1, 4, 2, 5, 6).reshape(-1, PATCH * PATCH * 3)


def drawn():
    generator = torch.Generator().manual_seed(77)
    side = lambda patches: patches * PATCH
    images = [torch.randint(0, 256, (side(r), side(c), 3), generator=generator, dtype=torch.uint8) for r, c in GRIDS]
    words = lambda n: torch.randint(0, IMAGE, (n,), generator=generator).tolist()
    examples, prompts, starts = [], [], []
    for image, before, behind, *answers in PAIRS:
        tokens = GRIDS[image][0] * GRIDS[image][1] // MERGE**2
        prompt = words(before) + [IMAGE] * tokens + words(behind)
        for answer in answers:
            examples.append(prompt + words(answer))
            prompts.append(len(prompt))
            starts.append(before)
    return images, examples, prompts, starts


def logps(model, images, examples, prompts):
    sums = []
    for at, (tokens, prompt) in enumerate(zip(examples, prompts)):
        image, ids = PAIRS[at // 2][0], torch.tensor([tokens])
        logits = make_vl.forward(model, ids, patches(images[image]), [GRIDS[image]])[0, :-1]
        sums.append(F.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[prompt - 1:, 0].sum())
    return torch.stack(sums)


def make():
    stored = load_file(make_vl.WEIGHTS)
    model = Qwen3VLForConditionalGeneration(make_vl.config()).eval().double()
    for name, p in model.named_parameters():
        p.data = make_vl.value(name, stored[name])
    images, examples, prompts, starts = drawn()
    adamw = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    reference, losses, out = None, [], {}
    for step in range(STEPS):
        sums = logps(model, images, examples, prompts)
        reference = sums.detach() if reference is None else reference
        gain = sums - reference
        loss = -F.logsigmoid(BETA * (gain[0::2] - gain[1::2])).mean()
        adamw.zero_grad()
        loss.backward()
        if step == 0:
            out |= {f"grad.{name}": make_vl.sums(p.grad) for name, p in model.named_parameters()}
        losses.append(loss.item())
        adamw.step()
    assert abs(losses[0] - math.log(2)) < 1e-12 and losses[-1] < losses[0], losses
    print("ten steps:", [round(loss, 6) for loss in losses])
    out |= {"logp": reference, "loss": torch.tensor(losses, dtype=torch.float64)}
    tensors = {name: t.float().contiguous() for name, t in out.items()}
    of = lambda values: torch.tensor(values, dtype=torch.int32)
    tensors |= {
        "tokens": of(sum(examples, [])), "lengths": of([len(tokens) for tokens in examples]), "prompts": of(prompts),
        "shown": of([pair[0] for pair in PAIRS for _ in range(2)]), "starts": of(starts),
    }
    return tensors | {f"png.{number}": encoded(image) for number, image in enumerate(images)}


def encoded(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(file, "PNG")
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    torch.set_num_threads(1)
    made = make()
    if parser.parse_args().check:
        kept = load_file(FILE)
        assert set(kept) == set(made), "the file holds other tensors than this script makes"
        for name, tensor in made.items():
            off = (kept[name].double() - tensor.double()).norm() / tensor.double().norm().clamp(min=1e-3)
            assert off < 1e-6, f"{name} is off by {off:.1e}"
        return print(f"{FILE.name} agrees")
    save_file(made, FILE)
    print(f"{FILE.name} has {FILE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
