// RMS norm over rows of D, with the residual addition in front, and its gradient; with CENTER, layer norm.
//
//   h = x + residual (rounded to its type), c = h, with CENTER h - mean(h)
//   r = 1 / sqrt(mean(c^2) + eps), y = c r g(w) + b, g = 1, w or 1 + w
//   dx = r u - c r^3 mean(c u) (+ dh), u = dy g(w), with CENTER less r mean(u)
//   dw = sum over rows of dy c r, db = sum over rows of dy
//
// Shapes: x, residual, y, h, dy, dh, dx [rows, D], elements of a row side by side, rows anywhere (row_* gives where);
// w, b, dw, db [D]. Bytes: each tensor once; a [65536, 768] bf16 norm with residual moves 403 MB.
// A row stays in the registers of LANES threads, VECS vectors of VEC elements each: one warp up to about D = 1024, so
// sums are shuffles, and ROWS such warps a block; wider rows take a block, and one barrier a row, two with CENTER: the
// variance is taken of what the mean leaves, so that a large mean costs no digits.
// Deterministic. dw, db: a block walks rows blockIdx, + gridDim, ... and leaves one partial row of each in the workspace;
// partial rows are added in order by `reduce`.

static const int WARPS = LANES / 32;

// Two sums over the threads of a row. With several warps, `turn` says which half of the buffer to use, so that one
// barrier a call is enough: a warp that writes a half again has passed the barrier of the other, and so have those that
// read it.
__device__ __forceinline__ void row_sums(float& a, float& b, int turn) {
    a = lanes_sum<32>(a);
    b = lanes_sum<32>(b);
    if (WARPS > 1) {
        __shared__ float parts[2][2][WARPS];
        int warp = threadIdx.x / 32;
        if (threadIdx.x % 32 == 0) {
            parts[turn][0][warp] = a;
            parts[turn][1][warp] = b;
        }
        __syncthreads();
        a = b = 0.0f;
#pragma unroll
        for (int i = 0; i < WARPS; i++) {
            a += parts[turn][0][i];
            b += parts[turn][1][i];
        }
    }
}

__device__ __forceinline__ bool inside(int column) { return D % (LANES * VEC) == 0 || column < D; }

// g of VEC columns.
__device__ __forceinline__ void gains(const T_W* w, int column, float (&g)[VEC]) {
#if WEIGHT
    Pack<T_W, VEC> p;
    p.load(w + column);
#pragma unroll
    for (int k = 0; k < VEC; k++) g[k] = f32(p.x[k]) + (WEIGHT == 2 ? 1.0f : 0.0f);
#else
#pragma unroll
    for (int k = 0; k < VEC; k++) g[k] = 1.0f;
#endif
}

#if !GRAD

