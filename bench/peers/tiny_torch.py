"""Measures the recipe `tiny` in PyTorch on the CPU: the same decoder, batch and optimiser, as fast as plain PyTorch allows.

    pip install torch numpy
    python bench/peers/tiny_torch.py --threads 2             # eager
    python bench/peers/tiny_torch.py --threads 2 --compile   # torch.compile, needs a C++ compiler

Prints one JSON line. `tokens_per_second` and `step_ms` are the median over `--groups` groups of `--steps` steps each,
after `--warmup` steps (which absorb compilation); `best_tokens_per_second` is the fastest group. A step is forward,
loss, backward, gradient clipping and the AdamW update in f32. Token ids are random and generated beforehand: the work does
not depend on their values, and times do not include data loading.

Optimisations, none of which changes the mathematics: q, k and v in one product and gate and up in another,
fused attention (scores are never stored), fused RMS norm, fused AdamW, gradients dropped instead of zeroed, RoPE
tables computed once, the head's product over all rows at once.
"""

import argparse
import json
import math
import os
import resource
import statistics
import sys
import time


def parse_arguments():
    p = argparse.ArgumentParser(description="Measure the recipe `tiny` in PyTorch on the CPU.")
    on_off = argparse.BooleanOptionalAction
    p.add_argument("--width", type=int, default=128)
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--heads", type=int, default=4)
    p.add_argument("--kv-heads", type=int, default=2)
    p.add_argument("--head-size", type=int, help="default: width / heads")
    p.add_argument("--ffn", type=int, default=344)
    p.add_argument("--vocab", type=int, default=512)
    p.add_argument("--context", type=int, default=128)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--qk-norm", action=on_off, default=True, help="RMS norm of every head's q and k before RoPE")
    p.add_argument("--tied", action=on_off, default=True, help="the head is the embedding")
    p.add_argument("--norm-eps", type=float, default=1e-6)
    p.add_argument("--rope-theta", type=float, default=1e4)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--betas", type=float, nargs=2, default=(0.9, 0.95))
    p.add_argument("--eps", type=float, default=1e-8)
    p.add_argument("--weight-decay", type=float, default=0.1, help="on matrices; norms have none")
    p.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient; 0 turns clipping off")
    p.add_argument("--compile", action="store_true", help="torch.compile the model and its loss")
    p.add_argument("--compile-mode", default="default", help="a mode of torch.compile")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--warmup", type=int, default=5, help="warm-up steps")
    p.add_argument("--steps", type=int, default=10, help="steps per group")
    p.add_argument("--groups", type=int, default=5)
    p.add_argument("--seed", type=int, default=0)
    a = p.parse_args()
    a.head_size = a.head_size or a.width // a.heads
    if a.heads % a.kv_heads:
        p.error(f"--kv-heads {a.kv_heads} does not divide --heads {a.heads}")
    for name in ("threads", "steps", "groups", "batch", "context"):
        if getattr(a, name) < 1:
            p.error(f"--{name} must be at least 1")
    return a


a = parse_arguments()
# The thread pools read this when torch is imported.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(a.threads)

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

# B batch, T tokens of a row, D width, H heads, G key/value heads, K head size, V vocabulary.
D, H, G, K = a.width, a.heads, a.kv_heads, a.head_size


def rope_tables():
    frequency = a.rope_theta ** (-torch.arange(0, K, 2, dtype=torch.float64) / K)
    angle = torch.arange(a.context, dtype=torch.float64)[:, None] * frequency
    angle = torch.cat((angle, angle), dim=-1)[None, :, None, :]
    return angle.cos().float(), angle.sin().float()  # [1, T, 1, K]


def rotate(x, cos, sin):
    """RoPE on half-split pairs; x is [B, T, heads, K]."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def linear(rows, columns):
    layer = nn.Linear(columns, rows, bias=False)
    nn.init.normal_(layer.weight, std=0.02)
    return layer


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm = nn.RMSNorm(D, eps=a.norm_eps)
        self.qkv = linear((H + 2 * G) * K, D)
        self.q_norm = nn.RMSNorm(K, eps=a.norm_eps) if a.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(K, eps=a.norm_eps) if a.qk_norm else nn.Identity()
        self.out = linear(D, H * K)
        self.ffn_norm = nn.RMSNorm(D, eps=a.norm_eps)
        self.gate_up = linear(2 * a.ffn, D)
        self.down = linear(D, a.ffn)

    def forward(self, x, cos, sin):
        B, T, _ = x.shape
        q, k, v = self.qkv(self.attention_norm(x)).view(B, T, H + 2 * G, K).split((H, G, G), dim=2)
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=G != H)
        x = x + self.out(o.transpose(1, 2).reshape(B, T, H * K))
        gate, up = self.gate_up(self.ffn_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(a.vocab, D)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(Block() for _ in range(a.layers))
        self.norm = nn.RMSNorm(D, eps=a.norm_eps)
        self.head = linear(a.vocab, D)
        if a.tied:
            self.head.weight = self.embedding.weight
        cos, sin = rope_tables()
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, ids, targets):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def optimizer_of(model):
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": a.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=a.lr, betas=tuple(a.betas), eps=a.eps, fused=True)


def main():
    torch.manual_seed(a.seed)
    torch.set_num_threads(a.threads)
    model = Decoder()
    parameters = list(model.parameters())
    optimizer = optimizer_of(model)
    loss_of = torch.compile(model, mode=a.compile_mode) if a.compile else model
    batches = [torch.randint(0, a.vocab, (a.batch, a.context + 1)) for _ in range(4)]
    batches = [(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()) for tokens in batches]
    taken = 0

    def step():
        nonlocal taken
        ids, targets = batches[taken % len(batches)]
        taken += 1
        loss = loss_of(ids, targets)
        loss.backward()
        if a.clip:
            nn.utils.clip_grad_norm_(parameters, a.clip, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    began = time.perf_counter()
    for _ in range(max(a.warmup, 1)):
        loss = step()
    warmup_seconds = time.perf_counter() - began
    step_ms = []
    for _ in range(a.groups):
        began = time.perf_counter()
        for _ in range(a.steps):
            loss = step()
        step_ms.append((time.perf_counter() - began) * 1000 / a.steps)

    final_loss = loss.item()
    if not math.isfinite(final_loss):
        raise SystemExit(f"the loss became {final_loss} after {taken} steps; lower --lr")
    tokens = a.batch * a.context
    median = statistics.median(step_ms)
    rss_unit = 1 if sys.platform == "darwin" else 1024  # macOS counts in bytes, Linux in KiB.
    print(json.dumps({
        "tokens_per_second": round(tokens * 1000 / median, 1),
        "best_tokens_per_second": round(tokens * 1000 / min(step_ms), 1),
        "step_ms": round(median, 3),
        "group_step_ms": [round(ms, 3) for ms in step_ms],
        "warmup_seconds": round(warmup_seconds, 2),
        "parameters": sum(p.numel() for p in parameters),
        "tokens_per_step": tokens,
        "loss": round(final_loss, 4),
        "compile": a.compile_mode if a.compile else "off",
        "threads": a.threads,
        "torch": torch.__version__,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * rss_unit,
    }))


if __name__ == "__main__":
    main()
