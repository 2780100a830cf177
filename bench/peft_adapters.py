"""Compares the logits of exported adapters in PEFT with flatout's, for small trained models.

    pip install torch transformers peft safetensors
    python bench/peft_adapters.py target/release/flatout

For every case: an exported base of a few steps; adapters trained over it; `flatout export --adapter`, loaded by PeftModel over the
base; and `flatout export`, loaded by transformers directly. Both are compared with `flatout logits` on the run. Then an adapter that
PEFT saved is loaded, trained further and exported, and so are embeddings extended for new tokens. Exits with 1 if a logit differs by
more than 1e-5 of the largest.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from program import Program

SMALL = ["train.steps=20", "train.batch=4", "model.context=32", "schedule.warmup_steps=2", "eval.rows=0", "backend=cpu"]
SHAPE = ["model.width=48", "model.layers=2", "model.ffn=80", "model.heads=4", "model.kv_heads=2"]
CASES = {
    "lora, every linear": ["adapter.kind=lora", "adapter.rank=4", "adapter.alpha=8", "adapter.dropout=0.1"],
    "lora, ranks": ["adapter.kind=lora", "adapter.rank=3", "adapter.paths=['**.wq','**.wv']",
                    "adapter.groups=[{paths=['layers.1.attn.wv'],rank=2,alpha=7.5}]"],
    "dora, attention": ["adapter.kind=dora", "adapter.rank=4", "adapter.paths=layers.*.attn"],
    "dora, norm trained too": ["adapter.kind=dora", "adapter.paths=['**.up','layers.1']", "adapter.also_train=norm"],
    "lora, both ends": ["adapter.kind=lora", "adapter.rank=4", "adapter.paths=['layers','embed','head']"],
}
# A tied embedding with adapters has no merged form.
ENDS = "lora, both ends"
BOUND = 1e-5


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("flatout", type=Path, help="the binary")
    binary = parser.parse_args().flatout.resolve()
    torch.set_num_threads(2)
    worst = 0.0
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        flatout = Program(binary, scratch)

        def base():
            return AutoModelForCausalLM.from_pretrained(scratch / "base", dtype=torch.float32, attn_implementation="eager")

        def grown_base(rows):
            model = base()
            model.resize_token_embeddings(rows)
            return model

        def compare(name, model, ids, ours):
            nonlocal worst
            with torch.no_grad():
                theirs = model.eval()(ids).logits
            off = ((ours - theirs).abs().max() / theirs.abs().max()).item()
            worst = max(worst, off)
            print(f"{name:40} off by {off:.1e}")

        flatout("train", "tiny", *SHAPE, *SMALL, "--run", "first")
        flatout("export", "first", "--to", "base")
        ids = torch.randint(0, 220, (3, 29), generator=torch.Generator().manual_seed(1))
        for number, (name, words) in enumerate(CASES.items()):
            run, apart, merged = f"run{number}", f"apart{number}", f"merged{number}"
            flatout("train", "tiny", "model.from=base", *words, *SMALL, "lr=1e-2", "--run", run)
            flatout("export", run, "--to", apart, "--adapter")
            ours = flatout.logits(run, ids)
            compare(f"{name}, adapter", PeftModel.from_pretrained(base(), scratch / apart), ids, ours)
            if name == ENDS:
                continue
            flatout("export", run, "--to", merged)
            whole = AutoModelForCausalLM.from_pretrained(scratch / merged, dtype=torch.float32, attn_implementation="eager")
            compare(f"{name}, merged", whole, ids, ours)

        torch.manual_seed(0)
        for kind, words in {
            "lora": dict(target_modules="all-linear"),
            "dora": dict(target_modules="all-linear", use_dora=True),
            "ends": dict(target_modules=["q_proj", "embed_tokens", "lm_head"]),
        }.items():
            model = get_peft_model(base(), LoraConfig(r=4, lora_alpha=8, **words))
            for path, p in model.named_parameters():
                if "lora_B" in path or "lora_embedding_A" in path:
                    torch.nn.init.normal_(p, std=0.05)
            model.save_pretrained(scratch / f"theirs-{kind}")
            still = ["train.steps=1", "lr=1e-30", "weight_decay=0", "schedule.warmup_steps=0"]
            begin = ["model.from=base", f"adapter.from=theirs-{kind}", *SMALL]
            flatout("train", "tiny", *begin, *still, "--run", f"in-{kind}")
            compare(f"from PEFT, {kind}", model, ids, flatout.logits(f"in-{kind}", ids))
            flatout("train", "tiny", *begin, "--run", f"on-{kind}")
            flatout("export", f"on-{kind}", "--to", f"back-{kind}", "--adapter")
            back = PeftModel.from_pretrained(base(), scratch / f"back-{kind}")
            compare(f"trained on and back, {kind}", back, ids, flatout.logits(f"on-{kind}", ids))

        # Two new tokens: PEFT's base is extended first, and the adapter's embeddings replace its tables.
        (scratch / "tools.txt").write_text("".join(f"a {n} <tool>b</tool> c\n" for n in range(400)))
        for tied in [True, False]:
            begin = [*SHAPE, *SMALL, f"model.tied={str(tied).lower()}", "model.vocab=300", "data.path=tools.txt"]
            flatout("train", "tiny", *begin, "--run", f"plain-{tied}")
            flatout("export", f"plain-{tied}", "--to", "base", "--force")
            also = "adapter.also_train=embed" if tied else "adapter.also_train=['embed','head']"
            words = ["model.from=base", "data.path=tools.txt", "data.new_tokens=['<tool>','</tool>']", *SMALL, "lr=1e-2"]
            flatout("train", "tiny", *words, "adapter.kind=lora", "adapter.rank=4", also, "--run", f"tools-{tied}")
            flatout("export", f"tools-{tied}", "--to", f"tools-apart-{tied}", "--adapter")
            flatout("export", f"tools-{tied}", "--to", f"tools-merged-{tied}")
            rows = torch.randint(0, 302, (3, 29), generator=torch.Generator().manual_seed(1))
            ours = flatout.logits(f"tools-{tied}", rows)
            back = PeftModel.from_pretrained(grown_base(302), scratch / f"tools-apart-{tied}")
            compare(f"new tokens, tied {tied}, adapter", back, rows, ours)
            whole = AutoModelForCausalLM.from_pretrained(
                scratch / f"tools-merged-{tied}", dtype=torch.float32, attn_implementation="eager",
            )
            compare(f"new tokens, tied {tied}, merged", whole, rows, ours)
            for folder in [f"tools-apart-{tied}", f"tools-merged-{tied}"]:
                tokens = AutoTokenizer.from_pretrained(scratch / folder)("a <tool>b</tool>").input_ids
                assert 300 in tokens and tokens[-1] == 301, (folder, tokens)
            model = get_peft_model(grown_base(302), LoraConfig(
                r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"][:1 if tied else 2], ensure_weight_tying=tied,
            ))
            for path, p in model.named_parameters():
                if "lora_B" in path or "modules_to_save" in path:
                    torch.nn.init.normal_(p, std=0.05)
            model.save_pretrained(scratch / f"tools-theirs-{tied}")
            still = ["train.steps=1", "lr=1e-30", "weight_decay=0", "schedule.warmup_steps=0"]
            words = [*words, f"adapter.from=tools-theirs-{tied}", also, *still]
            flatout("train", "tiny", *words, "--run", f"tools-in-{tied}")
            compare(f"new tokens, tied {tied}, from PEFT", model, rows, flatout.logits(f"tools-in-{tied}", rows))

        # Phi-3 keeps q, k and v in one tensor, and gate and up in another.
        flatout("train", "tiny", *SHAPE, "model.qk_norm=false", "model.rope_size=6", *SMALL, "--run", "joint")
        flatout("export", "joint", "--to", "base", "--force")
        for number, words in enumerate([
            ["adapter.kind=lora", "adapter.rank=4", "adapter.alpha=8"],
            ["adapter.kind=lora", "adapter.rank=3", "adapter.paths=['**.wq','**.wv']",
             "adapter.groups=[{paths=['layers.1.attn.wv'],rank=2,alpha=7.5}]"],
            ["adapter.kind=dora", "adapter.rank=4", "adapter.paths=layers.*.attn"],
        ]):
            run, apart = f"phi{number}", f"phi-apart{number}"
            flatout("train", "tiny", "model.from=base", *words, *SMALL, "lr=1e-2", "--run", run)
            flatout("export", run, "--to", apart, "--adapter")
            model = PeftModel.from_pretrained(base(), scratch / apart)
            compare(f"phi3, {words[0]}, adapter", model, ids, flatout.logits(run, ids))
        for dora in [False, True]:
            model = get_peft_model(base(), LoraConfig(
                r=4, lora_alpha=8, target_modules="all-linear", use_dora=dora, alpha_pattern={r"layers\.\d+\.mlp\..*": 3},
            ))
            for path, p in model.named_parameters():
                if "lora_B" in path:
                    torch.nn.init.normal_(p, std=0.05)
            model.save_pretrained(scratch / f"phi-theirs{dora}")
            still = ["train.steps=1", "lr=1e-30", "weight_decay=0", "schedule.warmup_steps=0"]
            words = ["model.from=base", f"adapter.from=phi-theirs{dora}", *SMALL, *still]
            flatout("train", "tiny", *words, "--run", f"phi-in{dora}")
            compare(f"phi3 from PEFT, dora {dora}", model, ids, flatout.logits(f"phi-in{dora}", ids))
    print(f"worst {worst:.1e}, bound {BOUND:.0e}")
    sys.exit(worst > BOUND)


if __name__ == "__main__":
    main()
