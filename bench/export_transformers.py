"""Compares the logits of exported runs in `transformers` with flatout's, for small trained models.

    pip install torch transformers safetensors tokenizers
    python bench/export_transformers.py target/release/flatout

For every case: a run of a few steps, `flatout export` (f32 in shards, and bf16), AutoModelForCausalLM on the folder, and
`flatout logits` on the run and on the folder for the same tokens. Also checks that AutoTokenizer reads the tokeniser and
gives flatout's own tokens, and that a model saved by `transformers` can be loaded, trained and exported. Exits with 1 if a
logit differs by more than 1e-4 (bf16: than 1e-4 from the run's own weights rounded to bf16).
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from program import Program

SMALL = ["train.steps=20", "train.batch=4", "model.context=32", "schedule.warmup_steps=2", "eval.rows=0", "backend=cpu"]
SHAPE = ["model.width=48", "model.layers=2", "model.ffn=80"]
# The width is a square number, so that the factor on embeddings, its root, is the same in every type.
GEMMA = ["model.heads=4", "model.kv_heads=2", "model.head_size=12", "model.norm_weight=one_plus", "model.post_norms=true",
         "model.activation=geglu", "model.width=64", "model.embed_scale=8"]
CASES = {
    "qwen3, tied": SHAPE + ["model.heads=4", "model.kv_heads=2", "model.head_size=20"],
    "llama, tied": SHAPE + ["model.heads=4", "model.kv_heads=1", "model.qk_norm=false"],
    "llama, untied": SHAPE + ["model.heads=3", "model.kv_heads=3", "model.qk_norm=false", "model.tied=false",
                              "model.rope_theta=500000", "model.norm_eps=1e-5"],
    "llama, llama3 rotations, biases": SHAPE + [
        "model.heads=4", "model.kv_heads=2", "model.qk_norm=false", "model.bias=all", "model.rope_scaling=llama3",
        "model.rope_factor=8", "model.rope_original_context=16"],
    "qwen3, yarn": SHAPE + ["model.heads=4", "model.kv_heads=2", "model.rope_scaling=yarn", "model.rope_factor=4",
                            "model.rope_original_context=16"],
    "gpt2": SHAPE + ["model.heads=4", "model.kv_heads=4", "model.qk_norm=false", "model.bias=all", "model.norm=layer",
                     "model.norm_bias=true", "model.activation=gelu_tanh", "model.positions=learned"],
    "llama, biases of the feed-forward, dynamic": SHAPE + [
        "model.heads=4", "model.kv_heads=2", "model.qk_norm=false", "model.bias=ffn", "model.rope_scaling=dynamic",
        "model.rope_factor=2", "model.rope_original_context=32"],
    "qwen2, windows": SHAPE + ["model.heads=4", "model.kv_heads=2", "model.qk_norm=false", "model.bias=qkv",
                               "model.window=7", "model.global_layers=[0]", "model.tied=false"],
    "qwen3, windows": SHAPE + ["model.heads=4", "model.kv_heads=2", "model.window=7", "model.global_every=2"],
    "mistral": SHAPE + ["model.heads=4", "model.kv_heads=2", "model.qk_norm=false", "model.window=7"],
    "phi3": SHAPE + ["model.heads=4", "model.kv_heads=2", "model.qk_norm=false", "model.rope_size=6",
                     "model.rope_scaling=longrope", "model.rope_factor=2", "model.rope_original_context=16",
                     "model.rope_short_factors=[1,1.5,2]", "model.rope_long_factors=[1,3,6]", "model.rope_attention_factor=1.2"],
    "gemma2": SHAPE + GEMMA + ["model.qk_norm=false", "model.score_cap=5", "model.logit_cap=7", "model.window=7",
                               "model.global_every=2", "model.score_size=9"],
    "gemma3, capped": SHAPE + GEMMA + ["model.logit_cap=7", "model.window=7", "model.global_layers=[0]",
                                       "model.rope_local_theta=100"],
    "olmo2": SHAPE + ["model.heads=4", "model.kv_heads=2", "model.pre_norms=false", "model.post_norms=true",
                      "model.qk_norm_over=heads", "model.tied=false"],
    "smollm3": SHAPE + ["model.heads=4", "model.kv_heads=2", "model.qk_norm=false", "model.unrotated_layers=[1]"],
    "granite": SHAPE + ["model.heads=4", "model.kv_heads=2", "model.qk_norm=false", "model.embed_scale=3",
                        "model.score_scale=0.2", "model.residual_scale=0.6", "model.logit_divisor=4"],
    "qwen3, untied": SHAPE + ["model.heads=6", "model.kv_heads=2", "model.tied=false", "model.rope_theta=1e6"],
}
BOUND = 1e-4


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("flatout", type=Path, help="the binary")
    binary = parser.parse_args().flatout.resolve()
    torch.set_num_threads(2)
    worst = 0.0
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        flatout = Program(binary, scratch)

        def compare(name, folder, ids, *models):
            nonlocal worst
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
            with torch.no_grad():
                theirs = model(ids).logits
            for ours in models:
                off = (flatout.logits(ours, ids) - theirs).abs().max().item()
                worst = max(worst, off)
                print(f"{name:28} {Path(ours).name:12} {type(model).__name__}: off by {off:.1e}")

        for number, (name, words) in enumerate(CASES.items()):
            run, out, narrow = f"run{number}", f"out{number}", f"narrow{number}"
            flatout("train", "tiny", *words, *SMALL, "--run", run)
            flatout("export", run, "--to", out, "--shard-size", "30KB")
            flatout("export", run, "--to", narrow, "--dtype", "bf16")
            ids = torch.randint(0, 220, (3, 29), generator=torch.Generator().manual_seed(number))
            compare(name, scratch / out, ids, run, out)
            compare(f"{name}, bf16", scratch / narrow, ids, narrow)

        text = "the actor near the theatre"
        tokenizer = AutoTokenizer.from_pretrained(scratch / "out0")
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text, "the exported tokeniser reads its own words"
        assert ids[0] == tokenizer.bos_token_id, "a text begins as documents began in training"
        assert (tokenizer.bos_token, tokenizer.eos_token) == ("<bos>", "<eos>")

        config = LlamaConfig(
            vocab_size=512, hidden_size=40, num_hidden_layers=3, num_attention_heads=5, num_key_value_heads=1,
            intermediate_size=72, max_position_embeddings=128, tie_word_embeddings=True, bos_token_id=0, eos_token_id=1,
        )
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(scratch / "theirs")
        ids = torch.randint(0, 512, (2, 50), generator=torch.Generator().manual_seed(9))
        compare("from transformers, bf16", scratch / "theirs", ids, "theirs")
        flatout("train", "tiny", "model.from=theirs", *SMALL, "--run", "trained")
        flatout("export", "trained", "--to", "back")
        compare("trained from transformers", scratch / "back", ids, "trained", "back")
        assert AutoConfig.from_pretrained(scratch / "back").max_position_embeddings == 128
    print(f"worst {worst:.1e}, bound {BOUND:.0e}")
    sys.exit(worst > BOUND)


if __name__ == "__main__":
    main()
