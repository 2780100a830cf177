// Attention for every shape: f32 and bf16, head sizes 1 to 256, any mask and segments, grouped heads.
//
//   scores = scale q k^T, p = softmax over the keys a query attends to, o = p v, lse = log of the sum of exponentials
//   delta = sum(do o) - dlse, ds = p (do v^T - delta), dq = scale ds k, dk = scale ds^T q, dv = p^T do
//   with CAP, scores s are cap tanh(s / cap), and ds is multiplied by 1 - (s / cap)^2
//
// q, o, do, dq [Tq, H, SIZE], k, v, dk, dv [Tk, HK, SIZE] in T_X by token and head strides; lse [Tq, H] and delta [H, Tq] in
// f32: all in `Call`. Scores stay on chip. Arithmetic is f32 on the FMA units, from tiles in shared memory.
//
// A thread block of 128 threads owns a tile of rows of one head: queries in `flash_forward` and `flash_dq`; in `flash_dkv` keys
// of one key head, for which it loops over all query heads of the group. It loops over the other side tile by tile. Thread (y,
// x) of 16 x 8 holds rows y, y + 16, .. and columns x, x + 8, ..; the 8 threads of a row are neighbouring lanes. Rows in shared
// memory have odd pitch, so accesses down a column have no bank conflicts.
// The launch bounds leave registers for two thread blocks per multiprocessor; without them the assembler uses fewer and spills.
// Each output element belongs to one thread and is summed in a fixed order: deterministic.
//
// Defines: those of call.cuh; T_X, SIZE, GRAD (direction), OWN and WALK (rows of the owned tile and of the tiles looped over).

#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f
#define THREADS 128
#define Y 16
#define X 8
#define WIDE ((SIZE + X - 1) / X)
#define PITCH (WIDE * X + 1)
#define RM (OWN / Y)
#define CN (WALK / X)

extern __shared__ float memory[];

// First element of a head.
__device__ __forceinline__ T_X* of(const Rows& rows, int head) {
    return reinterpret_cast<T_X*>(rows.at) + head * rows.head;
}

// Loads ROWS rows of a head from row `first`, widened to f32; zeros past `end` and SIZE.
template <int ROWS>
__device__ __forceinline__ void stage(float* to, const T_X* from, i64 token, int first, int end) {
    for (int i = threadIdx.x; i < ROWS * WIDE * X; i += THREADS) {
        const int r = i / (WIDE * X), c = i % (WIDE * X);
        const bool there = first + r < end && c < SIZE;
        to[r * PITCH + c] = there ? f32(from[(first + r) * token + c]) : 0.0f;
    }
}

// out[i][j] = dot product of row y + 16 i of a and row x + 8 j of b.
__device__ __forceinline__ void dots(float (&out)[RM][CN], const float* a, const float* b, int y, int x) {
#pragma unroll
    for (int i = 0; i < RM; i++)
#pragma unroll
        for (int j = 0; j < CN; j++) out[i][j] = 0.0f;
#pragma unroll 4
    for (int e = 0; e < WIDE * X; e++) {
        float left[RM], right[CN];
#pragma unroll
        for (int i = 0; i < RM; i++) left[i] = a[(y + Y * i) * PITCH + e];
#pragma unroll
        for (int j = 0; j < CN; j++) right[j] = b[(x + X * j) * PITCH + e];
#pragma unroll
        for (int i = 0; i < RM; i++)
#pragma unroll
            for (int j = 0; j < CN; j++) out[i][j] = fmaf(left[i], right[j], out[i][j]);
    }
}

// sum[i][j] += weights [OWN, WALK] times tile [WALK, SIZE], at rows y + 16 i and columns x + 8 j.
__device__ __forceinline__ void add_rows(float (&sum)[RM][WIDE], const float* weights, const float* tile, int y,
                                         int x) {
#pragma unroll 2
    for (int c = 0; c < WALK; c++) {
        float w[RM];
#pragma unroll
        for (int i = 0; i < RM; i++) w[i] = weights[(y + Y * i) * (WALK + 1) + c];
#pragma unroll
        for (int j = 0; j < WIDE; j++) {
            const float element = tile[c * PITCH + x + X * j];
#pragma unroll
            for (int i = 0; i < RM; i++) sum[i][j] = fmaf(w[i], element, sum[i][j]);
        }
    }
}

// Soft-caps all products, if CAP is defined.
__device__ __forceinline__ void cap_all(float (&products)[RM][CN], float unit) {
#ifdef CAP
#pragma unroll
    for (int i = 0; i < RM; i++)
#pragma unroll
        for (int j = 0; j < CN; j++) products[i][j] = capped(products[i][j], unit);
#endif
}

