// dq, dk and dv of attention on Hopper in one walk over tiles: bf16, heads of 16 to 64, any mask, equal and ragged sequences.
//
//   s^T = k q^T, p^T = exp2(scale log2e s^T - log2e lse), dp^T = v do^T, ds^T = p^T (dp^T - delta)
//   dv = p^T do, dk = scale ds^T q, dq^T = k^T ds^T: f32 atomic adds in device memory, in any order: not deterministic
//
// A thread block owns 128 keys of a key head and walks the queries that attend to them, of all query heads of the group, in
// tiles of 64: 5 products per tile of 64 x 64. One thread block per multiprocessor, four warpgroups:
//   0, 1: consumers of 64 keys each, which accumulate dk and dv in registers. k and v are register operands too: with both
//      operands in shared memory, a product of 64 columns would saturate its bandwidth.
//   2: the consumer that computes dq^T of a tile over the block's keys, with half of k^T in registers. ds^T arrives through a
//      ring of panels, which decouples the warpgroups; the sums leave by one bulk reduction per tile.
//   3: the producer: one warp issues the TMA loads.
// Prologue and epilogue are separate kernels: `wgmma_rows` computes row statistics and clears the sums, `wgmma_round` rounds
// them. Doing this in idle warps beside the walk took 3% less for 32 sequences of 2048, but a sixth more for 8. Issue-bound:
// the limit is the time a warp of 0 and 1 takes to issue its tile, so operands are requested before they are needed. ds^T uses
// p^T as packed to bf16: error 3.4e-3 instead of 2.4e-3. Causal, 12 heads on 4 of 64 on an H200, with statistics and rounding:
// 32 x 2048 1.20 ms, cuDNN 1.76; 8 x 2048 0.298 and 0.447; 64 x 1024 0.708 and 1.093; 16 x 4096 2.12 and 3.01.
// Registers: no spills. REGISTERS is the minimum at which products stay asynchronous.
//
// Defines: SIZE, MASK, Q_RAGGED, K_RAGGED, STAGES, OWN_STAGES and DS_STAGES (pipeline stages of walked tiles, owned tiles and
// tiles of ds), REGISTERS (per thread that owns keys), DQ_REGISTERS, FEEDER_REGISTERS (of the producer).

#define OWN 128
#define PANEL_OWN (OWN * 128)
#define Q_BYTES PANEL_WALK
#define K_BYTES PANEL_OWN
#define SUM_BYTES (WALK * SUM_ROW * 4)
// Steps of 16 keys, out of 8, whose k^T warpgroup 2 keeps in registers; there is no room for more.
#define KEPT 4
#define AT_STAGES (OWN_STAGES * 2 * K_BYTES)
#define AT_DS (AT_STAGES + STAGES * 2 * Q_BYTES)
#define AT_SUMS (AT_DS + DS_STAGES * OWN * WALK * 2)
#define AT_ROWS (AT_SUMS + 2 * SUM_BYTES)
#define AT_SEEN (AT_ROWS + STAGES * 2 * WALK * 4)
#define AT_NOTES (AT_SEEN + (MASK == 3 ? STAGES * WALK * 16 : 0))
#define AT_TASKS (AT_NOTES + STAGES * 16)
#define AT_BARRIERS (AT_TASKS + OWN_STAGES * 32)

extern __shared__ __align__(1024) u8 memory[];

// Descriptor of a walked tile: its first query, its query head, and its flags for each half of the keys.
struct Note {
    int first, head, flags;
};
// TAIL: the tile has rows past the segment's end. OVER: the walk is over.
#define TAIL 64
#define OVER 128

struct Barriers {
    u64 full[STAGES], empty[STAGES], own_full[OWN_STAGES], own_empty[OWN_STAGES];
    u64 ds_full[DS_STAGES][2], ds_empty[DS_STAGES];
};

__device__ __forceinline__ Barriers& barriers() { return *(Barriers*)(memory + AT_BARRIERS); }
__device__ __forceinline__ Note& note_at(int stage) { return *(Note*)(memory + AT_NOTES + stage * 16); }
__device__ __forceinline__ Task& task_at(int stage) { return *(Task*)(memory + AT_TASKS + stage * 32); }
__device__ __forceinline__ u8* queries_at(int stage) { return memory + AT_STAGES + stage * 2 * Q_BYTES; }
__device__ __forceinline__ int4* seen_at(int stage) { return (int4*)(memory + AT_SEEN) + stage * WALK; }
__device__ __forceinline__ u8* slopes_at(int stage, int part) { return memory + AT_DS + (2 * stage + part) * 8192; }

