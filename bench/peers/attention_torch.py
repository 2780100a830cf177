"""Times PyTorch's attention on shapes from standard input: milliseconds of one call by backend.

    echo '[{"backward": false, "causal": true, "heads": 12, "kv_heads": 4, "size": 64, "lengths": [[2048, 2048]],
            "padded_to": null}]' | python bench/peers/attention_torch.py

Prints one JSON line: a dictionary per shape. Sequences of equal length run on `scaled_dot_product_attention` with the backends cuDNN
and flash. Packed ones run padded on the same, and packed on `torch.nn.attention.varlen`, if PyTorch has it. Sequences of
one query over caches of different lengths have no counterpart and give an empty dictionary. Backward is the gradient only:
tensors that forward saves are computed before.
"""

import inspect
import json
import statistics
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

TURNS, TURN_MS, MOST_CALLS = 5, 25.0, 40
CACHES, MOST_COPIES = 4, 8
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def timer(calls_of):
    """Returns a function that runs a number of calls, cycling through the copies, and returns the milliseconds of one."""
    def run(count):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for i in range(count):
            calls_of[i % len(calls_of)]()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / count
    return run


def make(forward, tensors, backward):
    """Returns a function that makes one call on one set of tensors."""
    if not backward:
        def call():
            with torch.no_grad():
                forward(*tensors)
        return call
    out = forward(*tensors)
    d = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, tensors, d, retain_graph=True)


def random_tensors(shapes, backward):
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=backward) for shape in shapes]


def candidates(s):
    """(name, forward, shapes of q, k and v) of every backend for a shape."""
    heads, kv_heads, size, causal = s["heads"], s["kv_heads"], s["size"], s["causal"]
    lengths = s["lengths"]
    found = []

    def dense(name, backend, count, q, k):
        def forward(q, k, v):
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
                                                      is_causal=causal, enable_gqa=heads != kv_heads)
        found.append((name, forward, [(count, q, heads, size), (count, k, kv_heads, size), (count, k, kv_heads, size)]))

    if all(pair == lengths[0] for pair in lengths) and lengths[0][0] == lengths[0][1]:
        for name, backend in BACKENDS.items():
            dense(name, backend, len(lengths), *lengths[0])
    elif s["padded_to"]:
        for name, backend in BACKENDS.items():
            dense(f"{name}, padded", backend, len(lengths), s["padded_to"], s["padded_to"])
        try:
            from torch.nn.attention.varlen import varlen_attn
        except ImportError:
            return found
        ends = [0]
        for q, _ in lengths:
            ends.append(ends[-1] + q)
        cumulative = torch.tensor(ends, device="cuda", dtype=torch.int32)
        longest, group = max(q for q, _ in lengths), heads // kv_heads
        taken = inspect.signature(varlen_attn).parameters
        options = {"window_size": (-1, 0)} if "window_size" in taken else {"is_causal": True}
        options = options if causal else {}
        if group > 1 and "enable_gqa" in taken:
            options["enable_gqa"] = True

        def packed(q, k, v):
            return varlen_attn(q, k, v, cumulative, cumulative, longest, longest, **options)

        def repeated(q, k, v):
            return packed(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))

        tokens = ends[-1]
        shapes = [(tokens, heads, size), (tokens, kv_heads, size), (tokens, kv_heads, size)]
        # Where grouped heads are not supported, keys are repeated for each query head.
        is_repeated = group > 1 and "enable_gqa" not in taken
        found.append(("packed, keys repeated", repeated, shapes) if is_repeated else ("packed", packed, shapes))
    return found


def run(s):
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    runners = {}
    for name, forward, shapes in candidates(s):
        one = sum(2 * torch.Size(shape).numel() for shape in shapes) * (2 if s["backward"] else 1)
        copies = max(1, min(MOST_COPIES, -(-CACHES * cache // one)))
        try:
            run_calls = timer([make(forward, random_tensors(shapes, s["backward"]), s["backward"]) for _ in range(copies)])
            run_calls(3)
            once = run_calls(1)
        except (RuntimeError, TypeError) as why:
            print(f"torch {name} cannot run: {str(why).splitlines()[0]}", file=sys.stderr)
            continue
        runners[name] = (run_calls, max(1, min(MOST_CALLS, int(TURN_MS / once))), [])
    for _ in range(TURNS):
        for run_calls, count, ms in runners.values():
            ms.append(run_calls(count))
    return {name: statistics.median(ms) for name, (_, _, ms) in runners.items()}


def main():
    times = []
    for s in json.load(sys.stdin):
        times.append(run(s))
        torch.cuda.empty_cache()
    print(json.dumps(times))


if __name__ == "__main__":
    main()
