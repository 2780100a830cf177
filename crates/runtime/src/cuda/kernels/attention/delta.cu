// Per-row terms of attention's backward kernels on bf16, computed before they run.
//
//   delta = sum(do o) - dlse, [heads, tq] in f32
//
// o, do [tq, heads, SIZE] by token and head strides, 16-byte accesses. Reads both once, 4 SIZE bytes per row, and writes 4. A
// thread block of 256 threads takes 32 tokens of a head, 8 lanes per row, so that its writes are coalesced. Rows outside every
// segment are computed too, but never read. Deterministic.
//
// Defines: those of call.cuh, SIZE (a multiple of 8).

#define TOKENS 32

// Grid: tiles of 32 tokens, heads. `d_lse` may be null.
extern "C" __global__ void __launch_bounds__(8 * TOKENS)
attention_delta(const __grid_constant__ Call call, const float* d_lse, i64 d_lse_row) {
    const i64 row = (i64)blockIdx.x * TOKENS + threadIdx.x / 8;
    const int head = blockIdx.y;
    float sum = 0.0f;
    if (row < call.tq) {
        const bf16* o = call.o.at + row * call.o.token + head * call.o.head;
        const bf16* d_o = call.d_o.at + row * call.d_o.token + head * call.d_o.head;
#pragma unroll
        for (int c = threadIdx.x % 8 * 8; c < SIZE; c += 64) {
            Pack<bf16, 8> x, y;
            x.load(o + c);
            y.load(d_o + c);
#pragma unroll
            for (int i = 0; i < 8; i++) sum = fmaf(f32(x.x[i]), f32(y.x[i]), sum);
        }
    }
    sum = lanes_sum<8>(sum);
    if (row < call.tq && threadIdx.x % 8 == 0)
        call.delta[head * (i64)call.tq + row] = sum - (d_lse ? d_lse[row * d_lse_row + head] : 0.0f);
}
