// out = base + p_0 + p_1 + ..., the partial sums of a product whose inner extent was split into PARTS parts.
//
// All are f32: p_i [M, N], dense, one after another; out and base [M, N], base only with HAS_BASE, and it may be out. N is a
// multiple of 4. Moves each matrix once. A thread takes four neighbouring columns, whose parts it reads before it adds them in
// the order of their numbers: deterministic.

__device__ __forceinline__ float sum_of(const float (&parts)[PARTS]) {
    float sum = parts[0];
#pragma unroll
    for (int i = 1; i < PARTS; i++) sum += parts[i];
    return sum;
}

extern "C" __global__ void __launch_bounds__(256)
    add_parts(const float* parts, const float* base, float* out, int m, int n, i64 base_pitch, i64 out_pitch) {
    const i64 at = 4 * ((i64)blockIdx.x * 256 + threadIdx.x), size = (i64)m * n;
    if (at >= size) return;
    const i64 row = at / n, column = at - row * n;
    float4 read[PARTS];
#pragma unroll
    for (int i = 0; i < PARTS; i++) read[i] = *(const float4*)(parts + i * size + at);
    float x[4][PARTS], y[4];
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
        x[0][i] = read[i].x;
        x[1][i] = read[i].y;
        x[2][i] = read[i].z;
        x[3][i] = read[i].w;
    }
    Pack<float, 4> to;
#if HAS_BASE
    to.load(base + row * base_pitch + column);
#endif
#pragma unroll
    for (int k = 0; k < 4; k++) {
        y[k] = sum_of(x[k]);
#if HAS_BASE
        y[k] += to.x[k];
#endif
    }
    put(to, y);
    to.store(out + row * out_pitch + column);
}
