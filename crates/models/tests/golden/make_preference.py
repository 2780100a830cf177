"""Generates the golden fixture of preferences: every loss of pairs and judged answers on the tiny Llama beside this file.

    pip install torch transformers trl safetensors numpy
    python make_preference.py            # writes preference.safetensors beside this file
    python make_preference.py --check    # recomputes and compares with the file instead of writing

The model is `llama` of make_golden.py, with the weights of llama.safetensors; the reference is the same with a little noise.
Values and gradients are computed in f64 from the formulas below and rounded to f32 once. TRL's own implementations of these
losses are called too: they must agree with the formulas, or the script fails.

preference.safetensors contains
    tokens                 i32  the examples one after the other: for each pair the chosen answer after its prompt, then
                                the rejected one
    lengths, prompts       i32  [2 P] tokens of each example, and of its prompt
    reference              f32  [2 P] sums of log-probabilities under the reference, in the order of the examples
    logp                   f32  [2 P] those under the model
    LOSS.loss              f32  [1] the sum over pairs, or over judged answers
    LOSS.grad.<name>       f32  its gradient: for `dpo` every parameter's, for the others three
    kto.mismatched         f32  [2 P] sums under the reference of example i's prompt with the answer of example i - 1
    kto.baseline           f32  [1] the mean gain of these under the model, at least 0
    steps.*                     the same for other pairs as TRL tokenised them, and `steps.loss`, f32 [10], the losses of its
                                DPOTrainer for ten steps of AdamW over all of them
"""

import argparse
import json
import math
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from make_golden import Float64Everywhere

HERE = Path(__file__).resolve().parent
PAIRS = [(5, 4, 4), (3, 6, 3), (7, 2, 5), (4, 5, 1)]  # tokens of the prompt, the chosen and the rejected answer
SOME = ["model.layers.0.self_attn.q_proj.weight", "model.layers.2.mlp.down_proj.weight", "model.norm.weight"]
STEPS, RATE = 10, 1e-3

# name -> (loss of a pair from a, a0 and n of both answers). c chosen, r rejected.
LOSSES = {
    "dpo": lambda c, r: -F.logsigmoid(0.1 * (c.gain - r.gain)),
    "dpo-smooth": lambda c, r: -0.8 * F.logsigmoid(0.3 * (c.gain - r.gain)) - 0.2 * F.logsigmoid(-0.3 * (c.gain - r.gain)),
    "dpo-sft": lambda c, r: -F.logsigmoid(0.1 * (c.gain - r.gain)) - 0.5 * c.mean,
    "ipo": lambda c, r: (c.gain / c.n - r.gain / r.n - 1 / (2 * 0.1)) ** 2,
    "hinge": lambda c, r: torch.relu(1 - 0.1 * (c.gain - r.gain)),
    "robust": lambda c, r: (-0.8 * F.logsigmoid(0.3 * (c.gain - r.gain)) + 0.2 * F.logsigmoid(-0.3 * (c.gain - r.gain))) / 0.6,
    "apo_zero": lambda c, r: 1 - torch.sigmoid(0.1 * c.gain) + torch.sigmoid(0.1 * r.gain),
    "simpo": lambda c, r: -F.logsigmoid(2.0 * (c.mean - r.mean) - 1.0),
    "orpo": lambda c, r: -c.mean - 0.1 * F.logsigmoid(log_odds(c.mean) - log_odds(r.mean)),
}


def rounded(values):
    """Rounds to f32 and back, which `Float64Everywhere` would remove."""
    return torch.from_numpy(values.numpy().astype("float32").astype("float64"))


def log_odds(m):
    return m - torch.log1p(-torch.exp(m))


def model_of(weights):
    config = LlamaConfig(**json.loads((HERE / "llama.json").read_text()), attn_implementation="eager")
    model = LlamaForCausalLM(config)
    model.load_state_dict(weights)
    return model.double().eval()


def logps(model, examples, prompts):
    """For every example the sum of its answer's log-probabilities, in f64."""
    sums = []
    for tokens, prompt in zip(examples, prompts):
        ids = torch.tensor([tokens])
        logits = model(input_ids=ids).logits[0, :-1]
        each = F.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0]
        sums.append(each[prompt - 1:].sum())
    return torch.stack(sums)


