// Prologue of attention over ragged segments, from their starts and lengths, in one launch:
//
//   the tile lists: rows of every segment cut into tiles of `height`, for queries and for keys, in the order of `list_tiles`
//   the rows of outputs outside every segment: zeros, and an lse of minus infinity
//
// Grid: block 0 lists tiles of queries, block 1 tiles of keys; the others check SPAN tokens each, first of the queries, then of
// the keys. 1024 threads.
//
// A list is a counting sort: a warp takes 32 segments, cuts them into tiles and counts the tiles by class of work; a scan over
// the classes gives each its offset after all heavier ones; a second pass stores the tiles. Within a class the order of tiles
// is arbitrary, so nothing may depend on it. Entries past the last tile get segment -1. Reads 8 or 16 bytes per segment, twice;
// writes 8 per tile. Overlapping segments may have more tiles than the list holds: the excess is dropped.
//
// A block of SPAN tokens sets a bit for each of them that lies in a segment, with segments in any order, and clears the rows of
// the others. Every block reads all starts and lengths; only cleared rows are written.
//
// On an H200, over 65,536 tokens in a captured graph: 5 us for 325 segments, 7 us with keys too, 15 us for 4096.
// Shared memory: 5 KiB. Registers: at most 64, for 1024 threads. Deterministic except for the order of tiles of equal work.
//
// Defines: those of call.cuh; GRAD (the direction whose outputs are cleared).

#define THREADS 1024
#define WARPS (THREADS / 32)
#define CLASSES 256
#define SPAN 256

// Exclusive prefix sum of x over the threads, and the total. Contains two barriers.
__device__ __forceinline__ int scan(int x, int* total) {
    __shared__ int warps[WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int sum = x;
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
        const int below = __shfl_up_sync(ALL_LANES, sum, o);
        if (lane >= o) sum += below;
    }
    if (lane == 31) warps[warp] = sum;
    __syncthreads();
    int here = warps[lane];
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
        const int below = __shfl_up_sync(ALL_LANES, here, o);
        if (lane >= o) here += below;
    }
    *total = __shfl_sync(ALL_LANES, here, 31);
    const int before = __shfl_sync(ALL_LANES, here, (warp + 31) % 32);
    __syncthreads();
    return (warp > 0 ? before : 0) + sum - x;
}

// Approximate number of rows of the other side that the rows of a tile attend to, which its time is proportional to.
template <bool KEYS> __device__ __forceinline__ int work(const Call& call, const Segment& g, int first, int height) {
#if MASK == 1
    const int lead = g.k1 - g.q1;
    if (KEYS) return g.q1 - max(g.q0, first - lead);
    return min(first + height, g.q1) + lead - g.k0;
#elif MASK == 2
    const int reach = call.back + call.ahead + height;
    return min(KEYS ? g.q1 - g.q0 : g.k1 - g.k0, reach);
#elif MASK == 3
    // Estimated from queries sampled against the tile's first key, or from its middle query.
    if (!KEYS) {
        const Seen s = sees(call, g, min(first + height / 2, g.q1 - 1));
        return min(max(s.b - s.a, 0) + max(s.d - s.c, 0), g.k1 - g.k0);
    }
    const int samples = 16, queries = g.q1 - g.q0;
    int seeing = 0;
#pragma unroll 8
    for (int i = 0; i < samples; i++)
        seeing += sees(call, g, g.q0 + (int)((i64)(2 * i + 1) * queries / (2 * samples))).has(first);
    return (int)((i64)seeing * queries / samples);
#else
    return KEYS ? g.q1 - g.q0 : g.k1 - g.k0;
#endif
}

