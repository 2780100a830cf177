// The epilogue of a product as a separate kernel, for those that cuBLASLt does not apply itself.
//
//   finish: x = c[i, j] (+ bias[j]); GELU 1: h[i, j] = x, y[i, j] = gelu(x); GELU 2: y = x gelu'(h[i, j]);
//           GELU 3: y = relu(x); GELU 0: y = x. Reads and writes each element once; c and y may be the same tensor.
//           A thread block of 256 threads takes a row.
//
// Deterministic. Defines: T_OUT, T_BIAS, BIAS (0 or 1), GELU (0 to 3).

extern "C" __global__ void __launch_bounds__(256)
finish(const T_OUT* c, T_OUT* y, T_OUT* h, const T_BIAS* bias, int n, i64 bias_step,
       i64 c_row, i64 y_row, i64 h_row, i64 h_column) {
    const i64 i = blockIdx.x;
    for (i64 j = threadIdx.x; j < n; j += blockDim.x) {
        float x = f32(c[i * c_row + j]);
#if BIAS
        x += f32(bias[j * bias_step]);
#endif
#if GELU == 1
        if (h) h[i * h_row + j * h_column] = As<T_OUT>::of(x);
        x = gelu(x);
#elif GELU == 2
        x *= gelu_slope(f32(h[i * h_row + j * h_column]));
#elif GELU == 3
        x = fmaxf(x, 0.0f);
#endif
        if (y) y[i * y_row + j] = As<T_OUT>::of(x);
    }
}
