"""Checks that the PyTorch peer computes the same decoder as flatout: its loss and gradients against a golden fixture.

    pip install torch numpy safetensors
    python bench/peers/tiny_torch_golden.py

Loads the weights of crates/models/tests/golden/qwen3.safetensors into the peer's decoder and compares with the loss and
gradients stored there. Fails if a tensor's relative L2 distance is above 1e-5.
"""

import json
import sys
from pathlib import Path

from safetensors.torch import load_file

GOLDEN = Path(__file__).resolve().parents[2] / "crates" / "models" / "tests" / "golden" / "qwen3.safetensors"

# The peer's parameters and those of the fixture, which the peer concatenates where there are several.
BLOCK = {
    "attention_norm": ["input_layernorm"],
    "qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "q_norm": ["self_attn.q_norm"],
    "k_norm": ["self_attn.k_norm"],
    "out": ["self_attn.o_proj"],
    "ffn_norm": ["post_attention_layernorm"],
    "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
    "down": ["mlp.down_proj"],
}

tensors = load_file(GOLDEN)
config = json.loads(GOLDEN.with_suffix(".json").read_text())
rows, context = tensors["input_ids"].shape
# The peer reads its dimensions from the command line when it is imported.
sys.argv[1:] = [str(word) for pair in {
    "--width": config["hidden_size"], "--layers": config["num_hidden_layers"], "--heads": config["num_attention_heads"],
    "--kv-heads": config["num_key_value_heads"], "--head-size": config["head_dim"],
    "--ffn": config["intermediate_size"], "--vocab": config["vocab_size"], "--context": context, "--batch": rows,
    "--norm-eps": config["rms_norm_eps"], "--rope-theta": config["rope_parameters"]["rope_theta"],
}.items() for word in pair]

import torch  # noqa: E402
from tiny_torch import Decoder  # noqa: E402


def stored(kind, names):
    return torch.cat([tensors[f"{kind}.model.{name}.weight"] for name in names])


def main():
    names = {"embedding.weight": ["embed_tokens"], "norm.weight": ["norm"]}
    for i in range(config["num_hidden_layers"]):
        names |= {f"blocks.{i}.{ours}.weight": [f"layers.{i}.{n}" for n in theirs] for ours, theirs in BLOCK.items()}
    model = Decoder()
    parameters = dict(model.named_parameters())
    assert set(parameters) == set(names), "the peer has other parameters than the fixture"
    with torch.no_grad():
        for name, p in parameters.items():
            p.copy_(stored("weight", names[name]))

    labels = tensors["labels"].long()
    supervised = labels >= 0
    loss = model(tensors["input_ids"].long(), labels.masked_fill(~supervised, -100)) * supervised.sum()
    loss.backward()
    distance = {"loss": (abs(loss.detach() - tensors["loss_sum"][0]) / tensors["loss_sum"][0]).item()}
    for name, p in parameters.items():
        grad = stored("grad", names[name])
        distance[name] = ((p.grad - grad).norm() / grad.norm()).item()
    worst = max(distance, key=distance.get)
    print(f"loss {distance['loss']:.1e}, worst gradient {distance[worst]:.1e} ({worst}), {len(parameters)} parameters")
    if distance[worst] > 1e-5:
        raise SystemExit(f"{worst} differs from the fixture by {distance[worst]:.1e}, above 1e-5")


if __name__ == "__main__":
    main()
