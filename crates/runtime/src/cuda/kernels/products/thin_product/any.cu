// Thin products that the other kernels do not support: other ranks and widths, rows at any address.
//
// A thread computes one element of the result, summed in order: deterministic, but slow. out [R, C]; element (i, j) is the sum
// over k < INNER of left(i, k) right(k, j), stored transposed if TA or TB. Dropout applies to the left factor, the result or
// the right factor: DROPPED 0, 1 or 2, or to none of them.

__device__ __forceinline__ bool is_kept(const int* rng, const int* rows, int i, int c, int key_low, int key_high) {
    const int* row = rows + (i64)i * ROWS_ROW;
    return kept<1>((u32)c, (u32)row[1], (u32)row[0], (u32)rng[2], (u32)rng[0] ^ (u32)key_low, (u32)rng[1] ^ (u32)key_high, BELOW);
}

extern "C" __global__ void __launch_bounds__(256)
thin_any(const bf16* left, const bf16* right, const T_OUT* base, const int* rng, const int* rows, T_OUT* out, i64 count,
         int columns, int inner, int key_low, int key_high, float keep) {
    const i64 e = (i64)blockIdx.x * 256 + threadIdx.x;
    if (e >= count) return;
    const int i = (int)(e / columns), j = (int)(e % columns);
    float sum = 0.0f;
    for (int k = 0; k < inner; k++) {
        float term = f32(left[TA ? (i64)k * LEFT_ROW + i : (i64)i * LEFT_ROW + k]) *
                     f32(right[TB ? (i64)j * RIGHT_ROW + k : (i64)k * RIGHT_ROW + j]);
        if (DROPPED == 0 && !is_kept(rng, rows, i, k, key_low, key_high)) term = 0.0f;
        if (DROPPED == 2 && !is_kept(rng, rows, k, j, key_low, key_high)) term = 0.0f;
        sum += term;
    }
    if (DROPPED == 1 && !is_kept(rng, rows, i, j, key_low, key_high)) sum = 0.0f;
    sum *= keep;
#if HAS_BASE
    sum += f32(base[(i64)i * BASE_ROW + j]);
#endif
    out[(i64)i * OUT_ROW + j] = As<T_OUT>::of(sum);
}