// Lists the tiles of a side. A section is `span` rows of the other side.
template <bool KEYS> __device__ void list_tiles(const Call& call, Tile* list, int height, int span) {
    __shared__ int counts[CLASSES], places[CLASSES];
    const int lane = threadIdx.x % 32, capacity = KEYS ? call.k_tile_count : call.q_tile_count;
    const int longest = KEYS ? call.q_longest : call.k_longest;
    // The class of a tile, which is its rank in the order.
#if MASK == 0 || MASK == 2
    // All tiles of a segment have equal weight and so come together: heaviest first. (With a full mask the order below took 2
    // to 4% longer.) The class width is chosen for the longest segment.
    int shift = 0;
    while (longest >> shift >= CLASSES) shift++;
    auto class_of = [&](const Segment&, int work) { return CLASSES - 1 - min(max(work, 0) >> shift, CLASSES - 1); };
#else
    // Segments are grouped into sections, whose walked rows stay in L2 together. Within a section, tiles with more than half of
    // the maximum work come first; its light tiles come after the next section's heavy ones, so that the list ends with light
    // tiles and no block finishes much later than the others. Of either kind the heaviest come first.
    const int rows = KEYS ? call.tq : call.tk, sections = (rows + span - 1) / span;
    const int wide = CLASSES / (2 * sections + 2), half = (longest + 1) / 2;
    auto class_of = [&](const Segment& g, int work) {
        const int section = min(KEYS ? g.q0 : g.k0, rows - 1) / span;
        const bool is_heavy = work > half;
        const int rest = max(min(is_heavy ? work - half : work, half), 0);
        return (2 * section + (is_heavy ? 0 : 3)) * wide + wide - 1 - (int)((wide - 1) * (float)rest / half);
    };
#endif
    for (int i = threadIdx.x; i < CLASSES; i += THREADS) counts[i] = 0;
    __syncthreads();
    const int groups = min(max((call.segments + 31) / 32, 1), WARPS), share = WARPS / groups;
    // Warps without a turn have no group.
    const int warp = threadIdx.x / 32, turn = warp / groups;
    const int group = turn < share ? warp % groups : call.segments;

    for (int pass = 0; pass < 2; pass++) {
        // Called by all lanes together; lanes without a tile pass a negative segment.
        auto put = [&](const Segment& g, Tile tile) {
            const int of = tile.segment < 0 ? CLASSES : class_of(g, work<KEYS>(call, g, tile.first, height));
            if (pass == 0) {
                if (tile.segment >= 0) atomicAdd(&counts[of], 1);
                return;
            }
            // Warp-aggregated: lanes of one class reserve their entries together.
            const u32 alike = __match_any_sync(ALL_LANES, of);
            const int leader = __ffs(alike) - 1;
            int place = 0;
            if (tile.segment >= 0 && lane == leader) place = atomicAdd(&places[of], __popc(alike));
            place = __shfl_sync(ALL_LANES, place, leader) + __popc(alike & ((1u << lane) - 1));
            if (tile.segment >= 0 && place < capacity) list[place] = tile;
        };
        // If there are fewer groups than warps, several warps share a group and take its tiles in turn.
        auto load = [&](int s) { return s < call.segments ? segment(call, s) : Segment{0, 0, 0, 0}; };
        Segment next = load(group * 32 + lane);
        for (int base = group * 32; base < call.segments; base += THREADS) {
            const int s = base + lane;
            const Segment g = next;
            next = load(s + THREADS);
            const int first = KEYS ? g.k0 : g.q0, rows = max((KEYS ? g.k1 : g.q1) - first, 0);
            const int tiles = (rows + height - 1) / height;
            int end = tiles;
#pragma unroll
            for (int o = 1; o < 32; o *= 2) {
                const int below = __shfl_up_sync(ALL_LANES, end, o);
                if (lane >= o) end += below;
            }
            const int total = __shfl_sync(ALL_LANES, end, 31), most = __reduce_max_sync(ALL_LANES, tiles);
            if (most <= 2 * ((total + 31) / 32)) {
                for (int t = turn; t < most; t += share) put(g, {t < tiles ? s : -1, first + t * height});
                continue;
            }
            // Lengths differ widely: lanes share the tiles of all segments, and look up each tile's owner.
            for (int from = turn * 32; from < total; from += share * 32) {
                const int i = from + lane;
                int owner = 0;
#pragma unroll
                for (int step = 16; step > 0; step /= 2)
                    if (__shfl_sync(ALL_LANES, end, owner + step - 1) <= i) owner += step;
                const int t = i - (__shfl_sync(ALL_LANES, end, owner) - __shfl_sync(ALL_LANES, tiles, owner));
                const Segment whose = {__shfl_sync(ALL_LANES, g.q0, owner), __shfl_sync(ALL_LANES, g.q1, owner),
                                       __shfl_sync(ALL_LANES, g.k0, owner), __shfl_sync(ALL_LANES, g.k1, owner)};
                put(whose, {i < total ? base + owner : -1, (KEYS ? whose.k0 : whose.q0) + t * height});
            }
        }
        __syncthreads();
        if (pass == 0) {
            int total;
            const int before = scan(threadIdx.x < CLASSES ? counts[threadIdx.x] : 0, &total);
            if (threadIdx.x < CLASSES) places[threadIdx.x] = before;
            for (int i = total + (int)threadIdx.x; i < capacity; i += THREADS) list[i] = {-1, 0};
            __syncthreads();
        }
    }
}

