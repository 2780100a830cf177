"""Compares the probabilities of exported classifiers in `transformers`, PEFT and timm with flatout's, for small trained models.

    pip install torch transformers peft timm tokenizers safetensors pillow
    python bench/export_classes.py target/release/flatout

Texts: for every family of encoders, a random checkpoint of the library, with a classification head or a masked-language-model head,
is fine-tuned on pairs of texts and exported. The library tokenises the pairs itself, with token types, and its probabilities are
compared with those of `flatout eval --predict` on the run and on the folder; for a run with LoRA also those of PEFT's model over the base.
Images: likewise for every vision tower, on images of the model's own size, so that none is scaled.
Exits with 1 if a probability differs by more than 1e-5.
"""

import argparse
import csv
import json
import sys
import tempfile
from pathlib import Path

import timm
import torch
import transformers as hf
from peft import PeftModel
from PIL import Image
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from program import Program

BOUND = 1e-5
WORDS = "a the fox dog cat owl sees hears likes eats red blue small old one two and not ##s ##ed".split()
STEPS = ["train.epochs=2", "train.batch=8", "lr=3e-3", "backend=cpu", "precision=fp32"]
SIZES = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40, max_position_embeddings=34)
DISTIL = dict(dim=24, n_layers=2, n_heads=3, hidden_dim=40, max_position_embeddings=34)
# The library's names without the class, the fields, the sizes, and its template for pairs.
ENCODERS = {
    "Bert": (SIZES, "bert"),
    "Roberta": (SIZES | dict(type_vocab_size=1, pad_token_id=1, bos_token_id=0, eos_token_id=2), "roberta"),
    "XLMRoberta": (SIZES | dict(type_vocab_size=1, pad_token_id=1, bos_token_id=0, eos_token_id=2), "roberta"),
    "DistilBert": (DISTIL, "bert"),
    "ModernBert": (SIZES | dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2), "bert"),
}


def tokenizer(frame):
    """A tokeniser of words and their endings, with the special tokens of each family."""
    special = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"] if frame == "bert" else ["[CLS]", "[PAD]", "[SEP]", "[UNK]"]
    vocab = {word: number for number, word in enumerate(special + WORDS)}
    library = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    library.normalizer, library.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    ends = [("[SEP]", vocab["[SEP]"]), ("[CLS]", vocab["[CLS]"])]
    library.post_processor = processors.BertProcessing(*ends) if frame == "bert" else processors.RobertaProcessing(*ends)
    names = dict(pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", unk_token="[UNK]", bos_token="[CLS]", eos_token="[SEP]")
    return hf.PreTrainedTokenizerFast(tokenizer_object=library, model_max_length=32, **names), len(vocab)


def pairs(count):
    """Pairs of texts of different lengths, labelled by whether both are about the same animal."""
    generator = torch.Generator().manual_seed(7)
    draw = lambda many: [WORDS[i] for i in torch.randint(0, 18, (many,), generator=generator)]
    rows = []
    for number in range(count):
        first, second = draw(2 + number % 7), draw(1 + number % 5)
        rows.append([" ".join(first), " ".join(second), ["same", "other", "unknown"][number % 3]])
    return rows


def predicted(flatout, model, file, out):
    """The probabilities that `eval --predict` writes, a row per sample in the order of the file."""
    flatout("eval", model, "--predict", file, "--out", out, "backend=cpu", "precision=fp32")
    rows = [json.loads(line) for line in (flatout.folder / out).read_text().splitlines()]
    return rows


def texts(flatout, compare):
    folder, rows = flatout.folder, pairs(48)
    with open(folder / "pairs.csv", "w", newline="") as file:
        csv.writer(file).writerows([["text_a", "text_b", "label"], *rows])
    for name, (sizes, frame) in ENCODERS.items():
        for number, head in enumerate(["ForSequenceClassification", "ForMaskedLM"]):
            torch.manual_seed(number)
            reader, vocab = tokenizer(frame)
            labels = {0: "other", 1: "same", 2: "unknown"}
            config = getattr(hf, f"{name}Config")(vocab_size=vocab, id2label=labels, initializer_range=0.3, **sizes)
            base, run, out = (f"{name}{head}-{what}" for what in ["base", "run", "out"])
            getattr(hf, f"{name}{head}")(config).save_pretrained(folder / base)
            reader.save_pretrained(folder / base)
            words = ["data.text_a=text_a", "data.text_b=text_b", "data.label=label", "data.path=pairs.csv"]
            train = ["train", "text-classify", f"model.from={base}", *words, *STEPS]
            flatout(*train, "--run", run)
            flatout("export", run, "--to", out)

            def theirs(model):
                inputs = hf.AutoTokenizer.from_pretrained(folder / out)(
                    [r[0] for r in rows], [r[1] for r in rows], return_token_type_ids=True
                )
                known = ["input_ids", "token_type_ids"] if frame == "bert" and name == "Bert" else ["input_ids"]
                computed = []
                with torch.no_grad():
                    for i in range(len(rows)):
                        one = {key: torch.tensor([inputs[key][i]]) for key in known}
                        computed.append(model.eval()(**one).logits.softmax(-1)[0])
                return torch.stack(computed)

            load = lambda path: hf.AutoModelForSequenceClassification.from_pretrained(
                path, num_labels=3, dtype=torch.float32, attn_implementation="eager"
            )
            for model in [run, out]:
                compare(f"{model}", predicted(flatout, model, "pairs.csv", "predicted.jsonl"), theirs(load(folder / out)))
            if head == "ForMaskedLM":
                continue
            flatout(*train, "adapter.kind=lora", "adapter.rank=3", "--run", f"{name}-lora")
            flatout("export", f"{name}-lora", "--to", f"{name}-adapter", "--adapter")
            adapted = PeftModel.from_pretrained(load(folder / base), folder / f"{name}-adapter")
            compare(f"{name}, LoRA by PEFT", predicted(flatout, f"{name}-lora", "pairs.csv", "predicted.jsonl"), theirs(adapted))


SIDE, PATCH = 24, 6
VISION = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40, image_size=SIDE, patch_size=PATCH)
TEXT = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=9, bos_token_id=1, eos_token_id=2)
# The library's names with the class that is loaded; a tower is part of a model that also reads text.
TOWERS = {
    "ViTForImageClassification": VISION,
    "ViTModel": VISION,
    "DeiTForImageClassification": VISION,
    "DeiTForImageClassificationWithTeacher": VISION,
    "CLIPForImageClassification": dict(vision_config=VISION, text_config=TEXT),
    "CLIPModel": dict(vision_config=VISION, text_config=TEXT),
    "CLIPVisionModel": VISION,
    "SiglipForImageClassification": dict(vision_config=VISION, text_config=TEXT),
    "SiglipModel": dict(vision_config=VISION, text_config=TEXT),
    "SiglipVisionModel": VISION,
}
# timm's names, each made smaller.
TIMM = [
    "vit_tiny_patch16_224", "vit_small_patch14_reg4_dinov2", "vit_medium_patch16_reg4_gap_256", "vit_base_patch32_clip_quickgelu_224",
    "vit_base_patch16_siglip_gap_224",
]


