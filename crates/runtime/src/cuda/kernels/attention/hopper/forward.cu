// Attention forward on Hopper: wgmma products in consumer warpgroups on tiles loaded by TMA.
//
//   scores = scale q k^T, p = softmax over the keys a query attends to, o = p v, lse = log of the sum of exponentials
//
// q, o [tq, heads, SIZE], k, v [tk, kv_heads, SIZE] bf16 by token and head strides, lse [tq, heads] f32; o or lse may be
// absent. SIZE is a multiple of 8 from 16 to 256. 4 SIZE FLOPs per pair of query and key; each query tile reads the keys and
// values it attends to, from L2 if neighbours share them; scores never leave the registers.
//
// A thread block has GROUPS consumer warpgroups of 64 rows, followed by one producer warp. A row is a query of one head: PACK
// query heads of one key head lie side by side, so a tile of 64 GROUPS rows is OWN tokens of PACK heads, and short or causal
// segments waste fewer rows. The producer takes one task (tile, key head) after another, announces each to the consumers
// through shared memory, and loads the queries and a ring of STAGES pipeline stages, each a tile of WALK keys and values. The
// kernel is persistent: blocks take tasks in list order until none is left, so the next task's tiles load while this one's
// results are written, and no block runs much longer than the others.
// A consumer holds scores [64, WALK], probabilities and accumulators [64, SIZE] in registers. With OVERLAP, the product of the
// next scores and that of the last probabilities are both in flight before it computes the softmax; with PINGPONG, warpgroups
// also take turns issuing, so one's softmax overlaps the other's products. Without OVERLAP a block needs few registers, and the
// BLOCKS blocks of a multiprocessor hide each other's latency: the choice for short segments.
// The last tile of a walk is NARROW wide if that covers the remaining keys.
//
// Shared memory: (64 GROUPS + 2 STAGES WALK) 128 ceil(SIZE / 64) + 1024 bytes. Registers: LESS and MORE per thread of producer
// and consumers; no spills in the configurations that forward.rs selects.
// The sums of a row have a fixed order that counts from its segment's start: deterministic, equal packed and separately.
//
// On an H200, TFLOP/s beside cuDNN 9.19 in the same process (harness over torch 2.11, medians of interleaved runs):
// (batch, heads, key heads, tokens, SIZE) = (32, 12, 4, 2048, 64) causal 430 and 388, (16, 16, 8, 2048, 128) causal 570
// and 528, (256, 12, 12, 257, 64) full 221 and 144, (64, 4, 1, 512, 256) causal 380 and 349. 65,536 tokens in 325
// segments, heads 12 on 4 of 64: 0.163 ms causal, 0.225 full; 4 on 1 of 256: 0.160 and 0.185.
//
// Defines: SIZE, MASK, Q_RAGGED, K_RAGGED; GROUPS, PACK, WALK, NARROW (0: none), STAGES, BLOCKS, OVERLAP, PINGPONG;
// PRODUCER (32 or 128 threads), LESS and MORE (registers, with 128).

#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f
#define PANELS ((SIZE + 63) / 64)
#define STEPS ((SIZE + 15) / 16)
#define ROWS (64 * GROUPS)
#define OWN (ROWS / PACK)
#define Q_PANEL (ROWS * 128)
#define K_PANEL (WALK * 128)
#define THREADS (128 * GROUPS + PRODUCER)

extern __shared__ __align__(1024) u8 memory[];

// The tiles of keys of a task: `count` tiles of WALK keys, the first `turn` of them from `low`, the others from `next`.
struct Walk {
    int low, next, turn, count;
    __device__ __forceinline__ int from(int j) const {
#if MASK == 3
        return j < turn ? low + j * WALK : next + (j - turn) * WALK;
#else
        return low + j * WALK;
#endif
    }
};

// A task: tokens [first, end) of segment g. `head` counts in units of PACK.
struct Task {
    Segment g;
    int first, end, head, segment;
    Walk walk;
};

// Announced by the producer when no tasks are left.
#define NO_MORE -1

struct Barriers {
    u64 q_full, q_empty, k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
};

