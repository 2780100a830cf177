// da = du^T drop(x), plus base where HAS_BASE.
//
// A thread block takes 64 columns of `tiles` times 16 rows; its WARPS warps take 16 rows in turn. A lane has 8 columns of 4
// rows, which as pairs of rows are left factors, 16 columns by 16 rows each; du, transposed by ldmatrix, is the right factor.
// Both come through shared memory, prefetched one turn ahead. The warps' sums are added in shared memory, TOGETHER times 8
// ranks at once, and those of the blocks by `thin_weight_sum`, both in order: deterministic. Moves x in, du once per slab of 64
// columns, the blocks' sums out and in. [16384, 1152] by rank 48 took 23.8 us on an H200, [16384, 1024] by rank 16 18.

#define DU_PITCH (NARROW % 2 ? NARROW : NARROW + 1)
#define STAGE_BYTES (u32)sizeof(Stage)

// Piece p of a row of x is stored at p ^ 2 (row % 4), so that lanes of four rows read from different banks; for the same reason
// a row of du has an odd number of pieces.
struct Stage {
    uint4 x[16][8];
    uint4 du[16][DU_PITCH];
    int2 rows[16];
};
union Shared {
    Stage ring[WARPS][2];
    float parts[WARPS][8 * TOGETHER][64 + 4];
};

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
thin_weight(const bf16* du, const bf16* x, const int* rng, const int* rows, float* partial, int m, int tiles, int key_low,
            int key_high) {
    __shared__ __align__(128) Shared shared;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int slab = blockIdx.x * 64;
    const bool is_column = WIDTH % 64 == 0 || slab + 8 * (lane % 8) < WIDTH;
    const Drawing drawing(rng, rows, key_low, key_high);
    int first = 16 * (blockIdx.y * tiles + warp);
    const int end = min(16 * ((int)blockIdx.y + 1) * tiles, m);
    x += (i64)(first + lane / 8) * X_ROW + slab + 8 * (lane % 8);
    du += (i64)first * DU_ROW;
    const u32 ring = shared_address(shared.ring[warp]), du_ring = ring + 2048, rows_ring = du_ring + 256 * DU_PITCH;
    const u32 to_x = ring + lane / 8 * 128 + (lane % 8 ^ lane / 8 * 2) * 16;
    const u32 from_x = ring + t * 128 + (g ^ t * 2) * 16;
    // Row i of a matrix is row i / 2 + 4 (i % 2) of the tile, so that a lane's inner indices match its pieces.
    const u32 from_du = du_ring + ((lane % 8 / 2 + lane % 2 * 4 + lane / 8 % 2 * 8) * DU_PITCH + lane / 16) * 16;
    auto fetch = [&](int turns, u32 stage) {
        const int skip = 16 * WARPS * turns, left = end - first - skip;
        if (left > 0) {
#pragma unroll
            for (int i = 0; i < 16; i += 4)
                copy16(to_x + stage + 128 * i, x + (skip + i) * X_ROW, lane / 8 + i < left && is_column);
#pragma unroll
            for (int i = 0; i < 16 * NARROW; i += 32) {
                const int r = (i + lane) / NARROW, c = (i + lane) % NARROW;
                if (NARROW % 2 == 0 || r < 16)
                    copy16_near(du_ring + stage + (r * DU_PITCH + c) * 16, du + (skip + r) * DU_ROW + 8 * c, r < left);
            }
            if (lane < 16) copy8(rows_ring + stage + 8 * lane, rows + (i64)min(first + skip + lane, m - 1) * ROWS_ROW);
        }
        commit();
    };
    fetch(0, 0);

    float sums[4][NARROW][4] = {};
    u32 stage = 0;
#pragma unroll 1
    while (first < end) {
        fetch(1, STAGE_BYTES - stage);
        first += 16 * WARPS, x += 16 * WARPS * X_ROW, du += 16 * WARPS * DU_ROW;
        arrived<1>();
        __syncwarp();
        uint4 drawn[4];
#pragma unroll
        for (int i = 0; i < 4; i++) drawn[i] = drawing.of(slab / 8 + g, read8(rows_ring + stage + 8 * (4 * i + t)));
        u32 b[NARROW + 1][2];
#pragma unroll
        for (int j = 0; j < NARROW; j += 2) {
            u32 two[4];
            if (j + 1 < NARROW) ldmatrix_across(two, from_du + stage + 16 * j);
            else ldmatrix_across_half(two, from_du + stage + 16 * j);
            b[j][0] = two[0], b[j][1] = two[1], b[j + 1][0] = two[2], b[j + 1][1] = two[3];
        }
        // The lane's columns 2 k and 2 k + 1, of rows t, 4 + t, 8 + t and 12 + t.
        u32 pairs[4][4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint4 kept = kept_of(read16(from_x + stage + 512 * i), drawn[i]);
            pairs[0][i] = kept.x, pairs[1][i] = kept.y, pairs[2][i] = kept.z, pairs[3][i] = kept.w;
        }
        __syncwarp();
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const u32 even[2] = {__byte_perm(pairs[k][0], pairs[k][1], 0x5410), __byte_perm(pairs[k][2], pairs[k][3], 0x5410)};
            const u32 odd[2] = {__byte_perm(pairs[k][0], pairs[k][1], 0x7632), __byte_perm(pairs[k][2], pairs[k][3], 0x7632)};
#pragma unroll
            for (int j = 0; j < NARROW; j++) mma(sums[k][j], even[0], odd[0], even[1], odd[1], b[j][0], b[j][1]);
        }
        stage = STAGE_BYTES - stage;
    }
    arrived<0>();

