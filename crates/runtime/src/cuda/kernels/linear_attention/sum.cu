// A weighted sum of linear attention in bf16 by mma, over segments of any length (`weighted_sum.rs` lists the sums): out_i =
// sum over heads and j of W_ij x_j, W = M(scale a b^T),
// a [Ta, HA, INNER] on the side of out [Ta, HO, WIDTH], b [Tb, HB, INNER] and x [Tb, HX, WIDTH] on the opposite side, heads'
// rows at any stride, 16-byte aligned; INNER and WIDTH multiples of 8. Rows outside every segment are neither read nor written.
//
// A thread block owns OWN rows and SLICE columns of one head of `out`, a warp 16 of these rows. For each head that shares the
// output, and each tile of WALK rows of the opposite side that is not masked, weights are accumulated over INNER in registers,
// scaled, masked, rounded to bf16 as the left operand of the second product, and multiplied onto the result, which stays in
// registers until the epilogue: weights never leave the warp. A wider result is cut into slices, each of which recomputes the
// weights. a, b and x are loaded in panels of 64 columns through a ring of STAGES pipeline stages, filled by cp.async.
//
// OWNER: the role of the rows: 0 queries, 1 keys, 2 both (the gradient of queries that double as keys: W_ij = M(scale a_i b_j)
// + M(scale a_j b_i)). Without a mask the two terms are one sum; with one, each off-diagonal tile has only one of them, so they
// are processed one after the other.
//
// FLOPs: 2 pairs (INNER slices + WIDTH); bytes: tiles / 2 times b and x through L2. The order of every sum follows from the
// shapes and the segments: deterministic. No spills.

#define THREADS (2 * OWN)
#define SLOT ((OWN + WALK) * 128)
// Panels of the weights' inner dimension, twice if both terms are one sum; then those of the slice.
#define INNER_ITEMS ((INNER + 63) / 64)
#define WEIGHT_ITEMS (OWNER == 2 && MASK == 0 ? 2 * INNER_ITEMS : INNER_ITEMS)
#define ITEMS (WEIGHT_ITEMS + SLICE / 64)
#define TERMS (OWNER == 2 && MASK != 0 ? 2 : 1)

extern __shared__ __align__(128) u8 memory[];

// The range of opposite rows for which owned rows [first, end) have weights, as queries or as keys.
__device__ __forceinline__ int2 walked(const Segment& g, int first, int end, bool as_keys) {
    int2 range = as_keys ? make_int2(g.q0, g.q1) : make_int2(g.k0, g.k1);
    const int shift = g.k1 - g.q1;
#if MASK != 0
    if (as_keys)
        range.x = max(range.x, first - shift + (MASK == 2));
    else
        range.y = min(range.y, end - 1 + shift + (MASK == 1));
#endif
    return range;
}

// A position in the pipeline's sequence of items: head, term, tile of the opposite side, panel.
struct Cursor {
    int head, term, from, end, item;
};

// Without launch bounds, the compilers for sm_100 and sm_120 limit small blocks to so few registers that they spill.
#if __CUDA_ARCH__ >= 1000
#define BOUNDS __launch_bounds__(THREADS, 1)
#else
#define BOUNDS __launch_bounds__(THREADS)
#endif

