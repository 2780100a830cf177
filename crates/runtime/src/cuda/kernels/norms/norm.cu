// RMS norm over rows of D, with an optional residual addition before it, and its gradient; with CENTER, layer norm.
//
//   h = x + residual (rounded to its type), c = h, with CENTER h - mean(h)
//   r = 1 / sqrt(mean(c^2) + eps), y = c r g(w) + b, g = 1, w or 1 + w
//   dx = r u - c r^3 mean(c u) (+ dh), u = dy g(w), with CENTER less r mean(u)
//   dw = sum over rows of dy c r, db = sum over rows of dy, and the sum over rows of dx as it is stored; with AGAIN also y
//
// Shapes: x, residual, y, h, dy, dh, dx [rows, D], rows contiguous and at any address (row_* maps them); w, b, dw, db, sum [D].
// Moves each tensor once; a [65536, 768] bf16 norm with residual moves 403 MB.
// A row stays in the registers of LANES threads, VECS vectors of VEC elements each: up to about D = 1024 a warp or part of one,
// so that sums are warp shuffles, with ROWS rows per thread block; wider rows take a block, with one barrier per row, or two
// with CENTER: the variance is computed after the mean was subtracted, so that a large mean costs no precision. With AHEAD a
// row is prefetched before the sums of the previous one are known.
// With QUANTIZE y (forward) or dx (backward), rounded to its type, is also written in 8 bits, as `quantize` does: q row-major,
// t transposed, and the largest magnitude. A block takes TILE rows, whose codes go through shared memory: a thread reads four
// columns of sixteen rows, transposes them in registers and stores 16 bytes of each column. A [65536, 768] bf16 norm then moves
// 403 MB forward, where y was 101 MB and its quantisation another 201, and 503 MB backward. With QUANTIZE_AGAIN the gradient also
// writes y, rounded to its type, in E4M3 along columns: 554 MB, where y's codes along columns are not written forward. Its two
// tiles are too large for shared memory of fixed size.
// With FEW rows the time of a forward norm is latency: gains are loaded with the row, not after its sum, and the weight of the
// product after it is requested ahead (ahead.cuh).
// Deterministic. Sums over rows: a block takes rows blockIdx, + gridDim, ... (grid-stride) and leaves one partial row of each
// in the workspace; `partial_sums` adds partial rows in order. Spills: up to 20 bytes for quantised rows that must be read one
// element at a time (VEC = 1), up to 12 with three sums (HAS_SUM), and up to 4 on a B200 if the largest magnitude is also
// written (HAS_THIRD).

#if QUANTIZE

#if QUANTIZE_AGAIN
#define CODES_AGAIN , e4m3 *again, const float *given_again, i64 again_pitch
#else
#define CODES_AGAIN
#endif
#define CODES , T_Q *q, T_Q *t, const float *given, u32 *third, i64 q_pitch, i64 t_pitch CODES_AGAIN

// Sets of sixteen rows of a tile, and the padding between them that puts readers of different sets on different banks.
static const int PARTS = TILE / 16;
static const int APART = 128 / PARTS;
static const int QUADS_A_WARP = 32 / PARTS;
static const int TILE_BYTES = TILE * D + (PARTS - 1) * APART;
#if QUANTIZE_AGAIN
extern __shared__ __align__(16) u8 tile[];
#else
__shared__ __align__(16) u8 tile[TILE_BYTES];
#endif

__device__ __forceinline__ u8* tile_at(u8* tile, int row, int column) {
    return tile + row * D + row / 16 * APART + column;
}

// Writes the codes of VEC elements to q and to the tile, and updates `top`.
__device__ __forceinline__ void quantized(const Pack<T_X, VEC>& x, float by, int row, int column, T_Q* q, float& top) {
    float y[VEC];
#pragma unroll
    for (int k = 0; k < VEC; k++) {
        float wide = f32(x.x[k]);
        top = fmaxf(top, fabsf(wide));
        y[k] = wide * by;
    }
    Pack<T_Q, VEC> p;
    put_codes(p, y);
#if HAS_Q
    p.store(q + column);
#endif
#if HAS_T
    p.store(reinterpret_cast<T_Q*>(tile_at(tile, row, column)));
#endif
}

