#!/usr/bin/env python3
"""LoRA on Qwen3-8B over a frozen base in bf16, NF4 and FP8 on one GPU: flatout and PEFT in interleaved runs.

    cargo build --profile ship
    python bench/bases_gpu.py target/ship/flatout
    python bench/bases_gpu.py target/ship/flatout --rows 1 --peers "nf4 plain" --rounds 1
    python bench/bases_gpu.py target/debug/flatout --small --rounds 1 --steps 4 --peers

Rank 16 on all linear weights of the layers, random weights, rows of 2,048 tokens of which all are learned. For each of --rows, as many rows at
once, a round runs flatout with each of --bases, then each of --peers (bench/peers/lora_peft.py): a base, Liger's kernels or PyTorch's own
layers, and perhaps "checkpointing". The FP8 base is also multiplied in FP8 (precision=fp8); "fp8/bf16" multiplies it in bf16. "nf4/fp8"
multiplies 8-bit codes of the NF4 base. NF4 in PEFT is QLoRA with
bitsandbytes. A peer whose packages are missing, or that runs out of memory, is left out with a line. The table has medians over rounds, and
the ratio of every base to flatout's bf16 and to the peers' best with the same base.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import steady

PEER = Path(__file__).resolve().parent / "peers" / "lora_peft.py"
LENGTH = 2048
QWEN = dict(layers=36, width=4096, heads=32, kv_heads=8, head_size=128, ffn=12288, vocab=151936, context=LENGTH)
SMALL = dict(layers=2, width=64, heads=4, kv_heads=2, head_size=16, ffn=128, vocab=512, context=64)
BASES = {
    "bf16": ["base=bf16", "precision=bf16"],
    "nf4": ["base=nf4", "precision=bf16"],
    "nf4/fp8": ["base=nf4", "precision=fp8"],
    "fp8": ["base=fp8", "precision=fp8"],
    "fp8/bf16": ["base=fp8", "precision=bf16"],
}


def run_flatout(a, folder, base, rows):
    run = folder / "run"
    sizes = SMALL if a.small else QWEN
    overrides = [f"model.{key}={value}" for key, value in sizes.items()]
    overrides += ["model.tied=false", "model.qk_norm=true", "model.rope_theta=1e6", "data.source=synthetic", f"train.batch={rows}", f"train.micro_batch={rows}",
                  "train.steps=1000", "schedule.warmup_steps=2", "adapter.kind=lora", "adapter.rank=16", "adapter.alpha=32", "optimizer.lr=1e-4",
                  "eval.rows=0", "checkpoint.every=0", "checkpoint.best=false", "log.every=1", *BASES[base]]
    done = steady.run([a.flatout, "train", "pretrain-226m", *overrides, *a.override, "--run", str(run)], steady.WARM + a.steps)
    shutil.rmtree(run, ignore_errors=True)
    step = statistics.median(event["step_ms"] for event in done["steps"])
    return dict(peer=f"flatout {base}", tokens_per_second=1e3 * rows * sizes["context"] / step, step_ms=step, loss=done["steps"][-1]["loss"],
                first_steady_seconds=done["first_steady_seconds"], seconds=done["start"].get("start_seconds"), **done["memory"])


def run_peer(a, peer, rows):
    base, layers, *more = peer.split()
    command = [a.python, str(PEER), "--base", base, "--layers", layers, "--rows", str(rows), "--steps", str(a.steps), *(f"--{word}" for word in more)]
    command += ["--small", "--device", "cpu", "--length", str(SMALL["context"])] * a.small
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"peer"')]
    if not found:
        print(f"PEFT {peer} with {rows} rows is left out: {(done.stderr.strip().splitlines() or ['it printed nothing'])[-1]}", flush=True)
    return found


def show(results, rows):
    speed = {name: statistics.median(r["tokens_per_second"] for r in some) for name, some in results.items()}
    best = {}
    for name in speed:
        peer, base = name.split()[:2]
        if peer == "PEFT" and speed[name] > speed.get(best.get(base), 0):
            best[base] = name
    print(f"{f'{rows} rows at once':34} {'tokens/s':>9} {'step ms':>8} {'peak GiB':>9} {'of card':>8} {'steady s':>9}  to bf16  to PEFT")
    for name, some in results.items():
        step, first = (statistics.median(r[key] for r in some) for key in ("step_ms", "first_steady_seconds"))
        peak, card = steady.memory(some)
        line = f"{name:34} {speed[name]:9,.0f} {step:8.1f} {peak / 2**30:9.1f} {card / 2**30:8.1f} {first:9.1f}"
        if name.startswith("flatout"):
            same = best.get("nf4" if "nf4" in name else "bf16")
            line += f" {speed[name] / speed['flatout bf16']:8.3f}" if "flatout bf16" in speed else " " * 9
            line += f" {speed[name] / speed[same]:8.3f}" if same else ""
        print(line, flush=True)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("flatout")
    p.add_argument("override", nargs="*", help="key=value for flatout only")
    p.add_argument("--bases", nargs="+", choices=list(BASES), default=list(BASES))
    p.add_argument("--peers", nargs="*", default=["bf16 liger", "nf4 plain", "nf4 liger"])
    p.add_argument("--rows", type=int, nargs="+", default=[8, 1])
    p.add_argument("--steps", type=int, default=8)
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--python", default=sys.executable)
    p.add_argument("--small", action="store_true", help="sizes for a machine without a GPU, which only show that the script runs")
    a = p.parse_args()
    print(steady.gpu())
    for rows in a.rows:
        results = {}
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(a.rounds):
                for base in a.bases:
                    taken = run_flatout(a, Path(folder), base, rows)
                    results.setdefault(taken["peer"], []).append(taken)
                for peer in a.peers:
                    for taken in run_peer(a, peer, rows):
                        results.setdefault(taken["peer"], []).append(taken)
        show(results, rows)


if __name__ == "__main__":
    main()
