"""Generates the golden fixtures of a decoder that looks at frames: a tiny random foveated model over the library's DINOv2 and Llama.

    pip install torch transformers safetensors numpy
    python make_fovea.py            # writes fovea*.safetensors and fovea.json beside this file
    python make_fovea.py --check    # recomputes and compares with the files instead of writing

A query looks at an image: it attends to the keys and values that DINOv2's layers compute from the image's patches, which never
see a query. A first look, with one query for all frames, gives one token per frame; from the text model's state for a token
the query for the second look at the next frame is computed. The tokens of second looks precede the text.

`fovea-weights.safetensors` contains the weights under the authors' names, as bytes: n means (n - 128) / 128, or
1 + (n - 128) / 128 in norm weights and layer scales, which is exact in f32 and bf16.

`fovea.safetensors` contains three samples: 3 frames and 7 tokens, of which some are not learned; a still image as 4 frames and 5
tokens; 6 tokens alone.
    images          u8    [U, rows, columns, channels]
    frames          i32   the image of every frame, ordered by sample
    frame_counts    i32   [3]
    tokens          i32   of all samples
    token_counts    i32   [3]
    learned         i32   1 where a token is learned
    coarse_tokens   f32   [F, E], tokens of first looks
    fine_tokens     f32   [F, E], tokens of second looks
    loss_sum        f32   [1], the sum over learned tokens of -log softmax(logits)[token]
    grad.<name>     f32   the gradient of loss_sum, complete if it has at most 64 elements, otherwise 64 sums of it
    coarse.loss_sum, coarse.grad.<name>   the same with first looks before the text
    generated       i32   [2, 8], greedy continuations of the first and the second sample's frames and 4 tokens: frame by
                          frame, with each query computed from the previous frame's state
and `fovea.json` describes the model.

Sum k of a gradient adds element i with the sign of bit k of splitmix64(i): the squares of 64 such sums are on average
64 times its squared norm, so their relative distance is that of the gradients. That keeps files small.

The library's modules run unmodified, in f64; its text norms, rotations and resampled positions are still computed in f32.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Dinov2Config, Dinov2Model, LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).resolve().parent
WEIGHTS, FILE, DESCRIBED = (HERE / name for name in ("fovea-weights.safetensors", "fovea.safetensors", "fovea.json"))
WIDTH, TEXT, QUERY, PIXELS, SCALE, VOCAB = 24, 20, 14, 24, 0.14, 61
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
SUMS = 64
# The images of a sample's frames, and its number of text tokens.
SAMPLES = [([0, 1, 2], 7), ([3, 3, 3, 3], 5), ([], 6)]


def dino_config():
    return Dinov2Config(
        hidden_size=WIDTH, num_hidden_layers=3, num_attention_heads=3, mlp_ratio=2, patch_size=6, image_size=42,
        layer_norm_eps=1e-6, use_mask_token=False, attn_implementation="eager",
    )


def text_config():
    return LlamaConfig(
        hidden_size=TEXT, num_hidden_layers=3, num_attention_heads=5, num_key_value_heads=1, head_dim=4, intermediate_size=28,
        vocab_size=VOCAB, max_position_embeddings=64, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5}, attn_implementation="eager",
    )


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.dino = Dinov2Model(dino_config())
        self.query_input_proj = nn.Linear(QUERY, WIDTH, bias=False)
        self.output_proj = nn.Linear(WIDTH, WIDTH)


class Foveated(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.llm = LlamaForCausalLM(text_config())
        self.dino_to_llm = nn.Linear(WIDTH, TEXT)
        self.llm_to_query = nn.Linear(TEXT, QUERY)
        self.q_static = nn.Parameter(torch.empty(1, QUERY))
        self.q_init = nn.Parameter(torch.empty(1, QUERY))

    def remember(self, pixels):
        """Keys and values of every layer, for images [U, 3, rows, columns]; the library's layers compute the states."""
        hidden, kept = self.encoder.dino.embeddings(pixels), []
        for layer in self.encoder.dino.encoder.layer:
            normed = layer.norm1(hidden)
            kept.append((layer.attention.k_proj(normed), layer.attention.v_proj(normed)))
            hidden = layer(hidden)
        return kept

    def look(self, queries, kept, images):
        """Tokens [R, E] for queries [R, Q], each looking at one of the images."""
        hidden = self.encoder.query_input_proj(queries)
        for layer, (keys, values) in zip(self.encoder.dino.encoder.layer, kept):
            heads = lambda x: x.unflatten(-1, (layer.attention.num_attention_heads, -1))
            q = heads(layer.attention.q_proj(layer.norm1(hidden)))
            k, v = heads(keys[images]), heads(values[images])
            scores = torch.einsum("rhd,rnhd->rhn", q, k) * layer.attention.scaling
            mixed = torch.einsum("rhn,rnhd->rhd", scores.softmax(-1), v).flatten(1)
            hidden = hidden + layer.layer_scale1(layer.attention.o_proj(mixed))
            hidden = hidden + layer.layer_scale2(layer.mlp(layer.norm2(hidden)))
        seen = self.encoder.output_proj(self.encoder.dino.layernorm(hidden))
        return SCALE * self.dino_to_llm(seen)

    def body(self, rows):
        """States of rows [T, E] after the final norm."""
        return self.llm.model(inputs_embeds=rows[None], use_cache=False).last_hidden_state[0]

    def first_looks(self, kept, frames):
        return self.look(self.q_static.expand(len(frames), -1), kept, frames)

    def second_looks(self, kept, frames):
        states = self.body(self.first_looks(kept, frames))
        queries = torch.cat([self.q_init, self.llm_to_query(states[:-1])])
        return self.look(queries, kept, frames)

    def logits(self, tokens, frame_tokens):
        rows = torch.cat([frame_tokens, self.llm.model.embed_tokens(tokens)])
        return self.llm.lm_head(self.body(rows))[len(frame_tokens):]

    @torch.no_grad()
    def generate(self, kept, frames, tokens, count):
        """Generates greedily, with the frames one after the other; every prefix is recomputed."""
        rows = torch.empty(0, TEXT, dtype=torch.float64)
        for frame in frames:
            query = self.llm_to_query(self.body(rows)[-1:]) if len(rows) else self.q_init
            rows = torch.cat([rows, self.look(query, kept, [frame])])
        made = []
        for _ in range(count):
            logits = self.logits(torch.cat([tokens, torch.tensor(made, dtype=torch.long)]), rows)[-1]
            best = logits.topk(2).values
            assert best[0] - best[1] > 1e-3, "a token is nearly a tie"
            made.append(int(logits.argmax()))
        return made


