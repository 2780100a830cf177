"""Measures LoRA on Qwen3-8B with PEFT: rank 16 on all linear weights of the layers over a frozen base in bf16, or in NF4 by bitsandbytes (QLoRA).

    python bench/peers/lora_peft.py --base bf16 --layers liger --rows 8
    python bench/peers/lora_peft.py --base nf4 --layers plain --rows 8 --checkpointing
    python bench/peers/lora_peft.py --small --device cpu --layers plain

Weights are random: speed does not depend on them. All rows have --length tokens, and every token is learned. Attention is PyTorch's
fused one, the optimiser fused AdamW, and adapters are trained in fp32 under autocast to bf16, PEFT's default. The NF4 base has double quantisation
and computes in bf16. `liger` applies Liger's kernels, including the fused head and loss. Prints a line of JSON: tokens_per_second, step_ms (the median
of --steps), peak_bytes, card_bytes, first_steady_seconds.
"""

import argparse
import json
import os
import statistics
import time

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3Config, Qwen3ForCausalLM

MODEL = dict(hidden_size=4096, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
             intermediate_size=12288, vocab_size=151936, max_position_embeddings=40960, rms_norm_eps=1e-6, rope_theta=1e6,
             tie_word_embeddings=False)
SMALL = dict(MODEL, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
             intermediate_size=128, vocab_size=2000)
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def in_nf4(model, device):
    """Replaces the layers' linear weights by random ones in NF4; a tensor of each shape is drawn once."""
    import bitsandbytes as bnb

    drawn = {}
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, linear in list(part.named_children()):
                if name not in LINEAR:
                    continue
                shape = tuple(linear.weight.shape)
                if shape not in drawn:
                    drawn[shape] = (0.02 * torch.randn(shape)).to(torch.bfloat16)
                packed = bnb.nn.Linear4bit(shape[1], shape[0], bias=False, compute_dtype=torch.bfloat16, compress_statistics=True,
                                           quant_type="nf4", device="meta")
                packed.weight = bnb.nn.Params4bit(drawn[shape], requires_grad=False, quant_type="nf4", compress_statistics=True,
                                                  module=packed)
                setattr(part, name, packed.to(device))


def model_of(a):
    if a.layers == "liger":
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3

        apply_liger_kernel_to_qwen3()
    config = Qwen3Config(**(SMALL if a.small else MODEL))
    config._attn_implementation, config.use_cache = "sdpa", False
    torch.set_default_dtype(torch.bfloat16)
    if a.base == "nf4":
        with torch.device("meta"):
            model = Qwen3ForCausalLM(config)
        in_nf4(model, a.device)
        for owner in model.modules():
            for name, weight in list(owner.named_parameters(recurse=False)):
                if weight.is_meta:
                    filled = torch.empty_like(weight, device=a.device)
                    setattr(owner, name, torch.nn.Parameter(filled.normal_(std=0.02) if weight.dim() > 1 else filled.fill_(1), requires_grad=False))
        # Its table of frequencies is a buffer, which is computed and not stored.
        with torch.device(a.device):
            model.model.rotary_emb = type(model.model.rotary_emb)(config)
    else:
        with torch.device(a.device):
            model = Qwen3ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    if a.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
        model.enable_input_require_grads()
    return get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=LINEAR, task_type="CAUSAL_LM")).train()


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--base", choices=["bf16", "nf4"], default="bf16")
    p.add_argument("--layers", choices=["liger", "plain"], default="liger")
    for name, value in dict(rows=8, length=2048, steps=8, warm=3).items():
        p.add_argument(f"--{name}", type=int, default=value)
    p.add_argument("--checkpointing", action="store_true", help="recompute layers in the backward pass")
    p.add_argument("--device", default="cuda")
    p.add_argument("--small", action="store_true")
    a = p.parse_args()
    on_gpu, started = a.device == "cuda", time.perf_counter()
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None
    torch.manual_seed(0)
    model = model_of(a)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=on_gpu)
    tokens = torch.randint(1, model.config.vocab_size, (a.rows, a.length), device=a.device)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    ends, first = [], None
    for step in range(a.warm + a.steps):
        with torch.autocast(a.device, torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize()
        ends.append(time.perf_counter())
        first = first or (ends[-1] - started if step + 1 == a.warm else None)
    step = statistics.median(after - before for before, after in zip(ends[a.warm - 1:], ends[a.warm:]))
    free, total = torch.cuda.mem_get_info() if on_gpu else (0, 0)
    name = f"PEFT {a.base} {a.layers}" + " checkpointing" * a.checkpointing
    print(json.dumps(dict(peer=name, tokens_per_second=a.rows * a.length / step, step_ms=1e3 * step, loss=float(loss.detach()),
                          peak_bytes=torch.cuda.max_memory_allocated() if on_gpu else 0, card_bytes=total - free, first_steady_seconds=first)))


if __name__ == "__main__":
    main()
