"""Trains the foveated video model on one GPU from tar shards, flatout and PyTorch in interleaved runs.

    cargo build --profile ship
    python bench/fovea_gpu.py target/ship/flatout
    python bench/fovea_gpu.py target/ship/flatout --stages 1 --peers "eager 32" --rounds 1

| stage | recipe | samples |
|---|---|---|
| 1 | fvlm-135m-align | 8 frames of 224 x 224, 150 tokens, all learned |
| 2 | fvlm-135m-sft | 250 tokens of which 80 are learned; 55 of 100 are still images that count as 8 frames, the others have 10 frames: 9 frames and 5 images on average |
| 3 | fvlm-135m-dpo | pairs: a still image that counts as 8 frames, a prompt of about 60 tokens, two answers of about 120; the reference is computed before training |

flatout decodes JPEGs from shards while it trains; the share of its steps spent waiting for them is printed. The peer
(bench/peers/fovea_torch.py) has random pixels on the device and static shapes, and encodes all 9 frames of stage 2. Both keep fp32
weights and compute in bf16. In stage 3 a sample is a pair.
"""

import argparse
import io
import json
import random
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import steady
import words

PEER = Path(__file__).resolve().parent / "peers" / "fovea_torch.py"
RECIPES = {1: "fvlm-135m-align", 2: "fvlm-135m-sft", 3: "fvlm-135m-dpo"}
VOCAB, SAMPLES = 49152, 128
TEMPLATE = ("{% for m in messages %}<bos>{{ m.role }}\n{{ m.content }}<eos>\n{% endfor %}"
            "{% if add_generation_prompt %}<bos>assistant\n{% endif %}")
FRAME = 5
"""Tokens that the template adds to a question of words; an answer ends with one more."""


def text_of(draw, tokens):
    return " ".join(f"w{draw.randrange(VOCAB - 2)}" for _ in range(tokens))


def write_shard(path, stage):
    """Writes a tar of samples: frames with the entropy of photographs, and tokenised texts."""
    from PIL import Image

    draw = random.Random(f"{path.name} {stage}")
    with tarfile.open(path, "w") as tar:

        def add(name, data):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))

        for sample in range(SAMPLES):
            key = f"{path.stem}-{sample:04}"
            text, learned = (150, 150) if stage == 1 else (250, 80)
            frames = {1: 8, 2: 1 if draw.random() < 0.55 else 10, 3: 1}[stage]
            for frame in range(frames):
                whole = Image.new("RGB", (224, 224))
                for size in (4, 16, 64):
                    part = Image.frombytes("RGB", (size, size), draw.randbytes(size * size * 3))
                    whole = Image.blend(whole, part.resize(whole.size, Image.BICUBIC), 0.5)
                jpeg = io.BytesIO()
                whole.save(jpeg, "JPEG", quality=90)
                add(f"{key}.jpg" if frames == 1 else f"{key}.{frame:03}.jpg", jpeg.getvalue())
            if stage == 3:
                lengths = dict(user=60 - FRAME, chosen_assistant=119, rejected_assistant=119)
                add(f"{key}.json", json.dumps({name: text_of(draw, tokens) for name, tokens in lengths.items()}).encode())
                continue
            ids = [draw.randrange(2, VOCAB) for _ in range(text)]
            mask = [0] * (text - learned) + [1] * learned
            add(f"{key}.json", json.dumps(dict(token_ids=ids, loss_mask=mask, frame_count=frames)).encode())


def run_flatout(a, folder, stage, at_once, round_):
    run = folder / f"run-{stage}-{round_}"
    command = [a.flatout, "train", RECIPES[stage], f"data.path={folder}/stage{stage}", f"data.tokenizer={folder}/tokenizer.json",
               "data.held_out=0", "eval.rows=0", "eval.every=0", "eval.every_epochs=none", "eval.metric=loss",
               "checkpoint.every=0", "checkpoint.best=false", "log.every=1", "train.epochs=none", "train.steps=1000",
               f"train.batch={at_once}", f"train.micro_batch={at_once}", "precision=bf16", *a.override]
    if stage == 3:
        command += [f"data.template={folder}/template.jinja", "data.system="]
    done = steady.run([*command, "--run", str(run)], steady.WARM + a.steps)
    shutil.rmtree(run, ignore_errors=True)
    steps = done["steps"]
    milliseconds = sum(step["step_ms"] for step in steps)
    return dict(peer=f"flatout {at_once}", stage=stage,
                tokens_a_sample=(steps[-1]["tokens"] - done["warm"]["tokens"]) / (steps[-1]["samples"] - done["warm"]["samples"]),
                samples_per_second=1e3 * (steps[-1]["samples"] - done["warm"]["samples"]) / milliseconds,
                step_ms=statistics.median(step["step_ms"] for step in steps),
                waited=sum(step.get("data_wait_ms") or 0.0 for step in steps) / milliseconds,
                mfu=statistics.median(step.get("mfu") or 0.0 for step in steps),
                first_steady_seconds=done["first_steady_seconds"], layout=done["start"]["data"].get("layout"), **done["memory"])


def run_peer(a, stage, peer):
    how, at_once = peer.split()
    command = [a.python, str(PEER), "--stage", str(stage), "--how", how, "--at-once", at_once]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not found:
        print(f"{peer} printed nothing: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
    return found


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("flatout")
    p.add_argument("override", nargs="*", help="key=value for flatout only")
    p.add_argument("--stages", type=int, nargs="+", choices=list(RECIPES), default=[1, 2])
    p.add_argument("--peers", nargs="*", default=["eager 8", "eager 32", "compiled 32"])
    p.add_argument("--at-once", type=int, nargs="+", default=[32, 64])
    p.add_argument("--shards", type=int, default=8)
    p.add_argument("--steps", type=int, default=25)
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--python", default=sys.executable)
    a = p.parse_args()
    table = {}
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        words.words_of(folder, VOCAB)
        (folder / "template.jinja").write_text(TEMPLATE)
        with ProcessPoolExecutor() as pool:
            for stage in a.stages:
                (folder / f"stage{stage}").mkdir()
                paths = [folder / f"stage{stage}" / f"{shard:05}.tar" for shard in range(a.shards)]
                list(pool.map(write_shard, paths, [stage] * len(paths)))
        for round_ in range(a.rounds):
            for stage in a.stages:
                results = [run_flatout(a, folder, stage, at_once, round_) for at_once in a.at_once]
                results += [result for peer in a.peers for result in run_peer(a, stage, peer)]
                for result in results:
                    table.setdefault(stage, {}).setdefault(result["peer"], []).append(result)
                    print(json.dumps(result), file=sys.stderr, flush=True)
    print(steady.gpu())
    print(f"{'':24} {'samples/s':>10} {'step ms':>9} {'peak GiB':>9} {'waited':>7}")
    for stage, results in table.items():
        speed = {peer: statistics.median(r["samples_per_second"] for r in some) for peer, some in results.items()}
        for peer, some in results.items():
            step = statistics.median(r["step_ms"] for r in some)
            waited = f"{statistics.median(r['waited'] for r in some):7.1%}" if "waited" in some[0] else ""
            print(f"{f'stage {stage}, {peer}':24} {speed[peer]:10.1f} {step:9.1f} {some[0]['peak_bytes'] / 2**30:9.1f} {waited}")
        ours, others = ([peer for peer in speed if peer.startswith("flatout") == own] for own in (True, False))
        if ours and others:
            best, other = max(ours, key=speed.get), max(others, key=speed.get)
            print(f"stage {stage}: {best} / {other}, the best of each: {speed[best] / speed[other]:.3f}")


if __name__ == "__main__":
    main()