// Like `release`, by a lane that the hardware elects: holding a lane index would take a register, and none is free.
__device__ __forceinline__ void let_go(u64* bar) {
    __syncwarp();
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; @p mbarrier.arrive.release.cta.shared::cta.b64 _, [%0]; }" ::"r"(
                     shared_address(bar))
                 : "memory");
}

// The producer.

#if MASK != 3
// Flags of a tile, by a warp: even and odd lanes each look at one half of the keys.
__device__ __forceinline__ int flags_of(const Call& call, const Task& task, int first) {
    const int from = task.first + threadIdx.x % 2 * 64;
    const u32 met = __ballot_sync(ALL_LANES, is_met(call, task.g, from, first));
    const u32 masked = __ballot_sync(ALL_LANES, is_masked(call, task.g, from, first));
    return (met & 3) * MET(0) | (masked & 3) * MASKED(0);
}
#endif

// Copies statistics of a tile from `first`, by a warp; past `end`, statistics that give p = 0.
__device__ __forceinline__ void copy_statistics(float* to, const Call& call, int head, int first, int end) {
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < WALK; i += 32) {
        float* at = to + i / 2 * 4 + i % 2;
        if (first + i < end) {
            copy_word(at, statistics_of(call, head, first + i));
            copy_word(at + 2, statistics_of(call, head, first + i) + 2);
        } else {
            at[0] = -infinity();
            at[2] = 0.0f;
        }
    }
}

// The producer's loop, by one warp: takes tiles of keys, and for each walks the tiles of queries that attend to any of them.
__device__ __forceinline__ void feed(const Call& call, const TensorMap* q_map, const TensorMap* do_map,
                                     const TensorMap* k_map, const TensorMap* v_map, int section) {
    const int lane = threadIdx.x % 32;
    Barriers& bars = barriers();
    Ring<STAGES> walk = {0, 1};
    Ring<OWN_STAGES> own = {0, 1};
    for (;; own.next()) {
        const Task task = next_task<OWN>(call, true, section);
#if MASK == 3
        // Prefetched while the previous tile is in flight.
        const int ahead = task.first < 0 ? 0 : flags_of<OWN / 64>(call, task.g, task.first, task.g.q0 + lane * WALK);
#endif
        barrier_wait(&bars.own_empty[own.stage], own.phase);
        u64* own_full = &bars.own_full[own.stage];
        if (lane == 0) {
            task_at(own.stage) = task;
            if (task.first < 0) {
                barrier_arrive(own_full);
            } else {
                barrier_expect(own_full, 2 * K_BYTES);
                u8* k = memory + own.stage * 2 * K_BYTES;
#pragma unroll 1
                for (int r = 0; r < OWN; r += 64) {
                    bulk_load(k + r * 128, k_map, own_full, 0, task.head, task.first + r);
                    bulk_load(k + r * 128 + K_BYTES, v_map, own_full, 0, task.head, task.first + r);
                }
            }
        }
        if (task.first < 0) return;
        const int group = call.heads / call.kv_heads;
        const Range walked = walked_by(call, task.g, task.first, OWN);
#pragma unroll 1
        for (int head = task.head * group; head < (task.head + 1) * group; head++) {
            // Tiles are aligned to the segment's start.
#if MASK == 3
            int mine = 0;
#endif
#pragma unroll 1
            for (int first = task.g.q0 + (walked.low - task.g.q0) / WALK * WALK; first < walked.high; first += WALK) {
#if MASK == 3
                // Each lane computes the flags of one of the next 32 tiles.
                const int turn = (first - task.g.q0) / WALK % 32;
                if (turn == 0 && first > task.g.q0) mine = flags_of<OWN / 64>(call, task.g, task.first, first + lane * WALK);
                else if (turn == 0) mine = ahead;
                int flags = __shfl_sync(ALL_LANES, mine, turn);
                if (!(flags & ANY_MET)) continue;
#else
                int flags = flags_of(call, task, first);
#endif
                if (first + WALK > task.g.q1) flags |= TAIL;
                u64* full = &bars.full[walk.stage];
                barrier_wait(&bars.empty[walk.stage], walk.phase);
#if MASK == 3
                if (flags & ANY_MASKED) copy_intervals(seen_at(walk.stage), call, first, task.g.q1);
#endif
                float* rows = (float*)(memory + AT_ROWS) + walk.stage * 2 * WALK;
                // Tiles of whole pairs of rows are bulk-copied.
                const bool is_run = first % 2 == 0 && first + WALK <= task.g.q1;
                if (!is_run) copy_statistics(rows, call, head, first, task.g.q1);
                copies_arrive(full);
                if (lane == 0) {
                    note_at(walk.stage) = {first, head, flags};
                    barrier_expect(full, 2 * Q_BYTES + is_run * 8 * WALK);
                    if (is_run) bulk_load_run(rows, statistics_of(call, head, first), full, 8 * WALK);
                    u8* to = queries_at(walk.stage);
                    bulk_load(to, q_map, full, 0, head, first);
                    bulk_load(to + Q_BYTES, do_map, full, 0, head, first);
                }
                walk.next();
            }
        }
        barrier_wait(&bars.empty[walk.stage], walk.phase);
        copies_arrive(&bars.full[walk.stage]);
        if (lane == 0) {
            note_at(walk.stage) = {0, 0, OVER};
            barrier_arrive(&bars.full[walk.stage]);
        }
        walk.next();
    }
}

