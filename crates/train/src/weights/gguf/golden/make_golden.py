"""Writes the golden data of the GGUF tests with llama.cpp's own Python package: some values in every element type, and a small file.

    pip install gguf numpy
    python make_golden.py            # writes elements.bin and file.gguf beside this file

elements.bin has the number of values (u32), the values in f32, and the same values in f16, bf16 and Q8_0. file.gguf has a metadata
value of every kind that is written and a tensor of every type.
"""

from pathlib import Path

import gguf
import numpy as np

HERE = Path(__file__).resolve().parent


def elements():
    random = np.random.default_rng(7)
    values = random.standard_normal(4096).astype(np.float32) * np.exp(random.uniform(-12, 6, 4096)).astype(np.float32)
    # Blocks of zeros, of a single value, of ties between two steps, and of values that are subnormal in f16.
    values[:32] = 0
    values[32:64] = -3.25
    values[64:96] = np.arange(32, dtype=np.float32) * 0.5 - 8
    values[95] = 127
    values[96:128] = np.arange(32, dtype=np.float32) * 2.0**-26
    types = [gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.BF16, gguf.GGMLQuantizationType.Q8_0]
    made = [gguf.quants.quantize(values.reshape(-1, 32), kind).tobytes() for kind in types]
    (HERE / "elements.bin").write_bytes(np.uint32(len(values)).tobytes() + values.tobytes() + b"".join(made))


def file():
    writer = gguf.GGUFWriter(HERE / "file.gguf", "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_string("tokenizer.ggml.pre", "gpt-2 \u00e9")
    writer.add_array("tokenizer.ggml.token_type", [1, 3, -1])
    writer.add_array("tokenizer.ggml.scores", [0.5, -1.0])
    writer.add_array("gemma3.attention.sliding_window_pattern", [True, False])
    writer.add_array("tokenizer.ggml.tokens", ["a", "\u0120b", ""])
    values = np.arange(3 * 32, dtype=np.float32).reshape(3, 32) - 48
    writer.add_tensor("norm.weight", values[0, :5].copy())
    for kind in [gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.BF16, gguf.GGMLQuantizationType.Q8_0]:
        writer.add_tensor(f"{kind.name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    elements()
    file()
