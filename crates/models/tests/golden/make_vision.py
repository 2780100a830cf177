"""Generates the golden fixtures of the vision transformer: tiny random checkpoints with a reference's logits and gradients.

    pip install torch transformers timm safetensors numpy
    python make_vision.py            # writes NAME.safetensors and NAME.json beside this file
    python make_vision.py --check    # recomputes and compares with the files instead of writing

`dinov2` is Dinov2ForImageClassification on images with another grid than its positions, which are resampled,
`dinov2-swiglu` the same with a gated feed-forward, `vit` is ViTForImageClassification on such images, and
`dinov2-registers` Dinov2WithRegistersForImageClassification on such images; `timm-vit` is timm's VisionTransformer,
`deit`, `clip` and `siglip` are the library's classifiers of these names on such images; `timm-registers` has registers without
positions, `timm-clip` the norm before the blocks and quick GELU, and `timm-pooled` no class token and a norm after mean pooling;
`timm-vit-mean` one whose head reads the mean of the patches, `timm-vit-scaled` the first with LayerScale on larger images than
its positions are for, `timm-vit-small` on smaller ones, and `timm-vit-wide` on images that are not square. All of them resample
their positions themselves.

NAME.safetensors contains
    weight.<name>   f32   every parameter that the classifier reads
    pixels          u8    [B, Y, X, 3]
    labels          i32   [B]
    label_weights   f32   [B]
    logits          f32   [B, C]
    loss_sum        f32   [1], the sum over images of weight * -log softmax(logits)[label]
    grad.<name>     f32   the gradient of loss_sum
and NAME.json contains the model's `config.json` with two further fields, the images' width `image_side` and `image_height`.

The weights are f32 numbers; everything else is computed from them in f64 and rounded to f32 once. Pixels are normalised
by the configuration's mean and deviation in f64 as well.
"""

import argparse
import json
from functools import partial
from math import sqrt
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from timm.models.vision_transformer import VisionTransformer
from torch.overrides import TorchFunctionMode
from transformers import (
    CLIPConfig, CLIPForImageClassification, DeiTConfig, DeiTForImageClassification, Dinov2Config, Dinov2ForImageClassification, Dinov2WithRegistersConfig, Dinov2WithRegistersForImageClassification,
    SiglipConfig, SiglipForImageClassification, ViTConfig, ViTForImageClassification,
)

HERE = Path(__file__).resolve().parent
B, C = 3, 5
IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
HALF = ([0.5] * 3, [0.5] * 3)
OPENAI = ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])


