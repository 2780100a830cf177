// Philox 4x32 with 10 rounds: four random words of a counter under a key, the bits of `flatout_ir::random`.

__device__ __forceinline__ uint4 philox(uint4 c, u32 key0, u32 key1) {
#pragma unroll
    for (int i = 0; i < 10; i++) {
        u32 a_high = __umulhi(c.x, 0xD2511F53u), a_low = c.x * 0xD2511F53u;
        u32 b_high = __umulhi(c.z, 0xCD9E8D57u), b_low = c.z * 0xCD9E8D57u;
        c = make_uint4(b_high ^ c.y ^ key0, b_low, a_high ^ c.w ^ key1, a_low);
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return c;
}

// The words that round the moments of elements 4 i to 4 i + 3 in one update: low halves for the first moments, high
// halves for the second.
__device__ __forceinline__ uint4 rounding(u64 i, u32 updates) {
    return philox(make_uint4((u32)i, (u32)(i >> 32), updates, 0u), 0x6d6f6d65u, 0x6e747321u);
}