#pragma unroll
    for (int from = 0; from < NARROW; from += TOGETHER) {
        __syncthreads();
#pragma unroll
        for (int j = from; j < NARROW && j < from + TOGETHER; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float4* to = reinterpret_cast<float4*>(&shared.parts[warp][8 * (j - from) + 2 * t + e][8 * g]);
                to[0] = make_float4(sums[0][j][e], sums[0][j][2 + e], sums[1][j][e], sums[1][j][2 + e]);
                to[1] = make_float4(sums[2][j][e], sums[2][j][2 + e], sums[3][j][e], sums[3][j][2 + e]);
            }
        __syncthreads();
        const int column = threadIdx.x % 16 * 4, ranks = min(8 * TOGETHER, RANK - 8 * from);
        if (slab + column >= WIDTH) continue;
        for (int r = threadIdx.x / 16; r < ranks; r += 2 * WARPS) {
            float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
            for (int w = 0; w < WARPS; w++) sum += *reinterpret_cast<const float4*>(&shared.parts[w][r][column]);
            *reinterpret_cast<float4*>(partial + ((i64)blockIdx.y * RANK + 8 * from + r) * WIDTH + slab + column) = sum;
        }
    }
}

// Adds the blocks' sums: four neighbours per thread.
extern "C" __global__ void __launch_bounds__(128)
thin_weight_sum(const float* partial, const float* base, float* da, int parts, float keep) {
    const int e = (blockIdx.x * 128 + threadIdx.x) * 4;
    if (e >= RANK * WIDTH) return;
    const int r = e / WIDTH, c = e % WIDTH;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f), old = sum;
#if HAS_BASE
    old = *reinterpret_cast<const float4*>(base + (i64)r * BASE_ROW + c);
#endif
#pragma unroll 16
    for (int i = 0; i < parts; i++) sum += *reinterpret_cast<const float4*>(partial + (i64)i * RANK * WIDTH + e);
    *reinterpret_cast<float4*>(da + (i64)r * DA_ROW + c) =
        make_float4(fmaf(sum.x, keep, old.x), fmaf(sum.y, keep, old.y), fmaf(sum.z, keep, old.z), fmaf(sum.w, keep, old.w));
}
