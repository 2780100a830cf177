// The RMS norm of each head of q or k and its rotation, and their gradient.
//
//   n = x r g(w), r = 1 / sqrt(mean(x^2) + eps), g = 1, w or 1 + w; y = n rotated by its token's angles
//   dn = dy rotated back; dx = r dn g - x r^3 mean(x dn g); dw = sum over tokens and heads of dn x r
//
// x, y, dy, dx [T, HEADS, 2 HALF], heads at any strides inside a fused row; w, dw [2 HALF], or with FIRST two of each: the
// first for the first FIRST heads of a token, the second for the others; positions i32 [axes, T]; table f32 [P, HALF, 2]. Moves
// x in, y out; backward x, dy in, dx out; weight and table come from cache.
// LANES threads hold a head, VEC pairs each (TURNS times): 4 threads for a head of 64 in bf16, so a sum is two shuffles. They
// take CHUNK heads of one token, whose loads are all in flight together and which share cosines and sines, and gains unless
// they are all heads of a token with two weights. Deterministic. dw: a thread block takes its heads in a grid-stride loop and
// leaves one partial row in the workspace; `partial_sums` adds partial rows in order. With FIRST a thread processes heads of
// one weight only, and keeps only their sums: 16 heads of 64 with a gradient of each took 103 us for 65536 tokens on an H200,
// 115 with the sums of both.

static const int HEADS_A_BLOCK = 256 / LANES * CHUNK;

// Whether a head uses the second weight.
__device__ __forceinline__ int nth(u32 head) { return FIRST > 0 && head % HEADS >= FIRST; }
static const int WEIGHTS = FIRST > 0 ? 2 : 1;
// Whether a thread's heads are all heads of a token, and so use both weights.
static const bool BOTH = FIRST > 0 && CHUNK == HEADS;

#if !GRAD

extern "C" __global__ void __launch_bounds__(256)
    qk_norm_rope(const T_X* x, const T_W* w, const int* positions, const T_TABLE* table, T_X* y, u32 heads,
                 int table_rows, float eps) {
    u32 head = blockIdx.x * HEADS_A_BLOCK + threadIdx.x / LANES * CHUNK;
    int lane = threadIdx.x % LANES;
    bool is_there = head < heads;
    int token = (int)(head / HEADS);
    Pairs<T_X> p[CHUNK][TURNS];
    float c[TURNS][VEC], s[TURNS][VEC], r[CHUNK];
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
        int f = (i * LANES + lane) * VEC;
        if (!is_there || !inside(f)) continue;
#pragma unroll
        for (int j = 0; j < CHUNK; j++) p[j][i].load(x + head_x(head + j), f);
        // These loads are in flight together.
        turns_of(positions, table, table_rows, token, f, c[i], s[i]);
    }
#pragma unroll
    for (int j = 0; j < CHUNK; j++) {
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < TURNS; i++) {
            if (!is_there || !inside((i * LANES + lane) * VEC)) continue;
#pragma unroll
            for (int k = 0; k < VEC; k++) {
                float low = p[j][i].low(k), high = p[j][i].high(k);
                squares = fmaf(high, high, fmaf(low, low, squares));
            }
        }
        r[j] = rsqrtf(lanes_sum<LANES>(squares) / (2 * HALF) + eps);
    }
    if (!is_there) return;
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
        int f = (i * LANES + lane) * VEC;
        if (!inside(f)) continue;
        float low_g[VEC], high_g[VEC];
        if (!BOTH) gains(w + nth(head) * 2 * HALF, f, low_g, high_g);
#pragma unroll
        for (int j = 0; j < CHUNK; j++) {
            float a[VEC], b[VEC];
            if (BOTH && (j == 0 || j == FIRST)) gains(w + (j == FIRST) * 2 * HALF, f, low_g, high_g);
#pragma unroll
            for (int k = 0; k < VEC; k++) {
                float low = p[j][i].low(k) * r[j] * low_g[k];
                float high = p[j][i].high(k) * r[j] * high_g[k];
                a[k] = low * c[i][k] - high * s[i][k];
                b[k] = high * c[i][k] + low * s[i][k];
            }
            p[j][i].store(y + head_y(head + j), f, a, b);
        }
    }
}

#else

