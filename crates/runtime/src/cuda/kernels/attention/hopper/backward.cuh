// Shared by Hopper's backward kernels: row statistics, tile scheduler, barriers, epilogues.
//
// Persistent kernels: a thread block takes one tile after another from a counter. One warp of the last warpgroup is the
// producer: it takes the next tile and loads the owned tile, then the walked tiles, while the consumer warpgroups still work on
// the tile before. It announces tiles and walks to them through shared memory.
//
// Defines: SIZE, MASK, Q_RAGGED, K_RAGGED; GROUPS (consumer warpgroups), HEADS (heads a block processes side by side).

#define LOG2E 1.4426950408889634f
// Panels of 64 columns per tile, and steps of 16 along a head.
#define PANELS ((SIZE + 63) / 64)
#define STEPS ((SIZE + 15) / 16)
// Rows of a walked tile: the block loops over these, while the owned tile stays.
#define WALK 64
#define PANEL_WALK (WALK * 128)

// Layout of `call.delta`: [heads, 2, pitch] with -log2e lse and then -delta of each row; then the tile counters and, with MASK
// 3, 16 bytes further, the outlines of runs of queries.
__device__ __forceinline__ i64 pitch_of(const Call& call) { return (call.tq + 7) / 8 * 8; }
__device__ __forceinline__ float* statistics(const Call& call, int head) {
    return call.delta + head * 2 * pitch_of(call);
}
// Counter 0 is for tiles of keys, counter 1 for tiles of queries.
__device__ __forceinline__ int* counter(const Call& call, int which) {
    return (int*)(call.delta + call.heads * 2 * pitch_of(call)) + which;
}

// cp.async of four bytes; `copies_arrive` arrives on a barrier once all of the thread's copies have landed.
__device__ __forceinline__ void copy_word(float* to, const float* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void copies_arrive(u64* bar) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(bar)) : "memory");
}

#if MASK == 3

// Queries per outline. Runs count from the first token, regardless of segments.
#define RUN 16

// Summary of the two intervals of a run of queries: [some.x, some.y) and [some.z, some.w) cover the keys of all its queries;
// every query attends to all of [all.x, all.y) and [all.z, all.w).
struct Outline {
    int4 some, all;
};
__device__ __forceinline__ Outline* outlines(const Call& call) { return (Outline*)(counter(call, 0) + 4); }

// Computes the outlines of two runs of queries from `first`, by a warp. Queries past the last do not affect them.
__device__ __forceinline__ void outline_runs(const Call& call, int first) {
    const int none = 0x7fffffff, query = first + threadIdx.x % 32;
    int4 some = make_int4(none, -none, none, -none), all = make_int4(-none, none, -none, none);
    if (query < call.tq) {
        const int* at = call.intervals + query * call.interval_row;
        all = make_int4(at[0], at[1], at[2], at[3]);
        if (all.x < all.y) some.x = all.x, some.y = all.y;
        if (all.z < all.w) some.z = all.z, some.w = all.w;
    }
#pragma unroll
    for (int o = 1; o < RUN; o *= 2) {
        some.x = min(some.x, __shfl_xor_sync(ALL_LANES, some.x, o));
        some.y = max(some.y, __shfl_xor_sync(ALL_LANES, some.y, o));
        some.z = min(some.z, __shfl_xor_sync(ALL_LANES, some.z, o));
        some.w = max(some.w, __shfl_xor_sync(ALL_LANES, some.w, o));
        all.x = max(all.x, __shfl_xor_sync(ALL_LANES, all.x, o));
        all.y = min(all.y, __shfl_xor_sync(ALL_LANES, all.y, o));
        all.z = max(all.z, __shfl_xor_sync(ALL_LANES, all.z, o));
        all.w = min(all.w, __shfl_xor_sync(ALL_LANES, all.w, o));
    }
    if (threadIdx.x % RUN == 0 && query < call.tq) outlines(call)[query / RUN] = {some, all};
}

#endif

// Flags of a walked tile for the 64 rows of a warpgroup: MET if a pair may be unmasked, MASKED if one may be masked.
#define MET(part) (1 << (part))
#define MASKED(part) (8 << (part))
#define ANY_MET (MET(0) | MET(1) | MET(2))
#define ANY_MASKED (MASKED(0) | MASKED(1) | MASKED(2))

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// An owned tile of keys or queries of a head, and its segments. A negative `first` means that no tiles are left.
struct Task {
    int first, head;
    Segment g;
};

