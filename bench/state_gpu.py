"""Effect of the precision of AdamW's moments on the loss: `optimizer.state` fp32, bf16 and int8 on the same data.

    cargo build --profile ship
    python bench/state_gpu.py target/ship/flatout
    python bench/state_gpu.py target/ship/flatout --steps 200 --seeds 1 --layers 2 backend=cpu

A decoder of 30M parameters learns the synthetic language, with each of three seeds and each type of moments: 2,000 updates of
32 x 256 tokens. Every run is a new process; the types are interleaved, so that drift of the GPU's clock affects all alike. Prints the
mean loss of the last tenth of the updates, its ratio to that of fp32 with the same seed, the bytes of the plan's category
`optimizer`, and the median step. Exit code 0 if the mean ratio over the seeds is within half a percent of 1 for both types.
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path

import decoder_30m

KINDS = ["fp32", "bf16", "int8"]


def train(a, folder, kind, seed):
    run = decoder_30m.train(a, folder / f"{kind}-{seed}", seed, f"optimizer.state={kind}")
    active = run["start"]["switches"]["optimizer.state"]
    if active != kind:
        sys.exit(f"optimizer.state={kind} was requested and {active} is active")
    losses = run["losses"]
    return dict(kind=kind, seed=seed, first=losses[0], last=decoder_30m.last(losses, len(losses) // 10), step_ms=run["step_ms"],
                seconds=run["seconds"])


def main():
    a = decoder_30m.arguments(__doc__).parse_intermixed_args()
    plans = {kind: decoder_30m.plan(a, f"optimizer.state={kind}") for kind in KINDS}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(1, a.seeds + 1):
            for kind in KINDS:
                rows.append(train(a, Path(folder), kind, seed))
                row = rows[-1]
                base = next(r["last"] for r in rows if r["seed"] == seed and r["kind"] == "fp32")
                row["ratio"] = row["last"] / base
                print(f"seed {seed} {kind:5} {row['first']:.4f} to {row['last']:.5f}  ratio {row['ratio']:.5f}  "
                      f"{row['step_ms']:7.2f} ms per step {row['seconds']:.0f} s", file=sys.stderr, flush=True)
    ratios = {kind: statistics.fmean(r["ratio"] for r in rows if r["kind"] == kind) for kind in KINDS}
    parameters = plans["fp32"]["parameters"]
    if a.json:
        bytes_of = {kind: plans[kind]["categories"]["optimizer"] for kind in KINDS}
        print(json.dumps(dict(parameters=parameters, steps=a.steps, rows=rows, ratios=ratios, optimizer_bytes=bytes_of)))
    else:
        print(f"{parameters / 1e6:.1f}M parameters, {a.steps} updates, {a.seeds} seeds")
        print(f"{'':6} {'last loss':>10} {'of fp32':>9} {'optimizer MB':>13} {'bytes a parameter':>18} {'step ms':>8}")
        for kind in KINDS:
            own = [r for r in rows if r["kind"] == kind]
            size = plans[kind]["categories"]["optimizer"]
            print(f"{kind:6} {statistics.fmean(r['last'] for r in own):10.5f} {ratios[kind]:9.5f} {size / 1e6:13.1f} "
                  f"{size / parameters:18.3f} {statistics.median(r['step_ms'] for r in own):8.2f}")
    sys.exit(0 if all(abs(ratio - 1) < 0.005 for ratio in ratios.values()) else 1)


if __name__ == "__main__":
    main()
