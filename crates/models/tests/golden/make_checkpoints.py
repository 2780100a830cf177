"""Generates checkpoints as other tools write them, with the reference library's logits and, for some, its AdamW steps.

    pip install torch transformers safetensors
    python make_checkpoints.py            # writes checkpoints/NAME/ beside this file
    python make_checkpoints.py --check    # recomputes the results and compares them with the files

checkpoints/NAME/ contains the output of `save_pretrained` (config.json, one safetensors file or shards with their index; some
have the older form of config.json), and
    expected.safetensors   input_ids i32 [B, T], logits f32 [B, T, V], computed in f32 from the stored weights
    steps.safetensors      two steps of torch.optim.AdamW: labels i32 [B, T] (-1 ignored), loss.N and norm.N f32 [1],
                           grad.NAME f32 of the mean loss before the first step, after.N.NAME f32 the weights after step N
"""

import argparse
import json
import math
import shutil
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM, Gemma3Config, Gemma3ForCausalLM, Gemma3ForConditionalGeneration, Gemma3TextConfig, GPT2Config,
    GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM,
)

HERE = Path(__file__).resolve().parent / "checkpoints"
B, T = 2, 19
# The values that tests set as optimizer.*; matrices decay, vectors do not.
ADAMW = dict(lr=3e-3, betas=(0.9, 0.95), eps=1e-8)
DECAY, CLIP, STEPS = 0.1, 1.0, 2


def llama(**changes):
    return LlamaForCausalLM(LlamaConfig(**(dict(
        vocab_size=53, hidden_size=20, num_hidden_layers=2, num_attention_heads=5, num_key_value_heads=1, head_dim=6,
        intermediate_size=27, max_position_embeddings=64, rms_norm_eps=1e-5, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ) | changes)))


def qwen3(**changes):
    return Qwen3ForCausalLM(Qwen3Config(**(dict(
        vocab_size=47, hidden_size=18, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=25, max_position_embeddings=64, rms_norm_eps=1e-6, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ) | changes)))


def gpt2(**changes):
    return GPT2LMHeadModel(GPT2Config(**(dict(
        vocab_size=51, n_embd=20, n_layer=2, n_head=4, n_inner=None, n_positions=24, activation_function="gelu_new",
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=50, eos_token_id=50,
    ) | changes)))


def gemma3_text(**changes):
    return Gemma3TextConfig(**(dict(
        vocab_size=45, hidden_size=12, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=1, head_dim=6,
        intermediate_size=18, max_position_embeddings=64, query_pre_attn_scalar=6, sliding_window=5,
        sliding_window_pattern=2, pad_token_id=0, rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
        },
    ) | changes))


def gemma3_images():
    """A text model with an image part."""
    vision = dict(
        hidden_size=6, intermediate_size=6, num_hidden_layers=1, num_attention_heads=1, image_size=8, patch_size=4,
        vision_use_head=False, model_type="siglip_vision_model",
    )
    text = gemma3_text(num_hidden_layers=2, pad_token_id=None)
    return Gemma3ForConditionalGeneration(Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=44, boi_token_index=43,
        eoi_token_index=42, eos_token_id=1,
    ))


def scaled(kind, **fields):
    return dict(rope_parameters={"rope_type": kind, "rope_theta": 10000.0} | fields)


def older(config):
    """The form of config.json before version 5: `rope_theta` beside `rope_scaling`, and `torch_dtype`."""
    rope = config.pop("rope_parameters")
    if "full_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
        del config["layer_types"]
        name = "rope_type"
    else:
        name = "type"
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {name: kind} | rope
    config["torch_dtype"] = config.pop("dtype", "float32")
    if config.get("head_dim") == config["hidden_size"] // config["num_attention_heads"]:
        del config["head_dim"]
    return config