extern "C" __global__ void __launch_bounds__(LANES * ROWS)
    rms_norm(const T_X* x, const T_X* residual, const T_W* w, const T_B* bias, T_X* y, T_X* h, int rows, float eps) {
    int lane = threadIdx.x % LANES;
    int row = blockIdx.x * ROWS + threadIdx.x / LANES;
    if (row >= rows) return;
    x += row_x(row);
    Pack<T_X, VEC> p[VECS];
#pragma unroll
    for (int i = 0; i < VECS; i++) {
        int column = (i * LANES + lane) * VEC;
        if (inside(column)) p[i].load(x + column);
        else zero(p[i]);
    }
#if RESIDUAL
    residual += row_residual(row);
    Pack<T_X, VEC> q[VECS];
#pragma unroll
    for (int i = 0; i < VECS; i++) {
        int column = (i * LANES + lane) * VEC;
        if (inside(column)) q[i].load(residual + column);
        else zero(q[i]);
    }
#pragma unroll
    for (int i = 0; i < VECS; i++) {
        float sum[VEC];
#pragma unroll
        for (int k = 0; k < VEC; k++) sum[k] = f32(p[i].x[k]) + f32(q[i].x[k]);
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
    row_sums(mean, unused, 1);
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
    row_sums(squares, unused, 0);
    float r = rsqrtf(squares / D + eps);
#pragma unroll
    for (int i = 0; i < VECS; i++) {
        int column = (i * LANES + lane) * VEC;
        if (!inside(column)) continue;
#if HAS_H
        p[i].store(h + row_h(row) + column);
#endif
#if HAS_Y
        float g[VEC], value[VEC];
        gains(w, column, g);
#pragma unroll
        for (int k = 0; k < VEC; k++) value[k] = (f32(p[i].x[k]) - mean) * r * g[k];
#if BIAS
        Pack<T_B, VEC> b;
        b.load(bias + column);
#pragma unroll
        for (int k = 0; k < VEC; k++) value[k] += f32(b.x[k]);
#endif
        Pack<T_X, VEC> out;
        put(out, value);
        out.store(y + row_y(row) + column);
#endif
    }
}

#else

// The block's sums, over its ROWS rows at a time, as one row of D.
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
    __shared__ float all[ROWS][VECS * LANES * VEC];
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

extern "C" __global__ void __launch_bounds__(LANES * ROWS, BLOCKS)
    rms_norm_grad(const T_X* h, const T_W* w, const T_DY* dy, const T_DH* dh, T_X* dx, float* partial,
                  float* partial_bias, int rows, float eps) {
    int lane = threadIdx.x % LANES;
    int turn = 0;
    float g[VECS][VEC];
#pragma unroll
    for (int i = 0; i < VECS; i++) {
        int column = (i * LANES + lane) * VEC;
        if (inside(column)) gains(w, column, g[i]);
    }
#if HAS_DW
    float sums[VECS][VEC];
#pragma unroll
    for (int i = 0; i < VECS; i++)
#pragma unroll
        for (int k = 0; k < VEC; k++) sums[i][k] = 0.0f;
#endif
#if HAS_DB
    float terms[VECS][VEC];
#pragma unroll
    for (int i = 0; i < VECS; i++)
#pragma unroll
        for (int k = 0; k < VEC; k++) terms[i][k] = 0.0f;
#endif
    for (int row = blockIdx.x * ROWS + threadIdx.x / LANES; row < rows; row += gridDim.x * ROWS) {
        const T_X* from_h = h + row_h(row);
        const T_DY* from_dy = dy + row_dy(row);
        Pack<T_X, VEC> p[VECS];
        Pack<T_DY, VEC> d[VECS];
#pragma unroll
        for (int i = 0; i < VECS; i++) {
            int column = (i * LANES + lane) * VEC;
            if (inside(column)) {
                p[i].load(from_h + column);
                d[i].load(from_dy + column);
            } else {
                zero(p[i]);
                zero(d[i]);
            }
        }
#if ADD
        const T_DH* from_dh = dh + row_dh(row);
        Pack<T_DH, VEC> a[VECS];
#pragma unroll
        for (int i = 0; i < VECS; i++) {
            int column = (i * LANES + lane) * VEC;
            if (inside(column)) a[i].load(from_dh + column);
        }
#endif
        float mean = 0.0f, shift = 0.0f;
#if CENTER
#pragma unroll
        for (int i = 0; i < VECS; i++) {
            int column = (i * LANES + lane) * VEC;
            if (!inside(column)) continue;
#pragma unroll
            for (int k = 0; k < VEC; k++) {
                mean += f32(p[i].x[k]);
                shift = fmaf(g[i][k], f32(d[i].x[k]), shift);
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
                float x = f32(p[i].x[k]) - mean;
                squares = fmaf(x, x, squares);
                slope = fmaf(x * g[i][k], f32(d[i].x[k]), slope);
            }
        }
        row_sums(squares, slope, turn);
        turn ^= 1;
        float r = rsqrtf(squares / D + eps);
        float c = slope / D * r * r * r;
#pragma unroll
        for (int i = 0; i < VECS; i++) {
            int column = (i * LANES + lane) * VEC;
            if (!inside(column)) continue;
#if HAS_DW
#pragma unroll
            for (int k = 0; k < VEC; k++) sums[i][k] = fmaf(f32(d[i].x[k]) * r, f32(p[i].x[k]) - mean, sums[i][k]);
#endif
#if HAS_DB
#pragma unroll
            for (int k = 0; k < VEC; k++) terms[i][k] += f32(d[i].x[k]);
#endif
#if HAS_DX
            float value[VEC];
#pragma unroll
            for (int k = 0; k < VEC; k++) {
                value[k] = fmaf(r, f32(d[i].x[k]) * g[i][k] - shift, -(c * (f32(p[i].x[k]) - mean)));
#if ADD
                value[k] += f32(a[i].x[k]);
#endif
            }
            Pack<T_X, VEC> out;
            put(out, value);
            out.store(dx + row_dx(row) + column);
#endif
        }
    }
#if HAS_DW
    leave(sums, partial + (i64)blockIdx.x * D, lane);
#endif
#if HAS_DW && HAS_DB
    __syncthreads();
#endif
#if HAS_DB
    leave(terms, partial_bias + (i64)blockIdx.x * D, lane);
#endif
}

#endif
