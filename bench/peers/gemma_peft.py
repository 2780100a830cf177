"""Gemma-3-1B as an encoder of text pairs, fine-tuned with PEFT in PyTorch: DoRA or LoRA on q, k, v and o over frozen bf16
weights, masked mean pooling, two classes, fused AdamW, bf16 autocast.

    python bench/peers/gemma_peft.py --rows 32 --length 512
    python bench/peers/gemma_peft.py --rows 32 --mean 200 --compile
    python bench/peers/gemma_peft.py --adapter lora --layers 4

Weights are random: speed does not depend on them. With --mean the lengths are lognormal with that mean and --length the longest,
batches are grouped by length (sorted within 50 batches, as Transformers' trainer does) and padded to their longest, a multiple
of 8. Prints one JSON line: samples_per_second (median over groups of steps), tokens_per_second (real ones), step_ms, peak_bytes,
first_steady_seconds.
"""

import argparse
import json
import math
import random
import statistics
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from transformers import Gemma3TextConfig, Gemma3TextModel


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


def drawn(mean, longest, count):
    """Lognormal lengths of this mean, of a spread such as reviews have."""
    draw, spread = random.Random(0), 0.6
    center = math.log(mean) - spread * spread / 2
    return [max(8, min(longest, round(math.exp(draw.gauss(center, spread))))) for _ in range(count)]


def batches(a):
    """Lengths of every batch."""
    if a.mean is None:
        return [[a.length] * a.rows] * (a.groups * a.steps + 8)
    lengths = drawn(a.mean, a.length, 50 * a.rows * (1 + (a.groups * a.steps + 8) // 50))
    grouped = []
    for at in range(0, len(lengths), 50 * a.rows):
        some = sorted(lengths[at:at + 50 * a.rows], reverse=True)
        grouped += [some[i:i + a.rows] for i in range(0, len(some), a.rows)]
    random.Random(1).shuffle(grouped)
    return grouped


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in dict(rows=32, length=512, layers=26, rank=16, groups=5, steps=4, vocab=262144).items():
        p.add_argument(f"--{name}", type=int, default=value)
    p.add_argument("--mean", type=float)
    p.add_argument("--adapter", choices=["dora", "lora"], default="dora")
    p.add_argument("--compile", action="store_true")
    a = p.parse_args()
    started = time.perf_counter()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    config = Gemma3TextConfig(
        vocab_size=a.vocab, hidden_size=1152, intermediate_size=6912, num_hidden_layers=a.layers, num_attention_heads=4,
        num_key_value_heads=1, head_dim=256, sliding_window=512, attn_implementation="sdpa")
    with torch.device("cuda"):
        encoder = Gemma3TextModel(config).to(torch.bfloat16)
    encoder = get_peft_model(encoder, LoraConfig(
        r=a.rank, lora_alpha=2 * a.rank, lora_dropout=0.05, use_dora=a.adapter == "dora",
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
    model = Classifier(encoder, 1152).cuda().train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-5, weight_decay=0.01, fused=True)
    forward = torch.compile(model, dynamic=a.mean is not None) if a.compile else model
    todo = batches(a)

    def batch(lengths):
        longest = (max(lengths) + 7) // 8 * 8
        lens = torch.tensor(lengths, device="cuda")
        mask = (torch.arange(longest, device="cuda")[None] < lens[:, None]).long()
        tokens = torch.randint(1, a.vocab, (len(lengths), longest), device="cuda")
        return tokens, mask, torch.randint(2, (len(lengths),), device="cuda")

    def step(i):
        with torch.autocast("cuda", torch.bfloat16):
            loss = forward(*batch(todo[i]))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    warm = 8 if a.mean is not None else 3
    for i in range(warm):
        loss = step(i)
    torch.cuda.synchronize()
    first = time.perf_counter() - started
    speeds, tokens_per_second, times = [], [], []
    for group in range(a.groups):
        own = range(warm + group * a.steps, warm + (group + 1) * a.steps)
        began = time.perf_counter()
        for i in own:
            loss = step(i % len(todo))
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        speeds.append(a.rows * a.steps / seconds)
        tokens_per_second.append(sum(sum(todo[i % len(todo)]) for i in own) / seconds)
        times.append(1e3 * seconds / a.steps)
    middle = statistics.fmean if a.mean is not None else statistics.median
    print(json.dumps(dict(
        peer=f"transformers + PEFT, {'compiled' if a.compile else 'eager'}", samples_per_second=middle(speeds),
        tokens_per_second=middle(tokens_per_second), step_ms=middle(times), peak_bytes=torch.cuda.max_memory_allocated(),
        first_steady_seconds=first, loss=float(loss))))


if __name__ == "__main__":
    main()
