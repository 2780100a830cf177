#!/usr/bin/env python3
"""Measures the accuracy of `flatout plan`'s predicted step times: calibrates, then predicts and measures the same sizes.

    python bench/predict_gpu.py target/ship/flatout --rows 8 16 32 64
    python bench/predict_gpu.py target/ship/flatout --recipe tiny --rows 2 8 32        (on a CPU)

Times this machine's kernels with `doctor --calibrate` (unless --calibrated is given), then for every number of rows takes the prediction
from `plan --json` and the measured step from `ablate --json`, whose base is timed twice with another variant in between. A step is one
micro-batch and the update. Exit code 1 if a prediction is off by more than --within percent. Needs only Python, and an idle machine.
"""

import argparse
import json
import subprocess
import sys
import time


def run_json(flatout, *words):
    done = subprocess.run([flatout, *words, "--json"], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"flatout {' '.join(words)}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("flatout")
    parser.add_argument("--recipe", default="pretrain-226m")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--steps", type=int, default=8, help="timed updates per visit")
    parser.add_argument("--within", type=float, default=25.0, help="largest accepted error of a prediction, in percent")
    parser.add_argument("--calibrated", action="store_true", help="use the cached times of an earlier call")
    parser.add_argument("words", nargs="*", help="overrides, as precision=fp32")
    args = parser.parse_intermixed_args()

    if not args.calibrated:
        began = time.time()
        made = run_json(args.flatout, "doctor", "--calibrate")
        print(
            f"calibrated {made['device']}: {len(made['points'])} launches of {made['models']} models in"
            f" {time.time() - began:.0f} s, {made['skipped']} models skipped, median error left out"
            f" {100 * made['median_error']:.0f}%",
            flush=True,
        )
    print(f"{'rows':>6} {'roofline':>10} {'predicted':>10} {'measured':>10}   predicted is off by")
    worst = 0.0
    for rows in args.rows:
        size = [args.recipe, f"train.batch={rows}", f"train.micro_batch={rows}", "eval.rows=0", *args.words]
        plan = run_json(args.flatout, "plan", *size)
        if plan["predicted_step_ms"] is None:
            sys.exit("plan has no predictions: calibrate first, without --calibrated")
        measured = run_json(
            args.flatout, "ablate", *size, "--only", "fuse.optimizer", "--repeats", "2", "--fresh",
            "--steps", str(args.steps),
        )["base"]["step_ms"]
        off = 100 * (plan["predicted_step_ms"] / measured - 1)
        worst = max(worst, abs(off))
        print(
            f"{rows:>6} {plan['roofline_step_ms']:>8.1f}ms {plan['predicted_step_ms']:>8.1f}ms {measured:>8.1f}ms   {off:+.1f}%",
            flush=True,
        )
    verdict = "PASS" if worst <= args.within else "FAIL"
    print(f"{verdict}: the worst is off by {worst:.1f}%, {args.within:.0f}% are allowed")
    sys.exit(verdict == "FAIL")


if __name__ == "__main__":
    main()
