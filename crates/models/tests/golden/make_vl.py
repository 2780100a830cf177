"""Generates the golden fixtures of a decoder that sees images: a tiny random Qwen3-VL with the library's logits and gradients.

    pip install torch transformers safetensors numpy
    python make_vl.py            # writes qwen3-vl*.safetensors and qwen3-vl*.json beside this file
    python make_vl.py --check    # recomputes and compares with the files instead of writing

    python make_vl.py --checkpoint qwen3-vl FOLDER    # writes a variant as the library does, with room for 512 tokens
    flatout train tiny model.from=FOLDER train.steps=1 lr=1e-50 weight_decay=0 warmup_steps=0 model.context=16
    flatout export RUN --to FOLDER-OUT
    python make_vl.py --exported qwen3-vl FOLDER-OUT  # checks that the library loads it with the same logits

All variants share the weights of `qwen3-vl-weights.safetensors`, as bytes: n means (n - 128) / 128, or
1 + (n - 128) / 128 in norm weights, which is exact in f32 and bf16. A variant omits the tensors that it does not have.

    qwen3-vl          text, an image of 4 x 6 patches, text, one of 6 x 2, text; and a row of text alone
    qwen3-vl-ends     images first and last in a row; the head is the embedding
    qwen3-vl-plain    no DeepStack
    qwen3-vl-column   one block of DeepStack; merged grids of one column and of one row

NAME.safetensors contains
    input_ids       i32   [2, T]
    labels          i32   [2, T], -1 where nothing is learned
    patches         u8    [P, rows columns channels], patches of all images in the model's order
    grids           i32   [I, 2], patches of each image: rows and columns
    positions       i32   [3, 2, T], computed by the library: time, height and width
    logits          f32   [2, T, V]
    loss_sum        f32   [1], the sum over tokens of -log softmax(logits)[label]
    grad.<name>     f32   the gradient of loss_sum, complete if it has at most 64 elements, otherwise 64 sums of it
and NAME.json contains the model's `config.json`.

Sum k of a gradient adds element i with the sign of bit k of splitmix64(i): the squares of 64 such sums are on average
64 times its squared norm, so their relative distance is that of the gradients. That keeps files small.

The library's model runs unmodified, in f64; its text norms, rotations and interpolation weights are still computed in f32.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

HERE = Path(__file__).resolve().parent
WEIGHTS = HERE / "qwen3-vl-weights.safetensors"
VOCAB, IMAGE, VIDEO, START, END = 97, 90, 91, 92, 93
PATCH, MERGE, TIME = 4, 2, 2
SUMS = 64
# The number of words of the language that the recipe `tiny` learns.
WORDS = 512

# A row is a list of pieces: a number of text tokens, or an image of (rows, columns) of patches.
VARIANTS = {
    "qwen3-vl": (dict(), [[3, (4, 6), 2, (6, 2), 4], [18]]),
    "qwen3-vl-ends": (dict(tied=True), [[(4, 6), 5, (2, 4)], [13]]),
    "qwen3-vl-plain": (dict(deepstack=[]), [[2, (4, 4), 3], [9]]),
    "qwen3-vl-column": (dict(deepstack=[1]), [[2, (8, 2), 3, (2, 6), 1], [13]]),
}


def config(tied=False, deepstack=(0, 2, 3)):
    text = dict(
        hidden_size=48, num_hidden_layers=4, num_attention_heads=6, num_key_value_heads=2, head_dim=16, intermediate_size=80,
        vocab_size=VOCAB, max_position_embeddings=128, rms_norm_eps=1e-6, tie_word_embeddings=tied, rope_parameters={
            "rope_type": "default", "rope_theta": 5e6, "mrope_section": [4, 2, 2], "mrope_interleaved": True,
        },
    )
    vision = dict(
        hidden_size=40, depth=4, num_heads=5, intermediate_size=56, patch_size=PATCH, temporal_patch_size=TIME,
        spatial_merge_size=MERGE, out_hidden_size=48, num_position_embeddings=36, deepstack_visual_indexes=list(deepstack),
    )
    return Qwen3VLConfig(
        text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START,
        vision_end_token_id=END, tie_word_embeddings=tied, attn_implementation="eager",
    )


def draw():
    """Bytes of every weight of the largest variant: norms 1 + 0.2 N, vectors 0.1 N, matrices 0.2 N."""
    generator = torch.Generator().manual_seed(41)
    weights = {}
    for name, p in Qwen3VLForConditionalGeneration(config()).named_parameters():
        std = 0.1 if p.dim() == 1 and not is_norm(name) else 0.2
        drawn = torch.empty(p.shape).normal_(0.0, std, generator=generator)
        weights[name] = (drawn * 128).round().add(128).clamp(0, 255).to(torch.uint8)
    return weights


def is_norm(name):
    return "norm" in name and name.endswith(".weight")


def value(name, stored):
    return (stored.double() - 128) / 128 + is_norm(name)


def patches_of(grid, generator):
    """An image's patches as bytes [P, rows columns channels], block by block."""
    return torch.randint(0, 256, (grid[0] * grid[1], PATCH * PATCH * 3), generator=generator, dtype=torch.uint8)


