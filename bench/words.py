"""A tokeniser whose tokens are words of our own, so that benchmarks write texts of exactly as many tokens as they mean to."""

import json


def words_of(folder, vocab):
    """Writes tokenizer.json for `vocab` tokens, the first two of which are <bos> and <eos>; gives their texts."""
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
