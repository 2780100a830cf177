// Dequantises NF4 weights: y[e] = NF4[code e] magnitude(e / 64), with e the row-major index within one weight.
//
// codes u8, two per byte, the first in the upper half. The magnitude of a block of 64 is map[absmax[block]] nested[block / 256]
// + offset, or f32 absmax[block] if NESTED is 0. y [M, COLUMNS] in T_Y, with row stride STRIDE. All arithmetic is f32, never
// contracted, and y is rounded once: the bits are those of `flatout_ir::nf4` on every device. Deterministic. Moves half a byte
// and a 64th of a magnitude per value in, one T_Y out. A thread computes PACKS packs of VEC neighbours, each within one block and from one
// access of VEC / 2 bytes, and stores a pack TOGETHER if rows are aligned to that; 256 threads per block. All loads are issued before the
// first result, because a pack is too few bytes in flight per thread to hide the latency of memory. The 16 code values and the map lie in
// shared memory.

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
#if NESTED
    __shared__ float decoded[256];
    decoded[threadIdx.x] = map[threadIdx.x];
    float mean = *offset;
#endif
    const INDEX first = ((INDEX)blockIdx.x * (PACKS * 256) + threadIdx.x) * VEC;
    Pack<u8, VEC / 2> pairs[PACKS];
#if NESTED
    u8 code[PACKS];
#endif
    float largest[PACKS];
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        INDEX e = first + p * (256 * VEC);
        if (e >= count) break;
        pairs[p].load(codes + e / 2);
#if NESTED
        code[p] = absmax[e / 64];
        largest[p] = nested[e / (64 * 256)];
#else
        largest[p] = absmax[e / 64];
#endif
    }
    __syncthreads();
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        INDEX e = first + p * (256 * VEC);
        if (e >= count) break;
#if NESTED
        float magnitude = nf4_magnitude(decoded[code[p]], largest[p], mean);
#else
        float magnitude = largest[p];
#endif
        float v[VEC];
#pragma unroll
        for (int k = 0; k < VEC / 2; k++) {
            v[2 * k] = __fmul_rn(values[pairs[p].x[k] >> 4], magnitude);
            v[2 * k + 1] = __fmul_rn(values[pairs[p].x[k] & 15], magnitude);
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
}
