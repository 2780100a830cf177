"""Compares flatout with PyTorch on one GPU: the recipe `pretrain-226m`, or a decoder of other sizes, in interleaved runs.

    cargo build --profile ship
    python bench/pretrain_gpu.py target/ship/flatout --rows 32 --rounds 2
    python bench/pretrain_gpu.py target/ship/flatout --rows 4 8 --rounds 1 --json
    python bench/pretrain_gpu.py target/ship/flatout --precision bf16 fp8 --peers compile layers-fp8 eager
    python bench/pretrain_gpu.py target/ship/flatout --rows 8 --width 2048 --layers 24 --heads 16 --kv-heads 8 \\
        --head-size 128 --ffn 5504

One round is a run of flatout in each precision, then a run of each peer (bench/peers/pretrain_torch.py: bf16 autocast, cuDNN
attention, fused AdamW; `compile` with torch.compile of the whole model, `layers` of one layer for all, `-fp8` with 8-bit products).
Every run is a new process. Both sides train on uniformly random tokens of the whole vocabulary and report the median step after a
warm-up, memory (of tensors, and of the process on the device) and the seconds from the start of the process to steady steps. MFU
counts six FLOP per weight of a product and token, and those of causal attention, over 989 TFLOP/s (--peak).
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import steady
from words import words_of

PEER = Path(__file__).resolve().parent / "peers" / "pretrain_torch.py"


def write_data(folder, vocab, words):
    """Writes a tokeniser of `vocab` words and a text of random words, so that tokens are about equally likely."""
    names = words_of(folder, vocab)
    draw = random.Random(0)
    with open(folder / "text.txt", "w") as out:
        for _ in range(words // 64):
            out.write(" ".join(names[2 + draw.randrange(vocab - 2)] for _ in range(64)) + "\n")


SIZES = dict(width=768, layers=32, heads=12, kv_heads=4, head_size=64, ffn=2048)
VOCAB, CONTEXT = 32768, 2048


def run_flatout(binary, folder, a, rows, precision, name):
    run = folder / f"run-{name}"
    overrides = [f"train.steps={a.steps}", f"train.batch={rows}", f"train.micro_batch={rows}", "eval.rows=0",
                 "checkpoint.every=0", "schedule.warmup_steps=2", f"data.path={folder}/text.txt",
                 f"data.tokenizer={folder}/tokenizer.json", f"precision={precision}"]
    overrides += [f"model.{key}={getattr(a, key)}" for key in SIZES] + a.override
    done = steady.run([binary, "train", "pretrain-226m", *overrides, "--run", str(run)], a.steps)
    ms = statistics.median(step["step_ms"] for step in done["steps"])
    return dict(peer=f"flatout {precision}", tokens_per_second=rows * CONTEXT * 1e3 / ms, step_ms=ms,
                first_steady_seconds=done["first_steady_seconds"], **done["memory"],
                loss=done["steps"][-1]["loss"], switches=done["start"]["switches"])


def run_torch(python, a, rows, peer):
    command = [python, str(PEER), "--rows", str(rows)]
    command += [word for key in SIZES for word in (f"--{key}", str(getattr(a, key)))]
    command += dict(compile=["--compile", "whole"], layers=["--compile", "layers"], eager=[])[peer.split("-")[0]]
    command += ["--fp8"] * peer.endswith("fp8")
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def flops_a_token(a):
    """FLOP per token of products and causal attention, forward and backward."""
    q, kv = a.heads * a.head_size, a.kv_heads * a.head_size
    layer = a.width * (q + 2 * kv) + q * a.width + 3 * a.width * a.ffn
    return 6 * (a.layers * layer + a.width * VOCAB) + 6 * a.layers * q * CONTEXT


def show(a, rows, results, gpu):
    print(f"{a.layers} layers of {a.width}, {rows} x {CONTEXT} tokens; {gpu}")
    print(f"{'':18} {'tokens/s':>10} {'step ms':>8} {'spread':>7} {'MFU':>6} {'peak GiB':>9} {'of card':>8} {'first steady s':>14} {'loss':>8}")
    middle, peak = {}, {}
    for peer, some in results.items():
        speeds = [r["tokens_per_second"] for r in some]
        middle[peer], peak[peer] = statistics.median(speeds), steady.memory(some)
        spread = (max(speeds) - min(speeds)) / middle[peer]
        print(f"{peer:18} {middle[peer]:10,.0f} {statistics.median(r['step_ms'] for r in some):8.1f} {spread:7.1%} "
              f"{middle[peer] * flops_a_token(a) / a.peak / 1e12:6.1%} {peak[peer][0] / 2**30:9.1f} {peak[peer][1] / 2**30:8.1f} "
              f"{statistics.median(r['first_steady_seconds'] for r in some):14.1f} {some[0]['loss']:8.3f}")
    others = [name for name in middle if not name.startswith("flatout")]
    if others:
        best = max(others, key=middle.get)
        for ours in (name for name in middle if name.startswith("flatout")):
            print(f"{ours} / {best}: speed {middle[ours] / middle[best]:.3f}, {steady.memory_ratio(peak[ours], peak[best])}")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("flatout")
    p.add_argument("override", nargs="*", help="key=value for flatout only")
    p.add_argument("--rows", type=int, nargs="+", default=[32])
    for key, value in SIZES.items():
        p.add_argument(f"--{key.replace('_', '-')}", type=int, default=value)
    p.add_argument("--precision", nargs="+", default=["bf16"], help="precisions of flatout, one run each")
    p.add_argument("--peers", nargs="*", default=["compile"], choices=[how + what for how in ("compile", "layers", "eager") for what in ("", "-fp8")])
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--peak", type=float, default=989, help="peak TFLOP/s for MFU")
    p.add_argument("--python", default=sys.executable)
    p.add_argument("--json", action="store_true")
    a = p.parse_args()
    table = {}
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        write_data(folder, VOCAB, 1 << 20)
        for rows in a.rows:
            runs = [lambda i, x=x: run_flatout(a.flatout, folder, a, rows, x, f"{rows}-{x}-{i}") for x in a.precision]
            runs += [lambda i, x=x: run_torch(a.python, a, rows, x) for x in a.peers]
            for i in range(a.rounds):
                for run in runs:
                    result = run(i)
                    table.setdefault(rows, {}).setdefault(result["peer"], []).append(result)
                    print(f"{rows:3} x {CONTEXT} {result['peer']:18} {result['tokens_per_second']:10,.0f} tokens/s",
                          file=sys.stderr, flush=True)
    gpu = steady.gpu()
    if a.json:
        sizes = {key: getattr(a, key) for key in SIZES}
        print(json.dumps(dict(gpu=gpu, sizes=sizes, flops_a_token=flops_a_token(a), rows=table)))
        return
    for rows, results in table.items():
        show(a, rows, results, gpu)


if __name__ == "__main__":
    main()
