"""Measures fine-tuning of Gemma-3-1B as a bidirectional encoder of text pairs with PEFT in PyTorch: DoRA or LoRA on q, k, v and o over
frozen bf16 weights, masked mean pooling, two classes, fused AdamW, bf16 autocast.

    python bench/peers/gemma_peft.py --rows 32 --length 512
    python bench/peers/gemma_peft.py --rows 32 --mean 512 200 --compile whole
    python bench/peers/gemma_peft.py --adapter lora --layers 4
    python bench/peers/gemma_peft.py --device cpu --rows 2 --length 32 --mean 32 12 --layers 6 --width 64 --vocab 1000

Weights are random: speed does not depend on them. Each mean below --length is a measurement with lognormal lengths of that mean
up to --length, in batches grouped by length and padded to their longest, a multiple of 8 (peers/lengths.py); a mean of --length
is one with rows of equal length. `--compile layers` compiles the two kinds of layer instead of the whole model, which
starts in a fraction of the time. Where lengths vary, every timed shape has run once before. Prints a JSON line per
measurement: samples_per_second (over groups of steps, the median, or the mean where lengths vary), tokens_per_second (real ones),
step_ms, peak_bytes, card_bytes, first_steady_seconds.
"""

import argparse
import json
import os
import statistics
import time

# With batches of many shapes the allocator would otherwise keep allocating from the driver.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch
import torch.nn as nn
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from transformers import Gemma3TextConfig, Gemma3TextModel

from lengths import drawn, grouped


class Classifier(nn.Module):
    def __init__(self, encoder, width):
        super().__init__()
        self.encoder = encoder
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens, mask, labels):
        hidden = self.encoder(input_ids=tokens, attention_mask=mask, use_cache=False).last_hidden_state
        weight = mask.unsqueeze(-1).to(hidden.dtype)
        pooled = (hidden * weight).sum(1) / weight.sum(1)
        return F.cross_entropy(self.head(self.drop(pooled)).float(), labels)


def classifier(a):
    config = Gemma3TextConfig(
        vocab_size=a.vocab, hidden_size=a.width, intermediate_size=6 * a.width, num_hidden_layers=a.layers, num_attention_heads=4,
        num_key_value_heads=1, head_dim=a.head_size, sliding_window=512, use_bidirectional_attention=True,
        attn_implementation="sdpa")
    with torch.device(a.device):
        encoder = Gemma3TextModel(config).to(torch.bfloat16)
    encoder = get_peft_model(encoder, LoraConfig(
        r=a.rank, lora_alpha=2 * a.rank, lora_dropout=0.05, use_dora=a.adapter == "dora",
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
    return Classifier(encoder, a.width).to(a.device).train()


def measure(a, model, mean, started):
    varied = mean < a.length
    warm = 8 if varied else 3
    if varied:
        todo = grouped(drawn(mean, a.length, 50 * a.rows), a.rows)
    else:
        todo = [[a.length] * a.rows]
    on_gpu = a.device == "cuda"
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-5, weight_decay=0.01, fused=True)
    torch._dynamo.reset()
    forward = torch.compile(model, dynamic=varied) if a.compile == "whole" else model

    def batch(lengths):
        longest = (max(lengths) + 7) // 8 * 8
        lens = torch.tensor(lengths, device=a.device)
        mask = (torch.arange(longest, device=a.device)[None] < lens[:, None]).long()
        tokens = torch.randint(1, a.vocab, (len(lengths), longest), device=a.device)
        return tokens, mask, torch.randint(2, (len(lengths),), device=a.device)

    def step(i):
        with torch.autocast(a.device, torch.bfloat16):
            loss = forward(*batch(todo[i % len(todo)]))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    if varied:
        # Warm-up: the longest first, so that later ones reuse its memory, then every timed shape once.
        longest = max(range(len(todo)), key=lambda i: max(todo[i]))
        for i in [longest, *range(warm, warm + a.groups * a.steps)]:
            step(i)
    for i in range(warm):
        step(i)
    synchronize()
    first = time.perf_counter() - started
    speeds, tokens_per_second, times = [], [], []
    for group in range(a.groups):
        own = range(warm + group * a.steps, warm + (group + 1) * a.steps)
        began = time.perf_counter()
        for i in own:
            loss = step(i)
        synchronize()
        seconds = time.perf_counter() - began
        speeds.append(a.rows * a.steps / seconds)
        tokens_per_second.append(sum(sum(todo[i % len(todo)]) for i in own) / seconds)
        times.append(1e3 * seconds / a.steps)
    middle = statistics.fmean if varied else statistics.median
    compiled = {"no": "eager", "layers": "compiled layers", "whole": "compiled"}[a.compile]
    free, total = torch.cuda.mem_get_info() if on_gpu else (0, 0)
    return dict(peer=f"PEFT {compiled}", mean=mean, samples_per_second=middle(speeds),
                tokens_per_second=middle(tokens_per_second), step_ms=middle(times),
                peak_bytes=torch.cuda.max_memory_allocated() if on_gpu else 0,
                card_bytes=total - free, first_steady_seconds=first, loss=float(loss.detach()))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = dict(rows=32, length=512, layers=26, width=1152, head_size=256, vocab=262144, rank=16, groups=5, steps=4)
    for name, value in sizes.items():
        p.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    p.add_argument("--mean", type=int, nargs="+", help="mean lengths, one measurement each; by default --length")
    p.add_argument("--adapter", choices=["dora", "lora"], default="dora")
    p.add_argument("--compile", choices=["no", "layers", "whole"], default="no")
    p.add_argument("--device", default="cuda")
    a = p.parse_args()
    started = time.perf_counter()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = classifier(a)
    if a.compile == "layers":
        for layer in model.encoder.base_model.model.layers:
            layer.compile(dynamic=True if any(mean < a.length for mean in a.mean or []) else None)
    for mean in a.mean or [a.length]:
        print(json.dumps(measure(a, model, mean, started)), flush=True)
        started = time.perf_counter()


if __name__ == "__main__":
    main()
