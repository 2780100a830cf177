"""Fine-tuning on one GPU, flatout and transformers + PEFT in interleaved runs: Gemma-3-1B over text pairs with DoRA; and an 8B model
with LoRA, flatout only.

    cargo build --profile ship
    python bench/finetune_gpu.py target/ship/flatout
    python bench/finetune_gpu.py target/ship/flatout --quick
    python bench/finetune_gpu.py target/ship/flatout --cases qwen3-8b --rounds 1 --json
    python bench/finetune_gpu.py target/debug/flatout --small --quick

| case | what is trained |
|---|---|
| full | `gemma3-1b-pairs`: DoRA of rank 16 on q, k, v, o, 32 pairs of 512 tokens |
| lengths | the same with lognormal lengths of mean 200 up to 512: flatout chooses its layout, the peer groups by length and pads to the longest of a batch |
| qwen3-8b | Qwen3-8B's shape, LoRA of rank 16 on all linear weights, answers of 512 tokens on average and at most 4,096, packed into micro-batches of 16,384; flatout only |

One round is a run of flatout for each case, then a run of each peer (bench/peers/gemma_peft.py), which does the cases one after
another. Every run is a new process, weights are random, and tokens uniformly random. tokens/s counts real tokens, not padding:
flatout's over all steps after a warm-up of four, the peer's over groups of steps. "peak" is the memory of tensors, "of card" the
device memory of the process. "best" is the fastest peer. --quick: one round, few steps, the peer compiled by layers; --small: sizes
for a machine without a GPU, which only shows that the script runs.
"""

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import steady
from peers.lengths import drawn
from words import words_of

PEER = Path(__file__).resolve().parent / "peers" / "gemma_peft.py"
CASES = dict(full=512, lengths=200)
"""The mean length of each case with pairs; the longest is 512."""

GEMMA = dict(layers=26, width=1152, head_size=256, vocab=262144)
SMALL_GEMMA = dict(layers=6, width=64, head_size=16, vocab=2048)
QWEN = dict(layers=36, width=4096, heads=32, kv_heads=8, head_size=128, ffn=12288, vocab=151936, context=4096)
SMALL_QWEN = dict(layers=2, width=64, heads=4, kv_heads=2, head_size=16, ffn=128, vocab=512, context=64)

FRAME = 3
"""Special tokens of a pair: <bos> a <eos> b <eos>."""