class Float64Everywhere(TorchFunctionMode):
    """Replaces every explicit conversion to f32 by one to f64."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        function = torch.Tensor.double if function is torch.Tensor.float else function
        lift = lambda value: torch.float64 if value is torch.float32 else value
        return function(*map(lift, args), **{name: lift(value) for name, value in (kwargs or {}).items()})


def library(kind, config, **more):
    labels = {i: f"class {i}" for i in range(C)}
    config = config(
        hidden_size=12, num_hidden_layers=2, num_attention_heads=2, image_size=15, patch_size=3, attn_implementation="eager",
        id2label=labels, label2id={name: i for i, name in labels.items()}, **more,
    )
    model = kind(config)
    written = config.to_dict() | {"architectures": [kind.__name__]}
    return model, {name: value for name, value in written.items() if isinstance(value, (str, int, float, list, dict, bool))}


def dinov2(kind, config, **more):
    return library(kind, config, mlp_ratio=3, layer_norm_eps=1e-6, layerscale_value=1.0, **more)


def tower(kind, config, **more):
    """A model of images and texts whose classifier only reads the image tower."""
    vision = dict(
        hidden_size=12, num_hidden_layers=2, num_attention_heads=2, intermediate_size=20, image_size=15, patch_size=3, **more,
    )
    labels = {i: f"class {i}" for i in range(C)}
    text = dict(hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4, vocab_size=9)
    config = config(
        vision_config=vision, text_config=text, id2label=labels, label2id={name: i for i, name in labels.items()},
        attn_implementation="eager",
    )
    model = kind(config)
    written = {"architectures": [kind.__name__], "model_type": config.model_type, "vision_config": vision}
    return model, written | {"id2label": labels}


def timm(image, table, scale, pool=None, **more):
    args = dict(img_size=table, patch_size=4, embed_dim=12, depth=2, num_heads=3, mlp_ratio=2.5, num_classes=C)
    args |= {"init_values": scale} if scale else {}
    # By default timm norms the pooled value.
    args |= {"global_pool": pool, "fc_norm": False} if pool else {}
    args |= more
    is_clip = args.get("pre_norm", False)
    norm = {"norm_layer": partial(torch.nn.LayerNorm, eps=1e-5)} if is_clip else {}
    model = VisionTransformer(**args, **norm, dynamic_img_size=image != table)
    config = {
        "architecture": "vit_base_patch16_clip_224" if is_clip else "vit_tiny_patch16_224", "num_classes": C, "num_features": 12, "global_pool": pool or "token",
        "model_args": args, "pretrained_cfg": {"mean": HALF[0], "std": HALF[1], "input_size": [3, table, table]},
    }
    return model, config


MODELS = {
    "dinov2": (lambda: dinov2(Dinov2ForImageClassification, Dinov2Config), 12, IMAGENET, 31),
    "dinov2-registers": (
        lambda: dinov2(Dinov2WithRegistersForImageClassification, Dinov2WithRegistersConfig, num_register_tokens=3),
        12, IMAGENET, 32,
    ),
    "dinov2-swiglu": (
        lambda: dinov2(Dinov2ForImageClassification, Dinov2Config, use_swiglu_ffn=True), 12, IMAGENET, 38,
    ),
    "vit": (
        lambda: library(ViTForImageClassification, ViTConfig, intermediate_size=20, layer_norm_eps=1e-12), 12, IMAGENET, 39,
    ),
    "deit": (
        lambda: library(DeiTForImageClassification, DeiTConfig, intermediate_size=20, layer_norm_eps=1e-12), 12, IMAGENET, 40,
    ),
    "clip": (lambda: tower(CLIPForImageClassification, CLIPConfig), 12, OPENAI, 41),
    "siglip": (lambda: tower(SiglipForImageClassification, SiglipConfig, vision_use_head=False), 12, HALF, 42),
    "timm-registers": (lambda: timm(12, 20, 1e-5, depth=1, reg_tokens=2, no_embed_class=True), 12, HALF, 43),
    "timm-clip": (lambda: timm(16, 16, None, depth=1, pre_norm=True, act_layer="quick_gelu"), 16, HALF, 44),
    "timm-pooled": (
        lambda: timm(20, 12, None, "avg", depth=1, class_token=False, reg_tokens=2, fc_norm=True, act_layer="gelu_tanh"),
        20, HALF, 45,
    ),
    "timm-vit": (lambda: timm(16, 16, None), 16, HALF, 33),
    "timm-vit-mean": (lambda: timm(16, 16, None, "avg"), 16, HALF, 35),
    "timm-vit-scaled": (lambda: timm(20, 12, 1e-5), 20, HALF, 34),
    "timm-vit-small": (lambda: timm(12, 20, None), 12, HALF, 37),
    "timm-vit-wide": (lambda: timm(20, 12, None), (8, 20), HALF, 36),
}


def randomise(model, seed):
    """Sets weights such that every part matters: factors away from one, attention away from uniform."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if p.dim() == 1 and not name.endswith("bias"):
            p.data = torch.empty(p.shape).uniform_(0.4, 1.6, generator=generator)
        elif p.dim() == 1 or "token" in name or "pos" in name:
            p.data = torch.empty(p.shape).normal_(0.0, 0.3, generator=generator)
        else:
            p.data = torch.empty(p.shape).normal_(0.0, 1.2 / sqrt(p[0].numel()), generator=generator)


