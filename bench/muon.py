"""Compares Muon with AdamW on the same text: held-out loss after equal numbers of updates and after equal time.

    cargo build --profile ship
    python bench/muon.py target/ship/flatout
    python bench/muon.py target/ship/flatout data.path=book.txt --rates 3e-3
    python bench/muon.py target/ship/flatout --gpu

The recipe `tiny` without a GPU learns the synthetic language, or the text that `data.path` names. With `--gpu` a decoder of GPT-2's
shape with half of its layers and width learns the sources of the standard library of the Python that runs this script. Every run is a new
process. Both optimisers have the same learning rates, which `optimizer.muon_adjust=match_rms_adamw` makes comparable, and the same seeds;
runs with the same seed see the same rows in the same order.

Prints held-out losses at equal steps and at equal times, the mean over seeds and the spread (largest minus smallest), each optimiser at
its learning rate with the lowest final mean; and the time at which Muon reaches AdamW's final loss. Time counts updates only: the median
step times the number of steps. Losses between evaluations are interpolated linearly. Exit code 0 if Muon's mean is below AdamW's at every
evaluation, by steps and by time.
"""

import argparse
import json
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

KINDS = ["adamw", "muon"]
CPU = ["tiny", "backend=cpu"]
VOCAB = 8192
GPU = ["gpt2-124m", "backend=cuda", "model.layers=6", "model.width=384", "model.heads=6", "model.ffn=1536", "model.context=512",
       f"model.vocab={VOCAB}", "train.batch=64", "eval.rows=256", "schedule.warmup_steps=50"]


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("flatout", type=Path)
    p.add_argument("override", nargs="*")
    p.add_argument("--gpu", action="store_true", help="a larger model and more text, on a GPU")
    p.add_argument("--steps", type=int, help="400, or 600 on a GPU")
    p.add_argument("--every", type=int, default=100, help="updates between evaluations")
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--rates", type=float, nargs="+", help="2.5e-3 5e-3 1e-2, or 1e-3 2e-3 4e-3 8e-3 on a GPU")
    a = p.parse_intermixed_args()
    a.steps = a.steps or (600 if a.gpu else 400)
    a.rates = a.rates or ([1e-3, 2e-3, 4e-3, 8e-3] if a.gpu else [2.5e-3, 5e-3, 1e-2])
    return a


def standard_library(binary, folder):
    """Shards of tokens with a document per module of the standard library, without `encodings`, whose modules are similar tables."""
    root = Path(sysconfig.get_path("stdlib"))
    texts = [path.read_text(errors="replace") for path in sorted(root.rglob("*.py")) if not {"site-packages", "encodings"} & {*path.parts}]
    path, shards = folder / "library.jsonl", folder / "shards"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts if text))
    print(f"{path.stat().st_size / 1e6:.1f} MB of Python's standard library, {len(texts)} files", file=sys.stderr, flush=True)
    finish([str(binary.resolve()), "data", "prepare", str(path), "--out", str(shards), "--vocab", str(VOCAB)])
    return shards


def finish(typed):
    done = subprocess.run(typed, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(typed)} ended with code {done.returncode}\n{done.stderr}")
    return done.stdout


def train(a, folder, words, kind, rate, seed):
    words = [*words, f"train.steps={a.steps}", f"eval.every={a.every}", "checkpoint.every=0", "log.every=1", *a.override,
             f"optimizer.name={kind}", f"optimizer.lr={rate}", f"train.seed={seed}"]
    typed = [str(a.flatout.resolve()), "train", *words, "--run", str(folder / f"{kind}-{rate}-{seed}"), "--json"]
    events = [json.loads(line) for line in finish(typed).splitlines()]
    times = [event["step_ms"] for event in events if event["event"] == "step"]
    losses = {event["step"]: event["loss"] for event in events if event["event"] == "eval"}
    row = dict(kind=kind, rate=rate, seed=seed, losses=losses, step_ms=statistics.median(times))
    print(f"{kind:6} lr {rate:g} seed {seed}: held out {losses[a.steps]:.4f}, {row['step_ms']:.2f} ms per step", file=sys.stderr, flush=True)
    return row


def between(points, x):
    """Linear interpolation of `points` at `x`; None outside their range."""
    for (x0, y0), (x1, y1) in zip(points, points[1:]):
        if x0 <= x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return None


def main():
    a = arguments()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        words = [*GPU, f"data.path={standard_library(a.flatout, folder)}"] if a.gpu else CPU
        turns = [(kind, rate, seed) for seed in range(1, a.seeds + 1) for rate in a.rates for kind in KINDS]
        rows = [train(a, folder, words, *turn) for turn in turns]
    steps = sorted(rows[0]["losses"])

    def mean(kind, rate, step):
        return statistics.fmean(row["losses"][step] for row in rows if (row["kind"], row["rate"]) == (kind, rate))

    best = {kind: min(a.rates, key=lambda rate: mean(kind, rate, a.steps)) for kind in KINDS}
    own = {kind: [row for row in rows if (row["kind"], row["rate"]) == (kind, best[kind])] for kind in KINDS}
    step_ms = {kind: statistics.median(row["step_ms"] for row in own[kind]) for kind in KINDS}
    print(f"held-out loss, mean of {a.seeds} seeds (spread), at the best of the learning rates {', '.join(f'{rate:g}' for rate in a.rates)}")
    print(f"{'':6} {'lr':>7} " + " ".join(f"{f'step {step}':>16}" for step in steps) + f" {'step ms':>8}")
    for kind in KINDS:
        cells = []
        for step in steps:
            losses = [row["losses"][step] for row in own[kind]]
            cells.append(f"{statistics.fmean(losses):.4f} ({max(losses) - min(losses):.4f})")
        print(f"{kind:6} {best[kind]:7g} " + " ".join(f"{cell:>16}" for cell in cells) + f" {step_ms[kind]:8.2f}")

    curves = {kind: [(step * step_ms[kind] / 1e3, mean(kind, best[kind], step)) for step in steps] for kind in KINDS}
    moments = [(seconds, loss, between(curves["muon"], seconds)) for seconds, loss in curves["adamw"]]
    print("held-out loss after equal time")
    print(f"{'':6} {'':7} " + " ".join(f"{f'{seconds:.2f} s':>16}" for seconds, _, _ in moments))
    for place, kind in [(1, "adamw"), (2, "muon")]:
        print(f"{kind:6} {'':7} " + " ".join(f"{moment[place]:16.4f}" if moment[place] else f"{'':>16}" for moment in moments))
    last_seconds, last_loss = curves["adamw"][-1]
    reached = between([(-loss, seconds) for seconds, loss in curves["muon"]], -last_loss)
    if reached:
        print(f"Muon is at AdamW's last loss {last_loss:.4f} after {reached:.2f} s of {last_seconds:.2f}: {reached / last_seconds:.2f} of the time")
    print("last held-out loss by learning rate")
    for rate in a.rates:
        print(f"{rate:7g} " + "  ".join(f"{kind} {mean(kind, rate, a.steps):.4f}" for kind in KINDS))
    below = all(mean("muon", best["muon"], step) < mean("adamw", best["adamw"], step) for step in steps)
    sys.exit(0 if below and all(muon < adamw for _, adamw, muon in moments if muon) else 1)


if __name__ == "__main__":
    main()
