// Requantises NF4 weights to E4M3: y[e] = v[e] / scale, with v[e] the dequantised weight in bf16, as `dequantize.cu` stores it and
// `quantize.cu` reads it. So bf16 values never reach memory.
//
// codes u8 [M, N / 2], two per byte, the first in the upper half, with the magnitudes of `nf4.cuh`. N is a multiple of 16. y [M, N]
// in E4M3, or with TRANSPOSED [N, M], dense rows at any pitch. All arithmetic is f32, never contracted; v is rounded once to bf16 and
// once more to E4M3, in between divided by a power of two: the bits are those of the two operations. Deterministic. Moves half a byte
// and a 64th of a magnitude per value in, one byte out.
//
// A thread block takes a tile of 128 x 128, a thread 16 neighbours, which lie in one block of magnitudes, in each of 4 rows. All loads
// are issued before the first result and none is conditional: a thread outside the matrix reads its last row or columns and stores
// nothing. Transposed codes go through shared memory, four rows to a word, from which neighbouring threads store 16 rows of a column
// each. Words there are swizzled, so that neither side has bank conflicts.

#define VALUES 16
#define LANES (COLUMNS / VALUES)
#define GROUPS (THREADS / LANES)
#define ROWS (4 * GROUPS)

// Stores 16 codes, of which the first `count` are wanted.
__device__ __forceinline__ void store(const Pack<e4m3, 16>& codes, e4m3* to, int count) {
#if VEC_Y == 16
    if (count >= 16) return codes.store(to);
#endif
#pragma unroll
    for (int k = 0; k < 16; k++)
        if (k < count) to[k] = codes.x[k];
}

extern "C" __global__ void __launch_bounds__(THREADS)
    requantize(const u8* codes, const float* map, const u8* absmax, const float* nested, const float* offset,
               const float* scale, e4m3* y, int m, int n, i64 pitch) {
    static_assert(THREADS == 256, "a thread copies one value of the map");
    __shared__ float values[16];
    __shared__ float decoded[256];
    if (threadIdx.x < 16) values[threadIdx.x] = NF4[threadIdx.x];
    decoded[threadIdx.x] = map[threadIdx.x];
    float mean = *offset, by = 1.0f / *scale;

    int across = (n + COLUMNS - 1) / COLUMNS;
    int first_column = blockIdx.x % across * COLUMNS, first_row = blockIdx.x / across * ROWS;
    int lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
    int column = first_column + lane * VALUES, row = first_row + group * 4;
    Pack<u8, VALUES / 2> pairs[4];
    u8 code[4];
    float largest[4];
#pragma unroll
    for (int r = 0; r < 4; r++) {
        i64 e = (i64)min(row + r, m - 1) * n + min(column, n - VALUES);
#if VEC_CODES == 8
        pairs[r].load(codes + e / 2);
#else
#pragma unroll
        for (int k = 0; k < VALUES / 2; k++) pairs[r].x[k] = codes[e / 2 + k];
#endif
        code[r] = absmax[e / 64];
        largest[r] = nested[e / (64 * 256)];
    }
    __syncthreads();

    // Four neighbouring codes of each row a word.
    u32 words[VALUES / 4][4];
#pragma unroll
    for (int r = 0; r < 4; r++) {
        float magnitude = nf4_magnitude(decoded[code[r]], largest[r], mean);
        float v[VALUES];
#pragma unroll
        for (int k = 0; k < VALUES / 2; k++) {
            v[2 * k] = __fmul_rn(values[pairs[r].x[k] >> 4], magnitude);
            v[2 * k + 1] = __fmul_rn(values[pairs[r].x[k] & 15], magnitude);
        }
        Pack<bf16, VALUES> narrow;
        put(narrow, v);
#pragma unroll
        for (int k = 0; k < VALUES; k++) v[k] = f32(narrow.x[k]) * by;
#pragma unroll
        for (int w = 0; w < VALUES / 4; w++)
            words[w][r] = codes_of<e4m3>(v[4 * w], v[4 * w + 1], v[4 * w + 2], v[4 * w + 3]);
    }

#if TRANSPOSED
    // 16 bytes of a column are four neighbouring words, whose order the swizzle preserves.
    __shared__ __align__(16) u32 turned[COLUMNS][GROUPS];
#pragma unroll
    for (int w = 0; w < VALUES / 4; w++) {
        u32 columns[4];
        transpose_codes(words[w], columns);
#pragma unroll
        for (int k = 0; k < 4; k++) turned[lane * VALUES + w * 4 + k][group ^ lane * 4 % GROUPS] = columns[k];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < COLUMNS * GROUPS / 4 / THREADS; i++) {
        int at = i * THREADS + threadIdx.x;
        int c = at / (GROUPS / 4), part = at % (GROUPS / 4), to_row = first_row + part * 16;
        if (first_column + c >= n || to_row >= m) continue;
        Pack<e4m3, 16> p;
        p.words[0] = *reinterpret_cast<uint4*>(&turned[c][part * 4 ^ c / VALUES * 4 % GROUPS]);
        store(p, y + (first_column + c) * pitch + to_row, m - to_row);
    }
#else
    if (column >= n) return;
#pragma unroll
    for (int r = 0; r < 4; r++) {
        Pack<e4m3, 16> p;
        p.words[0] = make_uint4(words[0][r], words[1][r], words[2][r], words[3][r]);
        if (row + r < m) store(p, y + (row + r) * pitch + column, 16);
    }
#endif
}
