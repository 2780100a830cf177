"""Compares the accuracies of `flatout eval --choices` with those of the lm-evaluation-harness, for small models on the same files.

    pip install torch transformers lm_eval
    python bench/choices_harness.py target/release/flatout

Questions in the formats of HellaSwag, ARC, MMLU and PIQA are made from this project's documents. `flatout eval --choices` evaluates a
run, its export and a tiny GPT-2; the harness evaluates the folders with its own task definitions, of which only the files are replaced.
Exits with 1 if an accuracy differs.
"""

import argparse
import json
import random
import re
import sys
import tempfile
from pathlib import Path

import lm_eval
import torch
import yaml
from lm_eval.models.huggingface import HFLM

from program import Program

DOCUMENTS = Path(__file__).resolve().parent.parent / "docs"
# The definition file of each task in the harness, and the split that it evaluates.
TASKS = {
    "hellaswag": ("hellaswag/hellaswag.yaml", "validation"),
    "arc": ("arc/arc_easy.yaml", "test"),
    "mmlu": ("mmlu/default/_default_template_yaml", "test"),
    "piqa": ("piqa/piqa.yaml", "validation"),
}
SHAPES = {
    "llama": ["model.width=64", "model.layers=2", "model.ffn=96", "model.heads=4", "model.kv_heads=2", "model.qk_norm=false"],
    "gpt2": ["model.width=64", "model.layers=2", "model.ffn=96", "model.heads=4", "model.kv_heads=4", "model.qk_norm=false",
             "model.bias=all", "model.norm=layer", "model.norm_bias=true", "model.activation=gelu_tanh", "model.positions=learned"],
}


def sentences():
    text = " ".join(path.read_text() for path in sorted(DOCUMENTS.glob("*/*.md")))
    return [found for found in re.findall(r"[A-Z][^.|`#\n]{30,160}\.", text)]


def questions(count, seed):
    """Rows of every format, some with unusual spaces, punctuation and letters."""
    draw, known = random.Random(seed), sentences()
    rows = {name: [] for name in TASKS}
    for number in range(count):
        chosen = draw.sample(known, 4)
        words = chosen[0].split()
        cut = max(2, len(words) // 2)
        begin, end = " ".join(words[:cut]), " ".join(words[cut:])
        endings = [end] + [" ".join(other.split()[len(other.split()) // 2:]) for other in chosen[1:]]
        answer = draw.randrange(4)
        endings[0], endings[answer] = endings[answer], endings[0]
        marked = ["[header] " + begin, begin + " [title] Then", begin + "  [substeps] é", begin][number % 4]
        rows["hellaswag"].append({"activity_label": "Reading docs", "ctx_a": marked, "ctx_b": ["", "he Goes", "ß then"][number % 3],
                                  "ctx": marked, "endings": endings, "label": str(answer)})
        labels = ["1", "2", "3", "4"] if number % 5 == 0 else ["A", "B", "C", "D"]
        rows["arc"].append({"question": begin + ("? " if number % 7 == 0 else "?"), "choices": {"text": endings, "label": labels},
                            "answerKey": labels[answer]})
        rows["mmlu"].append({"question": " " + begin, "subject": "abstract_algebra", "choices": endings, "answer": answer})
        rows["piqa"].append({"goal": begin, "sol1": endings[answer], "sol2": endings[(answer + 1) % 4] + " ö", "label": 0})
    return rows


def task(name, file, subject):
    """The harness's own task definition, for a local file."""
    path, split = TASKS[name]
    path = Path(lm_eval.__file__).parent / "tasks" / path
    folder = path.parent

    class Loader(yaml.SafeLoader):
        pass

    def function(_, node):
        module, _, called = node.value.partition(".")
        space = {}
        exec((folder / f"{module}.py").read_text(), space)
        return space[called]

    Loader.add_constructor("!function", function)
    made = yaml.load(path.read_text(), Loader)
    for key in ["tag", "dataset_name", "training_split", "validation_split", "test_split", "fewshot_split", "fewshot_config"]:
        made.pop(key, None)
    made.update(task=f"local_{name}", dataset_path="json", dataset_kwargs={"data_files": {split: str(file)}}, test_split=split)
    if name == "mmlu":
        output = (folder / f"mmlu_{subject}.yaml").read_text()
        made["description"] = yaml.load(output, Loader)["description"]
    return made


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("flatout", type=Path, help="the binary")
    parser.add_argument("--questions", type=int, default=120)
    parser.add_argument("--seed", type=int, default=7)
    given = parser.parse_args()
    torch.set_num_threads(2)
    failed = []
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        flatout = Program(given.flatout.resolve(), scratch)
        text = scratch / "text.jsonl"
        text.write_text("".join(json.dumps({"text": " ".join(sentences()[at:at + 8])}) + "\n" for at in range(0, len(sentences()), 8)))
        files = {}
        for name, rows in questions(given.questions, given.seed).items():
            files[name] = scratch / f"{name}.jsonl"
            files[name].write_text("".join(json.dumps(row) + "\n" for row in rows))
        for shape, words in SHAPES.items():
            run, folder = scratch / f"run-{shape}", scratch / f"folder-{shape}"
            flatout("train", "tiny", f"data.path={text}", "model.vocab=512", "model.context=256", "train.steps=150", "train.batch=8",
                         "schedule.warmup_steps=10", "eval.rows=0", "backend=cpu", "precision=fp32", *words, "--run", str(run), "-q")
            flatout("export", str(run), "--to", str(folder))
            harness = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=8)
            for name, file in files.items():
                theirs = lm_eval.simple_evaluate(model=harness, tasks=[task(name, file, "abstract_algebra")], num_fewshot=0,
                                                 bootstrap_iters=0)["results"][f"local_{name}"]
                for model in [run, folder]:
                    output = flatout("eval", str(model), "--choices", str(file), "backend=cpu", "precision=fp32", "--json")
                    ours = json.loads(output)["choices"][0]
                    for metric in ["acc", "acc_norm"]:
                        if f"{metric},none" not in theirs:
                            continue
                        same = abs(ours[metric] - theirs[f"{metric},none"]) < 1e-9
                        failed += [] if same else [(shape, name, metric)]
                        print(f"{'PASS' if same else 'FAIL'}  {shape:6} {model.name:14} {name:10} {metric:9} {ours[metric]:.4f} "
                              f"and the harness {theirs[f'{metric},none']:.4f}", flush=True)
    print("all equal" if not failed else f"{len(failed)} differ")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
