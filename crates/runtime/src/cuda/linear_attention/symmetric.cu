// Linear attention of queries r that are their own keys, over segments of at most STRIPS * 16 rows, in bf16:
//   o = M(scale r r^T) v,   with ds = M(scale do v^T):  dr = (ds + ds^T) r,   dv = M(scale r r^T)^T do,
// r, dr [T, H, N], v, dv [T, HV, D], o, do [T, H, D], a head's rows at any stride, 16-byte aligned; N and D multiples of 8.
// Rows outside every segment are neither read nor written.
//
// A segment fits in one tile, so that scores are made once and never leave the chip. A warp a strip of 16 rows. The scores
// are symmetric, so of the strips' pairs (i, j) only one of (i, j), (j, i) is multiplied: warp i takes (i, i + d) for d up to
// STRIPS / 2, counted in a circle, so that each warp has equally many, and the other half is the transposed fragment. The
// diagonal's right operand is its left operand's registers. Of 5 strips, 15 tiles are multiplied instead of 25.
//
// Everything is read in items of two panels (64 columns each) through a ring of STAGES slots, copied beside the
// computation:  forward: r, then v.  Backward, a head: do with v, r, do, then r again, which is in L2 by now.
// Forward moves r + v + o, backward 2 r + v + 2 do + dr + dv, of which r and do once from L2: at H 6, N 1024, D 192,
// T 512 x 65, that is 498 MB forward and 1,000 MB backward from memory, 104 and 208 us of an H200's 4.8 TB/s; the products
// are 32 GFLOP (as 65 rows) forward and 64 backward, 32 and 65 us at its peak.
//
// Forward: a block a head and segment. Backward: a block takes the heads [part * HEADS, (part + 1) * HEADS) of those that
// share a value head, one after the other, and keeps their sum of dv in registers: the order of every sum follows from the
// shapes. Where the heads are cut into parts, each part writes its sum in f32 and `symmetric_dv` adds them up in order.

#define ROWS (16 * STRIPS)
#define THREADS (32 * STRIPS)
#define PANEL (ROWS * 128)
#define SLOT (2 * PANEL)
// Rows of weights [ROWS, ROWS] in bf16, 16 bytes apart more than they are long: eight of them begin in different banks.
#define PITCH (2 * ROWS + 16)
#define WEIGHTS (ROWS * PITCH)
#define REACH (STRIPS / 2)
// Items of 128 columns.
#define N_ITEMS ((N + 127) / 128)
#define D_ITEMS ((D + 127) / 128)

extern __shared__ __align__(128) u8 memory[];

// The strip a warp multiplies its own with, d further on; none where the other one takes the pair.
__device__ __forceinline__ int partner(int strip, int d) {
    if (STRIPS % 2 == 0 && d == REACH && d > 0 && strip >= REACH) return -1;
    return (strip + d) % STRIPS;
}

// sum[d] += the products of the warp's strip of a panel with its partners'.
__device__ __forceinline__ void add_scores(float (&sum)[2 * (REACH + 1)][4], u32 panel, int strip) {
#pragma unroll
    for (int step = 0; step < 4; step++) {
        const Fragment a = load_rows(panel, 16 * strip, step);
        mma(sum[0], a, a.x[0], a.x[2]);
        mma(sum[1], a, a.x[1], a.x[3]);
#pragma unroll
        for (int d = 1; d <= REACH; d++) {
            const int other = partner(strip, d);
            if (other < 0) continue;
            const Fragment b = load_rows(panel, 16 * other, step);
            mma(sum[2 * d], a, b.x[0], b.x[2]);
            mma(sum[2 * d + 1], a, b.x[1], b.x[3]);
        }
    }
}

__device__ __forceinline__ void put_word(u32 weights, int row, int column, u32 word) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(weights + row * PITCH + 2 * column), "r"(word) : "memory");
}

