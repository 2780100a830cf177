"""Shared by benchmarks: a tokeniser whose tokens are words, so that texts have exactly the intended number of tokens."""

import json


def words_of(folder, vocab):
    """Writes tokenizer.json for `vocab` tokens, of which the first two are <bos> and <eos>; returns their texts."""
    names = ["<bos>", "<eos>"] + [f"w{i}" for i in range(vocab - 2)]
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [dict(id=i, content=names[i], single_word=False, lstrip=False, rstrip=False, normalized=False,
                              special=True) for i in range(2)],
        "normalizer": None, "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": {name: i for i, name in enumerate(names)}, "unk_token": "w0"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return names
