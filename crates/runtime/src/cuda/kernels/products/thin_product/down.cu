// u = drop(x) a^T.
//
// A thread block takes 32 rows, and each of its WARPS warps a part of the columns, 32 at a time: two fragments of 16 rows,
// whose pieces come through shared memory by cp.async, 64 columns ahead. a is read through L1, which the blocks of a
// multiprocessor share. The warps' sums are added in order: deterministic. Moves x in, u out; a from L2 once per
// multiprocessor. [16384, 1024] by rank 16 took 13.4 us on an H200, [16384, 1152] by rank 48 19.9: drawing takes 6 us of the
// integer units' time, and the products overlap it.

#define ROWS 32
#define CHUNKS ((WIDTH + 31) / 32)
#define STAGE_BYTES (128 * ROWS)
// With high ranks, registers are scarce: a's pieces are requested after the previous ones were used, not while drawing.
#define AHEAD (RANK > 32)

union Shared {
    uint4 ring[WARPS][2][ROWS][8];
    float parts[WARPS][ROWS][RANK + 8];
};

__device__ __forceinline__ uint4 read_a(const bf16* from) {
    uint4 x;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from));
    return x;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
thin_down(const bf16* x, const bf16* a, const int* rng, const int* rows, bf16* u, int m, int key_low, int key_high, float keep) {
    __shared__ __align__(128) Shared shared;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int first = blockIdx.x * ROWS, left = m - first - lane / 8;
    const Drawing drawing(rng, rows, key_low, key_high);
    int chunk = warp * CHUNKS / WARPS;
    const int end = (warp + 1) * CHUNKS / WARPS;
    x += (i64)(first + lane / 8) * X_ROW + 32 * chunk + 8 * (lane % 8);
    a += g * A_ROW + 32 * chunk + 8 * t;

    // Eight lanes copy 128 bytes of a row. Odd rows have their halves swapped, so that lanes of two rows read from different
    // banks.
    const u32 ring = shared_address(shared.ring[warp]);
    const u32 to_lane = ring + lane / 8 * 128 + (lane % 8 ^ lane / 8 % 2 * 4) * 16;
    const u32 from_lane = ring + g * 128 + (t ^ g % 2 * 4) * 16;
    auto fetch = [&](int ahead, u32 stage) {
        const int column = 32 * (chunk + ahead) + 8 * (lane % 8);
        if (column < 32 * end)
#pragma unroll
            for (int i = 0; i < ROWS; i += 4)
                if (i < left) copy16(to_lane + stage + 128 * i, x + i * X_ROW + 32 * ahead, WIDTH % 32 == 0 || column < WIDTH);
        commit();
    };
    fetch(0, 0);
    int2 row[4];
#pragma unroll
    for (int i = 0; i < 4; i++) row[i] = drawing.row(min(first + 8 * i + g, m - 1));
    uint4 b[NARROW];
    auto load = [&](int c) {
        const bool is_there = c < end && (WIDTH % 32 == 0 || 32 * c + 8 * t < WIDTH);
#pragma unroll
        for (int j = 0; j < NARROW; j++) b[j] = is_there ? read_a(a + 8 * j * A_ROW) : make_uint4(0, 0, 0, 0);
        a += 32;
    };
    if (AHEAD) load(chunk);

    float sums[2][NARROW][4] = {};
    u32 stage = 0, half = 0;
#pragma unroll 1
    for (; chunk < end; chunk++) {
        if (!AHEAD) load(chunk);
        if (half == 0) {
            __syncwarp();
            fetch(2, stage ^ STAGE_BYTES);
            x += 64;
            arrived<1>();
            __syncwarp();
        }
        const u32 from = from_lane + stage ^ half;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint4 upper = kept_of(read16(from + 2048 * i), drawing.of(4 * chunk + t, row[2 * i]));
            const uint4 lower = kept_of(read16(from + 2048 * i + 1024), drawing.of(4 * chunk + t, row[2 * i + 1]));
#pragma unroll
            for (int j = 0; j < NARROW; j++) mma(sums[i][j], upper.x, lower.x, upper.y, lower.y, b[j].x, b[j].y);
#pragma unroll
            for (int j = 0; j < NARROW; j++) mma(sums[i][j], upper.z, lower.z, upper.w, lower.w, b[j].z, b[j].w);
        }
        if (AHEAD) load(chunk + 1);
        stage ^= half ? STAGE_BYTES : 0;
        half ^= 64;
    }
    arrived<0>();
    __syncthreads();

#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < NARROW; j++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                *reinterpret_cast<float2*>(&shared.parts[warp][16 * i + 8 * h + g][8 * j + 2 * t]) =
                    make_float2(sums[i][j][2 * h], sums[i][j][2 * h + 1]);
    __syncthreads();
    for (int e = threadIdx.x; e < ROWS * RANK / 2; e += 32 * WARPS) {
        const int r = e / (RANK / 2), c = e % (RANK / 2) * 2;
        if (first + r >= m) break;
        float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float2 part = *reinterpret_cast<const float2*>(&shared.parts[w][r][c]);
            sum.x += part.x, sum.y += part.y;
        }
        *reinterpret_cast<u32*>(u + (i64)(first + r) * U_ROW + c) = bf16x2(sum.x * keep, sum.y * keep);
    }
}
