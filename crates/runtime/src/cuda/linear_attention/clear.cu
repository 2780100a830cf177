// Zeros in the rows [tokens, heads, width] of a result, a block a token: what no segment covers stays.
extern "C" __global__ void __launch_bounds__(256)
clear_rows(T_X* rows, i64 token, i64 head, int heads, int width) {
    for (int i = threadIdx.x; i < heads * width; i += 256)
        rows[blockIdx.x * token + i / width * head + i % width] = As<T_X>::of(0.0f);
}
