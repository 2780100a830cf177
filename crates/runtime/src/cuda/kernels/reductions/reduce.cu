// Reduction along one axis: the sum, the sum of squares or the maximum of n elements.
//
// x is [outer, n, inner], y [outer, inner] by outer_x, STEP, inner_x and outer_y, inner_y; sums of floats are f32, of integers
// i32; the maximum ignores NaN. Moves x once, and partial results of pieces once out and in.
// `along` (inner = 1): a thread block folds `length` neighbouring elements, VEC per thread, four vectors in flight.
// `short_rows`: rows too short for a block take a warp each.
// `across`: a block folds `length` rows over 32 VEC columns; each of its WARPS warps takes every WARPS-th row, four in flight.
// If n is cut into pieces (blockIdx.y), piece i of (o, c) goes to partial[i, o, c] in f32 and `across` folds the pieces. The
// order of folding depends on shapes alone: deterministic.

#if BY == 2
__device__ __forceinline__ T_ACC nothing() { return LOWEST; }
__device__ __forceinline__ T_ACC join(T_ACC a, T_ACC b) { return b > a ? b : a; }
__device__ __forceinline__ T_ACC first(T_ACC x) { return x; }
#else
__device__ __forceinline__ T_ACC nothing() { return (T_ACC)0; }
__device__ __forceinline__ T_ACC join(T_ACC a, T_ACC b) { return a + b; }
__device__ __forceinline__ T_ACC first(T_ACC x) { return BY == 1 ? x * x : x; }
#endif

__device__ __forceinline__ T_ACC wide(T_X x) { return WIDE(x); }

__device__ __forceinline__ T_ACC warp_fold(T_ACC x) {
#pragma unroll
    for (int o = 16; o > 0; o /= 2) x = join(x, __shfl_xor_sync(ALL_LANES, x, o));
    return x;
}

#if ALONG

extern "C" __global__ void __launch_bounds__(256) along(const T_X* x, T_Y* y, i64 n, i64 length, int pieces) {
    i64 from = (i64)blockIdx.y * length, to = from + length < n ? from + length : n;
    x += outer_x(blockIdx.x);
    T_ACC sums[4][VEC];
#pragma unroll
    for (int u = 0; u < 4; u++)
#pragma unroll
        for (int k = 0; k < VEC; k++) sums[u][k] = nothing();
    for (i64 i = from + threadIdx.x * VEC; i < to; i += 4 * 256 * VEC) {
        Pack<T_X, VEC> p[4];
#pragma unroll
        for (int u = 0; u < 4; u++)
            if (i + u * 256 * VEC < to) p[u].load(x + (i + u * 256 * VEC) * STEP);
#pragma unroll
        for (int u = 0; u < 4; u++)
            if (i + u * 256 * VEC < to)
#pragma unroll
                for (int k = 0; k < VEC; k++) sums[u][k] = join(sums[u][k], first(wide(p[u].x[k])));
    }
    T_ACC sum = nothing();
#pragma unroll
    for (int k = 0; k < VEC; k++)
        sum = join(sum, join(join(sums[0][k], sums[1][k]), join(sums[2][k], sums[3][k])));
    sum = warp_fold(sum);
    __shared__ T_ACC warps[8];
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 1; i < 8; i++) sum = join(sum, warps[i]);
        y[pieces > 1 ? (i64)blockIdx.y * gridDim.x + blockIdx.x : outer_y(blockIdx.x)] = NARROW(sum);
    }
}

extern "C" __global__ void __launch_bounds__(256) short_rows(const T_X* x, T_Y* y, i64 n, i64 rows) {
    i64 row = (i64)blockIdx.x * 8 + threadIdx.x / 32;
    if (row >= rows) return;
    x += outer_x(row);
    T_ACC sum = nothing();
#pragma unroll 4
    for (i64 i = threadIdx.x % 32 * VEC; i < n; i += 32 * VEC) {
        Pack<T_X, VEC> p;
        p.load(x + i * STEP);
#pragma unroll
        for (int k = 0; k < VEC; k++) sum = join(sum, first(wide(p.x[k])));
    }
    sum = warp_fold(sum);
    if (threadIdx.x % 32 == 0) y[outer_y(row)] = NARROW(sum);
}

#else

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    across(const T_X* x, T_Y* y, i64 n, i64 length, i64 inner, int column_blocks, int pieces) {
    i64 from = (i64)blockIdx.y * length, to = from + length < n ? from + length : n;
    i64 outer = blockIdx.x / column_blocks;
    i64 column = ((i64)(blockIdx.x % column_blocks) * 32 + threadIdx.x % 32) * VEC;
    int warp = threadIdx.x / 32;
    T_ACC sums[VEC];
#pragma unroll
    for (int k = 0; k < VEC; k++) sums[k] = nothing();
    if (column < inner) {
        x += outer_x(outer) + inner_x(column);
        for (i64 a = from + warp; a < to; a += 4 * WARPS) {
            Pack<T_X, VEC> p[4];
#pragma unroll
            for (int u = 0; u < 4; u++)
                if (a + u * WARPS < to) p[u].load(x + (a + u * WARPS) * STEP);
#pragma unroll
            for (int u = 0; u < 4; u++)
                if (a + u * WARPS < to)
#pragma unroll
                    for (int k = 0; k < VEC; k++) sums[k] = join(sums[k], first(wide(p[u].x[k])));
        }
    }
    __shared__ T_ACC all[WARPS][32 * VEC + 1];
#pragma unroll
    for (int k = 0; k < VEC; k++) all[warp][threadIdx.x % 32 * VEC + k] = sums[k];
    __syncthreads();
    i64 first_column = (i64)(blockIdx.x % column_blocks) * 32 * VEC;
    for (int c = threadIdx.x; c < 32 * VEC && first_column + c < inner; c += 32 * WARPS) {
        T_ACC sum = all[0][c];
#pragma unroll
        for (int i = 1; i < WARPS; i++) sum = join(sum, all[i][c]);
        i64 total = (i64)(gridDim.x / column_blocks) * inner;
        i64 at = pieces > 1 ? blockIdx.y * total + outer * inner + first_column + c
                            : outer_y(outer) + inner_y(first_column + c);
        y[at] = NARROW(sum);
    }
}

#endif
