// Two RMS norms around a residual addition, over rows of D, and their gradient.
//
//   n = y r1 g(w1), h = x + n (both rounded to their type), out = h r2 g(w2), r = 1 / sqrt(mean of squares + eps)
//   dx = r2 u - h r2^3 mean(h u) (+ dh), u = d out g(w2); dy = r1 v - y r1^3 mean(y v), v = dx g(w1), dx as it is stored
//
// Shapes: y, x, h, out, d out, dh, dx, dy [rows, D], rows contiguous and at any address (row_* maps them); w1, w2 [D]. Moves
// each tensor once; [16384, 1152] in bf16 moves 151 MB forward and 226 MB backward, where separate norms move 226 and 264. With
// OF_SUM the backward pass reads h, otherwise it reads x and recomputes h. A row stays in the registers of its threads:
// norm_rows.cuh. One barrier for each mean if a row takes several warps. Deterministic.

// Thread blocks per multiprocessor: registers for the elements of a row, and enough threads to saturate memory.
static const int BLOCKS = THREADS < 640 ? 640 / THREADS : 1;

// The elements of a row that its threads have loaded.
struct Row {
    Pack<T_X, VEC> p[VECS];
    __device__ __forceinline__ void load(const T_X* from, bool here) { load_row(p, from, here); }
    __device__ __forceinline__ void store(T_X* to, bool here) const {
        int lane = threadIdx.x % LANES;
#pragma unroll
        for (int i = 0; i < VECS; i++) {
            int column = (i * LANES + lane) * VEC;
            if (inside(column) && here) p[i].store(to + column);
        }
    }
};

// The gains of a vector of columns; none past the row's end.
__device__ __forceinline__ void gains_at(const T_W* w, int i, float (&g)[VEC]) {
    int column = (i * LANES + threadIdx.x % LANES) * VEC;
    if (inside(column)) {
        gains(w, column, g);
    } else {
#pragma unroll
        for (int k = 0; k < VEC; k++) g[k] = 0.0f;
    }
}

__device__ __forceinline__ float squares(const Row& row) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < VECS; i++)
#pragma unroll
        for (int k = 0; k < VEC; k++) sum = fmaf(f32(row.p[i].x[k]), f32(row.p[i].x[k]), sum);
    return sum;
}

// x += y rstd g(w), with the normed row rounded first.
__device__ __forceinline__ void add_normed(Row& x, const Row& y, float rstd, const T_W* w) {
#pragma unroll
    for (int i = 0; i < VECS; i++) {
        float g[VEC], value[VEC];
        gains_at(w, i, g);
#pragma unroll
        for (int k = 0; k < VEC; k++) value[k] = f32(y.p[i].x[k]) * rstd * g[k];
        Pack<T_X, VEC> n;
        put(n, value);
#pragma unroll
        for (int k = 0; k < VEC; k++) value[k] = f32(n.x[k]) + f32(x.p[i].x[k]);
        put(x.p[i], value);
    }
}

#if !GRAD

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    double_norm(const T_X* y, const T_X* x, const T_W* inner, const T_W* outer, T_X* out, T_X* h, int rows,
                float inner_eps, float outer_eps) {
    int row = blockIdx.x * ROWS + threadIdx.x / LANES;
    if (is_behind(row, rows)) return;
    bool here = is_here(row, rows);
    Row normed, sum;
    normed.load(y + row_y(row), here);
    sum.load(x + row_x(row), here);
    float a = squares(normed), unused = 0.0f;
    row_sums(a, unused, 0);
    add_normed(sum, normed, rsqrtf(a / D + inner_eps), inner);
#if HAS_H
    sum.store(h + row_h(row), here);
#endif
#if HAS_OUT
    float b = squares(sum);
    row_sums(b, unused, 1);
    float rstd = rsqrtf(b / D + outer_eps);
#pragma unroll
    for (int i = 0; i < VECS; i++) {
        float g[VEC], value[VEC];
        gains_at(outer, i, g);
#pragma unroll
        for (int k = 0; k < VEC; k++) value[k] = f32(sum.p[i].x[k]) * rstd * g[k];
        put(sum.p[i], value);
    }
    sum.store(out + row_out(row), here);
#endif
}

#else

// d = rstd u - x rstd^3 slope / D (+ base), u = d g(w), for a row x with `slope` the sum of x u.
__device__ __forceinline__ void become_slope(Row& d, const Row& x, float rstd, float slope, const T_W* w, const Row* base) {
    float c = slope / D * rstd * rstd * rstd;
#pragma unroll
    for (int i = 0; i < VECS; i++) {
        float g[VEC], value[VEC];
        gains_at(w, i, g);
#pragma unroll
        for (int k = 0; k < VEC; k++) {
            value[k] = fmaf(rstd, f32(d.p[i].x[k]) * g[k], -(c * f32(x.p[i].x[k])));
            if (base) value[k] += f32(base->p[i].x[k]);
        }
        put(d.p[i], value);
    }
}

// The sum of x d g(w).
__device__ __forceinline__ float slope_of(const Row& x, const Row& d, const T_W* w) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < VECS; i++) {
        float g[VEC];
        gains_at(w, i, g);
#pragma unroll
        for (int k = 0; k < VEC; k++) sum = fmaf(f32(x.p[i].x[k]) * g[k], f32(d.p[i].x[k]), sum);
    }
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    double_norm_grad(const T_X* y, const T_X* x, const T_W* inner, const T_W* outer, const T_X* d_out, const T_X* dh, T_X* dx,
                     T_X* dy, int rows, float inner_eps, float outer_eps) {
    int row = blockIdx.x * ROWS + threadIdx.x / LANES;
    if (is_behind(row, rows)) return;
    bool here = is_here(row, rows);
    Row normed, sum, d;
    normed.load(y + row_y(row), here);
    sum.load(x + row_x(row), here);
    d.load(d_out + row_d(row), here);
#if ADD
    Row base;
    base.load(dh + row_dh(row), here);
    const Row* beside = &base;
#else
    const Row* beside = nullptr;
#endif
    float a = squares(normed), unused = 0.0f;
    row_sums(a, unused, 0);
    float inner_rstd = rsqrtf(a / D + inner_eps);
#if !OF_SUM
    add_normed(sum, normed, inner_rstd, inner);
#endif
    float b = squares(sum), slope = slope_of(sum, d, outer);
    row_sums(b, slope, 1);
    become_slope(d, sum, rsqrtf(b / D + outer_eps), slope, outer, beside);
#if HAS_DX
    d.store(dx + row_dx(row), here);
#endif
#if HAS_DY
    slope = slope_of(normed, d, inner);
    row_sums(slope, unused, 0);
    become_slope(d, normed, inner_rstd, slope, inner, nullptr);
    d.store(dy + row_dy(row), here);
#endif
}

#endif
