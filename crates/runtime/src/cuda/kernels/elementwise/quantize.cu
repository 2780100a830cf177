// Quantises a matrix to an 8-bit type, row-major and transposed.
//
//   q = x / scale rounded to nearest even, t = transpose of q, and the largest magnitude (amax) of x
//
// x [M, N], q [M, N], t [N, M], dense rows at any pitch. Moves x once, q and t once; with CURRENT x twice, because the scale is
// only known once all of x was read (`largest`). SOURCE selects x: 0 a tensor; 1 act(x) up; 2 the gradients of that, d gate =
// dy up act'(x) and d up = dy act(x), as the two halves of the columns of q and t; with AGAIN also act(x) up itself in E4M3,
// transposed only. Computed values are first rounded to the type of x, as if they had been stored. [65536, 2048] in bf16 moves
// 805 MB for SOURCE 1, 1342 for SOURCE 2 and 1476 with AGAIN.
//
// A thread block takes COLUMNS columns, a thread 8 of them in 4 rows, all of which it reads before it computes: with a branch at
// each row, as at the matrix's edges, too few bytes are in flight. Codes are packed along rows, stored to q, and turned four
// rows at a time; codes of t go through shared memory, from which neighbouring threads store 16 bytes of a column each. Words
// there are swizzled, so that neither side has bank conflicts. Magnitudes are reduced by a maximum, whose order does not matter:
// deterministic.

#define INPUTS (SOURCE + 1)
#define HALVES (SOURCE == 2 ? 2 : 1)
// Tiles of codes: the halves of x, then the activation. Those that are transposed are the last of them.
#define TILES (HALVES + AGAIN)
#define FIRST_TURNED (HAS_T ? 0 : HALVES)
#define TURNED (TILES - FIRST_TURNED)
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