def answers(a, a0, examples, prompts):
    n = torch.tensor([len(tokens) - prompt for tokens, prompt in zip(examples, prompts)], dtype=torch.float64)
    of = lambda at: SimpleNamespace(a=a[at], gain=(a - a0)[at], n=n[at], mean=(a / n)[at])
    return of(slice(0, None, 2)), of(slice(1, None, 2))


def check_against_trl(c, r, n_c, n_r):
    """Compares with TRL's own functions on the same sums."""
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer
    here = SimpleNamespace(accelerator=SimpleNamespace(device="cpu"), alpha=0.0, label_smoothing=0.0)
    simpo = SimpleNamespace(**vars(here), beta=2.0, simpo_gamma=1.0, loss_type="simpo")
    got = CPOTrainer.cpo_loss(simpo, c.mean, r.mean)[0]
    assert torch.allclose(got, LOSSES["simpo"](c, r), atol=1e-9), (got, LOSSES["simpo"](c, r))
    orpo = SimpleNamespace(**vars(here), beta=0.1)
    got = -c.mean - ORPOTrainer.odds_ratio_loss(orpo, c.mean, r.mean)[0]
    assert torch.allclose(got, LOSSES["orpo"](c, r), atol=1e-6), (got, LOSSES["orpo"](c, r))


def trl_trainer(weights, loss_type, folder, examples=None, **more):
    """TRL's DPOTrainer over pairs of words, in f32 on the CPU."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import DPOConfig, DPOTrainer

    vocab = {f"w{i}": i for i in range(61)}
    words = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w2", pad_token="w3")
    generator = torch.Generator().manual_seed(11)
    text = lambda n: " ".join(f"w{i}" for i in torch.randint(4, 61, (n,), generator=generator).tolist())
    rows = [{"prompt": text(p), "chosen": " " + text(c), "rejected": " " + text(r)} for p, c, r in PAIRS]
    config = LlamaConfig(**json.loads((HERE / "llama.json").read_text()), attn_implementation="eager")
    model, reference = LlamaForCausalLM(config), LlamaForCausalLM(config)
    model.load_state_dict(weights)
    reference.load_state_dict(more.pop("reference_weights", weights))
    losses = []

    class Recording(DPOTrainer):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            losses.append(loss.detach().item())
            return loss

    arguments = DPOConfig(
        output_dir=folder, per_device_train_batch_size=len(PAIRS), max_steps=STEPS, learning_rate=RATE,
        lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.0, max_grad_norm=0.0, adam_beta1=0.9, adam_beta2=0.999,
        adam_epsilon=1e-8, optim="adamw_torch", loss_type=[loss_type], bf16=False, use_cpu=True, report_to=[],
        save_strategy="no", logging_strategy="no", gradient_checkpointing=False, disable_dropout=True, seed=1, **{"beta": 0.1} | more,
    )
    trainer = Recording(
        model=model, ref_model=reference, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
    )
    return trainer, losses


def ten_steps(weights):
    with tempfile.TemporaryDirectory() as folder:
        trainer, losses = trl_trainer(weights, "sigmoid", folder)
        rows = list(trainer.train_dataset)
        trainer.train()
    examples = [row["prompt_ids"] + row[key] for row in rows for key in ("chosen_ids", "rejected_ids")]
    prompts = [len(row["prompt_ids"]) for row in rows for _ in range(2)]
    print("ten steps of TRL's DPOTrainer:", [round(loss, 6) for loss in losses])
    assert len(losses) == STEPS and abs(losses[0] - math.log(2)) < 1e-6, losses
    return examples, prompts, losses


def check_steps_losses(weights, noisy, examples, prompts):
    """Compares the first loss of TRL's trainer, for each of its losses, with the formulas on the pairs it tokenised."""
    model, reference = model_of(weights), model_of(noisy)
    with Float64Everywhere(), torch.no_grad():
        c, r = answers(logps(model, examples, prompts), logps(reference, examples, prompts), examples, prompts)
    for theirs, ours, more in [
        ("sigmoid", "dpo", {}), ("ipo", "ipo", {}), ("hinge", "hinge", {}), ("apo_zero", "apo_zero", {}),
        ("robust", "robust", {"beta": 0.3, "label_smoothing": 0.2}),
    ]:
        with tempfile.TemporaryDirectory() as folder:
            trainer, losses = trl_trainer(weights, theirs, folder, reference_weights=noisy, **more)
            trainer.args.max_steps = 1
            trainer.train()
        want = LOSSES[ours](c, r).mean().item()
        print(f"{ours}: {want:.7f}, TRL {losses[0]:.7f}")
        assert abs(losses[0] - want) < 2e-5 * max(1.0, abs(want)), (theirs, losses[0], want)