__device__ __forceinline__ void clear_sum(float (&sum)[RM][WIDE]) {
#pragma unroll
    for (int i = 0; i < RM; i++)
#pragma unroll
        for (int j = 0; j < WIDE; j++) sum[i][j] = 0.0f;
}

// Writes rows first + y + 16 i below `end`, each scaled by its factor.
__device__ __forceinline__ void write(T_X* to, i64 token, int first, int end, const float (&sum)[RM][WIDE],
                                      const float (&factor)[RM], int y, int x) {
#pragma unroll
    for (int i = 0; i < RM; i++) {
        const int row = first + y + Y * i;
        if (row >= end) continue;
#pragma unroll
        for (int j = 0; j < WIDE; j++)
            if (x + X * j < SIZE) to[row * token + x + X * j] = As<T_X>::of(factor[i] * sum[i][j]);
    }
}

// Finds the keys that each row of the block's query tile attends to, and the range that covers them all. Contains a barrier.
__device__ __forceinline__ void look(Seen* seen, int first, const Segment& g, const Call& call, int* low, int* high) {
    __shared__ int ends[2];
    if (threadIdx.x == 0) {
        ends[0] = 0x7fffffff;
        ends[1] = 0;
    }
    __syncthreads();
    if (threadIdx.x < OWN) {
        const Seen s = sees(call, g, first + (int)threadIdx.x);
        seen[threadIdx.x] = s;
        if (s.a < s.b) {
            atomicMin(&ends[0], s.a);
            atomicMax(&ends[1], s.b);
        }
        if (s.c < s.d) {
            atomicMin(&ends[0], s.c);
            atomicMax(&ends[1], s.d);
        }
    }
    __syncthreads();
    *low = ends[0];
    *high = ends[1];
}

// Whether any row of the block attends to one of the keys [from, from + WALK). Contains a barrier.
__device__ __forceinline__ bool any_sees(const Seen* seen, int from) {
#if MASK == 3
    bool found = false;
    if (threadIdx.x < OWN) {
        const Seen s = seen[threadIdx.x];
        found = max(s.a, from) < min(s.b, from + WALK) || max(s.c, from) < min(s.d, from + WALK);
    }
    return __syncthreads_or(found);
#else
    __syncthreads();
    return true;
#endif
}

#if !GRAD

// Grid: query tiles, heads. `o` and `lse` may be null.
extern "C" __global__ void __launch_bounds__(THREADS, 2) flash_forward(const __grid_constant__ Call call) {
    __shared__ Seen seen[OWN];
    float* queries = memory;
    float* keys = queries + OWN * PITCH;
    float* weights = keys + WALK * PITCH;
    const int y = threadIdx.x / X, x = threadIdx.x % X, head = blockIdx.y;
    const Tile tile = q_tile<OWN>(call, blockIdx.x);
    if (tile.segment < 0) return;
    const Segment g = segment(call, tile.segment);
    const int first = tile.first, kv_head = head / (call.heads / call.kv_heads);
    stage<OWN>(queries, of(call.q, head), call.q.token, first, g.q1);
    const T_X* k = of(call.k, kv_head);
    const T_X* v = of(call.v, kv_head);

    float top[RM], total[RM], sum[RM][WIDE];
    clear_sum(sum);
#pragma unroll
    for (int i = 0; i < RM; i++) {
        top[i] = -infinity();
        total[i] = 0.0f;
    }
    int low, high;
    look(seen, first, g, call, &low, &high);
    const float unit = call.scale * LOG2E;
    for (int from = low; from < high; from += WALK) {
        if (!any_sees(seen, from)) continue;
        stage<WALK>(keys, k, call.k.token, from, g.k1);
        __syncthreads();
        float p[RM][CN];
        dots(p, queries, keys, y, x);
        cap_all(p, unit);
#pragma unroll
        for (int i = 0; i < RM; i++) {
            const Seen here = seen[y + Y * i];
            float peak = -infinity();
#pragma unroll
            for (int j = 0; j < CN; j++) {
                p[i][j] = here.has(from + x + X * j) ? unit * p[i][j] : -infinity();
                peak = fmaxf(peak, p[i][j]);
            }
#pragma unroll
            for (int lane = X / 2; lane > 0; lane /= 2) peak = fmaxf(peak, __shfl_xor_sync(ALL_LANES, peak, lane));
            peak = fmaxf(peak, top[i]);
            // A row without any key so far has only zeros to rescale and to add.
            const float base = peak == -infinity() ? 0.0f : peak;
            const float shrink = exp2f(top[i] - base);
            top[i] = peak;
            total[i] *= shrink;
#pragma unroll
            for (int j = 0; j < WIDE; j++) sum[i][j] *= shrink;
#pragma unroll
            for (int j = 0; j < CN; j++) {
                const float e = exp2f(p[i][j] - base);
                total[i] += e;
                weights[(y + Y * i) * (WALK + 1) + x + X * j] = e;
            }
        }
        __syncthreads();
        stage<WALK>(keys, v, call.v.token, from, g.k1);
        __syncthreads();
        add_rows(sum, weights, keys, y, x);
    }
    float factor[RM];
#pragma unroll
    for (int i = 0; i < RM; i++) {
        const float whole = lanes_sum<X>(total[i]);
        factor[i] = whole > 0.0f ? 1.0f / whole : 0.0f;
        const int row = first + y + Y * i;
        if (call.lse && x == 0 && row < g.q1)
            call.lse[row * call.lse_row + head] = whole > 0.0f ? LN2 * (top[i] + log2f(whole)) : -infinity();
    }
    if (call.o.at) write(of(call.o, head), call.o.token, first, g.q1, sum, factor, y, x);
}

