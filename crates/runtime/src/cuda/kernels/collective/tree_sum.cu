// out[i] = base[i] + sum over t of terms[t * stride + i], summed by the balanced tree over t = 0 .. WAYS, ((0 + 1) + (2 + 3)) +
// ((4 + 5) + (6 + 7)), or sequentially if WAYS is not a power of two: the order of `collective::tree`, so that bits depend only
// on the terms and their number.
//
// A thread takes VEC neighbouring elements of every term and reads each once; the terms of ranks lie side by side in scratch.
// Moves 4 (WAYS + 1) bytes per element, 4 more with a base. The tree is a binary counter over the terms: partial sum l waits
// for its neighbour of 2^l terms, so that only log2(WAYS) vectors are in registers instead of WAYS. Contains only f32
// additions, so nothing is contracted into multiply-adds. Deterministic.
//
// Defines: WAYS, LEVELS (log2 of WAYS; 0 if it is not a power of two), VEC (1 or 4), HAS_BASE.

template <int N> struct alignas(4 * N) Few {
    float x[N];
};

template <int N> __device__ __forceinline__ Few<N> plus(Few<N> a, Few<N> b) {
#pragma unroll
    for (int i = 0; i < N; i++) a.x[i] += b.x[i];
    return a;
}

template <int N> __device__ __forceinline__ Few<N> sum_at(const float *terms, i64 stride, i64 at) {
#if LEVELS > 0
    Few<N> part[LEVELS];
#pragma unroll
    for (int t = 0; t < WAYS; t++) {
        Few<N> x = *(const Few<N> *)(terms + t * stride + at);
        bool is_waiting = false;
#pragma unroll
        for (int level = 0; level < LEVELS; level++) {
            if (is_waiting) continue;
            if (t >> level & 1) {
                x = plus(part[level], x);
            } else {
                part[level] = x;
                is_waiting = true;
            }
        }
        if (t == WAYS - 1) return x;
    }
    return part[0];
#else
    Few<N> sum = *(const Few<N> *)(terms + at);
#pragma unroll
    for (int t = 1; t < WAYS; t++) sum = plus(sum, *(const Few<N> *)(terms + t * stride + at));
    return sum;
#endif
}

template <int N> __device__ __forceinline__ void store(const float *base, float *out, i64 at, Few<N> sum) {
#if HAS_BASE
    sum = plus(*(const Few<N> *)(base + at), sum);
#endif
    *(Few<N> *)(out + at) = sum;
}

extern "C" __global__ void __launch_bounds__(256)
    tree_sum(const float *terms, const float *base, float *out, i64 stride, i64 count) {
    i64 whole = count / VEC * VEC, step = (i64)gridDim.x * blockDim.x * VEC;
    i64 first = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * VEC;
    for (i64 at = first; at < whole; at += step) store<VEC>(base, out, at, sum_at<VEC>(terms, stride, at));
    // The elements after the last whole vector.
    if (blockIdx.x == 0 && threadIdx.x < count - whole) {
        i64 at = whole + threadIdx.x;
        store<1>(base, out, at, sum_at<1>(terms, stride, at));
    }
}