// Writes a tile's codes along its columns, from row `first`. Sixteen neighbouring rows of a column are one store of `Access`
// bytes at a time.
template <int Access> __device__ __forceinline__ void turned(u8* tile, u8* t, i64 t_pitch, int first, int rows) {
    const int warps = (D / 4 + QUADS_A_WARP - 1) / QUADS_A_WARP;
    for (int i = threadIdx.x; i < warps * 32; i += THREADS) {
        int part = i / QUADS_A_WARP % PARTS, column = (i / 32 * QUADS_A_WARP + i % QUADS_A_WARP) * 4;
        int from = first + part * 16;
        if (column >= D || from >= rows) continue;
        u32 columns[4][4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u32 w[4], turned_words[4];
#pragma unroll
            for (int r = 0; r < 4; r++) w[r] = *reinterpret_cast<u32*>(tile_at(tile, part * 16 + j * 4 + r, column));
            transpose_codes(w, turned_words);
#pragma unroll
            for (int k = 0; k < 4; k++) columns[k][j] = turned_words[k];
        }
#pragma unroll
        for (int k = 0; k < 4; k++) {
            // The types differ, and their bytes alike.
            Pack<u8, 16> p;
            p.words[0] = make_uint4(columns[k][0], columns[k][1], columns[k][2], columns[k][3]);
            u8* to = t + (column + k) * t_pitch + from;
            if (Access == 16 && from + 16 <= rows) {
                p.store(to);
            } else {
#pragma unroll
                for (int r = 0; r < 16; r++)
                    if (from + r < rows) to[r] = p.x[r];
            }
        }
    }
}

#else
#define CODES
#endif

// y of VEC columns.
__device__ __forceinline__ Pack<T_X, VEC> normed(const Pack<T_X, VEC>& h, float mean, float rstd, const float (&g)[VEC],
                                                 const T_B* bias, int column) {
    float value[VEC];
#pragma unroll
    for (int k = 0; k < VEC; k++) value[k] = (f32(h.x[k]) - mean) * rstd * g[k];
#if BIAS
    Pack<T_B, VEC> b;
    b.load(bias + column);
#pragma unroll
    for (int k = 0; k < VEC; k++) value[k] += f32(b.x[k]);
#endif
    Pack<T_X, VEC> out;
    put(out, value);
    return out;
}

#if !GRAD

#if FEW
#define NEXT , NEXT_WEIGHT
#else
#define NEXT
#endif

extern "C" __global__ void __launch_bounds__(THREADS)
    rms_norm(const T_X* x, const T_X* residual, const T_W* w, const T_B* bias, T_X* y, T_X* h, int rows,
             float eps CODES NEXT) {
    int lane = threadIdx.x % LANES, turn = 0;
#if FEW
    float early[VECS][VEC];
#pragma unroll
    for (int i = 0; i < VECS; i++)
        if (inside((i * LANES + lane) * VEC)) gains(w, (i * LANES + lane) * VEC, early[i]);
#endif
#if QUANTIZE
    float by = 1.0f / *given, top = 0.0f;
#endif
    for (int r = threadIdx.x / LANES; r < TILE; r += ROWS) {
        int row = blockIdx.x * TILE + r;
        if (is_behind(row, rows)) break;
        bool here = is_here(row, rows);
        Pack<T_X, VEC> p[VECS];
        load_row(p, x + row_x(row), here);
#if RESIDUAL
        Pack<T_X, VEC> a[VECS];
        load_row(a, residual + row_residual(row), here);
#pragma unroll
        for (int i = 0; i < VECS; i++) {
            float sum[VEC];
#pragma unroll
            for (int k = 0; k < VEC; k++) sum[k] = f32(p[i].x[k]) + f32(a[i].x[k]);
            put(p[i], sum);
        }
#endif
        float squares = 0.0f, unused = 0.0f, mean = 0.0f;
#if CENTER
#pragma unroll
        for (int i = 0; i < VECS; i++) {
#pragma unroll
            for (int k = 0; k < VEC; k++) mean += f32(p[i].x[k]);
        }
        row_sums(mean, unused, turn);
        turn ^= 1;
        mean /= D;
#endif
#pragma unroll
        for (int i = 0; i < VECS; i++) {
            if (CENTER && !inside((i * LANES + lane) * VEC)) continue;
#pragma unroll
            for (int k = 0; k < VEC; k++) {
                float c = f32(p[i].x[k]) - mean;
                squares = fmaf(c, c, squares);
            }
        }
        row_sums(squares, unused, turn);
        turn ^= 1;
        float rstd = rsqrtf(squares / D + eps);
#pragma unroll
        for (int i = 0; i < VECS; i++) {
            int column = (i * LANES + lane) * VEC;
            if (!inside(column) || !here) continue;
#if HAS_H
            p[i].store(h + row_h(row) + column);
#endif
#if HAS_Y
#if FEW
            const float (&g)[VEC] = early[i];
#else
            float g[VEC];
            gains(w, column, g);
#endif
            Pack<T_X, VEC> out = normed(p[i], mean, rstd, g, bias, column);
#if QUANTIZE
            quantized(out, by, r, column, q + row * q_pitch, top);
#else
            out.store(y + row_y(row) + column);
#endif
#endif
        }
    }
#if QUANTIZE
#if HAS_T
    __syncthreads();
    turned<VEC_T>(tile, reinterpret_cast<u8*>(t), t_pitch, blockIdx.x * TILE, rows);
#endif
#if HAS_THIRD
    raise<THREADS / 32>(top, third);
#endif
#endif
#if FEW
    fetch_ahead(next_weight, next_rows, next_pitch, next_bytes);
#endif
}

