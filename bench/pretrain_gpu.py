"""flatout against PyTorch on one GPU: the recipe `pretrain-226m` in bf16, in turns.

    cargo build --profile ship
    python bench/pretrain_gpu.py target/ship/flatout --rows 32 --rounds 2
    python bench/pretrain_gpu.py target/ship/flatout --rows 8 --layers 4 --rounds 1 --json

One round is a run of flatout, then a run of the compiled peer (bench/peers/pretrain_torch.py: bf16 autocast, cuDNN
attention, fused AdamW, torch.compile); with --eager also the peer uncompiled. Every run is a fresh process. Both sides
train on uniformly random tokens of the whole vocabulary, both report the median step after a warm-up, peak memory
(flatout: the planned arena and the driver's share) and the seconds from the start of the process to steady steps.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PEER = Path(__file__).resolve().parent / "peers" / "pretrain_torch.py"


def write_data(folder, vocab, words):
    """A word-level tokenizer.json of `vocab` tokens and a text of random words, so that every token is about equally likely."""
    names = ["<bos>", "<eos>"] + [f"w{i}" for i in range(vocab - 2)]
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [dict(id=i, content=names[i], single_word=False, lstrip=False, rstrip=False, normalized=False,
                              special=True) for i in range(2)],
        "normalizer": None, "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": {name: i for i, name in enumerate(names)}, "unk_token": "w0"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    draw = random.Random(0)
    with open(folder / "text.txt", "w") as out:
        for _ in range(words // 64):
            out.write(" ".join(names[2 + draw.randrange(vocab - 2)] for _ in range(64)) + "\n")


def run_flatout(binary, folder, a, name):
    run = folder / f"run-{name}"
    overrides = [f"train.steps={a.steps}", f"train.batch={a.rows}", f"train.micro_batch={a.rows}", "eval.rows=0",
                 "checkpoint.every=0", "schedule.warmup_steps=2", f"model.layers={a.layers}", f"data.path={folder}/text.txt",
                 f"data.tokenizer={folder}/tokenizer.json", "precision=bf16", *a.override]
    began = time.perf_counter()
    process = subprocess.Popen([binary, "train", "pretrain-226m", *overrides, "--run", str(run), "--json"],
                               stdout=subprocess.PIPE, text=True)
    times, first, start, last = [], None, {}, {}
    for line in process.stdout:
        event = json.loads(line)
        if event["event"] == "start":
            start = event
        if event["event"] == "step":
            last = event
            if event["step"] == 4:
                first = time.perf_counter() - began
            if event["step"] > 4:
                times.append(event["step_ms"])
        if event["event"] == "step" and event["step"] == a.steps:
            break
    process.kill()
    process.wait()
    if len(times) < 3:
        sys.exit(f"flatout made {len(times)} steady steps")
    ms = statistics.median(times)
    return dict(peer="flatout", tokens_per_second=a.rows * 2048e3 / ms, step_ms=ms, first_steady_seconds=first,
                peak_bytes=start["arena_bytes"] + start["driver_bytes"], loss=last["loss"], switches=start["switches"])


def run_torch(python, a, compiled):
    command = [python, str(PEER), "--rows", str(a.rows), "--layers", str(a.layers)] + (["--compile"] if compiled else [])
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("flatout")
    p.add_argument("override", nargs="*")
    p.add_argument("--rows", type=int, default=32)
    p.add_argument("--layers", type=int, default=32)
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--python", default=sys.executable)
    p.add_argument("--eager", action="store_true")
    p.add_argument("--json", action="store_true")
    a = p.parse_args()
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        write_data(folder, 32768, 1 << 20)
        for i in range(a.rounds):
            for result in [run_flatout(a.flatout, folder, a, i), run_torch(a.python, a, True)] + (
                    [run_torch(a.python, a, False)] if a.eager else []):
                rows.setdefault(result["peer"], []).append(result)
                print(f"{result['peer']:14} {result['tokens_per_second']:10,.0f} tokens/s", file=sys.stderr, flush=True)
    gpu = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm", "--format=csv,noheader"],
                         stdout=subprocess.PIPE, text=True).stdout.strip()
    if a.json:
        print(json.dumps(dict(gpu=gpu, rows=rows)))
        return
    print(f"pretrain-226m, {a.layers} layers, {a.rows} x 2048 tokens, bf16; {gpu}")
    print(f"{'':14} {'tokens/s':>10} {'step ms':>8} {'spread':>7} {'peak GiB':>9} {'first steady s':>14}")
    middle = {}
    for peer, results in rows.items():
        speeds = [r["tokens_per_second"] for r in results]
        middle[peer] = statistics.median(speeds)
        spread = (max(speeds) - min(speeds)) / middle[peer]
        print(f"{peer:14} {middle[peer]:10,.0f} {statistics.median(r['step_ms'] for r in results):8.1f} {spread:7.1%} "
              f"{results[0]['peak_bytes'] / 2**30:9.1f} {statistics.median(r['first_steady_seconds'] for r in results):14.1f}")
    best = max((name for name in middle if name != "flatout"), key=middle.get)
    print(f"flatout / {best}: {middle['flatout'] / middle[best]:.3f}")


if __name__ == "__main__":
    main()
