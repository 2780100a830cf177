"""What fewer bytes for AdamW's moments do to the loss: `optimizer.state` fp32, bf16 and int8 on the same data.

    cargo build --profile ship
    python bench/state_gpu.py target/ship/flatout
    python bench/state_gpu.py target/ship/flatout --steps 200 --seeds 1 --layers 2 backend=cpu

A decoder of 30M parameters learns the synthetic language, with each of three seeds and each kind of moments: 2,000 updates of
32 x 256 tokens. A run is a fresh process; a kind follows the other, so that a GPU's clock drifts alike for all. Printed are the
mean loss of the last tenth of the updates, its ratio to that of fp32 with the same seed, the bytes of the plan's category
`optimizer`, and the median step. Exit code 0 where the mean ratio over the seeds is within half a percent of 1 for both kinds.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

KINDS = ["fp32", "bf16", "int8"]


def overrides(a, kind, seed):
    return ["data.source=synthetic", "model.width=512", f"model.layers={a.layers}", "model.heads=8", "model.kv_heads=4", "model.ffn=1536",
            "model.context=256", f"train.steps={a.steps}", "train.batch=32", "train.micro_batch=32", f"train.seed={seed}",
            f"schedule.warmup_steps={max(a.steps // 20, 1)}", "eval.rows=0", "checkpoint.every=0", "log.every=1", *a.override,
            f"optimizer.state={kind}"]


def train(a, folder, kind, seed):
    began = time.perf_counter()
    run = folder / f"{kind}-{seed}"
    command = [a.flatout, "train", a.recipe, *overrides(a, kind, seed), "--run", str(run), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with code {done.returncode}")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    start = next(event for event in events if event["event"] == "start")
    steps = [event for event in events if event["event"] == "step"]
    if start["switches"]["optimizer.state"] != kind:
        sys.exit(f"optimizer.state={kind} was asked for and {start['switches']['optimizer.state']} is active")
    losses = [step["loss"] for step in steps]
    last = statistics.fmean(losses[-max(len(losses) // 10, 1):])
    return dict(kind=kind, seed=seed, first=losses[0], last=last, step_ms=statistics.median(step["step_ms"] for step in steps),
                seconds=time.perf_counter() - began)


def plan(a, kind):
    command = [a.flatout, "plan", a.recipe, *overrides(a, kind, 0), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("flatout")
    p.add_argument("override", nargs="*")
    p.add_argument("--recipe", default="pretrain-226m")
    p.add_argument("--steps", type=int, default=2000)
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--json", action="store_true")
    a = p.parse_intermixed_args()
    plans = {kind: plan(a, kind) for kind in KINDS}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(1, a.seeds + 1):
            for kind in KINDS:
                rows.append(train(a, Path(folder), kind, seed))
                row = rows[-1]
                base = next(r["last"] for r in rows if r["seed"] == seed and r["kind"] == "fp32")
                row["ratio"] = row["last"] / base
                print(f"seed {seed} {kind:5} {row['first']:.4f} to {row['last']:.5f}  ratio {row['ratio']:.5f}  "
                      f"{row['step_ms']:7.2f} ms a step  {row['seconds']:.0f} s", file=sys.stderr, flush=True)
    ratios = {kind: statistics.fmean(r["ratio"] for r in rows if r["kind"] == kind) for kind in KINDS}
    parameters = plans["fp32"]["parameters"]
    if a.json:
        bytes_of = {kind: plans[kind]["categories"]["optimizer"] for kind in KINDS}
        print(json.dumps(dict(parameters=parameters, steps=a.steps, rows=rows, ratios=ratios, optimizer_bytes=bytes_of)))
    else:
        print(f"{parameters / 1e6:.1f}M parameters, {a.steps} updates, {a.seeds} seeds")
        print(f"{'':6} {'last loss':>10} {'of fp32':>9} {'optimizer MB':>13} {'bytes a parameter':>18} {'step ms':>8}")
        for kind in KINDS:
            own = [r for r in rows if r["kind"] == kind]
            size = plans[kind]["categories"]["optimizer"]
            print(f"{kind:6} {statistics.fmean(r['last'] for r in own):10.5f} {ratios[kind]:9.5f} {size / 1e6:13.1f} "
                  f"{size / parameters:18.3f} {statistics.median(r['step_ms'] for r in own):8.2f}")
    sys.exit(0 if all(abs(ratio - 1) < 0.005 for ratio in ratios.values()) else 1)


if __name__ == "__main__":
    main()