// Zeroes one row of `bytes` bytes per head; called by a warp.
__device__ __forceinline__ void clear_row(const Rows& rows, int token, int heads, int bytes, int element) {
    if (!rows.at) return;
    char* at = (char*)rows.at + token * rows.token * element;
    const i64 head = rows.head * element;
    const int lane = threadIdx.x % 32;
    if ((((u64)at | (u64)head | (u64)bytes) & 15) == 0) {
        const int pieces = bytes / 16;
        for (int i = lane; i < heads * pieces; i += 32)
            *(uint4*)(at + i / pieces * head + i % pieces * 16) = make_uint4(0, 0, 0, 0);
    } else {
        const int pieces = bytes / 2;
        for (int i = lane; i < heads * pieces; i += 32) *(u16*)(at + i / pieces * head + i % pieces * 2) = 0;
    }
}

// Clears rows of the SPAN tokens from `base` that lie in no segment of their side.
template <bool KEYS> __device__ void clear_outside(const Call& call, int base, int bytes, int element) {
    __shared__ u32 inside[SPAN / 32];
    const int tokens = KEYS ? call.tk : call.tq;
    const int end = min(base + SPAN, tokens);
    if (threadIdx.x < SPAN / 32) inside[threadIdx.x] = 0;
    __syncthreads();
    for (int s = threadIdx.x; s < call.segments; s += THREADS) {
        const Segment g = segment(call, s);
        const int from = max(KEYS ? g.k0 : g.q0, base) - base, to = min(KEYS ? g.k1 : g.q1, end) - base;
        for (int word = from / 32; word * 32 < to; word++) {
            const int low = max(from - word * 32, 0), high = min(to - word * 32, 32);
            if (low < high) atomicOr(&inside[word], (high == 32 ? ~0u : (1u << high) - 1) & ~((1u << low) - 1));
        }
    }
    __syncthreads();
    for (int token = base + (int)threadIdx.x / 32; token < end; token += WARPS) {
        if (inside[(token - base) / 32] >> ((token - base) % 32) & 1) continue;
#if GRAD
        if (KEYS) {
            clear_row(call.dk, token, call.kv_heads, bytes, element);
            clear_row(call.dv, token, call.kv_heads, bytes, element);
        } else {
            clear_row(call.dq, token, call.heads, bytes, element);
        }
#else
        clear_row(call.o, token, call.heads, bytes, element);
        if (call.lse)
            for (int h = threadIdx.x % 32; h < call.heads; h += 32)
                call.lse[token * call.lse_row + h] = -infinity();
#endif
    }
}

// `bytes` and `element` are the sizes of a head's row and of one element. `q_spans` blocks check queries. Sections span
// `q_section` keys for tiles of queries, and `k_section` queries for tiles of keys. Without a list for a side, its tiles are
// not listed.
extern "C" __global__ void __launch_bounds__(THREADS)
attention_tiles(const __grid_constant__ Call call, int q_height, int k_height, int q_section, int k_section, int q_spans,
                int bytes, int element) {
    if (blockIdx.x == 0) {
        if (call.q_tiles) list_tiles<false>(call, const_cast<Tile*>(call.q_tiles), q_height, q_section);
    } else if (blockIdx.x == 1) {
        if (call.k_tiles) list_tiles<true>(call, const_cast<Tile*>(call.k_tiles), k_height, k_section);
    } else {
        const int span = blockIdx.x - 2;
        if (span < q_spans) clear_outside<false>(call, span * SPAN, bytes, element);
        else clear_outside<true>(call, (span - q_spans) * SPAN, bytes, element);
    }
}

// Fills segments for timing attention: the maximum number of equal ones, contiguous; with intervals, each query attends to the
// keys up to its own position. Grid: segments and queries in blocks of 1024 threads.
extern "C" __global__ void __launch_bounds__(THREADS) even_segments(const __grid_constant__ Call call) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i < call.segments) {
        if (Q_RAGGED) {
            const int len = min(max(call.tq / call.segments, 1), call.q_longest);
            const_cast<int*>(call.q_start)[i] = min(i * len, call.tq);
            const_cast<int*>(call.q_len)[i] = len;
        }
        if (K_RAGGED) {
            const int len = min(max(call.tk / call.segments, 1), call.k_longest);
            const_cast<int*>(call.k_start)[i] = min(i * len, call.tk);
            const_cast<int*>(call.k_len)[i] = len;
        }
    }
#if MASK == 3
    if (i < call.tq) {
        int* at = const_cast<int*>(call.intervals) + i * call.interval_row;
        at[0] = 0;
        at[1] = i + 1;
        at[2] = 0;
        at[3] = 0;
    }
#endif
}
