// Attention by mma.sync from sm_80: tiles in shared memory, fragments, products, and masks per warp.
//
// A tile in shared memory has rows of DIM bf16 (SIZE rounded up to a multiple of 16, or of 32 if two warps split a row's
// columns) at a pitch of DIM + 8. That is an odd number of 16-byte pieces, so eight rows at the same column lie in eight
// different groups of banks, without conflicts, and every fragment address is a per-lane offset plus a constant. Rows past
// their segment's end and columns past SIZE are zero-filled, so nothing else can enter a product.
//
// Two adjacent results of mma (../../mma.cuh), rounded, are the A operand of the next product: probabilities never leave their
// lane.

#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f
#define STEPS (DIM / 16)
#define PITCH (DIM + 8)
#define ROW_BYTES (2 * PITCH)
#define THREADS (32 * WARPS)

extern __shared__ uint4 memory[];

// 2^x; 0 from minus infinity.
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ int lane_id() { return threadIdx.x % 32; }

// A lane's offset in a tile read as A (its rows are the result's rows), or as B whose rows are the inner axis.
__device__ __forceinline__ u32 lane_down(int pitch_bytes = ROW_BYTES) {
    const int l = lane_id();
    return (l % 16) * pitch_bytes + (l / 16) * 16;
}
// A lane's offset in a tile read as B whose rows are the result's columns.
__device__ __forceinline__ u32 lane_along() {
    const int l = lane_id();
    return ((l / 16) * 8 + l % 8) * ROW_BYTES + (l / 8 % 2) * 16;
}

// Loads ROWS rows of one head from row `first`. Complete tiles need no predicates.
template <int ROWS>
__device__ __forceinline__ void load_rows(u32 to, const Rows& from, int head, int first, int end) {
    constexpr int PIECES = DIM / 8, AT_ONCE = THREADS / PIECES;
    const bf16* base = from.at + head * from.head + first * from.token;
    const int token = (int)from.token;
    if (DIM == SIZE && THREADS % PIECES == 0 && ROWS % AT_ONCE == 0 && first + ROWS <= end) {
        const int r = threadIdx.x / PIECES, c = threadIdx.x % PIECES;
        base += r * token + 8 * c;
        to += r * ROW_BYTES + c * 16;
#pragma unroll
        for (int i = 0; i < ROWS; i += AT_ONCE) copy16(to + i * ROW_BYTES, base + i * token);
        return;
    }
#pragma unroll
    for (int i = 0; i < (ROWS * PIECES + THREADS - 1) / THREADS; i++) {
        const int piece = i * THREADS + threadIdx.x;
        const int r = piece / PIECES, c = piece % PIECES;
        if (ROWS * PIECES % THREADS == 0 || piece < ROWS * PIECES) {
            const bool there = first + r < end && (DIM == SIZE || 8 * c < SIZE);
            copy16(to + r * ROW_BYTES + c * 16, there ? base + r * token + 8 * c : from.at, there);
        }
    }
}

// Loads fragments of A: 16 RT rows of a tile.
template <int RT> __device__ __forceinline__ void keep(u32 (&a)[STEPS][RT][4], u32 from) {
#pragma unroll
    for (int k = 0; k < STEPS; k++)
#pragma unroll
        for (int m = 0; m < RT; m++) ldmatrix(a[k][m], from + m * 16 * ROW_BYTES + k * 32);
}

template <int RT, int CT> __device__ __forceinline__ void clear(float (&c)[RT][CT][4]) {
#pragma unroll
    for (int m = 0; m < RT; m++)
#pragma unroll
        for (int n = 0; n < CT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) c[m][n][i] = 0.0f;
}

// c += a b^T over 16 columns of a head: b's rows are c's columns. `from` includes the lane's offset (`lane_along`).
template <int RT, int CT>
__device__ __forceinline__ void product_step(float (&c)[RT][CT][4], const u32 (&a)[RT][4], u32 from) {
#pragma unroll
    for (int n = 0; n < CT; n += 2) {
        u32 b[4];
        if (n + 1 < CT) {
            ldmatrix(b, from + n * 8 * ROW_BYTES);
        } else {
            ldmatrix_half(b, from + n * 8 * ROW_BYTES);
        }
#pragma unroll
        for (int m = 0; m < RT; m++) {
            mma(c[m][n], a[m], b[0], b[1]);
            if (n + 1 < CT) mma(c[m][n + 1], a[m], b[2], b[3]);
        }
    }
}