// Operands in registers.

// Offset of the thread's rows in a panel of 64 rows; exclusive or with 32 steps to the next 16 columns.
__device__ __forceinline__ u32 place_in_panel() {
    const int r = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 16;
    return r * 128 + ((threadIdx.x % 32 / 16) ^ (r % 8)) * 16;
}

// Loads the warpgroup's 64 rows of a panel as A operand, with zeros from row `rows`.
__device__ __forceinline__ void load_rows(u32 (&a)[STEPS][4], const u8* panel, int rows) {
    const u32 at = shared_address(panel) + place_in_panel();
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        ldmatrix(a[i], at ^ (32 * i));
#pragma unroll
        for (int n = 0; n < 4; n++)
            if (row + n % 2 * 8 >= rows) a[i][n] = 0;
    }
}

// Loads the transpose of a panel's first 16 KEPT rows as A operand: columns become rows. Zeros from row `rows` of the panel.
__device__ __forceinline__ void load_turned(u32 (&a)[KEPT][4], const u8* panel, int rows) {
    const int lane = threadIdx.x % 32, r = lane / 16 * 8 + lane % 8;
    const u32 at = shared_address(panel) + r * 128 + ((threadIdx.x % 128 / 32 * 2 + lane / 8 % 2) ^ (r % 8)) * 16;
#pragma unroll
    for (int i = 0; i < KEPT; i++) {
        ldmatrix_across(a[i], at + i * 2048);
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const int row = 16 * i + n / 2 * 8 + lane % 4 * 2;
            if (row >= rows) a[i][n] = 0;
            if (row + 1 >= rows) a[i][n] &= 0xffffu;
        }
    }
}

// d [64, WALK] = a times walked rows, summed over the head.
__device__ __forceinline__ void product_of_rows(float (&d)[WALK / 2], const u32 (&a)[STEPS][4], const u8* walked) {
    const u64 b = along_k(walked);
#pragma unroll
    for (int i = 0; i < STEPS; i++) Product<WALK>::of_registers<0>(d, a[i], b + i * 2, i > 0);
    product_commit();
}

// The warpgroups that own keys.

// The walk as seen by a consumer warpgroup. It polls for the next tile early, and loads its flags meanwhile.
struct Walk {
    Ring<STAGES> at;
    int flags;
    bool is_there;

    __device__ __forceinline__ void ask() { is_there = barrier_was_past(&barriers().full[at.stage], at.phase); }
    __device__ __forceinline__ void await() {
        if (!is_there) barrier_wait(&barriers().full[at.stage], at.phase);
        flags = __shfl_sync(ALL_LANES, note_at(at.stage).flags, 0);
    }
};