def published(name):
    """A parameter's name in published files, where the library's newer module names differ."""
    for ours, theirs in [("q", "attention.query"), ("k", "attention.key"), ("v", "attention.value"), ("o", "output.dense")]:
        name = name.replace(f".attention.{ours}_proj.", f".attention.{theirs}.")
    for base in ["vit", "deit"]:
        name = name.replace(f"{base}.layers.", f"{base}.encoder.layer.")
    name = name.replace(".mlp.down_proj.", ".mlp.weights_out.")
    if name.startswith(("vit.", "deit.")):
        name = name.replace(".mlp.fc1.", ".intermediate.dense.").replace(".mlp.fc2.", ".output.dense.")
    return name


def is_read(model, name):
    """Whether a classifier reads a parameter: the mask token belongs to pretraining, and CLIP's last norm to the
    embedding that is compared with texts."""
    is_last_norm = isinstance(model, CLIPForImageClassification) and ".post_layernorm." in name
    return not name.endswith("mask_token") and not is_last_norm


def joined(tensors):
    """Tensors in the layout of published files: gate and up concatenated."""
    gates = [name for name in tensors if ".mlp.gate_proj." in name]
    for gate in gates:
        up = gate.replace("gate_proj", "up_proj")
        tensors[gate.replace("gate_proj", "weights_in")] = torch.cat([tensors.pop(gate), tensors.pop(up)])
    return tensors


def make(name):
    build, side, (mean, std), seed = MODELS[name]
    height, width = side if isinstance(side, tuple) else (side, side)
    torch.manual_seed(seed)
    model, config = build()
    model.eval()
    randomise(model, seed)
    generator = torch.Generator().manual_seed(seed + 100)
    pixels = torch.randint(0, 256, (B, height, width, 3), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, C, (B,), generator=generator)
    weights = torch.tensor([1.0, 0.5, 2.0])
    used = {n: p for n, p in model.named_parameters() if is_read(model, n)}
    tensors = joined({f"weight.{published(n)}": p.detach().clone() for n, p in used.items()})
    model.double()
    with Float64Everywhere():
        normal = (pixels.double() / 255 - torch.tensor(mean, dtype=torch.float64)) / torch.tensor(std, dtype=torch.float64)
        is_timm = name.startswith("timm")
        resampled = {"interpolate_pos_encoding": True} if name in ["vit", "deit", "clip", "siglip"] else {}
        run = model if is_timm else (lambda x: model(pixel_values=x, **resampled).logits)
        logits = run(normal.permute(0, 3, 1, 2))
        loss = (F.cross_entropy(logits, labels, reduction="none") * weights.double()).sum()
        used = {n: p for n, p in model.named_parameters() if is_read(model, n)}
        grads = torch.autograd.grad(loss, list(used.values()))
    exact = {"logits": logits.detach(), "loss_sum": loss.detach()[None]}
    exact |= joined({f"grad.{published(n)}": g for n, g in zip(used, grads)})
    assert all(t.dtype == torch.float64 and t.norm() > 0 for t in exact.values()), name
    tensors |= {n: t.float().contiguous() for n, t in exact.items()}
    tensors |= {"pixels": pixels, "labels": labels.int(), "label_weights": weights}
    return tensors, config | {"image_side": width} | ({"image_height": height} if height != width else {})


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    parser.add_argument("names", nargs="*", help="the models to make; all where none is named")
    arguments = parser.parse_args()
    check = arguments.check
    for name in arguments.names or MODELS:
        tensors, config = make(name)
        file = HERE / f"{name}.safetensors"
        if check:
            stored = load_file(file)
            off = max(((stored[n].double() - t.double()).norm() / t.double().norm()).item() for n, t in tensors.items())
            assert stored.keys() == tensors.keys() and off < 1e-6, f"{name} is off by {off:.1e}"
            print(f"{name}: within {off:.1e}")
        else:
            save_file(tensors, file)
            (HERE / f"{name}.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
            print(f"{name}: {file.stat().st_size} bytes")


main()