// Computes eight elements of each tile from those of the inputs.
__device__ __forceinline__ void make(Pack<T_X, 8> (&made)[TILES], const Pack<T_X, 8> (&in)[INPUTS]) {
#if SOURCE == 0
    made[0] = in[0];
#else
    float y[TILES][8];
#pragma unroll
    for (int k = 0; k < 8; k++) {
        float value, slope, up = f32(in[1].x[k]);
        activation(f32(in[0].x[k]), value, slope);
#if SOURCE == 2
        float dy = f32(in[2].x[k]);
        y[0][k] = dy * up * slope;
        y[1][k] = dy * value;
#endif
#if SOURCE == 1 || AGAIN
        y[TILES - 1][k] = value * up;
#endif
    }
#pragma unroll
    for (int i = 0; i < TILES; i++) put(made[i], y[i]);
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
// not null, collects the largest magnitude. n is the width of a half. `again` receives the activation's codes, by `given_again`.
extern "C" __global__ void __launch_bounds__(THREADS)
    quantize(const T_X* x, const T_X* up, const T_X* dy, T_Q* q, T_Q* t, e4m3* again, const float* given,
             const float* given_again, float* third, int m, int n, i64 x_pitch, i64 up_pitch, i64 dy_pitch, i64 q_pitch,
             i64 t_pitch, i64 again_pitch) {
    int across = n > 0 ? (n + COLUMNS - 1) / COLUMNS : 1;
    int first_column = blockIdx.x % across * COLUMNS, first_row = blockIdx.x / across * ROWS;
    int lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
    int column = first_column + lane * 8, row = first_row + group * 4;
    bool whole = first_row + ROWS <= m && first_column + COLUMNS <= n;

    const T_X* from[3] = {x + row * x_pitch + column, up + row * up_pitch + column, dy + row * dy_pitch + column};
    i64 pitches[3] = {x_pitch, up_pitch, dy_pitch};
    Pack<T_X, 8> in[4][INPUTS];
    if (VEC_X == 8 && whole) {
#pragma unroll
        for (int r = 0; r < 4; r++)
#pragma unroll
            for (int i = 0; i < INPUTS; i++) in[r][i].load(from[i] + r * pitches[i]);
    } else {
#pragma unroll
        for (int r = 0; r < 4; r++)
#pragma unroll
            for (int i = 0; i < INPUTS; i++) load(in[r][i], from[i] + r * pitches[i], row + r < m ? n - column : 0);
    }

#if CURRENT
    float scale = fp8_scale(*given, TOP_EXPONENT);
    if (HAS_THIRD && blockIdx.x == 0 && threadIdx.x == 0) *third = scale;
#else
    float scale = *given;
#endif
    float by = 1.0f / scale, top = 0.0f;
#if AGAIN
    float by_again = 1.0f / *given_again;
#endif
    // Four codes a word.
    u32 words[TILES][2][4];
#pragma unroll
    for (int r = 0; r < 4; r++) {
        Pack<T_X, 8> made[TILES];
        make(made, in[r]);
#pragma unroll
        for (int i = 0; i < HALVES; i++) {
            float y[8];
#pragma unroll
            for (int k = 0; k < 8; k++) {
                float wide = f32(made[i].x[k]);
                top = fmaxf(top, fabsf(wide));
                y[k] = wide * by;
            }
#pragma unroll
            for (int w = 0; w < 2; w++)
                words[i][w][r] = codes_of<T_Q>(y[4 * w], y[4 * w + 1], y[4 * w + 2], y[4 * w + 3]);
        }
#if AGAIN
        float y[8];
#pragma unroll
        for (int k = 0; k < 8; k++) y[k] = f32(made[HALVES].x[k]) * by_again;
#pragma unroll
        for (int w = 0; w < 2; w++)
            words[HALVES][w][r] = codes_of<e4m3>(y[4 * w], y[4 * w + 1], y[4 * w + 2], y[4 * w + 3]);
#endif
    }

#if HAS_Q
#pragma unroll
    for (int i = 0; i < HALVES; i++) {
#pragma unroll
        for (int r = 0; r < 4; r++) {
            Pack<T_Q, 8> p;
            p.words[0] = make_uint2(words[i][0][r], words[i][1][r]);
            T_Q* to = q + (row + r) * q_pitch + i * n + column;
            if (VEC_Q == 8 && (whole || (row + r < m && column + 8 <= n))) {
                p.store(to);
            } else if (row + r < m) {
#pragma unroll
                for (int k = 0; k < 8; k++)
                    if (column + k < n) to[k] = p.x[k];
            }
        }
    }
#endif

#if TURNED > 0
    // 16 bytes of a column are four neighbouring words, whose order the swizzle preserves.
    __shared__ __align__(16) u32 turned[TURNED][COLUMNS][GROUPS];
#pragma unroll
    for (int i = 0; i < TURNED; i++)
#pragma unroll
        for (int w = 0; w < 2; w++) {
            u32 columns[4];
            transpose_codes(words[FIRST_TURNED + i][w], columns);
#pragma unroll
            for (int k = 0; k < 4; k++) turned[i][lane * 8 + w * 4 + k][group ^ lane * 4 % GROUPS] = columns[k];
        }
    __syncthreads();
    const int quads = COLUMNS * GROUPS / 4;
#pragma unroll
    for (int i = 0; i < TURNED * quads / THREADS; i++) {
        // `quads` is a multiple of THREADS: all threads have the same tile.
        int tile = FIRST_TURNED + i * THREADS / quads, at = i * THREADS % quads + threadIdx.x;
        int c = at / (GROUPS / 4), part = at % (GROUPS / 4), to_row = first_row + part * 16;
        if (!whole && (first_column + c >= n || to_row >= m)) continue;
        // The types differ, and their bytes alike.
        Pack<u8, 16> p;
        p.words[0] = *reinterpret_cast<uint4*>(&turned[tile - FIRST_TURNED][c][part * 4 ^ c / 8 * 4 % GROUPS]);
        bool is_again = tile == HALVES;
        u8* to = is_again ? reinterpret_cast<u8*>(again) + (first_column + c) * again_pitch + to_row
                          : reinterpret_cast<u8*>(t) + (tile * n + first_column + c) * t_pitch + to_row;
        if ((is_again ? VEC_AGAIN : VEC_T) == 16 && (whole || to_row + 16 <= m)) {
            p.store(to);
        } else {
#pragma unroll
            for (int k = 0; k < 16; k++)
                if (to_row + k < m) to[k] = p.x[k];
        }
    }
#endif
#if HAS_THIRD && !CURRENT
    raise<THREADS / 32>(top, (u32*)third);
#endif
}
