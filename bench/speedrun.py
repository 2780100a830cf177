#!/usr/bin/env python3
"""Compares the time to a held-out loss of GPT-2 with AdamW, at the best of several learning rates, and of `gpt2-speedrun`, on the same text.

    python bench/package_text.py --out docs.jsonl.zst
    cargo build --profile ship
    python bench/speedrun.py target/ship/flatout docs.jsonl.zst
    python bench/speedrun.py target/ship/flatout docs.jsonl.zst --llmc ../llm.c/train_gpt2cu
    python bench/speedrun.py target/ship/flatout docs.jsonl.zst --results done.json --runs 3
    python bench/speedrun.py target/ship/flatout docs.jsonl.zst backend=cpu model.layers=4 model.width=64 model.heads=4 model.ffn=256 \\
        model.context=128 model.vocab=4096 train.batch=16 --speedrun 'schedule.windows=[32,64,128]' --vocab 4096 --steps 200 \\
        --lengths 80 120 160 --seeds 1

The baseline is `gpt2-124m` with 128 rows of 1,024 tokens per update, 800 updates and a cosine schedule with a tenth of them as warm-up,
once for each of `--rates`. The rate with the lowest final held-out loss is run with every seed; its last held-out loss is the goal of that
seed. `gpt2-speedrun` is run with each of `--lengths`, as the number of updates of its schedule, until one reaches the goal of the first
seed; that length is run with the other seeds. Time counts updates only: the sum of a run's steps. Losses between two evaluations are
interpolated linearly. Every run is a new process, and the runs of the seeds are interleaved. Overrides apply to both recipes, and those of
`--speedrun` after them to `gpt2-speedrun` only. `--results` keeps the evaluations of finished runs in a file, and a later call with the same
arguments continues after them; `--runs` ends a call after this number of runs. GPUs of one kind differ by some 2%, so let the runs of a seed share one.

`--llmc` names llm.c's program, built with nvcc from its public source: it trains the same model on the same tokens with the best rate
and the same batch, schedule and weight decay. Its losses are of its own held-out shard, which has our held-out tokens in its format.
Without it a line says that it is left out. Exit code 0 if the time is at most `--most` of the baseline's with every seed.
"""

import argparse
import json
import re
import statistics
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

CONTEXT = 1024
BATCH = 128


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("flatout", type=Path)
    p.add_argument("text", type=Path, help="documents in a format of `flatout data prepare`, or a folder of shards")
    p.add_argument("override", nargs="*", metavar="KEY=VALUE", help="overrides of both recipes")
    p.add_argument("--speedrun", nargs="+", default=[], metavar="KEY=VALUE", help="overrides of the speed run only")
    p.add_argument("--vocab", type=int, default=50257, help="tokens of the tokeniser that is trained on the text")
    p.add_argument("--steps", type=int, default=800, help="updates of the baseline")
    p.add_argument("--rates", type=float, nargs="+", default=[6e-4, 1.2e-3, 2.4e-3])
    p.add_argument("--lengths", type=int, nargs="+", default=[80, 120, 160, 240, 320, 400], help="updates of the speed-run, tried in this order")
    p.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="the rates are compared with the first")
    p.add_argument("--every", type=int, help="updates between evaluations; by default a fortieth of the baseline's")
    p.add_argument("--most", type=float, default=0.45)
    p.add_argument("--results", type=Path, help="a JSON file of finished runs, which are not run again")
    p.add_argument("--runs", type=int, help="runs of this call")
    p.add_argument("--llmc", type=Path, help="llm.c's train_gpt2cu")
    a = p.parse_intermixed_args()
    a.flatout = a.flatout.resolve()
    a.every = a.every or max(a.steps // 40, 1)
    return a


def finish(typed):
    done = subprocess.run([str(word) for word in typed], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, typed))} ended with code {done.returncode}\n{done.stderr}")
    return done.stdout


def run(a, folder, name, recipe, words, own=()):
    """The evaluations of a run as (seconds of updates, updates, held-out loss); `own` are overrides of its recipe only."""
    words = [*words, f"eval.every={a.every}", "checkpoint.every=0", "log.every=1", *a.override, *own]
    done = json.loads(a.results.read_text()) if a.results and a.results.exists() else {}
    key = " ".join([recipe, *words])
    if key in done:
        return done[key]
    if a.runs == 0:
        sys.exit(f"{name} is for a later call, as --runs asks")
    a.runs = a.runs and a.runs - 1
    typed = [a.flatout, "train", recipe, f"data.path={a.shards}", *words]
    seconds, steps, points = 0.0, 0, []
    for line in finish([*typed, "--run", folder / name, "--json"]).splitlines():
        event = json.loads(line)
        if event["event"] == "step":
            seconds, steps = seconds + event["step_ms"] / 1e3, event["step"]
        if event["event"] == "eval":
            points.append((seconds, steps, event["loss"]))
    print(f"{name:32} {steps:5} updates {seconds:8.1f} s  held out {points[-1][2]:.4f}", flush=True)
    if a.results:
        a.results.write_text(json.dumps(done | {key: points}, indent=1))
    return points


