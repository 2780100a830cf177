// Weights in NF4 as numbers: y[e] = NF4[code e] magnitude(e / 64), e counted in the row-major order of one weight.
//
// codes u8, two a byte, the first in the upper half; of a block of 64 the magnitude is map[absmax[block]] nested[block / 256] +
// offset, or f32 absmax[block] where NESTED is 0. y [M, COLUMNS] in T_Y, its rows STRIDE elements apart. All arithmetic is f32,
// never contracted, and y is rounded once: the bits are `flatout_ir::nf4`'s on every device. Deterministic.
// Bytes: half of one and a 64th a value in, a T_Y out. A thread makes VEC neighbours of one block, out of one access of VEC / 2
// bytes, and stores them TOGETHER where rows begin at multiples of that; 256 threads a block. The 16 values of codes lie in shared memory, where different ones are in different banks.

__constant__ float NF4[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
    -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
    0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
    0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f,
};

extern "C" __global__ void __launch_bounds__(256) dequantize(
    const u8* codes,
#if NESTED
    const float* map, const u8* absmax, const float* nested, const float* offset,
#else
    const float* absmax,
#endif
    T_Y* y, INDEX count) {
    __shared__ float values[16];
    if (threadIdx.x < 16) values[threadIdx.x] = NF4[threadIdx.x];
    __syncthreads();
    INDEX e = ((INDEX)blockIdx.x * 256 + threadIdx.x) * VEC;
    if (e >= count) return;
    INDEX block = e / 64;
#if NESTED
    float magnitude = __fadd_rn(__fmul_rn(map[absmax[block]], nested[block / 256]), *offset);
#else
    float magnitude = absmax[block];
#endif
    Pack<u8, VEC / 2> pairs;
    pairs.load(codes + e / 2);
    float v[VEC];
#pragma unroll
    for (int k = 0; k < VEC / 2; k++) {
        v[2 * k] = __fmul_rn(values[pairs.x[k] >> 4], magnitude);
        v[2 * k + 1] = __fmul_rn(values[pairs.x[k] & 15], magnitude);
    }
    T_Y* to = y + (i64)(e / COLUMNS) * STRIDE + e % COLUMNS;
#if TOGETHER
    Pack<T_Y, VEC> pack;
    put(pack, v);
    pack.store(to);
#else
#pragma unroll
    for (int k = 0; k < VEC; k++) to[k] = As<T_Y>::of(v[k]);
#endif
}
