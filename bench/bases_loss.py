#!/usr/bin/env python3
"""Effect of the type of a frozen base on the loss: LoRA on the same small model with its base in bf16 (fp32 without a GPU), NF4 and FP8.

    python bench/package_text.py --out docs.jsonl.zst
    cargo build --profile ship
    python bench/bases_loss.py target/ship/flatout docs.jsonl.zst
    python bench/bases_loss.py target/ship/flatout docs.jsonl.zst --steps 200 --seeds 1 backend=cpu

For each of three seeds a small decoder is trained on the first documents, with all its parameters. From this run, LoRA of rank 16 learns the last
documents, which are of other packages, for 2,000 updates over each base; the FP8 base is multiplied in FP8 on a GPU, and "nf4/fp8" multiplies 8-bit codes of the
NF4 base. All see the same tokens in the same order.
Prints the mean loss of the last tenth of the updates and the last held-out loss, and their ratios to those of the base in bf16. Exit code 0 if the
mean of the held-out ratios over the seeds is within half a percent of 1 for each.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

BASES = {
    "bf16": ["base=bf16"],
    "nf4": ["base=nf4"],
    "nf4/fp8": ["base=nf4", "precision=fp8"],
    "fp8": ["base=fp8"],
}


def split(text, folder, count):
    """The first and the last documents of a JSONL file, which zstd may have compressed."""
    lines = subprocess.run(["zstd", "-dc", text], stdout=subprocess.PIPE, check=True).stdout if text.suffix == ".zst" else text.read_bytes()
    lines = lines.splitlines(keepends=True)
    if len(lines) < 2 * count:
        sys.exit(f"{text} has {len(lines)} documents; --documents {count} needs twice as many")
    parts = folder / "first.jsonl", folder / "last.jsonl"
    for path, some in zip(parts, (lines[:count], lines[-count:])):
        path.write_bytes(b"".join(some))
    return parts


def train(a, run, text, seed, steps, *own):
    typed = [a.flatout, "train", a.recipe, f"data.path={text}", f"train.seed={seed}", f"train.steps={steps}", f"schedule.warmup_steps={max(steps // 20, 1)}",
             f"eval.every={steps}", "eval.rows=512", "log.every=1", *a.override, *own, "--run", str(run), "--json"]
    done = subprocess.run(typed, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(typed)} ended with code {done.returncode}\n{done.stderr}")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    losses = [event["loss"] for event in events if event["event"] == "step"]
    switches = next(event["switches"] for event in events if event["event"] == "start")
    return dict(first=losses[0], last=statistics.fmean(losses[-max(steps // 10, 1):]), held_out=[e["loss"] for e in events if e["event"] == "eval"][-1], switches=switches)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("flatout")
    p.add_argument("text", type=Path, help="documents as JSONL")
    p.add_argument("override", nargs="*", metavar="KEY=VALUE", help="overrides of all runs")
    p.add_argument("--recipe", default="tiny")
    p.add_argument("--steps", type=int, default=2000)
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--documents", type=int, default=1000, help="documents of each part")
    a = p.parse_intermixed_args()
    ratios = {base: [] for base in BASES}
    with tempfile.TemporaryDirectory() as folder:
        first_text, last_text = split(a.text, Path(folder), a.documents)
        for seed in range(1, a.seeds + 1):
            first = Path(folder) / f"first-{seed}"
            held_out = train(a, first, first_text, seed, a.steps)["held_out"]
            print(f"seed {seed}: the base reached a held-out loss of {held_out:.4f} on its own documents", flush=True)
            results = {}
            for base, own_keys in BASES.items():
                results[base] = train(a, Path(folder) / f"{base.replace('/', '-')}-{seed}", last_text, seed, a.steps, f"model.from={first}", "adapter.kind=lora",
                                      "adapter.rank=16", "lr=2e-3", "checkpoint.every=0", *own_keys)
                own = results[base]
                active = own["switches"]["base"]
                if f"base={active}" not in own_keys:
                    sys.exit(f"{' '.join(own_keys)} was requested and base={active} is active")
                of = {key: own[key] / results["bf16"][key] for key in ("last", "held_out")}
                ratios[base].append(of["held_out"])
                print(f"seed {seed} base {base:7} ({own['switches']['precision']}) {own['first']:.4f} to {own['last']:.5f}, ratio {of['last']:.5f}; "
                      f"held out {own['held_out']:.5f}, ratio {of['held_out']:.5f}", flush=True)
    means = {base: statistics.fmean(some) for base, some in ratios.items()}
    print(f"{a.steps} updates, {a.seeds} seeds, held-out losses to those of bf16: " + ", ".join(f"{base} {mean:.5f} ({min(ratios[base]):.5f} to {max(ratios[base]):.5f})"
                                                                                      for base, mean in means.items() if base != "bf16"))
    sys.exit(0 if all(abs(mean - 1) < 0.005 for mean in means.values()) else 1)


if __name__ == "__main__":
    main()