extern "C" __global__ void __launch_bounds__(256, BLOCKS)
    qk_norm_rope_grad(const T_X* x, const T_W* w, const int* positions, const T_TABLE* table, const T_DY* dy, T_X* dx,
                      float* partial, u32 heads, int table_rows, float eps) {
    int lane = threadIdx.x % LANES;
    float low_g[TURNS][VEC], high_g[TURNS][VEC], low_sums[TURNS][VEC] = {}, high_sums[TURNS][VEC] = {};
    u32 first = blockIdx.x * HEADS_A_BLOCK, step = gridDim.x * HEADS_A_BLOCK, own = threadIdx.x / LANES * CHUNK;
    // A thread has the same heads of each of its tokens: the stride is whole tokens, or there is only one iteration.
    const int second = nth(first + own);
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
        int f = (i * LANES + lane) * VEC;
        if (inside(f)) gains(w + second * 2 * HALF, f, low_g[i], high_g[i]);
    }
    // Every thread iterates as often as the block's first, so that all lanes take part in the shuffles.
    for (; first < heads; first += step) {
        u32 head = first + own;
        bool is_there = head < heads;
        int token = (int)(head / HEADS);
        Pairs<T_X> p[CHUNK][TURNS];
        Pairs<T_DY> d[CHUNK][TURNS];
#pragma unroll
        for (int i = 0; i < TURNS; i++) {
            int f = (i * LANES + lane) * VEC;
            if (!is_there || !inside(f)) continue;
#pragma unroll
            for (int j = 0; j < CHUNK; j++) {
                p[j][i].load(x + head_x(head + j), f);
                d[j][i].load(dy + head_dy(head + j), f);
            }
        }
        float c[TURNS][VEC], s[TURNS][VEC];
#pragma unroll
        for (int i = 0; i < TURNS; i++) {
            int f = (i * LANES + lane) * VEC;
            if (is_there && inside(f)) turns_of(positions, table, table_rows, token, f, c[i], s[i]);
        }
#pragma unroll
        for (int j = 0; j < CHUNK; j++) {
            float squares = 0.0f, slope = 0.0f;
            float low_d[TURNS][VEC], high_d[TURNS][VEC];
#pragma unroll
            for (int i = 0; i < TURNS; i++) {
                if (!is_there || !inside((i * LANES + lane) * VEC)) continue;
#pragma unroll
                for (int k = 0; k < VEC; k++) {
                    float low = p[j][i].low(k), high = p[j][i].high(k);
                    low_d[i][k] = d[j][i].low(k) * c[i][k] + d[j][i].high(k) * s[i][k];
                    high_d[i][k] = d[j][i].high(k) * c[i][k] - d[j][i].low(k) * s[i][k];
                    squares = fmaf(high, high, fmaf(low, low, squares));
                    slope = fmaf(low * low_g[i][k], low_d[i][k], slope);
                    slope = fmaf(high * high_g[i][k], high_d[i][k], slope);
                }
            }
            float r = rsqrtf(lanes_sum<LANES>(squares) / (2 * HALF) + eps);
            float along = lanes_sum<LANES>(slope) / (2 * HALF) * r * r * r;
#pragma unroll
            for (int i = 0; i < TURNS; i++) {
                int f = (i * LANES + lane) * VEC;
                if (!is_there || !inside(f)) continue;
                float a[VEC], b[VEC];
#pragma unroll
                for (int k = 0; k < VEC; k++) {
                    float low = p[j][i].low(k), high = p[j][i].high(k);
                    a[k] = fmaf(r, low_d[i][k] * low_g[i][k], -(along * low));
                    b[k] = fmaf(r, high_d[i][k] * high_g[i][k], -(along * high));
                    low_sums[i][k] = fmaf(low_d[i][k] * r, low, low_sums[i][k]);
                    high_sums[i][k] = fmaf(high_d[i][k] * r, high, high_sums[i][k]);
                }
#if HAS_DX
                p[j][i].store(dx + head_dx(head + j), f, a, b);
#endif
            }
        }
    }
#if HAS_DW
    // Combines the heads of a warp by shuffles, then the eight warps in order.
    __shared__ float all[8][WEIGHTS * 2 * HALF];
#pragma unroll
    for (int n = 0; n < WEIGHTS; n++)
#pragma unroll
        for (int i = 0; i < TURNS; i++) {
            int f = (i * LANES + lane) * VEC;
#pragma unroll
            for (int k = 0; k < VEC; k++) {
                float low = n == second ? low_sums[i][k] : 0.0f, high = n == second ? high_sums[i][k] : 0.0f;
#pragma unroll
                for (int o = LANES; o < 32; o *= 2) {
                    low += __shfl_xor_sync(ALL_LANES, low, o);
                    high += __shfl_xor_sync(ALL_LANES, high, o);
                }
                if (threadIdx.x % 32 < LANES && inside(f)) {
                    all[threadIdx.x / 32][n * 2 * HALF + low_at(f + k)] = low;
                    all[threadIdx.x / 32][n * 2 * HALF + high_at(f + k)] = high;
                }
            }
        }
    __syncthreads();
    for (int column = threadIdx.x; column < WEIGHTS * 2 * HALF; column += 256) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++) sum += all[i][column];
        partial[(i64)blockIdx.x * WEIGHTS * 2 * HALF + column] = sum;
    }
#endif
}

#endif