struct Memory {
    u8 *q, *k, *v;
    Barriers* bar;
    // Task n is in slot n % 2: consumers may read it until they have released the next task's queries.
    Task* tasks;
};

// A position in a ring of STAGES buffers, and the parity of its barrier.
struct Place {
    int stage;
    u32 parity;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// The range [low, high) of keys that tokens [first, end) attend to. Not for two intervals.
__device__ __forceinline__ void span(const Call& call, const Segment& g, int first, int end, int& low, int& high) {
    low = g.k0;
    high = g.k1;
#if MASK == 1
    high = min(high, end + g.k1 - g.q1);
#elif MASK == 2
    const int lead = g.k1 - g.q1;
    low = max(low, first + lead - call.back);
    high = min(high, end + lead + call.ahead);
#endif
}

// The producer.

// Decodes a task index into tokens and head; false past the end of the list. Uniform tiles come in sections of `section` pairs
// of segment and head whose keys and values fit in L2 together; in a section, the last tile of every pair comes first, because
// with a causal mask it is the longest.
__device__ __forceinline__ bool find(Task& t, const Call& call, int index, int section) {
    const int heads = call.heads / PACK;
#if Q_RAGGED
    const Tile tile = call.q_tiles[index / heads];
    if (tile.segment < 0) return false;
    t.head = index % heads;
    t.segment = tile.segment;
    t.g = segment(call, tile.segment);
    t.first = tile.first;
#else
    const int tiles = (call.q_longest + OWN - 1) / OWN, pairs = call.segments * heads;
    const int before = index / (section * tiles) * section, rest = index - before * tiles;
    const int wide = min(section, pairs - before), pair = before + rest % wide;
    t.head = pair % heads;
    t.segment = pair / heads;
    t.g = segment(call, t.segment);
    t.first = t.g.q0 + (tiles - 1 - rest / wide) * OWN;
#endif
    t.end = min(t.first + OWN, t.g.q1);
    return true;
}

// Determines the tiles of keys to walk, by a whole warp. With two intervals: those that cover the first intervals of the rows,
// then those that cover the second.
__device__ __forceinline__ void lay_out(Task& t, const Call& call) {
    Walk& w = t.walk;
#if MASK == 3
    int a = 0x7fffffff, b = 0, c = a, d = 0;
    for (int row = t.first + (int)threadIdx.x % 32; row < t.end; row += 32) {
        const Seen seen = sees(call, t.g, row);
        if (seen.a < seen.b) a = min(a, seen.a), b = max(b, seen.b);
        if (seen.c < seen.d) c = min(c, seen.c), d = max(d, seen.d);
    }
    a = __reduce_min_sync(ALL_LANES, a);
    b = __reduce_max_sync(ALL_LANES, b);
    c = __reduce_min_sync(ALL_LANES, c);
    d = __reduce_max_sync(ALL_LANES, d);
    if (c < a) {
        int other = a;
        a = c, c = other;
        other = b, b = d, d = other;
    }
    w.low = a;
    w.turn = a < b ? (b - a + WALK - 1) / WALK : 0;
    w.next = w.turn ? max(c, a + w.turn * WALK) : c;
    w.count = w.turn + (w.next < d ? (d - w.next + WALK - 1) / WALK : 0);
#else
    int high;
    span(call, t.g, t.first, t.end, w.low, high);
    w.next = w.turn = 0;
    w.count = high > w.low ? (high - w.low + WALK - 1) / WALK : 0;
#endif
}

__device__ __forceinline__ void load_keys(u8* ring, const TensorMap* map, u64* full, u64* empty, Place& at,
                                          const Task& t, int kv_head, int from) {
    barrier_wait(&empty[at.stage], at.parity);
    barrier_expect(&full[at.stage], PANELS * K_PANEL);
#pragma unroll
    for (int i = 0; i < PANELS; i++)
        bulk_load(ring + (at.stage * PANELS + i) * K_PANEL, map, &full[at.stage], 64 * i, kv_head,
                  K_RAGGED ? from : from - t.g.k0, K_RAGGED ? 0 : t.segment);
    at.next();
}

__device__ __forceinline__ void produce(const Call& call, const TensorMap* q_map, const TensorMap* k_map,
                                        const TensorMap* v_map, const Memory& m, int total, int section) {
    const bool leads = threadIdx.x % 32 == 0;
    Place at_k = {0, 1}, at_v = {0, 1};
    u32 q_parity = 1;
    // Each block's first task is fixed by its index; further tasks are taken from a counter. The last tasks are the light ones.
    int* taken = (int*)call.scratch;
    for (int index = blockIdx.x, next; index < total; index = (int)gridDim.x + __shfl_sync(ALL_LANES, next, 0)) {
        Task t;
        if (!find(t, call, index, section)) break;
        lay_out(t, call);
        if (!leads) continue;
        barrier_wait(&m.bar->q_empty, q_parity);
        m.tasks[q_parity ^ 1] = t;
        q_parity ^= 1;
        const Walk w = t.walk;
        if (w.count == 0) {
            barrier_arrive(&m.bar->q_full);
            next = taken ? atomicAdd(taken, 1) : index;
            continue;
        }
        barrier_expect(&m.bar->q_full, PANELS * (OWN * PACK * 128));
#pragma unroll
        for (int i = 0; i < PANELS; i++)
            bulk_load(m.q + i * Q_PANEL, q_map, &m.bar->q_full, 64 * i, t.head * PACK,
                      Q_RAGGED ? t.first : t.first - t.g.q0, Q_RAGGED ? 0 : t.segment);
        const int kv_head = t.head * PACK / (call.heads / call.kv_heads);
        load_keys(m.k, k_map, m.bar->k_full, m.bar->k_empty, at_k, t, kv_head, w.from(0));
        for (int j = 1; j < w.count; j++) {
            load_keys(m.k, k_map, m.bar->k_full, m.bar->k_empty, at_k, t, kv_head, w.from(j));
            load_keys(m.v, v_map, m.bar->v_full, m.bar->v_empty, at_v, t, kv_head, w.from(j - 1));
        }
        next = taken ? atomicAdd(taken, 1) : index;
        load_keys(m.v, v_map, m.bar->v_full, m.bar->v_empty, at_v, t, kv_head, w.from(w.count - 1));
    }
    if (leads) {
        barrier_wait(&m.bar->q_empty, q_parity);
        m.tasks[q_parity ^ 1].walk.count = NO_MORE;
        barrier_arrive(&m.bar->q_full);
    }
}

// The consumers.

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The keys that this thread's two rows, 8 apart, attend to, and their online softmax: maximum, and the sum of its columns.
struct RowPair {
    Seen seen[2];
    float top[2], total[2];

