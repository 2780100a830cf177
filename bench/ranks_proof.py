"""Tests that the number of ranks and the level of sharding change no bit of a run, with a line PASS or FAIL per kind of training.

    cargo build --release
    python bench/ranks_proof.py target/release/flatout
    python bench/ranks_proof.py target/release/flatout --only text chat --ranks 1 2 4 --updates 60 --keep proof

Trains each kind with `train.lanes=8` on 1, 2, 4 and 8 ranks, with `shard=none`, `optimizer`, `gradients` and `parameters`, 60 updates by
default, and compares every loss, norm and evaluation, and every saved tensor, assembled from the shards of its checkpoint, with
those of one rank. Examples of any length, whose gradients are summed in another order, must have the losses of one rank within
1e-5. Then resumes a run with another number of ranks and another level every ten updates. Needs only Python's standard library.
Exit code 0 if everything passes, 1 if something fails.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ranks_runs import tensors

SMALL = ["model.width=32", "model.heads=2", "train.batch=16", "train.lanes=8", "schedule.warmup_steps=2", "eval.rows=12",
         "eval.every=20", "checkpoint.every=0", "backend=cpu"]
TEXT = ["model.layers=2", "model.kv_heads=1", "model.ffn=48"]
TINY = ["tiny", *TEXT, "model.context=32"]
CHAT = ["tiny", *TEXT, "model.context=64", "data.synthetic_rows=200"]
# Adapters, which are replicated on every rank, with an embedding, which is sharded.
ADAPTER = ["adapter.rank=32", "adapter.also_train=[embed]", "model.width=64"]
KINDS = {
    "text": [*TINY, "model.dropout=0.1", "optimizer.clip=0.5", "train.ema=0.9"],
    "bf16": [*TINY, "model.dropout=0.1", "precision=bf16", "optimizer.state=bf16", "train.ema=0.9"],
    "int8": [*TINY, "optimizer.state=int8", "optimizer.weight_decay=0"],
    "chat": [*CHAT, "data.task=chat", "optimizer.state=bf16"],
    "trees": [*CHAT, "data.task=chat", "shared_prefix=on"],
    "pairs": [*CHAT, "data.task=preference", "train.ema=0.9"],
    "judged": [*CHAT, "data.task=preference", "preference.loss=kto"],
    "lora": [*TINY, *ADAPTER, "adapter.kind=lora", "adapter.dropout=0.1"],
    "dora": [*TINY, *ADAPTER, "adapter.kind=dora", "train.ema=0.9"],
    "images": ["vision-tiny", "model.layers=3", "data.synthetic_rows=200", "train.mixup=0.4", "image_table=off",
               "train.ema=0.9"],
}
# Gradients that are reduced in every micro-batch have the bits of the other levels if a lane has one micro-batch, of the same
# shape on every rank.
IN_STEP = {"text", "bf16", "int8", "lora", "dora", "images"}
LEVELS = ["none", "optimizer", "gradients", "parameters"]
WITHIN = 1e-5
# Times differ from run to run, but nothing else may.
TIMES = {"step_ms", "tokens_per_second", "samples_per_second", "time", "of_predicted", "data_wait_ms", "ranks"}


class Proof:
    def __init__(self, binary, folder, updates):
        self.binary, self.folder, self.updates, self.failed = binary, folder, updates, 0

    def say(self, ok, what, numbers=""):
        print(f"{'PASS' if ok else 'FAIL'}  {what}{'  ' + numbers if numbers else ''}", flush=True)
        self.failed += not ok

    def flatout(self, *words):
        done = subprocess.run([self.binary, *words, "-q"], cwd=self.folder, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip() or done.returncode}")

    def train(self, kind, run, ranks, *more):
        words = [*KINDS[kind][:1], *SMALL, f"train.steps={self.updates}", *KINDS[kind][1:], *more]
        self.flatout("train", *words, "--run", run, "--ranks", str(ranks))

    def logged(self, run):
        """All steps and evaluations without their times, by name and step."""
        lines = (self.folder / run / "events.jsonl").read_text().splitlines()
        events = [event for event in map(json.loads, lines) if event["event"] in ("step", "eval")]
        timeless = lambda event: {key: value for key, value in event.items() if key not in TIMES}
        return {(event["event"], event["step"]): timeless(event) for event in events}

    def close(self, run, other):
        """The difference of two runs' losses in words; empty where they are equal within rounding."""
        ours, theirs = self.logged(run), self.logged(other)
        off = max((abs(ours[at]["loss"] / event["loss"] - 1) for at, event in theirs.items() if at in ours), default=1)
        return "" if ours.keys() == theirs.keys() and off <= WITHIN else f"losses are off by {off:.1e}"

    def same(self, run, other):
        """The difference of two runs in words; empty where they are equal. A run that was stopped in between also evaluated there."""
        ours, theirs = self.logged(run), self.logged(other)
        for at, event in theirs.items():
            if ours.get(at) != event:
                return f"{ours.get(at)} and {event}"
        ours, theirs = (tensors(self.folder / one, self.updates) for one in (run, other))
        if ours.keys() != theirs.keys():
            return f"other tensors: {sorted(ours.keys() ^ theirs.keys())[:3]}"
        return next((f"`{name}` differs" for name in ours if ours[name] != theirs[name]), "")


def prove(proof, kind, numbers, levels):
    began = time.time()
    one = f"{kind}-1"
    proof.train(kind, one, 1)
    for ranks in [ranks for ranks in numbers if ranks > 1]:
        for shard in levels:
            run = f"{kind}-{ranks}-{shard}"
            proof.train(kind, run, ranks, f"shard={shard}")
            start = json.loads((proof.folder / run / "events.jsonl").read_text().splitlines()[0])
            has_bits = kind in IN_STEP or shard in ("none", "optimizer")
            differs = proof.same(run, one) if has_bits else proof.close(run, one)
            if start["world"]["shard"] != shard:
                differs = f"ranks divide {start['world']['shard']}"
            proof.say(not differs, f"{kind}: {ranks} ranks, shard={shard}, {proof.updates} updates", differs)
    # Resume with another number of ranks every ten updates, and with another level where bits do not depend on it.
    run, at = f"{kind}-chain", 10
    levels = levels if kind in IN_STEP else ["auto"]
    proof.train(kind, run, numbers[-1], f"train.steps={at}", f"schedule.horizon_steps={proof.updates}")
    chain = [numbers[-1]]
    while at < proof.updates:
        at = min(at + 10, proof.updates)
        chain.append(numbers[-1 - len(chain) % len(numbers)])
        level = levels[-1 - len(chain) % len(levels)]
        proof.flatout("resume", run, f"train.steps={at}", f"shard={level}", "--ranks", str(chain[-1]))
    differs = proof.same(run, one)
    words = ", ".join(map(str, chain))
    proof.say(not differs, f"{kind}: resumed with {words} ranks", differs or f"{time.time() - began:.0f} s")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", type=Path)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=LEVELS)
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--keep", type=Path, help="a folder to keep the runs in; otherwise they are removed")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        proof = Proof(args.binary.resolve(), folder, args.updates)
        for kind in args.only:
            try:
                prove(proof, kind, args.ranks, args.levels)
            except RuntimeError as error:
                proof.say(False, kind, str(error))
    sys.exit(1 if proof.failed else 0)


if __name__ == "__main__":
    main()
