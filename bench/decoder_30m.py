"""Shared by scripts that compare precisions: a decoder of 30M parameters that learns the synthetic language, and runs of it.

`state_gpu.py` and `fp8_gpu.py` compare its runs. Every run is a new process, and runs with the same seed see the same tokens in the
same order: the language depends only on the seed.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time


def arguments(description):
    p = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("flatout")
    p.add_argument("override", nargs="*")
    p.add_argument("--recipe", default="pretrain-226m")
    p.add_argument("--steps", type=int, default=2000)
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--json", action="store_true")
    return p


def words(a, seed, *own):
    """Overrides for 32 rows of 256 tokens per update. Those of the caller come last and take precedence."""
    return [a.recipe, "data.source=synthetic", "model.width=512", f"model.layers={a.layers}", "model.heads=8", "model.kv_heads=4",
            "model.ffn=1536", "model.context=256", f"train.steps={a.steps}", "train.batch=32", "train.micro_batch=32",
            f"train.seed={seed}", f"schedule.warmup_steps={max(a.steps // 20, 1)}", "eval.rows=0", "checkpoint.every=0",
            "log.every=1", *a.override, *own]


def command(a, run, seed, *own):
    return [a.flatout, "train", *words(a, seed, *own), "--run", str(run), "--json"]


def train(a, run, seed, *own):
    """The losses of a run, its `start` event, the median step and the time of the process."""
    began = time.perf_counter()
    typed = command(a, run, seed, *own)
    done = subprocess.run(typed, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(typed)} ended with code {done.returncode}")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    held_out = [event["loss"] for event in events if event["event"] == "eval"]
    return dict(start=next(event for event in events if event["event"] == "start"), losses=[step["loss"] for step in steps],
                held_out=held_out[-1] if held_out else None, step_ms=statistics.median(step["step_ms"] for step in steps),
                seconds=time.perf_counter() - began)


def last(losses, count):
    return statistics.fmean(losses[-max(count, 1):])


def plan(a, *own):
    done = subprocess.run([a.flatout, "plan", *words(a, 0, *own), "--json"], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)