// One of the thread's statistics of a tile, for two of every 8 queries.
struct Statistic {
    float2 of[WALK / 8];
    __device__ __forceinline__ void load(u32 at) {
#pragma unroll
        for (int j = 0; j < WALK / 8; j++)
            asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(of[j].x), "=f"(of[j].y) : "r"(at + 64 * j));
    }
};

__device__ __forceinline__ void weigh(u32 (&p)[WALK / 16][4], const float (&s)[WALK / 2], const Statistic& lse, float unit) {
#pragma unroll
    for (int j = 0; j < WALK / 8; j++)
#pragma unroll
        for (int i = 0; i < 2; i++)
            p[j / 2][j % 2 * 2 + i] = bf16x2(exp2_fast(fmaf(s[4 * j + 2 * i], unit, lse.of[j].x)),
                                             exp2_fast(fmaf(s[4 * j + 2 * i + 1], unit, lse.of[j].y)));
}

__device__ __forceinline__ void slope(u32 (&ds)[WALK / 16][4], const float (&dp)[WALK / 2], const u32 (&p)[WALK / 16][4],
                                      const Statistic& delta) {
#pragma unroll
    for (int j = 0; j < WALK / 8; j++)
#pragma unroll
        for (int i = 0; i < 2; i++)
            asm("mul.rn.bf16x2 %0, %1, %2;"
                : "=r"(ds[j / 2][j % 2 * 2 + i])
                : "r"(p[j / 2][j % 2 * 2 + i]),
                  "r"(bf16x2(dp[4 * j + 2 * i] + delta.of[j].x, dp[4 * j + 2 * i + 1] + delta.of[j].y)));
}

// Stores ds^T [64, WALK] into a panel with keys as rows, at the thread's offset.
__device__ __forceinline__ void keep_slopes(const u32 (&a)[WALK / 16][4], u32 at) {
#pragma unroll
    for (int i = 0; i < WALK / 16; i++)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at ^ (32 * i)),
                     "r"(a[i][0]), "r"(a[i][1]), "r"(a[i][2]), "r"(a[i][3])
                     : "memory");
}

