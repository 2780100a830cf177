// Attention forward on Hopper: products of warpgroups, tiles by the bulk copy engine.
#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f
#define PANELS ((SIZE + 63) / 64)
#define STEPS ((SIZE + 15) / 16)
#define OWN (64 * GROUPS)
#define Q_PANEL (OWN * 128)
#define K_PANEL (WALK * 128)
#define THREADS (128 * GROUPS + PRODUCER)
#ifndef PINGPONG
#define PINGPONG 0
#endif
#ifndef NARROW
#define NARROW 0
#endif
#ifndef OVERLAP
#define OVERLAP 1
#endif
#ifndef LAZY
#define LAZY 0
#endif
#ifndef POLY
#define POLY 0
#endif

extern __shared__ __align__(1024) u8 memory[];

// A tile of queries of one head: rows [first, end) of segment g.
struct Task {
    Segment g;
    int segment, head, first, end;
};

// The keys walked: tiles of WALK from `low` on, then from `next` on; `count` in all, `turn` of them in the first run.
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

__device__ __forceinline__ bool task(Task& t, const Call& call, int index, int section) {
#if Q_RAGGED
    const Tile tile = call.q_tiles[index / call.heads];
    t.head = index % call.heads;
    t.segment = tile.segment;
    if (tile.segment < 0) return false;
    t.g = segment(call, tile.segment);
    t.first = tile.first;
#else
    const int tiles = (call.q_longest + OWN - 1) / OWN, pairs = call.segments * call.heads;
    const int before = index / (section * tiles) * section, rest = index - before * tiles;
    const int wide = min(section, pairs - before);
    const int pair = before + rest % wide;
    t.segment = pair / call.heads;
    t.head = pair % call.heads;
    t.g = segment(call, t.segment);
    t.first = t.g.q0 + (tiles - 1 - rest / wide) * OWN;
#endif
    t.end = min(t.first + OWN, t.g.q1);
    return t.first < t.end;
}

// Keys that rows [first, end) may see; for two intervals the least cover of the first and of the second ones.
__device__ __forceinline__ void span(const Segment& g, const Call& call, int first, int end, int& low, int& high) {
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

__device__ __forceinline__ Walk walk(const Task& t, const Call& call) {
    Walk w;
#if MASK == 3
    int a = 0x7fffffff, b = -0x7fffffff, c = a, d = b;
    for (int row = t.first + (int)threadIdx.x % 32; row < t.end; row += 32) {
        const int* at = call.intervals + row * call.interval_row;
        const int l0 = max(t.g.k0, at[0]), h0 = min(t.g.k1, at[1]), l1 = max(t.g.k0, at[2]), h1 = min(t.g.k1, at[3]);
        if (l0 < h0) a = min(a, l0), b = max(b, h0);
        if (l1 < h1) c = min(c, l1), d = max(d, h1);
    }
    a = __reduce_min_sync(ALL_LANES, a);
    b = __reduce_max_sync(ALL_LANES, b);
    c = __reduce_min_sync(ALL_LANES, c);
    d = __reduce_max_sync(ALL_LANES, d);
    if (c < a) {
        int x = a;
        a = c, c = x;
        x = b, b = d, d = x;
    }
    w.turn = a < b ? (b - a + WALK - 1) / WALK : 0;
    w.low = a;
    w.next = w.turn ? max(c, a + w.turn * WALK) : c;
    w.count = w.turn + (c < d && w.next < d ? (d - w.next + WALK - 1) / WALK : 0);
#else
    int high;
    span(t.g, call, t.first, t.end, w.low, high);
    w.count = high > w.low ? (high - w.low + WALK - 1) / WALK : 0;
    w.next = w.turn = 0;
#endif
    return w;
}

// A place in a ring of STAGES buffers, and the parity of its barrier.
struct Place {
    int stage;
    u32 parity;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Lane c of a quad gets word c of each lane: a[i] is then lane i's.
__device__ __forceinline__ void quad_transpose(u32 (&a)[4], int c) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const u32 got = __shfl_xor_sync(ALL_LANES, c & 2 ? a[i] : a[i + 2], 2);
        if (c & 2) a[i] = got; else a[i + 2] = got;
    }
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const u32 got = __shfl_xor_sync(ALL_LANES, c & 1 ? a[i] : a[i + 1], 1);
        if (c & 1) a[i] = got; else a[i + 1] = got;
    }
}

struct Barriers {
    u64 q_full, q_empty, k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
};