def pixel_values(patches):
    """The same in the library's layout: channel, time, row, column; a still image is repeated for every frame."""
    normal = (patches.double() / 255 - 0.5) / 0.5
    frames = normal.view(-1, 1, PATCH, PATCH, 3).expand(-1, TIME, -1, -1, -1)
    return frames.permute(0, 4, 1, 2, 3).reshape(patches.shape[0], -1)


def row_of(stretches, generator):
    """Tokens of a row. The model does not need the marker tokens around an image, so there are none."""
    ids = []
    for stretch in stretches:
        if isinstance(stretch, int):
            ids += torch.randint(0, IMAGE, (stretch,), generator=generator).tolist()
        else:
            ids += [IMAGE] * (stretch[0] * stretch[1] // MERGE**2)
    return ids


def bits(count):
    """splitmix64 of 0 to count."""
    with np.errstate(over="ignore"):
        z = np.arange(count, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def sums(gradient):
    flat = gradient.flatten()
    if len(flat) <= SUMS:
        return flat
    signs = (bits(len(flat))[None, :] >> np.arange(SUMS, dtype=np.uint64)[:, None]) & np.uint64(1)
    return torch.from_numpy(1.0 - 2.0 * signs.astype(np.float64)) @ flat


def forward(model, ids, patches, grids):
    return model(
        input_ids=ids, pixel_values=pixel_values(patches), image_grid_thw=torch.tensor([[1, *grid] for grid in grids]),
        mm_token_type_ids=(ids == IMAGE).int(), attention_mask=torch.ones_like(ids), use_cache=False,
    ).logits


def make(name, stored):
    changes, layout = VARIANTS[name]
    described = config(**changes)
    model = Qwen3VLForConditionalGeneration(described).eval().double()
    for weight, p in model.named_parameters():
        # DeepStack's only merger is the first of all.
        p.data = value(weight, stored[weight])
    generator = torch.Generator().manual_seed(1000 + list(VARIANTS).index(name))
    grids = [stretch for row in layout for stretch in row if not isinstance(stretch, int)]
    patches = torch.cat([patches_of(grid, generator) for grid in grids])
    ids = torch.tensor([row_of(row, generator) for row in layout])
    labels = torch.randint(0, VOCAB, ids.shape, generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.25] = -1
    thw = torch.tensor([[1, *grid] for grid in grids])
    positions, _ = model.model.get_rope_index(ids, (ids == IMAGE).int(), image_grid_thw=thw)
    logits = forward(model, ids, patches, grids)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1, reduction="sum")
    named = dict(model.named_parameters())
    grads = torch.autograd.grad(loss, list(named.values()))
    exact = {"logits": logits.detach(), "loss_sum": loss.detach()[None]}
    exact |= {f"grad.{weight}": sums(g) for weight, g in zip(named, grads)}
    assert all(t.dtype == torch.float64 for t in exact.values()), name
    tensors = {n: t.float().contiguous() for n, t in exact.items()}
    tensors |= {
        "input_ids": ids.int(), "labels": labels.int(), "patches": patches, "grids": torch.tensor(grids).int(),
        "positions": positions.int().contiguous(),
    }
    written = json.loads(described.to_json_string(use_diff=False)) | {"architectures": ["Qwen3VLForConditionalGeneration"]}
    return tensors, shortened(written)


def shortened(config):
    """The fields that describe the model, without those that every config of the library has."""
    kept = ("architectures", "model_type", "text_config", "vision_config", "image_token_id", "video_token_id",
            "vision_start_token_id", "vision_end_token_id", "tie_word_embeddings", "dtype")
    text = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
            "intermediate_size", "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "hidden_act",
            "attention_bias")
    vision = ("model_type", "hidden_size", "depth", "num_heads", "intermediate_size", "patch_size", "temporal_patch_size",
              "spatial_merge_size", "out_hidden_size", "num_position_embeddings", "deepstack_visual_indexes", "hidden_act",
              "in_channels")
    part = lambda fields, names: {name: fields[name] for name in names if name in fields}
    config = part(config, kept)
    return config | {"text_config": part(config["text_config"], text), "vision_config": part(config["vision_config"], vision)}


