// Prologue and epilogue of Hopper's backward kernels: row statistics, and rounding of dq's sums.
//
// Defines: SIZE, SUMMED (whether dq is summed in `call.scratch`).

// Computes statistics of every row, and outlines; clears the tile counters and the sums of dq. Rows outside the segments hold
// arbitrary data, but their statistics are never read. Grid: tiles of 256 tokens with heads innermost.
extern "C" __global__ void __launch_bounds__(256)
wgmma_rows(const __grid_constant__ Call call, const float* d_lse, i64 d_lse_row) {
    if (blockIdx.x == 0 && threadIdx.x < 2) *counter(call, threadIdx.x) = 0;
    const int first = (blockIdx.x / call.heads * 8 + threadIdx.x / 32) * 32;
    if (first >= call.tq) return;
    measure_rows(call, blockIdx.x % call.heads, first, call.tq, d_lse, d_lse_row);
#if MASK == 3
    if (blockIdx.x % call.heads == 0) outline_runs(call, first);
#endif
#if SUMMED
    clear_sums(call, blockIdx.x % call.heads, first, min(first + 32, call.tq));
#endif
}

#if SUMMED

// Rounds dq from its sums to bf16. Grid: tiles of 64 queries, heads.
extern "C" __global__ void __launch_bounds__(256) wgmma_round(const __grid_constant__ Call call) {
    const Tile tile = q_tile<64>(call, blockIdx.x);
    if (tile.segment < 0) return;
    const int end = segment(call, tile.segment).q1;
    for (int i = threadIdx.x / 32; i < SUM_ROW / 4; i += 8) {
        const int first = tile.first + i / (SUM_ROW / 16) * 16;
        if (first < end) round_sums(call, blockIdx.y, first, end, i % (SUM_ROW / 16));
    }
}

#endif
