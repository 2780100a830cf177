"""Measures the decoder of the recipe `pretrain-226m` in PyTorch with its fastest options: bf16 autocast over fp32 weights,
cuDNN's attention, fused AdamW, torch.compile. With --fp8 the layers' products (not the head's) are in 8 bits, scaled by the
largest value of each tensor: E4M3 forward, E5M2 for gradients. `--compile layers` compiles one layer for all of them, and
the head with the loss, because compiling the whole model in 8 bits did not finish within ten minutes.

    python bench/peers/pretrain_torch.py --rows 32 --compile
    python bench/peers/pretrain_torch.py --rows 32 --compile layers --fp8

Prints one JSON line: tokens_per_second (median over groups of steps), step_ms, peak_bytes, card_bytes, first_steady_seconds.
"""

import argparse
import json
import statistics
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


def rms_norm(x, weight, eps=1e-6):
    return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), eps)


def rotate(x, cos, sin):
    half = x.shape[-1] // 2
    lo, hi = x[..., :half], x[..., half:]
    return torch.cat([lo * cos - hi * sin, hi * cos + lo * sin], -1)


def narrow(x, dtype):
    """x quantised to 8 bits, and the scale to dequantise it."""
    scale = x.abs().amax().float().clamp(min=1e-12) / torch.finfo(dtype).max
    return (x / scale).to(dtype), scale


class Fp8Product(torch.autograd.Function):
    """x w^T of matrices. PyTorch multiplies 8-bit matrices only if the second is column-major."""

    @staticmethod
    def forward(ctx, x, w):
        x8, x_scale = narrow(x, torch.float8_e4m3fn)
        w8, w_scale = narrow(w, torch.float8_e4m3fn)
        ctx.save_for_backward(x8, x_scale, w8, w_scale)
        return torch._scaled_mm(x8, w8.t(), x_scale, w_scale, out_dtype=torch.bfloat16, use_fast_accum=True)

    @staticmethod
    def backward(ctx, d):
        x8, x_scale, w8, w_scale = ctx.saved_tensors
        d8, d_scale = narrow(d, torch.float8_e5m2)
        by_columns = lambda m: m.t().contiguous().t()
        dx = torch._scaled_mm(d8, by_columns(w8), d_scale, w_scale, out_dtype=torch.bfloat16)
        dw = torch._scaled_mm(d8.t().contiguous(), by_columns(x8), d_scale, x_scale, out_dtype=torch.bfloat16)
        return dx, dw.float()


class Fp8Linear(nn.Linear):
    def forward(self, x):
        with torch.autocast("cuda", enabled=False):
            return Fp8Product.apply(x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1])


class Block(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.a = a
        linear = Fp8Linear if a.fp8 else nn.Linear
        q, kv = a.heads * a.head_size, a.kv_heads * a.head_size
        self.attn_norm, self.ffn_norm = nn.Parameter(torch.ones(a.width)), nn.Parameter(torch.ones(a.width))
        self.q_norm, self.k_norm = nn.Parameter(torch.ones(a.head_size)), nn.Parameter(torch.ones(a.head_size))
        self.qkv = linear(a.width, q + 2 * kv, bias=False)
        self.out = linear(q, a.width, bias=False)
        self.gate_up = linear(a.width, 2 * a.ffn, bias=False)
        self.down = linear(a.ffn, a.width, bias=False)

    def forward(self, x, cos, sin):
        a = self.a
        b, t, _ = x.shape
        q, k, v = self.qkv(rms_norm(x, self.attn_norm)).split(
            [a.heads * a.head_size, a.kv_heads * a.head_size, a.kv_heads * a.head_size], -1)
        q = rotate(rms_norm(q.view(b, t, a.heads, a.head_size), self.q_norm), cos, sin)
        k = rotate(rms_norm(k.view(b, t, a.kv_heads, a.head_size), self.k_norm), cos, sin)
        v = v.view(b, t, a.kv_heads, a.head_size)
        o = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True)
        x = x + self.out(o.transpose(1, 2).reshape(b, t, -1))
        gate, up = self.gate_up(rms_norm(x, self.ffn_norm)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.embed = nn.Embedding(a.vocab, a.width)
        self.blocks = nn.ModuleList(Block(a) for _ in range(a.layers))
        self.norm = nn.Parameter(torch.ones(a.width))
        position = torch.arange(a.context, dtype=torch.float32)
        turn = a.theta ** (-torch.arange(0, a.head_size, 2, dtype=torch.float32) / a.head_size)
        angle = torch.outer(position, turn)[None, :, None, :]
        self.register_buffer("cos", angle.cos().bfloat16(), persistent=False)
        self.register_buffer("sin", angle.sin().bfloat16(), persistent=False)
        for p in self.parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens, targets):
        x = self.embed(tokens).bfloat16()
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.loss(x, targets)

    def loss(self, x, targets):
        logits = F.linear(rms_norm(x, self.norm), self.embed.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def main():
    p = argparse.ArgumentParser(description=__doc__)
    for name, value in dict(width=768, layers=32, heads=12, kv_heads=4, head_size=64, ffn=2048, vocab=32768,
                            context=2048, rows=32, groups=5, steps=4).items():
        p.add_argument(f"--{name}", type=int, default=value)
    p.add_argument("--theta", type=float, default=1e4)
    p.add_argument("--compile", nargs="?", const="whole", choices=["whole", "layers"])
    p.add_argument("--fp8", action="store_true")
    a = p.parse_args()
    started = time.perf_counter()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = Decoder(a).cuda()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [dict(params=matrices, weight_decay=0.1), dict(params=vectors, weight_decay=0.0)],
        lr=3e-4, betas=(0.9, 0.95), fused=True)
    forward = torch.compile(model) if a.compile == "whole" else model
    if a.compile == "layers":
        for block in model.blocks:
            block.compile()
        model.loss = torch.compile(model.loss)
    tokens = torch.randint(a.vocab, (4, a.rows, a.context + 1), device="cuda")

    def step(i):
        batch = tokens[i % 4]
        with torch.autocast("cuda", torch.bfloat16), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            loss = forward(batch[:, :-1], batch[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    for i in range(4):
        step(i)
    torch.cuda.synchronize()
    first = time.perf_counter() - started
    times = []
    for group in range(a.groups):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for i in range(a.steps):
            loss = step(i)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) / a.steps)
    seconds = statistics.median(times)
    free, total = torch.cuda.mem_get_info()
    print(json.dumps(dict(
        peer=dict(whole="torch-compile", layers="torch-layers").get(a.compile, "torch-eager") + "-fp8" * a.fp8, tokens_per_second=a.rows * a.context / seconds,
        step_ms=1e3 * seconds, step_ms_all=[1e3 * t for t in times], peak_bytes=torch.cuda.max_memory_allocated(), card_bytes=total - free,
        first_steady_seconds=first, loss=loss.item(), torch=torch.__version__, cuda=torch.version.cuda,
        cudnn=torch.backends.cudnn.version(), gpu=torch.cuda.get_device_name())), flush=True)


if __name__ == "__main__":
    main()
