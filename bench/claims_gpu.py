"""Measures figures for docs/results/claims.md that no other script measures, on one GPU.

    cargo build --profile ship
    python bench/claims_gpu.py target/ship/flatout
    python bench/claims_gpu.py target/ship/flatout --only batch beside

| part | what is measured |
|---|---|
| switches | `ablate` of CUDA graphs, cached rotations and the fused optimiser with Vision-BDH, and of CUDA graphs with Gemma's pairs |
| batch | images per second of Vision-BDH with micro-batches of 64 and of 256 images, and of 256 as four micro-batches of 64 |
| beside | images per second of Vision-BDH and of a vision transformer on the same images, in micro-batches of 512 |
| norm | `ablate --model` of pretrain-226m: RMS norm compared with layer norm |
| quality | the loss after --steps updates of a decoder of 30M parameters: SwiGLU and GELU of equally many parameters, rotary and learned positions, and query-key normalisation with learning rates of 1, 5 and 15 times 1e-3 |

Each run is a new process; runs with the same seed see the same tokens in the same order.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import decoder_30m
import steady

BDH = ["bdh-cifar10", "data.source=synthetic", "eval.rows=0", "checkpoint.every=0", "checkpoint.best=false", "log.every=1",
       "train.epochs=none", "train.steps=400"]


def ablate(a, recipe, *words, minutes="0.7"):
    command = [a.flatout, "ablate", *recipe, *words, "--budget", minutes, "--json", "-q"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=a.folder)
    if done.returncode != 0:
        print(f"{' '.join(command)} ended with code {done.returncode}", file=sys.stderr)
        return
    for row in json.loads(done.stdout)["rows"]:
        timed = row.get("measured")
        if timed:
            by = timed["base_is_faster_by"]
            print(f"  {row['group']}, {row['name']}: the base is {by['ratio']:.3f} times as fast ({by['low']:.3f} to {by['high']:.3f})")


def images(a, *words):
    run = Path(a.folder) / "run"
    done = steady.run([a.flatout, "train", *words, "--run", str(run)], steady.WARM + 40)
    subprocess.run(["rm", "-rf", str(run)])
    step = statistics.median(step["step_ms"] for step in done["steps"])
    batch = done["steps"][-1]["samples"] - done["steps"][-2]["samples"]
    return batch / step * 1e3


def switches(a):
    for switch in ("cuda_graphs", "rope_cache", "fuse.optimizer"):
        print(f"bdh-cifar10, {switch}:")
        ablate(a, ["bdh-cifar10", "data.source=synthetic"], "--only", switch)
    print("gemma3-1b-pairs, cuda_graphs:")
    ablate(a, ["gemma3-1b-pairs"], "--only", "cuda_graphs", minutes="1")


def batch(a):
    for at_once, whole in ((64, 64), (64, 256), (256, 256)):
        rate = images(a, *BDH, f"train.batch={whole}", f"train.micro_batch={at_once}")
        print(f"bdh-cifar10, {whole} images an update, {at_once} at once: {rate:,.0f} images/s")


def beside(a):
    for recipe in ("bdh-cifar10", "vit-tiny-cifar10"):
        rate = images(a, recipe, *BDH[1:], "train.batch=512", "train.micro_batch=512")
        print(f"{recipe}, 512 images: {rate:,.0f} images/s")


def norm(a):
    print("pretrain-226m, --model:")
    ablate(a, ["pretrain-226m", "data.source=synthetic", "train.batch=16", "train.micro_batch=16"], "--model", "--only", "norm", minutes="1")


def quality(a):
    variants = {"swiglu, rope": ["lr=1e-3"], "gelu of as many parameters": ["model.activation=gelu_exact", "model.ffn=2304", "lr=1e-3"],
                "learned positions": ["model.positions=learned", "lr=1e-3"]}
    for lr in ("1e-3", "5e-3", "1.5e-2"):
        for qk_norm in ("true", "false"):
            variants[f"qk_norm={qk_norm} lr={lr}"] = [f"model.qk_norm={qk_norm}", f"lr={lr}"]
    words = decoder_30m.arguments(__doc__).parse_args([a.flatout, "precision=bf16", "--steps", str(a.steps)])
    for name, own in variants.items():
        losses = []
        for seed in range(a.seeds):
            with tempfile.TemporaryDirectory() as folder:
                losses.append(decoder_30m.last(decoder_30m.train(words, Path(folder) / "run", seed, *own)["losses"], 100))
        print(f"{name}: loss {statistics.fmean(losses):.4f} ({', '.join(f'{loss:.4f}' for loss in losses)})", flush=True)


PARTS = dict(switches=switches, batch=batch, beside=beside, norm=norm, quality=quality)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("flatout")
    p.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    p.add_argument("--steps", type=int, default=2000)
    p.add_argument("--seeds", type=int, default=2)
    a = p.parse_args()
    a.flatout = str(Path(a.flatout).resolve())
    print(steady.gpu())
    with tempfile.TemporaryDirectory() as a.folder:
        for name in a.only:
            PARTS[name](a)
            sys.stdout.flush()


if __name__ == "__main__":
    main()
