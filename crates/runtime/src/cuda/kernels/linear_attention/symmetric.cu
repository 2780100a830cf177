// Linear attention of queries r that double as keys, over segments of at most STRIPS * 16 rows, in bf16:
//   o = M(scale r r^T) v,   with ds = M(scale do v^T):  dr = (ds + ds^T) r,   dv = M(scale r r^T)^T do,
// r, dr [T, H, N], v, dv [T, HV, D], o, do [T, H, D], heads' rows at any stride, 16-byte aligned; N and D multiples of 8. Rows
// outside every segment are neither read nor written.
//
// A segment fits in one tile, so scores are computed once and, in the forward pass, never leave the chip. A warp takes a strip
// of 16 rows. The scores are symmetric, so of the pairs of strips only one of (i, j), (j, i) is multiplied: warp i takes
// (i, i + d mod STRIPS) for d up to STRIPS / 2, which balances the warps, and the other half is the transposed fragment. The right
// operand of a diagonal tile is the same registers as its left operand. With 5 strips, 15 tiles are multiplied instead of 25.
//
// Operands are read in panels of 64 columns through a ring of STAGES pipeline stages, filled by cp.async.
//   forward, one thread block per head and segment: r, then v.
//   backward, one thread block per head and segment: do with v (32 columns each), from which ds + ds^T is computed, then r, of
//     which each panel yields a panel of dr and adds to the scores; these are kept for dv in scratch, [T, H, ROWS].
//   dv, one thread block per value head, segment and panel of columns: the weights and do of each head that shares the
//     values, in order, so that every sum has a fixed order.
// Deterministic. No spills; 55 KiB of shared memory at 5 strips, 61 with a base, 98 at 8.
//
// TURNED: the input is a, and r = rope(a) with pairs of neighbours. A lane rotates the pieces of a panel that it copied, in
// shared memory, and rounds them to bf16 as a separate rotation would. The epilogue rotates pieces of dr back. The table's
// cosines and sines take 32 bytes per 16 bytes of a, and reading them where they are used stalled the gradient: 872 us instead
// of 643. So if positions are consecutive (SUMMED: and the table is f32 without an amplitude), ten rows of the table are copied
// with a panel, and a row's angle is a sum of up to three of these. Other positions are looked up or computed row by row, in a
// separate instance of the code.
// ONTO: dr is added to a base (1), and set to 0 where a is not above 0 (2); one bit per element of a is kept from its rotation
// to the epilogue of dr, so that a is read only once. The base's panel is loaded with that of r if BASE_ROWS is above 0.
//
// At H 6, HV 1, N 1024, D 192 and 512 segments of 65 rows, without a mask, on an H200:
//                                   forward           backward
//   moved at least                  498 MB            1,060 MB
//   at 4.8 TB/s (its peak)          104 us            221 us
//   at 4.15 TB/s (a copy of r)      120 us            256 us
//   products (of 80 padded rows)    32 (32) GFLOP     63 (81) GFLOP, 32 and 64 us at its peak
//   this                            138 us            331 us
//   torch.bmm in bf16               1012 us           1725 us (scores kept)
// The forward pass is memory-bound (136 us without the first product). The backward pass is not bound by one resource: 179 us
// without products, 297 without copies.

// A table that does not allow 16-byte accesses cannot be copied by cp.async.
#if SUMMED && TABLE_VEC != 4
#undef SUMMED
#define SUMMED 0
#endif

#define ROWS (16 * STRIPS)
#define THREADS (32 * STRIPS)
#define PANEL (ROWS * 128)
// A pipeline stage: a panel, and that of a base.
#define STAGE (PANEL + BASE_ROWS * 128)
// Pitch of weights [ROWS, ROWS] in bf16, padded by 16 bytes: eight rows start in different banks.
#define PITCH (2 * ROWS + 16)
// A warp's rows of weights; once it has read them, its results are staged here, which takes 2 KiB.
#define STRIP (16 * PITCH > 2048 ? 16 * PITCH : 2048)
#define REACH (STRIPS / 2)
#define N_PANELS ((N + 63) / 64)
#define D_PANELS ((D + 63) / 64)

extern __shared__ __align__(128) u8 memory[];

