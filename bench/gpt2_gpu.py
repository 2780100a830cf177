#!/usr/bin/env python3
"""Pretraining of GPT-2 with 124M parameters on one GPU: flatout and llm.c in interleaved runs.

    cargo build --profile ship
    git clone https://github.com/karpathy/llm.c && make -C llm.c train_gpt2cu USE_CUDNN=1
    python bench/gpt2_gpu.py target/ship/flatout --llmc llm.c/train_gpt2cu
    python bench/gpt2_gpu.py target/debug/flatout --small --rounds 1

64 rows of 1,024 tokens at once and 524,288 tokens per update on both sides, bf16, random tokens; llm.c keeps its master weights in fp32 as flatout does
(-w 1, its default) and recomputes nothing (-r 0), with GELU fused (-ge 1). llm.c needs nvcc and cuDNN's frontend to be built: with CUDA 13 the location in its
call of cudaMemAdvise must become `cudaMemLocation{cudaMemLocationTypeHost, 0}`, and recent frontends need `-lnvrtc -lcuda` among NVCC_LDFLAGS.
Without --llmc flatout runs alone and a line says so. Prints the median step after a warm-up, tokens per second and the ratio.
"""

import argparse
import random
import re
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
from array import array
from pathlib import Path

import steady

ROWS, CONTEXT, BATCH, VOCAB = 64, 1024, 512, 50257
SMALL = ["backend=cpu", "model.layers=2", "model.width=64", "model.heads=4", "model.ffn=256", "model.context=64", "model.vocab=512"]


def run_flatout(a, folder):
    rows, batch, own = (4, 8, SMALL) if a.small else (ROWS, BATCH, [])
    command = [a.flatout, "train", "gpt2-124m", "data.source=synthetic", f"train.batch={batch}", f"train.micro_batch={rows}", "train.steps=10000",
               "schedule.warmup_steps=2", "eval.rows=0", "checkpoint.every=0", "log.every=1", *own, *a.override, "--run", str(folder / "run")]
    done = steady.run(command, steady.WARM + a.steps)
    shutil.rmtree(folder / "run", ignore_errors=True)
    step = statistics.median(event["step_ms"] for event in done["steps"])
    return step, 1e3 * batch * (64 if a.small else CONTEXT) / step, done["memory"]["card_bytes"] / 2**30


def write_tokens(path, count):
    """Random tokens in llm.c's format."""
    draw = random.Random(1)
    tokens = array("H", (draw.randrange(VOCAB) for _ in range(count)))
    path.write_bytes(struct.pack("<3i", 20240520, 1, count).ljust(1024, b"\0") + tokens.tobytes())


def run_llmc(a, folder):
    tokens = folder / "tokens.bin"
    if not tokens.exists():
        write_tokens(tokens, 2 * BATCH * CONTEXT + 1)
    # It evaluates at the first and the last step, and divides by the interval.
    words = ["-i", tokens, "-j", tokens, "-e", "d12", "-b", ROWS, "-t", CONTEXT, "-d", BATCH * CONTEXT, "-x", steady.WARM + a.steps, "-r", 0, "-ge", 1,
             "-v", 1000000, "-s", 0, "-n", 0]
    done = subprocess.run([str(word) for word in [a.llmc.resolve(), *words]], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    steps = [float(ms) for ms in re.findall(r"step +\d+/\d+ .*?\| *([\d.]+) ms", done.stdout)][steady.WARM:]
    if done.returncode != 0 or not steps:
        sys.exit(f"llm.c ended with code {done.returncode}:\n{done.stdout[-2000:]}")
    return statistics.median(steps), 1e3 * BATCH * CONTEXT / statistics.median(steps), None


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("flatout")
    p.add_argument("override", nargs="*", help="key=value for flatout only")
    p.add_argument("--llmc", type=Path, help="llm.c's train_gpt2cu")
    p.add_argument("--steps", type=int, default=16)
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--small", action="store_true", help="sizes for a machine without a GPU, which only show that the script runs")
    a = p.parse_args()
    if a.llmc and not a.llmc.is_file():
        sys.exit(f"{a.llmc} is not there: build it with `make train_gpt2cu USE_CUDNN=1` in llm.c")
    peers = {"flatout": run_flatout} | ({"llm.c": run_llmc} if a.llmc else {})
    results = {name: [] for name in peers}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(a.rounds):
            for name, measure in peers.items():
                results[name].append(measure(a, Path(folder)))
    print(steady.gpu())
    print(f"{'':10} {'step ms':>9} {'tokens/s':>10} {'card GiB':>9}")
    for name, some in results.items():
        card = f"{some[0][2]:9.1f}" if some[0][2] is not None else ""
        print(f"{name:10} {statistics.median(r[0] for r in some):9.1f} {statistics.median(r[1] for r in some):10,.0f} {card}")
    if not a.llmc:
        print("llm.c is left out: --llmc names its program, which needs nvcc and cuDNN's frontend to be built")
        return
    speed = {name: statistics.median(r[1] for r in some) for name, some in results.items()}
    print(f"flatout / llm.c: {speed['flatout'] / speed['llm.c']:.3f}")


if __name__ == "__main__":
    main()
