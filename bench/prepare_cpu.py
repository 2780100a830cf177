"""Tokens per second of `flatout data prepare` and of the Python package `tokenizers`, on the same text, with the same tokenizer.json, on
the same cores, in interleaved rounds.

Both sides do the whole job: read a JSONL file, tokenise every document, write the tokens to disk. flatout also writes an
index with hashes. The Python side is written to win: documents go to `encode_batch_fast` in large batches, which uses all
its threads and computes no offsets, and tokens are written with numpy at once. Its time is also printed without reading and writing
(`encode only`). Both must give the same number of tokens, or the comparison is void.

    python bench/prepare_cpu.py target/release/flatout --megabytes 64 --workers 2 --rounds 3
"""

import argparse
import json
import os
import pathlib
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time


def write_text(path, megabytes):
    """Writes documents of invented words with frequencies as in language (Zipf), 1 to 8 KB each, always the same."""
    draw = random.Random(7)
    syllables = [a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "an", "el", "ir", "os", "un")]
    words = ["".join(draw.choices(syllables, k=draw.randint(1, 4))) for _ in range(60_000)]
    weights = [1 / (rank + 3) for rank in range(len(words))]
    written = 0
    with open(path, "w") as out:
        while written < megabytes * 1_000_000:
            text = " ".join(draw.choices(words, weights=weights, k=draw.randint(150, 1200)))
            sentences = text.replace(" ba ", ". ").replace(" de ", ", ").capitalize() + f" ({draw.randint(1, 99999)}).\n"
            line = json.dumps({"text": sentences}) + "\n"
            out.write(line)
            written += len(line)


PEER = r"""
import json, sys, time
import numpy as np
from tokenizers import Tokenizer

source, tokenizer, out = sys.argv[1:4]
tokenizer = Tokenizer.from_file(tokenizer)
tokenizer.encode_special_tokens = True
began = time.perf_counter()
encoding, tokens, pieces = 0.0, 0, []

def flush(texts):
    global encoding, tokens
    since = time.perf_counter()
    encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    encoding += time.perf_counter() - since
    for document in encoded:
        pieces.append(np.asarray(document.ids, dtype=np.uint16 if tokenizer.get_vocab_size() <= 65536 else np.uint32))
        tokens += len(pieces[-1])

texts = []
for line in open(source, "rb"):
    texts.append(json.loads(line)["text"])
    if len(texts) == 4096:
        flush(texts)
        texts = []
flush(texts)
np.concatenate(pieces).tofile(out)
print(json.dumps({"seconds": time.perf_counter() - began, "encoding": encoding, "tokens": tokens}))
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("flatout")
    parser.add_argument("--python", default=sys.executable, help="a Python with `tokenizers` and numpy")
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--source", type=pathlib.Path, help="a JSONL file with the key `text`, instead of invented words")
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        source, shards = folder / "text.jsonl", folder / "shards"
        if args.source:
            source = args.source
            args.megabytes = round(source.stat().st_size / 1e6)
        else:
            write_text(source, args.megabytes)
        prepare = [args.flatout, "data", "prepare", str(source), "--json", "--workers", str(args.workers)]
        since = time.perf_counter()
        subprocess.run(prepare + ["--out", str(folder / "first"), "--vocab", str(args.vocab)],
                       check=True, capture_output=True)
        first = time.perf_counter() - since
        tokenizer = folder / "first" / "tokenizer.json"
        environment = dict(os.environ, RAYON_NUM_THREADS=str(args.workers), TOKENIZERS_PARALLELISM="true")
        ours, theirs, encode_only = [], [], []
        for _ in range(args.rounds):
            shutil.rmtree(shards, ignore_errors=True)
            since = time.perf_counter()
            done = subprocess.run(prepare + ["--out", str(shards), "--tokenizer", str(tokenizer)],
                                  check=True, capture_output=True, text=True)
            seconds = time.perf_counter() - since
            tokens = json.loads(done.stdout)["manifest"]["totals"]["tokens"]
            ours.append(tokens / seconds)
            done = subprocess.run([args.python, "-c", PEER, str(source), str(tokenizer), str(folder / "peer.bin")],
                                  check=True, capture_output=True, text=True, env=environment)
            peer = json.loads(done.stdout)
            if peer["tokens"] != tokens:
                sys.exit(f"flatout made {tokens} tokens and tokenizers {peer['tokens']}: nothing can be compared")
            theirs.append(tokens / peer["seconds"])
            encode_only.append(tokens / peer["encoding"])
        result = {
            "megabytes": args.megabytes,
            "workers": args.workers,
            "tokens": tokens,
            "flatout_tokens_per_second": statistics.median(ours),
            "tokenizers_tokens_per_second": statistics.median(theirs),
            "tokenizers_encode_only": statistics.median(encode_only),
            "ratio": statistics.median(ours) / statistics.median(theirs),
            "ratio_encode_only": statistics.median(ours) / statistics.median(encode_only),
            "first_with_training_seconds": first,
        }
    if args.json:
        print(json.dumps(result))
        return
    print(f"{args.megabytes} MB of text, {tokens:,} tokens, {args.workers} workers, medians of {args.rounds}")
    print(f"flatout data prepare       {result['flatout_tokens_per_second']:12,.0f} tokens/s, the whole command")
    print(f"tokenizers                 {result['tokenizers_tokens_per_second']:12,.0f} tokens/s, without starting Python")
    print(f"tokenizers, encode only    {result['tokenizers_encode_only']:12,.0f} tokens/s")
    print(f"ratio {result['ratio']:.2f}; against encode only {result['ratio_encode_only']:.2f}")
    print(f"with training a tokeniser of {args.vocab} tokens first: {first:.1f} s")


if __name__ == "__main__":
    main()