// Processes a warpgroup's 64 keys of a tile.
__device__ __forceinline__ void own_keys(const Call& call, const Task& task, int part, const u8* own, Ring<STAGES>& walked,
                                         Ring<DS_STAGES>& ring) {
    Barriers& bars = barriers();
    const int from = task.first + 64 * part;
    u32 k[STEPS][4], v[STEPS][4];
    load_rows(k, own, task.g.k1 - from);
    load_rows(v, own + K_BYTES, task.g.k1 - from);
    float dk[SIZE / 2], dv[SIZE / 2];
    u32 p[WALK / 16][4] = {}, ds[WALK / 16][4] = {};
#pragma unroll
    for (int i = 0; i < SIZE / 2; i++) dk[i] = dv[i] = 0.0f;
    const float unit = call.scale * LOG2E;
    u32 place = shared_address(slopes_at(0, part)) + place_in_panel();
    u32 rows_at = shared_address(memory + AT_ROWS) + threadIdx.x % 4 * 16;
    // Keeps the compiler from recomputing these.
    asm volatile("" : "+r"(place), "+r"(rows_at));
    Walk walk = {walked, 0, false};
    int before = -1;
    // ds^T of the previous tile is published to the dq warpgroup late, because the fence takes time.
    const auto publish = [&] {
        if (before < 0) return;
        fence_async();
        let_go(&bars.ds_full[ring.stage][part]);
        ring.next();
    };
    walk.await();
    for (;;) {
        const int flags = walk.flags, stage = walk.at.stage;
        if (flags & OVER) break;
        walk.at.next();
        if (!(flags & MET(part))) {
            // Sends zeros to dq. The previous stage can be released here, since its products are complete.
            publish();
            barrier_wait(&bars.ds_empty[ring.stage], ring.phase ^ 1);
            clear_rows(slopes_at(ring.stage, part), 0, 0, 64);
            fence_async();
            let_go(&bars.ds_full[ring.stage][part]);
            ring.next();
            let_go(&bars.empty[stage]);
            product_wait<0>();
            hold(dk);
            hold(dv);
            hold(p);
            hold(ds);
            if (before >= 0) let_go(&bars.empty[before]);
            before = -1;
            walk.is_there = false;
            walk.await();
            continue;
        }
        u8* queries = queries_at(stage);
        if (flags & TAIL) {
            // Zeroes rows past the last query: they may hold NaN, and 0 * NaN is NaN. The other warpgroup does the same.
            const int end = task.g.q1 - note_at(stage).first;
            clear_rows(queries, PANEL_WALK, end, WALK);
            clear_rows(queries + Q_BYTES, PANEL_WALK, end, WALK);
            fence_async();
            named_sync(2 + part, 128);
        }
        // Declared here, so that the accumulator, which a product overwrites, is not live before.
        float s[WALK / 2], dp[WALK / 2];
        product_arrive();
        product_of_rows(s, k, queries);
        walk.ask();
        publish();
        const bool is_free = barrier_was_past(&bars.ds_empty[ring.stage], ring.phase ^ 1);
        // p is dead now, which makes room for the statistics.
        product_wait<2>();
        hold(dv);
        hold(p);
        const u32 rows = rows_at + stage * (2 * WALK * 4);
        Statistic lse, delta;
        lse.load(rows);
        product_wait<0>();
        hold(dk);
        hold(ds);
        hold(s);
        if (before >= 0) let_go(&bars.empty[before]);
        if (flags & MASKED(part)) mask_scores(s, call, task.g, from, note_at(stage).first, seen_at(stage));
        weigh(p, s, lse, unit);
        product_arrive();
        product_of_rows(dp, v, queries + Q_BYTES);
        add_product(dv, p, queries + Q_BYTES);
        delta.load(rows + 8);
        walk.await();
        product_wait<1>();
        hold(dp);
        slope(ds, dp, p, delta);
        product_arrive();
        add_product(dk, ds, queries);
        if (!is_free) barrier_wait(&bars.ds_empty[ring.stage], ring.phase ^ 1);
        keep_slopes(ds, place + ring.stage * (2 * 8192));
        before = stage;
    }
    publish();
    let_go(&bars.empty[walk.at.stage]);
    walk.at.next();
    walked = walk.at;
    product_wait<0>();
    hold(dk);
    hold(dv);
    hold(p);
    hold(ds);
    hold(k);
    hold(v);
    if (before >= 0) let_go(&bars.empty[before]);
    if (call.dk.at) write_rows(call.dk, from, task.head, task.g.k1 - from, dk, call.scale);
    if (call.dv.at) write_rows(call.dv, from, task.head, task.g.k1 - from, dv, 1.0f);
}

// The warpgroup that sums dq.

// Adds a buffer to the sums of a partial tile: complete runs in bulk, the rest row by row.
__device__ __forceinline__ void add_rows(const Call& call, const float* buffer, int head, int first, int left) {
    const int runs = left / 8 * 8 * SUM_ROW;
    float* to = sums_of(call, head, first);
    for (int i = threadIdx.x % 128; i < runs; i += 128) atomicAdd(to + i, buffer[i]);
    for (int i = threadIdx.x % 128; i < 8 * SUM_ROW; i += 128) {
        const int lane = i / 4 % 32, row = lane % 4 * 2 + i % 2, column = i / 128 * 16 + lane / 4 + i / 2 % 2 * 8;
        if (row < left % 8) atomicAdd(to + runs + row * SUM_ROW + column, buffer[runs + i]);
    }
}

