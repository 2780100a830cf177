"""Measures how long updates wait for a data set that is streamed from the hub, compared with the same files on disk.

    cargo build --profile ship
    python bench/stream_gpu.py target/ship/flatout
    python bench/stream_gpu.py target/ship/flatout --form jsonl --rate 50 --latency-ms 30
    python bench/stream_gpu.py target/debug/flatout --recipe tiny --megabytes 40 --steps 60     (without a GPU)

A set of random words is written, and served at --rate megabytes per second by a local server with the hub's protocol. The same run is
made from the files (data.order=streamed) and from the server. Prints the share of the steady steps spent waiting for rows
(`data_wait_ms` over `step_ms`), tokens per second, bytes and requests that the server answered, whether the losses are equal to the
bit, and files that the run left on disk. Exits with 1 if the share is above --most, the losses differ, or files are left.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import set_server
import steady

WARM = 5


def train(binary, a, folder, name, words, environment):
    run = folder / name
    command = [binary, "train", a.recipe, *words, f"train.steps={a.steps}", "--run", str(run), "-q"]
    done = subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.DEVNULL)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with code {done.returncode}")
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "step"][WARM:]
    waits = sum(step.get("data_wait_ms") or 0.0 for step in steps)
    end = next(event for event in events if event["event"] == "end")
    return dict(
        losses=[step["loss"] for step in steps], wait=waits / sum(step["step_ms"] for step in steps),
        longest_wait_ms=max(step.get("data_wait_ms") or 0.0 for step in steps),
        step_ms=statistics.median(step["step_ms"] for step in steps),
        tokens_per_second=statistics.median(step["tokens_per_second"] for step in steps),
        data_wait=end.get("data_wait"))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binary")
    parser.add_argument("--recipe", default="pretrain-226m")
    parser.add_argument("--form", choices=["parquet", "jsonl"], default="parquet")
    parser.add_argument("--megabytes", type=float, default=400)
    parser.add_argument("--files", type=int, default=16)
    parser.add_argument("--rate", type=float, default=50, help="megabytes per second; 0 for no limit")
    parser.add_argument("--latency-ms", type=float, default=20, help="latency of every response")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--vocab", type=int, help="size of the vocabulary; by default the recipe's")
    parser.add_argument("--most", type=float, default=0.02, help="the largest accepted share of waiting")
    parser.add_argument("--folder", type=Path, help="the folder of the set; by default a temporary one")
    parser.add_argument("--override", nargs="*", default=[], help="key=value for both runs")
    a = parser.parse_args()
    binary = str(Path(a.binary).resolve())
    with tempfile.TemporaryDirectory() as place:
        folder, kept = Path(place), a.folder or Path(place)
        files = kept / f"{a.form}-{a.megabytes:g}-{a.files}"
        if not files.exists():
            set_server.write_set(files, a.form, a.files, a.megabytes)
        show = subprocess.run([binary, "recipes", "show", a.recipe], stdout=subprocess.PIPE, text=True, check=True).stdout
        vocab = next(int(line.split("=")[1]) for line in show.splitlines() if line.startswith("vocab"))
        first = sorted(files.iterdir())[0]
        subprocess.run([binary, "data", "prepare", str(first), "--out", str(folder / "tokens"), "--vocab",
                        str(a.vocab or vocab)], check=True, stdout=subprocess.DEVNULL)
        common = [f"data.tokenizer={folder}/tokens/tokenizer.json", "data.source=text", *a.override]
        environment = dict(FLATOUT_CACHE=os.environ.get("FLATOUT_CACHE", str(folder / "cache")),
                           HF_HOME=str(folder / "hf"))
        local = train(binary, a, folder, "local", [f"data.path={files}", "data.order=streamed", *common], environment)
        server = set_server.Server(files, a.rate, a.latency_ms)
        environment["HF_ENDPOINT"] = server.endpoint
        remote = train(binary, a, folder, "remote", ["data.path=hf://bench/set", *common], environment)
        server.close()
        pieces = Path(environment["FLATOUT_CACHE"]) / "stream"
        left = [str(path) for path in (pieces, folder / "hf") if path.exists()]
    print(f"{a.recipe}, {a.form} set of {a.megabytes:g} MB in {a.files} files, {a.rate:g} MB/s, {a.latency_ms:g} ms; {steady.gpu()}")
    print(f"{'':8} {'tokens/s':>10} {'step ms':>9} {'waiting':>9} {'longest wait ms':>16}   most of it")
    for name, run in (("local", local), ("server", remote)):
        print(f"{name:8} {run['tokens_per_second']:10.0f} {run['step_ms']:9.1f} {run['wait']:9.2%} {run['longest_wait_ms']:16.1f}"
              f"   {json.dumps(run['data_wait'])}")
    same = local["losses"] == remote["losses"]
    print(f"the server sent {server.bucket.sent / 1e6:.1f} MB in {server.requests} answers; "
          f"losses are {'equal' if same else 'NOT equal'}; {'left behind: ' + ', '.join(left) if left else 'nothing is left behind'}")
    sys.exit(0 if same and not left and remote["wait"] <= a.most else 1)


if __name__ == "__main__":
    main()
