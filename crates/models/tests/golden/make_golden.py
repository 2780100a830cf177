"""Generates the golden fixtures of the decoder: tiny random checkpoints with the logits, loss and gradients of a reference.

    pip install torch transformers safetensors numpy
    python make_golden.py            # writes NAME.safetensors and NAME.json beside this file
    python make_golden.py --check    # recomputes and compares with the files instead of writing

`llama` and `qwen3` are the reference library's own models (LlamaForCausalLM, Qwen3ForCausalLM, eager attention), and so
are `gpt2` and `gpt2-exact` (GPT2LMHeadModel: layer norm with bias, learned positions, biases, its own names and
layouts; GELU in the tanh form and in the exact one) and
`llama-linear`, `llama-llama3` and `llama-yarn`, with scaled rotary frequencies; `llama-llama3` and `llama-yarn` add
a bias to every product. `gemma3` (Gemma3ForCausalLM) has a window shorter than a row, two global layers with scaled
frequencies, grouped heads and scores divided by another root than that of the head size; `gemma3-bidirectional` attends in
both directions and has the factor of its embeddings rounded to bf16, as the library does with weights of that type. `options`
is written below from its equations and covers the remaining options: layer norm without bias, an ungated tanh-GELU MLP,
learned positions, no RoPE.

NAME.safetensors contains
    weight.<name>   f32   every parameter once, [out, in] for products ([in, out] in GPT-2); a tied head has no entry
    input_ids       i32   [B, T]
    labels          i32   [B, T], the target of the logits at the SAME position (already shifted); -1 is ignored
    logits          f32   [B, T, V]
    loss_sum        f32   [1], the sum over supervised positions of -log softmax(logits)[label]
    loss_mean       f32   [1], loss_sum over the number of supervised positions
    grad.<name>     f32   the gradient of loss_sum; a tied embedding has both contributions
and NAME.json contains the model's configuration (for the reference library's models exactly their config.json).

`gemma3-classes` (Gemma3TextForSequenceClassification) is another kind: texts of unequal lengths with a class each.
After the weights it contains instead
    input_ids       i32   [T], the texts one after the other
    lengths         i32   [S], the length of each text
    labels          i32   [S], the class of each
    label_weights   f32   [S], their weights
    logits.last     f32   [S, C], the library's own, for the last token
    logits.POOLING  f32   [S, C] for mean, cls and max over the library's last hidden states
    loss_sum        f32   [1], the weighted sum of -log softmax(logits.mean)[label], and grad.<name> its gradient

Precision: the weights are f32 numbers; everything else is computed from them in f64 and rounded to f32 once, so the
stored values are exact for that checkpoint to f32's last bit, and a tolerance of 1e-5 applies to the
code under test only. The reference library rounds to f32 inside norms, softmax and rotary
embedding whatever the model's type is; `Float64Everywhere` removes those roundings. Each run prints how far plain f32
and the library's own partial f64 are from the stored values, and fails if the gradients miss a finite difference.
"""

