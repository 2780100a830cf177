#!/usr/bin/env python3
"""Checks that a change to flatout's code does not change results: takes snapshots of two binaries and compares them.

    python bench/picture.py OLD NEW [--renames FILE] [--out DIR] [--only TEXT] [--quick]

A snapshot has, for every recipe, alone and with each preset, on the CPU and on every GPU known by name: the compiled plans as text
(`flatout plan --text`: every slot, buffer and launch with its offset), the bytes of the arena and the resolved switches (`flatout plan
--json`). For models small enough to be trained here it also has the first twenty losses, bit for bit, and for every run in
crates/cli/tests/runs the losses after it is resumed.

A file of renames has lines `old name -> new name`, which are applied to the old snapshot before the comparison. Renamed kernels,
operations and passes are listed there. `-` and `+` before a line of JSON keys mark keys that only one binary has.

Exit code 0: the snapshots are equal. 1: they differ, and the first difference of each part is printed.
"""

import argparse
import concurrent.futures
import difflib
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "crates/cli/tests/runs"

# All kinds of tasks and models, and the switches that change state or layout, in sizes that take seconds on two cores.
SMALL_TEXT = ["model.width=32", "model.layers=2", "model.heads=2", "model.kv_heads=1", "model.head_size=16",
              "model.ffn=48", "model.context=32", "model.vocab=300"]
TRAINED = {
    "tiny": ["tiny", "train.steps=20"],
    "tiny-dropout": ["tiny", *SMALL_TEXT, "model.dropout=0.1", "data.document_mask=true", "train.steps=20"],
    "tiny-bf16": ["tiny", *SMALL_TEXT, "precision=bf16", "train.steps=20"],
    "tiny-fp8": ["tiny", *SMALL_TEXT, "precision=fp8", "model.width=64", "model.head_size=32", "model.ffn=96", "train.steps=20"],
    "tiny-int8": ["tiny", *SMALL_TEXT, "optimizer.state=int8", "train.ema=0.9", "train.steps=20"],
    "tiny-split": ["tiny", *SMALL_TEXT, "train.micro_batch=2", "recompute=full", "compile=off", "train.steps=20"],
    "tiny-lengths": ["tiny", *SMALL_TEXT, "data.mean_tokens=12", "train.batch=16", "train.steps=20"],
    "gpt2": ["gpt2-124m", "--with", "small", "data.source=synthetic", "train.batch=8", "train.steps=20"],
    "chat": ["qwen3-0.6b-sft", "--with", "small", "data.synthetic_rows=400", "train.steps=20"],
    "lora": ["smollm2-135m-sft", "--with", "small", "data.synthetic_rows=400", "adapter.kind=lora", "adapter.dropout=0.1",
             "train.steps=20"],
    "dora": ["gemma3-1b-pairs", "--with", "small", "data.synthetic_rows=400", "adapter.kind=dora", "train.epochs=none",
             "train.steps=20"],
    "pairs": ["gemma3-1b-pairs", "--with", "small", "data.synthetic_rows=400", "train.steps=20"],
    "images": ["vision-tiny", "train.steps=20", "data.synthetic_rows=200"],
    "images-mixed": ["vision-tiny", "train.steps=20", "data.synthetic_rows=200", "train.mixup=0.2", "train.cutmix=1.0",
                     "model.drop_path=0.1", "image_table=off", "train.label_smoothing=0.1"],
    "bdh": ["bdh-cifar10", "train.steps=20", "data.source=synthetic", "data.synthetic_rows=200", "model.width=32",
            "model.latent=64", "train.batch=8"],
}


