// Shared by an adapter's thin products: pieces of rows staged in shared memory, fragments of mma.m16n8k16, and dropout of eight
// neighbours at a time.
//
// x, dx and base [M, WIDTH], u and du [M, RANK], a [RANK, WIDTH], each with its row stride X_ROW etc.; RANK and WIDTH are
// multiples of 8, and rows are 16-byte aligned. The order of a sum's terms is free, and so is the assignment of rows and
// columns to fragment positions. A lane's share of a fragment is therefore always eight neighbours of a row: a 16-byte piece,
// and one draw of dropout. Lanes are 4 g + t, as in mma: a left factor has rows g and g + 8, a right factor column g, both at
// inner indices 2 t, 2 t + 1, 2 t + 8 and 2 t + 9, and the result rows g and g + 8 at columns 2 t and 2 t + 1. Kept elements
// are scaled by `keep` once, at the end of a sum.

#define NARROW (RANK / 8)

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// cp.async of 16 bytes into shared memory; zero-filled if `is_there` is false.
__device__ __forceinline__ void copy16(u32 to, const void* from, bool is_there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(is_there ? 16 : 0) : "memory");
}
// As above through L1, for elements that other blocks read as well.
__device__ __forceinline__ void copy16_near(u32 to, const void* from, bool is_there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(is_there ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copy8(u32 to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void arrived() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
__device__ __forceinline__ uint4 read16(u32 from) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(from) : "memory");
    return x;
}
__device__ __forceinline__ int2 read8(u32 from) {
    int2 x;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(from) : "memory");
    return x;
}

__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// The m16n8k8 form, with half as many terms.
__device__ __forceinline__ void mma_half(float (&c)[4], u32 a0, u32 a1, u32 b0) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(b0));
}

// The dropout mask of a row, with the bits of `dropout.cu`.
struct Drawing {
    u32 key0, key1, step;
    const int* rows;

    __device__ __forceinline__ Drawing(const int* rng, const int* rows, int key_low, int key_high)
        : key0((u32)rng[0] ^ (u32)key_low), key1((u32)rng[1] ^ (u32)key_high), step((u32)rng[2]), rows(rows) {}

    // Sample and token of a row.
    __device__ __forceinline__ int2 row(int i) const {
        return __ldg(reinterpret_cast<const int2*>(rows + (i64)i * ROWS_ROW));
    }
    // The draws of columns 8 eight to 8 eight + 7 of a row, 16 bits each.
    __device__ __forceinline__ uint4 of(u32 eight, int2 row) const {
        return philox(make_uint4(eight, (u32)row.y, (u32)row.x, step), key0, key1);
    }
};

// Compares two 16-bit numbers in a word: the sign of each half of the result tells whether that half is at least BELOW.
__device__ __forceinline__ u32 kept_signs(u32 drawn) {
#if __CUDA_ARCH__ >= 900 && BELOW <= 0x8000
    u32 least;
    asm("min.u16x2 %0, %1, %2;" : "=r"(least) : "r"(drawn), "r"(BELOW * 0x10001u));
    return least + (0x8000u - BELOW) * 0x10001u;
#elif BELOW <= 0x8000
    return (drawn & 0x7fff7fffu) + (0x8000u - BELOW) * 0x10001u | drawn;
#else
    return (drawn & 0x7fff7fffu) + (0x10000u - BELOW) * 0x10001u & drawn;
#endif
}
// Zeroes dropped elements of a pair. The integer units are the bottleneck, so it uses a mask of signs instead of comparisons.
__device__ __forceinline__ u32 kept_of(u32 pair, u32 drawn) {
    u32 mask;
    asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(mask) : "r"(kept_signs(drawn)));
    return pair & mask;
}
__device__ __forceinline__ uint4 kept_of(uint4 x, uint4 drawn) {
    return make_uint4(kept_of(x.x, drawn.x), kept_of(x.y, drawn.y), kept_of(x.z, drawn.z), kept_of(x.w, drawn.w));
}

__device__ __forceinline__ void operator+=(float4& sum, float4 x) { sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w; }