#else

// Combines the block's sums over its ROWS rows and writes them as one row of D.
__device__ __forceinline__ void leave(const float (&sums)[VECS][VEC], float* to, int lane) {
#if ROWS == 1
#pragma unroll
    for (int i = 0; i < VECS; i++) {
        int column = (i * LANES + lane) * VEC;
        if (!inside(column)) continue;
#pragma unroll
        for (int k = 0; k < VEC; k++) to[column + k] = sums[i][k];
    }
#else
#if QUANTIZE && QUANTIZE_AGAIN
    // The tiles have been read.
    float (*all)[VECS * LANES * VEC] = reinterpret_cast<float (*)[VECS * LANES * VEC]>(tile);
#else
    __shared__ float all[ROWS][VECS * LANES * VEC];
#endif
    // The previous vector has been read.
    __syncthreads();
#pragma unroll
    for (int i = 0; i < VECS; i++)
#pragma unroll
        for (int k = 0; k < VEC; k++) all[threadIdx.x / LANES][(i * LANES + lane) * VEC + k] = sums[i][k];
    __syncthreads();
    for (int column = threadIdx.x; column < D; column += LANES * ROWS) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < ROWS; i++) sum += all[i][column];
        to[column] = sum;
    }
#endif
}

// The inputs of a row's gradient, in their memory format.
struct Row {
    Pack<T_X, VEC> p[VECS];
    Pack<T_DY, VEC> d[VECS];
#if ADD
    Pack<T_DH, VEC> a[VECS];
#endif

