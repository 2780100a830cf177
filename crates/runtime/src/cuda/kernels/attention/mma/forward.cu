// Attention forward on mma.sync, bf16, sm_80 and later: heads of 16 to 256 in steps of 8, any mask and segments,
// grouped heads.
//
//   s = scale q k^T, p = softmax over the keys a query attends to, o = p v, lse = log of the sum of exponentials
//
// q, o [Tq, H, SIZE], k, v [Tk, HK, SIZE] in bf16 by token and head strides; lse [Tq, H] in f32. Scores are f32 in registers,
// exponentials in base 2, rounded to bf16 for the second product. 4 SIZE FLOPs per query-key pair. Reads q once, k and v once
// per tile of queries.
//
// A thread block owns OWN = 16 MS WARPS queries of one head and walks their keys WALK at a time: 16 MS rows per warp, with o's
// sums in registers. Keys and values are double-buffered: cp.async fills one stage of shared memory while the other is
// processed. The queries lie next to them, or with KEPT stay in registers as fragments and free their shared memory for the
// second stage. Keys that all rows of a warp attend to are not masked; otherwise SHORT keys at a time are.
//
// A row's exponentials are relative not to its running maximum but to a reference at most SLACK below it, in powers of two:
// sums are only rescaled when a score exceeds that, which is rare after the first keys. Together with copying whole tiles
// without predicates this took it from 0.82 ms to 0.72 at 32 x 2048 tokens, 12 heads on 4 of 64, causal, on an H200.
//
// Each element of o belongs to one lane and is summed in the order of the keys: deterministic. No spills (tested).
//
// Defines: those of call.cuh and mma.cuh, MS, WALK, KEPT, BLOCKS (thread blocks per multiprocessor, for the launch bounds).

#define OWN (16 * MS * WARPS)
// Keys processed at once if some row does not attend to all of them.
#define SHORT (WALK < 32 ? WALK : 32)
#define TILE_BYTES (WALK * ROW_BYTES)
#define SLACK 8.0f

template <bool SOME, int NS>
__device__ __forceinline__ void step(float (&sum)[MS][DIM / 8][4], float (&top)[MS][2], float (&limit)[MS][2],
                                     float (&total)[MS][2],
#if KEPT
                                     const u32 (&queries)[STEPS][MS][4],
#else
                                     u32 queries,
#endif
                                     u32 keys, u32 values, const Sight& sight, int from, float unit) {
    const int l = lane_id();
    float s[MS][NS][4];
    product_along(s, queries, keys + lane_along());
    cap_all(s, unit);
    float peak[MS][2];
    bool grown = false;
#pragma unroll
    for (int m = 0; m < MS; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            Seen seen;
            if (SOME) seen = seen_by(sight, 16 * m + 8 * i + l / 4, from + 2 * (l % 4));
            float most = -infinity();
#pragma unroll
            for (int n = 0; n < NS; n++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    if (SOME && !seen.has(8 * n + j)) s[m][n][2 * i + j] = -infinity();
                    most = fmaxf(most, s[m][n][2 * i + j]);
                }
            peak[m][i] = most;
            grown |= most > limit[m][i];
        }
    // The reference of exponentials only grows when they would exceed 2^SLACK, which is rare after a row's first keys.
    if (__any_sync(ALL_LANES, grown)) {
#pragma unroll
        for (int m = 0; m < MS; m++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float most = fmaxf(peak[m][i], __shfl_xor_sync(ALL_LANES, peak[m][i], 1));
                most = unit * fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 2));
                // A row without any key so far has only zeros to rescale.
                const float next = fmaxf(top[m][i], most);
                const float shrink = next > top[m][i] ? exp2_fast(top[m][i] - next) : 1.0f;
                top[m][i] = next;
                limit[m][i] = (next + SLACK) / unit;
                total[m][i] *= shrink;
#pragma unroll
                for (int n = 0; n < DIM / 8; n++) {
                    sum[m][n][2 * i] *= shrink;
                    sum[m][n][2 * i + 1] *= shrink;
                }
            }
    }
