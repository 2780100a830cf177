"""Measures DPO on Qwen3-0.6B with TRL's DPOTrainer: random weights, pairs of equal length. Prints a line of JSON for each micro-batch
size.

    python bench/peers/dpo_trl.py --at-once 4 8 16 --weights bf16 fp32 --layers liger plain

The reference's log-probabilities are computed before training (precompute_ref_log_probs), attention is PyTorch's fused one, the
optimiser is fused AdamW, nothing is logged or saved. `bf16` keeps weights and moments in bf16, `fp32` keeps them in fp32 under
autocast, as flatout does. `liger` applies Liger's kernels to the layers, as far as TRL supports it; TRL's own head computes
log-probabilities in chunks. All pairs are equally long, so there is no padding. Times are from the end of a step to the end of
the next, after --warm warm-up steps.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

import pyarrow
import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from trl import DPOConfig, DPOTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import words  # noqa: E402

MODEL = dict(hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
             intermediate_size=3072, vocab_size=151936, max_position_embeddings=40960, rms_norm_eps=1e-6, rope_theta=1e6,
             tie_word_embeddings=True)
SMALL = dict(MODEL, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
             intermediate_size=128, vocab_size=2000)


class Clock(TrainerCallback):
    """Records the end of every step, after the device has finished."""

    def __init__(self, cuda):
        self.cuda, self.ends = cuda, []

    def on_step_end(self, *_, **__):
        if self.cuda:
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())


def tokenizer_of(folder, vocab):
    words.words_of(folder, vocab)
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), bos_token="<bos>", eos_token="<eos>",
                                   pad_token="<eos>")


def pairs_of(a, vocab, count):
    draw = random.Random(1)

    def text(tokens):
        return "".join(f" w{draw.randrange(vocab - 2)}" for _ in range(tokens))

    # The trainer appends the end token to each answer. A data set with an explicit name is not hashed.
    rows = [dict(prompt=text(a.prompt), chosen=text(a.answer - 1) + " ", rejected=text(a.answer - 1) + " ") for _ in range(count)]
    return Dataset(pyarrow.Table.from_pylist(rows), fingerprint="pairs")


def measure(a, folder, weights, layers, at_once):
    cuda = a.device == "cuda"
    sizes = SMALL if a.small else MODEL
    config = Qwen3Config(**sizes)
    config._attn_implementation = "sdpa"
    torch.manual_seed(1)
    torch.set_default_dtype(torch.bfloat16 if weights == "bf16" else torch.float32)
    with torch.device(a.device):
        model = Qwen3ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    steps = a.warm + a.steps
    settings = DPOConfig(output_dir=str(folder / "out"), per_device_train_batch_size=at_once, max_steps=steps, beta=0.1,
                         learning_rate=1e-6, precompute_ref_log_probs=True, bf16=weights == "fp32" and cuda,
                         gradient_checkpointing=a.checkpointing, use_liger_kernel=layers == "liger", max_length=None,
                         optim="adamw_torch_fused" if cuda else "adamw_torch", logging_steps=10 ** 6, save_strategy="no",
                         report_to=[], disable_tqdm=True, use_cpu=not cuda, dataloader_num_workers=0, torch_compile=a.compile)
    clock = Clock(cuda)
    trainer = DPOTrainer(model=model, args=settings, train_dataset=pairs_of(a, sizes["vocab_size"], at_once * steps),
                         processing_class=tokenizer_of(folder, sizes["vocab_size"]), callbacks=[clock])
    tokens = [len(trainer.train_dataset[0][name]) for name in ("prompt_ids", "chosen_ids", "rejected_ids")]
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    ends = clock.ends[a.warm - 1:]
    times = sorted(after - before for before, after in zip(ends, ends[1:]))
    middle = times[len(times) // 2]
    name = f"trl {weights} {layers}" + " compiled" * a.compile + f" {at_once}"
    return dict(peer=name, pairs_per_second=at_once / middle, step_ms=1e3 * middle, tokens=tokens,
                peak_bytes=torch.cuda.max_memory_allocated() if cuda else 0)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--at-once", type=int, nargs="+", default=[4, 8, 16])
    p.add_argument("--weights", nargs="+", choices=["bf16", "fp32"], default=["bf16", "fp32"])
    p.add_argument("--layers", nargs="+", choices=["liger", "plain"], default=["liger"])
    p.add_argument("--prompt", type=int, default=512)
    p.add_argument("--answer", type=int, default=512)
    p.add_argument("--steps", type=int, default=12)
    p.add_argument("--warm", type=int, default=4)
    p.add_argument("--device", default="cuda")
    for flag in ("small", "compile", "checkpointing"):
        p.add_argument(f"--{flag}", action="store_true")
    a = p.parse_args()
    for weights in a.weights:
        for layers in a.layers:
            for at_once in a.at_once:
                with tempfile.TemporaryDirectory() as folder:
                    try:
                        print(json.dumps(measure(a, Path(folder), weights, layers, at_once)), flush=True)
                    except torch.cuda.OutOfMemoryError:
                        print(f"trl {weights} {layers} {at_once}: out of memory", file=sys.stderr)
                if a.device == "cuda":
                    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
