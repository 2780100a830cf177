#!/usr/bin/env python3
"""Makes the runs in crates/cli/tests/runs: each is trained to step 20 and cut back to its checkpoint of step 10.

    python bench/keep_runs.py BINARY OUT

The losses of steps 11 to 20 are in losses.json next to each run. A later binary must resume the runs and get the same losses: within
1e-5 in crates/cli/tests/kept_runs.rs, to the bit on one machine in bench/picture.py. The existing runs were made by a version whose
config.toml had both the requested and the resolved settings, so do not make them again: add runs of newer formats.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

MIDDLE, STEPS = 10, 20
COMMON = [f"train.steps={STEPS}", "train.batch=8", "schedule.warmup_steps=2", f"eval.every={MIDDLE}", "eval.rows=8",
          f"checkpoint.every={MIDDLE}", "checkpoint.keep=5", "backend=cpu"]
TEXT = ["model.width=16", "model.layers=2", "model.heads=2", "model.kv_heads=1", "model.head_size=8", "model.ffn=24",
        "model.context=32", "model.vocab=300"]
EXAMPLES = ["--with", "small", *TEXT, "model.vocab=400", "model.context=96", "data.synthetic_rows=200", "adapter.rank=4"]
RUNS = {
    "text-dropout": ["tiny", *TEXT, "model.dropout=0.1", "data.document_mask=true", "train.micro_batch=2"],
    "text-bf16-ema": ["tiny", *TEXT, "precision=bf16", "train.ema=0.9", "optimizer.state=int8"],
    "text-fp8": ["tiny", *TEXT, "model.width=32", "model.head_size=16", "model.ffn=32", "precision=fp8"],
    "lengths": ["tiny", *TEXT, "data.mean_tokens=12", "packing=on"],
    "chat-lora": ["smollm2-135m-sft", *EXAMPLES, "adapter.kind=lora", "adapter.dropout=0.1"],
    "pairs-dora": ["gemma3-1b-pairs", *EXAMPLES, "adapter.kind=dora"],
    "images": ["vision-tiny", "model.width=16", "model.layers=2", "model.heads=2", "data.synthetic_rows=120",
               "train.mixup=0.2", "train.cutmix=1.0", "model.drop_path=0.1"],
    "bdh-images": ["bdh-cifar10", "model.width=16", "model.latent=32", "model.heads=2", "data.source=synthetic",
                   "data.synthetic_rows=120"],
}


def keep(binary, name, words, out):
    run = out / name
    subprocess.run([binary, "train", *words, *COMMON, "--run", run, "-q"], check=True)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    late = [e for e in events if e.get("step", 0) > MIDDLE and e["event"] in ("step", "eval")]
    (run / "losses.json").write_text(json.dumps([[e["event"], e["step"], e["loss"]] for e in late], indent=0) + "\n")
    early = [e for e in events if e["event"] != "end" and e.get("step", 0) <= MIDDLE]
    (run / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in early))
    shutil.rmtree(run / f"checkpoints/step-{STEPS}")
    shutil.rmtree(run / "plots")
    for left in [run / "report.md", run / "lock", run / "checkpoints/best.json", *run.glob("events.out.tfevents.*")]:
        left.unlink(missing_ok=True)


def main():
    binary, out = Path(sys.argv[1]).resolve(), Path(sys.argv[2])
    for name, words in RUNS.items():
        keep(binary, name, words, out)
        print(name)


if __name__ == "__main__":
    main()
