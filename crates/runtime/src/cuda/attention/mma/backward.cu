// Attention backward on mma.sync, bf16, sm_80 and later: heads of 16 to 256 in steps of 8, any mask and segments.
//
//   delta = sum(do o), p = exp(scale q k^T - lse), ds = p (do v^T - delta)
//   dq = scale ds k, dk = scale ds^T q, dv = p^T do
//
// Defines beside those of call.cuh: SIZE, DIM, WARPS, MS, WALK, KEPT, BLOCKS as in forward.cu, STAGES (tiles in flight)
// and, for keys, SPLIT (1, or 2 where two warps share 16 MS rows and each sums half of the columns).
#define OWN (16 * MS * WARPS / SPLIT)
#define SHORT (WALK < 32 ? WALK : 32)
#define TILE_BYTES (WALK * ROW_BYTES)

// The sum plus the product of eight elements.
__device__ __forceinline__ float dot8(const bf16* a, const bf16* b, float sum) {
    Pack<bf16, 8> x, y;
    x.load(a);
    y.load(b);
#pragma unroll
    for (int i = 0; i < 8; i++) sum = fmaf(f32(x.x[i]), f32(y.x[i]), sum);
    return sum;
}

#if PART == 0

// delta: 8 lanes a row, 32 rows of a head a block. Grid: tokens in 32s, heads.
extern "C" __global__ void __launch_bounds__(256) mma_delta(const __grid_constant__ Call call) {
    const i64 row = (i64)blockIdx.x * 32 + threadIdx.x / 8;
    const int head = blockIdx.y;
    float sum = 0.0f;
    if (row < call.tq) {
        const bf16* o = call.o.at + row * call.o.token + head * call.o.head;
        const bf16* d_o = call.d_o.at + row * call.d_o.token + head * call.d_o.head;
#pragma unroll
        for (int c = threadIdx.x % 8 * 8; c < SIZE; c += 64) {
            sum = dot8(o + c, d_o + c, sum);
        }
    }
    sum = lanes_sum<8>(sum);
    if (row < call.tq && threadIdx.x % 8 == 0) call.delta[head * (i64)call.tq + row] = sum;
}

#elif PART == 1

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
    product_along(dp, slopes, values + lane_along());
