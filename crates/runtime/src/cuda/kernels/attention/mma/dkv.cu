// Attention backward of keys and values on mma.sync, bf16, sm_80 and later: heads of 16 to 256 in steps of 8, any mask and
// segments, grouped heads.
//
//   p = exp(scale q k^T - lse), ds = p (do v^T - delta), dk = scale ds^T q, dv = p^T do
//
// q, do [Tq, H, SIZE], k, v, dk, dv [Tk, HK, SIZE] in bf16 by token and head strides; lse [Tq, H], delta [H, Tq] in f32. 8 SIZE
// FLOPs per query-key pair. Reads k and v once, q and do once per tile of keys.
//
// A thread block owns OWN keys of one key head and walks the queries of all heads of the group, WALK at a time. Scores are
// computed with keys as rows, so p^T and ds^T are the A operands of the next products in the lanes that hold them. Queries and
// do, with their lse and delta, are double-buffered: cp.async fills one stage of shared memory while the other is processed;
// keys and values lie next to them.
//
// SPLIT 1: a warp holds the sums of 16 MS keys. SPLIT 2: two warps share 16 MS keys; each computes the scores of half of the
// queries and accumulates half of the head's columns, and they exchange p and ds through shared memory. Heads above 128 need
// it: the sums of 16 keys would take all registers of a warp.
//
// Each element of dk and dv belongs to one lane and is summed in the order of heads and queries: deterministic. No spills
// (tested).
//
// Defines: those of call.cuh and mma.cuh, MS, WALK, SPLIT, BLOCKS (thread blocks per multiprocessor, for the launch bounds).

#define OWN (16 * MS * WARPS / SPLIT)
#define TILE_BYTES (WALK * ROW_BYTES)
// Column tiles (of 8 queries) of the scores, and those that one warp computes.
#define NS (WALK / 8)
#define SCORED (NS / SPLIT)
#define SUMMED (DIM / 8 / SPLIT)
#define SHARE_BYTES (2 * WALK + 16)

// Per query of a tile: the statistics of the forward pass, and with MASK 3 the keys it attends to.
struct Told {
    float lse[WALK], delta[WALK];
#if MASK == 3
    int4 seen[WALK];
#endif
};

// Whether all existing queries of the tile attend to all keys [a, b), and whether none attends to any. Queries past the
// segment's end are zeros, which add nothing.
__device__ __forceinline__ void judge(const Call& call, const Segment& g, const Told& told, int from, int a, int b,
                                      bool& all, bool& none) {
    const int to = min(from + WALK, g.q1);
#if MASK == 0
    all = true;
    none = false;
#elif MASK == 3
    all = true;
    none = true;
#pragma unroll
    for (int r = lane_id(); r < WALK; r += 32) {
        const int4 s = told.seen[r];
        if (from + r >= to) continue;
        all = all && ((s.x <= a && b <= s.y) || (s.z <= a && b <= s.w));
        none = none && !(max(s.x, a) < min(s.y, b) || max(s.z, a) < min(s.w, b));
    }
    all = __all_sync(ALL_LANES, all);
    none = __all_sync(ALL_LANES, none);
#else
    const Seen first = sees(call, g, from), last = sees(call, g, to - 1);
    all = last.a <= a && b <= first.b;
    none = last.b <= a || first.a >= b;
#endif
}