# The library's modules have other names than the authors' files.
FILED = {
    "attention.q_proj": "attention.attention.query", "attention.k_proj": "attention.attention.key",
    "attention.v_proj": "attention.attention.value", "attention.o_proj": "attention.output.dense",
}


def named(model):
    """Parameters by their names in files."""
    def filed(name):
        for module, kept in FILED.items():
            if name.startswith("encoder.dino."):
                name = name.replace(module, kept)
        return name
    return {filed(name): p for name, p in model.named_parameters()}


def is_norm(name):
    return name.endswith("lambda1") or ("norm" in name and name.endswith("weight"))


def draw(model):
    """Bytes of every weight: norms and scales 1 + 0.1 N, vectors 0.1 N, queries 0.4 N, matrices 0.15 N. With these PyTorch's own
    gradients in f32 are within 2e-6 of those in f64; with larger ones rounding alone reaches 1e-5."""
    generator = torch.Generator().manual_seed(54)
    weights = {}
    for name, p in named(model).items():
        std = 0.1 if is_norm(name) or p.dim() == 1 else 0.4 if name.startswith("q_") else 0.15
        drawn = torch.empty(p.shape).normal_(0.0, std, generator=generator)
        weights[name] = (drawn * 128).round().add(128).clamp(0, 255).to(torch.uint8)
    return weights


def value(name, stored):
    return (stored.double() - 128) / 128 + is_norm(name)


def bits(count):
    """splitmix64 of 0 to count."""
    with np.errstate(over="ignore"):
        z = np.arange(count, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def sums(gradient):
    flat = gradient.flatten()
    if len(flat) <= SUMS:
        return flat
    signs = (bits(len(flat))[None, :] >> np.arange(SUMS, dtype=np.uint64)[:, None]) & np.uint64(1)
    return torch.from_numpy(1.0 - 2.0 * signs.astype(np.float64)) @ flat


def loss_and_gradients(model, kept, samples, looks):
    """The row before a token predicts it; a sample's first token is ignored, because only frames precede it."""
    loss = 0
    for frames, tokens, learned in samples:
        rows = looks(kept, frames) if frames else torch.empty(0, TEXT, dtype=torch.float64)
        logits = model.logits(tokens, rows)
        each = F.cross_entropy(logits[:-1], tokens[1:], reduction="none")
        loss = loss + (each * learned[1:]).sum()
    parameters = named(model)
    grads = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True, allow_unused=True)
    # Parameters that a coarse pass does not read have no gradient.
    grads = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters.values(), grads)]
    return loss.detach()[None], {name: sums(g) for name, g in zip(parameters, grads)}


