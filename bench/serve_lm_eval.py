"""Compares lm-eval's scores of models behind `flatout serve` with those in transformers, for small trained models on the same files.

    pip install torch transformers "lm_eval[api]"
    python bench/serve_lm_eval.py target/release/flatout

Two tasks of local JSONL files, multiple choice and perplexity, are evaluated on an exported folder by the harness's `hf` model, and on
`flatout serve` with the same folder by its `local-completions`, which sends token ids with `echo` and `logprobs`. Accuracies must be
equal and log-likelihoods within 1e-3, otherwise it exits with 1; if a package is missing it says so and exits with 0.
"""

import argparse
import json
import logging
import random
import sys
import tempfile
from pathlib import Path

try:
    import lm_eval
    import tenacity  # noqa: F401  local-completions needs it
    import torch
    from lm_eval.models.huggingface import HFLM
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(0)

from choices_harness import sentences
from program import Program
from serving import Claims, Server, train

# No text is longer: the harness splits longer ones into windows, whose sizes differ between its models.
CONTEXT = 512
SHAPES = {"llama": [], "gpt2": ["model.kv_heads=4", "model.qk_norm=false", "model.bias=all", "model.norm=layer", "model.norm_bias=true",
                                "model.activation=gelu_tanh", "model.positions=learned"]}


def tasks(scratch, count, seed):
    draw, known = random.Random(seed), sentences()
    choices, texts = scratch / "choices.jsonl", scratch / "texts.jsonl"
    rows = []
    for _ in range(count):
        chosen = draw.sample(known, 4)
        words = chosen[0].split()
        cut = len(words) // 2
        endings = [" ".join(words[cut:])] + [" ".join(other.split()[len(other.split()) // 2:]) for other in chosen[1:]]
        answer = draw.randrange(4)
        endings[0], endings[answer] = endings[answer], endings[0]
        rows.append({"question": " ".join(words[:cut]), "choices": endings, "answer": answer})
    choices.write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts.write_text("".join(json.dumps({"text": " ".join(draw.sample(known, 3))}) + "\n" for _ in range(count // 4)))
    common = {"dataset_path": "json", "test_split": "test", "num_fewshot": 0}
    return [
        {"task": "local_choices", **common, "dataset_kwargs": {"data_files": {"test": str(choices)}}, "output_type": "multiple_choice",
         "doc_to_text": "{{question}}", "doc_to_choice": "choices", "doc_to_target": "answer",
         "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]},
        {"task": "local_perplexity", **common, "dataset_kwargs": {"data_files": {"test": str(texts)}},
         "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "text",
         "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}]},
    ]


def scores(model, made, **words):
    """Metrics by task, and every log-likelihood."""
    found = lm_eval.simple_evaluate(model=model, tasks=made, bootstrap_iters=0, log_samples=True, **words)
    metrics = {f"{task} {name.split(',')[0]}": value for task, row in found["results"].items() for name, value in row.items()
               if isinstance(value, float) and "stderr" not in name}
    each = []
    for task in sorted(found["samples"]):
        for sample in sorted(found["samples"][task], key=lambda sample: sample["doc_id"]):
            for answer in sample["filtered_resps"]:
                each.append(answer if not isinstance(answer, (list, tuple)) else tuple(answer))
    return metrics, each


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("flatout", type=Path, help="the binary")
    parser.add_argument("--questions", type=int, default=80)
    parser.add_argument("--seed", type=int, default=7)
    given = parser.parse_args()
    binary = given.flatout.resolve()
    logging.getLogger().setLevel(logging.ERROR)
    torch.set_num_threads(2)
    print(f"lm_eval {lm_eval.__version__}")
    claims = Claims()
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        flatout = Program(binary, scratch)
        text = scratch / "text.jsonl"
        text.write_text("".join(json.dumps({"text": " ".join(sentences()[at:at + 8])}) + "\n" for at in range(0, len(sentences()), 8)))
        made = tasks(scratch, given.questions, given.seed)
        for shape, words in SHAPES.items():
            folder = scratch / f"folder-{shape}"
            run = train(binary, scratch / f"run-{shape}", f"data.path={text}", "model.vocab=512", f"model.context={CONTEXT}", "train.steps=150", *words)
            flatout("export", str(run), "--to", str(folder))
            theirs, their_each = scores(HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=8, max_length=CONTEXT,
                                              add_bos_token=False), made)
            with Server(binary, folder, "--tokens", str(CONTEXT), "--at-once", "8") as server:
                words = dict(base_url=f"{server.base_url}/completions", model=server.model, tokenizer=str(folder), max_length=CONTEXT,
                             add_bos_token=False, num_concurrent=4, batch_size=4, tokenized_requests=True, tokenizer_backend="huggingface")
                ours, our_each = scores("local-completions", made, model_args=words)
            for name, value in sorted(theirs.items()):
                is_share = name.split()[1].startswith("acc")
                same = abs(ours[name] - value) < (1e-9 if is_share else 1e-4 * value)
                claims(f"{shape} {name}", same, f"{ours[name]:.6f}, in transformers {value:.6f}")
            pairs = [(ours if isinstance(ours, tuple) else (ours, None), theirs if isinstance(theirs, tuple) else (theirs, None))
                     for ours, theirs in zip(our_each, their_each, strict=True)]
            worst = max(abs(float(a[0]) - float(b[0])) for a, b in pairs)
            claims(f"{shape} log-likelihoods, each", worst < 1e-3, f"{len(pairs)} apart by {worst:.1e} at most")
            claims(f"{shape} is it the likeliest text, each", all(a[1] == b[1] for a, b in pairs))
    return claims.end()


if __name__ == "__main__":
    sys.exit(main())