def baseline(a, folder, rate, seed):
    words = [f"train.batch={BATCH}", f"train.steps={a.steps}", f"schedule.warmup_steps={a.steps // 10}", "eval.rows=256", f"lr={rate}", f"train.seed={seed}"]
    return run(a, folder, f"adamw-lr={rate:g}-seed={seed}", "gpt2-124m", words)


def speedrun(a, folder, length, seed):
    words = [f"train.steps={length}", f"schedule.decay_steps={length * 2 // 5}", f"train.seed={seed}"]
    return run(a, folder, f"speedrun-steps={length}-seed={seed}", "gpt2-speedrun", words, a.speedrun)


def reached(points, goal):
    """Seconds to a loss, or None."""
    before = None
    for seconds, _, loss in points:
        if loss <= goal:
            return seconds if before is None else before[0] + (seconds - before[0]) * (before[1] - goal) / (before[1] - loss)
        before = (seconds, loss)
    return None


def token_files(a, folder):
    """Converts the shards to llm.c's token files: one to train on, and one of the last half percent of the documents."""
    documents, end = [], json.loads((a.shards / "tokenizer.json").read_text())["added_tokens"][0]["id"]
    for shard in sorted(a.shards.glob("shard-*.tokens")):
        raw = shard.read_bytes()
        width, count, tokens = struct.unpack("<IQQ", raw[12:32])
        assert width == 2, "llm.c's files of GPT-2 tokens have two bytes a token"
        index = 64 + (2 * tokens + 7) // 8 * 8
        ends = [struct.unpack_from("<Q", raw, index + 24 * i)[0] for i in range(count)]
        for begin, stop in zip([0, *ends], ends):
            documents.append(raw[64 + 2 * begin : 64 + 2 * stop])
    mark = struct.pack("<H", end)
    held = len(documents) // 200
    files = []
    for name, part in [("train.bin", documents[:-held]), ("val.bin", documents[-held:])]:
        body = b"".join(mark + document for document in part)
        header = struct.pack("<3i", 20240520, 1, len(body) // 2).ljust(1024, b"\0")
        (folder / name).write_bytes(header + body)
        files.append(folder / name)
    return files


def llmc(a, folder, rate):
    """llm.c on the same tokens: its last held-out loss, and the seconds of its updates."""
    train, held_out = token_files(a, folder)
    words = ["-i", train, "-j", held_out, "-e", "d12", "-b", 64, "-t", CONTEXT, "-d", BATCH * CONTEXT, "-x", a.steps, "-l", rate, "-u", a.steps // 10,
             "-q", 0.1, "-c", 0.1, "-v", a.every, "-s", 0, "-n", 0, "-r", 0, "-ge", 1]
    output = finish([a.llmc.resolve(), *words])
    seconds = sum(float(ms) for ms in re.findall(r"step +\d+/\d+ .*?\| *([\d.]+) ms", output)) / 1e3
    losses = re.findall(r"val loss ([\d.]+)", output)
    if not losses or not seconds:
        sys.exit(f"llm.c printed no losses or no times:\n{output[-2000:]}")
    print(f"{'llm.c':32} {a.steps:5} updates {seconds:8.1f} s  held out {float(losses[-1]):.4f} (of its own part)", flush=True)


def main():
    a = arguments()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        a.shards = a.text if a.text.is_dir() else folder / "shards"
        if not a.text.is_dir():
            finish([a.flatout, "data", "prepare", a.text, "--out", a.shards, "--vocab", a.vocab])
        first = a.seeds[0]
        rates = {rate: baseline(a, folder, rate, first) for rate in a.rates}
        best = min(a.rates, key=lambda rate: rates[rate][-1][2])
        print(f"the baseline's best rate is {best:g}", flush=True)
        own, ratios, length = {first: rates[best]}, [], None
        for seed in a.seeds:
            if seed not in own:
                own[seed] = baseline(a, folder, best, seed)
            seconds, _, goal = own[seed][-1]
            for length in a.lengths if length is None else [length]:
                took = reached(speedrun(a, folder, length, seed), goal)
                if took is not None:
                    break
            if took is None:
                sys.exit(f"the speed-run was not at {goal:.4f} with seed {seed}")
            ratios.append(took / seconds)
            print(f"seed {seed}: {goal:.4f} after {took:.1f} s of {seconds:.1f}: {ratios[-1]:.3f}", flush=True)
        if a.llmc:
            llmc(a, folder, best)
        else:
            print("llm.c is left out: --llmc names its program")
    print(f"time to the baseline's last held-out loss: {statistics.fmean(ratios):.3f} of its own ({min(ratios):.3f} to {max(ratios):.3f}), seeds {', '.join(map(str, a.seeds))}, {length} updates of {a.steps}")
    sys.exit(0 if max(ratios) <= a.most else 1)


if __name__ == "__main__":
    main()
