// dx = drop(du a), plus base where HAS_BASE. Without DROPS nothing is dropped, and with OUT the weight is stored transposed,
// [WIDTH, RANK]: the product of an adapter's B.
//
// A warp keeps its 64 columns of a in registers and iterates over `tiles` times 16 rows, whose du it prefetches one iteration
// ahead; the WARPS warps of a thread block take neighbouring columns of the same rows, so that du comes from L1. A lane has
// eight columns of two rows, twice.
// A sum without a dropout also requests its base one iteration ahead, as far as registers allow (AHEAD).
// Moves dx out, base in. Deterministic: an element is one sum. dx and base may be the same memory. [16384, 1152] by rank 48
// took 19.7 us on an H200 and 28.4 onto a base, [16384, 1024] by rank 16 14.1 and 22.

// A lane's elements of 16 rows of du: a quarter of the ranks of rows g and g + 8.
struct Low {
    u32 x[2][NARROW];
#if DROPS
    int2 row[2];
#endif
};

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
thin_up(const bf16* du, const bf16* a, const bf16* base, const int* rng, const int* rows, bf16* dx, int m, int tiles,
        int key_low, int key_high, float keep) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int column = (blockIdx.x * WARPS + warp) * 64;
    if (column >= WIDTH) return;
#if DROPS
    const Drawing drawing(rng, rows, key_low, key_high);
#endif
    auto is_there = [&](int piece) { return WIDTH % 64 == 0 || column + 8 * piece < WIDTH; };

    // Position 2 i + e of a result's columns, i < 4, is column 8 i + 2 j + e of a half of the 64, for the half's j-th product,
    // so that a lane has columns 8 t to 8 t + 7. Ranks 2 i and 2 i + 1 of a lane form a word.
    u32 b[2][4][NARROW];
#pragma unroll
    for (int c = 0; c < 2; c++)
#pragma unroll
        for (int i = 0; i < NARROW; i++) {
#if OUT
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const bf16* from = a + (i64)(column + 32 * c + 8 * (g / 2) + 2 * j + g % 2) * A_ROW + t * (RANK / 4) + 2 * i;
                b[c][j][i] = is_there(4 * c + g / 2) ? __ldg(reinterpret_cast<const u32*>(from)) : 0;
            }
#else
            uint4 even = make_uint4(0, 0, 0, 0), odd = even;
            if (is_there(4 * c + g / 2)) {
                const bf16* from = a + (i64)(t * (RANK / 4) + 2 * i) * A_ROW + column + 32 * c + 8 * (g / 2);
                even = __ldg(reinterpret_cast<const uint4*>(from));
                odd = __ldg(reinterpret_cast<const uint4*>(from + A_ROW));
            }
            const u32 half = g % 2 ? 0x7632 : 0x5410;
            b[c][0][i] = __byte_perm(even.x, odd.x, half);
            b[c][1][i] = __byte_perm(even.y, odd.y, half);
            b[c][2][i] = __byte_perm(even.z, odd.z, half);
            b[c][3][i] = __byte_perm(even.w, odd.w, half);
#endif
        }

    int first = 16 * blockIdx.y * tiles;
    const int end = min(first + 16 * tiles, m);
    dx += (i64)(first + g) * DX_ROW + column + 8 * t;
#if HAS_BASE
    base += (i64)(first + g) * BASE_ROW + column + 8 * t;
#endif
    auto fetch = [&](int first) {
        Low low;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int r = min(first + 8 * h + g, m - 1);
#if DROPS
            low.row[h] = drawing.row(r);
#endif
            const bf16* from = du + (i64)r * DU_ROW + t * (RANK / 4);
            if (NARROW % 2 == 0) {
#pragma unroll
                for (int i = 0; i < NARROW; i += 2) {
                    const uint2 two = __ldg(reinterpret_cast<const uint2*>(from) + i / 2);
                    low.x[h][i] = two.x, low.x[h][i + 1] = two.y;
                }
            } else {
#pragma unroll
                for (int i = 0; i < NARROW; i++) low.x[h][i] = __ldg(reinterpret_cast<const u32*>(from) + i);
            }
        }
        return low;
    };
#if HAS_BASE
    // A lane's elements of 16 rows of base, from row `at` on.
    struct Old {
        uint4 x[2][2];
    };
    auto fetch_base = [&](int at) {
        Old old;
#pragma unroll
        for (int c = 0; c < 2; c++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                if (at + 8 * h + g < end && is_there(4 * c + t))
                    old.x[c][h] = *reinterpret_cast<const uint4*>(base + 8 * h * BASE_ROW + 32 * c);
        base += 16 * BASE_ROW;
        return old;
    };
#if AHEAD
    Old coming = fetch_base(first);
#endif
#endif
    Low next = fetch(first);
#pragma unroll 1
    for (; first < end; first += 16, dx += 16 * DX_ROW) {
        const Low low = next;
#if HAS_BASE && AHEAD
        const Old old = coming;
        coming = fetch_base(first + 16);
#elif HAS_BASE
        const Old old = fetch_base(first);
#endif
        next = fetch(first + 16);
#pragma unroll
        for (int c = 0; c < 2; c++) {
            float sums[4][4] = {};
#pragma unroll
            for (int i = 0; i + 1 < NARROW; i += 2)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    mma(sums[j], low.x[0][i], low.x[1][i], low.x[0][i + 1], low.x[1][i + 1], b[c][j][i], b[c][j][i + 1]);
            if (NARROW % 2)
#pragma unroll
                for (int j = 0; j < 4; j++) mma_half(sums[j], low.x[0][NARROW - 1], low.x[1][NARROW - 1], b[c][j][NARROW - 1]);
#pragma unroll
            for (int h = 0; h < 2; h++) {
#if DROPS
                const uint4 drawn = drawing.of((column + 32 * c) / 8 + t, low.row[h]);
                const u32 words[4] = {drawn.x, drawn.y, drawn.z, drawn.w};
#endif
                u32 out[4];
#if HAS_BASE
                const u32 was[4] = {old.x[c][h].x, old.x[c][h].y, old.x[c][h].z, old.x[c][h].w};
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    float even = __uint_as_float(was[j] << 16), odd = __uint_as_float(was[j] & 0xffff0000u);
#if DROPS
                    if (words[j] << 16 >= BELOW * 0x10000u) even = fmaf(sums[j][2 * h], keep, even);
                    if (words[j] >= BELOW * 0x10000u) odd = fmaf(sums[j][2 * h + 1], keep, odd);
                    out[j] = bf16x2(even, odd);
#else
                    out[j] = bf16x2(sums[j][2 * h] + even, sums[j][2 * h + 1] + odd);
#endif
                }
#else
#pragma unroll
                for (int j = 0; j < 4; j++)
#if DROPS
                    out[j] = kept_of(bf16x2(sums[j][2 * h] * keep, sums[j][2 * h + 1] * keep), words[j]);
#else
                    out[j] = bf16x2(sums[j][2 * h], sums[j][2 * h + 1]);
#endif
#endif
                if (first + 8 * h + g < end && is_there(4 * c + t))
                    *reinterpret_cast<uint4*>(dx + 8 * h * DX_ROW + 32 * c) = make_uint4(out[0], out[1], out[2], out[3]);
            }
        }
    }
}