def images(flatout, compare):
    folder = flatout.folder
    generator = torch.Generator().manual_seed(3)
    for number in range(24):
        place = folder / "images" / ["cat", "dog", "owl"][number % 3]
        place.mkdir(parents=True, exist_ok=True)
        pixels = torch.randint(0, 256, (SIDE, SIDE, 3), generator=generator, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(place / f"{number}.png")

    def judged(name, base, probabilities):
        """Trains from a folder, and compares the run and its export with what `probabilities` returns for an image and a folder."""
        run, out = f"{name}-run", f"{name}-out"
        words = [f"model.image_size={SIDE}", "data.path=images", "data.held_out=0.2", "train.steps=6", "train.batch=6"]
        words += ["schedule.warmup_steps=1", "lr=1e-3", "train.mixup=0", "backend=cpu", "precision=fp32"]
        # The recipe has another value, which matters for a plain ViT.
        words += ["model.pooling=cls"] if name == "ViTModel" else []
        flatout("train", "vision-tiny", f"model.from={base}", *words, "--run", run)
        flatout("export", run, "--to", out)
        theirs = probabilities(folder / out)
        for model in [run, out]:
            ours = predicted(flatout, model, "images", "predicted.jsonl")
            compare(model, ours, torch.stack([theirs(Image.open(folder / row["row"])) for row in ours]))

    def by_transformers(out):
        processor = hf.AutoImageProcessor.from_pretrained(out)
        model = hf.AutoModelForImageClassification.from_pretrained(out, dtype=torch.float32, attn_implementation="eager").eval()

        def theirs(image):
            with torch.no_grad():
                return model(**processor(image, return_tensors="pt")).logits.softmax(-1)[0]

        return theirs

    def by_timm(out):
        model = timm.create_model(f"local-dir:{out}", pretrained=True).eval()
        transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)

        def theirs(image):
            with torch.no_grad():
                return model(transform(image)[None]).softmax(-1)[0]

        return theirs

    for number, (name, sizes) in enumerate(TOWERS.items()):
        torch.manual_seed(number)
        kind = getattr(hf, name)
        labels = {0: "cat", 1: "dog", 2: "owl"}
        model = kind(kind.config_class(**sizes, id2label=labels))
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape)
        model.save_pretrained(folder / name)
        mean, std = [0.4, 0.5, 0.6], [0.2, 0.3, 0.25]
        size = dict(height=SIDE, width=SIDE)
        hf.ViTImageProcessor(size=size, image_mean=mean, image_std=std).save_pretrained(folder / name)
        judged(name, name, by_transformers)
    for number, name in enumerate(TIMM):
        torch.manual_seed(number)
        sizes = dict(img_size=SIDE, patch_size=PATCH, embed_dim=24, depth=2, num_heads=3, num_classes=3)
        model = timm.create_model(name, pretrained_cfg_overlay=dict(crop_pct=1.0), **sizes)
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape)
        timm.models.save_for_hf(model, folder / name, model_args=sizes, safe_serialization=True)
        judged(name, name, by_timm)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("flatout", type=Path, help="the binary")
    parser.add_argument("--only", choices=["texts", "images"], help="only one of the two")
    arguments = parser.parse_args()
    binary = arguments.flatout.resolve()
    torch.set_num_threads(2)
    hf.logging.set_verbosity_error()
    worst = 0.0
    with tempfile.TemporaryDirectory() as scratch:
        flatout = Program(binary, Path(scratch))

        def compare(name, ours, theirs):
            nonlocal worst
            ours = torch.tensor([list(row["probabilities"].values()) for row in ours])
            off = (ours - theirs).abs().max().item()
            worst = max(worst, off)
            print(f"{name:48} off by {off:.1e}", flush=True)

        if arguments.only != "images":
            texts(flatout, compare)
        if arguments.only != "texts":
            images(flatout, compare)
    print(f"worst {worst:.1e}, bound {BOUND:.0e}")
    sys.exit(worst > BOUND)


if __name__ == "__main__":
    main()
