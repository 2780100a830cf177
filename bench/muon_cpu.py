"""Muon against AdamW on the same text: held-out loss after as many updates, and after as much time.

    cargo build --profile ship
    python bench/muon_cpu.py target/ship/flatout
    python bench/muon_cpu.py target/ship/flatout data.path=book.txt --rates 3e-3

The recipe `tiny` without a GPU learns the synthetic language, or the text that `data.path` names. Every run is a fresh process. Both
optimisers have the same learning rates, which `optimizer.muon_adjust=match_rms_adamw` makes comparable, and the same seeds; those of one
seed see the same rows in the same order. Printed are held-out losses at equal steps, the mean over seeds and the
spread (largest minus smallest), at the rate with the lowest mean at the end, and the median step. Exit code 0 where Muon's mean is
below AdamW's at every evaluation.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

KINDS = ["adamw", "muon"]


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("flatout", type=Path)
    p.add_argument("override", nargs="*")
    p.add_argument("--steps", type=int, default=400)
    p.add_argument("--every", type=int, default=100, help="updates between evaluations")
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--rates", type=float, nargs="+", default=[2.5e-3, 5e-3, 1e-2])
    return p.parse_intermixed_args()


def train(a, folder, kind, rate, seed):
    words = ["tiny", "backend=cpu", f"train.steps={a.steps}", f"eval.every={a.every}", "checkpoint.every=0", "log.every=1", *a.override,
             f"optimizer.name={kind}", f"optimizer.lr={rate}", f"train.seed={seed}"]
    typed = [str(a.flatout.resolve()), "train", *words, "--run", str(folder / f"{kind}-{rate}-{seed}"), "--json"]
    done = subprocess.run(typed, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(typed)} ended with code {done.returncode}\n{done.stderr}")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    times = [event["step_ms"] for event in events if event["event"] == "step"]
    losses = {event["step"]: event["loss"] for event in events if event["event"] == "eval"}
    row = dict(kind=kind, rate=rate, seed=seed, losses=losses, step_ms=statistics.median(times))
    print(f"{kind:6} lr {rate:g} seed {seed}: held out {losses[a.steps]:.4f}, {row['step_ms']:.1f} ms a step", file=sys.stderr, flush=True)
    return row


def main():
    a = arguments()
    with tempfile.TemporaryDirectory() as folder:
        turns = [(kind, rate, seed) for seed in range(1, a.seeds + 1) for rate in a.rates for kind in KINDS]
        rows = [train(a, Path(folder), *turn) for turn in turns]
    steps = sorted(rows[0]["losses"])

    def mean(kind, rate, step):
        return statistics.fmean(row["losses"][step] for row in rows if (row["kind"], row["rate"]) == (kind, rate))

    best = {kind: min(a.rates, key=lambda rate: mean(kind, rate, a.steps)) for kind in KINDS}
    print(f"held-out loss, mean of {a.seeds} seeds (spread), at the best of the learning rates {', '.join(f'{rate:g}' for rate in a.rates)}")
    print(f"{'':6} {'lr':>7} " + " ".join(f"{f'step {step}':>16}" for step in steps) + f" {'step ms':>8}")
    for kind in KINDS:
        own = [row for row in rows if (row["kind"], row["rate"]) == (kind, best[kind])]
        cells = []
        for step in steps:
            losses = [row["losses"][step] for row in own]
            cells.append(f"{statistics.fmean(losses):.4f} ({max(losses) - min(losses):.4f})")
        ms = statistics.median(row["step_ms"] for row in own)
        print(f"{kind:6} {best[kind]:7g} " + " ".join(f"{cell:>16}" for cell in cells) + f" {ms:8.1f}")
    print("last held-out loss by learning rate")
    for rate in a.rates:
        print(f"{rate:7g} " + "  ".join(f"{kind} {mean(kind, rate, a.steps):.4f}" for kind in KINDS))
    sys.exit(0 if all(mean("muon", best["muon"], step) < mean("adamw", best["adamw"], step) for step in steps) else 1)


if __name__ == "__main__":
    main()