// c = a b^T with a's fragments in registers.
template <int RT, int CT>
__device__ __forceinline__ void product_along(float (&c)[RT][CT][4], const u32 (&a)[STEPS][RT][4], u32 from) {
    clear(c);
#pragma unroll
    for (int k = 0; k < STEPS; k++) product_step(c, a[k], from + k * 32);
}

// As above, with a also read from shared memory, at `rows` (`lane_down`).
template <int RT, int CT> __device__ __forceinline__ void product_along(float (&c)[RT][CT][4], u32 rows, u32 from) {
    clear(c);
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
        u32 a[RT][4];
#pragma unroll
        for (int m = 0; m < RT; m++) ldmatrix(a[m], rows + m * 16 * ROW_BYTES + k * 32);
        product_step(c, a, from + k * 32);
    }
}

// sum += a b over 16 of b's rows, into 8 CT columns. `from` includes the lane's offset (`lane_down`).
template <int RT, int CT>
__device__ __forceinline__ void product_down(float (&sum)[RT][CT][4], const u32 (&a)[RT][4], u32 from) {
#pragma unroll
    for (int n = 0; n < CT / 2; n++) {
        u32 b[4];
        ldmatrix_across(b, from + n * 32);
#pragma unroll
        for (int m = 0; m < RT; m++) {
            mma(sum[m][2 * n], a[m], b[0], b[1]);
            mma(sum[m][2 * n + 1], a[m], b[2], b[3]);
        }
    }
}

// Packs two adjacent results as the A operand of the next product.
__device__ __forceinline__ void as_a(u32 (&a)[4], const float (&left)[4], const float (&right)[4]) {
    a[0] = bf16x2(left[0], left[1]);
    a[1] = bf16x2(left[2], left[3]);
    a[2] = bf16x2(right[0], right[1]);
    a[3] = bf16x2(right[2], right[3]);
}