// Writes a warp's tiles and their transposes as weights [ROWS, ROWS]. `by_keys`: rows are keys, columns queries. Tiles
// off the diagonal are seen whole or not at all. `is_sum`: the tiles are sums over both sides, masked already.
__device__ __forceinline__ void put_weights(u32 weights, const float (&sum)[2 * (REACH + 1)][4], float scale, int strip,
                                            bool by_keys, bool is_sum) {
    const int lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4;
#pragma unroll
    for (int d = 0; d <= REACH; d++) {
        const int other = partner(strip, d);
        if (other < 0) continue;
        // Whether the tile (strip, other) is seen, and (other, strip).
        bool is_seen = true, is_seen_back = true;
#if MASK != 0
        if (!is_sum && d > 0) {
            is_seen = (strip > other) != by_keys;
            is_seen_back = !is_seen;
        }
#endif
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = 16 * strip + 8 * half, column = 16 * other + 8 * n;
                float x = scale * sum[2 * d + n][2 * half], y = scale * sum[2 * d + n][2 * half + 1];
#if MASK != 0
                if (!is_sum && d == 0) {
                    const int i = row + group, j = column + 2 * pair;
                    if (!(by_keys ? sees(j, i) : sees(i, j))) x = 0.0f;
                    if (!(by_keys ? sees(j + 1, i) : sees(i, j + 1))) y = 0.0f;
                }
#endif
                const u32 word = bf16x2(x, y);
                put_word(weights, row + group, column + 2 * pair, is_seen ? word : 0);
                if (d > 0) {
                    const u32 back = transposed(word);
                    put_word(weights, column + group, row + 2 * pair, is_seen_back ? back : 0);
                }
            }
    }
}

// The warp's rows of weights as left operands.
__device__ __forceinline__ void take_weights(Fragment (&w)[STRIPS], u32 weights, int strip) {
    const int lane = threadIdx.x % 32;
    const u32 at = weights + (16 * strip + lane % 16) * PITCH + lane / 16 * 16;
#pragma unroll
    for (int k = 0; k < STRIPS; k++)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(w[k].x[0]), "=r"(w[k].x[1]), "=r"(w[k].x[2]), "=r"(w[k].x[3])
                     : "r"(at + 32 * k));
}

// sum [16, 16 STEPS] += the warp's weights times columns [16 from, 16 (from + STEPS)) of a panel.
template <int STEPS>
__device__ __forceinline__ void add_columns(float (*sum)[4], const Fragment (&w)[STRIPS], u32 panel, int from) {
#pragma unroll
    for (int k = 0; k < STRIPS; k++)
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const Fragment b = load_columns(panel, 16 * k, from + step);
            mma(sum[2 * step], w[k], b.x[0], b.x[1]);
            mma(sum[2 * step + 1], w[k], b.x[2], b.x[3]);
        }
}

// The warp's weights times a panel, rounded into the warp's own. In two halves: fewer sums at once.
__device__ __forceinline__ void weigh_panel(u32 rows_out, const Fragment (&w)[STRIPS], u32 panel) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float sum[4][4];
        clear(sum);
        add_columns<2>(sum, w, panel, 2 * half);
        round_tiles<4>(rows_out, sum, 4 * half);
    }
}

__device__ __forceinline__ void load_item(u32 slot, const bf16* from, i64 token, int first, int end, int item,
                                          int columns) {
    load_panel<ROWS, THREADS>(slot, from, token, first, end, 128 * item, columns);
    load_panel<ROWS, THREADS>(slot + PANEL, from, token, first, end, 128 * item + 64, columns);
}

#if !GRAD

// Grid: heads, segments.
extern "C" __global__ void __launch_bounds__(THREADS, STRIPS < 6 ? 3 : 2)
symmetric_forward(const bf16* r, const bf16* v, bf16* o, const int* start, const int* len, i64 r_token, i64 r_head,
                  i64 v_token, i64 v_head, i64 o_token, i64 o_head, int tokens, int longest, int group, float scale) {
    const int head = blockIdx.x, strip = threadIdx.x / 32;
    const Segment g = segment_of(blockIdx.y, start, len, start, len, tokens, tokens, longest, longest);
    if (g.q0 >= g.q1) return;
    const u32 ring = shared_address(memory), weights = ring + STAGES * SLOT, rows_out = weights + WEIGHTS + 2048 * strip;
    r += head * r_head;
    v += head / group * v_head;
    o += head * o_head;
    const auto fetch = [&](int n) {
        const u32 slot = ring + n % STAGES * SLOT;
        if (n < N_ITEMS)
            load_item(slot, r, r_token, g.q0, g.q1, n, N);
        else if (n < N_ITEMS + D_ITEMS)
            load_item(slot, v, v_token, g.q0, g.q1, n - N_ITEMS, D);
        copies_end();
    };
#pragma unroll
    for (int n = 0; n < STAGES - 1; n++) fetch(n);

    float scores[2 * (REACH + 1)][4];
    clear(scores);
#pragma unroll 1
    for (int n = 0; n < N_ITEMS; n++) {
        copies_wait<STAGES - 2>();
        __syncthreads();
        fetch(n + STAGES - 1);
        const u32 slot = ring + n % STAGES * SLOT;
        add_scores(scores, slot, strip);
        add_scores(scores, slot + PANEL, strip);
    }
    put_weights(weights, scores, scale, strip, false, false);
    Fragment w[STRIPS];
#pragma unroll 1
    for (int n = N_ITEMS; n < N_ITEMS + D_ITEMS; n++) {
        copies_wait<STAGES - 2>();
        __syncthreads();
        fetch(n + STAGES - 1);
        if (n == N_ITEMS) take_weights(w, weights, strip);
        const u32 slot = ring + n % STAGES * SLOT;
#pragma unroll
        for (int panel = 0; panel < 2; panel++) {
            const int column = 128 * (n - N_ITEMS) + 64 * panel;
            if (column >= D) break;
            weigh_panel(rows_out, w, slot + panel * PANEL);
            store_panel(rows_out, o, o_token, g.q0 + 16 * strip, g.q1, column, D);
        }
    }
}

