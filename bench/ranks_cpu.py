"""Measures the overhead of ranks on one machine: two ranks of one thread compared with one process of two threads, on the recipe `tiny`.

    cargo build --profile ship
    python bench/ranks_cpu.py target/ship/flatout
    python bench/ranks_cpu.py target/ship/flatout --before OLD/flatout --rounds 5

A round is a run of each, one after another, pinned to the same two cores. A run's speed is its tokens over the median time of a step
after the first `--warmup` steps. Prints the median over rounds and the ratio; the goal is at least 0.9. `--before` also runs another
build on two ranks, to show the effect of a change. Needs Linux and only the standard library.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from ranks_runs import steps


def speed(binary, ranks, a, folder):
    """Tokens per second of one run."""
    run = Path(folder) / f"{ranks}-{len(os.listdir(folder))}"
    command = [str(binary), "train", "tiny", "backend=cpu", f"train.steps={a.warmup + a.steps}", "eval.rows=0", "checkpoint.every=0",
               *a.overrides, "--run", str(run), "--ranks", str(ranks), "-q"]
    cores = sorted(os.sched_getaffinity(0))[:2]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=lambda: os.sched_setaffinity(0, cores))
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    lines = [step for number, step in sorted(steps(run).items()) if number > a.warmup]
    tokens = (lines[-1]["tokens"] - lines[0]["tokens"]) / (len(lines) - 1)
    return tokens / statistics.median(line["step_ms"] / 1e3 for line in lines)


def main():
    p = argparse.ArgumentParser(description="Measure two ranks of one thread against one process with two threads.")
    p.add_argument("flatout", type=Path, help="the flatout binary, for example target/ship/flatout")
    p.add_argument("overrides", nargs="*", help="key=value, as in train.batch=16")
    p.add_argument("--before", type=Path, help="another build, which also runs on two ranks")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--warmup", type=int, default=20, help="warm-up steps")
    p.add_argument("--steps", type=int, default=200, help="timed steps")
    a = p.parse_intermixed_args()
    sides = {"one process, two threads": (a.flatout, 1), "two ranks": (a.flatout, 2)}
    if a.before:
        sides["two ranks, before"] = (a.before, 2)
    for binary, _ in sides.values():
        if not binary.is_file():
            p.error(f"there is no file {binary}")
    found = {name: [] for name in sides}
    with tempfile.TemporaryDirectory(prefix="flatout-") as folder:
        for number in range(a.rounds):
            for name, (binary, ranks) in sides.items():
                found[name].append(speed(binary.resolve(), ranks, a, folder))
            line = ", ".join(f"{name} {speeds[-1]:,.0f}" for name, speeds in found.items())
            print(f"round {number + 1}: {line} tokens/s", flush=True)
    one, *_ = medians = [statistics.median(speeds) for speeds in found.values()]
    for name, median in zip(found, medians):
        print(f"{name:26} {median:9,.0f} tokens/s  {median / one:.3f}")


if __name__ == "__main__":
    main()