template <bool SOME>
__device__ __forceinline__ void step(float (&of_k)[MS][SUMMED][4], float (&of_v)[MS][SUMMED][4],
                                     u32 keys, u32 values, u32 queries, u32 slopes, const Told& told, char* share,
                                     int side, int pair, const Call& call, const Segment& g, int from, int row,
                                     float unit) {
    const int l = lane_id();
    float p[MS][SCORED][4], dp[MS][SCORED][4];
    const u32 part = side * (WALK / SPLIT) * ROW_BYTES + lane_along();
    const int stand0 = row + l / 4 - (g.k1 - g.q1) - from - side * (WALK / SPLIT) - 2 * (l % 4);
    product_along(p, keys, queries + part);
    cap_all(p, unit);
    product_along(dp, values, slopes + part);
#pragma unroll
    for (int n = 0; n < SCORED; n++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int c = side * (WALK / SPLIT) + 8 * n + 2 * (l % 4) + j;
            const float shift = LOG2E * told.lse[c], mean = told.delta[c];
#if MASK == 3
            Seen seen;
            if (SOME) seen = {told.seen[c].x, told.seen[c].y, told.seen[c].z, told.seen[c].w};
#endif
#pragma unroll
            for (int m = 0; m < MS; m++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float e = exp2_fast(fmaf(unit, p[m][n][2 * i + j], -shift));
#if MASK == 3
                    if (SOME && !seen.has(row + 16 * m + 8 * i + l / 4)) e = 0.0f;
#else
                    // The column relative to the query aligned with the key decides.
                    const int stand = stand0 + 16 * m + 8 * i;
                    if (SOME && 8 * n + j + (MASK == 2 ? call.ahead : 0) < stand) e = 0.0f;
                    if (SOME && MASK == 2 && 8 * n + j - call.back > stand) e = 0.0f;
#endif
                    const float ds = e * (dp[m][n][2 * i + j] - mean);
                    dp[m][n][2 * i + j] = through_cap(ds, p[m][n][2 * i + j], unit);
                    p[m][n][2 * i + j] = e;
                }
        }
#if SPLIT == 1
#pragma unroll
    for (int j = 0; j < NS / 2; j++) {
        u32 a[MS][4];
#pragma unroll
        for (int m = 0; m < MS; m++) as_a(a[m], p[m][2 * j], p[m][2 * j + 1]);
        product_down(of_v, a, slopes + lane_down() + j * 16 * ROW_BYTES);
#pragma unroll
        for (int m = 0; m < MS; m++) as_a(a[m], dp[m][2 * j], dp[m][2 * j + 1]);
        product_down(of_k, a, queries + lane_down() + j * 16 * ROW_BYTES);
    }
#else
    // Both warps of the pair need the columns of all queries, and each computed half of them.
#pragma unroll
    for (int m = 0; m < MS; m++)
#pragma unroll
        for (int n = 0; n < SCORED; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int column = side * (WALK / SPLIT) + 8 * n + 2 * (l % 4);
                char* at = share + (16 * m + 8 * i + l / 4) * SHARE_BYTES + 2 * column;
                *reinterpret_cast<u32*>(at) = bf16x2(p[m][n][2 * i], p[m][n][2 * i + 1]);
                *reinterpret_cast<u32*>(at + 16 * MS * SHARE_BYTES) = bf16x2(dp[m][n][2 * i], dp[m][n][2 * i + 1]);
            }
    asm volatile("bar.sync %0, 64;" ::"r"(pair + 1) : "memory");
    const u32 shared = shared_address(share) + lane_down(SHARE_BYTES);
    const u32 column = side * SUMMED * 16 + lane_down();
#pragma unroll
    for (int j = 0; j < NS / 2; j++) {
        u32 a[MS][4];
#pragma unroll
        for (int m = 0; m < MS; m++) ldmatrix(a[m], shared + m * 16 * SHARE_BYTES + j * 32);
        product_down(of_v, a, slopes + column + j * 16 * ROW_BYTES);
#pragma unroll
        for (int m = 0; m < MS; m++) ldmatrix(a[m], shared + (MS + m) * 16 * SHARE_BYTES + j * 32);
        product_down(of_k, a, queries + column + j * 16 * ROW_BYTES);
    }
#endif
}

// Loads WALK queries of a head with their do, statistics and intervals.
__device__ __forceinline__ void load_queries(const Call& call, const Segment& g, u32 to, Told* told, int head,
                                             int from) {
    load_rows<WALK>(to, call.q, head, from, g.q1);
    load_rows<WALK>(to + TILE_BYTES, call.d_o, head, from, g.q1);
    // Missing queries get lse and delta of zero: finite, so that zeros stay zeros.
    for (int r = threadIdx.x; r < WALK; r += THREADS) {
        const bool there = from + r < g.q1;
        const i64 at = there ? from + r : 0;
        copy4(shared_address(&told->lse[r]), call.lse + at * call.lse_row + head, there);
        copy4(shared_address(&told->delta[r]), call.delta + head * (i64)call.tq + at, there);
#if MASK == 3
        int4 s = {0, 0, 0, 0};
        if (there) {
            const Seen seen = sees(call, g, from + r);
            s = {seen.a, seen.b, seen.c, seen.d};
        }
        told->seen[r] = s;
#endif
    }
}

