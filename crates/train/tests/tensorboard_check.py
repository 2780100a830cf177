"""Reads a run's event files with TensorBoard's own reader and compares every value with events.jsonl. To be run manually:

    pip install tensorboard
    python crates/train/tests/tensorboard_check.py RUN

For a run that was killed and resumed, every step must have the values of the last process that made it.
"""

import json
import math
import pathlib
import struct
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def expected(run):
    """The values that count: later lines win, and a resume event voids the steps after its own."""
    steps, evals, begins = {}, {}, False
    for line in (run / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        kind = event["event"]
        if kind == "start":
            begins = True
        elif kind == "resume":
            begins = False
            steps = {n: e for n, e in steps.items() if n <= event["step"]}
            evals = {n: e for n, e in evals.items() if n <= event["step"]}
        elif kind == "step":
            if begins:
                steps, evals, begins = {}, {}, False
            steps[event["step"]] = event
        elif kind == "eval":
            evals[event["step"]] = event
    return steps, evals


def same(read, wanted):
    if wanted is None:
        return not math.isfinite(read)
    return read == struct.unpack("f", struct.pack("f", wanted))[0]


def main():
    run = pathlib.Path(sys.argv[1])
    steps, evals = expected(run)
    board = EventAccumulator(str(run), size_guidance={"scalars": 0, "tensors": 0})
    board.Reload()
    tags = {
        "train/loss": (steps, "loss"),
        "train/grad_norm": (steps, "grad_norm"),
        "train/lr": (steps, "lr"),
        "speed/tokens_per_second": (steps, "tokens_per_second"),
        "speed/step_ms": (steps, "step_ms"),
        "eval/loss": (evals, "loss"),
    }
    failed = False
    for tag, (wanted, field) in tags.items():
        read = {s.step: s.value for s in board.Scalars(tag)} if tag in board.Tags()["scalars"] else {}
        ok = read.keys() == wanted.keys() and all(same(read[n], wanted[n][field]) for n in wanted)
        failed |= not ok
        print(f"{'ok  ' if ok else 'FAIL'} {tag}: {len(read)} values, {len(wanted)} expected")
    files = sorted(path.name for path in run.glob("*tfevents*"))
    text = board.Tensors("config")[0].tensor_proto.string_val[0].decode()
    failed |= "[model]" not in text
    print(f"{len(files)} files, tags: {', '.join(sorted(board.Tags()['scalars']))}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
