"""Compares second looks with first looks: the small foveated model on drawn shapes, trained both ways for each seed.

    cargo build --release
    python bench/fovea_looks.py target/release/flatout
    python bench/fovea_looks.py target/release/flatout train.steps=3000 --seeds 1 2 3 4 5

Each seed has other initial weights and another order of the same samples. In `fine` the text model controls where to look; `coarse`
reads the first look at every frame, which is independent of the text; everything else is equal. The table has the held-out loss, the
share of exact answers and the seconds of each run; the last line has the number of seeds for which `fine` has the lower loss. Exits
with 1 unless these are all.

Only the standard library is needed (Python 3.11 or newer).
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def parse_arguments():
    p = argparse.ArgumentParser(description="Compare second looks with first looks on drawn shapes.")
    p.add_argument("flatout", type=Path, help="the flatout binary, for example target/release/flatout")
    p.add_argument("overrides", nargs="*", help="key=value for both, as in train.steps=3000")
    p.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="values of train.seed")
    return p.parse_intermixed_args()


def last_evaluation(flatout, folder, mode, seed, overrides):
    run = folder / f"{mode}-{seed}"
    command = [flatout, "train", "fvlm-135m-align", "--with", "small", "--run", run, "--json", "backend=cpu"]
    command += [f"model.vision.mode={mode}", f"train.seed={seed}", *overrides]
    began = time.monotonic()
    ended = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if ended.returncode != 0:
        sys.exit(f"{mode}, seed {seed}: flatout ended with {ended.returncode}: {ended.stderr.strip()}")
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    evaluation = [event for event in events if event["event"] == "eval"][-1]
    return evaluation["loss"], evaluation["metrics"]["exact"], time.monotonic() - began


def main():
    a = parse_arguments()
    flatout = a.flatout.resolve()
    if not flatout.is_file():
        sys.exit(f"{flatout} is not a file: build flatout first")
    ahead = 0
    print(f"{'seed':>4} {'fine loss':>10} {'exact':>7} {'s':>5} {'coarse loss':>12} {'exact':>7} {'s':>5}")
    with tempfile.TemporaryDirectory() as folder:
        for seed in a.seeds:
            fine, coarse = (
                last_evaluation(flatout, Path(folder), mode, seed, a.overrides) for mode in ["fine", "coarse"]
            )
            ahead += fine[0] < coarse[0]
            print(
                f"{seed:4} {fine[0]:10.4f} {fine[1]:7.3f} {fine[2]:5.0f}"
                f" {coarse[0]:12.4f} {coarse[1]:7.3f} {coarse[2]:5.0f}",
                flush=True,
            )
    print(f"fine has the lower held-out loss for {ahead} of {len(a.seeds)} seeds")
    sys.exit(0 if ahead == len(a.seeds) else 1)


if __name__ == "__main__":
    main()