// The rows of the table whose angles are summed: the first four of the segment, those of positions 4 and 8, and those of 16, 32
// and so on, one per strip after the first.
#define ANGLE_ROWS (STRIPS + 5)
#define ANGLES (ANGLE_ROWS * 256)
// Offsets of the positions, of the bits for elements above 0, and of the angles.
#define AT_PLACES (STAGES * STAGE + STRIPS * STRIP)
#define AT_ABOVE (AT_PLACES + ROWS * 4)
#define AT_ANGLES (AT_ABOVE + (GRAD && ONTO == 2 ? 16 * ROWS : 0))

#if TURNED
#define TURN_ARGUMENTS , const int *positions, const T_TABLE *table, int table_rows
#if ONTO
#define BASE_ARGUMENTS , const bf16 *base
#else
#define BASE_ARGUMENTS
#endif
// Cosines and sines of a segment's rows.
struct Turns {
    const T_TABLE* table;
    int first, last;
    // Whether the table has all positions, and whether these are consecutive.
    bool is_listed, is_even;

    // Positions by row, in shared memory; 0 for rows past the segment.
    static __device__ __forceinline__ int* places() {
        return reinterpret_cast<int*>(memory + AT_PLACES);
    }
    // Contains a barrier at the end.
    __device__ __forceinline__ Turns(const int* positions, const T_TABLE* table, int table_rows, const Segment& g) {
        bool is_mine_listed = true, is_mine_even = SUMMED && table_rows > 16 * (STRIPS - 1);
        if (threadIdx.x < ROWS) {
            const int row = g.q0 + threadIdx.x;
            const int place = row < g.q1 ? positions[position_at(0) + row] : 0;
            places()[threadIdx.x] = place;
            is_mine_listed = row >= g.q1 || (u32)place < (u32)table_rows;
            is_mine_even = is_mine_even && (row >= g.q1 || place == positions[position_at(0) + g.q0] + (int)threadIdx.x);
            is_mine_even = is_mine_even && (threadIdx.x > 0 || place + 3 < table_rows);
        }
        this->table = table;
        first = g.q0;
        last = g.q1 - 1;
        is_listed = __syncthreads_and(is_mine_listed);
        is_even = __syncthreads_and(is_mine_even) && is_listed;
    }

    struct Held {
        float c[4], s[4];
        // Adds two angles.
        __device__ __forceinline__ void add(const Held& other) {
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float both = c[k] * other.c[k] - s[k] * other.s[k];
                s[k] = s[k] * other.c[k] + c[k] * other.s[k];
                c[k] = both;
            }
        }
    };
    // For columns [column, column + 8) of a row.
    __device__ __forceinline__ Held read(int row, int column) const { return at(places()[row - first], column); }
    // For a position.
    __device__ __forceinline__ Held at(int place, int column) const {
        Held turn;
#if TABLE_VEC == 4
        if (is_listed) {
            Pack<T_TABLE, 8> pairs;
            pairs.load(table + table_at(place, column / 2));
#pragma unroll
            for (int k = 0; k < 4; k++) {
                turn.c[k] = f32(pairs.x[2 * k]);
                turn.s[k] = f32(pairs.x[2 * k + 1]);
            }
            return turn;
        }
#endif
#pragma unroll
        for (int k = 0; k < 4; k++) turn_of(place, column / 2 + k, turn.c[k], turn.s[k]);
        return turn;
    }

#if SUMMED
    // Copies a lane's share of the table rows whose angles a panel sums.
    __device__ __forceinline__ void fetch(int panel) const {
        for (int i = threadIdx.x; i < 16 * ANGLE_ROWS; i += THREADS) {
            const int row = i / 16, f = 32 * panel + i % 16 * 2;
            const int place = row < 4 ? places()[0] + row : row < 6 ? 4 * (row - 3) : 16 * (row - 5);
            if (N % 64 == 0 || f < HALF)
                copy_piece(angles(panel) + 256 * row + 16 * (i % 16), table + table_at(place, f), true);
        }
    }
    static __device__ __forceinline__ u32 angles(int panel) {
        return shared_address(memory) + AT_ANGLES + panel % (STAGES + 1) * ANGLES;
    }
    // One of these rows.
    static __device__ __forceinline__ Held angle(int panel, int row, int column) {
        const u32 from = angles(panel) + 256 * row + column % 64 * 4;
        Held turn;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint4 x = take_piece(from + 16 * i);
            turn.c[2 * i] = __uint_as_float(x.x);
            turn.s[2 * i] = __uint_as_float(x.y);
            turn.c[2 * i + 1] = __uint_as_float(x.z);
            turn.s[2 * i + 1] = __uint_as_float(x.w);
        }
        return turn;
    }