def make(stored):
    model = Foveated().eval().double()
    for name, p in named(model).items():
        p.data = value(name, stored[name])
    model.llm.tie_weights()
    generator = torch.Generator().manual_seed(59)
    images = torch.randint(0, 256, (4, PIXELS, PIXELS, 3), generator=generator, dtype=torch.uint8)
    pixels = (images.double() / 255 - torch.tensor(MEAN).double()) / torch.tensor(STD).double()
    kept = model.remember(pixels.permute(0, 3, 1, 2))
    samples = []
    for number, (frames, count) in enumerate(SAMPLES):
        tokens = torch.randint(0, VOCAB, (count,), generator=generator)
        learned = torch.ones(count, dtype=torch.long)
        if number == 0:
            learned[[1, 2, 5]] = 0
        learned[0] = 0
        samples.append((frames, tokens, learned))
    looked = [frames for frames, _, _ in samples if frames]
    loss, grads = loss_and_gradients(model, kept, samples, model.second_looks)
    coarse_loss, coarse_grads = loss_and_gradients(model, kept, samples, model.first_looks)
    exact = {
        "coarse_tokens": torch.cat([model.first_looks(kept, frames) for frames in looked]).detach(),
        "fine_tokens": torch.cat([model.second_looks(kept, frames) for frames in looked]).detach(),
        "loss_sum": loss, "coarse.loss_sum": coarse_loss,
    }
    exact |= {f"grad.{name}": g for name, g in grads.items()} | {f"coarse.grad.{name}": g for name, g in coarse_grads.items()}
    assert all(t.dtype == torch.float64 for t in exact.values())
    tensors = {name: t.float().contiguous() for name, t in exact.items()}
    tensors |= {
        "images": images,
        "frames": torch.tensor(sum(looked, [])).int(),
        "frame_counts": torch.tensor([len(frames) for frames, _, _ in samples]).int(),
        "tokens": torch.cat([tokens for _, tokens, _ in samples]).int(),
        "token_counts": torch.tensor([len(tokens) for _, tokens, _ in samples]).int(),
        "learned": torch.cat([learned for _, _, learned in samples]).int(),
        "generated": torch.tensor([model.generate(kept, frames, tokens[:4], 8) for frames, tokens, _ in samples[:2]]).int(),
    }
    return tensors


def described():
    def part(config, names):
        fields = json.loads(config.to_json_string(use_diff=False))
        return {name: fields[name] for name in names if name in fields}

    text = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
            "intermediate_size", "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "hidden_act",
            "attention_bias", "tie_word_embeddings")
    vision = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "mlp_ratio", "patch_size", "image_size",
              "layer_norm_eps", "layerscale_value", "hidden_act", "qkv_bias", "use_swiglu_ffn", "num_channels")
    return {
        "architectures": ["FoveatedVLM"], "model_type": "fvlm", "query_dim": QUERY, "visual_scale": SCALE, "frame_size": PIXELS,
        "text_config": part(text_config(), text), "vision_config": part(dino_config(), vision),
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    torch.set_num_threads(1)
    if not check:
        save_file(draw(Foveated()), WEIGHTS)
    tensors = make(load_file(WEIGHTS))
    if check:
        old = load_file(FILE)
        assert set(old) == set(tensors), "the file holds other tensors than this script makes"
        for name, made in tensors.items():
            # The gradient of a vector that all keys share is 0 up to rounding.
            least = 1e-3 if "attention.key.bias" not in name else 1.0
            off = (old[name].double() - made.double()).norm() / made.double().norm().clamp(min=least)
            assert off < 1e-6, f"{name} is off by {off:.1e}"
        assert json.loads(DESCRIBED.read_text()) == described()
    else:
        save_file(tensors, FILE)
        DESCRIBED.write_text(json.dumps(described(), indent=2) + "\n")
    print("fovea", "agrees" if check else f"{FILE.stat().st_size} and {WEIGHTS.stat().st_size} bytes")


if __name__ == "__main__":
    main()
