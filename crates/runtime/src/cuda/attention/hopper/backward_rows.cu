// Before and after Hopper's backward kernels: statistics of rows, and dq rounded from its sums.
//
// Defines: SIZE, FUSED (whether dq is summed in `call.scratch`, f32 [tq, heads, SIZE]).

// Lanes a row is spread over, 8 elements each.
#define LANES (SIZE > 128 ? 32 : SIZE > 64 ? 16 : SIZE > 32 ? 8 : SIZE > 16 ? 4 : 2)

// -log2e lse and dlse - sum(do o) of every row, dlse where it is given; the sums of dq and the counters of tiles at zero. Reads o and do once, writes
// 8 bytes a row and 4 SIZE where dq is summed. A warp takes 32 tokens of one head, so that it writes whole lines.
// Rows outside the segments hold anything: nobody reads their statistics. Grid: heads within tokens in 256s.
extern "C" __global__ void __launch_bounds__(256)
wgmma_rows(const __grid_constant__ Call call, const float* d_lse, i64 d_lse_row) {
    const int head = blockIdx.x % call.heads, lane = threadIdx.x % 32;
    const int first = (blockIdx.x / call.heads * 8 + threadIdx.x / 32) * 32;
    if (blockIdx.x == 0 && threadIdx.x < 2) *counter(call, threadIdx.x) = 0;
    if (first >= call.tq) return;
    float mine = 0.0f;
#pragma unroll 4
    for (int i = 0; i < LANES; i++) {
        const i64 token = first + i * (32 / LANES) + lane / LANES;
        const int e = lane % LANES * 8;
        float sum = 0.0f;
        if (token < call.tq && e < SIZE) {
            Pack<bf16, 8> o, d_o;
            o.load(call.o.at + token * call.o.token + head * call.o.head + e);
            d_o.load(call.d_o.at + token * call.d_o.token + head * call.d_o.head + e);
#pragma unroll
            for (int j = 0; j < 8; j++) sum = fmaf(f32(o.x[j]), f32(d_o.x[j]), sum);
#if FUSED
            float4* to = (float4*)(call.scratch + (token * call.heads + head) * SIZE + e);
            to[0] = to[1] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#endif
        }
        sum = lanes_sum<LANES>(sum);
        sum = __shfl_sync(ALL_LANES, sum, lane % (32 / LANES) * LANES);
        if (lane / (32 / LANES) == i) mine = sum;
    }
    const i64 token = first + lane;
    if (token >= call.tq) return;
    // A row that sees nothing has p = 0 with any score.
    const float lse = call.lse[token * call.lse_row + head];
    float* to = statistics(call, head) + token;
    to[0] = lse == -infinity() ? lse : -LOG2E * lse;
    to[pitch_of(call)] = (d_lse ? d_lse[token * d_lse_row + head] : 0.0f) - mine;
}

#if FUSED

// dq = scale times its sums, whose columns lie as the products left them: of 16, [4 t, 4 t + 4) are 2 t, 2 t + 1, 2 t + 8
// and 2 t + 9. Reads 4 bytes and writes 2 an element. Grid: tiles of 64 queries, heads.
extern "C" __global__ void __launch_bounds__(256) wgmma_round(const __grid_constant__ Call call) {
    const Tile tile = q_tile<64>(call, blockIdx.x);
    if (tile.segment < 0) return;
    const Segment g = segment(call, tile.segment);
    const int head = blockIdx.y, each = SIZE / 8;
    for (int i = threadIdx.x; i < 64 * each; i += 256) {
        const i64 token = tile.first + i / each;
        const int c = i % each;
        if (token >= g.q1) continue;
        const float* from = call.scratch + (token * call.heads + head) * SIZE;
        float y[8];
        if (SIZE % 16 && c == each - 1) {
#pragma unroll
            for (int j = 0; j < 8; j++) y[j] = call.scale * from[8 * c + j];
        } else {
            from += c / 2 * 16 + c % 2 * 2;
#pragma unroll
            for (int j = 0; j < 8; j++) y[j] = call.scale * from[j / 2 * 4 + j % 2];
        }
        Pack<bf16, 8> out;
        put(out, y);
        out.store(call.dq.at + token * call.dq.token + head * call.dq.head + 8 * c);
    }
}

#endif
