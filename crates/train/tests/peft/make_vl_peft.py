"""Makes ten steps of LoRA with PEFT on the text part of a tiny Qwen3-VL with a frozen tower.

    pip install torch transformers peft safetensors numpy
    python make_vl_peft.py            # writes vl-lora.safetensors beside this file
    python make_vl_peft.py --check    # recomputes it and compares it with the file

The model, its rows and its images are those of `qwen3-vl` in models/tests/golden (make_vl.py), in f64. The file holds, by PEFT's
names, before.NAME, grad.NAME of the mean loss before the first step and after.NAME after the last; and loss.N and norm.N [1] of ten
steps of torch.optim.AdamW, rate 3e-3, betas 0.9 and 0.95, decay 0.1, gradients clipped to a norm of 1.
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import Qwen3VLForConditionalGeneration

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[2] / "models/tests/golden"))
import make_vl  # noqa: E402

FILE = HERE / "vl-lora.safetensors"
LINEAR = "q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj"


def tensors(model):
    return {name: t.detach().clone() for name, t in get_peft_model_state_dict(model).items()}


def make():
    fixture, stored = load_file(make_vl.HERE / "qwen3-vl.safetensors"), load_file(make_vl.WEIGHTS)
    base = Qwen3VLForConditionalGeneration(make_vl.config()).eval().double()
    for name, p in base.named_parameters():
        p.data = make_vl.value(name, stored[name])
    torch.manual_seed(3)
    layers = rf"model\.language_model\.layers\.\d+\.(self_attn|mlp)\.({LINEAR})"
    model = get_peft_model(base, LoraConfig(r=2, lora_alpha=4, target_modules=layers)).double()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.copy_((p if "lora_A" in name else torch.randn_like(p) * 0.05).float().double())
    out = {f"before.{name}": t for name, t in tensors(model).items()}
    ids, labels = fixture["input_ids"].long(), fixture["labels"].long().flatten()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    adamw = torch.optim.AdamW(trained.values(), lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(1, 11):
        logits = make_vl.forward(model, ids, fixture["patches"], fixture["grids"].tolist())
        loss = F.cross_entropy(logits.flatten(0, 1), labels, ignore_index=-1)
        adamw.zero_grad()
        loss.backward()
        if step == 1:
            out |= {f"grad.{name.replace('.default', '')}": p.grad.clone() for name, p in trained.items()}
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        out |= {f"loss.{step}": loss.detach().reshape(1), f"norm.{step}": norm.detach().reshape(1)}
        adamw.step()
    out |= {f"after.{name}": t for name, t in tensors(model).items()}
    return {name: t.float().contiguous() for name, t in out.items()}


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--check", action="store_true")
    made = make()
    if p.parse_args().check:
        kept = load_file(FILE)
        worst = max((kept[name].double() - made[name].double()).abs().max().item() for name in kept)
        print(f"{FILE.name}: {len(kept)} tensors, off by {worst:.1e} at most")
        return
    save_file(made, FILE)
    print(f"{FILE.name} has {FILE.stat().st_size} bytes, losses {made['loss.1'].item():.4f} to {made['loss.10'].item():.4f}")


if __name__ == "__main__":
    main()
