"""Renders the templates of this folder with transformers and writes the results (expected.json) and the tokeniser of their
tokens (tokenizer.json), and renders single snippets (snippets.txt to snippets.json). Needs
transformers and jinja2.

The templates of families (`granite`, `olmo-2`, `phi-4`, `qwen-2.5`, `smollm3` and those before them) are modelled on the constructs of each
family's published one: macros, namespaces, lists of tools, dates, defaults of the system message. They are not copies of them.

    python crates/data/tests/templates/make.py
"""

import datetime
import json
import pathlib

import tokenizers
import transformers
from transformers.utils import chat_template_utils

HERE = pathlib.Path(__file__).parent
DATE = datetime.datetime(2025, 3, 9)
SPECIALS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
TURNS = ["<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|end|>", "<|eot_id|>", "<end_of_turn>"]

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place, \"now\".",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "days": {"type": "integer", "default": 1}},
            "required": ["place"],
        },
    },
}
CALL = {"type": "function", "id": "c1", "function": {"name": "weather", "arguments": {"place": "Zürich", "days": 2}}}


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


CONVERSATIONS = {
    "one": {"messages": [turn("user", "What is 2 + 2?"), turn("assistant", "4")]},
    "system": {"messages": [turn("system", " Be brief. "), turn("user", "Hi!\n"), turn("assistant", " Hello. ")]},
    "several": {
        "messages": [
            turn("user", "Who wrote  it?"),
            turn("assistant", "A poet\nof 東京."),
            turn("user", "When? 🦊"),
            turn("assistant", "In 1925."),
            turn("user", "Where?"),
            turn("assistant", "In \"Zürich\"."),
        ]
    },
    "thinking": {
        "messages": [
            turn("user", "17 * 3?"),
            turn("assistant", "51", reasoning_content="17 * 3 = 51"),
            turn("user", "And 18?"),
            turn("assistant", "<think>\n51 + 3\n</think>\n\n54"),
        ]
    },
    "tools": {
        "messages": [
            turn("user", "How is the weather in Zürich?"),
            turn("assistant", None, tool_calls=[CALL]),
            turn("tool", "{\"sky\": \"grey\"}", name="weather"),
            turn("assistant", "Grey."),
        ],
        "tools": [TOOL],
    },
    "unanswered": {"messages": [turn("system", "Be kind."), turn("user", "Hello?")]},
}


class Fixed(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return DATE


def tokenizer():
    texts = [m["content"] or "" for c in CONVERSATIONS.values() for m in c["messages"]]
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=[*SPECIALS.values(), *TURNS],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer)
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A </s> $B", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    library.save(str(HERE / "tokenizer.json"), pretty=False)
    return transformers.PreTrainedTokenizerFast(tokenizer_file=str(HERE / "tokenizer.json"), **SPECIALS)


def snippets():
    """Each part of snippets.txt with its rendering by transformers, or the error."""
    rendered = []
    for source in (HERE / "snippets.txt").read_text().split("\n---\n"):
        case = {"source": source}
        try:
            texts, _ = chat_template_utils.render_jinja_template(
                [CONVERSATIONS["several"]["messages"]], chat_template=source, **SPECIALS
            )
            case["text"] = texts[0]
        except Exception as error:
            case["error"] = f"{type(error).__name__}: {error}"
        rendered.append(case)
    written = json.dumps({"transformers": transformers.__version__, "cases": rendered}, ensure_ascii=False, indent=0)
    (HERE / "snippets.json").write_text(written + "\n")


def main():
    chat_template_utils.datetime = Fixed
    snippets()
    reader = tokenizer()
    cases = []
    for path in sorted(HERE.glob("*.jinja")):
        source = path.read_text()
        for name, conversation in CONVERSATIONS.items():
            for prompt in [False, True]:
                case = {"template": path.stem, "conversation": name, "prompt": prompt}
                options = {"chat_template": source, "add_generation_prompt": prompt, **conversation}
                messages = options.pop("messages")
                try:
                    case["text"] = reader.apply_chat_template(messages, tokenize=False, **options)
                except Exception as error:
                    case["error"] = str(error)
                if "text" in case and not prompt and "{% generation %}" in source:
                    encoded = reader.apply_chat_template(
                        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **options
                    )
                    case["tokens"] = encoded["input_ids"]
                    case["mask"] = encoded["assistant_masks"]
                cases.append(case)
    written = {
        "transformers": transformers.__version__,
        "date": DATE.strftime("%Y-%m-%d"),
        "specials": SPECIALS,
        "conversations": CONVERSATIONS,
        "cases": cases,
    }
    (HERE / "expected.json").write_text(json.dumps(written, ensure_ascii=False, indent=0) + "\n")
    for case in cases:
        if "error" in case:
            print(case["template"], case["conversation"], case["prompt"], case["error"])


main()
