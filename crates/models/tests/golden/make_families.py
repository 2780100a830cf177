"""Generates a tiny checkpoint of every family of decoders, with the reference library's logits, loss and gradients.

    pip install torch transformers safetensors
    python make_families.py            # writes families/NAME/ beside this file
    python make_families.py --check    # recomputes the results and compares them with the files
    python make_families.py NAME       # one of them alone

families/NAME/ contains the output of `save_pretrained` (config.json, model.safetensors in f32) and expected.safetensors with
    input_ids   i32   [B, T]
    labels      i32   [B, T], the target of the logits at the same position; -1 is ignored
    logits      f32   [B, T, V]
    loss_sum    f32   [1], the sum over supervised positions of -log softmax(logits)[label]
    grad.NAME   f32   the gradient of loss_sum for every tensor of model.safetensors
ENCODERS instead have texts of unequal lengths, each with a class:
    input_ids   i32   [T], the texts one after another, and lengths i32 [S]
    types       i32   [T], the type of each token, where the model has types
    labels      i32   [S], the class of each, and label_weights f32 [S], their weights
    logits      f32   [S, C], and loss_sum f32 [1], the weighted sum of -log softmax(logits)[label]
BODIES are models without a head: their files have no `lm_head`, and names without `model.`. Their results
come from the library's class with a head, loaded from the same files: tied embeddings, or a head of classes, whose weight is
stored with the results as score.weight.
Everything is computed in f64 from the stored weights, as in make_golden.py, and rounded to f32 once. Windows are shorter
than a row and caps are small, so that both change most numbers.
"""