// Writes 16 RT rows of 8 CT columns from `column`, staged in the warp's shared memory at `stage`, in 16-byte pieces.
// factor[m][i] belongs to row 16 m + 8 i + g.
template <int RT, int CT>
__device__ __forceinline__ void store_rows(const Rows& to, int head, int first, int end, int column, char* stage,
                                           const float (&sum)[RT][CT][4], const float (&factor)[RT][2]) {
    const int l = lane_id();
    constexpr int STAGE = 16 * CT + 16;
    __syncwarp();
#pragma unroll
    for (int m = 0; m < RT; m++)
#pragma unroll
        for (int n = 0; n < CT; n++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                *reinterpret_cast<u32*>(stage + (16 * m + 8 * i + l / 4) * STAGE + 16 * n + l % 4 * 4) =
                    bf16x2(factor[m][i] * sum[m][n][2 * i], factor[m][i] * sum[m][n][2 * i + 1]);
    __syncwarp();
    bf16* base = to.at + head * to.head + first * to.token + column;
    const int token = (int)to.token;
#pragma unroll
    for (int i = 0; i < (16 * RT * CT + 31) / 32; i++) {
        const int r = (32 * i + l) / CT, c = (32 * i + l) % CT;
        if (r < 16 * RT && first + r < end && column + 8 * c < SIZE)
            *reinterpret_cast<uint4*>(base + r * token + 8 * c) =
                *reinterpret_cast<const uint4*>(stage + r * STAGE + 16 * c);
    }
    __syncwarp();
}

// The keys that the 16 RT query rows of a warp attend to: each lane knows one or two rows, the warp the range that covers the
// keys of all rows and the keys that every row attends to.
struct Sight {
    Seen mine;
    int low, high, all_low, all_high;
};

// Rows past the segment's end copy its last row: they are zeros and are never written.
template <int RT> __device__ __forceinline__ Sight look(const Call& call, const Segment& g, int first) {
    Sight s;
    s.mine = sees(call, g, min(first + lane_id() % (16 * RT), g.q1 - 1));
    const int none = 0x7fffffff;
    int a = s.mine.a < s.mine.b ? s.mine.a : none, b = s.mine.a < s.mine.b ? s.mine.b : 0;
#if MASK == 3
    if (s.mine.c < s.mine.d) {
        a = min(a, s.mine.c);
        b = max(b, s.mine.d);
    }
#endif
    s.low = MASK == 0 ? g.k0 : __reduce_min_sync(ALL_LANES, a);
    s.high = MASK == 0 ? g.k1 : __reduce_max_sync(ALL_LANES, b);
    s.all_low = MASK == 0 ? g.k0 : __reduce_max_sync(ALL_LANES, s.mine.a);
    s.all_high = MASK == 0 ? g.k1 : __reduce_min_sync(ALL_LANES, s.mine.b);
    return s;
}

// Whether every row of the warp attends to all of [from, to). A walk never starts before the segment's first key, so only
// windows and intervals need to check where a row's keys begin.
__device__ __forceinline__ bool sees_all(const Sight& s, int from, int to) {
#if MASK == 3
    const bool mine = (s.mine.a <= from && to <= s.mine.b) || (s.mine.c <= from && to <= s.mine.d);
    return __all_sync(ALL_LANES, mine);
#else
    return (MASK < 2 || s.all_low <= from) && to <= s.all_high;
#endif
}

// Whether any row may attend to one of [from, to).
__device__ __forceinline__ bool sees_some(const Sight& s, int from, int to) {
    return from < s.high && (MASK < 2 || to > s.low);
}

// The keys that row `row` of the warp attends to, shuffled from the lane that knows them, relative to `origin`, so that each
// check compares with constants.
__device__ __forceinline__ Seen seen_by(const Sight& s, int row, int origin) {
    Seen seen = {0, 0, 0, 0};
#if MASK >= 2
    seen.a = __shfl_sync(ALL_LANES, s.mine.a, row) - origin;
#endif
    seen.b = (MASK == 0 ? s.high : __shfl_sync(ALL_LANES, s.mine.b, row)) - origin;
#if MASK == 3
    seen.c = __shfl_sync(ALL_LANES, s.mine.c, row) - origin;
    seen.d = __shfl_sync(ALL_LANES, s.mine.d, row) - origin;
#endif
    return seen;
}

// The keys that a block of queries walks over: [low, high) without the gap between two groups of intervals.
struct Walk {
    int low, high, gap, resume;
    __device__ __forceinline__ int after(int from) const {
        from += WALK;
#if MASK == 3
        if (from >= gap && from < resume) from = resume;
#endif
        return from;
    }
};

// Intervals are combined through shared memory, before it is used for anything else.
template <int OWNED> __device__ __forceinline__ Walk walk_keys(const Call& call, const Segment& g, int first) {
    Walk w = {g.k0, g.k1, 0, 0};
#if MASK == 1 || MASK == 2
    const Seen last = sees(call, g, min(first + OWNED, g.q1) - 1);
    w.high = last.b;
    w.low = sees(call, g, first).a;
#elif MASK == 3
    // Hulls of the first and of the second intervals; if they are disjoint, in either order, the walk skips the gap.
    int* ends = reinterpret_cast<int*>(memory);
    if (threadIdx.x < 4) ends[threadIdx.x] = threadIdx.x % 2 ? 0 : 0x7fffffff;
    __syncthreads();
    for (int r = threadIdx.x; r < OWNED && first + r < g.q1; r += THREADS) {
        const Seen s = sees(call, g, first + r);
        if (s.a < s.b) {
            atomicMin(&ends[0], s.a);
            atomicMax(&ends[1], s.b);
        }
        if (s.c < s.d) {
            atomicMin(&ends[2], s.c);
            atomicMax(&ends[3], s.d);
        }
    }
    __syncthreads();
    const bool swap = ends[2] < ends[0];
    const int a = ends[swap ? 2 : 0], b = ends[swap ? 3 : 1], c = ends[swap ? 0 : 2], d = ends[swap ? 1 : 3];
    w.low = a;
    w.high = max(b, d);
    w.gap = b;
    w.resume = c;
    __syncthreads();
#endif
    return w;
}

// Soft-caps all products, if CAP is defined.
template <int M, int N> __device__ __forceinline__ void cap_all(float (&products)[M][N][4], float unit) {
#ifdef CAP
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) products[m][n][i] = capped(products[m][n][i], unit);
#endif
}