    __device__ __forceinline__ void load(const T_X* h, const T_DY* dy, const T_DH* dh, int row, int rows, int lane) {
        bool here = row < rows;
#pragma unroll
        for (int i = 0; i < VECS; i++) {
            int column = (i * LANES + lane) * VEC;
            if (inside(column) && here) {
                p[i].load(h + row_h(row) + column);
                d[i].load(dy + row_dy(row) + column);
#if ADD
                a[i].load(dh + row_dh(row) + column);
#endif
            } else {
                zero(p[i]);
                zero(d[i]);
#if ADD
                zero(a[i]);
#endif
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    rms_norm_grad(const T_X* h, const T_W* w, const T_DY* dy, const T_DH* dh, T_X* dx, const T_B* bias, T_X* y,
                  float* partial, float* partial_bias, float* partial_dx, int rows, float eps CODES) {
    int lane = threadIdx.x % LANES;
    int turn = 0;
#if QUANTIZE
    float by = 1.0f / *given, top = 0.0f;
#if QUANTIZE_AGAIN
    float by_again = 1.0f / *given_again;
#endif
#endif
    float g[VECS][VEC];
#pragma unroll
    for (int i = 0; i < VECS; i++) {
        int column = (i * LANES + lane) * VEC;
        if (inside(column)) gains(w, column, g[i]);
    }
#if HAS_DW
    float sums[VECS][VEC] = {};
#endif
#if HAS_DB
    float terms[VECS][VEC] = {};
#endif
#if HAS_SUM
    float totals[VECS][VEC] = {};
#endif
#if AHEAD
    Row next;
    next.load(h, dy, dh, blockIdx.x * TILE + threadIdx.x / LANES, rows, lane);
#endif
    for (int first = blockIdx.x * TILE; first < rows; first += gridDim.x * TILE) {
        for (int r = threadIdx.x / LANES; r < TILE; r += ROWS) {
            int row = first + r;
            if (is_behind(row, rows)) break;
            bool here = is_here(row, rows);
#if AHEAD
            Row at = next;
            next.load(h, dy, dh, row + gridDim.x * TILE, rows, lane);
#else
            Row at;
            at.load(h, dy, dh, row, rows, lane);
#endif
            float mean = 0.0f, shift = 0.0f;
#if CENTER
#pragma unroll
            for (int i = 0; i < VECS; i++) {
                int column = (i * LANES + lane) * VEC;
                if (!inside(column)) continue;
#pragma unroll
                for (int k = 0; k < VEC; k++) {
                    mean += f32(at.p[i].x[k]);
                    shift = fmaf(g[i][k], f32(at.d[i].x[k]), shift);
                }
            }
            row_sums(mean, shift, turn);
            turn ^= 1;
            mean /= D;
            shift /= D;
#endif
            float squares = 0.0f, slope = 0.0f;
#pragma unroll
            for (int i = 0; i < VECS; i++) {
                int column = (i * LANES + lane) * VEC;
                if (!inside(column)) continue;
#pragma unroll
                for (int k = 0; k < VEC; k++) {
                    float x = f32(at.p[i].x[k]) - mean;
                    squares = fmaf(x, x, squares);
                    slope = fmaf(x * g[i][k], f32(at.d[i].x[k]), slope);
                }
            }
            row_sums(squares, slope, turn);
            turn ^= 1;
            float rstd = here ? rsqrtf(squares / D + eps) : 0.0f;
            float c = slope / D * rstd * rstd * rstd;
#pragma unroll
            for (int i = 0; i < VECS; i++) {
                int column = (i * LANES + lane) * VEC;
                if (!inside(column)) continue;
#if AGAIN
                if (here) normed(at.p[i], mean, rstd, g[i], bias, column).store(y + row_y(row) + column);
#endif
#if QUANTIZE && QUANTIZE_AGAIN
                Pack<T_X, VEC> made = normed(at.p[i], mean, rstd, g[i], bias, column);
                float scaled[VEC];
#pragma unroll
                for (int k = 0; k < VEC; k++) scaled[k] = f32(made.x[k]) * by_again;
                Pack<e4m3, VEC> p;
                put_codes(p, scaled);
                p.store(reinterpret_cast<e4m3*>(tile_at(tile + TILE_BYTES, r, column)));
#endif
#if HAS_DW
#pragma unroll
                for (int k = 0; k < VEC; k++)
                    sums[i][k] = fmaf(f32(at.d[i].x[k]) * rstd, f32(at.p[i].x[k]) - mean, sums[i][k]);
#endif
#if HAS_DB
#pragma unroll
                for (int k = 0; k < VEC; k++) terms[i][k] += f32(at.d[i].x[k]);
#endif
#if HAS_DX
                float value[VEC];
#pragma unroll
                for (int k = 0; k < VEC; k++) {
                    value[k] = fmaf(rstd, f32(at.d[i].x[k]) * g[i][k] - shift, -(c * (f32(at.p[i].x[k]) - mean)));
#if ADD
                    value[k] += f32(at.a[i].x[k]);
#endif
                }
                Pack<T_X, VEC> out;
                put(out, value);
#if STORES_DX
                if (here) out.store(dx + row_dx(row) + column);
#endif
#if HAS_SUM
#pragma unroll
                for (int k = 0; k < VEC; k++) totals[i][k] += f32(out.x[k]);
#endif
#if QUANTIZE
                quantized(out, by, r, column, q + row * q_pitch, top);
#endif
#endif
            }
        }
#if QUANTIZE
        __syncthreads();
#if HAS_T
        turned<VEC_T>(tile, reinterpret_cast<u8*>(t), t_pitch, first, rows);
#endif
#if QUANTIZE_AGAIN
        turned<VEC_AGAIN>(tile + TILE_BYTES, reinterpret_cast<u8*>(again), again_pitch, first, rows);
#endif
        __syncthreads();
#endif
    }
#if QUANTIZE && HAS_THIRD
    raise<THREADS / 32>(top, third);
#endif
#if HAS_DW
    leave(sums, partial + (i64)blockIdx.x * D, lane);
#endif
#if HAS_DB
    leave(terms, partial_bias + (i64)blockIdx.x * D, lane);
#endif
#if HAS_SUM
    leave(totals, partial_dx + (i64)blockIdx.x * D, lane);
#endif
}

#endif
