"""Generates the golden fixture of NF4: values, and their quantisation by bitsandbytes on a CPU.

    pip install torch bitsandbytes
    python make_nf4.py

Written with bitsandbytes 0.50.2 and PyTorch 2.15 on one thread. The file contains, little-endian: the 16 values of NF4 and the
256 of the signed dynamic map as f32; the number of cases as u32, and for each case the number of values n as u32, the values as
f32, n / 2 packed codes, n / 64 magnitudes as f32 before they are quantised, their mean, the largest magnitude of every 256 as
f32, the codes of the magnitudes, and the dequantised values as f32 and as bf16, with every division rounded up; then the number
of means as u32, and for each mean a number of values as u32 and their mean as f32, where value i is the upper 24 bits of
i * 2654435761 modulo 2^32, divided by 2^24.

Tensors are flat, because bitsandbytes' CPU kernel starts a new block with every row where it dequantises matrices, although it
quantises the flattened tensor: for rows whose length is not a multiple of 64 its values differ from those of its own CUDA
kernels and of its plain PyTorch.
"""

import struct
from pathlib import Path

import numpy as np
import torch
from bitsandbytes import functional as F

torch.set_num_threads(1)


def numbers(tensor, dtype):
    return tensor.detach().contiguous().view(-1).numpy().astype(dtype, casting="no").tobytes()


def quantized(values):
    codes, plain = F.quantize_4bit(values, blocksize=64, quant_type="nf4")
    again, state = F.quantize_4bit(values, blocksize=64, quant_type="nf4", compress_statistics=True)
    assert torch.equal(codes, again) and state.nested and state.state2.blocksize == 256
    assert torch.equal(state.state2.code, F.create_dynamic_map())
    wide = F.dequantize_4bit(again, state)
    state.dtype = torch.bfloat16
    narrow = F.dequantize_4bit(again, state)
    assert wide.dtype == torch.float32 and narrow.dtype == torch.bfloat16
    return b"".join([
        struct.pack("<I", values.numel()),
        numbers(values, np.float32),
        numbers(codes, np.uint8),
        numbers(plain.absmax, np.float32),
        numbers(state.offset.reshape(1), np.float32),
        numbers(state.state2.absmax, np.float32),
        numbers(state.absmax, np.uint8),
        numbers(wide, np.float32),
        numbers(narrow.view(torch.int16), np.int16),
    ])


def cases():
    draw = torch.Generator().manual_seed(7)
    normal = lambda *dims: torch.randn(*dims, generator=draw)
    # An ordinary weight, as in checkpoints.
    yield (0.02 * normal(32 * 96)).bfloat16().float()
    # Magnitudes over many orders, more than 256 blocks, the last one incomplete and odd.
    yield normal(300 * 64 + 17)[: 258 * 64 + 17] * torch.exp(2 * normal(258 * 64 + 17))
    # Outliers, blocks of zeros, blocks of one value, values at the bounds between codes.
    x = 0.1 * normal(12, 64)
    x[1, 5], x[2], x[3], x[4, :] = 3e4, 0.0, -0.25, 1e-30
    code = F.get_4bit_type("nf4", device="cpu")
    x[5], x[5, :15], x[5, 15] = 0.0, (code[1:] + code[:-1]) / 2, 1.0
    x[6], x[6, :16] = 0.0, 3.0 * code
    yield x.reshape(-1)
    # One block, one value, only zeros.
    yield normal(64)
    yield normal(1)
    yield torch.zeros(3 * 64)
    yield torch.zeros(70)


def mean(n):
    whole = (np.arange(n, dtype=np.uint32) * np.uint32(2654435761)) >> np.uint32(8)
    values = torch.from_numpy(whole.astype(np.float32) / np.float32(1 << 24))
    return struct.pack("<If", n, values.mean().item())


made = [quantized(values) for values in cases()]
means = [mean(n) for n in [1, 7, 8, 31, 32, 33, 100, 513, 3000, 9609, 32767, 32768, 65536, 70001, 262144, 786432, 1000003]]
Path(__file__).with_name("nf4.bin").write_bytes(b"".join([
    numbers(F.get_4bit_type("nf4", device="cpu"), np.float32),
    numbers(F.create_dynamic_map(), np.float32),
    struct.pack("<I", len(made)), *made,
    struct.pack("<I", len(means)), *means,
]))
