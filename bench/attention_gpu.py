"""Compares flatout's attention kernels with PyTorch's on one GPU, on every shape of `flatout doctor --speed attention`, in interleaved rounds.

    cargo build --profile ship
    python bench/attention_gpu.py target/ship/flatout
    python bench/attention_gpu.py target/ship/flatout --only backward --rounds 3 --json

One round is flatout's command, then bench/peers/attention_torch.py on the shapes that it printed, each in a new process. A time is
that of one call, measured with CUDA events, the median of several rounds, on random numbers; if the tensors of one call would stay
in the cache, calls cycle through several copies in memory. Packed sequences run on PyTorch's packed attention if it has one, and
padded to 512. Rates count the pairs of real tokens that the mask keeps.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

PEER = Path(__file__).resolve().parent / "peers" / "attention_torch.py"


def run_flatout(binary, only):
    """Shapes, each with its kernels' times. Fails if one shape fails."""
    command = [binary, "doctor", "--speed", "attention", "--json"] + (["--only", only] if only else [])
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if not done.stdout.strip():
        sys.exit(f"{' '.join(command)} printed nothing (code {done.returncode})")
    return json.loads(done.stdout)


def run_torch(python, shapes):
    """Milliseconds of each backend, a dictionary per shape; none for trees, whose mask PyTorch's kernels do not support."""
    known = [shape for shape in shapes if "TwoIntervals" not in shape["shape"]]
    plain = [{key: shape[key] for key in ("backward", "causal", "heads", "kv_heads", "size", "lengths", "padded_to")}
             for shape in known]
    done = subprocess.run([python, str(PEER)], input=json.dumps(plain), stdout=subprocess.PIPE, text=True, check=True)
    times = iter(json.loads(done.stdout.strip().splitlines()[-1]))
    return [next(times) if shape in known else {} for shape in shapes]


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("flatout")
    p.add_argument("--only", default="", help="only shapes whose name contains this")
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--python", default=sys.executable)
    p.add_argument("--json", action="store_true")
    a = p.parse_args()
    gpu, shapes, times, failed = "", [], {}, []
    for _ in range(a.rounds):
        ours = run_flatout(a.flatout, a.only)
        gpu, shapes = ours["gpu"], ours["attention"]
        failed += [f"{shape['shape']}: {shape['failed']}" for shape in shapes if "failed" in shape]
        theirs = run_torch(a.python, shapes)
        for shape, torch in zip(shapes, theirs):
            of_shape = times.setdefault(shape["shape"], {})
            for kernel in shape.get("kernels", []):
                of_shape.setdefault(kernel["kernel"], []).append(kernel["ms"])
            for backend, ms in torch.items():
                of_shape.setdefault(f"torch {backend}", []).append(ms)
    rows = []
    for shape in shapes:
        ms = {name: statistics.median(all_ms) for name, all_ms in times[shape["shape"]].items()}
        own = {name: t for name, t in ms.items() if not name.startswith("torch") and name not in ("copy", "cudnn, padded")}
        peers = {name: t for name, t in ms.items() if name.startswith("torch")}
        rows.append(dict(shape=shape["shape"], ms=ms, best=min(own, key=own.get) if own else None,
                         best_torch=min(peers, key=peers.get) if peers else None))
    if a.json:
        print(json.dumps(dict(gpu=gpu, rounds=a.rounds, shapes=rows, failed=failed)))
    else:
        print(f"{gpu}, {a.rounds} rounds; the best of each in milliseconds")
        for row in rows:
            ms, best, torch = row["ms"], row["best"], row["best_torch"]
            print(row["shape"])
            print("   ", "  ".join(f"{name} {t:.3f}" for name, t in ms.items()))
            if best and torch:
                print(f"    {best} is {ms[torch] / ms[best]:.2f} times the speed of {torch}")
        for line in failed:
            print(f"FAILED {line}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