    __device__ __forceinline__ bool has(int i, int key) const {
#if MASK == 3
        return seen[i].has(key);
#elif MASK == 2
        return key >= seen[i].a && key < seen[i].b;
#else
        return key < seen[i].b;
#endif
    }
    // Whether every row of the warp attends to all of [from, to).
    __device__ __forceinline__ bool all(int from, int to) const {
        bool whole = true;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            bool in = to <= seen[i].b;
#if MASK >= 2
            in = in && from >= seen[i].a;
#endif
#if MASK == 3
            in = in || (from >= seen[i].c && to <= seen[i].d);
#endif
            whole = whole && in;
        }
        return __all_sync(ALL_LANES, whole);
    }
};

// The state of a consumer warpgroup.
struct Consumer {
    const Memory& m;
    const u8* q;
    float unit;
    int group, lane;
    Place at_k, at_v;
    RowPair r;
    float shrink[2], o[SIZE / 2];
    // Whether a product with values is still in flight.
    bool is_under_way;

    __device__ __forceinline__ void release(u64* empty) {
        __syncwarp();
        if (lane == 0) barrier_arrive(empty);
    }
    __device__ __forceinline__ u8* k_tile() {
        barrier_wait(&m.bar->k_full[at_k.stage], at_k.parity);
        return m.k + at_k.stage * PANELS * K_PANEL;
    }
    __device__ __forceinline__ u8* v_tile() {
        barrier_wait(&m.bar->v_full[at_v.stage], at_v.parity);
        return m.v + at_v.stage * PANELS * K_PANEL;
    }
    __device__ __forceinline__ void k_done() {
        release(&m.bar->k_empty[at_k.stage]);
        at_k.next();
    }
    __device__ __forceinline__ void v_done() {
        release(&m.bar->v_empty[at_v.stage]);
        at_v.next();
    }
    __device__ __forceinline__ void turn_take() {
#if PINGPONG
        named_sync(8 + group, 256);
#endif
    }
    __device__ __forceinline__ void turn_give() {
#if PINGPONG
        named_arrive(8 + (group + 1) % GROUPS, 256);
#endif
    }