#pragma unroll
    for (int m = 0; m < MS; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float base = SOME && top[m][i] == -infinity() ? 0.0f : top[m][i];
            float row = 0.0f;
#pragma unroll
            for (int n = 0; n < NS; n++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    s[m][n][2 * i + j] = exp2_fast(fmaf(unit, s[m][n][2 * i + j], -base));
                    row += s[m][n][2 * i + j];
                }
            total[m][i] += row;
        }
#pragma unroll
    for (int j = 0; j < NS / 2; j++) {
        u32 p[MS][4];
#pragma unroll
        for (int m = 0; m < MS; m++) as_a(p[m], s[m][2 * j], s[m][2 * j + 1]);
        product_down(sum, p, values + j * 16 * ROW_BYTES);
    }
}

// Grid: query tiles of every segment, heads. `o` and `lse` may be null.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) mma_forward(const __grid_constant__ Call call) {
    const int warp = threadIdx.x / 32, l = lane_id(), head = blockIdx.y;
    const Tile tile = q_tile<OWN>(call, MASK == 1 && !Q_RAGGED ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    if (tile.segment < 0) return;
    const Segment g = segment(call, tile.segment);
    if (tile.first >= g.q1) return;
    const int kv_head = head / (call.heads / call.kv_heads), row = tile.first + warp * 16 * MS;
    const u32 tiles = shared_address(memory);
    // Two pipeline stages of keys and values; the queries follow, or share the second stage if registers keep them.
    const u32 owned = tiles + (KEPT ? 2 : 4) * TILE_BYTES;

    const Walk walk = walk_keys<OWN>(call, g, tile.first);
    load_rows<OWN>(owned, call.q, head, tile.first, g.q1);
    int from = walk.low;
    if (from < walk.high) {
        load_rows<WALK>(tiles, call.k, kv_head, from, g.k1);
        load_rows<WALK>(tiles + TILE_BYTES, call.v, kv_head, from, g.k1);
    }
    commit();
    const Sight sight = look<MS>(call, g, min(row, g.q1 - 1));
    const bool idle = row >= g.q1;
    float sum[MS][DIM / 8][4], top[MS][2], limit[MS][2], total[MS][2];
    clear(sum);
#pragma unroll
    for (int m = 0; m < MS; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            top[m][i] = limit[m][i] = -infinity();
            total[m][i] = 0.0f;
        }
    const u32 own_rows = owned + warp * 16 * MS * ROW_BYTES + lane_down();
#if KEPT
    u32 queries[STEPS][MS][4];
    arrived<0>();
    __syncthreads();
    keep(queries, own_rows);
#else
    const u32 queries = own_rows;
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
        const u32 keys = tiles + stage * 2 * TILE_BYTES, values = keys + TILE_BYTES + lane_down();
        if (!idle && sees_all(sight, from, from + WALK)) {
            step<false, WALK / 8>(sum, top, limit, total, queries, keys, values, sight, from, unit);
        } else if (!idle) {
#pragma unroll 1
            for (int i = 0; i < WALK; i += SHORT)
                if (sees_some(sight, from + i, from + i + SHORT))
                    step<true, SHORT / 8>(sum, top, limit, total, queries, keys + i * ROW_BYTES,
                                          values + i * ROW_BYTES, sight, from + i, unit);
        }
        from = next;
    }
    float factor[MS][2];
#pragma unroll
    for (int m = 0; m < MS; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float whole = lanes_sum<4>(total[m][i]);
            factor[m][i] = whole > 0.0f ? 1.0f / whole : 0.0f;
            const int at = row + 16 * m + 8 * i + l / 4;
            if (call.lse && l % 4 == 0 && at < g.q1)
                call.lse[at * call.lse_row + head] =
                    whole > 0.0f ? LN2 * (top[m][i] + log2f(whole)) : -infinity();
        }
    arrived<0>();
    __syncthreads();
    if (call.o.at && !idle)
        store_rows(call.o, head, row, g.q1, 0, (char*)memory + warp * 16 * MS * ROW_BYTES, sum, factor);
}
