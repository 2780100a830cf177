"""DPO on Qwen3-0.6B on one GPU, pairs of 1,024 tokens of which 512 are the prompt: flatout and TRL's own trainer in interleaved runs.

    cargo build --profile ship
    python bench/preference_gpu.py target/ship/flatout
    python bench/preference_gpu.py target/ship/flatout --peers "bf16 liger 8" --rounds 1

pairs/s counts pairs of answers. flatout computes the prompt once for both answers of a pair, trains fp32 weights in bf16, and has
the reference's log-probabilities from a pass before the first step, as TRL does (precompute_ref_log_probs). TRL runs with weights in
bf16 (less memory traffic than flatout) or in fp32 under autocast, with or without Liger's kernels, with several micro-batch sizes; "best"
is the fastest of them. No row is padded on either side.
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
import words

PEER = Path(__file__).resolve().parent / "peers" / "dpo_trl.py"
VOCAB = 151936
FRAME = 1
"""Tokens that a chat template adds to a prompt of words."""


def write_pairs(folder, pairs, prompt, answer):
    names = words.words_of(folder, VOCAB)
    draw = random.Random(1)

    def text(tokens):
        return " ".join(names[draw.randrange(2, VOCAB)] for _ in range(tokens))

    with open(folder / "pairs.jsonl", "w") as out:
        for _ in range(pairs):
            row = dict(prompt=text(prompt - FRAME), chosen=text(answer - 1), rejected=text(answer - 1))
            out.write(json.dumps(row) + "\n")


def run_flatout(a, folder, at_once, round_):
    run = folder / f"run-{at_once}-{round_}"
    command = [a.flatout, "train", "qwen3-0.6b-dpo", f"data.path={folder}/pairs.jsonl", f"data.tokenizer={folder}/tokenizer.json",
               "data.held_out=0", "eval.rows=0", "eval.metric=loss", "eval.every_epochs=none", "checkpoint.every=0",
               "checkpoint.best=false", "log.every=1", "train.epochs=none", "train.steps=1000", f"train.batch={at_once}",
               f"train.micro_batch={at_once}", "precision=bf16", *a.override]
    done = steady.run([*command, "--run", str(run)], steady.WARM + a.steps)
    shutil.rmtree(run, ignore_errors=True)
    steps = done["steps"]
    seconds = sum(step["step_ms"] for step in steps) / 1e3
    pairs = steps[-1]["samples"] - done["warm"]["samples"]
    return dict(peer=f"flatout {at_once}", pairs_per_second=pairs / seconds,
                tokens_per_pair=(steps[-1]["tokens"] - done["warm"]["tokens"]) / pairs,
                step_ms=statistics.median(step["step_ms"] for step in steps),
                mfu=statistics.median(step.get("mfu") or 0.0 for step in steps),
                first_loss=done["warm"].get("loss"), first_steady_seconds=done["first_steady_seconds"], **done["memory"])


def run_peer(a, peer):
    weights, layers, at_once = peer.split()
    command = [a.python, str(PEER), "--weights", weights, "--layers", layers, "--at-once", at_once, "--prompt", str(a.prompt),
               "--answer", str(a.answer), "--steps", str(a.steps)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"peer"')]
    if not found:
        print(f"{peer} printed nothing: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
    return found


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("flatout")
    p.add_argument("override", nargs="*", help="key=value for flatout only")
    p.add_argument("--peers", nargs="*", default=["bf16 liger 4", "bf16 liger 8", "bf16 liger 16", "fp32 liger 8"])
    p.add_argument("--at-once", type=int, nargs="+", default=[8, 16])
    p.add_argument("--pairs", type=int, default=256)
    p.add_argument("--prompt", type=int, default=512)
    p.add_argument("--answer", type=int, default=512)
    p.add_argument("--steps", type=int, default=12)
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--python", default=sys.executable)
    a = p.parse_args()
    table = {}
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        write_pairs(folder, a.pairs, a.prompt, a.answer)
        for round_ in range(a.rounds):
            for at_once in a.at_once:
                result = run_flatout(a, folder, at_once, round_)
                table.setdefault(result["peer"], []).append(result)
                print(json.dumps(result), file=sys.stderr, flush=True)
            for peer in a.peers:
                for result in run_peer(a, peer):
                    table.setdefault(result["peer"], []).append(result)
                    print(json.dumps(result), file=sys.stderr, flush=True)
    print(steady.gpu())
    print(f"{'':24} {'pairs/s':>9} {'step ms':>9} {'peak GiB':>9}")
    speed = {peer: statistics.median(r["pairs_per_second"] for r in some) for peer, some in table.items()}
    for peer, some in table.items():
        step = statistics.median(r["step_ms"] for r in some)
        print(f"{peer:24} {speed[peer]:9.2f} {step:9.1f} {some[0]['peak_bytes'] / 2**30:9.1f}")
    ours, others = ([peer for peer in speed if peer.startswith("flatout") == own] for own in (True, False))
    if ours and others:
        best, other = max(ours, key=speed.get), max(others, key=speed.get)
        print(f"{best} / {other}, the best of each: {speed[best] / speed[other]:.3f}")


if __name__ == "__main__":
    main()
