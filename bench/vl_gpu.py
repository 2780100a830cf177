"""Trains Qwen3-VL-8B with LoRA on questions about images at full resolution on one GPU, flatout and transformers in interleaved runs.

    cargo build --profile ship
    python bench/vl_gpu.py target/ship/flatout
    python bench/vl_gpu.py target/ship/flatout --cases one nine --peers "plain 4" --quick
    python bench/vl_gpu.py target/debug/flatout --small --quick

| case | what is trained |
|---|---|
| one | one question per image of 1056 x 1280 pixels (1,320 tokens), 66 tokens of text each |
| nine | nine questions per image, 66 tokens of text each; flatout computes the image and the shared prefix once for all |
| long | nine questions of 250 tokens of text each |
| fp8 | as `nine`, with precision=fp8 on the frozen base |

samples/s counts questions. The peer (bench/peers/vl_torch.py) has one question per sample, because none of its libraries shares an
image between questions, in micro-batches of 1, 2 and 4 samples, with adapters in plain PyTorch and by PEFT; "best" is the fastest of
them. For `long` the peer runs with texts of 250 tokens. Weights are random; flatout decodes JPEG files while it trains, and the peer
gets decoded pixels.
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

PEER = Path(__file__).resolve().parent / "peers" / "vl_torch.py"
CASES = dict(one=(1, 66), nine=(9, 66), long=(9, 250), fp8=(9, 66))
TOKENS = [f"model.vision.{name}_token={token}" for name, token in dict(start=4, end=5, image=6, video=7).items()]
"""Ids of the special tokens in the tokeniser that is trained on the questions."""

FRAME = 14
"""Tokens of a sample besides the words of its question: those of ChatML, of the image and of the answer."""


def write_data(folder, images, size):
    from PIL import Image
    draw = random.Random(1)
    (folder / "images").mkdir()
    for number in range(images):
        small = Image.effect_noise((size[1] // 16, size[0] // 16), 80).convert("RGB")
        small = Image.merge("RGB", [band.point(lambda x, d=draw.randrange(64): min(255, x + d)) for band in small.split()])
        small.resize((size[1], size[0]), Image.BICUBIC).save(folder / "images" / f"{number}.jpg", quality=90)


def write_rows(folder, name, images, questions, text):
    draw = random.Random(2)
    words = ["red", "blue", "round", "left", "above", "small", "bright", "open", "tall", "near"]
    with open(folder / f"{name}.jsonl", "w") as out:
        for number in range(images):
            for _ in range(questions):
                asked = " ".join(draw.choice(words) for _ in range(text - FRAME))
                row = dict(image=f"{number}.jpg", question=asked, answer=" ".join(draw.choice(words) for _ in range(3)))
                out.write(json.dumps(row) + "\n")


def run_flatout(a, folder, case, round_):
    questions, text = CASES[case]
    run = folder / f"run-{case}-{round_}"
    at_once = dict(one=1, nine=1, long=1, fp8=1)[case] * a.trees
    command = [a.flatout, "train", "qwen3-vl-8b-vqa", *(["--with", "small"] if a.small else []),
               f"data.path={folder}/{case}.jsonl", f"data.image_root={folder}/images", "data.held_out=0", "eval.rows=0",
               "eval.metric=loss", "eval.every_epochs=none", "checkpoint.every=0", "checkpoint.best=false", *TOKENS, "log.every=1", "train.epochs=none", "train.steps=1000",
               f"train.batch={questions * at_once}", *(["precision=fp8"] if case == "fp8" else []), *a.override]
    done = steady.run([*command, "--run", str(run)], steady.WARM + a.steps)
    shutil.rmtree(run, ignore_errors=True)
    steps = done["steps"]
    seconds = sum(step["step_ms"] for step in steps) / 1e3
    return dict(peer="flatout", samples_per_second=(steps[-1]["samples"] - done["warm"]["samples"]) / seconds,
                step_ms=statistics.median(step["step_ms"] for step in steps), **done["memory"],
                mfu=statistics.median(step.get("mfu") or 0.0 for step in steps),
                tokens_per_second=(steps[-1]["tokens"] - done["warm"]["tokens"]) / seconds,
                first_steady_seconds=done["first_steady_seconds"], layout=done["start"]["data"].get("layout"))


def run_peer(a, text, lora, at_once):
    command = [a.python, str(PEER), "--text", str(text), "--lora", lora, "--at-once", *map(str, at_once)]
    height, width = (64, 96) if a.small else a.size
    command += ["--height", str(height), "--width", str(width)]
    command += ["--steps", "5"] * a.quick + ["--device", "cpu", "--small"] * a.small
    done = subprocess.run(command + ["--read"] * a.read, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        print(f"{' '.join(command)} ended with code {done.returncode}", file=sys.stderr)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("flatout")
    p.add_argument("override", nargs="*", help="key=value for flatout only")
    p.add_argument("--cases", nargs="+", choices=list(CASES), default=["one", "nine", "long"])
    p.add_argument("--peers", nargs="*", default=["plain 1", "plain 2", "plain 4", "peft 1"])
    p.add_argument("--images", type=int, default=64)
    p.add_argument("--trees", type=int, default=4, help="images per update")
    p.add_argument("--size", type=int, nargs=2, default=(1056, 1280), help="rows and columns of an image, in pixels")
    p.add_argument("--steps", type=int)
    p.add_argument("--rounds", type=int)
    p.add_argument("--python", default=sys.executable)
    for flag in ("quick", "small", "json", "read"):
        p.add_argument(f"--{flag}", action="store_true")
    a = p.parse_args()
    a.steps, a.rounds = a.steps or (10 if a.quick else 25), a.rounds or (1 if a.quick else 2)
    table = {}
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        write_data(folder, a.images, (64, 96) if a.small else a.size)
        for case in a.cases:
            questions, text = CASES[case]
            write_rows(folder, case, a.images, questions, 30 if a.small else text)
        for round_ in range(a.rounds):
            for case in a.cases:
                table.setdefault(case, {}).setdefault("flatout", []).append(run_flatout(a, folder, case, round_))
                print(case, json.dumps(table[case]["flatout"][-1]), file=sys.stderr, flush=True)
            for text in sorted({CASES[case][1] for case in a.cases}):
                for lora in ("plain", "peft"):
                    at_once = [int(peer.split()[1]) for peer in a.peers if peer.startswith(lora)]
                    for result in run_peer(a, text, lora, at_once) if at_once else []:
                        print(f"peer, {text} tokens", json.dumps(result), file=sys.stderr, flush=True)
                        for case in (case for case in a.cases if CASES[case][1] == text):
                            table.setdefault(case, {}).setdefault(result["peer"], []).append(result)
    if a.json:
        print(json.dumps(dict(gpu=steady.gpu(), cases=table)))
        return
    print(steady.gpu())
    print(f"{'':24} {'samples/s':>10} {'step ms':>9} {'peak GiB':>9}")
    for case, results in table.items():
        speed = {peer: statistics.median(r["samples_per_second"] for r in some) for peer, some in results.items()}
        for peer, some in results.items():
            step = statistics.median(r["step_ms"] for r in some)
            print(f"{case + ' ' + peer:24} {speed[peer]:10.2f} {step:9.1f} {some[0]['peak_bytes'] / 2**30:9.1f}")
        others = [peer for peer in speed if peer != "flatout"]
        if others:
            best = max(others, key=speed.get)
            print(f"{case} flatout / {best}, the best: {speed['flatout'] / speed[best]:.3f}")


if __name__ == "__main__":
    main()
