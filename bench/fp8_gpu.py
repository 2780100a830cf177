"""Effect of 8-bit products on the loss: compares `precision=fp8` with bf16 on the same data, and with itself after kills and resumes.

    cargo build --profile ship
    python bench/fp8_gpu.py target/ship/flatout
    python bench/fp8_gpu.py target/ship/flatout --resume
    python bench/fp8_gpu.py target/ship/flatout --steps 20 --seeds 1 --layers 2 --resume backend=cpu

A decoder of 30M parameters learns the synthetic language for 2,000 updates of 32 x 256 tokens, with each of three seeds and each
precision, in fp8 with every layer in 8 bits; the seeds of a precision run concurrently, since one run leaves most of a large GPU
idle. Prints the loss on 256 held-out rows and the mean of the last hundred losses, each with its ratio to that of bf16 with the same
seed. Exit code 0 if the means of both ratios over the seeds are within half a percent of 1.

`--resume` instead trains in fp8 with deterministic=on, once without interruption and once killed three times with SIGKILL after a
save, and resumed. Exit code 0 if all losses and the final state have the same bits.
"""

import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import decoder_30m

PRECISIONS = ["bf16", "fp8"]
WITHIN = 0.005
KILLS = 3
# By default so small a model would keep most layers in bf16, because they would not gain.
LAYERS = ["train.fp8_layers=all"]


def train(a, folder, precision, seed):
    run = decoder_30m.train(a, folder / f"{precision}-{seed}", seed, f"precision={precision}", *LAYERS, f"eval.every={a.steps}",
                            "eval.rows=256")
    active = run["start"]["switches"]["precision"]
    if active != precision:
        sys.exit(f"precision={precision} was requested and {active} is active")
    return dict(precision=precision, seed=seed, first=run["losses"][0], last=decoder_30m.last(run["losses"], min(100, a.steps // 2)),
                held_out=run["held_out"], step_ms=run["step_ms"], seconds=run["seconds"])


def compare(a, folder):
    rows = []
    for precision in PRECISIONS:
        with ThreadPoolExecutor(a.seeds) as side_by_side:
            rows += side_by_side.map(lambda seed: train(a, folder, precision, seed), range(1, a.seeds + 1))
    bf16 = {row["seed"]: row for row in rows if row["precision"] == "bf16"}
    for row in rows:
        row["held_out_ratio"] = row["held_out"] / bf16[row["seed"]]["held_out"]
        row["last_ratio"] = row["last"] / bf16[row["seed"]]["last"]
    means = {key: statistics.fmean(row[key] for row in rows if row["precision"] == "fp8") for key in ["held_out_ratio", "last_ratio"]}
    if a.json:
        print(json.dumps(dict(steps=a.steps, rows=rows, **means)))
    else:
        print(f"{a.steps} updates, {a.seeds} seeds")
        print(f"{'':10} {'first':>8} {'held out':>9} {'of bf16':>9} {'last 100':>9} {'of bf16':>9} {'step ms':>8} {'seconds':>8}")
        for row in sorted(rows, key=lambda row: (row["seed"], row["precision"])):
            print(f"seed {row['seed']} {row['precision']:4} {row['first']:8.4f} {row['held_out']:9.5f} {row['held_out_ratio']:9.5f} "
                  f"{row['last']:9.5f} {row['last_ratio']:9.5f} {row['step_ms']:8.2f} {row['seconds']:8.0f}")
        print(f"fp8 of bf16, mean over the seeds: held out {means['held_out_ratio']:.5f}, last losses {means['last_ratio']:.5f}")
    return all(abs(mean - 1) < WITHIN for mean in means.values())


def events(run):
    log = run / "events.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


def losses(run):
    """Losses by step; the last of several lines for one step counts."""
    return {event["step"]: event["loss"] for event in events(run) if event["event"] == "step"}


def state(run):
    newest = max((run / "checkpoints").glob("step-*"), key=lambda path: int(path.name.split("-")[1]))
    return newest.name, hashlib.sha256((newest / "state.safetensors").read_bytes()).hexdigest()


def killed(typed, run):
    """A process of the run that is ended by SIGKILL some time after its first save."""
    process = subprocess.Popen([*typed, "--resume", "auto"], stdout=subprocess.PIPE, text=True)
    has_saved, behind = False, 0
    for line in process.stdout:
        has_saved |= '"event":"saved"' in line
        behind += has_saved and '"event":"step"' in line
        if behind == 3:
            process.kill()
    process.wait()
    return behind >= 3


def resume(a, folder):
    every = max(a.steps // 8, 2)
    own = ["precision=fp8", *LAYERS, "deterministic=on", f"checkpoint.every={every}", f"eval.every={a.steps}", "eval.rows=0"]
    typed = {name: decoder_30m.command(a, folder / name, 1, *own) for name in ["unbroken", "broken"]}
    kills = sum(killed(typed["broken"], folder / "broken") for _ in range(KILLS))
    for name, more in [("broken", ["--resume", "must"]), ("unbroken", [])]:
        done = subprocess.run([*typed[name], *more], stdout=subprocess.DEVNULL)
        if done.returncode != 0:
            sys.exit(f"{' '.join(typed[name])} ended with code {done.returncode}")
    broken, unbroken = folder / "broken", folder / "unbroken"
    resumed = [event["step"] for event in events(broken) if event["event"] == "resume"]
    a_losses, b_losses = losses(broken), losses(unbroken)
    same = a_losses == b_losses and len(a_losses) == a.steps
    same_state = state(broken) == state(unbroken)
    report = dict(kills=kills, resumed_after=resumed, losses=len(a_losses), same_losses=same, same_state=same_state)
    print(json.dumps(report) if a.json else
          f"{kills} kills, resumed after {resumed}: {len(a_losses)} losses {'equal' if same else 'NOT EQUAL'}, "
          f"last {a_losses[max(a_losses)]!r}; state {'equal' if same_state else 'NOT EQUAL'} ({state(broken)[1][:16]})")
    return same and same_state and kills == KILLS and len(resumed) >= KILLS


def main():
    p = decoder_30m.arguments(__doc__)
    p.add_argument("--resume", action="store_true")
    a = p.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as folder:
        passed = (resume if a.resume else compare)(a, Path(folder))
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