#else

// sum[d] += do_i v_j^T + v_i do_j^T, i the warp's strip and j its partner: of the two tiles the mask leaves one where
// i != j; on the diagonal both, apart, since their masks differ.
__device__ __forceinline__ void add_slopes(float (&sum)[2 * (REACH + 1)][4], float (&turned)[2][4], u32 slot, int strip) {
#pragma unroll
    for (int step = 0; step < 4; step++) {
        const Fragment d_i = load_rows(slot, 16 * strip, step), v_i = load_rows(slot + PANEL, 16 * strip, step);
        mma(sum[0], d_i, v_i.x[0], v_i.x[2]);
        mma(sum[1], d_i, v_i.x[1], v_i.x[3]);
        mma(turned[0], v_i, d_i.x[0], d_i.x[2]);
        mma(turned[1], v_i, d_i.x[1], d_i.x[3]);
#pragma unroll
        for (int d = 1; d <= REACH; d++) {
            const int other = partner(strip, d);
            if (other < 0) continue;
            if (MASK == 0 || strip > other) {
                const Fragment v_j = load_rows(slot + PANEL, 16 * other, step);
                mma(sum[2 * d], d_i, v_j.x[0], v_j.x[2]);
                mma(sum[2 * d + 1], d_i, v_j.x[1], v_j.x[3]);
            }
            if (MASK == 0 || strip < other) {
                const Fragment d_j = load_rows(slot, 16 * other, step);
                mma(sum[2 * d], v_i, d_j.x[0], d_j.x[2]);
                mma(sum[2 * d + 1], v_i, d_j.x[1], d_j.x[3]);
            }
        }
    }
}

// Adds the diagonal's two tiles up, each masked.
__device__ __forceinline__ void join_diagonal(float (&sum)[2 * (REACH + 1)][4], const float (&turned)[2][4]) {
    const int lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4;
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int i = group + 8 * (e / 2), j = 8 * n + 2 * pair + e % 2;
            sum[n][e] = (sees(i, j) ? sum[n][e] : 0.0f) + (sees(j, i) ? turned[n][e] : 0.0f);
        }
}

