// Sums of partial rows: y_i[c] = sum over rows of p_i[row, c], for up to three vectors at once.
//
// p_i [rows, D] f32, dense, one after another; y_i [D] by to_y0, to_y1, to_y2. Moves each p once. blockIdx.y selects the
// vector; a thread block takes 32 columns, each of its 32 warps every 32nd row, eight in flight. Launch overhead dominates,
// which is why several vectors share a launch. The order of additions depends on `rows` alone: deterministic.

extern "C" __global__ void __launch_bounds__(1024) partial_sums(const float* p, float* y0, float* y1, float* y2, int rows) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = blockIdx.x * 32 + lane;
    p += (i64)blockIdx.y * rows * D + column;
    float sum = 0.0f;
    if (column < D) {
        for (int row = warp; row < rows; row += 8 * 32) {
            float x[8];
#pragma unroll
            for (int u = 0; u < 8; u++) x[u] = row + u * 32 < rows ? p[(i64)(row + u * 32) * D] : 0.0f;
#pragma unroll
            for (int u = 0; u < 8; u++) sum += x[u];
        }
    }
    __shared__ float all[32][33];
    all[warp][lane] = sum;
    __syncthreads();
    // A warp adds the partial sums of one column.
    sum = lanes_sum<32>(all[lane][warp]);
    column = blockIdx.x * 32 + warp;
    if (lane != 0 || column >= D) return;
    if (blockIdx.y == 0) y0[to_y0(column)] = sum;
    if (blockIdx.y == 1) y1[to_y1(column)] = sum;
    if (blockIdx.y == 2) y2[to_y2(column)] = sum;
}