// Grid: key tiles of every segment, key heads. `dk` and `dv` may be null.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) mma_dkv(const __grid_constant__ Call call) {
    __shared__ Told told[2];
    const int warp = threadIdx.x / 32, kv_head = blockIdx.y, pair = warp / SPLIT, side = warp % SPLIT;
    const Tile tile = k_tile<OWN>(call, blockIdx.x);
    if (tile.segment < 0) return;
    const Segment g = segment(call, tile.segment);
    if (tile.first >= g.k1) return;
    const int row = tile.first + pair * 16 * MS;
    const u32 tiles = shared_address(memory);
    // Two pipeline stages of queries and do, then keys and values, then the exchange buffers of warp pairs.
    const u32 owned = tiles + 4 * TILE_BYTES;
    char* share = (char*)memory + 4 * TILE_BYTES + 2 * OWN * ROW_BYTES + pair * 2 * 16 * MS * SHARE_BYTES;

    // The queries that may attend to one of the tile's keys.
    int low = g.q0, high = g.q1;
#if MASK == 1
    low = max(low, tile.first - (g.k1 - g.q1));
#elif MASK == 2
    const int lead = g.k1 - g.q1;
    low = max(low, tile.first - lead - call.ahead);
    high = min(high, min(tile.first + OWN, g.k1) - lead + call.back);
#endif
    const int group = call.heads / call.kv_heads, last_head = kv_head * group + group;
    int head = kv_head * group, from = low;
    load_rows<OWN>(owned, call.k, kv_head, tile.first, g.k1);
    load_rows<OWN>(owned + OWN * ROW_BYTES, call.v, kv_head, tile.first, g.k1);
    if (low < high) load_queries(call, g, tiles, &told[0], head, from);
    commit();
    float of_k[MS][SUMMED][4], of_v[MS][SUMMED][4];
    clear(of_k);
    clear(of_v);
    const u32 own_rows = owned + pair * 16 * MS * ROW_BYTES + lane_down();
    const u32 keys = own_rows, values = own_rows + OWN * ROW_BYTES;
    const float unit = call.scale * LOG2E;
    for (u32 stage = 0; low < high && head < last_head; stage ^= 1) {
        arrived<0>();
        __syncthreads();
        int next = from + WALK, next_head = head;
        if (next >= high) {
            next = low;
            next_head++;
        }
        if (next_head < last_head) {
            load_queries(call, g, tiles + (stage ^ 1) * 2 * TILE_BYTES, &told[stage ^ 1], next_head, next);
            commit();
        }
        const u32 queries = tiles + stage * 2 * TILE_BYTES, slopes = queries + TILE_BYTES;
        bool all, none;
        judge(call, g, told[stage], from, row, min(row + 16 * MS, g.k1), all, none);
        if (row < g.k1 && !none) {
            if (all)
                step<false>(of_k, of_v, keys, values, queries, slopes, told[stage], share, side, pair, call, g, from,
                          row, unit);
            else
                step<true>(of_k, of_v, keys, values, queries, slopes, told[stage], share, side, pair, call, g, from,
                          row, unit);
        }
        from = next;
        head = next_head;
    }
    arrived<0>();
    __syncthreads();
    if (row >= g.k1) return;
    float scales[MS][2], ones[MS][2];
#pragma unroll
    for (int m = 0; m < MS; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            scales[m][i] = call.scale;
            ones[m][i] = 1.0f;
        }
    char* out = (char*)memory + warp * 16 * MS * (16 * SUMMED + 16);
    if (call.dk.at) store_rows(call.dk, kv_head, row, g.k1, side * SUMMED * 8, out, of_k, scales);
    if (call.dv.at) store_rows(call.dv, kv_head, row, g.k1, side * SUMMED * 8, out, of_v, ones);
}
