// Products that cuBLASLt cannot express: operands with gaps between elements or repeated rows, f32 operands with a bf16 result,
// an inner extent of 0, 8-bit operands that violate its alignments. Also copies a base to the result, converting its type,
// before cuBLASLt adds to it.
//
//   out[i, j] = sum over k of a[i, k] b[k, j], times both scales if SCALED,
//   plus base[i, j] if HAS_BASE; any strides, `count` matrices.
//
// A thread block of 256 threads computes 32 x 32 elements, four per thread, from tiles of 32 x 32 in shared memory. An element
// is summed in the order of k: deterministic. Meant for small odd products; reaches a few percent of cuBLASLt's speed.
// Defines: T_A, T_B, T_OUT, T_BASE, HAS_BASE and SCALED (0 or 1).

#define TILE 32
#define STEP 8

extern "C" __global__ void __launch_bounds__(256)
product_any(const T_A* a, const T_B* b, const T_BASE* base, T_OUT* out,
            int m, int n, int k, i64 a_step, i64 b_step, i64 base_step, i64 out_step,
            i64 a_row, i64 a_column, i64 b_row, i64 b_column,
            i64 base_row, i64 base_column, i64 out_row, const float* scale_a, const float* scale_b) {
    __shared__ float left[TILE][TILE + 1];
    __shared__ float right[TILE][TILE + 1];
    const int across = (n + TILE - 1) / TILE;
    const int down = (m + TILE - 1) / TILE;
    const i64 tile = blockIdx.x % ((i64)across * down);
    const i64 which = blockIdx.x / ((i64)across * down);
    const int i0 = (int)(tile / across) * TILE;
    const int j0 = (int)(tile % across) * TILE;
    const int x = threadIdx.x % TILE;
    const int y = threadIdx.x / TILE;
    a += which * a_step;
    b += which * b_step;

    float sum[TILE / STEP] = {};
    for (int k0 = 0; k0 < k; k0 += TILE) {
        for (int s = 0; s < TILE; s += STEP) {
            const int i = i0 + y + s, ka = k0 + x;
            left[y + s][x] = i < m && ka < k ? f32(a[i * a_row + ka * a_column]) : 0.0f;
            const int kb = k0 + y + s, j = j0 + x;
            right[y + s][x] = kb < k && j < n ? f32(b[kb * b_row + j * b_column]) : 0.0f;
        }
        __syncthreads();
        for (int inner = 0; inner < TILE; ++inner) {
            const float factor = right[inner][x];
            #pragma unroll
            for (int s = 0; s < TILE / STEP; ++s) sum[s] = fmaf(left[y + s * STEP][inner], factor, sum[s]);
        }
        __syncthreads();
    }
    const int j = j0 + x;
    if (j >= n) return;
    #pragma unroll
    for (int s = 0; s < TILE / STEP; ++s) {
        const int i = i0 + y + s * STEP;
        if (i >= m) break;
#if SCALED
        sum[s] *= *scale_a * *scale_b;
#endif
#if HAS_BASE
        sum[s] += f32(base[which * base_step + i * base_row + j * base_column]);
#endif
        out[which * out_step + i * out_row + j] = As<T_OUT>::of(sum[s]);
    }
}

// out = base, element by element, over `count` matrices of m rows; one block of 256 threads per row.
extern "C" __global__ void __launch_bounds__(256)
spread_base(const T_BASE* base, T_OUT* out, int m, int n, i64 base_step, i64 out_step,
            i64 base_row, i64 base_column, i64 out_row) {
    const i64 which = blockIdx.x / m;
    const i64 i = blockIdx.x % m;
    base += which * base_step + i * base_row;
    out += which * out_step + i * out_row;
    for (i64 j = threadIdx.x; j < n; j += blockDim.x) out[j] = As<T_OUT>::of(f32(base[j * base_column]));
}
