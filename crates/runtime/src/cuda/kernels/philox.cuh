// Philox 4x32 with 10 rounds: four random words from a counter and a key, with the bits of `flatout_ir::random`.

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

// Mask of the N elements of a token, from element c, that are kept. Element c draws half c mod 8 of the counter (c / 8, token,
// sample, step), low halves first, and is dropped if the draw is less than `below`. N is at most 32, and c a multiple of it.
template <int N>
__device__ __forceinline__ u32 kept(u32 c, u32 token, u32 sample, u32 step, u32 key0, u32 key1, u32 below) {
    u32 bits = 0;
#pragma unroll
    for (int k = 0; k < N; k += 8) {
        uint4 words = philox(make_uint4((c + k) / 8, token, sample, step), key0, key1);
        u32 drawn[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int i = 0; i < 8 && k + i < N; i++) {
            // Eight or more elements start at the first half of a draw; fewer at any.
            u32 at = N >= 8 ? i : (c + i) % 8;
            u32 word = at < 2 ? drawn[0] : at < 4 ? drawn[1] : at < 6 ? drawn[2] : drawn[3];
            // Compares in the upper half of a word: the bits below it do not affect the comparison.
            bits |= ((at % 2 ? word : word << 16) >= below << 16 ? 1u : 0u) << (k + i);
        }
    }
    return bits;
}

// The words that round the moments of elements 4 i to 4 i + 3 in one update: low halves the first moments, high the second.
__device__ __forceinline__ uint4 rounding(u64 i, u32 updates) {
    return philox(make_uint4((u32)i, (u32)(i >> 32), updates, 0u), 0x6d6f6d65u, 0x6e747321u);
}
