// Fills memory with random numbers of a given range, so that tensor cores draw the power that real data costs.
//
// word[i] = (hash(seed, i) & keep) | base, for i < words. The low and high halves of `keep` and `base` are equal, so a word is
// two bf16 numbers of the range, and one f32 of it. One 4-byte store per word; deterministic; any grid.

extern "C" __global__ void noise(unsigned *to, long long words, unsigned seed, unsigned keep, unsigned base) {
    long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < words; i += step) {
        unsigned h = (unsigned)i * 0x9E3779B1u ^ (unsigned)(i >> 32) * 0x85EBCA77u ^ seed * 0xC2B2AE3Du;
        h = (h ^ (h >> 16)) * 0x7FEB352Du;
        h = (h ^ (h >> 15)) * 0x846CA68Bu;
        to[i] = ((h ^ (h >> 16)) & keep) | base;
    }
}