__device__ __forceinline__ void produce(const Call& call, const TensorMap* q_map, const TensorMap* k_map,
                                        const TensorMap* v_map, Barriers& bar, u8* q, u8* k, u8* v, int total,
                                        int section) {
    const bool leads = threadIdx.x % 32 == 0;
    const int group = call.heads / call.kv_heads;
    Place pk = {0, 1}, pv = {0, 1};
    u32 q_parity = 1;
    for (int index = blockIdx.x; index < total; index += gridDim.x) {
        Task t;
        if (!task(t, call, index, section)) continue;
        const Walk w = walk(t, call);
        if (w.count == 0 || !leads) continue;
        const int head = t.head / group;
        auto load = [&](u8* to, const TensorMap* map, u64* full, u64* empty, Place& p, int from) {
            barrier_wait(&empty[p.stage], p.parity);
            barrier_expect(&full[p.stage], PANELS * K_PANEL);
#pragma unroll
            for (int i = 0; i < PANELS; i++)
                bulk_load(to + (p.stage * PANELS + i) * K_PANEL, map, &full[p.stage], 64 * i, head,
                          K_RAGGED ? from : from - t.g.k0, K_RAGGED ? 0 : t.segment);
            p.next();
        };
        barrier_wait(&bar.q_empty, q_parity);
        q_parity ^= 1;
        barrier_expect(&bar.q_full, PANELS * Q_PANEL);
#pragma unroll
        for (int i = 0; i < PANELS; i++)
            bulk_load(q + i * Q_PANEL, q_map, &bar.q_full, 64 * i, t.head, Q_RAGGED ? t.first : t.first - t.g.q0,
                      Q_RAGGED ? 0 : t.segment);
        load(k, k_map, bar.k_full, bar.k_empty, pk, w.from(0));
        for (int j = 1; j < w.count; j++) {
            load(k, k_map, bar.k_full, bar.k_empty, pk, w.from(j));
            load(v, v_map, bar.v_full, bar.v_empty, pv, w.from(j - 1));
        }
        load(v, v_map, bar.v_full, bar.v_empty, pv, w.from(w.count - 1));
    }
}

// What this thread's two rows see, and their running softmax.
struct RowPair {
    int a[2], b[2];
#if MASK == 3
    int c[2], d[2];
#endif
    float top[2], total[2];

    __device__ __forceinline__ bool has(int i, int key) const {
#if MASK == 3
        return (key >= a[i] && key < b[i]) || (key >= c[i] && key < d[i]);
#elif MASK == 2
        return key >= a[i] && key < b[i];
#else
        return key < b[i];
#endif
    }
    // Whether every row of the warp sees the whole tile.
    template <int W> __device__ __forceinline__ bool all(int from) const {
        bool whole = true;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            bool in = from + W <= b[i];
#if MASK >= 2
            in = in && from >= a[i];
#endif
#if MASK == 3
            in = in || (from >= c[i] && from + W <= d[i]);
#endif
            whole = whole && in;
        }
        return __all_sync(ALL_LANES, whole);
    }
};

// The same on the FMA units, for -125 <= x: 2^x = 2^n 2^f, |f| <= 1/2, relative error 2.6e-6.
__device__ __forceinline__ float exp2_fma(float x) {
    x = fmaxf(x, -125.0f);
    const float t = x + 12582912.0f, f = x - (t - 12582912.0f);
    float y = fmaf(f, 0.00957010160566956f, 0.055917860295428f);
    y = fmaf(f, y, 0.24024744835407766f);
    y = fmaf(f, y, 0.6931218147411569f);
    y = fmaf(f, y, 0.9999992614434409f);
    return __int_as_float(__float_as_int(y) + (__float_as_int(t) << 23));
}

