// 1 / ||w + s b a|| of every row: w [rows, COLUMNS], a f32 [RANK, COLUMNS], b f32 [rows, RANK], out f32 [rows].
//
// A thread block takes ROWS rows, whose b it keeps in shared memory; its threads share the columns, VEC at a time, so each
// element of a serves ROWS rows. w is read once, a once per block, from L2. 2 RANK operations per element of w. [1024, 1152]
// bf16 with rank 16: 2.4 MB of w, 19 MB of a from L2. Deterministic: a thread adds its columns in order, and threads are
// combined in a fixed order.

#define WARPS 8

extern "C" __global__ void __launch_bounds__(32 * WARPS)
low_rank_norm(const T_W* w, const float* a, const float* b, float* out, int rows, float scale) {
    __shared__ float scaled[RANK > 0 ? RANK : 1][ROWS];
    __shared__ float parts[WARPS][ROWS];
    const int first = blockIdx.x * ROWS;
    for (int i = threadIdx.x; i < RANK * ROWS; i += blockDim.x) {
        const int row = first + i / RANK;
        scaled[i % RANK][i / RANK] = row < rows ? scale * b[(i64)row * RANK + i % RANK] : 0.0f;
    }
    __syncthreads();
    float sums[ROWS] = {};
    for (int column = threadIdx.x * VEC; column < COLUMNS; column += blockDim.x * VEC) {
        float x[ROWS][VEC];
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            Pack<T_W, VEC> read;
            // Rows past the end read the last row again.
            read.load(w + (i64)min(first + i, rows - 1) * COLUMNS + column);
#pragma unroll
            for (int k = 0; k < VEC; k++) x[i][k] = f32(read.x[k]);
        }
// Number of loads in flight.
#pragma unroll 16
        for (int r = 0; r < RANK; r++) {
            Pack<float, VEC> low;
            low.load(a + (i64)r * COLUMNS + column);
#pragma unroll
            for (int i = 0; i < ROWS; i++)
#pragma unroll
                for (int k = 0; k < VEC; k++) x[i][k] = fmaf(scaled[r][i], low.x[k], x[i][k]);
        }
#pragma unroll
        for (int i = 0; i < ROWS; i++)
#pragma unroll
            for (int k = 0; k < VEC; k++) sums[i] = fmaf(x[i][k], x[i][k], sums[i]);
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const float sum = lanes_sum<32>(sums[i]);
        if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32][i] = sum;
    }
    __syncthreads();
    if (threadIdx.x >= ROWS || first + (int)threadIdx.x >= rows) return;
    float sum = 0.0f;
    for (int i = 0; i < WARPS; i++) sum += parts[i][threadIdx.x];
    out[first + threadIdx.x] = 1.0f / sqrtf(sum);
}