#endif
};

// Cosines and sines of a column of pieces, STEP (4 or 8) rows apart, starting in a strip's first 8 rows. Summed angles are
// within 1e-6 of the table's.
template <int STEP, bool IS_EVEN> struct TurnWalk {
    const Turns& turns;
    int row, column;
    Turns::Held turn, by;
    __device__ __forceinline__ TurnWalk(const Turns& turns, int row, int column)
        : turns(turns), row(row), column(column) {
#if SUMMED
        if (IS_EVEN) {
            const int at = row - turns.first, panel = column / 64;
            turn = Turns::angle(panel, at % 4, column);
            by = Turns::angle(panel, 4, column);
            if (STEP == 8) {
                if (at % 16 >= 4) turn.add(by);
                by = Turns::angle(panel, 5, column);
            }
            if (at >= 16) turn.add(Turns::angle(panel, 5 + at / 16, column));
            return;
        }
#endif
        turn = turns.read(min(row, turns.last), column);
    }
    __device__ __forceinline__ void next() {
        row += STEP;
        if (IS_EVEN)
            turn.add(by);
        else if (row <= turns.last)
            turn = turns.read(row, column);
    }
};

__device__ __forceinline__ float low_of(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_of(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ u32 turned_pair(u32 pair, float c, float s) {
    const float low = low_of(pair), high = high_of(pair);
    return bf16x2(low * c - high * s, high * c + low * s);
}

__device__ __forceinline__ uint4 turned_piece(uint4 x, const Turns::Held& by) {
    return make_uint4(turned_pair(x.x, by.c[0], by.s[0]), turned_pair(x.y, by.c[1], by.s[1]),
                      turned_pair(x.z, by.c[2], by.s[2]), turned_pair(x.w, by.c[3], by.s[3]));
}

#if ONTO == 2
// The byte whose bits tell which elements of a piece of a are above 0. A panel's are written while the previous panel's are
// read.
__device__ __forceinline__ u8& above_at(int row, int column) {
    u8* bits = memory + AT_ABOVE;
    return bits[(column / 64 % 2 * ROWS + row) * 8 + column / 8 % 8];
}

__device__ __forceinline__ u32 above(uint4 x) {
    const u32 pairs[4] = {x.x, x.y, x.z, x.w};
    u32 bits = 0;
#pragma unroll
    for (int k = 0; k < 4; k++)
        bits |= (low_of(pairs[k]) > 0.0f ? 1u << 2 * k : 0) | (high_of(pairs[k]) > 0.0f ? 2u << 2 * k : 0);
    return bits;
}
#endif

// Rotates the pieces of columns [column, column + 64) that the lane copied into a panel (`load_strip`). Rows count from the
// segment's first; those from `end` are zeros.
template <bool IS_EVEN>
__device__ __forceinline__ void turn_strip(u32 panel, int strip, const Turns& turns, int end, int column) {
    const int lane = threadIdx.x % 32, row = turns.first + 16 * strip + lane / 8;
    column += 8 * (lane % 8);
    if (N % 64 != 0 && column >= N) return;
    const u32 at = piece_at(panel, 16 * strip + lane / 8, lane % 8);
    TurnWalk<4, IS_EVEN> walk(turns, row, column);
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const u32 to = (at ^ (k % 2 * 64)) + 512 * k;
        if (row + 4 * k < end) {
            const uint4 x = take_piece(to);
#if ONTO == 2
            above_at(row + 4 * k - turns.first, column) = (u8)above(x);
#endif
            put_piece(to, turned_piece(x, walk.turn));
        }
        walk.next();
    }
}

// The epilogue of dr: rotates back, adds the base. The base may be the same memory as dr: a piece is written by the thread that
// read it.
template <bool IS_EVEN> struct WayOut {
    const Turns& turns;
    // The base's panel, or the head's rows of it with stride `token`.
    u32 panel;
    const bf16* base;
    i64 token;

    template <int STEP> struct Walk {
        const WayOut& way;
        TurnWalk<STEP, IS_EVEN> walk;
        __device__ __forceinline__ Walk(const WayOut& way, int row, int column)
            : way(way), walk(way.turns, row, min(column, N - 8)) {}
        __device__ __forceinline__ void next() { walk.next(); }
        __device__ __forceinline__ uint4 change(uint4 x, int row) const {
            u32 pairs[4] = {x.x, x.y, x.z, x.w};
            const int at = row - way.turns.first;
#if ONTO
#if BASE_ROWS
            const uint4 held = take_piece(piece_at(way.panel, at, walk.column / 8 % 8));
#else
            const uint4 held = __ldcs(reinterpret_cast<const uint4*>(way.base + row * way.token + walk.column));
#endif
            const u32 onto[4] = {held.x, held.y, held.z, held.w};
#endif
#if ONTO == 2
            const u32 above = above_at(at, walk.column);
#endif
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float c = walk.turn.c[k], s = walk.turn.s[k], low = low_of(pairs[k]), high = high_of(pairs[k]);
                float a = low * c + high * s, b = high * c - low * s;
#if ONTO
                a += low_of(onto[k]);
                b += high_of(onto[k]);
#endif
                pairs[k] = bf16x2(a, b);
#if ONTO == 2
                if (!(above >> 2 * k & 1)) pairs[k] &= 0xffff0000u;
                if (!(above >> 2 * k & 2)) pairs[k] &= 0xffffu;
#endif
            }
            return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        }
    };
    template <int STEP> __device__ __forceinline__ Walk<STEP> walk(int row, int column) const {
        return Walk<STEP>(*this, row, column);
    }
};
#else
#define TURN_ARGUMENTS
#define BASE_ARGUMENTS
#endif