// Scores become probabilities against the rows' new tops; `shrink` brings older sums down to them.
template <int W>
__device__ __forceinline__ void soften(float (&s)[W / 2], RowPair& r, int from, float unit, float (&shrink)[2]) {
    const bool whole = r.all<W>(from);
    if (!whole) {
        const int c = from + 2 * ((int)threadIdx.x % 4);
#pragma unroll
        for (int j = 0; j < W / 2; j++)
            if (!r.has(j / 2 % 2, c + j / 4 * 8 + j % 2)) s[j] = -infinity();
    }
    float base[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float peak = fmaxf(s[2 * i], s[2 * i + 1]);
#pragma unroll
        for (int j = 4; j < W / 2; j += 4) peak = fmaxf(peak, fmaxf(s[j + 2 * i], s[j + 2 * i + 1]));
        peak = fmaxf(peak, __shfl_xor_sync(ALL_LANES, peak, 1));
        peak = fmaxf(peak, __shfl_xor_sync(ALL_LANES, peak, 2));
#if LAZY
        peak = (peak - r.top[i]) * unit > 8.0f ? peak : r.top[i];
#else
        peak = fmaxf(peak, r.top[i]);
#endif
        // A row that has seen nothing yet has only zeros to shrink and to add.
        base[i] = peak == -infinity() ? 0.0f : peak * unit;
        shrink[i] = exp2_fast(r.top[i] * unit - base[i]);
        r.top[i] = peak;
    }
    float sum[2] = {0.0f, 0.0f};
#if POLY
    if (whole) {
#pragma unroll
        for (int j = 0; j < W / 2; j++) {
            const int i = j / 2 % 2;
            const float x = fmaf(s[j], unit, -base[i]);
            s[j] = j / 4 % 8 < POLY ? exp2_fma(x) : exp2_fast(x);
            sum[i] += s[j];
        }
    } else
#endif
    {
#pragma unroll
        for (int j = 0; j < W / 2; j++) {
            const int i = j / 2 % 2;
            s[j] = exp2_fast(fmaf(s[j], unit, -base[i]));
            sum[i] += s[j];
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) r.total[i] = r.total[i] * shrink[i] + sum[i];
}

__device__ __forceinline__ void rescale(float (&o)[SIZE / 2], const float (&shrink)[2]) {
#if LAZY
    if (__all_sync(ALL_LANES, shrink[0] == 1.0f && shrink[1] == 1.0f)) return;
#endif
#pragma unroll
    for (int j = 0; j < SIZE / 2; j++) o[j] *= shrink[j / 2 % 2];
}

// s = q k^T over one tile of keys, under way.
template <int W> __device__ __forceinline__ void scores(float (&s)[W / 2], const u8* q, const u8* k) {
    const u64 dq = along_k(q), dk = along_k(k);
#pragma unroll
    for (int e = 0; e < STEPS; e++)
        Product<W>::template of_shared<0, 0>(s, dq + (e / 4 * Q_PANEL + e % 4 * 32) / 16,
                                             dk + (e / 4 * K_PANEL + e % 4 * 32) / 16, e > 0);
}

// o += p v over one tile of keys, under way.
template <int W> __device__ __forceinline__ void values(float (&o)[SIZE / 2], const u32 (&p)[W / 16][4], const u8* v) {
    const u64 dv = along_mn(v, K_PANEL);
#pragma unroll
    for (int e = 0; e < W / 16; e++) Product<SIZE>::of_registers<1>(o, p[e], dv + e * 2048 / 16, 1);
}

template <int W> __device__ __forceinline__ void operands(u32 (&p)[W / 16][4], const float (&s)[W / 2]) {
#pragma unroll
    for (int e = 0; e < W / 16; e++) operand(p[e], s, e);
}

// Rows of a tile of values behind the segment's end count as zeros, whatever lies there.
template <int W> __device__ __forceinline__ void clear_tail(u8* v, int from, int end, int group) {
#if K_RAGGED
    if (from + W > end) {
        const int rows = from + W - end, lane = (int)threadIdx.x % 128;
        for (int i = lane; i < rows * 8; i += 128)
#pragma unroll
            for (int panel = 0; panel < PANELS; panel++)
                *(uint4*)(v + panel * K_PANEL + (end - from) * 128 + i * 16) = make_uint4(0, 0, 0, 0);
        fence_async();
        named_sync(1 + group, 128);
    }
#endif
}

__device__ __forceinline__ void consume(const Call& call, Barriers& bar, const u8* q, u8* k, u8* v, int total,
                                        int section, int group) {
    const int warp = (int)threadIdx.x % 128 / 32, lane = (int)threadIdx.x % 32;
    const float unit = call.scale * LOG2E;
    Place pk = {0, 0}, pv = {0, 0};
    u32 q_parity = 0;
    auto release = [&](u64* empty) {
        __syncwarp();
        if (lane == 0) barrier_arrive(empty);
    };
    auto turn_take = [&] {
#if PINGPONG
        named_sync(8 + group, 256);
#endif
    };
    auto turn_give = [&] {
#if PINGPONG
        named_arrive(8 + (group + 1) % GROUPS, 256);
#endif
    };
    if (group == GROUPS - 1) turn_give();
    q += group * 64 * 128;
    for (int index = blockIdx.x; index < total; index += gridDim.x) {
        Task t;
        if (!task(t, call, index, section)) continue;
        const Walk w = walk(t, call);
        const int low_row = t.first + group * 64, row = low_row + warp * 16 + lane / 4;
        // The tiles of keys [j0, j1) that the rows of this warpgroup see.
        int j0 = 0, j1 = w.count, seen_to = MASK == 3 ? 0x7fffffff : t.g.k1;
        if (low_row >= t.end) {
            j1 = 0;
        } else {
#if MASK == 1 || MASK == 2
            int low, high;
            span(t.g, call, low_row, min(low_row + 64, t.end), low, high);
            j1 = high > low ? (high - w.low + WALK - 1) / WALK : 0;
            j0 = high > low ? (low - w.low) / WALK : 0;
            seen_to = high;
#endif
        }
#if NARROW
        const bool narrow = j0 < j1 && seen_to - w.from(j1 - 1) <= NARROW;
#else
        const bool narrow = false;
#endif
        // Tiles that others need are let go as they come.
        auto pass = [&](int tiles) {
            for (int j = 0; j < tiles; j++) {
                barrier_wait(&bar.k_full[pk.stage], pk.parity);
                turn_take();
                turn_give();
                release(&bar.k_empty[pk.stage]);
                pk.next();
                barrier_wait(&bar.v_full[pv.stage], pv.parity);
                release(&bar.v_empty[pv.stage]);
                pv.next();
            }
        };
        auto k_tile = [&] {
            barrier_wait(&bar.k_full[pk.stage], pk.parity);
            return k + pk.stage * PANELS * K_PANEL;
        };
        auto k_done = [&] {
            release(&bar.k_empty[pk.stage]);
            pk.next();
        };
        auto v_tile = [&] {
            barrier_wait(&bar.v_full[pv.stage], pv.parity);
            return v + pv.stage * PANELS * K_PANEL;
        };
        auto v_done = [&] {
            release(&bar.v_empty[pv.stage]);
            pv.next();
        };

        RowPair r;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int query = min(row + 8 * i, t.g.q1 - 1);
            r.a[i] = t.g.k0;
            r.b[i] = t.g.k1;
            // The key a query stands at is query + k1 - q1: the last query meets the last key.
#if MASK == 1
            r.b[i] = min(r.b[i], query + t.g.k1 - t.g.q1 + 1);
#elif MASK == 2
            const int stand = query + t.g.k1 - t.g.q1;
            r.a[i] = max(r.a[i], stand - call.back);
            r.b[i] = min(r.b[i], stand + call.ahead + 1);
#elif MASK == 3
            const int* at = call.intervals + query * call.interval_row;
            r.a[i] = max(t.g.k0, at[0]);
            r.b[i] = min(t.g.k1, at[1]);
            r.c[i] = max(t.g.k0, at[2]);
            r.d[i] = min(t.g.k1, at[3]);
#endif
            r.top[i] = -infinity();
            r.total[i] = 0.0f;
        }
        float o[SIZE / 2];
#pragma unroll
        for (int j = 0; j < SIZE / 2; j++) o[j] = 0.0f;

        if (w.count) {
            barrier_wait(&bar.q_full, q_parity);
            q_parity ^= 1;
        }
        if (j0 < j1) {
            pass(j0);
            float shrink[2];
            const int full = j1 - narrow;
#if NARROW
            u32 pn[NARROW / 16][4];
            if (full == j0) {
                float s[NARROW / 2];
                u8* keys = k_tile();
                turn_take();
                product_arrive();
                scores<NARROW>(s, q, keys);
                product_commit();
                turn_give();
                product_wait<0>();
                hold(s);
                k_done();
                soften<NARROW>(s, r, w.from(j0), unit, shrink);
                operands<NARROW>(pn, s);
            } else
#endif
            {
                u32 p[WALK / 16][4];
                {
                    float s[WALK / 2];
                    u8* keys = k_tile();
                    turn_take();
                    product_arrive();
                    scores<WALK>(s, q, keys);
                    product_commit();
                    turn_give();
                    product_wait<0>();
                    hold(s);
                    k_done();
                    soften<WALK>(s, r, w.from(j0), unit, shrink);
                    operands<WALK>(p, s);
                }
                for (int j = j0 + 1; j < full; j++) {
                    float s[WALK / 2];
#if OVERLAP
                    u8* keys = k_tile();
                    turn_take();
                    product_arrive();
                    scores<WALK>(s, q, keys);
                    product_commit();
                    u8* vals = v_tile();
                    product_arrive();
                    values<WALK>(o, p, vals);
                    product_commit();
                    turn_give();
                    product_wait<1>();
                    hold(s);
                    k_done();
                    soften<WALK>(s, r, w.from(j), unit, shrink);
                    product_wait<0>();
                    hold(o);
                    v_done();
#else
                    u8* vals = v_tile();
                    product_arrive();
                    values<WALK>(o, p, vals);
                    product_commit();
                    product_wait<0>();
                    hold(o);
                    v_done();
                    u8* keys = k_tile();
                    product_arrive();
                    scores<WALK>(s, q, keys);
                    product_commit();
                    product_wait<0>();
                    hold(s);
                    k_done();
                    soften<WALK>(s, r, w.from(j), unit, shrink);
#endif
                    rescale(o, shrink);
                    operands<WALK>(p, s);
                }
#if NARROW
                if (narrow) {
                    float s[NARROW / 2];
                    u8* keys = k_tile();
                    turn_take();
                    product_arrive();
                    scores<NARROW>(s, q, keys);
                    product_commit();
                    u8* vals = v_tile();
                    product_arrive();
                    values<WALK>(o, p, vals);
                    product_commit();
                    turn_give();
                    product_wait<1>();
                    hold(s);
                    k_done();
                    soften<NARROW>(s, r, w.from(full), unit, shrink);
                    product_wait<0>();
                    hold(o);
                    v_done();
                    rescale(o, shrink);
                    operands<NARROW>(pn, s);
                }
#endif
                if (!narrow) {
                    release(&bar.q_empty);
                    u8* vals = v_tile();
                    clear_tail<WALK>(vals, w.from(j1 - 1), t.g.k1, group);
                    product_arrive();
                    values<WALK>(o, p, vals);
                    product_commit();
                    product_wait<0>();
                    hold(o);
                }
            }
#if NARROW
            if (narrow) {
                release(&bar.q_empty);
                u8* vals = v_tile();
                clear_tail<NARROW>(vals, w.from(j1 - 1), t.g.k1, group);
                product_arrive();
                values<NARROW>(o, pn, vals);
                product_commit();
                product_wait<0>();
                hold(o);
            }
#endif
            v_done();
            pass(w.count - j1);
        } else if (w.count) {
            release(&bar.q_empty);
            pass(w.count);
        }

        float factor[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float whole = lanes_sum<4>(r.total[i]);
            factor[i] = whole > 0.0f ? 1.0f / whole : 0.0f;
            if (call.lse && lane % 4 == 0 && row + 8 * i < t.end)
                call.lse[(row + 8 * i) * call.lse_row + t.head] =
                    whole > 0.0f ? LN2 * (r.top[i] * unit + log2f(whole)) : -infinity();
        }
        if (!call.o.at) continue;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            bf16* to = call.o.at + (row + 8 * i) * call.o.token + t.head * call.o.head;
#pragma unroll
            for (int m = 0; m < (SIZE + 31) / 32; m++) {
                u32 words[4];
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    const int j = 4 * m + n;
                    words[n] = j < SIZE / 8 ? bf16x2(o[(4 * j + 2 * i) % (SIZE / 2)] * factor[i],
                                                     o[(4 * j + 2 * i + 1) % (SIZE / 2)] * factor[i])
                                            : 0;
                }
                quad_transpose(words, lane % 4);
                const int column = 32 * m + 8 * (lane % 4);
                if (row + 8 * i < t.end && column < SIZE)
                    *(uint4*)(to + column) = make_uint4(words[0], words[1], words[2], words[3]);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
wgmma_forward(const __grid_constant__ Call call, const __grid_constant__ TensorMap q_map,
              const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map, int total,
              int section) {
    u8* q = memory;
    u8* k = q + PANELS * Q_PANEL;
    u8* v = k + STAGES * PANELS * K_PANEL;
    Barriers& bar = *(Barriers*)(v + STAGES * PANELS * K_PANEL);
    if (threadIdx.x == 0) {
        barrier_init(&bar.q_full, 1);
        barrier_init(&bar.q_empty, 4 * GROUPS);
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&bar.k_full[i], 1);
            barrier_init(&bar.k_empty[i], 4 * GROUPS);
            barrier_init(&bar.v_full[i], 1);
            barrier_init(&bar.v_empty[i], 4 * GROUPS);
        }
        barrier_init_done();
    }
    __syncthreads();
    // The producer is behind the consumers: warpgroups start at warps divisible by four.
    if (threadIdx.x >= 128 * GROUPS) {
#ifdef LESS
        registers_down<LESS>();
#endif
        if (threadIdx.x < 128 * GROUPS + 32) produce(call, &q_map, &k_map, &v_map, bar, q, k, v, total, section);
    } else {
#ifdef MORE
        registers_up<MORE>();
#endif
        consume(call, bar, q, k, v, total, section, __shfl_sync(ALL_LANES, (int)threadIdx.x / 128, 0));
    }
}
