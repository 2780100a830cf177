"""Trains and writes adapters with PEFT, for small models of models/tests/golden/checkpoints: llama, and one with a tied head.

    pip install torch transformers peft safetensors
    python make_peft.py [NAME...]  # writes NAME/ beside this file
    python make_peft.py --check    # recomputes the results and compares them with the files

NAME/ has the files that `save_pretrained` writes (adapter_config.json, adapter_model.safetensors): the adapter before training,
with random B too, so that every tensor has a gradient from the first step on. It also has
    expected.safetensors   input_ids, labels i32 [B, T] (-1 ignored); loss.N and norm.N f32 [1] of ten steps of
                           torch.optim.AdamW; grad.NAME of the mean loss before the first, after.NAME after the last; logits
                           before the first, of cases with adapters of the embedding
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

HERE = Path(__file__).resolve().parent
CHECKPOINTS = HERE.parents[2] / "models/tests/golden/checkpoints"
# The model of a case, where it is not llama.
TIED = {"lora-ends-tied": "smollm2", "lora-tokens-tied": "smollm2"}
# The vocabulary size to which a model grows.
GROWN = {"lora-tokens": 55, "lora-tokens-tied": 55}
B, T = 2, 19
# The values that the test sets as optimizer.*; matrices decay, vectors do not.
ADAMW = dict(lr=3e-3, betas=(0.9, 0.95), eps=1e-8)
DECAY, CLIP, STEPS = 0.1, 1.0, 10

CASES = {
    # Every linear weight of every layer.
    "lora": dict(r=4, lora_alpha=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]),
    # Some weights of a merged product, one with another rank and alpha.
    "lora-some": dict(
        r=3, lora_alpha=6, target_modules=["q_proj", "v_proj"],
        rank_pattern={"layers.1.self_attn.v_proj": 2}, alpha_pattern={"layers.1.self_attn.v_proj": 7},
    ),
    "dora": dict(r=4, lora_alpha=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], use_dora=True),
    # Magnitudes of some columns of a merged product, and of one layer alone.
    "dora-some": dict(
        r=2, lora_alpha=5, use_dora=True,
        target_modules=["model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj", "down_proj"],
    ),
    # Of the embedding and the head. The library also writes both tables.
    "lora-ends": dict(
        r=3, lora_alpha=6, target_modules=["embed_tokens", "lm_head", "q_proj"], rank_pattern={"lm_head": 2}, alpha_pattern={"lm_head": 5},
    ),
    # A tied table, with separate adapters as embedding and as head.
    "lora-ends-tied": dict(r=3, lora_alpha=6, target_modules=["embed_tokens", "lm_head"]),
    # Two new tokens, whose tables are trained in full; a tied table.
    "lora-tokens": dict(r=2, lora_alpha=4, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"]),
    "lora-tokens-tied": dict(
        r=2, lora_alpha=4, target_modules=["q_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=True,
    ),
}


SEEDS = {name: seed for seed, name in enumerate(["dora", "dora-some", "lora", "lora-some", *list(CASES)[4:]], 1)}


def made(name):
    torch.manual_seed(SEEDS[name])
    base = AutoModelForCausalLM.from_pretrained(
        CHECKPOINTS / TIED.get(name, "llama"), dtype=torch.float32, attn_implementation="eager",
    )
    if name in GROWN:
        base.resize_token_embeddings(GROWN[name])
    model = get_peft_model(base, LoraConfig(**CASES[name]))
    with torch.no_grad():
        for path, p in model.named_parameters():
            if "lora_B" in path or "lora_embedding_A" in path:
                p.normal_(std=0.05)
            if "magnitude" in path:
                p.mul_(1 + 0.1 * torch.randn_like(p))
    return model


def tensors(model):
    return {name: t.detach().clone().contiguous() for name, t in get_peft_model_state_dict(model).items()}


def expected(model):
    generator = torch.Generator().manual_seed(7)
    vocab = model.config.vocab_size
    ids = torch.randint(3, vocab, (B, T), generator=generator)
    labels = torch.cat([ids[:, 1:], torch.full((B, 1), -1)], 1)
    labels[0, 4:7] = -1
    out = {"input_ids": ids.int(), "labels": labels.int()}
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() == 1]
    groups = [dict(params=matrices, weight_decay=DECAY), dict(params=vectors, weight_decay=0.0)]
    adamw = torch.optim.AdamW([g for g in groups if g["params"]], **ADAMW)
    if "embed_tokens" in model.peft_config["default"].target_modules:
        out["logits"] = model(ids).logits.detach().clone()
    for step in range(1, STEPS + 1):
        loss = F.cross_entropy(model(ids).logits.reshape(-1, vocab), labels.reshape(-1), ignore_index=-1)
        adamw.zero_grad()
        loss.backward()
        if step == 1:
            named = {p: n for n, p in model.named_parameters()}
            for p in trained:
                name = named[p].replace(".modules_to_save", "").replace(".default", "")
                name = name.replace("magnitude_vector.weight", "magnitude_vector")
                out[f"grad.{name}"] = p.grad.clone()
        norm = torch.nn.utils.clip_grad_norm_(trained, CLIP)
        out |= {f"loss.{step}": loss.detach().reshape(1), f"norm.{step}": norm.detach().reshape(1)}
        adamw.step()
    # Leaves out the unchanged tables that the library also writes, and a tied head.
    beside = [".base_layer.", ".original_module.", ".modules_to_save."]
    beside += ["lm_head.weight"] if model.peft_config["default"].ensure_weight_tying else []
    after = {name: t for name, t in tensors(model).items() if not any(part in name for part in beside)}
    out |= {f"after.{name}": t for name, t in after.items()}
    return {name: t.contiguous() for name, t in out.items()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=list(CASES), help="cases, or all")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    check = arguments.check
    for name in arguments.names:
        model = made(name)
        if check:
            want, got = load_file(HERE / name / "expected.safetensors"), expected(model)
            worst = max((want[k].double() - got[k].double()).abs().max().item() for k in want)
            print(f"{name}: off by {worst:.1e} at most")
            continue
        model.peft_config["default"].base_model_name_or_path = TIED.get(name, "llama")
        model.save_pretrained(HERE / name)
        (HERE / name / "README.md").unlink(missing_ok=True)
        save_file(expected(model), HERE / name / "expected.safetensors")


main()