// Takes the next tile, broadcast to all lanes of a warp.
template <int HEIGHT> __device__ __forceinline__ Task next_task(const Call& call, bool of_keys, int section) {
    const bool ragged = of_keys ? K_RAGGED : Q_RAGGED;
    const int heads = of_keys ? call.kv_heads : call.heads / HEADS;
    const int tiles = of_keys ? call.k_tile_count : call.q_tile_count;
    Task task;
    for (;;) {
        int i = 0;
        if (threadIdx.x % 32 == 0) i = atomicAdd(counter(call, !of_keys), 1);
        i = __shfl_sync(ALL_LANES, i, 0);
        task.first = -1;
        if (i >= tiles * heads) return task;
        int segment_of;
        if (ragged) {
            const Tile tile = (of_keys ? call.k_tiles : call.q_tiles)[i / heads];
            if (tile.segment < 0) continue;
            segment_of = tile.segment;
            task.first = tile.first;
            task.head = i % heads;
        } else {
            // Tiles come in sections of segments and heads whose walked tensors fit in L2 together; in a section, one tile of
            // every head first. With a causal mask the first keys and the last queries have the most pairs: heavy tiles first.
            const int longest = of_keys ? call.k_longest : call.q_longest;
            const int each = (longest + HEIGHT - 1) / HEIGHT;
            const int s = i / (each * section), n = min(section, call.segments * heads - s * section);
            const int r = i - s * each * section, pair = s * section + r % n;
            const int t = of_keys || MASK != 1 ? r / n : each - 1 - r / n;
            segment_of = pair / heads;
            task.first = segment_of * longest + t * HEIGHT;
            task.head = pair % heads;
        }
        task.g = segment(call, segment_of);
        return task;
    }
}

// The queries [low, high) that attend to a key, for masks where they are a range.
struct Range {
    int low, high;
};
__device__ __forceinline__ Range seen_by(const Call& call, const Segment& g, int key) {
    Range r = {g.q0, g.q1};
    if (key >= g.k1) r.high = r.low;
#if MASK == 1
    r.low = max(r.low, key - g.k1 + g.q1);
#elif MASK == 2
    r.low = max(r.low, key - call.ahead - g.k1 + g.q1);
    r.high = min(r.high, key + call.back - g.k1 + g.q1 + 1);
#endif
    return r;
}

// The queries that attend to any key of a tile; with MASK 3 all of the segment's.
__device__ __forceinline__ Range walked_by(const Call& call, const Segment& g, int from, int height) {
#if MASK == 3
    return {g.q0, g.q1};
#else
    return {seen_by(call, g, from).low, seen_by(call, g, min(from + height, g.k1) - 1).high};
#endif
}

#if MASK == 3

// Flags of the tile of queries from `first` against PARTS times 64 keys from `from`, derived from outlines. Conservative: a run
// may extend beyond the tile, which may set more flags. Computed per lane.
template <int PARTS> __device__ __forceinline__ int flags_of(const Call& call, const Segment& g, int from, int first) {
    int flags = 0;
    // Queries past the segment's end have p = 0 through their statistics.
    const int last = min(first + WALK, g.q1) - 1;
#pragma unroll 1
    for (int run = first / RUN; run <= last / RUN; run++) {
        const Outline of = outlines(call)[run];
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            const int key = from + 64 * part, end = min(key + 64, g.k1);
            if (max(of.some.x, key) < min(of.some.y, end) || max(of.some.z, key) < min(of.some.w, end))
                flags |= MET(part);
            const bool is_whole = (of.all.x <= key && of.all.y >= key + 64) || (of.all.z <= key && of.all.w >= key + 64);
            if (!is_whole || key + 64 > g.k1) flags |= MASKED(part);
        }
    }
    return flags;
}

// Copies the intervals of a tile's queries, by a warp, like its statistics; queries past `end` attend to nothing.
__device__ __forceinline__ void copy_intervals(int4* to, const Call& call, int first, int end) {
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < 4 * WALK; i += 32) {
        int* at = (int*)to + i;
        if (first + i / 4 < end)
            copy_word((float*)at, (const float*)(call.intervals + (first + i / 4) * call.interval_row + i % 4));
        else
            *at = 0;
    }
}

#else

// Whether any query of a walked tile attends to one of keys [from, from + 64); and below, whether any pair is masked.
__device__ __forceinline__ bool is_met(const Call& call, const Segment& g, int from, int first) {
    return from < g.k1 && seen_by(call, g, from).low < first + WALK &&
           seen_by(call, g, min(from + 64, g.k1) - 1).high > first;
}
__device__ __forceinline__ bool is_masked(const Call& call, const Segment& g, int from, int first) {
    if (from + 64 > g.k1) return true;
    // Queries past the segment's end have p = 0 through their statistics.
    return seen_by(call, g, from + 63).low > first || seen_by(call, g, from).high < min(first + WALK, g.q1);
}

#endif

// Sets scores to minus infinity where a query does not attend to the key, for a warpgroup's 64 keys from `from` and queries
// from `first`. With MASK 3 `seen` holds the intervals of each query.
__device__ __forceinline__ void mask_scores(float (&s)[WALK / 2], const Call& call, const Segment& g, int from, int first,
                                            const int4* seen) {
    const int t = threadIdx.x % 4;
    // The thread's two keys.
    const int key = from + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
#if MASK != 3
    const Range ranges[2] = {seen_by(call, g, key), seen_by(call, g, key + 8)};
#endif
#pragma unroll
    for (int j = 0; j < WALK / 8; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
#if MASK == 3
            const int4 of = seen[8 * j + 2 * t + e];
#else
            const int query = first + 8 * j + 2 * t + e;
#endif
#pragma unroll
            for (int i = 0; i < 2; i++) {
#if MASK == 3
                const int at = key + 8 * i;
                const bool has = ((at >= of.x && at < of.y) || (at >= of.z && at < of.w)) && at < g.k1;
#else
                const bool has = query >= ranges[i].low && query < ranges[i].high;
#endif
                if (!has) s[4 * j + 2 * i + e] = -infinity();
            }
        }
}