// Accumulates dq over a tile's walk.
__device__ __forceinline__ void sum_queries(const Call& call, const Task& task, u8* k_tile, Ring<STAGES>& walk,
                                            Ring<DS_STAGES>& ring, int& turn) {
    Barriers& bars = barriers();
    const int thread = threadIdx.x % 128;
    const int keys = task.g.k1 - task.first;
    u32 k[KEPT][4];
    load_turned(k, k_tile, keys);
    // The other warpgroups treat these rows as zeros whatever they hold.
    if (keys < OWN) {
        clear_rows(k_tile, 0, keys, OWN);
        fence_async();
        named_sync(4, 128);
    }
    const u64 turned = along_mn(k_tile, 8192);
    for (;; turn ^= 1) {
        barrier_wait(&bars.full[walk.stage], walk.phase);
        const int first = note_at(walk.stage).first, head = note_at(walk.stage).head;
        const bool is_over = note_at(walk.stage).flags & OVER;
        let_go(&bars.empty[walk.stage]);
        walk.next();
        if (is_over) break;
        float d[WALK / 2];
        barrier_wait(&bars.ds_full[ring.stage][0], ring.phase);
        barrier_wait(&bars.ds_full[ring.stage][1], ring.phase);
        product_arrive();
#pragma unroll
        for (int i = 0; i < OWN / 16; i++) {
            const u64 b = along_mn(slopes_at(ring.stage, i / 4), 8192) + i % 4 * 2048 / 16;
            if (i < KEPT) Product<WALK>::of_registers<1>(d, k[i % KEPT], b, i > 0);
            else Product<WALK>::of_shared<1, 1>(d, turned + i * 2048 / 16, b, i > 0);
        }
        product_commit();
        // Double-buffered: the bulk reduction that last used this buffer has finished reading it.
        float* buffer = (float*)(memory + AT_SUMS + turn * SUM_BYTES);
        if (thread == 0) bulk_wait_read<1>();
        product_wait<0>();
        hold(d);
        hold(k);
        let_go(&bars.ds_empty[ring.stage]);
        ring.next();
        named_sync(4, 128);
        if (thread / 32 * 16 < SIZE) {
#pragma unroll
            for (int j = 0; j < WALK / 8; j++)
                ((float4*)(buffer + j * 8 * SUM_ROW))[thread] = make_float4(d[4 * j], d[4 * j + 1], d[4 * j + 2], d[4 * j + 3]);
        }
        fence_async();
        named_sync(5, 128);
        const int left = task.g.q1 - first;
        if (left < WALK) {
            add_rows(call, buffer, head, first, left);
        } else if (thread == 0) {
            bulk_add_run(sums_of(call, head, first), buffer, SUM_BYTES);
        }
        if (thread == 0) bulk_commit();
    }
}

extern "C" __global__ void __launch_bounds__(512, 1)
wgmma_fused(const __grid_constant__ Call call, const __grid_constant__ TensorMap q_map,
            const __grid_constant__ TensorMap do_map, const __grid_constant__ TensorMap k_map,
            const __grid_constant__ TensorMap v_map, int section) {
    Barriers& bars = barriers();
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&bars.full[i], 33);
            barrier_init(&bars.empty[i], 12);
        }
        for (int i = 0; i < OWN_STAGES; i++) {
            barrier_init(&bars.own_full[i], 1);
            barrier_init(&bars.own_empty[i], 12);
        }
        for (int i = 0; i < DS_STAGES; i++) {
            barrier_init(&bars.ds_full[i][0], 4);
            barrier_init(&bars.ds_full[i][1], 4);
            barrier_init(&bars.ds_empty[i], 4);
        }
        barrier_init_done();
    }
    __syncthreads();
    const int part = __shfl_sync(ALL_LANES, threadIdx.x / 128, 0);
    Ring<STAGES> walk = {0, 0};
    Ring<OWN_STAGES> own = {0, 0};
    Ring<DS_STAGES> ring = {0, 0};
    if (part == 3) {
        registers_down<FEEDER_REGISTERS>();
        if (threadIdx.x / 32 == 12) feed(call, &q_map, &do_map, &k_map, &v_map, section);
    } else if (part == 2) {
        registers_down<DQ_REGISTERS>();
        for (int turn = 0;; own.next()) {
            barrier_wait(&bars.own_full[own.stage], own.phase);
            const Task& task = task_at(own.stage);
            if (task.first < 0) break;
            sum_queries(call, task, memory + own.stage * 2 * K_BYTES, walk, ring, turn);
            // Orders generic reads of the tile before TMA's writes.
            fence_async();
            let_go(&bars.own_empty[own.stage]);
        }
        if (threadIdx.x % 128 == 0) bulk_wait<0>();
    } else {
        registers_up<REGISTERS>();
        for (;; own.next()) {
            barrier_wait(&bars.own_full[own.stage], own.phase);
            const Task& task = task_at(own.stage);
            if (task.first < 0) break;
            own_keys(call, task, part, memory + own.stage * 2 * K_BYTES + part * 8192, walk, ring);
            fence_async();
            let_go(&bars.own_empty[own.stage]);
        }
    }
}
