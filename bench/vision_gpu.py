"""Compares flatout with PyTorch on image models on one GPU, in interleaved runs: Vision-BDH on images of 32 x 32, ViT-S/14 and ViT-B/14 at 224.

    cargo build --profile ship
    python bench/vision_gpu.py target/ship/flatout
    python bench/vision_gpu.py target/ship/flatout --cases bdh --rounds 1 --peers compiled
    python bench/vision_gpu.py target/ship/flatout --cases vit-b precision=fp8
    python bench/vision_gpu.py target/ship/flatout --cases vit-b --shards 16 --peers

One round of a case is a run of flatout, then a run of each peer (bench/peers/vision_torch.py: bf16 autocast, fused AdamW, timm's
models). Every run is a new process. Images are on the device on both sides: flatout generates its synthetic ones once, and crops
and flips them there; the peers use random ones without augmentation. Both report the median step after a warm-up, and the memory of
tensors and of the process on the device. The share of flatout's step spent waiting for data is printed. With --shards flatout reads
that number of tar files of 512 JPEGs of 500 x 375, which Pillow writes first, through its loader, like a run from disk.
"""

import argparse
import io
import json
import random
import statistics
import subprocess
import sys
import tarfile
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import steady

PEER = Path(__file__).resolve().parent / "peers" / "vision_torch.py"
CASES = {"bdh": ("bdh-cifar10", 512), "vit-s": ("dinov2-s-classify", 256), "vit-b": ("dinov2-b-classify", 256)}
"""The recipe of each case and the images per update."""

IMAGES = 4096
"""Size of the data set, small enough to stay on the device like the peers' images; `image_table=off` loads them."""


def write_shard(path):
    """Writes a WebDataset tar of JPEGs with the entropy of photographs: smoothed noise in several sizes."""
    from PIL import Image

    draw = random.Random(path.name)
    with tarfile.open(path, "w") as tar:
        for i in range(512):
            whole = Image.new("RGB", (500, 375))
            for size in (4, 16, 64):
                bytes_ = draw.randbytes(size * size * 3)
                part = Image.frombytes("RGB", (size, size), bytes_).resize(whole.size, Image.BICUBIC)
                whole = Image.blend(whole, part, 0.5)
            jpeg = io.BytesIO()
            whole.save(jpeg, "JPEG", quality=90)
            for name, data in ((f"{path.stem}-{i:04}.jpg", jpeg.getvalue()), (f"{path.stem}-{i:04}.cls", str(i % 10).encode())):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


def run_flatout(a, folder, case, rows, round_):
    recipe = CASES[case][0]
    source = ["data.source=synthetic", f"data.synthetic_rows={IMAGES}"]
    if a.shards:
        source = [f"data.path={folder}/shards", "data.held_out=0.01"]
    overrides = [*source, f"train.batch={rows}", f"train.micro_batch={rows}", "eval.rows=0",
                 "checkpoint.best=false", "checkpoint.every=0", "log.every=1"]
    # timm's models have no stochastic depth.
    overrides += ["model.drop_path=0"] * (case != "bdh") + a.override
    run = folder / f"run-{case}-{round_}"
    done = steady.run([a.flatout, "train", recipe, *overrides, "--run", str(run)], steady.WARM + a.steps)
    times = [step["step_ms"] for step in done["steps"]]
    ms = statistics.median(times)
    waited = sum(step.get("data_wait_ms", 0.0) for step in done["steps"]) / sum(times)
    return dict(peer="flatout", images_per_second=rows * 1e3 / ms, step_ms=ms, **done["memory"], waited=waited,
                first_steady_seconds=done["first_steady_seconds"], loss=done["steps"][-1]["loss"],
                switches=done["start"]["switches"])


def run_peer(a, case, rows, peer):
    command = [a.python, str(PEER), case, "--rows", str(rows)] + ["--compile"] * (peer == "compiled")
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def show(case, rows, results):
    print(f"{case}, {rows} images per update")
    print(f"{'':18} {'images/s':>10} {'step ms':>8} {'spread':>7} {'peak GiB':>9} {'of card':>8} {'first steady s':>14} {'waited':>7}")
    middle, peak = {}, {}
    for peer, some in results.items():
        speeds = [r["images_per_second"] for r in some]
        middle[peer], peak[peer] = statistics.median(speeds), steady.memory(some)
        print(f"{peer:18} {middle[peer]:10,.0f} {statistics.median(r['step_ms'] for r in some):8.2f} "
              f"{(max(speeds) - min(speeds)) / middle[peer]:7.1%} {peak[peer][0] / 2**30:9.2f} {peak[peer][1] / 2**30:8.2f} "
              f"{statistics.median(r['first_steady_seconds'] for r in some):14.1f} {some[0].get('waited', 0.0):7.1%}")
    others = [peer for peer in middle if peer != "flatout"]
    if others:
        best = max(others, key=middle.get)
        print(f"{case} flatout / {best}: speed {middle['flatout'] / middle[best]:.3f}, {steady.memory_ratio(peak['flatout'], peak[best])}")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("flatout")
    p.add_argument("override", nargs="*", help="key=value for flatout only")
    p.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    p.add_argument("--peers", nargs="*", choices=["eager", "compiled"], default=["eager", "compiled"])
    p.add_argument("--rows", type=int, help="images per update, in every case")
    p.add_argument("--steps", type=int, default=40, help="steps of flatout after the warm-up")
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--shards", type=int, default=0, help="tar files that flatout reads, instead of a set on the device")
    p.add_argument("--python", default=sys.executable)
    p.add_argument("--json", action="store_true")
    a = p.parse_intermixed_args()
    table = {}
    with tempfile.TemporaryDirectory() as folder:
        if a.shards:
            (Path(folder) / "shards").mkdir()
            with ProcessPoolExecutor() as pool:
                list(pool.map(write_shard, [Path(folder) / "shards" / f"shard-{i:03}.tar" for i in range(a.shards)]))
        for case in a.cases:
            rows = a.rows or CASES[case][1]
            runs = [lambda i: run_flatout(a, Path(folder), case, rows, i)]
            runs += [lambda i, x=x: run_peer(a, case, rows, x) for x in a.peers]
            for i in range(a.rounds):
                for run in runs:
                    result = run(i)
                    table.setdefault(case, {}).setdefault(result["peer"], []).append(result)
                    print(f"{case:6} {result['peer']:18} {result['images_per_second']:10,.0f} images/s", file=sys.stderr, flush=True)
    if a.json:
        print(json.dumps(dict(gpu=steady.gpu(), cases=table)))
        return
    print(steady.gpu())
    for case, results in table.items():
        show(case, a.rows or CASES[case][1], results)


if __name__ == "__main__":
    main()