#else

// delta = sum(do o) - dlse, one warp per token and head; `d_lse` may be null. Grid: groups of four (token, head) pairs.
extern "C" __global__ void __launch_bounds__(THREADS)
flash_delta(const __grid_constant__ Call call, const float* d_lse, i64 d_lse_row) {
    const i64 row = (i64)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    if (row >= (i64)call.tq * call.heads) return;
    const i64 token = row / call.heads;
    const int head = (int)(row % call.heads);
    const T_X* o = of(call.o, head) + token * call.o.token;
    const T_X* d_o = of(call.d_o, head) + token * call.d_o.token;
    float sum = 0.0f;
    for (int e = threadIdx.x % 32; e < SIZE; e += 32) sum = fmaf(f32(o[e]), f32(d_o[e]), sum);
    sum = lanes_sum<32>(sum);
    if (threadIdx.x % 32 == 0)
        call.delta[head * (i64)call.tq + token] = sum - (d_lse ? d_lse[token * d_lse_row + head] : 0.0f);
}

// lse in base-2 units. Rows without any key get probability 0; their lse may be any finite number.
__device__ __forceinline__ float log2_sum(float lse) { return lse == -infinity() ? 0.0f : LOG2E * lse; }

// Grid: query tiles, heads.
extern "C" __global__ void __launch_bounds__(THREADS, 2) flash_dq(const __grid_constant__ Call call) {
    __shared__ Seen seen[OWN];
    float* queries = memory;
    float* slopes = queries + OWN * PITCH;
    float* keys = slopes + OWN * PITCH;
    float* values = keys + WALK * PITCH;
    float* weights = values + WALK * PITCH;
    const int y = threadIdx.x / X, x = threadIdx.x % X, head = blockIdx.y;
    const Tile tile = q_tile<OWN>(call, blockIdx.x);
    if (tile.segment < 0) return;
    const Segment g = segment(call, tile.segment);
    const int first = tile.first, kv_head = head / (call.heads / call.kv_heads);
    stage<OWN>(queries, of(call.q, head), call.q.token, first, g.q1);
    stage<OWN>(slopes, of(call.d_o, head), call.d_o.token, first, g.q1);
    const T_X* k = of(call.k, kv_head);
    const T_X* v = of(call.v, kv_head);

    float shift[RM], mean[RM], factor[RM], sum[RM][WIDE];
    clear_sum(sum);
#pragma unroll
    for (int i = 0; i < RM; i++) {
        const i64 row = first + y + Y * i;
        shift[i] = row < g.q1 ? log2_sum(call.lse[row * call.lse_row + head]) : 0.0f;
        mean[i] = row < g.q1 ? call.delta[head * (i64)call.tq + row] : 0.0f;
        factor[i] = call.scale;
    }
    int low, high;
    look(seen, first, g, call, &low, &high);
    const float unit = call.scale * LOG2E;
    for (int from = low; from < high; from += WALK) {
        if (!any_sees(seen, from)) continue;
        stage<WALK>(keys, k, call.k.token, from, g.k1);
        stage<WALK>(values, v, call.v.token, from, g.k1);
        __syncthreads();
        float p[RM][CN], dp[RM][CN];
        dots(p, queries, keys, y, x);
        cap_all(p, unit);
        dots(dp, slopes, values, y, x);
#pragma unroll
        for (int i = 0; i < RM; i++) {
            const Seen here = seen[y + Y * i];
#pragma unroll
            for (int j = 0; j < CN; j++) {
                const bool is_seen = here.has(from + x + X * j);
                const float e = is_seen ? exp2f(fmaf(unit, p[i][j], -shift[i])) : 0.0f;
                const float ds = through_cap(e * (dp[i][j] - mean[i]), p[i][j], unit);
                weights[(y + Y * i) * (WALK + 1) + x + X * j] = ds;
            }
        }
        // The weights of a row are written and read by the same lanes.
        __syncwarp();
        add_rows(sum, weights, keys, y, x);
    }
    write(of(call.dq, head), call.dq.token, first, g.q1, sum, factor, y, x);
}

