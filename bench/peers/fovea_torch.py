"""Measures the foveated video model in PyTorch: DINOv2-S looks at frames with queries from SmolLM2-135M, one visual token per frame.
Prints a line of JSON for each configuration.

    python bench/peers/fovea_torch.py --stage 1 --at-once 8 32 --how eager compiled

| stage | a sample | what is learned |
|---|---|---|
| 1 | 8 frames, 150 tokens | every token |
| 2 | 9 frames, 250 tokens | 80 of them; only their logits are computed |
| 3 | a pair: a still image as 8 frames, 60 tokens of prompt, two answers of 120 | DPO; the reference is given |

Keys and values of the patches are projected once, the last patch layer stops there, and a still image is encoded once: the peer has
every saving that static shapes allow. bf16 autocast over fp32 weights, fused attention, fused AdamW, gradient clipping. Weights
and pixels are random, and frames are on the device.
"""

import argparse
import json
import math
import time

import torch
import torch.nn.functional as F
from torch import nn

STAGES = {1: dict(images=8, frames=8, text=150, read=150, rows=1), 2: dict(images=9, frames=9, text=250, read=80, rows=1),
          3: dict(images=1, frames=8, text=180, read=120, rows=2)}


class Look(nn.Module):
    """A block of DINOv2: over patches, returning keys and values, or over one query row per frame."""

    def __init__(self, d, heads):
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(d, eps=1e-6), nn.LayerNorm(d, eps=1e-6)
        self.q, self.kv, self.o = nn.Linear(d, d), nn.Linear(d, 2 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        self.s1, self.s2 = nn.Parameter(torch.ones(d)), nn.Parameter(torch.ones(d))

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def keys(self, normed):
        return [self.split(x) for x in self.kv(normed).chunk(2, -1)]

    def forward(self, h, keys=None):
        normed = self.norm1(h)
        k, v = keys or self.keys(normed)
        seen = F.scaled_dot_product_attention(self.split(self.q(normed)), k, v)
        h = h + self.s1 * self.o(seen.transpose(1, 2).flatten(2))
        return h + self.s2 * self.down(F.gelu(self.up(self.norm2(h)))), (k, v)


class Layer(nn.Module):
    """A block of Llama with q, k, v merged into one product, and gate, up into another."""

    def __init__(self, e, heads, kv_heads, ffn):
        super().__init__()
        self.cut, self.k = (heads, kv_heads), e // heads
        self.qkv, self.o = nn.Linear(e, (heads + 2 * kv_heads) * self.k, bias=False), nn.Linear(e, e, bias=False)
        self.gate, self.down = nn.Linear(e, 2 * ffn, bias=False), nn.Linear(ffn, e, bias=False)
        self.norm1, self.norm2 = nn.RMSNorm(e, eps=1e-5), nn.RMSNorm(e, eps=1e-5)

    def forward(self, x, cos, sin):
        heads, kv_heads = self.cut
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (-1, self.k)).transpose(1, 2).split([heads, kv_heads, kv_heads], 1)

        def turn(x):
            a, b = x.chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)

        y = F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        gate, up = self.gate(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Fovea(nn.Module):
    def __init__(self, d=384, looks=12, e=576, layers=30, heads=(9, 3), ffn=1536, vocab=49152, q=384):
        super().__init__()
        self.patch, self.cls = nn.Linear(3 * 14 * 14, d), nn.Parameter(torch.zeros(1, 1, d))
        self.places = nn.Parameter(torch.randn(257, d) * 0.02)
        self.looks = nn.ModuleList(Look(d, d // 64) for _ in range(looks))
        self.norm, self.look = nn.LayerNorm(d, eps=1e-6), nn.Linear(q, d, bias=False)
        self.seen, self.to_text, self.to_query = nn.Linear(d, d), nn.Linear(d, e), nn.Linear(e, q)
        self.q_static, self.q_init = nn.Parameter(torch.randn(q)), nn.Parameter(torch.randn(q))
        self.embed = nn.Embedding(vocab, e)
        self.layers = nn.ModuleList(Layer(e, *heads, ffn) for _ in range(layers))
        self.final, self.k = nn.RMSNorm(e, eps=1e-5), e // heads[0]

    def patches(self, pixels):
        """Keys and values of every layer for images u8 [U, 224, 224, 3]."""
        x = (pixels.float() / 255 - 0.45) / 0.225
        x = x.unflatten(1, (16, 14)).unflatten(3, (16, 14)).transpose(2, 3).flatten(3).flatten(1, 2)
        h = self.patch(x)
        h = torch.cat([self.cls.expand(len(h), -1, -1), h], 1) + self.places
        kept = []
        for block in self.looks[:-1]:
            h, keys = block(h)
            kept.append(keys)
        last = self.looks[-1]
        return kept + [last.keys(last.norm1(h))]

    def glance(self, kept, queries):
        """Visual tokens [images, frames per image, E] for queries [images, frames per image, Q]."""
        h = self.look(queries)
        for block, keys in zip(self.looks, kept):
            h, _ = block(h, keys)
        return 0.14 * self.to_text(self.seen(self.norm(h)))

    def text(self, x):
        t, half = x.shape[1], self.k // 2
        turns = 1e5 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
        angles = torch.arange(t, device=x.device, dtype=torch.float32)[:, None] * turns
        cos, sin = angles.cos(), angles.sin()
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.final(x)

    def forward(self, pixels, tokens, frames, read):
        """Log-probabilities [B, rows, read] of the last tokens of texts [B, rows, S]; pixels are those of B samples."""
        b, rows, s = tokens.shape
        kept = self.patches(pixels)
        images = len(pixels) // b
        each = frames // images
        static = self.glance(kept, self.q_static.expand(len(pixels), 1, -1))
        coarse = self.text(static.expand(-1, each, -1).reshape(b, frames, -1))
        queries = torch.cat([self.q_init.expand(b, 1, -1).to(coarse.dtype), self.to_query(coarse[:, :-1])], 1)
        fine = self.glance(kept, queries.reshape(len(pixels), each, -1)).reshape(b, 1, frames, -1).expand(-1, rows, -1, -1)
        x = torch.cat([fine.flatten(0, 1), self.embed(tokens.flatten(0, 1)).to(fine.dtype)], 1)
        h = self.text(x)[:, -read - 1:-1]
        logits = h @ self.embed.weight.to(h.dtype).T
        of = tokens.flatten(0, 1)[:, -read:]
        return -F.cross_entropy(logits.flatten(0, 1).float(), of.flatten(), reduction="none").view(b, rows, read)


def loss_of(logp, reference):
    if logp.shape[1] == 1:
        return -logp.mean()
    answers = logp.sum(-1) - reference
    return -F.logsigmoid(0.1 * (answers[:, 0] - answers[:, 1])).mean()


def measure(a, stage, at_once, how):
    size, cuda = STAGES[stage], a.device == "cuda"
    torch.manual_seed(1)
    vocab = 49152 if cuda else 512
    with torch.device(a.device):
        model = Fovea(vocab=vocab) if cuda else Fovea(d=64, looks=2, e=64, layers=2, heads=(2, 1), ffn=64, vocab=vocab)
        pixels = torch.randint(0, 256, (at_once * size["images"], 224, 224, 3), dtype=torch.uint8)
        tokens = torch.randint(0, vocab, (at_once, size["rows"], size["text"]))
        reference = torch.zeros(at_once, size["rows"]) - size["read"] * math.log(vocab)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.999), weight_decay=0.01, fused=cuda)

    def forward():
        with torch.autocast(a.device, torch.bfloat16):
            return loss_of(model(pixels, tokens, size["frames"], min(size["read"], size["text"] - 1)), reference)

    run = torch.compile(forward) if how == "compiled" else forward

    def step():
        loss = run()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    began = time.perf_counter()
    for _ in range(3):
        loss = step()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    ready, times = time.perf_counter() - began, []
    for _ in range(a.steps):
        before = time.perf_counter()
        loss = step()
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - before)
    middle = sorted(times)[len(times) // 2]
    return dict(peer=f"{how} {at_once}", stage=stage, samples_per_second=at_once / middle, step_ms=1e3 * middle, loss=loss.item(),
                first_steady_seconds=ready, peak_bytes=torch.cuda.max_memory_allocated() if cuda else 0)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--stage", type=int, nargs="+", choices=list(STAGES), default=[1])
    p.add_argument("--at-once", type=int, nargs="+", default=[8, 32])
    p.add_argument("--how", nargs="+", choices=["eager", "compiled"], default=["eager", "compiled"])
    p.add_argument("--steps", type=int, default=15)
    p.add_argument("--device", default="cuda")
    a = p.parse_args()
    for stage in a.stage:
        for how in a.how:
            for at_once in a.at_once:
                print(json.dumps(measure(a, stage, at_once, how)), flush=True)
                torch.compiler.reset()
                if a.device == "cuda":
                    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