// A position in a ring of pipeline stages.
template <int COUNT> struct Ring {
    int stage, phase;
    __device__ __forceinline__ void next() {
        if (++stage == COUNT) {
            stage = 0;
            phase ^= 1;
        }
    }
};

// Releases a stage that the warp has finished reading.
__device__ __forceinline__ void release(u64* bar) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(bar);
}

// Copies statistics of ROWS rows from `first`, by a warp; past `end`, statistics that give p = 0. (TMA requires 16-byte aligned
// innermost coordinates, and segments start anywhere.)
template <int ROWS>
__device__ __forceinline__ void copy_statistics(float* to, const Call& call, int head, int first, int end) {
    const float* from = statistics(call, head) + first;
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < ROWS; i += 32) {
        if (first + i < end) {
            copy_word(to + i, from + i);
            copy_word(to + ROWS + i, from + pitch_of(call) + i);
        } else {
            to[i] = -infinity();
            to[ROWS + i] = 0.0f;
        }
    }
}

// Zeroes rows [from, rows) of panels, by 128 threads.
__device__ __forceinline__ void clear_rows(u8* panels, int panel_bytes, int from, int rows) {
    for (int r = from + threadIdx.x % 128 / 8; r < rows; r += 16)
        for (int p = 0; p < PANELS; p++)
            *(uint4*)(panels + p * panel_bytes + r * 128 + threadIdx.x % 8 * 16) = make_uint4(0, 0, 0, 0);
    __syncwarp();
}

// wgmma reads its A operand from registers while in flight. The compiler considers them dead then and might reuse them; using
// them after the wait keeps them live.
template <int Steps> __device__ __forceinline__ void hold(u32 (&a)[Steps][4]) {
#pragma unroll
    for (int i = 0; i < Steps; i++) hold(a[i]);
}

template <int Steps> __device__ __forceinline__ void pack(u32 (&a)[Steps][4], const float (&d)[8 * Steps]) {
#pragma unroll
    for (int i = 0; i < Steps; i++) operand(a[i], d, i);
}

// d [64, N] = the warpgroup's rows of panels times N walked rows, summed over the head.
template <int Count>
__device__ __forceinline__ void product_of_heads(float (&d)[Count], u64 own, int panel_bytes, u64 walked) {
#pragma unroll
    for (int i = 0; i < STEPS; i++)
        Product<2 * Count>::template of_shared<0, 0>(d, own + (i / 4 * panel_bytes + i % 4 * 32) / 16,
                                                     walked + (i / 4 * PANEL_WALK + i % 4 * 32) / 16, i > 0);
    product_commit();
}

// sum [64, SIZE] += a [64, 16 Steps] times 16 Steps walked rows.
template <int Steps>
__device__ __forceinline__ void add_product(float (&sum)[SIZE / 2], const u32 (&a)[Steps][4], const u8* walked) {
    const u64 b = along_mn(walked, PANEL_WALK);
#pragma unroll
    for (int i = 0; i < Steps; i++) Product<SIZE>::template of_registers<1>(sum, a[i], b + i * 2048 / 16, 1);
    product_commit();
}

// Writes an accumulator's rows below `end`, staged in panel rows that only this warp uses.
__device__ __forceinline__ void write(const Rows& to, int head, int first, int end, const float (&sum)[SIZE / 2],
                                      float factor, u8* panels, int panel_bytes) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < SIZE / 8; j++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int r = 16 * warp + lane / 4 + 8 * i;
            *(u32*)(panels + j / 8 * panel_bytes + r * 128 + ((j % 8) ^ (r % 8)) * 16 + lane % 4 * 4) =
                bf16x2(factor * sum[4 * j + 2 * i], factor * sum[4 * j + 2 * i + 1]);
        }
    __syncwarp();
    for (int i = lane; i < 16 * (SIZE / 8); i += 32) {
        const int r = 16 * warp + i / (SIZE / 8), j = i % (SIZE / 8);
        if (first + r < end)
            *(uint4*)(to.at + (first + r) * to.token + head * to.head + 8 * j) =
                *(const uint4*)(panels + j / 8 * panel_bytes + r * 128 + ((j % 8) ^ (r % 8)) * 16);
    }
    __syncwarp();
}

// Writes the warpgroup's rows of an accumulator [64, SIZE] below `rows`, 16 bytes per thread.
__device__ __forceinline__ void write_rows(const Rows& to, i64 token, int head, int rows, const float (&sum)[SIZE / 2],
                                           float factor) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = threadIdx.x / 32 % 4 * 16 + lane / 4 + 8 * i;
        bf16* at = to.at + (token + row) * to.token + head * to.head;
        write_row(at, row < rows, i, sum, factor);
    }
}