def write_pairs(path, names, lengths):
    """Pairs of random words with a given number of tokens including the special ones, half of each class."""
    draw = random.Random(2)
    with open(path, "w") as out:
        out.write("text_a,text_b,label\n")
        for i, length in enumerate(lengths):
            sampled = [names[2 + draw.randrange(len(names) - 2)] for _ in range(length - FRAME)]
            half = max(1, len(sampled) // 2)
            out.write(f"{' '.join(sampled[:half])},{' '.join(sampled[half:])},{'same' if i % 2 else 'other'}\n")


def run_flatout(a, folder, name, overrides, recipe):
    run = folder / f"run-{name}"
    command = [a.flatout, "train", recipe, "eval.rows=0", "checkpoint.every=0", "log.every=1", *overrides, *a.override]
    done = steady.run([*command, "--run", str(run)], steady.WARM + a.steps)
    shutil.rmtree(run, ignore_errors=True)
    steps = done["steps"]
    seconds = sum(step["step_ms"] for step in steps) / 1e3
    return dict(peer="flatout", tokens_per_second=(steps[-1]["tokens"] - done["warm"]["tokens"]) / seconds,
                samples_per_second=(steps[-1]["samples"] - done["warm"]["samples"]) / seconds,
                step_ms=statistics.median(step["step_ms"] for step in steps), **done["memory"],
                first_steady_seconds=done["first_steady_seconds"], loss=steps[-1]["loss"],
                padding=statistics.fmean(step.get("padding", 0.0) for step in steps), layout=done["start"]["data"].get("layout"),
                switches=done["start"]["switches"])


def pairs(a, folder, case, round_):
    sizes = SMALL_GEMMA if a.small else GEMMA
    overrides = [f"model.{key}={value}" for key, value in sizes.items()] + ["model.embed_scale=8", "model.ffn=384"] * a.small
    overrides += [f"data.path={folder}/{case}.csv", f"data.tokenizer={folder}/tokenizer.json", f"model.context={a.length}",
                  f"train.batch={a.rows}", f"train.micro_batch={a.rows}", "train.patience=none", "eval.every_epochs=none",
                  "checkpoint.best=false", "data.held_out=0.01"]
    return run_flatout(a, folder, f"{case}-{round_}", overrides, "gemma3-1b-pairs")


def qwen(a, folder, round_):
    sizes = SMALL_QWEN if a.small else QWEN
    overrides = [f"model.{key}={value}" for key, value in sizes.items()]
    overrides += ["model.tied=false", "model.rope_theta=1e6", "data.source=synthetic", f"data.mean_tokens={sizes['context'] // 8}",
                  "packing=on", "train.batch=32", "train.micro_batch=4", "train.steps=1000", "schedule.warmup_steps=2",
                  "adapter.kind=lora", "adapter.rank=16", "optimizer.lr=1e-4"]
    return run_flatout(a, folder, f"qwen3-8b-{round_}", overrides, "pretrain-226m")


def run_peer(a, peer, cases):
    sizes = SMALL_GEMMA if a.small else GEMMA
    command = [a.python, str(PEER), "--rows", str(a.rows), "--length", str(a.length), "--compile", peer, "--mean"]
    command += [str(a.means[case]) for case in cases]
    command += [word for key, value in sizes.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    command += ["--groups", "2", "--steps", "3"] * a.quick + ["--device", "cpu"] * a.small
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with code {done.returncode}")
    return zip(cases, (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")), strict=True)


def show(table, gpu):
    print(gpu)
    print(f"{'':28} {'tokens/s':>10} {'pairs/s':>8} {'step ms':>8} {'spread':>7} {'peak GiB':>9} {'of card':>8} {'first steady s':>14}")
    for case, results in table.items():
        speed, peak = {}, {}
        for peer, some in results.items():
            speeds = [r["tokens_per_second"] for r in some]
            speed[peer], peak[peer] = statistics.median(speeds), steady.memory(some)
            middle = {key: statistics.median(r[key] for r in some)
                      for key in ("samples_per_second", "step_ms", "first_steady_seconds")}
            print(f"{case + ' ' + peer:28} {speed[peer]:10,.0f} {middle['samples_per_second']:8.1f} {middle['step_ms']:8.1f} "
                  f"{(max(speeds) - min(speeds)) / speed[peer]:7.1%} {peak[peer][0] / 2**30:9.1f} {peak[peer][1] / 2**30:8.1f} "
                  f"{middle['first_steady_seconds']:14.1f}")
        others = [peer for peer in speed if peer != "flatout"]
        if others:
            best = max(others, key=speed.get)
            ratio = steady.memory_ratio(peak["flatout"], peak[best])
            print(f"{case} flatout / {best}, the best: speed {speed['flatout'] / speed[best]:.3f}, {ratio}")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("flatout")
    p.add_argument("override", nargs="*", help="key=value for flatout only")
    p.add_argument("--cases", nargs="+", choices=[*CASES, "qwen3-8b"], default=list(CASES))
    p.add_argument("--peers", nargs="*", choices=["no", "layers", "whole"], help="how the peer is compiled, one run each")
    p.add_argument("--rows", type=int, default=32)
    p.add_argument("--steps", type=int, help="steps of flatout after the warm-up")
    p.add_argument("--rounds", type=int)
    p.add_argument("--python", default=sys.executable)
    for flag in ("quick", "small", "json"):
        p.add_argument(f"--{flag}", action="store_true")
    a = p.parse_args()
    a.peers = a.peers if a.peers is not None else ["no", "layers" if a.quick else "whole"]
    a.steps = a.steps or (20 if a.quick else 50)
    a.rounds = a.rounds or (1 if a.quick else 2)
    a.length, a.rows = (64, min(a.rows, 4)) if a.small else (512, a.rows)
    a.means = {case: mean * a.length // 512 for case, mean in CASES.items()}
    compared, table = [case for case in a.cases if case in CASES], {}

    def take(case, result):
        table.setdefault(case, {}).setdefault(result["peer"], []).append(result)
        print(f"{case:10} {result['peer']:22} {result['tokens_per_second']:10,.0f} tokens/s", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        names = words_of(folder, (SMALL_GEMMA if a.small else GEMMA)["vocab"])
        for case in compared:
            count = 100 * a.rows
            write_pairs(folder / f"{case}.csv", names, drawn(a.means[case], a.length, count) if a.means[case] < a.length
                        else [a.length] * count)
        for round_ in range(a.rounds):
            for case in a.cases:
                take(case, pairs(a, folder, case, round_) if case in CASES else qwen(a, folder, round_))
            for peer in a.peers if compared else []:
                for case, result in run_peer(a, peer, compared):
                    take(case, result)
    if a.json:
        print(json.dumps(dict(gpu=steady.gpu(), cases=table)))
        return
    show(table, steady.gpu())


if __name__ == "__main__":
    main()
