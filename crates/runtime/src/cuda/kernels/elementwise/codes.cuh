// Shared by kernels that write 8-bit floats: codes in the type that TO names, and a tensor's largest magnitude (amax).

#if TO == 4
typedef e4m3 T_Q;
#define TOP_EXPONENT 8u
#else
typedef e5m2 T_Q;
#define TOP_EXPONENT 15u
#endif

// Packs two codes, the first in the low byte.
template <class To> __device__ __forceinline__ u32 codes_of(float low, float high);
template <> __device__ __forceinline__ u32 codes_of<e4m3>(float low, float high) {
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}
template <> __device__ __forceinline__ u32 codes_of<e5m2>(float low, float high) {
    u16 pair;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}

template <class To> __device__ __forceinline__ u32 codes_of(float a, float b, float c, float d) {
    return codes_of<To>(a, b) | codes_of<To>(c, d) << 16;
}

// Transposes four rows of four codes: word k of `columns` has code k of every row, the first row in the low byte.
__device__ __forceinline__ void transpose_codes(const u32 (&rows)[4], u32 (&columns)[4]) {
    u32 low = __byte_perm(rows[0], rows[1], 0x5140), high = __byte_perm(rows[0], rows[1], 0x7362);
    u32 low2 = __byte_perm(rows[2], rows[3], 0x5140), high2 = __byte_perm(rows[2], rows[3], 0x7362);
    columns[0] = __byte_perm(low, low2, 0x5410);
    columns[1] = __byte_perm(low, low2, 0x7632);
    columns[2] = __byte_perm(high, high2, 0x5410);
    columns[3] = __byte_perm(high, high2, 0x7632);
}

// Encodes adjacent elements.
template <class To, int Size> __device__ __forceinline__ void put_codes(Pack<To, Size>& p, const float (&y)[Size]) {
    if (Size == 1) {
        p.x[0].bits = (u8)codes_of<To>(y[0], 0.0f);
    } else {
#pragma unroll
        for (int i = 0; i + 1 < Size; i += 2) {
            u32 pair = codes_of<To>(y[i], y[i + 1]);
            p.x[i].bits = (u8)pair;
            p.x[i + 1].bits = (u8)(pair >> 8);
        }
    }
}

// Atomically raises *to to the largest magnitude of a thread block. Magnitudes are non-negative, so their bits compare like the
// numbers; NaN is ignored. Most blocks find a larger value already there and skip the atomic.
template <int Warps> __device__ __forceinline__ void raise(float top, u32* to) {
    __shared__ u32 warps[Warps];
    u32 bits = __reduce_max_sync(ALL_LANES, __float_as_uint(top));
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = bits;
    __syncthreads();
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 1; i < Warps; i++) bits = bits > warps[i] ? bits : warps[i];
        if (bits > *(volatile u32*)to) atomicMax(to, bits);
    }
}

// Initialises the largest magnitude with another tensor's, or with 0.
extern "C" __global__ void start(const float* from, float* to) { *to = from ? *from : 0.0f; }