def made():
    weights = {name[7:]: value for name, value in load_file(HERE / "llama.safetensors").items() if name.startswith("weight.")}
    generator = torch.Generator().manual_seed(7)
    noisy = {name: value + 0.05 * torch.empty(value.shape).normal_(generator=generator) for name, value in weights.items()}
    examples, prompts = [], []
    for prompt, chosen, rejected in PAIRS:
        asked = torch.randint(3, 61, (prompt,), generator=generator).tolist()
        for length in (chosen, rejected):
            examples.append(asked + torch.randint(3, 61, (length,), generator=generator).tolist())
            prompts.append(prompt)
    with Float64Everywhere():
        model, reference = model_of(weights), model_of(noisy)
        with torch.no_grad():
            a0 = rounded(logps(reference, examples, prompts))
            mismatched = [examples[i][:prompts[i]] + examples[i - 1][prompts[i - 1]:] for i in range(len(examples))]
            z0 = rounded(logps(reference, mismatched, prompts))
            z = (logps(model, mismatched, prompts) - z0).mean().clamp(min=0)
        out = {}

        def keep(name, loss, all_of_them):
            model.zero_grad()
            loss.backward(retain_graph=True)
            out[f"{name}.loss"] = loss.detach().reshape(1)
            for path, parameter in model.named_parameters():
                if all_of_them or path in SOME:
                    out[f"{name}.grad.{path}"] = parameter.grad.clone()
            print(f"{name}: {loss.item():.7f}")

        a = logps(model, examples, prompts)
        c, r = answers(a, a0, examples, prompts)
        for name, loss in LOSSES.items():
            keep(name, loss(c, r).sum(), name == "dpo")
        sign = torch.tensor([1.0, -1.0] * len(PAIRS), dtype=torch.float64)
        keep("kto", (1 - torch.sigmoid(0.1 * (a - a0 - z) * sign)).sum(), False)
        with torch.no_grad():
            check_against_trl(*answers(a, a0, examples, prompts), None, None)
        # A finite difference of one loss in one direction.
        direction = {path: torch.randn(p.shape, generator=generator, dtype=torch.float64) for path, p in model.named_parameters()}
        slope = sum((out[f"dpo.grad.{path}"] * step).sum() for path, step in direction.items())
        values = []
        for side in (1e-5, -1e-5):
            with torch.no_grad():
                moved = model_of(weights)
                for path, p in moved.named_parameters():
                    p += side * direction[path]
                values.append(LOSSES["dpo"](*answers(logps(moved, examples, prompts), a0, examples, prompts)).sum())
        numeric = (values[0] - values[1]) / 2e-5
        assert abs(numeric / slope - 1) < 1e-5, (numeric, slope)
    flat = lambda rows: torch.tensor([token for row in rows for token in row], dtype=torch.int32)
    counts = lambda rows: torch.tensor([len(row) for row in rows], dtype=torch.int32)
    out |= {
        "tokens": flat(examples), "lengths": counts(examples), "prompts": torch.tensor(prompts, dtype=torch.int32),
        "reference": a0, "logp": a.detach(), "kto.mismatched": z0, "kto.baseline": z.reshape(1),
    }
    examples, prompts, losses = ten_steps(weights)
    check_steps_losses(weights, noisy, examples, prompts)
    out |= {
        "steps.tokens": flat(examples), "steps.lengths": counts(examples),
        "steps.prompts": torch.tensor(prompts, dtype=torch.int32), "steps.loss": torch.tensor(losses),
    }
    return {name: (value.float() if value.is_floating_point() else value).contiguous() for name, value in out.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the file instead of writing it")
    path = HERE / "preference.safetensors"
    check = parser.parse_args().check
    tensors = made()
    if not check:
        save_file(tensors, path)
        return
    kept = load_file(path)
    assert kept.keys() == tensors.keys()
    for name, value in tensors.items():
        assert torch.allclose(kept[name].double(), value.double(), rtol=1e-5, atol=1e-7), name
    print("the file is what this script makes")


if __name__ == "__main__":
    main()
