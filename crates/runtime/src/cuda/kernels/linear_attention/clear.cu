// Clears the rows of a result [tokens, heads, width] outside every segment. A thread block checks 64 tokens: it marks those in
// a segment, with segments in any order, and zeroes the others. Starts and lengths are clamped to the tensor, as in the other
// kernels. Every block reads all starts and lengths; only cleared rows are written. Deterministic.

#define SPAN 64

extern "C" __global__ void __launch_bounds__(256)
clear_outside(T_X* rows, const int* start, const int* len, i64 token, i64 head, int tokens, int longest, int segments,
              int heads, int width) {
    __shared__ int inside[SPAN];
    const int base = blockIdx.x * SPAN;
    if (threadIdx.x < SPAN) inside[threadIdx.x] = 0;
    __syncthreads();
    for (int s = threadIdx.x; s < segments; s += 256) {
        const int first = min(max(start[s], 0), tokens);
        const int end = min(first + min(max(len[s], 0), longest), tokens);
        for (int t = max(first, base); t < min(end, base + SPAN); t++) inside[t - base] = 1;
    }
    __syncthreads();
    for (int t = base; t < min(base + SPAN, tokens); t++) {
        if (inside[t - base]) continue;
        for (int i = threadIdx.x; i < heads * width; i += 256)
            rows[t * token + i / width * head + i % width] = As<T_X>::of(0.0f);
    }
}