#pragma unroll
    for (int m = 0; m < MS; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            Seen seen;
            if (SOME) seen = seen_by(sight, 16 * m + 8 * i + l / 4, from + 2 * (l % 4));
#pragma unroll
            for (int n = 0; n < NS; n++) {
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    float e = exp2_fast(fmaf(unit, p[m][n][2 * i + j], -shift[m][i]));
                    if (SOME && !seen.has(8 * n + j)) e = 0.0f;
                    p[m][n][2 * i + j] = e * (dp[m][n][2 * i + j] - mean[m][i]);
                }
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
    // Stages of keys and values; queries and slopes behind them, or under all but the first where registers keep them.
    const u32 owned = tiles + (KEPT ? 1 : STAGES) * 2 * TILE_BYTES;

    const Walk walk = walk_keys<OWN>(call, g, tile.first);
    load_rows<OWN>(owned, call.q, head, tile.first, g.q1);
    load_rows<OWN>(owned + OWN * ROW_BYTES, call.d_o, head, tile.first, g.q1);
    int from = walk.low;
    if (STAGES == 2 && from < walk.high) {
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
#if !FUSED
            mean[m][i] = at < g.q1 ? call.delta[head * (i64)call.tq + at] : 0.0f;
#else
            // The four lanes of a row take a quarter of it each.
            float sum_here = 0.0f;
            if (at < g.q1) {
                const bf16* o = call.o.at + at * call.o.token + head * call.o.head;
                const bf16* d_o = call.d_o.at + at * call.d_o.token + head * call.d_o.head;
#pragma unroll
                for (int c = l % 4 * 8; c < SIZE; c += 32) sum_here = dot8(o + c, d_o + c, sum_here);
            }
            mean[m][i] = lanes_sum<4>(sum_here);
            if (at < g.q1 && l % 4 == 0) call.delta[head * (i64)call.tq + at] = mean[m][i];
#endif
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
    for (u32 stage = 0; from < walk.high;) {
        const int next = walk.after(from);
#if STAGES == 2
        arrived<0>();
        __syncthreads();
        const u32 other = tiles + (stage ^ 1) * 2 * TILE_BYTES;
        if (next < walk.high) {
            load_rows<WALK>(other, call.k, kv_head, next, g.k1);
            load_rows<WALK>(other + TILE_BYTES, call.v, kv_head, next, g.k1);
            commit();
        }
#else
        __syncthreads();
        load_rows<WALK>(tiles, call.k, kv_head, from, g.k1);
        load_rows<WALK>(tiles + TILE_BYTES, call.v, kv_head, from, g.k1);
        commit();
        arrived<0>();
        __syncthreads();
#endif
        const u32 keys = tiles + stage * 2 * TILE_BYTES, values = keys + TILE_BYTES;
        if (!idle && sees_all(sight, from, from + WALK)) {
            step<false, WALK / 8>(sum, shift, mean, queries, slopes, keys, values, sight, from, unit);
        } else if (!idle) {
#pragma unroll 1
            for (int i = 0; i < WALK; i += SHORT)
                if (from + i < sight.high && from + i + SHORT > sight.low)
                    step<true, SHORT / 8>(sum, shift, mean, queries, slopes, keys + i * ROW_BYTES,
                                          values + i * ROW_BYTES, sight, from + i, unit);
        }
        from = next;
        if (STAGES == 2) stage ^= 1;
    }
    arrived<0>();
    __syncthreads();
    if (!idle) store_rows(call.dq, head, row, g.q1, 0, (char*)memory + warp * 16 * MS * ROW_BYTES, sum, factor);
}

#else

// Columns (queries) a warp scores, columns of the head it sums.
#define NS (WALK / 8)
#define SCORED (NS / SPLIT)
#define SUMMED (DIM / 8 / SPLIT)
#define SHARE_BYTES (2 * WALK + 16)

// Of a tile of queries: from lse and delta of the copy; what each sees where that is not arithmetic.
struct Told {
    float lse[WALK], delta[WALK];
#if MASK == 3
    int4 seen[WALK];
#endif
};

// Queries [low, high) may see one of keys [a, b).
struct Range {
    int low, high;
};
__device__ __forceinline__ Range may_see(const Call& call, const Segment& g, int a, int b) {
    Range r = {g.q0, g.q1};
    const int lead = g.k1 - g.q1;
#if MASK == 1
    r.low = max(r.low, a - lead);
#elif MASK == 2
    r.low = max(r.low, a - lead - call.ahead);
    r.high = min(r.high, b - lead + call.back);
#endif
    return r;
}

// Whether all queries of the tile that are there see all keys [a, b), and whether none sees any. Queries behind the
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
#if KEPT
                                     const u32 (&keys)[STEPS][MS][4], const u32 (&values)[STEPS][MS][4],
#else
                                     u32 keys, u32 values,
#endif
                                     u32 queries, u32 slopes, const Told& told, char* share, int side, int pair,
                                     const Call& call, const Segment& g, int from, int row, float unit) {
    const int l = lane_id();
    float p[MS][SCORED][4], dp[MS][SCORED][4];
    const u32 part = side * (WALK / SPLIT) * ROW_BYTES + lane_along();
    const int stand0 = row + l / 4 - (g.k1 - g.q1) - from - side * (WALK / SPLIT) - 2 * (l % 4);
    product_along(p, keys, queries + part);
    product_along(dp, values, slopes + part);
#pragma unroll
    for (int n = 0; n < SCORED; n++) {
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
                    // The column, counted from the query that stands at the key, decides.
                    const int stand = stand0 + 16 * m + 8 * i;
                    if (SOME && 8 * n + j + (MASK == 2 ? call.ahead : 0) < stand) e = 0.0f;
                    if (SOME && MASK == 2 && 8 * n + j - call.back > stand) e = 0.0f;
#endif
                    p[m][n][2 * i + j] = e;
                    dp[m][n][2 * i + j] = e * (dp[m][n][2 * i + j] - mean);
                }
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
    // Both warps of the pair need all queries' columns: each scored half of them.
#pragma unroll
    for (int m = 0; m < MS; m++)
#pragma unroll
        for (int n = 0; n < SCORED; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                char* at = share + (16 * m + 8 * i + l / 4) * SHARE_BYTES + (side * (WALK / SPLIT) + 8 * n + 2 * (l % 4)) * 2;
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

__device__ __forceinline__ void load_queries(const Call& call, const Segment& g, u32 to, Told* told, int head, int from) {
    load_rows<WALK>(to, call.q, head, from, g.q1);
    load_rows<WALK>(to + TILE_BYTES, call.d_o, head, from, g.q1);
    // Queries that are not there have lse and delta of zero: finite, so that zeros stay zeros.
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
    __shared__ Told told[STAGES];
    const int warp = threadIdx.x / 32, kv_head = blockIdx.y, pair = warp / SPLIT, side = warp % SPLIT;
    const Tile tile = k_tile<OWN>(call, blockIdx.x);
    if (tile.segment < 0) return;
    const Segment g = segment(call, tile.segment);
    if (tile.first >= g.k1) return;
    const int row = tile.first + pair * 16 * MS;
    const u32 tiles = shared_address(memory);
    const u32 owned = tiles + (KEPT ? 1 : STAGES) * 2 * TILE_BYTES;
    char* share = (char*)memory + (STAGES * 2 * TILE_BYTES + 2 * OWN * ROW_BYTES) + pair * 2 * 16 * MS * SHARE_BYTES;

    const Range block = may_see(call, g, tile.first, min(tile.first + OWN, g.k1));
    const int low = block.low, high = block.high;
    const int group = call.heads / call.kv_heads, last_head = kv_head * group + group;
    int head = kv_head * group, from = low;
    load_rows<OWN>(owned, call.k, kv_head, tile.first, g.k1);
    load_rows<OWN>(owned + OWN * ROW_BYTES, call.v, kv_head, tile.first, g.k1);
    if (STAGES == 2 && low < high) load_queries(call, g, tiles, &told[0], head, from);
    commit();
    float of_k[MS][SUMMED][4], of_v[MS][SUMMED][4];
    clear(of_k);
    clear(of_v);
    const u32 own_rows = owned + pair * 16 * MS * ROW_BYTES + lane_down();
#if KEPT
    u32 keys[STEPS][MS][4], values[STEPS][MS][4];
    arrived<0>();
    __syncthreads();
    keep(keys, own_rows);
    keep(values, own_rows + OWN * ROW_BYTES);
#else
    const u32 keys = own_rows, values = own_rows + OWN * ROW_BYTES;
#endif
    const float unit = call.scale * LOG2E;
    for (u32 stage = 0; low < high && head < last_head;) {
        int next = from + WALK, next_head = head;
        if (next >= high) {
            next = low;
            next_head++;
        }
#if STAGES == 2
        arrived<0>();
        __syncthreads();
        if (next_head < last_head) {
            load_queries(call, g, tiles + (stage ^ 1) * 2 * TILE_BYTES, &told[stage ^ 1], next_head, next);
            commit();
        }
#else
        __syncthreads();
        load_queries(call, g, tiles, &told[0], head, from);
        commit();
        arrived<0>();
        __syncthreads();
#endif
        const u32 queries = tiles + stage * 2 * TILE_BYTES, slopes = queries + TILE_BYTES;
        bool all, none;
        judge(call, g, told[stage], from, row, min(row + 16 * MS, g.k1), all, none);
        if (row < g.k1 && !none) {
            if (all)
                step<false>(of_k, of_v, keys, values, queries, slopes, told[stage], share, side, pair, call, g, from, row, unit);
            else
                step<true>(of_k, of_v, keys, values, queries, slopes, told[stage], share, side, pair, call, g, from, row, unit);
        }
        from = next;
        head = next_head;
        if (STAGES == 2) stage ^= 1;
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

#endif
