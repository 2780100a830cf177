// Attention backward of queries on mma.sync, bf16, sm_80 and later: heads of 16 to 256 in steps of 8, any mask and segments,
// grouped heads.
//
//   p = exp(scale q k^T - lse), ds = p (do v^T - delta), dq = scale ds k
//
// q, do, dq [Tq, H, SIZE], k, v [Tk, HK, SIZE] in bf16 by token and head strides; lse [Tq, H], delta [H, Tq] in f32. 6 SIZE
// FLOPs per query-key pair. Reads q and do once, k and v once per tile of queries.
//
// A thread block owns OWN = 16 MS WARPS queries of one head and walks their keys WALK at a time: 16 MS rows per warp, with dq's
// sums in registers. Keys and values are double-buffered: cp.async fills one stage of shared memory while the other is
// processed. Queries and do lie next to them, or with KEPT stay in registers as fragments and free their shared memory for the
// second stage. Scores become ds in the lanes that need them as the next product's A operand: nothing is written back. Keys
// that all rows of a warp attend to are not masked; otherwise SHORT keys at a time are.
//
// Each element of dq belongs to one lane and is summed in the order of the keys: deterministic. No spills (tested).
//
// Defines: those of call.cuh and mma.cuh, MS, WALK, KEPT, BLOCKS (thread blocks per multiprocessor, for the launch bounds).

#define OWN (16 * MS * WARPS)
#define SHORT (WALK < 32 ? WALK : 32)
#define TILE_BYTES (WALK * ROW_BYTES)

template <bool SOME, int NS>
__device__ __forceinline__ void step(float (&sum)[MS][DIM / 8][4], const float (&shift)[MS][2],
                                     const float (&mean)[MS][2],
#if KEPT
                                     const u32 (&queries)[STEPS][MS][4], const u32 (&slopes)[STEPS][MS][4],
#else
                                     u32 queries, u32 slopes,
#endif
                                     u32 keys, u32 values, const Sight& sight, int from, float unit) {
    const int l = lane_id();
    float p[MS][NS][4], dp[MS][NS][4];
    product_along(p, queries, keys + lane_along());
    cap_all(p, unit);
    product_along(dp, slopes, values + lane_along());
#pragma unroll
    for (int m = 0; m < MS; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            Seen seen;
            if (SOME) seen = seen_by(sight, 16 * m + 8 * i + l / 4, from + 2 * (l % 4));
#pragma unroll
            for (int n = 0; n < NS; n++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    float e = exp2_fast(fmaf(unit, p[m][n][2 * i + j], -shift[m][i]));
                    if (SOME && !seen.has(8 * n + j)) e = 0.0f;
                    const float ds = e * (dp[m][n][2 * i + j] - mean[m][i]);
                    p[m][n][2 * i + j] = through_cap(ds, p[m][n][2 * i + j], unit);
                }
        }
#pragma unroll
    for (int j = 0; j < NS / 2; j++) {
        u32 ds[MS][4];
#pragma unroll
        for (int m = 0; m < MS; m++) as_a(ds[m], p[m][2 * j], p[m][2 * j + 1]);
        product_down(sum, ds, keys + lane_down() + j * 16 * ROW_BYTES);
    }
}

// Grid: query tiles of every segment, heads.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) mma_dq(const __grid_constant__ Call call) {
    const int warp = threadIdx.x / 32, l = lane_id(), head = blockIdx.y;
    const Tile tile = q_tile<OWN>(call, MASK == 1 && !Q_RAGGED ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    if (tile.segment < 0) return;
    const Segment g = segment(call, tile.segment);
    if (tile.first >= g.q1) return;
    const int kv_head = head / (call.heads / call.kv_heads), row = tile.first + warp * 16 * MS;
    const u32 tiles = shared_address(memory);
    // Two pipeline stages of keys and values; queries and do follow, or share the second stage if registers keep them.
    const u32 owned = tiles + (KEPT ? 2 : 4) * TILE_BYTES;

    const Walk walk = walk_keys<OWN>(call, g, tile.first);
    load_rows<OWN>(owned, call.q, head, tile.first, g.q1);
    load_rows<OWN>(owned + OWN * ROW_BYTES, call.d_o, head, tile.first, g.q1);
    int from = walk.low;
    if (from < walk.high) {
        load_rows<WALK>(tiles, call.k, kv_head, from, g.k1);
        load_rows<WALK>(tiles + TILE_BYTES, call.v, kv_head, from, g.k1);
    }
    commit();
    const Sight sight = look<MS>(call, g, min(row, g.q1 - 1));
    const bool idle = row >= g.q1;
    float sum[MS][DIM / 8][4], shift[MS][2], mean[MS][2], factor[MS][2];
    clear(sum);
#pragma unroll
    for (int m = 0; m < MS; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const i64 at = row + 16 * m + 8 * i + l / 4;
            shift[m][i] = at < g.q1 ? LOG2E * call.lse[at * call.lse_row + head] : 0.0f;
            mean[m][i] = at < g.q1 ? call.delta[head * (i64)call.tq + at] : 0.0f;
            factor[m][i] = call.scale;
        }
    const u32 own_rows = owned + warp * 16 * MS * ROW_BYTES + lane_down();
#if KEPT
    u32 queries[STEPS][MS][4], slopes[STEPS][MS][4];
    arrived<0>();
    __syncthreads();
    keep(queries, own_rows);
    keep(slopes, own_rows + OWN * ROW_BYTES);
#else
    const u32 queries = own_rows, slopes = own_rows + OWN * ROW_BYTES;
#endif
    const float unit = call.scale * LOG2E;
    for (u32 stage = 0; from < walk.high; stage ^= 1) {
        arrived<0>();
        __syncthreads();
        const int next = walk.after(from);
        const u32 other = tiles + (stage ^ 1) * 2 * TILE_BYTES;
        if (next < walk.high) {
            load_rows<WALK>(other, call.k, kv_head, next, g.k1);
            load_rows<WALK>(other + TILE_BYTES, call.v, kv_head, next, g.k1);
            commit();
        }
        const u32 keys = tiles + stage * 2 * TILE_BYTES, values = keys + TILE_BYTES;
        if (!idle && sees_all(sight, from, from + WALK)) {
            step<false, WALK / 8>(sum, shift, mean, queries, slopes, keys, values, sight, from, unit);
        } else if (!idle) {
#pragma unroll 1
            for (int i = 0; i < WALK; i += SHORT)
                if (sees_some(sight, from + i, from + i + SHORT))
                    step<true, SHORT / 8>(sum, shift, mean, queries, slopes, keys + i * ROW_BYTES,
                                          values + i * ROW_BYTES, sight, from + i, unit);
        }
        from = next;
    }
    arrived<0>();
    __syncthreads();
    if (!idle) store_rows(call.dq, head, row, g.q1, 0, (char*)memory + warp * 16 * MS * ROW_BYTES, sum, factor);
}