    // Releases tiles that only other warpgroups need, as they arrive.
    __device__ __forceinline__ void pass(int tiles) {
        for (int j = 0; j < tiles; j++) {
            k_tile();
            turn_take();
            turn_give();
            k_done();
            v_tile();
            v_done();
        }
    }

    // s = q k^T, left in flight.
    template <int W> __device__ __forceinline__ void scores(float (&s)[W / 2], const u8* keys) {
        const u64 a = along_k(q), b = along_k(keys);
        product_arrive();
#pragma unroll
        for (int e = 0; e < STEPS; e++)
            Product<W>::template of_shared<0, 0>(s, a + (e / 4 * Q_PANEL + e % 4 * 32) / 16,
                                                 b + (e / 4 * K_PANEL + e % 4 * 32) / 16, e > 0);
        product_commit();
    }

    // o += p v, left in flight.
    template <int W> __device__ __forceinline__ void values(const u32 (&p)[W / 16][4], const u8* vals) {
        const u64 b = along_mn(vals, K_PANEL);
        product_arrive();
#pragma unroll
        for (int e = 0; e < W / 16; e++) Product<SIZE>::template of_registers<1>(o, p[e], b + e * 2048 / 16, 1);
        product_commit();
    }

    // Turns scores of keys [from, from + W) into probabilities relative to the rows' new maxima; `shrink` rescales older sums.
    template <int W> __device__ __forceinline__ void soften(float (&s)[W / 2], int from) {
        if (!r.all(from, from + W)) {
            const int first = from + 2 * (lane % 4);
#pragma unroll
            for (int j = 0; j < W / 2; j++)
                if (!r.has(j / 2 % 2, first + j / 4 * 8 + j % 2)) s[j] = -infinity();
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float peak = fmaxf(s[2 * i], s[2 * i + 1]);
#pragma unroll
            for (int j = 4; j < W / 2; j += 4) peak = fmaxf(peak, fmaxf(s[j + 2 * i], s[j + 2 * i + 1]));
            peak = fmaxf(peak, __shfl_xor_sync(ALL_LANES, peak, 1));
            peak = fmaxf(peak, __shfl_xor_sync(ALL_LANES, peak, 2));
            peak = fmaxf(peak, r.top[i]);
            // A row without any key so far has only zeros to rescale and to add.
            const float base = peak == -infinity() ? 0.0f : peak * unit;
            shrink[i] = exp2_fast(r.top[i] * unit - base);
            r.top[i] = peak;
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < W / 2; j += 4) {
                s[j + 2 * i] = exp2_fast(fmaf(s[j + 2 * i], unit, -base));
                s[j + 2 * i + 1] = exp2_fast(fmaf(s[j + 2 * i + 1], unit, -base));
                sum += s[j + 2 * i] + s[j + 2 * i + 1];
            }
            r.total[i] = r.total[i] * shrink[i] + sum;
        }
    }

    // Computes the probabilities of the first tile.
    template <int W> __device__ __forceinline__ void begin(float (&s)[W / 2], int from) {
        const u8* keys = k_tile();
        turn_take();
        scores<W>(s, keys);
        turn_give();
        product_wait<0>();
        hold(s);
        k_done();
        soften<W>(s, from);
        is_under_way = false;
    }

    // Waits until sums are complete up to the tile before that of `s`, rescales them, and packs the probabilities.
    template <int W> __device__ __forceinline__ void settle(u32 (&p)[W / 16][4], const float (&s)[W / 2]) {
        product_wait<0>();
        hold(o);
        if (is_under_way) v_done();
#pragma unroll
        for (int j = 0; j < SIZE / 2; j++) o[j] *= shrink[j / 2 % 2];
#pragma unroll
        for (int e = 0; e < W / 16; e++) operand(p[e], s, e);
    }

    // Goes from the probabilities of one tile to those of the next, at `from`. The product with the values is left in flight:
    // the next `settle` waits for it, in a loop after the branch, so that the compiler cannot hoist the wait above the softmax.
    template <int Last, int W>
    __device__ __forceinline__ void step(const u32 (&p)[Last / 16][4], float (&s)[W / 2], int from) {
#if OVERLAP
        const u8* keys = k_tile();
        turn_take();
        scores<W>(s, keys);
        values<Last>(p, v_tile());
        turn_give();
        product_wait<1>();
        hold(s);
        k_done();
        soften<W>(s, from);
        is_under_way = true;
#else
        values<Last>(p, v_tile());
        product_wait<0>();
        hold(o);
        v_done();
        scores<W>(s, k_tile());
        product_wait<0>();
        hold(s);
        k_done();
        soften<W>(s, from);
#endif
    }

    // Processes tiles [j0, j1), up to the probabilities of the last.
    __device__ __forceinline__ void most(u32 (&p)[WALK / 16][4], const Walk& w, int j0, int j1) {
        float s[WALK / 2];
        begin<WALK>(s, w.from(j0));
#pragma unroll 1
        for (int j = j0 + 1; j < j1; j++) {
            settle<WALK>(p, s);
            step<WALK, WALK>(p, s, w.from(j));
        }
        settle<WALK>(p, s);
    }

    // Multiplies the last probabilities with their values. Rows of values past the segment's end are zeroed, as they may hold
    // anything; if segments are uniform, TMA has zero-filled them. Every warpgroup writes the same zeros.
    template <int W> __device__ __forceinline__ void finish(const u32 (&p)[W / 16][4], int from, int end) {
        release(&m.bar->q_empty);
        u8* vals = v_tile();
#if K_RAGGED
        if (from + W > end) {
            for (int i = (int)threadIdx.x % 128; i < (from + W - end) * 8; i += 128)
#pragma unroll
                for (int panel = 0; panel < PANELS; panel++)
                    *(uint4*)(vals + panel * K_PANEL + (end - from) * 128 + i * 16) = make_uint4(0, 0, 0, 0);
            fence_async();
            named_sync(1 + group, 128);
        }
#endif
        values<W>(p, vals);
        product_wait<0>();
        hold(o);
        v_done();
    }

    __device__ __forceinline__ void write(const Call& call, const Task& t, int row) {
        // Reloaded: keeping these in registers would add to the pressure.
        const int first = t.first, end = t.end, head = t.head * PACK;
        if (first + group * 64 / PACK >= end) return;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float whole = lanes_sum<4>(r.total[i]);
            const bool is_seeing = r.top[i] != -infinity();
            const float factor = is_seeing ? 1.0f / whole : 0.0f;
            const int at = row + 8 * i, token = first + at / PACK;
            const bool is_there = at < OWN * PACK && token < end;
            if (call.lse && is_there && lane % 4 == 0)
                call.lse[token * call.lse_row + head + at % PACK] =
                    is_seeing ? LN2 * (r.top[i] * unit + log2f(whole)) : -infinity();
            if (!call.o.at) continue;
            bf16* to = call.o.at + token * call.o.token + (head + at % PACK) * call.o.head;
            write_row(to, is_there, i, o, factor);
        }
    }

    __device__ __forceinline__ void attend(const Call& call, const Task& t) {
        const Walk w = t.walk;
        const Segment g = t.g;
        const int row = group * 64 + (int)threadIdx.x % 128 / 32 * 16 + lane / 4;
        // The tiles of keys [j0, j1) that the rows of this warpgroup attend to, up to key `high`.
        int j0 = 0, j1 = w.count;
        [[maybe_unused]] int high = g.k1;
        const int first = t.first, end = t.end, low_token = first + group * 64 / PACK;
        if (low_token >= end) {
            j1 = 0;
        } else {
#if MASK == 1 || MASK == 2
            int low;
            span(call, g, low_token, min(first + (group * 64 + 63) / PACK + 1, end), low, high);
            j0 = high > low ? (low - w.low) / WALK : 0;
            j1 = high > low ? (high - w.low + WALK - 1) / WALK : 0;
#endif
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            r.seen[i] = sees(call, g, min(first + (row + 8 * i) / PACK, end - 1));
            r.top[i] = -infinity();
            r.total[i] = 0.0f;
        }
#pragma unroll
        for (int j = 0; j < SIZE / 2; j++) o[j] = 0.0f;
        if (j0 >= j1) {
            release(&m.bar->q_empty);
            pass(w.count);
        } else {
            pass(j0);
#if NARROW
            const bool narrow = MASK != 3 && high - w.from(j1 - 1) <= NARROW;
            const int wide = j1 - narrow;
            u32 tail[NARROW / 16][4];
            if (j0 < wide) {
                u32 p[WALK / 16][4];
                most(p, w, j0, wide);
                if (narrow) {
                    float s[NARROW / 2];
                    step<WALK, NARROW>(p, s, w.from(wide));
                    settle<NARROW>(tail, s);
                } else {
                    finish<WALK>(p, w.from(j1 - 1), g.k1);
                }
            } else {
                float s[NARROW / 2];
                begin<NARROW>(s, w.from(j0));
                settle<NARROW>(tail, s);
            }
            if (narrow) finish<NARROW>(tail, w.from(j1 - 1), g.k1);
#else
            u32 p[WALK / 16][4];
            most(p, w, j0, j1);
            finish<WALK>(p, w.from(j1 - 1), g.k1);
#endif
            pass(w.count - j1);
        }
        write(call, t, row);
    }
};

