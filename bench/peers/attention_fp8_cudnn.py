"""Times FP8 attention in cuDNN, compared with bf16, to decide whether `precision=fp8` should include attention.

    pip install torch nvidia-cudnn-frontend
    python bench/peers/attention_fp8_cudnn.py

Causal attention with grouped heads over tensors [B, T, H, K], as in flatout's decoders: forward with the statistics that the backward
pass reads, and backward. q, k, v and o are E4M3, the gradients E5M2, every scale a tensor of one element; times do not include
quantisation. Times are medians of five, in milliseconds. A graph that cuDNN refuses is a line with the reason.
"""

import statistics

import cudnn
import torch

SHAPES = [(32, 12, 4, 2048, 64), (16, 16, 8, 2048, 128)]
E4M3, E5M2, FLOAT = cudnn.data_type.FP8_E4M3, cudnn.data_type.FP8_E5M2, cudnn.data_type.FLOAT
TORCH = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}
ONE = dict(dim=(1, 1, 1, 1), stride=(1, 1, 1, 1))


def milliseconds(run, least=40):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def timed(count):
        start.record()
        for _ in range(count):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / count

    timed(3)
    count = max(5, min(400, int(least / timed(3))))
    return statistics.median(timed(count) for _ in range(5))


def heads(b, h, t, k):
    return dict(dim=(b, h, t, k), stride=(t * h * k, k, h * k, 1))


class Graph:
    """A graph of one operation with the bindings of its tensors."""

    def __init__(self, handle):
        self.handle, self.bound = handle, {}
        self.graph = cudnn.pygraph(io_data_type=E4M3, intermediate_data_type=FLOAT, compute_data_type=FLOAT, handle=handle)

    def given(self, value, dtype, place):
        tensor = self.graph.tensor(data_type=dtype, **place)
        self.bound[tensor] = value
        return tensor

    def scale(self):
        return self.given(torch.ones(1, device="cuda"), FLOAT, ONE)

    def made(self, tensor, value, dtype, place):
        tensor.set_output(True).set_dim(place["dim"]).set_stride(place["stride"]).set_data_type(dtype)
        self.bound[tensor] = value
        return value

    def largest(self, tensor):
        self.made(tensor, torch.zeros(1, device="cuda"), FLOAT, ONE)

    def build(self):
        self.graph.validate()
        self.graph.build_operation_graph()
        self.graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        self.graph.check_support()
        self.graph.build_plans()
        scratch = torch.empty(max(self.graph.get_workspace_size(), 1), dtype=torch.uint8, device="cuda")
        return lambda: self.graph.execute(self.bound, scratch, handle=self.handle)


def forward(handle, shape, q, k, v):
    b, h, hk, t, size = shape
    g = Graph(handle)
    tensors = [g.given(x, E4M3, heads(b, n, t, size)) for x, n in [(q, h), (k, hk), (v, hk)]]
    scales = {name: g.scale() for name in ["descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o"]}
    o, stats, top_s, top_o = g.graph.sdpa_fp8(*tensors, **scales, generate_stats=True, attn_scale=size**-0.5, use_causal_mask=True)
    o = g.made(o, torch.empty_like(q), E4M3, heads(b, h, t, size))
    stats = g.made(stats, torch.empty(b, h, t, 1, device="cuda"), FLOAT, dict(dim=(b, h, t, 1), stride=(h * t, t, 1, 1)))
    g.largest(top_s)
    g.largest(top_o)
    return g.build(), o, stats


def backward(handle, shape, q, k, v, o, stats, do):
    b, h, hk, t, size = shape
    g = Graph(handle)
    tensors = [g.given(x, E4M3, heads(b, n, t, size)) for x, n in [(q, h), (k, hk), (v, hk), (o, h)]]
    tensors.append(g.given(do, E5M2, heads(b, h, t, size)))
    tensors.append(g.given(stats, FLOAT, dict(dim=(b, h, t, 1), stride=(h * t, t, 1, 1))))
    names = ["descale_q", "descale_k", "descale_v", "descale_o", "descale_dO", "descale_s", "descale_dP",
             "scale_s", "scale_dQ", "scale_dK", "scale_dV", "scale_dP"]
    made = g.graph.sdpa_fp8_backward(*tensors, **{name: g.scale() for name in names}, attn_scale=size**-0.5, use_causal_mask=True)
    for gradient, n in zip(made[:3], [h, hk, hk]):
        g.made(gradient, torch.empty(b, t, n, size, dtype=TORCH[E5M2], device="cuda"), E5M2, heads(b, n, t, size))
    for top in made[3:]:
        g.largest(top)
    return g.build()


def main():
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, cuDNN {cudnn.backend_version()}")
    handle = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
    for shape in SHAPES:
        b, h, hk, t, size = shape
        arithmetic = 2 * b * h * t * t * size
        q, k, v, do = (torch.randn(b, t, n, size, device="cuda", dtype=torch.bfloat16) for n in [h, hk, hk, h])
        by_head = [x.transpose(1, 2) for x in [q, k, v]]
        run = lambda: torch.ops.aten._scaled_dot_product_cudnn_attention(*by_head, None, True, 0.0, True, False)
        o, lse, q_at, k_at, q_most, k_most, seed, offset = run()[:8]
        again = lambda: torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            do.transpose(1, 2), *by_head, o, lse, seed, offset, None, q_at, k_at, q_most, k_most, 0.0, True)

        def say(what, run, times):
            taken = milliseconds(run)
            print(f"{shape} {what:14} {taken:.3f} ms {times * arithmetic / taken / 1e9:4.0f} TFLOP/s", flush=True)

        say("bf16 forward", run, 1)
        say("bf16 backward", again, 2.5)
        narrow = [x.to(TORCH[E4M3]) for x in [q, k, v]]
        try:
            run, o, stats = forward(handle, shape, *narrow)
            say("fp8 forward", run, 1)
            say("fp8 backward", backward(handle, shape, *narrow, o, stats, do.to(TORCH[E5M2])), 2.5)
        except cudnn.cudnnGraphNotSupportedError as refused:
            print(f"{shape} refused: {refused}", flush=True)


if __name__ == "__main__":
    main()