def run(binary, words, folder, **more):
    env = {**os.environ, "FLATOUT_CACHE": str(folder / "cache"), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([str(binary), *words], capture_output=True, text=True, cwd=folder, env=env, **more)


def planned(binary, words, folder):
    """The text of the plans and their facts, or the sentence of the refusal."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        text = Path(scratch) / "plans.txt"
        done = run(binary, ["plan", *words, "--json", "--text", str(text)], folder)
        if done.returncode == 2:
            return {"refused": done.stderr.strip()}
        if done.returncode != 0:
            return {"failed": done.stderr.strip()}
        return {"facts": json.loads(done.stdout), "plans": text.read_text()}


def bits(events):
    """Losses of steps and evaluations as bits of f32; the last of several lines for one step counts."""
    losses = {}
    for line in events.read_text().splitlines():
        event = json.loads(line)
        if event.get("event") in ("step", "eval"):
            value = event["loss"]
            shown = "none" if value is None else struct.pack(">f", value).hex()
            losses[f"{event['event']} {event['step']}"] = shown
    return losses


def trained(binary, words, folder):
    dir = Path(tempfile.mkdtemp(dir=folder)) / "run"
    done = run(binary, ["train", *words, "--run", str(dir), "-q"], folder)
    if done.returncode != 0:
        return {"failed": f"exit {done.returncode}: {done.stderr.strip()}"}
    return {"losses": bits(dir / "events.jsonl")}


def resumed(binary, kept, folder):
    dir = Path(tempfile.mkdtemp(dir=folder)) / "run"
    shutil.copytree(kept, dir)
    done = run(binary, ["resume", str(dir), "-q"], folder)
    if done.returncode != 0:
        return {"failed": f"exit {done.returncode}: {done.stderr.strip()}"}
    return {"losses": bits(dir / "events.jsonl")}


def parts(binary, folder, quick):
    """The names of a snapshot's parts, each with the function that makes it."""
    recipes = sorted(path.stem for path in (ROOT / "recipes").glob("*.toml"))
    gpus = re.findall(r"^([a-z]\S*)\s+sm_", gpu_table().read_text(), re.M)
    presets = sorted(p.stem for p in (ROOT / "recipes/presets").glob("*.toml") if p.stem != "gpu")
    jobs = {}
    for recipe in recipes:
        for preset in [None, *presets]:
            words = [recipe, *(["--with", preset] if preset else [])]
            name = "+".join(filter(None, [recipe, preset]))
            jobs[f"plan {name} cpu"] = (planned, [*words, "backend=cpu"])
            for gpu in gpus if preset is None else gpus[-2:-1]:
                jobs[f"plan {name} {gpu}"] = (planned, [*words, "--gpu", gpu])
        jobs[f"plan {recipe} h200 fp8"] = (planned, [recipe, "--gpu", "h200", "precision=fp8"])
    if not quick:
        jobs |= {f"train {name}": (trained, [*words, "schedule.warmup_steps=5", "eval.every=10", "backend=cpu"]) for name, words in TRAINED.items()}
        jobs |= {f"resume {kept.name}": (resumed, kept) for kept in sorted(KEPT.glob("*")) if kept.is_dir()}
    return jobs


def gpu_table():
    return next((ROOT / "crates/runtime/src").rglob("gpus.txt"))


def picture(binary, jobs, folder):
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        made = {name: pool.submit(job, binary, words, folder) for name, (job, words) in jobs.items()}
        return {name: future.result() for name, future in made.items()}


def renamed(text, renames):
    for old, new in renames:
        text = re.sub(rf"(?<![\w.]){re.escape(old)}(?![\w])", new, text)
    return text


def lines(part, renames):
    """A part of a snapshot as lines, without times, the largest micro-batches, which depend on the CPU's free memory, and the
    sentence about measurements on a GPU."""
    if "plans" in part:
        left_out = lambda key: "seconds" in key or "_ms" in key or key == "largest_micro_batch"
        facts = {k: v for k, v in part["facts"].items() if not left_out(k)}
        if isinstance(facts.get("gpu"), dict):
            facts["gpu"] = {k: v for k, v in facts["gpu"].items() if k != "measured"}
        return renamed(json.dumps(facts, indent=1, sort_keys=True) + "\n" + part["plans"], renames).splitlines()
    return renamed(json.dumps(part, indent=1, sort_keys=True), renames).splitlines()


def read_renames(path):
    pairs = [line.split(" -> ") for line in Path(path).read_text().splitlines() if " -> " in line]
    return [(old.strip(), new.strip()) for old, new in pairs]


def main():
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("old", type=Path, help="the binary before the change")
    flags.add_argument("new", type=Path, help="the binary after it")
    flags.add_argument("--renames", help="a file of lines `old name -> new name`")
    flags.add_argument("--out", type=Path, help="keep both snapshots in this folder")
    flags.add_argument("--only", help="only parts whose name contains this")
    flags.add_argument("--quick", action="store_true", help="only plans; nothing is trained")
    args = flags.parse_args()
    renames = read_renames(args.renames) if args.renames else []
    old, new = args.old.resolve(), args.new.resolve()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        jobs = parts(old, folder, args.quick)
        jobs = {name: job for name, job in jobs.items() if not args.only or args.only in name}
        before, after = (picture(binary, jobs, folder) for binary in (old, new))
    different, failed = 0, []
    for name in jobs:
        a, b = lines(before[name], renames), lines(after[name], [])
        if "failed" in before[name] and "failed" in after[name]:
            failed.append(f"{name}: {before[name]['failed'].splitlines()[-1]}")
        if args.out:
            for side, text in ("before", a), ("after", b):
                (args.out / side).mkdir(parents=True, exist_ok=True)
                (args.out / side / name.replace(" ", "_")).write_text("\n".join(text) + "\n")
        if a == b:
            continue
        different += 1
        print(f"DIFFERENT  {name}")
        for line in list(difflib.unified_diff(a, b, lineterm="", n=0))[2:12]:
            print("   ", line[:300])
    for name in failed:
        print(f"FAILED BOTH TIMES  {name}")
    print(f"{len(jobs)} parts, {different} different, {len(failed)} that neither binary can make")
    sys.exit(1 if different or failed else 0)


if __name__ == "__main__":
    main()
