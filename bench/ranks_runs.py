"""Shared by scripts about ranks: small runs of several ranks on the CPU, and the state they saved."""

import hashlib
import json
from pathlib import Path

# Eight lanes: 1, 2, 4 and 8 ranks have the same bits.
SMALL = ["tiny", "model.context=32", "model.width=32", "model.layers=1", "model.heads=2", "model.kv_heads=1", "model.ffn=48",
         "model.dropout=0.1", "optimizer.clip=0.5", "train.ema=0.9", "train.batch=16", "train.lanes=8", "schedule.warmup_steps=2",
         "eval.rows=0", "backend=cpu"]


def state(run, step):
    """A hash of everything saved at a step, which does not depend on the number of ranks: weights, moments, counters and the data's
    cursor."""
    record = json.loads((Path(run) / "checkpoints" / f"step-{step}" / "state.json").read_text())
    fields = {key: record[key] for key in ("step", "cursor", "counters")}
    found = hashlib.sha256(json.dumps(fields, sort_keys=True).encode())
    for name, (dtype, shape, data) in sorted(tensors(run, step).items()):
        found.update(f"{name} {dtype} {shape}".encode() + data)
    return found.hexdigest()


def tensors(run, step):
    """All tensors of a checkpoint, assembled from its shards: type, shape and bytes by name."""
    folder = Path(run) / "checkpoints" / f"step-{step}"
    files = {path.name: safetensors(path) for path in folder.glob("*.safetensors")}
    if list(files) == ["state.safetensors"]:
        return files["state.safetensors"]
    whole = {}
    for name, tensor in json.loads((folder / "state.json").read_text())["tensors"].items():
        parts = [files[part["file"]][name] for part in tensor["parts"]]
        whole[name] = (tensor["dtype"], tensor["shape"], b"".join(part[2] for part in parts))
    return whole


def safetensors(path):
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + size])
    header.pop("__metadata__", None)
    cut = lambda entry: data[8 + size + entry["data_offsets"][0]:8 + size + entry["data_offsets"][1]]
    return {name: (entry["dtype"], entry["shape"], cut(entry)) for name, entry in header.items()}


def events(run):
    """The lines of a run's log; a partial last line is left out."""
    log = Path(run) / "events.jsonl"
    lines = log.read_text().splitlines() if log.is_file() else []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return found


def steps(run):
    """The step lines of a run by step; later ones replace earlier ones."""
    return {event["step"]: event for event in events(run) if event["event"] == "step"}


def ranks_of_lives(run):
    """The number of ranks of each start of a run."""
    return [event.get("world", {}).get("ranks", 1) for event in events(run) if event["event"] == "start"]


def saved(run):
    """The newest step with a complete checkpoint; 0 if there is none."""
    folder = Path(run) / "checkpoints"
    found = [file.parent.name for file in folder.glob("step-*/complete") if file.stat().st_size == 32]
    return max((int(name.removeprefix("step-")) for name in found), default=0)