def write_checkpoint(name, folder, stored):
    changes, _ = VARIANTS[name]
    described = config(**changes)
    described.text_config.vocab_size = WORDS
    model = Qwen3VLForConditionalGeneration(described)
    for weight, p in model.named_parameters():
        values = value(weight, stored[weight]).float()
        # Rows of further tokens repeat the first ones.
        p.data = values if values.shape == p.shape else values.repeat(-(-WORDS // VOCAB), 1)[:WORDS]
    model.save_pretrained(folder)


def check_export(name, folder):
    model, loading = Qwen3VLForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True,
    )
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), loading
    wanted = load_file(HERE / f"{name}.safetensors")
    logits = forward(model.eval().double(), wanted["input_ids"].long(), wanted["patches"], wanted["grids"].tolist())
    off = (logits[..., :VOCAB] - wanted["logits"].double()).norm() / wanted["logits"].double().norm()
    print(f"{name}: logits of the export are off by {off:.1e}")
    assert off < 1e-6


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--checkpoint", nargs=2, metavar=("NAME", "FOLDER"))
    parser.add_argument("--exported", nargs=2, metavar=("NAME", "FOLDER"))
    args = parser.parse_args()
    check = args.check
    torch.set_num_threads(1)
    if args.checkpoint:
        return write_checkpoint(*args.checkpoint, load_file(WEIGHTS))
    if args.exported:
        return check_export(*args.exported)
    if not check:
        save_file(draw(), WEIGHTS)
    stored = load_file(WEIGHTS)
    for name in VARIANTS:
        tensors, described = make(name, stored)
        file = HERE / f"{name}.safetensors"
        if check:
            old = load_file(file)
            assert set(old) == set(tensors), f"{name} holds other tensors than this script makes"
            for tensor, made in tensors.items():
                off = (old[tensor].double() - made.double()).norm() / made.double().norm().clamp(min=1e-3)
                assert off < 1e-6, f"{name}: {tensor} is off by {off:.1e}"
            assert json.loads((HERE / f"{name}.json").read_text()) == described, name
        else:
            save_file(tensors, file)
            (HERE / f"{name}.json").write_text(json.dumps(described, indent=2) + "\n")
        print(name, "agrees" if check else f"{file.stat().st_size} bytes")
    print(f"{WEIGHTS.name} has {WEIGHTS.stat().st_size} bytes")


if __name__ == "__main__":
    main()
