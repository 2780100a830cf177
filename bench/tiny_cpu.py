"""Compares flatout with PyTorch on the CPU: the recipe `tiny`, on the same cores, in interleaved runs.

    cargo build --release
    pip install torch numpy                                    # for the peer; --python names its interpreter
    python bench/tiny_cpu.py target/release/flatout
    python bench/tiny_cpu.py target/release/flatout --compile --rounds 5 --json

One round is a run of flatout, then a run of each peer, so that a slow minute of the machine affects all of them.
Every run is a new process, pinned to the same cores where the system supports it (Linux). Both sides are timed alike:
after `--warmup` steps, the mean time of a step over each group of `--group` steps, and of those means the median.
The table shows the median over rounds, the spread (largest minus smallest, over the median) and flatout's tokens per
second over the fastest peer's; the goal is at least 1.0.

flatout runs `train tiny train.steps=... --json` without evaluation and with a checkpoint only at the end; its times are
`step_ms` of the `step` events, data loading included. The peer gets the dimensions that this run resolved
(RUN/config.toml), and random tokens made beforehand. A config that the peer does not compute is refused.

Run it on an idle machine: two threads that wait for each other lose far more than the time that a third one takes.
Only the standard library is needed here (Python 3.11 or newer, Linux or macOS).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

PEER = Path(__file__).resolve().parent / "peers" / "tiny_torch.py"

# Values that the peer supports; with any other value in the resolved config two different models would be compared.
PEER_COMPUTES = {
    "model.norm": "rms",
    "model.activation": "swiglu",
    "model.positions": "rope",
    "model.rope_pairs": "half",
    "model.dropout": 0,
    "data.document_mask": False,
    "optimizer.name": "adamw",
}


def parse_arguments():
    p = argparse.ArgumentParser(description="Measure flatout against PyTorch on the CPU with the recipe `tiny`.")
    p.add_argument("flatout", type=Path, help="the flatout binary, for example target/release/flatout")
    p.add_argument("overrides", nargs="*", help="key=value for flatout, as in train.batch=16")
    p.add_argument("--rounds", type=int, default=3, help="runs of each side, at least 3")
    p.add_argument("--threads", type=int, default=2, help="cores to use on both sides")
    p.add_argument("--warmup", type=int, default=5, help="warm-up steps")
    p.add_argument("--group", type=int, default=10, help="steps per group")
    p.add_argument("--groups", type=int, default=5, help="groups per run")
    p.add_argument("--compile", action="store_true", help="also run the peer under torch.compile")
    p.add_argument("--python", default=sys.executable, help="the interpreter that has torch")
    p.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    a = p.parse_intermixed_args()
    if a.rounds < 3:
        p.error("--rounds must be at least 3, or there is no spread to speak of")
    for name in ("threads", "warmup", "group", "groups"):
        if getattr(a, name) < 1:
            p.error(f"--{name} must be at least 1")
    if not a.flatout.is_file():
        p.error(f"there is no file {a.flatout}; build it with: cargo build --release")
    a.flatout = a.flatout.resolve()
    return a


def pin(threads):
    """Pins this process and its children to `threads` cores and returns them, or None where the system does not support it."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < threads:
        raise SystemExit(f"{threads} cores are asked for and {len(cores)} may be used; lower --threads")
    os.sched_setaffinity(0, cores[:threads])
    return cores[:threads]


