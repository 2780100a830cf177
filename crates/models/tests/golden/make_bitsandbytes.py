"""Generates checkpoints as transformers and bitsandbytes write them in four bits, with the library's logits.

    pip install torch transformers bitsandbytes accelerate safetensors
    python make_bitsandbytes.py            # writes checkpoints/NAME/ beside this file
    python make_bitsandbytes.py --check    # recomputes the results from the files and compares

Written with bitsandbytes 0.50.2, transformers 5.23 and PyTorch 2.15 on a CPU. checkpoints/NAME/ contains the output of
`save_pretrained` for a model that was loaded with a `BitsAndBytesConfig`, and
    expected.safetensors   input_ids i32 [B, T], logits f32 [B, T, V] of the model that `from_pretrained` loads from the folder, and
                           for two weights the last rows as bitsandbytes dequantises them, f32, under their names

Rows are multiples of 64 values, because bitsandbytes' CPU kernel starts a new block with every row where it dequantises matrices.
The first folder has weights of more than 256 blocks, so that the magnitudes themselves form more than one block.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from bitsandbytes import functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from make_checkpoints import llama, qwen3, randomise

HERE = Path(__file__).resolve().parent / "checkpoints"
B, T = 2, 10
SIZES = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
# Only the last rows of these are stored.
VALUES, ROWS = ["layers.0.self_attn.k_proj", "layers.1.mlp.up_proj"], 16

# name: (model, whether magnitudes are quantised too)
CHECKPOINTS = {
    # Its vocabulary fits the words of the synthetic language.
    "llama-nf4": (lambda: llama(**SIZES, intermediate_size=320, vocab_size=256, tie_word_embeddings=True), True),
    "qwen3-nf4-single": (lambda: qwen3(**SIZES, intermediate_size=128), False),
}


def expected(folder, seed):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map="cpu")
    # In training mode bitsandbytes multiplies by the dequantised values; otherwise its CPU kernels may repack weights
    # and round to bf16.
    model.train()
    ids = torch.randint(0, model.config.vocab_size, (B, T), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        found = {"input_ids": ids.to(torch.int32), "logits": model(input_ids=ids).logits.float().contiguous()}
    for name in VALUES:
        weight = model.model.get_submodule(name).weight
        values = F.dequantize_4bit(weight.data, weight.quant_state)
        assert values.dtype == torch.float32
        found[f"model.{name}.weight"] = values[-ROWS:].contiguous()
    return found


def write(name, build, nested, seed):
    torch.manual_seed(seed)
    model = build()
    randomise(model, seed)
    with tempfile.TemporaryDirectory() as plain:
        model.save_pretrained(plain)
        config = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=nested,
            bnb_4bit_compute_dtype=torch.float32,
        )
        small = AutoModelForCausalLM.from_pretrained(
            plain, quantization_config=config, dtype=torch.float32, device_map="cpu",
        )
    small.save_pretrained(HERE / name)
    (HERE / name / "generation_config.json").unlink(missing_ok=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for seed, (name, (build, nested)) in enumerate(CHECKPOINTS.items(), 7):
        path = HERE / name / "expected.safetensors"
        if not args.check:
            write(name, build, nested, seed)
            save_file(expected(HERE / name, seed), path)
        stored, found = load_file(path), expected(HERE / name, seed)
        off = {key: (stored[key].double() - found[key].double()).abs().max().item() for key in stored}
        assert max(off.values()) < 1e-5, f"{name}: {off}"
        print(name, "agrees:", sum(file.stat().st_size for file in (HERE / name).iterdir()), "bytes")