// Grid: tiles of every segment on the owned side, output heads with slices innermost.
extern "C" __global__ void BOUNDS
weighted_sum(const bf16* a, const bf16* b, const bf16* x, bf16* out, const int* q_start, const int* q_len,
             const int* k_start, const int* k_len, i64 a_token, i64 a_head, i64 b_token, i64 b_head, i64 x_token,
             i64 x_head, i64 out_token, i64 out_head, int tq, int tk, int q_longest, int k_longest, int tiles, int heads,
             int a_heads, int b_heads, int x_heads, int out_heads, float scale) {
    const int out_of = blockIdx.y / SLICES, slice = blockIdx.y % SLICES * SLICE, strip = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const Segment g =
        segment_of(blockIdx.x / tiles, q_start, q_len, k_start, k_len, tq, tk, q_longest, k_longest);
    const int own0 = OWNER == 1 ? g.k0 : g.q0, own1 = OWNER == 1 ? g.k1 : g.q1;
    const int first = own0 + (int)(blockIdx.x % tiles) * OWN, end = min(first + OWN, own1);
    if (first >= own1) return;
    const u32 ring = shared_address(memory);
    const int head1 = (out_of + 1) * (heads / out_heads);

    const auto enter = [&](Cursor& c) {
        const int2 range = walked(g, first, end, OWNER == 1 || c.term == 1);
        c.from = range.x;
        c.end = range.y;
    };
    // Moves on to the next head and term that have a tile, or past the last head.
    const auto settle = [&](Cursor& c) {
        while (c.head < head1 && c.from >= c.end) {
            if (++c.term == TERMS) {
                c.term = 0;
                c.head++;
            }
            enter(c);
        }
    };
    const auto advance = [&](Cursor& c) {
        if (++c.item < ITEMS) return;
        c.item = 0;
        c.from += WALK;
        settle(c);
    };
    const auto start = [&]() {
        Cursor c = {out_of * (heads / out_heads), 0, 0, 0, 0};
        enter(c);
        settle(c);
        return c;
    };

    Cursor ahead = start();
    int filled = 0;
    const auto fetch = [&]() {
        if (ahead.head < head1) {
            const u32 slot = ring + filled % STAGES * SLOT;
            const bool swaps = ahead.term == 1 || ahead.item >= INNER_ITEMS;
            if (ahead.item < WEIGHT_ITEMS) {
                // When owned rows act as keys, a and b exchange their roles.
                const bf16* left = swaps ? b + ahead.head * b_heads / heads * b_head
                                         : a + ahead.head * a_heads / heads * a_head;
                const bf16* right = swaps ? a + ahead.head * a_heads / heads * a_head
                                          : b + ahead.head * b_heads / heads * b_head;
                const int column = 64 * (ahead.item % INNER_ITEMS);
                load_panel<OWN, THREADS, INNER>(slot, left, swaps ? b_token : a_token, first, own1, column);
                load_panel<WALK, THREADS, INNER>(slot + OWN * 128, right, swaps ? a_token : b_token, ahead.from, ahead.end,
                                                 column);
            } else {
                load_panel<WALK, THREADS, WIDTH>(slot, x + ahead.head * x_heads / heads * x_head, x_token, ahead.from,
                                                 ahead.end, slice + 64 * (ahead.item - WEIGHT_ITEMS));
            }
            advance(ahead);
        }
        filled++;
        copies_end();
    };
    int used = 0;
    const auto next = [&]() {
        copies_wait<STAGES - 2>();
        __syncthreads();
        fetch();
        return ring + used++ % STAGES * SLOT;
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) fetch();

    float result[SLICE / 8][4];
    clear(result);
    const int shift = g.k1 - g.q1;
    Cursor at = start();
#pragma unroll 1
    while (at.head < head1) {
        float sum[WALK / 8][4];
        clear(sum);
#pragma unroll 1
        for (int i = 0; i < WEIGHT_ITEMS; i++) {
            const u32 slot = next();
#pragma unroll
            for (int step = 0; step < 4; step++) {
                const Fragment left = load_rows(slot, 16 * strip, step);
#pragma unroll
                for (int j = 0; j < WALK / 16; j++) {
                    const Fragment right = load_rows(slot + OWN * 128, 16 * j, step);
                    mma(sum[2 * j], left, right.x[0], right.x[2]);
                    mma(sum[2 * j + 1], left, right.x[1], right.x[3]);
                }
            }
        }
        // Rows past the end of either side are zeros, and so are their weights.
        Fragment w[WALK / 16];
#pragma unroll
        for (int n = 0; n < WALK / 8; n++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float pair[2];
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int i = first + 16 * strip + lane / 4 + 8 * half, j = at.from + 8 * n + 2 * (lane % 4) + e;
                    const bool as_keys = OWNER == 1 || at.term == 1;
                    const bool is_seen = as_keys ? sees(j + shift, i) : sees(i + shift, j);
                    pair[e] = is_seen ? scale * sum[n][2 * half + e] : 0.0f;
                }
                w[n / 2].x[n % 2 * 2 + half] = bf16x2(pair[0], pair[1]);
            }
#pragma unroll
        for (int panel = 0; panel < SLICE / 64; panel++) {
            const u32 slot = next();
#pragma unroll
            for (int k = 0; k < WALK / 16; k++)
#pragma unroll
                for (int step = 0; step < 4; step++) {
                    const Fragment right = load_columns(slot, 16 * k, step);
                    mma(result[8 * panel + 2 * step], w[k], right.x[0], right.x[1]);
                    mma(result[8 * panel + 2 * step + 1], w[k], right.x[2], right.x[3]);
                }
        }
        at.item = ITEMS - 1;
        advance(at);
    }
    copies_wait<0>();
    __syncthreads();
    const u32 rows_out = ring + 2048 * strip;
#pragma unroll
    for (int panel = 0; panel < SLICE / 64; panel++) {
        round_tiles<8>(rows_out, result + 8 * panel, 0);
        store_panel(rows_out, out + out_of * out_head, out_token, first + 16 * strip, own1, slice + 64 * panel, WIDTH);
    }
}