def run(command, environment=None):
    """The command's standard output, wall time and peak memory; exits with its error message if it fails."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        began = time.perf_counter()
        child = subprocess.Popen(command, stdout=out, stderr=err, env=os.environ | (environment or {}))
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        wall_seconds = time.perf_counter() - began
        out.seek(0)
        err.seek(0)
        if child.returncode != 0:
            words = err.read().decode(errors="replace")[-2000:]
            raise SystemExit(f"{' '.join(map(str, command))}\nended with {child.returncode}:\n{words}")
        # Linux counts in KiB, macOS in bytes.
        unit = 1 if sys.platform == "darwin" else 1024
        return out.read().decode(), wall_seconds, usage.ru_maxrss * unit


def run_flatout(a, folder):
    steps = a.warmup + a.group * a.groups
    settings = {
        "train.steps": steps, "schedule.warmup_steps": 0, "eval.rows": 0, "eval.every": 0, "checkpoint.every": 0,
        "log.every": 1, "backend": "cpu", "precision": "fp32",
    }
    command = [a.flatout, "train", "tiny", *(f"{key}={value}" for key, value in settings.items()), *a.overrides]
    command += ["--run", folder, "--json"]
    # Where cores cannot be pinned, at least the numbers of threads are equal.
    out, wall_seconds, peak = run(command, {"RAYON_NUM_THREADS": str(a.threads)})
    events = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    times = [event["step_ms"] for event in events if event.get("event") == "step"]
    if len(times) != steps:
        raise SystemExit(f"flatout reported {len(times)} steps and {steps} were asked for")
    timed = times[a.warmup:]
    means = [statistics.fmean(timed[i : i + a.group]) for i in range(0, len(timed), a.group)]
    config = tomllib.loads((Path(folder) / "config.toml").read_text())
    step_ms = statistics.median(means)
    tokens = config["train"]["batch"] * config["model"]["context"]
    measured = {"tokens_per_second": tokens * 1000 / step_ms, "step_ms": step_ms, "peak_rss_bytes": peak}
    return measured | {"wall_seconds": wall_seconds}, config


def peer_flags(config):
    """The peer's flags for a resolved config; unsupported configs are refused."""
    for path, expected in PEER_COMPUTES.items():
        section, key = path.split(".")
        found = config[section].get(key, expected)
        if found != expected:
            raise SystemExit(f"{path} is {found}, and the PyTorch peer computes {expected} only; drop that override")
    model, optimizer = config["model"], config["optimizer"]
    flags = {
        "--width": model["width"],
        "--layers": model["layers"],
        "--heads": model["heads"],
        "--kv-heads": model.get("kv_heads", model["heads"]),
        "--head-size": model.get("head_size", model["width"] // model["heads"]),
        "--ffn": model["ffn"],
        "--vocab": model["vocab"],
        "--context": model["context"],
        "--norm-eps": model["norm_eps"],
        "--rope-theta": model["rope_theta"],
        "--batch": config["train"]["batch"],
        "--lr": optimizer["lr"],
        "--eps": optimizer["eps"],
        "--weight-decay": optimizer["weight_decay"],
        "--clip": optimizer["clip"],
    }
    words = [str(word) for pair in flags.items() for word in pair]
    words += ["--betas", *map(str, optimizer["betas"])]
    words.append("--qk-norm" if model["qk_norm"] else "--no-qk-norm")
    words.append("--tied" if model["tied"] else "--no-tied")
    return words


def run_peer(a, config, compiled):
    command = [a.python, PEER, *peer_flags(config), "--threads", str(a.threads), "--warmup", str(a.warmup)]
    command += ["--steps", str(a.group), "--groups", str(a.groups), *(["--compile"] if compiled else [])]
    out, wall_seconds, peak = run(command)
    return json.loads(out.splitlines()[-1]) | {"peak_rss_bytes": peak, "wall_seconds": wall_seconds}


def summary(runs):
    rates = [r["tokens_per_second"] for r in runs]
    median = statistics.median(rates)
    return {
        "tokens_per_second": round(median, 1),
        "smallest": round(min(rates), 1),
        "largest": round(max(rates), 1),
        "spread": round((max(rates) - min(rates)) / median, 4),
        "step_ms": round(statistics.median(r["step_ms"] for r in runs), 3),
        "peak_rss_bytes": max(r["peak_rss_bytes"] for r in runs),
        "wall_seconds": round(statistics.median(r["wall_seconds"] for r in runs), 2),
    }


def measure(a):
    """Makes the runs; returns those of each side by name, PyTorch's version and the resolved config."""
    peers = {"PyTorch eager": False} | ({"PyTorch compile": True} if a.compile else {})
    runs = {name: [] for name in ["flatout", *peers]}

    def note(name, measured):
        runs[name].append(measured)
        print(f"{name}: {measured['tokens_per_second']:,.0f} tokens/s", file=sys.stderr)

    with tempfile.TemporaryDirectory() as scratch:
        for round_ in range(a.rounds):
            measured, config = run_flatout(a, str(Path(scratch) / f"round-{round_}"))
            note("flatout", measured)
            for name, compiled in peers.items():
                note(name, run_peer(a, config, compiled))
    return runs, runs["PyTorch eager"][0]["torch"], config


def main():
    a = parse_arguments()
    cores = pin(a.threads)
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"warning: {load:.1f} other tasks are running, so these times are unreliable", file=sys.stderr)
    runs, torch_version, config = measure(a)
    sides = {name: summary(of_side) for name, of_side in runs.items()}
    fastest = max((name for name in sides if name != "flatout"), key=lambda name: sides[name]["tokens_per_second"])
    ratio = sides["flatout"]["tokens_per_second"] / sides[fastest]["tokens_per_second"]
    if a.json:
        print(json.dumps({
            "sides": sides, "ratio": round(ratio, 4), "against": fastest, "rounds": a.rounds, "threads": a.threads,
            "cores": cores, "load_before": load, "torch": torch_version,
            "config": {key: config[key] for key in ("model", "train")},
        }))
        return
    pinned = f"cores {', '.join(map(str, cores))}" if cores else f"{a.threads} threads, not pinned"
    print(f"recipe tiny, f32, {pinned}, {a.rounds} rounds, PyTorch {torch_version}")
    print(f"{'':16} {'tokens/s':>10} {'smallest':>10} {'largest':>10} {'spread':>7} {'step ms':>9} {'peak MiB':>9}")
    for name, s in sides.items():
        print(f"{name:16} {s['tokens_per_second']:>10,.0f} {s['smallest']:>10,.0f} {s['largest']:>10,.0f}"
              f" {s['spread']:>7.1%} {s['step_ms']:>9.2f} {s['peak_rss_bytes'] / 2**20:>9,.0f}")
    print(f"flatout / {fastest}: {ratio:.2f}")


if __name__ == "__main__":
    main()
