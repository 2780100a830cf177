// A matrix in an 8-bit type, both ways round.
//
//   q = x / scale rounded to nearest even, t = q transposed, and the largest magnitude of x
//
// x [M, N], q [M, N], t [N, M], rows without gaps at any pitch. Bytes: x once, q and t once; with CURRENT x twice, because
// its scale is known only when all of it was seen (`largest`). A block takes 128 x 128 elements, a thread 8 x 8: eight
// vectors of x in flight, codes of q packed along rows and stored at once. Codes of t are packed along columns and go
// through 16 KiB of shared memory, from which 8 threads store the 128 neighbouring bytes of a column. A word's place
// there is swizzled, so that neither side meets bank conflicts. Magnitudes are joined by a maximum, which has no order:
// deterministic.

#define TILE 128

#if TO == 4
typedef e4m3 T_Q;
#define TOP_EXPONENT 8u
#else
typedef e5m2 T_Q;
#define TOP_EXPONENT 15u
#endif

// Two codes, the first one low.
__device__ __forceinline__ u32 codes(float low, float high) {
    u16 pair;
#if TO == 4
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
#else
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
#endif
    return pair;
}

__device__ __forceinline__ u32 codes(float a, float b, float c, float d) { return codes(a, b) | codes(c, d) << 16; }

// Eight elements of a row as f32, zeros behind its end.
__device__ __forceinline__ void load(const T_X* x, int left, float (&y)[8]) {
#if VEC_X == 8
    if (left >= 8) {
        Pack<T_X, 8> p;
        p.load(x);
#pragma unroll
        for (int k = 0; k < 8; k++) y[k] = f32(p.x[k]);
        return;
    }
#endif
#pragma unroll
    for (int k = 0; k < 8; k++) y[k] = k < left ? f32(x[k]) : 0.0f;
}

// Raises *to to the largest magnitude of a block. Magnitudes are not negative, so their bits have their order; a NaN is
// passed over. Most blocks find that others were larger and leave it alone.
__device__ __forceinline__ void raise(float top, u32* to) {
    __shared__ u32 warps[8];
    u32 bits = __reduce_max_sync(ALL_LANES, __float_as_uint(top));
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = bits;
    __syncthreads();
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 1; i < 8; i++) bits = bits > warps[i] ? bits : warps[i];
        if (bits > *(volatile u32*)to) atomicMax(to, bits);
    }
}

// What the largest magnitude starts from: another tensor's, or nothing.
extern "C" __global__ void start(const float* from, float* to) { *to = from ? *from : 0.0f; }

#if CURRENT

extern "C" __global__ void __launch_bounds__(256) largest(const T_X* x, u32* amax, int m, int n, i64 x_pitch) {
    int across = n > 0 ? (n + TILE - 1) / TILE : 1;
    int column = blockIdx.x % across * TILE + threadIdx.x % 16 * 8;
    int row = blockIdx.x / across * TILE + threadIdx.x / 16 * 8;
    float top = 0.0f;
#pragma unroll
    for (int r = 0; r < 8; r++) {
        float y[8];
        load(x + (row + r) * x_pitch + column, row + r < m ? n - column : 0, y);
#pragma unroll
        for (int k = 0; k < 8; k++) top = fmaxf(top, fabsf(y[k]));
    }
    raise(top, amax);
}

#endif

// With CURRENT `given` is the largest magnitude and `third` gets the scale; otherwise `given` is the scale and `third`,
// where it is wanted, gathers the largest magnitude.
extern "C" __global__ void __launch_bounds__(256)
    quantize(const T_X* x, T_Q* q, T_Q* t, const float* given, float* third, int m, int n, i64 x_pitch,
             i64 q_pitch, i64 t_pitch) {
    int across = n > 0 ? (n + TILE - 1) / TILE : 1;
    int first_column = blockIdx.x % across * TILE, first_row = blockIdx.x / across * TILE;
    int cx = threadIdx.x % 16, ry = threadIdx.x / 16;
    int column = first_column + cx * 8, row = first_row + ry * 8;
    float y[8][8];
#pragma unroll
    for (int r = 0; r < 8; r++)
        load(x + (row + r) * x_pitch + column, row + r < m ? n - column : 0, y[r]);
#if CURRENT
    float scale = fp8_scale(*given, TOP_EXPONENT);
    if (HAS_THIRD && blockIdx.x == 0 && threadIdx.x == 0) *third = scale;
#else
    float scale = *given;
#if HAS_THIRD
    float top = 0.0f;
#pragma unroll
    for (int r = 0; r < 8; r++)
#pragma unroll
        for (int k = 0; k < 8; k++) top = fmaxf(top, fabsf(y[r][k]));
    raise(top, (u32*)third);
#endif
#endif
    float by = 1.0f / scale;
#pragma unroll
    for (int r = 0; r < 8; r++) {
#pragma unroll
        for (int k = 0; k < 8; k++) y[r][k] *= by;
#if HAS_Q
        Pack<T_Q, 8> p;
        p.words[0].x = codes(y[r][0], y[r][1], y[r][2], y[r][3]);
        p.words[0].y = codes(y[r][4], y[r][5], y[r][6], y[r][7]);
        if (row + r < m) {
            T_Q* to = q + (row + r) * q_pitch + column;
            if (VEC_Q == 8 && column + 8 <= n) {
                p.store(to);
            } else {
#pragma unroll
                for (int k = 0; k < 8; k++)
                    if (column + k < n) to[k] = p.x[k];
            }
        }
#endif
    }
#if HAS_T
    __shared__ uint2 turned[TILE][TILE / 8];
#pragma unroll
    for (int k = 0; k < 8; k++) {
        uint2 word;
        word.x = codes(y[0][k], y[1][k], y[2][k], y[3][k]);
        word.y = codes(y[4][k], y[5][k], y[6][k], y[7][k]);
        turned[cx * 8 + k][ry ^ cx ^ (k & 1)] = word;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int c = threadIdx.x / 8 + 32 * i, s = threadIdx.x % 8 * 2, swizzle = (c >> 3) ^ (c & 1);
        uint2 low = turned[c][s ^ swizzle], high = turned[c][(s + 1) ^ swizzle];
        int from = first_row + s * 8;
        if (first_column + c >= n || from >= m) continue;
        Pack<T_Q, 16> p;
        p.words[0] = make_uint4(low.x, low.y, high.x, high.y);
        T_Q* to = t + (first_column + c) * t_pitch + from;
        if (VEC_T == 16 && from + 16 <= m) {
            p.store(to);
        } else {
#pragma unroll
            for (int k = 0; k < 16; k++)
                if (from + k < m) to[k] = p.x[k];
        }
    }
#endif
}
