"""Generates the golden fixture of text that a model writes about images: prompts, images and the library's tokens, greedily.

    pip install torch torchvision transformers tokenizers safetensors pillow
    python make_vl_generate.py            # writes qwen3-vl-generate/ beside this file
    python make_vl_generate.py --check    # generates the tokens again and compares

The model is `qwen3-vl` of make_vl.py, in f64. The folder contains the library's files besides weights: a tokeniser of 97 words, a chat
template that formats parts like Qwen3-VL's, and the limits of an image's area. expected.json has one entry per prompt: the pictures
(of crates/data/tests/pictures), the parts of the question, the tokens of the whole prompt from the library's
processor, and the tokens that `generate` adds. Each of these is more likely than the next candidate by a margin beyond rounding.
"""

import argparse
import json
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessor, Qwen3VLForConditionalGeneration, Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from make_vl import HERE, IMAGE, MERGE, PATCH, TIME, VOCAB, WEIGHTS, config, value

FOLDER = HERE / "qwen3-vl-generate"
PICTURES = HERE.parent.parent.parent / "data/tests/pictures"
START, STOP = 88, 89
SPECIAL = {START: "<|im_start|>", STOP: "<|im_end|>", IMAGE: "<|image_pad|>", 91: "<|video_pad|>", 92: "<|vision_start|>", 93: "<|vision_end|>"}
WORDS = "user assistant what is on the table compare with and now how many are there in this picture tell me a story of".split()
AREAS = {"shortest_edge": 64, "longest_edge": 1024}
NEW = 14
MARGIN = 1e-3

TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}
{{- message.content }}
{%- else %}
{%- for part in message.content %}
{%- if part.type == 'image' or 'image' in part or 'image_url' in part %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif 'text' in part %}
{{- part.text }}
{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# Pictures, and the question: an image for each `<image>`, or all images before the text.
PROMPTS = [
    (["rgb.png", "palette.png"], "what is on the table"),
    (["grey.png", "rgb.png"], "compare <image> and <image> now"),
    (["interlaced.png"], "how many are there in this picture"),
    ([], "tell me a story of the table"),
    (["rgb16.png", "rgb.png", "bits.png"], "what is this"),
    (["palette.png"], "<image>"),
]


def tokenizer():
    words = {word: id for id, word in enumerate(WORDS)}
    words |= {f"word{id}": id for id in range(len(WORDS), VOCAB) if id not in SPECIAL}
    words |= {spelled: id for id, spelled in SPECIAL.items()}
    made = Tokenizer(models.WordLevel(words, unk_token="word96"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([AddedToken(spelled, special=True, normalized=False) for spelled in SPECIAL.values()])
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=SPECIAL[STOP], pad_token=SPECIAL[STOP])
    fast.image_token, fast.video_token = SPECIAL[IMAGE], SPECIAL[91]
    fast.vision_start_token, fast.vision_end_token = SPECIAL[92], SPECIAL[93]
    fast.image_token_id, fast.video_token_id, fast.vision_start_token_id, fast.vision_end_token_id = IMAGE, 91, 92, 93
    return fast


def parts_of(images, question):
    if "<image>" not in question:
        return [{"type": "image"} for _ in images] + [{"type": "text", "text": question}]
    parts = []
    for at, text in enumerate(question.split("<image>")):
        parts += [{"type": "image"}] * (at > 0) + [{"type": "text", "text": text}] * (text != "")
    return parts


def make():
    stored = load_file(WEIGHTS)
    described = config()
    model = Qwen3VLForConditionalGeneration(described).eval().double()
    for weight, p in model.named_parameters():
        p.data = value(weight, stored[weight])
    images = Qwen2VLImageProcessor(
        patch_size=PATCH, temporal_patch_size=TIME, merge_size=MERGE, size=AREAS, image_mean=[0.5] * 3, image_std=[0.5] * 3,
    )
    videos = Qwen3VLVideoProcessor(patch_size=PATCH, temporal_patch_size=TIME, merge_size=MERGE)
    words = tokenizer()
    processor = Qwen3VLProcessor(images, words, videos, chat_template=TEMPLATE)
    cases = []
    for names, question in PROMPTS:
        opened = []
        for name in names:
            picture = Image.open(PICTURES / name)
            opened.append(picture.convert("RGB"))
        parts = parts_of(names, question)
        text = processor.apply_chat_template([{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True)
        inputs = processor(text=[text], images=opened or None, return_tensors="pt")
        prompt = inputs["input_ids"][0].tolist()
        if opened:
            inputs["pixel_values"] = inputs["pixel_values"].double()
        made = model.generate(
            **inputs, max_new_tokens=NEW, do_sample=False, eos_token_id=STOP, pad_token_id=STOP, output_logits=True,
            return_dict_in_generate=True,
        )
        new = made.sequences[0, len(prompt):].tolist()
        margins = [float(two[0] - two[1]) for two in (step[0].topk(2).values for step in made.logits)]
        print(names, question, new, f"least margin {min(margins):.3f}")
        assert min(margins) > MARGIN
        cases.append({"pictures": names, "question": question, "prompt": prompt, "new": [id for id in new if id != STOP]})
    return words, described, cases


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    torch.set_num_threads(1)
    words, described, cases = make()
    if check:
        assert json.loads((FOLDER / "expected.json").read_text()) == cases
        return print("agrees")
    FOLDER.mkdir(exist_ok=True)
    lines = ",\n".join(json.dumps(case) for case in cases)
    (FOLDER / "expected.json").write_text(f"[\n{lines}\n]\n")
    (FOLDER / "tokenizer.json").write_text(words.backend_tokenizer.to_str())
    (FOLDER / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIAL[STOP], "pad_token": SPECIAL[STOP]}) + "\n")
    (FOLDER / "chat_template.jinja").write_text(TEMPLATE)
    processor = {"image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": PATCH, "temporal_patch_size": TIME,
                 "merge_size": MERGE, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": AREAS}
    (FOLDER / "preprocessor_config.json").write_text(json.dumps(processor) + "\n")
    (FOLDER / "generation_config.json").write_text(json.dumps({"eos_token_id": STOP}) + "\n")


if __name__ == "__main__":
    main()
