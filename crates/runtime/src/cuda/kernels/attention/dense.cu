// Converts between our lse, f32 [B * T, H] with row stride `row`, and cuDNN's statistics, dense [B, H, T].
//
// A thread block of 32 x 8 threads transposes a tile of 32 tokens by 32 heads through shared memory, so that reads and writes
// are coalesced. Moves 8 bytes per token and head. Grid: token tiles of every sequence, head tiles. Deterministic.

#define TILE 32

template <bool TO_STATS> __device__ void move(const float* from, float* to, int tokens, int heads, i64 row) {
    __shared__ float tile[TILE][TILE + 1];
    const int tiles = (tokens + TILE - 1) / TILE;
    const i64 batch = blockIdx.x / tiles;
    const int t0 = blockIdx.x % tiles * TILE, h0 = blockIdx.y * TILE;
    const int x = threadIdx.x % TILE, y = threadIdx.x / TILE;
    const i64 lse = batch * tokens * row, stats = batch * heads * tokens;
    for (int s = y; s < TILE; s += 8) {
        const int t = t0 + (TO_STATS ? s : x), h = h0 + (TO_STATS ? x : s);
        if (t < tokens && h < heads) tile[s][x] = from[TO_STATS ? lse + t * row + h : stats + (i64)h * tokens + t];
    }
    __syncthreads();
    for (int s = y; s < TILE; s += 8) {
        const int t = t0 + (TO_STATS ? x : s), h = h0 + (TO_STATS ? s : x);
        if (t < tokens && h < heads) to[TO_STATS ? stats + (i64)h * tokens + t : lse + t * row + h] = tile[x][s];
    }
}

extern "C" __global__ void __launch_bounds__(256)
lse_to_stats(const float* lse, float* stats, int tokens, int heads, i64 row) {
    move<true>(lse, stats, tokens, heads, row);
}

extern "C" __global__ void __launch_bounds__(256)
stats_to_lse(const float* stats, float* lse, int tokens, int heads, i64 row) {
    move<false>(stats, lse, tokens, heads, row);
}