import argparse
import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch.overrides import TorchFunctionMode
from transformers import (
    Gemma3ForCausalLM, Gemma3TextConfig, Gemma3TextForSequenceClassification, GPT2Config, GPT2LMHeadModel, LlamaConfig,
    LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

HERE = Path(__file__).resolve().parent
B, T = 2, 23
IGNORED = -1


class Float64Everywhere(TorchFunctionMode):
    """Replaces every explicit conversion to f32 by one to f64."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        lift = lambda value: torch.float64 if value is torch.float32 else value
        return function(*map(lift, args), **{name: lift(value) for name, value in (kwargs or {}).items()})


def randomise(parameters, seed, one_plus=False):
    """Sets weights such that every part matters: norms' factors away from one, attention away from uniform."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in parameters:
        if name.endswith(".bias"):
            p.data = torch.empty(p.shape).normal_(0.0, 0.3, generator=generator)
            continue
        if p.dim() == 1:
            least = -0.6 if one_plus else 0.4
            p.data = torch.empty(p.shape).uniform_(least, least + 1.2, generator=generator)
            continue
        inputs = p.shape[0] if ".c_" in name else p.shape[1]  # GPT-2 stores [in, out]
        std = 0.4 if "embed" in name or ".wte." in name or ".wpe." in name else 1.2 / math.sqrt(inputs)
        p.data = torch.empty(p.shape).normal_(0.0, std, generator=generator)


def batch(vocab, seed):
    """Token ids and shifted labels; about a quarter of the positions, in runs and alone, are not supervised."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab, (B, T + 1), generator=generator)
    input_ids, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].clone()
    labels[0, :5] = IGNORED
    labels[1, -3:] = IGNORED
    labels[torch.rand(labels.shape, generator=generator) < 0.12] = IGNORED
    return input_ids, labels


def loss_sum(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


class Options(torch.nn.Module):
    """A decoder from its equations; D width, H heads, K head size, F ffn, V vocabulary.

    x = E[ids] + P[0..T]
    x = x + Wo attention(Wq n, Wk n, Wv n),   n = layer_norm(x) * g1,  causal, scale 1/sqrt(K)
    x = x + Wdown gelu_tanh(Wup n),           n = layer_norm(x) * g2
    logits = E (layer_norm(x) * g)
    """

    config = dict(
        vocab_size=73, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, head_dim=6,
        intermediate_size=32, max_position_embeddings=24, norm="layer_norm", norm_eps=1e-5, norm_bias=False,
        hidden_act="gelu_tanh", gated_mlp=False, positions="learned", tie_word_embeddings=True,
    )

    def __init__(self):
        super().__init__()
        c = self.config
        D, ffn, V = c["hidden_size"], c["intermediate_size"], c["vocab_size"]
        shapes = {"model.embed_tokens.weight": (V, D)}
        shapes["model.embed_positions.weight"] = (c["max_position_embeddings"], D)
        for i in range(c["num_hidden_layers"]):
            layer = f"model.layers.{i}."
            shapes[layer + "input_layernorm.weight"] = (D,)
            shapes |= {f"{layer}self_attn.{part}_proj.weight": (D, D) for part in "qkvo"}
            shapes[layer + "post_attention_layernorm.weight"] = (D,)
            shapes[layer + "mlp.up_proj.weight"] = (ffn, D)
            shapes[layer + "mlp.down_proj.weight"] = (D, ffn)
        shapes["model.norm.weight"] = (D,)
        self.w = {name: torch.nn.Parameter(torch.empty(shape)) for name, shape in shapes.items()}
        self.config = dict(c, parameters=list(shapes))

    def named_parameters(self):
        return self.w.items()

    def double(self):
        self.w = {name: torch.nn.Parameter(p.detach().double()) for name, p in self.w.items()}
        return self

    def forward(self, ids):
        c, w = self.config, self.w
        H, K, T = c["num_attention_heads"], c["head_dim"], ids.shape[1]

        def norm(x, weight):
            centred = x - x.mean(-1, keepdim=True)
            return centred / (centred.square().mean(-1, keepdim=True) + c["norm_eps"]).sqrt() * weight

        def gelu(x):
            return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

        x = w["model.embed_tokens.weight"][ids] + w["model.embed_positions.weight"][:T]
        future = torch.ones(T, T, dtype=torch.bool).triu(1)
        for i in range(c["num_hidden_layers"]):
            layer = {name: p for name, p in w.items() if name.startswith(f"model.layers.{i}.")}
            at = lambda name: layer[f"model.layers.{i}.{name}.weight"]
            n = norm(x, at("input_layernorm"))
            q, k, v = ((n @ at(f"self_attn.{part}_proj").T).unflatten(-1, (H, K)).transpose(1, 2) for part in "qkv")
            scores = (q @ k.mT / math.sqrt(K)).masked_fill(future, -math.inf)
            x = x + (scores.softmax(-1) @ v).transpose(1, 2).flatten(2) @ at("self_attn.o_proj").T
            n = norm(x, at("post_attention_layernorm"))
            x = x + gelu(n @ at("mlp.up_proj").T) @ at("mlp.down_proj").T
        return norm(x, w["model.norm.weight"]) @ w["model.embed_tokens.weight"].T


def llama():
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=61, hidden_size=36, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2, head_dim=6,
        intermediate_size=40, max_position_embeddings=64, rms_norm_eps=1e-5, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, attn_implementation="eager",
    ))


def qwen3():
    return Qwen3ForCausalLM(Qwen3Config(
        vocab_size=83, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=36, max_position_embeddings=64, rms_norm_eps=1e-6, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, attn_implementation="eager",
    ))


def stretched(rope, **more):
    """A Llama with scaled frequencies, such that of its eight some are kept, some interpolated and some scaled."""
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=53, hidden_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        intermediate_size=28, max_position_embeddings=64, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters=rope | {"rope_theta": 1000.0}, attn_implementation="eager", **more,
    ))


def llama_linear():
    return stretched({"rope_type": "linear", "factor": 2.5})


def llama_llama3():
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return stretched(rope | {"original_max_position_embeddings": 64}, attention_bias=True, mlp_bias=True)


def llama_yarn():
    rope = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 4.0, "beta_slow": 0.5}
    return stretched(rope | {"original_max_position_embeddings": 32}, attention_bias=True, mlp_bias=True)


def gpt2(activation="gelu_new"):
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=67, n_embd=24, n_layer=2, n_head=4, n_inner=40, n_positions=24, layer_norm_epsilon=1e-5,
        activation_function=activation, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="eager",
        bos_token_id=0, eos_token_id=0,
    ))


def gemma3(kind=Gemma3ForCausalLM, **changes):
    model = kind(Gemma3TextConfig(**(dict(
        vocab_size=36, hidden_size=12, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=6,
        intermediate_size=16, max_position_embeddings=64, rms_norm_eps=1e-6, tie_word_embeddings=True,
        query_pre_attn_scalar=10, sliding_window=5, sliding_window_pattern=2, pad_token_id=None, attn_implementation="eager",
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
        },
    ) | changes)))
    model.config.dtype = torch.float32
    return model


def gemma3_bidirectional():
    model = gemma3(use_bidirectional_attention=True, sliding_window=6, num_hidden_layers=3, sliding_window_pattern=3)
    scale = model.model.embed_tokens.embed_scale
    scale.copy_(scale.to(torch.bfloat16))
    model.config.dtype = torch.bfloat16
    return model


def logits_of(model, input_ids):
    return model(input_ids) if isinstance(model, Options) else model(input_ids, use_cache=False).logits


def measure(model, input_ids, labels):
    """Logits, the summed loss and its gradients at the model's precision."""
    parameters = dict(model.named_parameters())
    logits = logits_of(model, input_ids)
    loss = loss_sum(logits, labels)
    grads = torch.autograd.grad(loss, list(parameters.values()))
    return {"logits": logits.detach(), "loss_sum": loss.detach()[None]} | {
        f"grad.{name}": g for name, g in zip(parameters, grads)
    }


def lift_rotary_frequencies(model):
    """Recomputes the frequencies, which the constructor computed in f32, in f64."""
    if isinstance(model, (Gemma3ForCausalLM, Gemma3TextForSequenceClassification)):
        rotary = model.model.rotary_emb
        for kind in rotary.layer_types:
            make = ROPE_INIT_FUNCTIONS.get(rotary.rope_type[kind], rotary.compute_default_rope_parameters)
            frequencies, scaling = make(model.config, layer_type=kind)
            assert frequencies.dtype == torch.float64 and scaling == 1.0
            setattr(rotary, f"{kind}_inv_freq", frequencies)
    elif hasattr(model, "model"):
        rotary = model.model.rotary_emb
        make = ROPE_INIT_FUNCTIONS.get(rotary.rope_type)
        made = make(model.config, rotary.inv_freq.device) if make else rotary.compute_default_rope_parameters(model.config)
        rotary.inv_freq, rotary.attention_scaling = made
        assert rotary.inv_freq.dtype == torch.float64


def check_finite_difference(model, input_ids, labels, result, seed):
    """Checks every parameter's gradient against a central difference of the loss along one random direction."""
    generator = torch.Generator().manual_seed(seed)
    worst = 0.0
    for name, p in model.named_parameters():
        direction = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        step = 1e-5
        with torch.no_grad():
            start = p.detach().clone()
            p.copy_(start + step * direction)
            above = loss_sum(logits_of(model, input_ids), labels)
            p.copy_(start - step * direction)
            below = loss_sum(logits_of(model, input_ids), labels)
            p.copy_(start)
        grad = result[f"grad.{name}"]
        error = abs((above - below) / (2 * step) - (grad * direction).sum()) / (grad.norm() * direction.norm())
        worst = max(worst, error.item())
    assert worst < 1e-6, f"a gradient misses its finite difference by {worst:.1e}"
    return worst


def attention_peak(model, input_ids):
    """Mean over heads and layers of the largest probability in the last query's row; uniform would be 1/T."""
    attentions = model(input_ids, use_cache=False, output_attentions=True).attentions
    return torch.stack([a[:, :, -1].amax(-1).mean() for a in attentions]).mean().item()


def relative_l2(result, exact):
    return {name: ((result[name].double() - exact[name]).norm() / exact[name].norm()).item() for name in exact}


def summary(errors):
    worst = max(errors, key=errors.get)
    return f"logits {errors['logits']:.1e}, loss {errors['loss_sum']:.1e}, worst {errors[worst]:.1e} ({worst})"


def make(name, build, seed):
    """The fixture's tensors and its configuration; prints how much the precisions differ."""
    torch.manual_seed(seed)
    model = build()
    randomise(model.named_parameters(), seed, one_plus=isinstance(model, Gemma3ForCausalLM))
    config = model.config if isinstance(model, Options) else model.config.to_diff_dict()
    input_ids, labels = batch(config["vocab_size"], seed + 1)
    weights = {f"weight.{n}": p.detach().clone() for n, p in model.named_parameters()}

    single = measure(model, input_ids, labels)
    model.double()
    partial = measure(model, input_ids, labels)
    with Float64Everywhere():
        lift_rotary_frequencies(model)
        exact = measure(model, input_ids, labels)
        finite = check_finite_difference(model, input_ids, labels, exact, seed + 2)
        if not isinstance(model, Options):
            own = model(
                input_ids, labels=labels, shift_labels=labels, ignore_index=IGNORED, num_items_in_batch=1,
                use_cache=False,
            ).loss
            assert torch.allclose(own, exact["loss_sum"][0], rtol=1e-12), "the library's own loss differs"
    assert all(tensor.dtype == torch.float64 and tensor.norm() > 0 for tensor in exact.values())

    supervised = int((labels != IGNORED).sum())
    print(f"{name}: {sum(w.numel() for w in weights.values())} parameters, {supervised} of {B * T} positions"
          f" supervised, mean loss {exact['loss_sum'].item() / supervised:.3f}")
    if not isinstance(model, Options):
        peak = attention_peak(model, input_ids)
        print(f"  largest attention probability in the last row {peak:.2f} (uniform {1 / T:.2f})")
    print(f"  f32 against stored          : {summary(relative_l2(single, exact))}")
    print(f"  library's f64 against stored: {summary(relative_l2(partial, exact))}")
    print(f"  finite difference in f64    : worst {finite:.1e}")

    tensors = weights | {"input_ids": input_ids.int(), "labels": labels.int()}
    tensors |= {n: tensor.float().contiguous() for n, tensor in exact.items()}
    tensors["loss_mean"] = (exact["loss_sum"] / supervised).float()
    return tensors, config


LENGTHS = [7, 23, 1, 12]


def pooled(states):
    """The poolings of one text's hidden states [T, D]."""
    return {"mean": states.mean(0), "cls": states[0], "max": states.amax(0), "last": states[-1]}


def make_classes(seed):
    """`make` for texts and their classes, one text at a time, so that no padding is needed."""
    torch.manual_seed(seed)
    model = gemma3(
        Gemma3TextForSequenceClassification, num_hidden_layers=2, use_bidirectional_attention=True, num_labels=3,
        sliding_window=6,
    )
    randomise(model.named_parameters(), seed, one_plus=True)
    config = model.config.to_diff_dict() | {"architectures": [type(model).__name__], "classifier_pooling": "mean"}
    generator = torch.Generator().manual_seed(seed + 1)
    texts = [torch.randint(0, config["vocab_size"], (length,), generator=generator) for length in LENGTHS]
    labels, counts = torch.tensor([2, 0, 1, 2]), torch.tensor([1.0, 0.5, 2.0, 1.5])
    tensors = {f"weight.{n}": p.detach().clone() for n, p in model.named_parameters()}
    model.double()
    with Float64Everywhere():
        lift_rotary_frequencies(model)
        states = [model.model(text[None], use_cache=False).last_hidden_state[0] for text in texts]
        logits = {
            f"logits.{how}": torch.stack([model.score(pooled(state)[how]) for state in states])
            for how in pooled(states[0])
        }
        own = torch.cat([model(text[None], use_cache=False).logits for text in texts])
        assert torch.allclose(own, logits["logits.last"], rtol=1e-12), "the library's own logits differ"
        losses = F.cross_entropy(logits["logits.mean"], labels, reduction="none")
        loss = (losses * counts).sum()
        parameters = dict(model.named_parameters())
        grads = torch.autograd.grad(loss, list(parameters.values()))
    exact = logits | {"loss_sum": loss[None]} | {f"grad.{n}": g for n, g in zip(parameters, grads)}
    assert all(tensor.dtype == torch.float64 and tensor.norm() > 0 for tensor in exact.values())
    print(f"gemma3-classes: {len(texts)} texts, loss {loss.item():.3f}")
    tensors |= {"input_ids": torch.cat(texts).int(), "lengths": torch.tensor(LENGTHS).int()}
    tensors |= {"labels": labels.int(), "label_weights": counts}
    return tensors | {n: tensor.detach().float().contiguous() for n, tensor in exact.items()}, config


def compare(path, tensors):
    """Compares weights, ids and labels to the bit, and results to 1e-6, because processors may sum in different orders."""
    with safe_open(path, "pt") as stored:
        assert set(stored.keys()) == set(tensors), f"{path.name} holds other tensors than this script makes"
        for name, tensor in tensors.items():
            kept = stored.get_tensor(name)
            exact = name.startswith("weight.") or not tensor.is_floating_point()
            same = torch.equal(kept, tensor) if exact else (kept - tensor).norm() <= 1e-6 * tensor.norm()
            assert same, f"{path.name}: {name} differs"


def main():
    parser = argparse.ArgumentParser(description="Make or check the golden fixtures.")
    parser.add_argument("--check", action="store_true", help="compare with the stored files and write nothing")
    check = parser.parse_args().check
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    versions = {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__}

    fixtures = [
        ("llama", llama), ("qwen3", qwen3), ("options", Options), ("gpt2", gpt2), ("llama-linear", llama_linear),
        ("llama-llama3", llama_llama3), ("llama-yarn", llama_yarn), ("gpt2-exact", lambda: gpt2("gelu")),
        ("gemma3", gemma3), ("gemma3-bidirectional", gemma3_bidirectional),
    ]
    made = [(name, lambda seed, name=name, build=build: make(name, build, seed)) for name, build in fixtures]
    for seed, (name, make_one) in enumerate(made + [("gemma3-classes", make_classes)]):
        tensors, config = make_one(1000 * (seed + 1))
        path = HERE / f"{name}.safetensors"
        if check:
            compare(path, tensors)
            print(f"  {path.name} agrees")
        else:
            save_file(tensors, path, metadata=versions | {"precision": "computed in f64, stored as f32"})
            path.with_suffix(".json").write_text(json.dumps(config, indent=2) + "\n")
            print(f"  wrote {path.name}, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