// Grid: value heads by parts, segments. `dr` may be null, `dv` may be, and `part_sums` is where heads have one part.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
symmetric_backward(const bf16* r, const bf16* v, const bf16* d_o, bf16* dr, bf16* dv, float* part_sums, const int* start,
                   const int* len, i64 r_token, i64 r_head, i64 v_token, i64 v_head, i64 do_token, i64 do_head,
                   i64 dr_token, i64 dr_head, i64 dv_token, i64 dv_head, int tokens, int longest, int v_heads,
                   float scale) {
    const int v_of = blockIdx.x / PARTS, part = blockIdx.x % PARTS, strip = threadIdx.x / 32;
    const Segment g = segment_of(blockIdx.y, start, len, start, len, tokens, tokens, longest, longest);
    if (g.q0 >= g.q1) return;
    const u32 ring = shared_address(memory), weights = ring + STAGES * SLOT, slopes = weights + WEIGHTS,
              rows_out = slopes + WEIGHTS + 2048 * strip;
    const int head0 = (v_of * PARTS + part) * HEADS;
    v += v_of * v_head;
    // A head's items: do with v, r, do, r.
    const int S_ITEMS = (D + 63) / 64, ITEMS = S_ITEMS + 2 * N_ITEMS + D_ITEMS;
    const auto fetch = [&](int n) {
        const u32 slot = ring + n % STAGES * SLOT;
        const int head = head0 + n / ITEMS;
        int item = n % ITEMS;
        if (n < HEADS * ITEMS) {
            const bf16* d_h = d_o + head * do_head;
            if (item < S_ITEMS) {
                load_panel<ROWS, THREADS>(slot, d_h, do_token, g.q0, g.q1, 64 * item, D);
                load_panel<ROWS, THREADS>(slot + PANEL, v, v_token, g.q0, g.q1, 64 * item, D);
            } else if (item >= S_ITEMS + N_ITEMS && item < S_ITEMS + N_ITEMS + D_ITEMS) {
                load_item(slot, d_h, do_token, g.q0, g.q1, item - S_ITEMS - N_ITEMS, D);
            } else {
                item -= item < S_ITEMS + N_ITEMS ? S_ITEMS : S_ITEMS + N_ITEMS + D_ITEMS;
                load_item(slot, r + head * r_head, r_token, g.q0, g.q1, item, N);
            }
        }
        copies_end();
    };
    int n = 0;
    // The slot of the next item, once it has arrived; the slot behind it is filled anew.
    const auto next = [&]() {
        copies_wait<STAGES - 2>();
        __syncthreads();
        fetch(n + STAGES - 1);
        return ring + n++ % STAGES * SLOT;
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) fetch(i);

    float of_v[16 * D_ITEMS][4];
    clear(of_v);
#pragma unroll 1
    for (int h = 0; h < HEADS; h++) {
        {
            float sum[2 * (REACH + 1)][4], turned[2][4];
            clear(sum);
            clear(turned);
#pragma unroll 1
            for (int i = 0; i < S_ITEMS; i++) add_slopes(sum, turned, next(), strip);
            join_diagonal(sum, turned);
            put_weights(slopes, sum, scale, strip, false, true);
        }
        {
            float sum[2 * (REACH + 1)][4];
            clear(sum);
#pragma unroll 1
            for (int i = 0; i < N_ITEMS; i++) {
                const u32 slot = next();
                add_scores(sum, slot, strip);
                add_scores(sum, slot + PANEL, strip);
            }
            put_weights(weights, sum, scale, strip, true, false);
        }
        Fragment w[STRIPS];
#pragma unroll
        for (int i = 0; i < D_ITEMS; i++) {
            const u32 slot = next();
            if (i == 0) take_weights(w, weights, strip);
#pragma unroll
            for (int panel = 0; panel < 2; panel++)
                if (128 * i + 64 * panel < D) add_columns<4>(of_v + 16 * i + 8 * panel, w, slot + panel * PANEL, 0);
        }
#pragma unroll 1
        for (int i = 0; i < N_ITEMS; i++) {
            const u32 slot = next();
            if (i == 0) take_weights(w, slopes, strip);
            if (!dr) continue;
#pragma unroll
            for (int panel = 0; panel < 2; panel++) {
                const int column = 128 * i + 64 * panel;
                if (column >= N) break;
                weigh_panel(rows_out, w, slot + panel * PANEL);
                store_panel(rows_out, dr + (head0 + h) * dr_head, dr_token, g.q0 + 16 * strip, g.q1, column, N);
            }
        }
    }
#if PARTS == 1
    if (!dv) return;
#pragma unroll
    for (int i = 0; i < 2 * D_ITEMS; i++)
        if (64 * i < D) {
            round_tiles<8>(rows_out, of_v + 8 * i, 0);
            store_panel(rows_out, dv + v_of * dv_head, dv_token, g.q0 + 16 * strip, g.q1, 64 * i, D);
        }
#else
    // part_sums [tokens, v_heads, PARTS, D].
    if (!part_sums) return;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const i64 row = g.q0 + 16 * strip + 8 * half + lane / 4;
        if (row >= g.q1) continue;
        float* to = part_sums + ((row * v_heads + v_of) * PARTS + part) * D + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < 16 * D_ITEMS; i++)
            if (8 * i < D) *reinterpret_cast<float2*>(to + 8 * i) = make_float2(of_v[i][2 * half], of_v[i][2 * half + 1]);
    }
#endif
}

#if PARTS > 1
// dv = the parts' sums, added up in order. A block a segment's row and value head: grid value heads by rows, segments.
extern "C" __global__ void __launch_bounds__(64)
symmetric_dv(const float* part_sums, bf16* dv, const int* start, const int* len, i64 dv_token, i64 dv_head, int tokens,
             int longest, int v_heads) {
    const Segment g = segment_of(blockIdx.y, start, len, start, len, tokens, tokens, longest, longest);
    const i64 row = g.q0 + (int)blockIdx.x / v_heads, v_of = blockIdx.x % v_heads;
    if (row >= g.q1) return;
    const float* from = part_sums + (row * v_heads + v_of) * PARTS * D;
    for (int c = 2 * threadIdx.x; c < D; c += 128) {
        float x = 0.0f, y = 0.0f;
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
            const float2 part = *reinterpret_cast<const float2*>(from + p * D + c);
            x += part.x;
            y += part.y;
        }
        *reinterpret_cast<u32*>(dv + row * dv_token + v_of * dv_head + c) = bf16x2(x, y);
    }
}
#endif

#endif
