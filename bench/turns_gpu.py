#!/usr/bin/env python3
"""Compares two binaries of flatout on one GPU in interleaved runs, to show that a change costs no speed and no memory.

    python bench/turns_gpu.py OLD NEW [--rounds 2] [--steps 20] [--cases pretrain-bf16 bdh ...]
    python bench/turns_gpu.py "target/ship/flatout fuse.activation=off" target/ship/flatout

Either may be followed by overrides, quoted together with it.

A round of a case is a run of OLD, then one of NEW, each a new process on the recipe's synthetic data. A figure is the
median step after the warm-up. The table has the ratio of medians over all rounds, and the spread of OLD over the rounds:
a ratio within the spread is no difference.
"""

import argparse
import shlex
import statistics
import tempfile
from pathlib import Path

import steady


def rows(count):
    return [f"train.batch={count}", f"train.micro_batch={count}"]


TEXT = ["data.source=synthetic", "schedule.warmup_steps=2"]
PAIRS = ["data.source=synthetic", "train.patience=none", "eval.every_epochs=none", "eval.metric=loss"]
CASES = {
    "pretrain-bf16": ["pretrain-226m", *TEXT, *rows(32)],
    "pretrain-fp8": ["pretrain-226m", *TEXT, *rows(32), "precision=fp8"],
    "gpt2": ["gpt2-124m", *TEXT, *rows(32)],
    "gpt2-64": ["gpt2-124m", *TEXT, "train.batch=128", "train.micro_batch=64"],
    "bdh": ["bdh-cifar10", "data.source=synthetic", "data.synthetic_rows=4096", *rows(512)],
    "vit-s": ["dinov2-s-classify", "data.source=synthetic", "data.synthetic_rows=1024", "model.classes=10", *rows(256)],
    "vit-b": ["dinov2-b-classify", "data.source=synthetic", "data.synthetic_rows=1024", "model.classes=10", *rows(256)],
    "gemma-full": ["gemma3-1b-pairs", *PAIRS, "packing=off", "length_buckets=off", *rows(32)],
    "gemma-lengths": ["gemma3-1b-pairs", *PAIRS, *rows(32)],
}


def median_ms(binary, words, steps, folder):
    binary, *more = binary
    command = [binary, "train", *words, *more, "eval.rows=0", "checkpoint.every=0", "checkpoint.best=false", "--run", tempfile.mkdtemp(dir=folder) + "/run"]
    done = steady.run(command, steady.WARM + steps)
    return statistics.median(e["step_ms"] for e in done["steps"]), done["memory"]["card_bytes"]


def binary_and_overrides(words):
    binary, *overrides = shlex.split(words)
    return [str(Path(binary).resolve()), *overrides]


def main():
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("old", type=binary_and_overrides)
    flags.add_argument("new", type=binary_and_overrides)
    flags.add_argument("--rounds", type=int, default=2)
    flags.add_argument("--steps", type=int, default=20)
    flags.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    a = flags.parse_args()
    binaries = {"old": a.old, "new": a.new}
    print(f"{'case':15} {'old ms':>9} {'new ms':>9} {'new/old':>8} {'old spread':>10}  card GiB old, new", flush=True)
    for case in a.cases:
        times, card = {"old": [], "new": []}, {}
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(a.rounds):
                for side, binary in binaries.items():
                    try:
                        ms, card[side] = median_ms(binary, CASES[case], a.steps, folder)
                    except SystemExit as why:
                        print(f"{case:15} {side} failed: {why}", flush=True)
                        break
                    times[side].append(ms)
        if not times["old"] or not times["new"]:
            continue
        old, new = statistics.median(times["old"]), statistics.median(times["new"])
        spread = max(times["old"]) / min(times["old"]) - 1
        gib = [card[side] / 2**30 for side in ("old", "new")]
        print(f"{case:15} {old:9.2f} {new:9.2f} {new / old:8.4f} {spread:10.2%}  {gib[0]:.2f}, {gib[1]:.2f}", flush=True)


if __name__ == "__main__":
    main()