__device__ __forceinline__ void consume(const Call& call, const Memory& m, int group) {
    Consumer c = {m, m.q + group * 64 * 128, call.scale * LOG2E, group, (int)threadIdx.x % 32, {0, 0}, {0, 0}};
    if (group == GROUPS - 1) c.turn_give();
    for (u32 parity = 0;; parity ^= 1) {
        barrier_wait(&m.bar->q_full, parity);
        const Task& t = m.tasks[parity];
        if (t.walk.count == NO_MORE) break;
        c.attend(call, t);
    }
}

// `total` counts the tasks; `section` as in `find`. `call.scratch` points to an integer 0; null distributes tasks statically.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
wgmma_forward(const __grid_constant__ Call call, const __grid_constant__ TensorMap q_map,
              const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map, int total,
              int section) {
    Memory m;
    m.q = memory;
    m.k = m.q + PANELS * Q_PANEL;
    m.v = m.k + STAGES * PANELS * K_PANEL;
    m.bar = (Barriers*)(m.v + STAGES * PANELS * K_PANEL);
    m.tasks = (Task*)(m.bar + 1);
    if (threadIdx.x == 0) {
        // Each warp arrives separately: its part of a product may finish after its neighbours'.
        barrier_init(&m.bar->q_full, 1);
        barrier_init(&m.bar->q_empty, 4 * GROUPS);
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&m.bar->k_full[i], 1);
            barrier_init(&m.bar->k_empty[i], 4 * GROUPS);
            barrier_init(&m.bar->v_full[i], 1);
            barrier_init(&m.bar->v_empty[i], 4 * GROUPS);
        }
        barrier_init_done();
    }
    __syncthreads();
    // The producer comes after the consumers, because a warpgroup must start at a warp divisible by four.
    if (threadIdx.x >= 128 * GROUPS) {
#ifdef LESS
        registers_down<LESS>();
#endif
        if (threadIdx.x < 128 * GROUPS + 32) produce(call, &q_map, &k_map, &v_map, m, total, section);
    } else {
#ifdef MORE
        registers_up<MORE>();
#endif
        // A shuffle makes it evidently warp-uniform to the compiler.
        consume(call, m, GROUPS == 1 ? 0 : __shfl_sync(ALL_LANES, (int)threadIdx.x / 128, 0));
    }
}