# name: (model, saved type, largest shard, older config.json, tied head stored as well, AdamW steps)
CHECKPOINTS = {
    "llama": (lambda: llama(), torch.float32, None, False, False, True),
    "llama-bf16-shards": (lambda: llama(num_key_value_heads=5), torch.bfloat16, "3KB", False, False, False),
    "llama-f16": (lambda: llama(num_attention_heads=2, num_key_value_heads=2, head_dim=10), torch.float16, None, True, False, False),
    "smollm2": (
        lambda: llama(num_attention_heads=2, num_key_value_heads=1, head_dim=10, tie_word_embeddings=True,
                      rope_parameters={"rope_type": "default", "rope_theta": 100000.0}),
        torch.float32, None, True, False, False,
    ),
    "qwen3": (lambda: qwen3(), torch.float32, None, False, False, True),
    "qwen3-untied-shards": (lambda: qwen3(tie_word_embeddings=False, num_attention_heads=6), torch.float32, "6KB", True, False, False),
    "qwen3-head-stored": (lambda: qwen3(num_hidden_layers=1), torch.bfloat16, None, False, True, False),
    "llama-linear": (lambda: llama(**scaled("linear", factor=3.0)), torch.float32, None, True, False, False),
    "llama-llama3": (
        lambda: llama(**scaled("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                               original_max_position_embeddings=16)),
        torch.float32, None, False, False, False,
    ),
    "qwen3-yarn": (
        lambda: qwen3(**scaled("yarn", factor=4.0, original_max_position_embeddings=16)),
        torch.float32, None, True, False, False,
    ),
    "llama-biases": (lambda: llama(attention_bias=True, mlp_bias=True), torch.float32, None, False, False, False),
    "gpt2": (lambda: gpt2(), torch.float32, None, False, False, True),
    "gpt2-exact-shards": (lambda: gpt2(activation_function="gelu", n_inner=30), torch.bfloat16, "4KB", False, False, False),
    "gemma3": (lambda: Gemma3ForCausalLM(gemma3_text()), torch.float32, None, True, False, False),
    "gemma3-images": (gemma3_images, torch.float32, "3KB", False, False, False),
}


def randomise(model, seed):
    """Sets weights such that every part matters: norm weights away from one, attention away from uniform."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            p.data = torch.empty(p.shape).normal_(0.0, 0.3, generator=generator)
        elif p.dim() == 1:
            p.data = torch.empty(p.shape).uniform_(0.4, 1.6, generator=generator)
        else:
            std = 0.4 if "embed" in name else 1.2 / math.sqrt(p.shape[1])
            p.data = torch.empty(p.shape).normal_(0.0, std, generator=generator)


def write(folder, build, seed, dtype, shard, older_form, head_stored):
    model = build()
    randomise(model, seed)
    model = model.to(dtype)
    options = {} if shard is None else {"max_shard_size": shard}
    model.save_pretrained(folder, **options)
    (folder / "generation_config.json").unlink(missing_ok=True)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if older_form:
        path.write_text(json.dumps(older(config), indent=2) + "\n")
    if head_stored:
        path = folder / "model.safetensors"
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, path, metadata={"format": "pt"})


def results(folder, seed, steps):
    """The library's results for the folder: its logits, and its training steps."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    # The last tokens of a model that sees images are image placeholders.
    vocab = model.config.get_text_config().vocab_size - (3 if hasattr(model.config, "vision_config") else 0)
    tokens = torch.randint(0, vocab, (B, T + 1), generator=generator)
    ids, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.2] = -1
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
    made = {"expected": {"input_ids": ids.int(), "logits": logits.contiguous()}}
    if not steps:
        return made
    tensors = {"labels": labels.int()}
    named = dict(model.named_parameters())
    groups = [
        dict(params=[p for p in named.values() if p.dim() >= 2], weight_decay=DECAY),
        dict(params=[p for p in named.values() if p.dim() < 2], weight_decay=0.0),
    ]
    optimizer = torch.optim.AdamW(groups, **ADAMW)
    for step in range(1, STEPS + 1):
        logits = model(ids, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1)
        optimizer.zero_grad()
        loss.backward()
        if step == 1:
            tensors |= {f"grad.{name}": p.grad.clone() for name, p in named.items()}
        norm = torch.nn.utils.clip_grad_norm_(named.values(), CLIP)
        optimizer.step()
        tensors |= {f"loss.{step}": loss.detach()[None], f"norm.{step}": norm.detach()[None]}
        tensors |= {f"after.{step}.{name}": p.detach().clone() for name, p in named.items()}
    return made | {"steps": tensors}


def compare(path, tensors):
    with safe_open(path, "pt") as stored:
        assert set(stored.keys()) == set(tensors), f"{path} holds other tensors than this script makes"
        for name, tensor in tensors.items():
            off = (stored.get_tensor(name).double() - tensor.double()).norm() / tensor.double().norm().clamp(min=1)
            assert off < 1e-5, f"{path}: {name} is off by {off:.1e}"


def main():
    parser = argparse.ArgumentParser(description="Make or check the checkpoints.")
    parser.add_argument("--check", action="store_true", help="compare with the stored files and write nothing")
    check = parser.parse_args().check
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    for seed, (name, (build, dtype, shard, older_form, head_stored, steps)) in enumerate(CHECKPOINTS.items()):
        folder = HERE / name
        if not check:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            write(folder, build, 100 + seed, dtype, shard, older_form, head_stored)
        for what, tensors in results(folder, 500 + seed, steps).items():
            path = folder / f"{what}.safetensors"
            if check:
                compare(path, tensors)
            else:
                save_file(tensors, path)
        print(name, "agrees" if check else f"{sum(file.stat().st_size for file in folder.iterdir())} bytes")


if __name__ == "__main__":
    main()
