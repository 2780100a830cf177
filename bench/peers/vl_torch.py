"""Measures training of Qwen3-VL with LoRA on its text part in PyTorch: questions about images, the tower frozen. Prints a line of
JSON for each micro-batch size.

    python bench/peers/vl_torch.py --at-once 1 2 4 --lora plain peft

Every sample has one image of --height x --width pixels and --text tokens, so there is no padding and a batch costs as much as a
packed one. Weights are random and bf16, the optimiser is fused AdamW over the adapters. `plain` implements the adapters in four
lines of PyTorch, `peft` is the library; `--read` computes only the logits of the answer instead of all.
"""

import argparse
import inspect
import json
import time

import torch
from torch import nn
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

TEXT = dict(hidden_size=4096, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
            intermediate_size=12288, vocab_size=151936, tie_word_embeddings=False, max_position_embeddings=262144,
            rms_norm_eps=1e-6)
TOWER = dict(hidden_size=1152, depth=27, num_heads=16, intermediate_size=4304, out_hidden_size=4096,
             deepstack_visual_indexes=[8, 16, 24], patch_size=16, spatial_merge_size=2, temporal_patch_size=2,
             num_position_embeddings=48 * 48)
SMALL_TEXT = dict(TEXT, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
                  intermediate_size=128)
SMALL_TOWER = dict(TOWER, hidden_size=64, depth=4, num_heads=4, intermediate_size=128, out_hidden_size=64,
                   deepstack_visual_indexes=[0, 1, 2])
IMAGE, START, END = 151655, 151652, 151653
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Lora(nn.Module):
    """y = W x + s B A x."""

    def __init__(self, linear, rank, alpha):
        super().__init__()
        self.linear, self.scale = linear, alpha / rank
        like = dict(device=linear.weight.device, dtype=linear.weight.dtype)
        self.a = nn.Parameter(torch.randn(rank, linear.in_features, **like) / linear.in_features ** 0.5)
        self.b = nn.Parameter(torch.zeros(linear.out_features, rank, **like))

    def forward(self, x):
        return torch.addmm(self.linear(x).flatten(0, -2), (x @ self.a.T).flatten(0, -2), self.b.T,
                           alpha=self.scale).view(*x.shape[:-1], -1)


def model_of(a):
    text, tower = (SMALL_TEXT, SMALL_TOWER) if a.small else (TEXT, TOWER)
    rope = dict(rope_type="default", mrope_section=[24, 20, 20] if not a.small else [6, 5, 5], mrope_interleaved=True,
                rope_theta=5e6)
    config = Qwen3VLConfig(text_config=dict(text, rope_scaling=rope, rope_theta=5e6), vision_config=tower,
                           image_token_id=IMAGE, vision_start_token_id=START, vision_end_token_id=END)
    config._attn_implementation = "sdpa"
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(a.device):
        model = Qwen3VLForConditionalGeneration(config)
    torch.set_default_dtype(torch.float32)
    return model.requires_grad_(False)


def adapted(model, a, kind):
    if kind == "peft":
        from peft import LoraConfig, get_peft_model
        layers = r".*language_model\.layers\..*\.(" + "|".join(LINEAR) + ")"
        return get_peft_model(model, LoraConfig(r=a.rank, lora_alpha=2 * a.rank, target_modules=layers))
    for layer in model.model.language_model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name in LINEAR:
                if hasattr(part, name):
                    setattr(part, name, Lora(getattr(part, name), a.rank, 2 * a.rank))
    return model


def inputs_of(model, a, count):
    rows, columns = a.height // 16, a.width // 16
    tokens = rows * columns // 4
    before, after = 4, a.text - 6
    one = [100 + i for i in range(before)] + [START] + [IMAGE] * tokens + [END] + [200 + i for i in range(after)]
    ids = torch.tensor([one] * count, device=a.device)
    labels = torch.full_like(ids, -100)
    labels[:, -a.answer:] = ids[:, -a.answer:]
    pixels = torch.randn(count * rows * columns, 3 * 2 * 16 * 16, device=a.device, dtype=torch.bfloat16)
    grid = torch.tensor([[1, rows, columns]] * count, device=a.device)
    given = dict(input_ids=ids, labels=labels, pixel_values=pixels, image_grid_thw=grid,
                 attention_mask=torch.ones_like(ids), use_cache=False)
    forward = inspect.signature(Qwen3VLForConditionalGeneration.forward).parameters
    if "mm_token_type_ids" in forward:
        given["mm_token_type_ids"] = (ids == IMAGE).int()
    if a.read:
        given["logits_to_keep"] = a.answer + 1
        given["labels"] = labels[:, -a.answer - 1:]
    return given


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--at-once", type=int, nargs="+", default=[1, 2, 4])
    p.add_argument("--lora", nargs="+", choices=["plain", "peft"], default=["plain"])
    p.add_argument("--text", type=int, default=66)
    p.add_argument("--answer", type=int, default=4)
    p.add_argument("--height", type=int, default=1056)
    p.add_argument("--width", type=int, default=1280)
    p.add_argument("--rank", type=int, default=16)
    p.add_argument("--steps", type=int, default=10)
    p.add_argument("--device", default="cuda")
    p.add_argument("--read", action="store_true")
    p.add_argument("--small", action="store_true")
    a = p.parse_args()
    cuda = a.device == "cuda"
    for kind in a.lora:
        model = adapted(model_of(a), a, kind)
        model.train()
        optimizer = torch.optim.AdamW([x for x in model.parameters() if x.requires_grad], lr=1e-4, fused=cuda)
        for count in a.at_once:
            given = inputs_of(model, a, count)
            if cuda:
                torch.cuda.reset_peak_memory_stats()

            def step():
                loss = model(**given).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                return loss

            for _ in range(3):
                loss = step()
            if cuda:
                torch.cuda.synchronize()
            times = []
            for _ in range(a.steps):
                began = time.perf_counter()
                loss = step()
                if cuda:
                    torch.cuda.synchronize()
                times.append(time.perf_counter() - began)
            middle = sorted(times)[len(times) // 2]
            print(json.dumps(dict(peer=f"{kind} {count}" + " read" * a.read, samples_per_second=count / middle,
                                  step_ms=1e3 * middle, loss=loss.item(),
                                  peak_bytes=torch.cuda.max_memory_allocated() if cuda else 0)), flush=True)
        del model, optimizer
        if cuda:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
