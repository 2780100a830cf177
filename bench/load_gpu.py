"""Time from pretrained weights to the first step: random weights in Gemma-3-1B's shape (2 GB of bf16), written by transformers in its
layout and fine-tuned with flatout twice; the first start also compiles kernels and tunes products.

    pip install torch transformers
    cargo build --profile ship
    python bench/load_gpu.py target/ship/flatout
    python bench/load_gpu.py target/debug/flatout --small

Seconds count from the start of the process to the end of the first step, with the files in the page cache.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import steady
from finetune_gpu import GEMMA, SMALL_GEMMA, write_pairs
from words import words_of

MOST_SECONDS = 10.0
"""The longest accepted start, in seconds."""


def publish(folder, sizes, device):
    """Writes the model's files and returns their size in bytes."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(vocab_size=sizes["vocab"], hidden_size=sizes["width"], num_hidden_layers=sizes["layers"],
                              head_dim=sizes["head_size"], num_attention_heads=4, num_key_value_heads=1,
                              intermediate_size=sizes["width"] * 6, sliding_window=512, bos_token_id=0, eos_token_id=1,
                              query_pre_attn_scalar=sizes["head_size"])
    with torch.device(device):
        Gemma3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def start(a, folder, name, batch, length):
    """Seconds to the first step of a run, and its loss."""
    command = [a.flatout, "train", "gemma3-1b-pairs", f"model.from={folder}/model", f"data.path={folder}/pairs.csv",
               f"data.tokenizer={folder}/model/tokenizer.json", f"model.context={length}", f"train.batch={batch}",
               f"train.micro_batch={batch}", "data.held_out=0.01", "eval.rows=0", "eval.every_epochs=none", "train.patience=none",
               "checkpoint.best=false", "checkpoint.every=0", "train.epochs=none", "train.steps=3", "schedule.warmup_steps=1",
               "log.every=1", "--run", f"{folder}/{name}"]
    began = time.perf_counter()
    run = subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, text=True)
    for line in run.stdout:
        if '"event":"step"' in line:
            seconds = time.perf_counter() - began
            for _ in run.stdout:
                pass
            break
    if run.wait() != 0:
        sys.exit(f"{' '.join(command)} ended with code {run.returncode}")
    return seconds


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("flatout")
    p.add_argument("--small", action="store_true", help="sizes for a machine without a GPU, which only show that it runs")
    a = p.parse_args()
    sizes, length, batch = (SMALL_GEMMA, 64, 4) if a.small else (GEMMA, 512, 32)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        bytes_ = publish(folder / "model", sizes, "cpu" if a.small else "cuda")
        write_pairs(folder / "pairs.csv", words_of(folder / "model", sizes["vocab"]), [length] * (20 * batch))
        times = {name: start(a, folder, name, batch, length) for name in ("first", "second")}
    print(steady.gpu())
    print(f"{bytes_ / 1e9:.2f} GB of weights to the end of the first step: {times['first']:.1f} s at the first start, "
          f"{times['second']:.1f} s at the second (at most {MOST_SECONDS:.0f} s: {'held' if times['second'] < MOST_SECONDS else 'NOT HELD'})")


if __name__ == "__main__":
    main()