// Grid: key tiles, key heads. `dk` and `dv` may be null.
extern "C" __global__ void __launch_bounds__(THREADS, 2) flash_dkv(const __grid_constant__ Call call) {
    __shared__ float shift[WALK], mean[WALK];
    __shared__ Seen seen[WALK];
    float* keys = memory;
    float* values = keys + OWN * PITCH;
    float* queries = values + OWN * PITCH;
    float* slopes = queries + WALK * PITCH;
    float* weights = slopes + WALK * PITCH;
    float* changes = weights + OWN * (WALK + 1);
    const int y = threadIdx.x / X, x = threadIdx.x % X, kv_head = blockIdx.y;
    const Tile tile = k_tile<OWN>(call, blockIdx.x);
    if (tile.segment < 0) return;
    const Segment g = segment(call, tile.segment);
    const int first = tile.first, group = call.heads / call.kv_heads;
    stage<OWN>(keys, of(call.k, kv_head), call.k.token, first, g.k1);
    stage<OWN>(values, of(call.v, kv_head), call.v.token, first, g.k1);

    // The queries that may attend to one of the tile's keys.
    int low = g.q0, high = g.q1;
#if MASK == 1
    low = max(low, first - (g.k1 - g.q1));
#elif MASK == 2
    const int lead = g.k1 - g.q1;
    low = max(low, first - lead - call.ahead);
    high = min(high, min(first + OWN, g.k1) - lead + call.back);
#endif
    float of_k[RM][WIDE], of_v[RM][WIDE], scales[RM], ones[RM];
    clear_sum(of_k);
    clear_sum(of_v);
#pragma unroll
    for (int i = 0; i < RM; i++) {
        scales[i] = call.scale;
        ones[i] = 1.0f;
    }
    const float unit = call.scale * LOG2E;
    for (int head = kv_head * group; head < (kv_head + 1) * group; head++) {
        for (int from = low; from < high; from += WALK) {
            __syncthreads();
            stage<WALK>(queries, of(call.q, head), call.q.token, from, g.q1);
            stage<WALK>(slopes, of(call.d_o, head), call.d_o.token, from, g.q1);
            if (threadIdx.x < WALK) {
                const i64 row = from + (int)threadIdx.x;
                seen[threadIdx.x] = sees(call, g, (int)row);
                shift[threadIdx.x] = row < g.q1 ? log2_sum(call.lse[row * call.lse_row + head]) : 0.0f;
                mean[threadIdx.x] = row < g.q1 ? call.delta[head * (i64)call.tq + row] : 0.0f;
            }
            __syncthreads();
            float p[RM][CN], dp[RM][CN];
            dots(p, keys, queries, y, x);
            cap_all(p, unit);
            dots(dp, values, slopes, y, x);
#pragma unroll
            for (int i = 0; i < RM; i++)
#pragma unroll
                for (int j = 0; j < CN; j++) {
                    const int r = y + Y * i, c = x + X * j;
                    const bool is_seen = first + r < g.k1 && seen[c].has(first + r);
                    const float e = is_seen ? exp2f(fmaf(unit, p[i][j], -shift[c])) : 0.0f;
                    weights[r * (WALK + 1) + c] = e;
                    changes[r * (WALK + 1) + c] = through_cap(e * (dp[i][j] - mean[c]), p[i][j], unit);
                }
            // The weights of a row are written and read by the same lanes.
            __syncwarp();
            add_rows(of_v, weights, slopes, y, x);
            add_rows(of_k, changes, queries, y, x);
        }
    }
    if (call.dk.at) write(of(call.dk, kv_head), call.dk.token, first, g.k1, of_k, scales, y, x);
    if (call.dv.at) write(of(call.dv, kv_head), call.dv.token, first, g.k1, of_v, ones, y, x);
}

#endif