__device__ __forceinline__ u32 weight_at(u32 weights, int row, int column) {
    return weights + row / 16 * STRIP + row % 16 * PITCH + 2 * column;
}

// The strip that a warp multiplies with its own, d further; -1 if the other warp handles the pair.
__device__ __forceinline__ int partner(int strip, int d) {
    if (STRIPS % 2 == 0 && d == REACH && d > 0 && strip >= REACH) return -1;
    return (strip + d) % STRIPS;
}

// sum[d] += products of the warp's strip of a panel with its partners'.
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
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(weight_at(weights, row, column)), "r"(word) : "memory");
}

// Writes a warp's tiles and their transposes as weights [ROWS, ROWS]. `by_keys`: rows are keys, columns queries. Off-diagonal
// tiles are masked whole or not at all. `is_masked`: the tiles are already masked, and symmetric.
__device__ __forceinline__ void put_weights(u32 weights, const float (&sum)[2 * (REACH + 1)][4], float scale, int strip,
                                            bool by_keys, bool is_masked) {
    const int lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4;
#pragma unroll
    for (int d = 0; d <= REACH; d++) {
        const int other = partner(strip, d);
        if (other < 0) continue;
        // Whether the tiles (strip, other) and (other, strip) are unmasked.
        bool is_seen = true, is_seen_back = true;
#if MASK != 0
        if (!is_masked && d > 0) {
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
                if (!is_masked && d == 0) {
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

// Loads the warp's rows of weights as left operands.
__device__ __forceinline__ void take_weights(Fragment (&w)[STRIPS], u32 weights, int strip) {
    const int lane = threadIdx.x % 32;
    const u32 at = weight_at(weights, 16 * strip + lane % 16, 8 * (lane / 16));
#pragma unroll
    for (int k = 0; k < STRIPS; k++)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(w[k].x[0]), "=r"(w[k].x[1]), "=r"(w[k].x[2]), "=r"(w[k].x[3])
                     : "r"(at + 32 * k)
                     : "memory");
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

// A warp's share of the second product. Backward, where it is most of the work: two strips by half of a panel's columns, so
// that fragments of the panel are used twice; the last strip of an odd number by all columns, which is as much work. Forward:
// its own strip, which takes fewer registers.
struct Share {
    int strip;
    bool is_pair;
    Fragment w[2][STRIPS];

    __device__ __forceinline__ Share(int warp) {
        is_pair = GRAD && warp / 2 * 2 + 1 < STRIPS;
        strip = is_pair ? warp / 2 * 2 : warp;
    }
    // Contains a barrier at the end: from then on a warp stages its results in its strip of the weights.
    __device__ __forceinline__ void take(u32 weights) {
        take_weights(w[0], weights, strip);
        if (is_pair) take_weights(w[1], weights, strip + 1);
        __syncthreads();
    }
    // Writes the share of weights times a panel: rows from `first` below `end`, columns from `column` below `columns`.
    template <class Way>
    __device__ __forceinline__ void store(u32 rows_out, u32 panel, bf16* to, i64 token, int first, int end, int column,
                                          int columns, const Way& way) const {
        if (is_pair) {
            const int warp = threadIdx.x / 32, right = warp % 2;
#pragma unroll
            for (int step = 0; step < 2; step++) {
                float sum[2][2][4];
                clear(sum[0]);
                clear(sum[1]);
#pragma unroll
                for (int k = 0; k < STRIPS; k++) {
                    const Fragment b = load_columns(panel, 16 * k, 2 * right + step);
#pragma unroll
                    for (int s = 0; s < 2; s++) {
                        mma(sum[s][0], w[s][k], b.x[0], b.x[1]);
                        mma(sum[s][1], w[s][k], b.x[2], b.x[3]);
                    }
                }
                round_halves(rows_out, sum[0], 2 * step);
                round_halves(rows_out + 1024, sum[1], 2 * step);
            }
            store_halves(rows_out, to, token, first + 16 * strip, end, column + 32 * right, columns, way);
        } else {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float sum[4][4];
                clear(sum);
                add_columns<2>(sum, w[0], panel, 2 * half);
                round_tiles<4>(rows_out, sum, 4 * half);
            }
            store_panel(rows_out, to, token, first + 16 * strip, end, column, columns, way);
        }
    }
};

// The main loop of a block, instantiated once for consecutive positions and once for others.
struct Panels {
    const Segment g;
    const int strip;
    int n = 0;

    static __device__ __forceinline__ u32 ring() { return shared_address(memory); }
    static __device__ __forceinline__ u32 weights() { return ring() + STAGES * STAGE; }
    static __device__ __forceinline__ u32 place(int n) { return ring() + n % STAGES * STAGE; }
#if TURNED
    // Loads the angles of the panels in flight, from `before`: one panel ahead of the data, because they are read by other
    // threads than those that copied them. Contains a barrier at the end.
    template <bool IS_EVEN> __device__ __forceinline__ void begin(const Turns& turns, int before) const {
#if SUMMED
        if (IS_EVEN)
            for (int i = before; i < STAGES; i++)
                if (i < before + N_PANELS) turns.fetch(i - before);
#endif
        copies_end();
        copies_wait<0>();
        __syncthreads();
    }
    // Returns the next panel once it has arrived and is rotated, and refills the stage before it. The first `before` panels are
    // not rotated.
    template <bool IS_EVEN, class Fetch>
    __device__ __forceinline__ u32 next(const Fetch& fetch, const Turns& turns, int before) {
        copies_wait<STAGES - 2>();
        if (before <= n && n < before + N_PANELS)
            turn_strip<IS_EVEN>(place(n), strip, turns, g.q1, 64 * (n - before));
        __syncthreads();
#if SUMMED
        const int ahead = n + STAGES - before;
        if (IS_EVEN && ahead >= 0 && ahead < N_PANELS) turns.fetch(ahead);
#endif
        fetch(n + STAGES - 1);
        return place(n++);
    }
#endif
    template <class Fetch> __device__ __forceinline__ u32 next(const Fetch& fetch) {
        copies_wait<STAGES - 2>();
        __syncthreads();
        fetch(n + STAGES - 1);
        return place(n++);
    }
};

#if !GRAD

template <class Next>
__device__ __forceinline__ void forward(const Next& next, Panels& at, bf16* o, i64 o_token, float scale) {
    float scores[2 * (REACH + 1)][4];
    clear(scores);
#pragma unroll 1
    for (int i = 0; i < N_PANELS; i++) add_scores(scores, next(), at.strip);
    put_weights(at.weights(), scores, scale, at.strip, false, false);
    Share share(at.strip);
#pragma unroll 1
    for (int i = 0; i < D_PANELS; i++) {
        const u32 panel = next();
        if (i == 0) share.take(at.weights());
        share.store(at.weights() + STRIP * at.strip, panel, o, o_token, at.g.q0, at.g.q1, 64 * i, D, AsItIs());
    }
}

// Grid: segments by heads.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
symmetric_forward(const bf16* r, const bf16* v, bf16* o, const int* start, const int* len, i64 r_token, i64 r_head,
                  i64 v_token, i64 v_head, i64 o_token, i64 o_head, int tokens, int longest, int heads, int group,
                  float scale TURN_ARGUMENTS) {
    const int head = blockIdx.x % heads;
    const Segment g = segment_of(blockIdx.x / heads, start, len, start, len, tokens, tokens, longest, longest);
    if (g.q0 >= g.q1) return;
    Panels at = {g, (int)threadIdx.x / 32};
    r += head * r_head;
    v += head / group * v_head;
    o += head * o_head;
    const auto fetch = [&](int n) {
        if (n < N_PANELS)
            load_panel<ROWS, THREADS, N>(at.place(n), r, r_token, g.q0, g.q1, 64 * n);
        else if (n < N_PANELS + D_PANELS)
            load_panel<ROWS, THREADS, D>(at.place(n), v, v_token, g.q0, g.q1, 64 * (n - N_PANELS));
        copies_end();
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) fetch(i);
#if TURNED
    const Turns turns(positions, table, table_rows, g);
    if (SUMMED && turns.is_even) {
        at.begin<true>(turns, 0);
        forward([&]() { return at.next<true>(fetch, turns, 0); }, at, o, o_token, scale);
    } else {
        at.begin<false>(turns, 0);
        forward([&]() { return at.next<false>(fetch, turns, 0); }, at, o, o_token, scale);
    }
#else
    forward([&]() { return at.next(fetch); }, at, o, o_token, scale);
#endif
}

#else

// sum[d] += do_i v_j^T + v_i do_j^T, with i the warp's strip and j its partner, over 32 columns of do and of v in one panel. If
// i != j, a mask leaves only one of the two terms; on the diagonal both are kept separately, since their masks differ.
__device__ __forceinline__ void add_slopes(float (&sum)[2 * (REACH + 1)][4], float (&turned)[2][4], u32 panel, int strip) {
#pragma unroll
    for (int step = 0; step < 2; step++) {
        const Fragment d_i = load_rows(panel, 16 * strip, step), v_i = load_rows(panel, 16 * strip, 2 + step);
        mma(sum[0], d_i, v_i.x[0], v_i.x[2]);
        mma(sum[1], d_i, v_i.x[1], v_i.x[3]);
        mma(turned[0], v_i, d_i.x[0], d_i.x[2]);
        mma(turned[1], v_i, d_i.x[1], d_i.x[3]);
#pragma unroll
        for (int d = 1; d <= REACH; d++) {
            const int other = partner(strip, d);
            if (other < 0) continue;
#if MASK == 0
            const Fragment v_j = load_rows(panel, 16 * other, 2 + step), d_j = load_rows(panel, 16 * other, step);
            mma(sum[2 * d], d_i, v_j.x[0], v_j.x[2]);
            mma(sum[2 * d + 1], d_i, v_j.x[1], v_j.x[3]);
            mma(sum[2 * d], v_i, d_j.x[0], d_j.x[2]);
            mma(sum[2 * d + 1], v_i, d_j.x[1], d_j.x[3]);
#else
            // The later strip holds the queries.
            const bool is_later = strip > other;
            const Fragment b = load_rows(panel, 16 * other, is_later ? 2 + step : step);
            Fragment a;
#pragma unroll
            for (int i = 0; i < 4; i++) a.x[i] = is_later ? d_i.x[i] : v_i.x[i];
            mma(sum[2 * d], a, b.x[0], b.x[2]);
            mma(sum[2 * d + 1], a, b.x[1], b.x[3]);
#endif
        }
    }
}

#if BASE_ROWS
// Loads the rows of a base that belong to a panel; missing rows are not written.
__device__ __forceinline__ void load_base(u32 panel, const bf16* base, i64 token, int first, int end, int column) {
    const int lane = threadIdx.x % 32, strip = threadIdx.x / 32, row = first + 16 * strip + lane / 8;
    const u32 to = piece_at(panel, 16 * strip + lane / 8, lane % 8);
    if (N % 64 != 0 && column + 8 * (lane % 8) >= N) return;
#pragma unroll
    for (int k = 0; k < 4; k++)
        if (row + 4 * k < end)
            copy_piece((to ^ (k % 2 * 64)) + 512 * k, base + (row + 4 * k) * token + column + 8 * (lane % 8), true);
}
#endif

// Adds the diagonal's two tiles, each masked.
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

// `way` gives the epilogue of a panel of dr. `slopes` panels come before those of r.
template <class Next, class Ways>
__device__ __forceinline__ void backward(const Next& next, const Ways& ways, Panels& at, bf16* dr, i64 dr_token, bf16* kept,
                                         int slopes, int head, int heads, float scale) {
    const int strip = at.strip;
    const u32 weights = at.weights(), rows_out = weights + STRIP * strip;
    const Segment& g = at.g;
    float sum[2 * (REACH + 1)][4];
    if (dr) {
        float turned[2][4];
        clear(sum);
        clear(turned);
#pragma unroll 1
        for (int i = 0; i < slopes; i++) add_slopes(sum, turned, next(), strip);
        join_diagonal(sum, turned);
        put_weights(weights, sum, scale, strip, false, true);
    }
    clear(sum);
    Share share(strip);
#pragma unroll 1
    for (int i = 0; i < N_PANELS; i++) {
        const u32 panel = next();
        if (kept) add_scores(sum, panel, strip);
        if (!dr) continue;
        if (i == 0) share.take(weights);
        share.store(rows_out, panel, dr, dr_token, g.q0, g.q1, 64 * i, N, ways(panel));
    }
    if (!kept) return;
    // All warps have stored the results staged in the weights.
    __syncthreads();
    put_weights(weights, sum, scale, strip, true, false);
    __syncthreads();
    // The warp's strip, in 16-byte pieces.
    for (int i = threadIdx.x % 32; i < 16 * 2 * STRIPS; i += 32) {
        const int row = 16 * strip + i / (2 * STRIPS), piece = i % (2 * STRIPS);
        const uint4 x = take_piece(weight_at(weights, row, 8 * piece));
        if (g.q0 + row < g.q1)
            *reinterpret_cast<uint4*>(kept + ((i64)(g.q0 + row) * heads + head) * ROWS + 8 * piece) = x;
    }
}

// Grid: segments by heads. `kept` [T, H, ROWS] receives the weights, with keys of the segment as rows and queries as columns;
// null if dv is not requested. `dr` may be null.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
symmetric_backward(const bf16* r, const bf16* v, const bf16* d_o, bf16* dr, bf16* kept, const int* start, const int* len,
                   i64 r_token, i64 r_head, i64 v_token, i64 v_head, i64 do_token, i64 do_head, i64 dr_token,
                   i64 dr_head, int tokens, int longest, int heads, int group, float scale TURN_ARGUMENTS BASE_ARGUMENTS) {
    const int head = blockIdx.x % heads, strip = threadIdx.x / 32;
    const Segment g = segment_of(blockIdx.x / heads, start, len, start, len, tokens, tokens, longest, longest);
    if (g.q0 >= g.q1) return;
    Panels at = {g, strip};
    r += head * r_head;
    v += head / group * v_head;
    d_o += head * do_head;
    // Panels of do and v, 32 columns each; then r.
    const int slopes = dr ? (D + 31) / 32 : 0;
    if (dr) dr += head * dr_head;
#if ONTO
    base += head * dr_head;
#endif
    const auto fetch = [&](int n) {
        const u32 panel = at.place(n);
        if (n < slopes) {
            const int lane = threadIdx.x % 32, piece = lane % 8, row = g.q0 + 16 * strip + lane / 8;
            const int column = 32 * n + 8 * (piece % 4);
            const bf16* from = piece < 4 ? d_o + row * do_token : v + row * v_token;
            load_strip(panel, strip, from + column, piece < 4 ? do_token : v_token, g.q1 - row, D % 32 == 0 || column < D);
        } else if (n < slopes + N_PANELS) {
            load_panel<ROWS, THREADS, N>(panel, r, r_token, g.q0, g.q1, 64 * (n - slopes));
#if BASE_ROWS
            if (dr) load_base(panel + PANEL, base, dr_token, g.q0, g.q1, 64 * (n - slopes));
#endif
        }
        copies_end();
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) fetch(i);
#if TURNED
    const Turns turns(positions, table, table_rows, g);
#if ONTO
    const bf16* onto = base;
#else
    const bf16* onto = nullptr;
#endif
    if (SUMMED && turns.is_even) {
        at.begin<true>(turns, slopes);
        backward([&]() { return at.next<true>(fetch, turns, slopes); },
                 [&](u32 panel) { return WayOut<true>{turns, panel + PANEL, onto, dr_token}; }, at, dr, dr_token, kept,
                 slopes, head, heads, scale);
    } else {
        at.begin<false>(turns, slopes);
        backward([&]() { return at.next<false>(fetch, turns, slopes); },
                 [&](u32 panel) { return WayOut<false>{turns, panel + PANEL, onto, dr_token}; }, at, dr, dr_token, kept,
                 slopes, head, heads, scale);
    }
#else
    backward([&]() { return at.next(fetch); }, [&](u32) { return AsItIs(); }, at, dr, dr_token, kept, slopes, head, heads,
             scale);
#endif
}

#define W_PANELS ((ROWS + 63) / 64)
// Pipeline stages, one panel each.
#define DV_STAGES 4
// Without launch bounds, the compiler limits small blocks to so few registers that it spills on sm_120.
#if STRIPS <= 4
#define DV_BOUNDS __launch_bounds__(THREADS, 4)
#else
#define DV_BOUNDS __launch_bounds__(THREADS)
#endif

// Grid: segments by value heads by panels of columns.
extern "C" __global__ void DV_BOUNDS
symmetric_dv(const bf16* d_o, bf16* dv, const bf16* kept, const int* start, const int* len, i64 do_token, i64 do_head,
             i64 dv_token, i64 dv_head, int tokens, int longest, int heads, int v_heads) {
    const int column = 64 * (blockIdx.x % D_PANELS), v_of = blockIdx.x / D_PANELS % v_heads, strip = threadIdx.x / 32;
    const Segment g =
        segment_of(blockIdx.x / D_PANELS / v_heads, start, len, start, len, tokens, tokens, longest, longest);
    if (g.q0 >= g.q1) return;
    const u32 ring = shared_address(memory);
    const int group = heads / v_heads, items = group * (W_PANELS + 1);
    const auto fetch = [&](int n) {
        const u32 panel = ring + n % DV_STAGES * PANEL;
        const int head = v_of * group + n / (W_PANELS + 1), item = n % (W_PANELS + 1);
        if (n < items && item < W_PANELS)
            load_panel<ROWS, THREADS, ROWS>(panel, kept + head * ROWS, (i64)heads * ROWS, g.q0, g.q1, 64 * item);
        else if (n < items)
            load_panel<ROWS, THREADS, D>(panel, d_o + head * do_head, do_token, g.q0, g.q1, column);
        copies_end();
    };
    int n = 0;
    const auto next = [&]() {
        copies_wait<DV_STAGES - 2>();
        __syncthreads();
        fetch(n + DV_STAGES - 1);
        return ring + n++ % DV_STAGES * PANEL;
    };
#pragma unroll
    for (int i = 0; i < DV_STAGES - 1; i++) fetch(i);
    float sum[8][4];
    clear(sum);
#pragma unroll 1
    for (int h = 0; h < group; h++) {
        Fragment w[STRIPS];
#pragma unroll
        for (int item = 0; item < W_PANELS; item++) {
            const u32 panel = next();
#pragma unroll
            for (int step = 0; step < 4; step++)
                if (4 * item + step < STRIPS) w[4 * item + step] = load_rows(panel, 16 * strip, step);
        }
        add_columns<4>(sum, w, next(), 0);
    }
    copies_wait<0>();
    __syncthreads();
    const u32 rows_out = ring + 2048 * strip;
    round_tiles<8>(rows_out, sum, 0);
    store_panel(rows_out, dv + v_of * dv_head, dv_token, g.q0 + 16 * strip, g.q1, column, D);
}

#endif