import argparse
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import (
    BertConfig, BertForSequenceClassification, DistilBertConfig, DistilBertForSequenceClassification,
    Gemma2Config, Gemma2ForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig, GraniteConfig, GraniteForCausalLM, LlamaConfig,
    LlamaForCausalLM, MistralConfig, MistralForCausalLM, MistralForSequenceClassification, MistralModel, ModernBertConfig,
    ModernBertForSequenceClassification, Olmo2Config, Olmo2ForCausalLM, Phi3Config, Phi3ForCausalLM, Phi3Model, Qwen2Config, Qwen2ForCausalLM,
    Qwen3Config, Qwen3ForCausalLM, Qwen3Model, RobertaConfig, RobertaForSequenceClassification, SmolLM3Config, SmolLM3ForCausalLM,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from make_golden import LENGTHS, Float64Everywhere, batch, check_finite_difference, measure, randomise

HERE = Path(__file__).resolve().parent / "families"
LOCAL, GLOBAL = "sliding_attention", "full_attention"


def made(model, config, **fields):
    """A model of this family with dimensions that share no common factors, and the family's own fields."""
    common = dict(
        vocab_size=29, hidden_size=16, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=18, max_position_embeddings=64, rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        pad_token_id=None, bos_token_id=1, eos_token_id=2, attn_implementation="eager",
    )
    return model(config(**(common | fields)))


def rope(kind, **fields):
    return {"rope_type": kind, "rope_theta": 500.0} | fields


def phi3(original):
    """Half of each head rotates: three pairs, whose frequencies are divided by other factors in rows longer than the original context."""
    return made(
        Phi3ForCausalLM, Phi3Config, hidden_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        tie_word_embeddings=True, original_max_position_embeddings=original, sliding_window=17,
        rope_parameters=rope(
            "longrope", partial_rotary_factor=0.5, short_factor=[1.0, 1.25, 1.5], long_factor=[1.5, 2.5, 5.0],
            original_max_position_embeddings=original,
        ),
    )


def gemma3():
    return made(
        Gemma3ForCausalLM, Gemma3TextConfig, head_dim=6, sliding_window=5, layer_types=[GLOBAL, LOCAL, LOCAL],
        final_logit_softcapping=4.0, query_pre_attn_scalar=6,
        rope_parameters={LOCAL: {"rope_type": "default", "rope_theta": 100.0}, GLOBAL: rope("default")},
    )


FAMILIES = {
    "qwen2": lambda: made(
        Qwen2ForCausalLM, Qwen2Config, use_sliding_window=True, sliding_window=5, max_window_layers=1,
    ),
    "qwen2-tied": lambda: made(
        Qwen2ForCausalLM, Qwen2Config, num_hidden_layers=1, num_key_value_heads=4, tie_word_embeddings=True,
    ),
    "qwen3-windows": lambda: made(
        Qwen3ForCausalLM, Qwen3Config, head_dim=6, use_sliding_window=True, sliding_window=7, num_hidden_layers=2,
        layer_types=[LOCAL, GLOBAL], tie_word_embeddings=True,
    ),
    "mistral": lambda: made(MistralForCausalLM, MistralConfig, sliding_window=6, head_dim=6, num_hidden_layers=2),
    "llama-dynamic": lambda: made(
        LlamaForCausalLM, LlamaConfig, mlp_bias=True, max_position_embeddings=16, num_hidden_layers=2,
        rope_parameters=rope("dynamic", factor=2.0), tie_word_embeddings=True,
    ),
    "llama-mscale": lambda: made(
        LlamaForCausalLM, LlamaConfig, num_hidden_layers=1, hidden_size=32, tie_word_embeddings=True,
        rope_parameters=rope(
            "yarn", factor=4.0, beta_fast=4.0, beta_slow=0.5, mscale=1.5, mscale_all_dim=0.8,
            original_max_position_embeddings=16,
        ),
    ),
    "phi3": lambda: phi3(64),
    "phi3-long": lambda: phi3(16),
    "gemma2": lambda: made(
        Gemma2ForCausalLM, Gemma2Config, head_dim=6, sliding_window=5, attn_logit_softcapping=3.0,
        final_logit_softcapping=4.0, query_pre_attn_scalar=10,
    ),
    "gemma3-capped": gemma3,
    "olmo2": lambda: made(Olmo2ForCausalLM, Olmo2Config, num_hidden_layers=2, attention_bias=True),
    "smollm3": lambda: made(
        SmolLM3ForCausalLM, SmolLM3Config, num_hidden_layers=4, no_rope_layers=[1, 0, 1, 0], use_sliding_window=True,
        sliding_window=6,
    ),
    "granite": lambda: made(
        GraniteForCausalLM, GraniteConfig, num_hidden_layers=2, embedding_multiplier=3.0, attention_multiplier=0.3,
        residual_multiplier=0.7, logits_scaling=2.5, attention_bias=True, mlp_bias=True,
    ),
}


UNDROPPED = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
ENCODERS = {
    "modernbert": lambda: made(
        ModernBertForSequenceClassification, ModernBertConfig, num_hidden_layers=4, local_attention=6, num_labels=3,
        classifier_pooling="mean", norm_eps=1e-5, eos_token_id=2, cls_token_id=1, sep_token_id=2,
        layer_types=[GLOBAL, LOCAL, LOCAL, GLOBAL], rope_parameters={LOCAL: rope("default", rope_theta=100.0), GLOBAL: rope("default")},
    ),
    "bert": lambda: made(
        BertForSequenceClassification, BertConfig, num_hidden_layers=2, hidden_size=12, num_attention_heads=3, num_labels=3,
        max_position_embeddings=27, **UNDROPPED,
    ),
    "roberta": lambda: made(
        RobertaForSequenceClassification, RobertaConfig, num_hidden_layers=2, hidden_size=12, num_attention_heads=3,
        num_labels=3, max_position_embeddings=29, type_vocab_size=1, layer_norm_eps=1e-5, pad_token_id=1, bos_token_id=0,
        **UNDROPPED,
    ),
    "distilbert": lambda: made(
        DistilBertForSequenceClassification, DistilBertConfig, n_layers=2, dim=12, n_heads=3, hidden_dim=18, num_labels=3,
        max_position_embeddings=25, dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0, hidden_size=12,
        num_hidden_layers=2, num_attention_heads=3,
    ),
}


# Bodies, and the class that loads each with a head.
BODIES = {
    "qwen3-body": (Qwen3ForCausalLM, lambda: made(Qwen3Model, Qwen3Config, head_dim=6, num_hidden_layers=2, tie_word_embeddings=True)),
    "phi3-body": (Phi3ForCausalLM, lambda: made(Phi3Model, Phi3Config, num_hidden_layers=1, tie_word_embeddings=True)),
    "mistral-body": (
        MistralForSequenceClassification, lambda: made(MistralModel, MistralConfig, sliding_window=6, num_hidden_layers=2),
    ),
}


def lift(model):
    """Recomputes the frequencies, which the constructor computed in f32, in f64."""
    if not hasattr(model, "model"):
        return  # Learned positions.
    rotary = model.model.rotary_emb
    if isinstance(rotary.rope_type, dict):
        for kind in rotary.layer_types:
            frequencies, scaling = rotary.compute_default_rope_parameters(model.config, layer_type=kind)
            assert frequencies.dtype == torch.float64 and scaling == 1.0
            setattr(rotary, f"{kind}_inv_freq", frequencies)
        return
    make = ROPE_INIT_FUNCTIONS.get(rotary.rope_type)
    frequencies, scaling = make(model.config) if make else rotary.compute_default_rope_parameters(model.config)
    assert frequencies.dtype == torch.float64
    rotary.inv_freq, rotary.original_inv_freq = frequencies, frequencies.clone()
    rotary.attention_scaling = scaling


def results(folder, model_class, seed):
    """The library's results for the folder: its logits, loss and gradients in f64."""
    model = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    input_ids, labels = batch(model.config.vocab_size, seed)
    model.double()
    with Float64Everywhere():
        lift(model)
        exact = measure(model, input_ids, labels)
        finite = check_finite_difference(model, input_ids, labels, exact, seed + 1)
    assert all(tensor.dtype == torch.float64 and tensor.norm() > 0 for tensor in exact.values())
    tensors = {"input_ids": input_ids.int(), "labels": labels.int()}
    tensors |= {name: tensor.float().contiguous() for name, tensor in exact.items()}
    return tensors, finite


def results_of_classes(folder, model_class, seed):
    """The results of a model with a head of classes, one text at a time, so that no padding is needed."""
    of_body = {"num_labels": 3} if model_class is MistralForSequenceClassification else {}
    model = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **of_body).eval()
    generator = torch.Generator().manual_seed(seed)
    if of_body:
        model.score.weight.data = torch.randn(model.score.weight.shape, generator=generator)
    # The embedding of padding is not trained.
    least = 0 if of_body or model.config.pad_token_id is None else model.config.pad_token_id + 1
    texts = [torch.randint(least, model.config.vocab_size, (length,), generator=generator) for length in LENGTHS]
    has_types = getattr(model.config, "type_vocab_size", 1) > 1
    types = [(torch.arange(length) > 2 * length // 3).long() for length in LENGTHS]
    typed = [{"token_type_ids": own[None]} if has_types else {} for own in types]
    labels, counts = torch.tensor([2, 0, 1, 2]), torch.tensor([1.0, 0.5, 2.0, 1.5])
    model.double()
    with Float64Everywhere():
        lift(model)
        logits = torch.cat([model(text[None], **more).logits for text, more in zip(texts, typed)])
        loss = (torch.nn.functional.cross_entropy(logits, labels, reduction="none") * counts).sum()
        parameters = dict(model.named_parameters())
        grads = torch.autograd.grad(loss, list(parameters.values()))
    exact = {"logits": logits.detach(), "loss_sum": loss.detach()[None]}
    exact |= {f"grad.{name}": grad for name, grad in zip(parameters, grads)}
    assert all(tensor.dtype == torch.float64 and tensor.norm() > 0 for tensor in exact.values())
    tensors = {"input_ids": torch.cat(texts).int(), "lengths": torch.tensor(LENGTHS).int()}
    tensors |= {"labels": labels.int(), "label_weights": counts}
    tensors |= {"score.weight": model.score.weight.detach().float()} if of_body else {}
    tensors |= {"types": torch.cat(types).int()} if has_types else {}
    return tensors | {name: tensor.float().contiguous() for name, tensor in exact.items()}, 0.0


def main():
    parser = argparse.ArgumentParser(description="Make or check the checkpoints of families.")
    parser.add_argument("--check", action="store_true", help="compare with the stored files and write nothing")
    parser.add_argument("names", nargs="*", help="the families to make; all where none is named")
    arguments = parser.parse_args()
    check = arguments.check
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    bodies = {name: build for name, (_, build) in BODIES.items()}
    for seed, (name, build) in enumerate((FAMILIES | ENCODERS | bodies).items()):
        if arguments.names and name not in arguments.names:
            continue
        folder, model = HERE / name, build()
        if not check:
            shutil.rmtree(folder, ignore_errors=True)
            randomise(model.named_parameters(), 100 * seed, one_plus=name.startswith("gemma"))
            model.save_pretrained(folder)
            (folder / "generation_config.json").unlink(missing_ok=True)
        headed = BODIES[name][0] if name in BODIES else type(model)
        compute = results_of_classes if headed.__name__.endswith("SequenceClassification") else results
        tensors, finite = compute(folder, headed, 5000 + seed)
        path = folder / "expected.safetensors"
        if check:
            with safe_open(path, "pt") as stored:
                assert set(stored.keys()) == set(tensors), f"{path} holds other tensors than this script makes"
                for tensor in tensors:
                    off = (stored.get_tensor(tensor).double() - tensors[tensor].double()).norm()
                    assert off <= 1e-6 * tensors[tensor].double().norm(), f"{path}: {tensor} differs"
        else:
            save_file(tensors, path)
        size = sum(file.stat().st_size for file in folder.iterdir())
        print(f"{name:15} {size:6} bytes, finite difference within {finite:.1e}" + (", agrees" if check else ""))


if __name__ == "__main__":
    main()
