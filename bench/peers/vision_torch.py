"""Measures training of image models in PyTorch: timm's ViT-S/14 and ViT-B/14 with LayerScale (DINOv2's shape) and Vision-BDH, bf16 autocast,
fused AdamW, gradients clipped, eager or compiled.

    pip install torch timm
    python bench/peers/vision_torch.py vit-s --rows 256 --compile
    python bench/peers/vision_torch.py bdh --rows 256 --compile
    python bench/peers/vision_torch.py bdh --rows 4 --device cpu

Images are random bytes on the device, normalised there as in flatout; times do not include loading. Vision-BDH is written for speed:
one product for all heads' latents, cosines and sines from a table, scores by batched products. Prints one JSON line:
images_per_second (median over groups of steps), step_ms, peak_bytes, card_bytes, first_steady_seconds, loss.
"""

import argparse
import json
import statistics
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


class Bdh(nn.Module):
    def __init__(self, width=192, heads=6, latent=1024, layers=6, patch=4, size=32, classes=10, dropout=0.1):
        super().__init__()
        self.heads, self.latent, self.layers, self.dropout = heads, latent, layers, dropout
        tokens = (size // patch) ** 2 + 1
        bound = (6 / (width * latent + heads * latent)) ** 0.5
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, tokens, width))
        self.encoder = nn.Parameter(torch.empty(heads * latent, width).uniform_(-bound, bound))
        self.gate = nn.Parameter(torch.empty(heads, width, latent).uniform_(-bound, bound))
        bound = (6 / (heads * latent + width)) ** 0.5
        self.decoder = nn.Parameter(torch.empty(width, heads * latent).uniform_(-bound, bound))
        self.score = nn.Linear(width, classes)
        turn = torch.arange(tokens)[:, None] * 65536.0 ** (-torch.arange(0, latent, 2) / latent)
        self.register_buffer("cos", turn.cos(), persistent=False)
        self.register_buffer("sin", turn.sin(), persistent=False)

    def norm(self, x):
        return F.layer_norm(x, x.shape[-1:])

    def rope(self, a):
        even, odd = a[..., 0::2], a[..., 1::2]
        cos, sin = self.cos.to(a.dtype), self.sin.to(a.dtype)
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.positions
        b, t, _ = x.shape
        for _ in range(self.layers):
            u = self.norm(x)
            a = F.relu(F.linear(u, self.encoder)).view(b, t, self.heads, self.latent).transpose(1, 2)
            r = self.rope(a)
            y = self.norm((r @ r.transpose(-1, -2)) @ u[:, None].to(r.dtype))
            g = a * F.relu(y @ self.gate)
            g = F.dropout(g.transpose(1, 2).flatten(2), self.dropout, self.training)
            x = self.norm(u + self.norm(F.linear(g, self.decoder)))
        return self.score(self.norm(x[:, 0]))


def vit(name):
    import timm

    return timm.create_model(f"vit_{name}_patch14_dinov2", img_size=224, num_classes=1000, pretrained=False)


MODELS = {
    "bdh": (lambda: Bdh(), 32, 10),
    "vit-s": (lambda: vit("small"), 224, 1000),
    "vit-b": (lambda: vit("base"), 224, 1000),
}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", choices=MODELS)
    for name, value in dict(rows=256, groups=5, steps=4).items():
        p.add_argument(f"--{name}", type=int, default=value)
    p.add_argument("--compile", action="store_true")
    p.add_argument("--device", default="cuda")
    a = p.parse_args()
    started = time.perf_counter()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    make, size, classes = MODELS[a.model]
    model = make().to(a.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, weight_decay=0.05, fused=a.device == "cuda")
    forward = torch.compile(model) if a.compile else model
    bytes_ = torch.randint(256, (a.rows, 3, size, size), dtype=torch.uint8, device=a.device)
    labels = torch.randint(classes, (a.rows,), device=a.device)

    def step():
        with torch.autocast(a.device, torch.bfloat16):
            loss = F.cross_entropy(forward(bytes_.float().div_(127.5).sub_(1.0)).float(), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    wait = torch.cuda.synchronize if a.device == "cuda" else lambda: None
    for _ in range(3):
        step()
    wait()
    first, times = time.perf_counter() - started, []
    for _ in range(a.groups):
        began = time.perf_counter()
        for _ in range(a.steps):
            loss = step()
        wait()
        times.append((time.perf_counter() - began) / a.steps)
    seconds = statistics.median(times)
    peak, card = 0, 0
    if a.device == "cuda":
        free, total = torch.cuda.mem_get_info()
        peak, card = torch.cuda.max_memory_allocated(), total - free
    print(json.dumps(dict(peer=f"PyTorch {'compiled' if a.compile else 'eager'}", images_per_second=a.rows / seconds,
                          step_ms=1e3 * seconds, peak_bytes=peak, card_bytes=card, first_steady_seconds=first, loss=float(loss.detach()))))


if __name__ == "__main__":
    main()
