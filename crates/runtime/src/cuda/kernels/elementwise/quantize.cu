// Quantises a matrix to an 8-bit type, row-major and transposed.
//
//   q = x / scale rounded to nearest even, t = transpose of q, and the largest magnitude (amax) of x
//
// x [M, N], q [M, N], t [N, M], dense rows at any pitch. Moves x once, q and t once; with CURRENT x twice, because the scale is
// only known once all of x was read (`largest`). SOURCE selects x: 0 a tensor; 1 act(x) up; 2 the gradients of that, d gate =
// dy up act'(x) and d up = dy act(x), as the two halves of the columns of q and t. Computed values are first rounded to the
// type of x, as if they had been stored. A thread block takes COLUMNS columns, a thread 8 of them in 4 rows. Codes of q are
// packed along rows and stored directly; codes of t are packed along columns, four per word, and go through shared memory, from
// which neighbouring threads store 16 bytes of a column each. Words there are swizzled, so that neither side has bank
// conflicts. Magnitudes are reduced by a maximum, whose order does not matter: deterministic.

#define HALVES (SOURCE == 2 ? 2 : 1)
#define LANES (COLUMNS / 8)
#define GROUPS (THREADS / LANES)
#define ROWS (4 * GROUPS)

// Loads eight elements of a row, zeros past its end.
__device__ __forceinline__ void load(Pack<T_X, 8>& p, const T_X* x, int left) {
#if VEC_X == 8
    if (left >= 8) return p.load(x);
#endif
    zero(p);
#pragma unroll
    for (int k = 0; k < 8; k++)
        if (k < left) p.x[k] = x[k];
}

// Computes eight elements of each half of x.
__device__ __forceinline__ void made(Pack<T_X, 8> (&p)[HALVES], const T_X* x, const T_X* up, const T_X* dy, int left) {
    load(p[0], x, left);
#if SOURCE > 0
    Pack<T_X, 8> u;
    load(u, up, left);
    float a[8];
#if SOURCE == 2
    Pack<T_X, 8> d;
    load(d, dy, left);
    float b[8];
#endif
#pragma unroll
    for (int k = 0; k < 8; k++) {
        float value, slope;
        activation(f32(p[0].x[k]), value, slope);
#if SOURCE == 1
        a[k] = value * f32(u.x[k]);
#else
        a[k] = f32(d.x[k]) * f32(u.x[k]) * slope;
        b[k] = f32(d.x[k]) * value;
#endif
    }
    put(p[0], a);
#if SOURCE == 2
    put(p[1], b);
#endif
#endif
}

#if CURRENT

extern "C" __global__ void __launch_bounds__(THREADS) largest(const T_X* x, u32* amax, int m, int n, i64 x_pitch) {
    int across = n > 0 ? (n + COLUMNS - 1) / COLUMNS : 1;
    int column = blockIdx.x % across * COLUMNS + threadIdx.x % LANES * 8;
    int row = blockIdx.x / across * ROWS + threadIdx.x / LANES * 4;
    float top = 0.0f;
#pragma unroll
    for (int r = 0; r < 4; r++) {
        Pack<T_X, 8> p;
        load(p, x + (row + r) * x_pitch + column, row + r < m ? n - column : 0);
#pragma unroll
        for (int k = 0; k < 8; k++) top = fmaxf(top, fabsf(f32(p.x[k])));
    }
    raise<THREADS / 32>(top, amax);
}

#endif

// With CURRENT, `given` is the largest magnitude and `third` receives the scale; otherwise `given` is the scale and `third`, if
// not null, collects the largest magnitude. n is the width of a half.
extern "C" __global__ void __launch_bounds__(THREADS)
    quantize(const T_X* x, const T_X* up, const T_X* dy, T_Q* q, T_Q* t, const float* given, float* third, int m, int n,
             i64 x_pitch, i64 up_pitch, i64 dy_pitch, i64 q_pitch, i64 t_pitch) {
    int across = n > 0 ? (n + COLUMNS - 1) / COLUMNS : 1;
    int first_column = blockIdx.x % across * COLUMNS, first_row = blockIdx.x / across * ROWS;
    int lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
    int column = first_column + lane * 8, row = first_row + group * 4;
    Pack<T_X, 8> kept[4][HALVES];
#pragma unroll
    for (int r = 0; r < 4; r++)
        made(kept[r], x + (row + r) * x_pitch + column, up + (row + r) * up_pitch + column,
             dy + (row + r) * dy_pitch + column, row + r < m ? n - column : 0);
#if CURRENT
    float scale = fp8_scale(*given, TOP_EXPONENT);
    if (HAS_THIRD && blockIdx.x == 0 && threadIdx.x == 0) *third = scale;
#else
    float scale = *given;
#endif
    float by = 1.0f / scale, top = 0.0f;
#if HAS_T
    // 16 bytes of a column are four neighbouring words, whose order the swizzle preserves.
    __shared__ __align__(16) u32 turned[COLUMNS][GROUPS];
#endif
#pragma unroll
    for (int half = 0; half < HALVES; half++, first_column += n, column += n) {
        int left = n * (half + 1) - column;
        float y[4][8];
#pragma unroll
        for (int r = 0; r < 4; r++) {
#pragma unroll
            for (int k = 0; k < 8; k++) {
                float wide = f32(kept[r][half].x[k]);
                top = fmaxf(top, fabsf(wide));
                y[r][k] = wide * by;
            }
#if HAS_Q
            Pack<T_Q, 8> p;
            p.words[0].x = codes(y[r][0], y[r][1], y[r][2], y[r][3]);
            p.words[0].y = codes(y[r][4], y[r][5], y[r][6], y[r][7]);
            if (row + r < m) {
                T_Q* to = q + (row + r) * q_pitch + column;
                if (VEC_Q == 8 && left >= 8) {
                    p.store(to);
                } else {
#pragma unroll
                    for (int k = 0; k < 8; k++)
                        if (k < left) to[k] = p.x[k];
                }
            }
#endif
        }
#if HAS_T
        if (half > 0) __syncthreads();
#pragma unroll
        for (int k = 0; k < 8; k++)
            turned[lane * 8 + k][group ^ lane * 4 % GROUPS] = codes(y[0][k], y[1][k], y[2][k], y[3][k]);
        __syncthreads();
#pragma unroll
        for (int i = threadIdx.x; i < COLUMNS * GROUPS / 4; i += THREADS) {
            int c = i / (GROUPS / 4), part = i % (GROUPS / 4), from = first_row + part * 16;
            if (first_column + c >= n * (half + 1) || from >= m) continue;
            Pack<T_Q, 16> p;
            p.words[0] = *reinterpret_cast<uint4*>(&turned[c][part * 4 ^ c / 8 * 4 % GROUPS]);
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
#if HAS_THIRD && !CURRENT
    raise<THREADS / 32>(top, (u32*)third);
#endif
}
