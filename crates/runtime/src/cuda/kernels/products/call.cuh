// Shared by our product kernels: the order of tiles, and the epilogues, two adjacent columns at a time.
//
// d [M, N] = a [M, K] b [K, N] in bf16, or in 8 bits where the kernel multiplies those. A_MN and B_MN are 1 if the operand is contiguous along M or N, 0 if along K.
//
// EPILOGUE, with c = a b and x rounded to bf16 wherever it is stored:
//   PLAIN       out = c, with HAS_BASE c + base
//   GATED       b has two halves, gate and up: out = gate, out2 = up (both only with KEEP), out3 = act(gate) up
//   GATED_GRAD  side = gate, side2 = up: out = c up act'(gate), out2 = c act(gate), out3 = act(gate) up (only with KEEP)
//   ACTIVATED   out = c + bias (only with KEEP), out3 = act(c + bias); bias is a row of T_BIAS, if HAS_BIAS
//   ACTIVATED_GRAD  side = h: out = c act'(h), out3 = act(h) (only with KEEP), with SUM partial[r, N] = the sum of out over its
//               rows [64 r, 64 r + 64), which another kernel adds
//   GATED_CODES as GATED of 8-bit operands, with out3 in E4M3: act(gate) up, rounded to bf16 and divided by *out_scale; *amax is
//               raised to the largest magnitude before the division
//
// A sum has one order in every kernel: with s(w) the sum over rows [16 w, 16 w + 16) of the block, (s(0) + s(1)) + (s(2) +
// s(3)); s(w) adds rows g and g + 8, then the results of g = 0 .. 7 as a tree that halves them.

#define PLAIN 0
#define GATED 1
#define GATED_GRAD 2
#define ACTIVATED 3
#define ACTIVATED_GRAD 4
#define GATED_CODES 5
// Whether b has two halves.
#define IS_GATED (EPILOGUE == GATED || EPILOGUE == GATED_CODES)
// Whether the epilogue reads matrices of d's shape, and how many.
#define HAS_SIDES (EPILOGUE == GATED_GRAD || EPILOGUE == ACTIVATED_GRAD)
#define SIDES (EPILOGUE == GATED_GRAD ? 2 : 1)

// The problem in tiles of d; `call.rs` has the same struct.
struct Shape {
    // K in blocks; tiles (or clusters of them) along M and tiles along N; rows of tiles per band; total over all matrices of a
    // batch.
    int blocks, rows, columns, band, total;
    int m, n, k;
};

// Row and column of a tile of d, in tiles, and the matrix of the batch.
struct Position {
    int row, column, batch;
};

// Bands of rows one after the other; within a band column by column, so that neighbouring blocks share loads in L2.
__device__ __forceinline__ Position position_of(const Shape& s, int index) {
    const int plane = s.rows * s.columns, batch = index / plane;
    index -= batch * plane;
    const int area = s.band * s.columns, band = index / area, rest = index - band * area;
    const int height = min(s.band, s.rows - band * s.band);
    const int column = rest / height, row = band * s.band + rest - column * height;
    return {row, column, batch};
}

// The first row and column of d, and the matrix of the batch.
struct Tile {
    int row, column, batch;
};

// The elements of a pair of bf16.
__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ float2 pair_of(const bf16* p) {
    const u32 pair = *(const u32*)p;
    return make_float2(low(pair), high(pair));
}
__device__ __forceinline__ float2 pair_of(const float* p) { return *(const float2*)p; }

__device__ __forceinline__ u32 activated(u32 x) {
    float v0, v1, slope;
    activation(low(x), v0, slope);
    activation(high(x), v1, slope);
    return bf16x2(v0, v1);
}

__device__ __forceinline__ u32 gated(u32 gate, u32 up) {
    float v0, v1, slope;
    activation(low(gate), v0, slope);
    activation(high(gate), v1, slope);
    return bf16x2(v0 * low(up), v1 * high(up));
}

// Replaces gate and up by their gradients and returns the value.
__device__ __forceinline__ u32 gated_grad(float d0, float d1, u32& gate, u32& up) {
    float v0, v1, s0, s1;
    activation(low(gate), v0, s0);
    activation(high(gate), v1, s1);
    const u32 value = bf16x2(v0 * low(up), v1 * high(up));
    gate = bf16x2(d0 * low(up) * s0, d1 * high(up) * s1);
    up = bf16x2(d0 * v0, d1 * v1);
    return value;
}

// Replaces h by its gradient and returns the value.
__device__ __forceinline__ u32 activated_grad(float d0, float d1, u32& h) {
    float v0, v1, s0, s1;
    activation(low(h), v0, s0);
    activation(high(h), v1, s1);
    h = bf16x2(d0 * s0, d1 * s1);
    return bf16x2(v0, v1);
}

// Adds the values of a lane and of the lane at distance LANES: the lower keeps the sums of the first COUNT values, the upper
// those of the others.
template <int LANES, int COUNT, int SIZE> __device__ __forceinline__ void halve(float (&x)[SIZE]) {
    const bool upper = threadIdx.x & LANES;
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        const float got = __shfl_xor_sync(ALL_LANES, upper ? x[k] : x[k + COUNT], LANES);
        x[k] = (upper ? x[k + COUNT] : x[k]) + got;
    }
}
