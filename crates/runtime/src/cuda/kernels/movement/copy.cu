// Copies between any two strided views, constants and indices.
//
// Elements are copied in row-major order of both views, whatever their axes: at_from and at_to map element e to its address.
// Moves each element once in, once out. A thread moves UNROLL vectors of VEC elements, one block apart, with all loads in
// flight before the first store; VEC is 1 if either view has uneven strides. `transpose` copies from a view that is contiguous
// along another axis than the destination: tiles of 32 x 32 go through shared memory, so that both sides are coalesced.
// Deterministic.

#if COPY

extern "C" __global__ void __launch_bounds__(256) copy(const T_X* from, T_X* to, INDEX count) {
    INDEX first = ((INDEX)blockIdx.x * UNROLL * 256 + threadIdx.x) * VEC;
    Pack<T_X, VEC> p[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        INDEX e = first + (INDEX)u * 256 * VEC;
        if (e < count) p[u].load(from + at_from(e));
    }
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        INDEX e = first + (INDEX)u * 256 * VEC;
        if (e < count) p[u].store(to + at_to(e));
    }
}

#elif TRANSPOSE

// [OUTER.., M, N]: the source has stride 1 along M, the destination along N.
extern "C" __global__ void __launch_bounds__(256) transpose(const T_X* from, T_X* to) {
    __shared__ T_X tile[32][33];
    u32 tiles_n = (N + 31) / 32, tiles_m = (M + 31) / 32;
    u32 n0 = blockIdx.x % tiles_n * 32, m0 = blockIdx.x / tiles_n % tiles_m * 32;
    INDEX outer = blockIdx.x / tiles_n / tiles_m;
    from += outer_from(outer);
    to += outer_to(outer);
    u32 column = threadIdx.x % 32, row = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < 32; i += 8) {
        u32 m = m0 + column, n = n0 + row + i;
        if (m < M && n < N) tile[row + i][column] = from[(i64)m + (i64)n * FROM_N];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 32; i += 8) {
        u32 m = m0 + row + i, n = n0 + column;
        if (m < M && n < N) to[(i64)m * TO_M + (i64)n] = tile[column][row + i];
    }
}

#elif FILL

extern "C" __global__ void __launch_bounds__(256) fill(T_X* to, INDEX count, int bits) {
    INDEX e = ((INDEX)blockIdx.x * 256 + threadIdx.x) * VEC;
    if (e >= count) return;
    Pack<T_X, VEC> p;
    p.all((T_X)bits);
    p.store(to + at_to(e));
}

#else

// The index along an axis of N with INNER elements after it.
extern "C" __global__ void __launch_bounds__(256) iota(T_X* to, INDEX count) {
    INDEX e = (INDEX)blockIdx.x * 256 + threadIdx.x;
    if (e >= count) return;
    to[at_to(e)] = CONVERT(e / INNER % N);
}

#endif
