"""Generates the golden fixtures of BDH: tiny random models, written here from their equations, with a hundred steps of AdamW.

    pip install torch safetensors
    python make_bdh.py            # writes bdh-*.safetensors and bdh-*.json beside this file
    python make_bdh.py --check    # recomputes and compares with the files instead of writing

The layer, for tokens x of one image or text, where LN is over the width and has no weights:
    u = LN(x); a_h = relu(u E_h); r_h = rope(a_h); S_h = r_h r_h^T; y_h = LN(S_h u); b_h = relu(y_h F_h)
    x <- LN(residual + LN(concat_h(a_h * b_h) G)), the residual being u or x
applied several times with the same E, F and G. rope turns pairs (2k, 2k + 1) by position * theta^(-2k / N). Texts see only
tokens before their own: S is strictly lower triangular. Dropout is 0.

NAME.safetensors contains
    weight.<name>   f32   layer.encoder [H * N, D], layer.gate [H, N, D], layer.decoder [D, H * N] and the input and output weights
    pixels          u8    [batches, B, size, size, 3], with labels i32 [batches, B]; or
    tokens, targets i32   [batches, B, T] of texts
    logits          f32   for the first batch before the first step
    loss            f32   [steps], the mean over a batch; batches alternate
    grad.<name>     f32   the gradient of the first loss
and NAME.json contains the model's keys. Computed in f64 from weights that are f32 numbers.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file

HERE = Path(__file__).resolve().parent
STEPS, BATCHES, B = 100, 4, 4
# At higher rates latents that die diverge even between f32 and f64 of this script.
ADAMW = dict(lr=2e-4, betas=(0.9, 0.95), eps=1e-8)
DECAY, CLIP = 0.1, 1.0
CASES = {
    "bdh-images": dict(width=12, layers=3, heads=3, latent=48, residual="normed", init="soft", image_size=8, patch=4, classes=5),
    "bdh-images-plain": dict(width=16, layers=2, heads=2, latent=40, residual="plain", init="wide", image_size=12, patch=4,
                             classes=3),
    "bdh-texts": dict(width=12, layers=3, heads=2, latent=44, residual="normed", init="wide", head="tokens", vocab=23,
                      context=17),
}


def norm(x):
    return F.layer_norm(x, x.shape[-1:], eps=1e-5)


def rope(x):
    tokens, n = x.shape[-2:]
    turn = torch.arange(tokens, dtype=x.dtype)[:, None] * 65536.0 ** (-torch.arange(0, n, 2, dtype=x.dtype) / n)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * turn.cos() - odd * turn.sin(), even * turn.sin() + odd * turn.cos()], -1).flatten(-2)


def layer(x, w, c, is_text):
    """x [B, T, D]"""
    d, h, n = c["width"], c["heads"], c["latent"]
    u = norm(x)
    a = F.relu(torch.einsum("btd,hnd->bhtn", u, w["layer.encoder"].view(h, n, d)))
    r = rope(a)
    s = r @ r.transpose(-1, -2)
    y = norm((s.tril(-1) if is_text else s) @ u[:, None])
    b = F.relu(torch.einsum("bhtd,hnd->bhtn", y, w["layer.gate"]))
    g = (a * b).transpose(1, 2).flatten(2)
    return norm((u if c["residual"] == "normed" else x) + norm(g @ w["layer.decoder"].T))


def logits_of(w, c, batch):
    if "vocab" in c:
        x = w["embed.weight"][batch.long()]
        for _ in range(c["layers"]):
            x = layer(x, w, c, True)
        return x @ w["head.weight"].T
    p, d = c["patch"], c["width"]
    pixels = (batch / 255 - 0.5) / 0.5
    x = F.conv2d(pixels.permute(0, 3, 1, 2), w["patches.weight"].view(d, p, p, 3).permute(0, 3, 1, 2), w["patches.bias"], stride=p)
    x = x.flatten(2).transpose(1, 2)
    x = torch.cat([w["cls"].expand(len(x), 1, d), x], 1) + w["positions.weight"]
    for _ in range(c["layers"]):
        x = layer(x, w, c, False)
    return norm(x[:, 0]) @ w["score.weight"].T + w["score.bias"]


def weights(c, draw):
    d, h, n = c["width"], c["heads"], c["latent"]
    uniform = lambda bound, *dims: (2 * torch.rand(dims, generator=draw) - 1) * bound
    normal = lambda *dims: 0.02 * torch.randn(dims, generator=draw)
    bound = (6 / (d * n + h * n)) ** 0.5 if c["init"] == "soft" else (6 / (d + n)) ** 0.5
    w = {
        "layer.encoder": uniform(bound, h * n, d), "layer.gate": uniform(bound, h, n, d),
        "layer.decoder": uniform((6 / (h * n + d)) ** 0.5, d, h * n),
    }
    if "vocab" in c:
        return w | {"embed.weight": normal(c["vocab"], d), "head.weight": normal(c["vocab"], d)}
    inner, tokens = 3 * c["patch"] ** 2, (c["image_size"] // c["patch"]) ** 2 + 1
    return w | {
        "patches.weight": uniform(inner ** -0.5, d, inner), "patches.bias": uniform(inner ** -0.5, d),
        "cls": 0.1 * normal(1, 1, d), "positions.weight": normal(tokens, d),
        "score.weight": normal(c["classes"], d), "score.bias": normal(c["classes"]),
    }


def make(c):
    draw = torch.Generator().manual_seed(5)
    first = {name: value.float() for name, value in weights(c, draw).items()}
    w = {name: value.double().requires_grad_() for name, value in first.items()}
    if "vocab" in c:
        tokens = torch.randint(c["vocab"], (BATCHES, B, c["context"] + 1), generator=draw)
        batches, labels = tokens[..., :-1], tokens[..., 1:]
        data = dict(tokens=batches.int(), targets=labels.int())
    else:
        batches = torch.randint(256, (BATCHES, B, c["image_size"], c["image_size"], 3), generator=draw).double()
        labels = torch.randint(c["classes"], (BATCHES, B), generator=draw)
        data = dict(pixels=batches.to(torch.uint8), labels=labels.int())
    # The learned image token is a matrix row and decays like any matrix; vectors do not decay.
    groups = [dict(params=[p for p in w.values() if p.dim() >= 2], weight_decay=DECAY),
              dict(params=[p for p in w.values() if p.dim() < 2], weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, **ADAMW)
    losses, gradients, logits = [], {}, None
    for step in range(STEPS):
        out = logits_of(w, c, batches[step % BATCHES])
        loss = F.cross_entropy(out.flatten(0, -2), labels[step % BATCHES].flatten())
        loss.backward()
        if step == 0:
            logits = out.detach()
            gradients = {f"grad.{name}": p.grad.clone() for name, p in w.items()}
        torch.nn.utils.clip_grad_norm_(list(w.values()), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    tensors = {f"weight.{name}": value for name, value in first.items()} | data | gradients
    tensors |= dict(logits=logits, loss=torch.tensor(losses, dtype=torch.float64))
    return {name: t.contiguous() if t.dtype in (torch.int32, torch.uint8) else t.float().contiguous() for name, t in tensors.items()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    for name, c in CASES.items():
        tensors = make(c)
        print(f"{name}: loss {tensors['loss'][0]:.4f} to {tensors['loss'][-1]:.4f}")
        path = HERE / f"{name}.safetensors"
        if not check:
            save_file(tensors, path)
            (HERE / f"{name}.json").write_text(json.dumps(c, indent=2) + "\n")
            continue
        with safe_open(path, "pt") as stored:
            assert set(stored.keys()) == set(tensors)
            for key, tensor in tensors.items():
                torch.testing.assert_close(tensor, stored.get_tensor(key), rtol=1e-5, atol=1e-7)


if __name__ == "__main__":
    main()
