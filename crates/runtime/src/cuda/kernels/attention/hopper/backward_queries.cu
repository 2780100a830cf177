// dq of attention on Hopper without sums in device memory: deterministic, and the only kernel for heads above 128.
//
//   s = q k^T, p = exp2(scale log2e s - log2e lse), ds = p (do v^T - delta), dq = scale ds k
//
// A thread block owns 64 queries per consumer warpgroup, of HEADS query heads of one key head side by side, and walks the keys
// they attend to in tiles of 64: 3 products per tile, ds from accumulator to A operand in registers. Keys are needed until ds k
// is done, values only until do v^T is, so each has a separate ring of pipeline stages. GROUPS consumer warpgroups and one
// producer warp. Registers: no spills, except with two intervals and heads above 240, which spill up to 48 bytes.
//
// Defines: SIZE, MASK, Q_RAGGED, K_RAGGED, GROUPS, HEADS (1 or GROUPS; divides the group of query heads), BLOCKS, STAGES and
// V_STAGES (pipeline stages of keys and values), OWN_STAGES, REGISTERS and FEEDER_REGISTERS.

#define OWN (64 * GROUPS / HEADS)
#define PANEL_OWN (64 * GROUPS * 128)
#define Q_BYTES (PANELS * PANEL_OWN)
#define K_BYTES (PANELS * PANEL_WALK)
#define AT_K (OWN_STAGES * 2 * Q_BYTES)
#define AT_V (AT_K + STAGES * K_BYTES)
#define AT_ROWS (AT_V + V_STAGES * K_BYTES)
#define AT_TASKS (AT_ROWS + OWN_STAGES * GROUPS * 2 * 64 * 4)
#define AT_FIRSTS (AT_TASKS + OWN_STAGES * 32)
#define AT_BARRIERS (AT_FIRSTS + 32)

extern __shared__ __align__(1024) u8 memory[];

struct Barriers {
    u64 k_full[STAGES], k_empty[STAGES], v_full[V_STAGES], v_empty[V_STAGES], own_full[OWN_STAGES],
        own_empty[OWN_STAGES];
};

__device__ __forceinline__ Barriers& barriers() { return *(Barriers*)(memory + AT_BARRIERS); }
__device__ __forceinline__ Task& task_at(int stage) { return *(Task*)(memory + AT_TASKS + stage * 32); }
// First key of a walked tile; negative: the walk is over. With MASK 3 also its flags, one part per 64 tokens.
__device__ __forceinline__ int& first_at(int stage) { return ((int*)(memory + AT_FIRSTS))[stage]; }
__device__ __forceinline__ int& flags_at(int stage) { return ((int*)(memory + AT_FIRSTS + 16))[stage]; }
__device__ __forceinline__ float* rows_at(int stage, int part) {
    return (float*)(memory + AT_ROWS) + (stage * GROUPS + part) * 2 * 64;
}

// The producer's loop, by one warp: takes tiles of queries, and for each walks the tiles of keys that any of them attends to.
__device__ __forceinline__ void feed(const Call& call, const TensorMap* q_map, const TensorMap* do_map,
                                     const TensorMap* k_map, const TensorMap* v_map, int section) {
    const int lane = threadIdx.x % 32;
    Barriers& bars = barriers();
    Ring<STAGES> walk = {0, 1};
    Ring<V_STAGES> values = {0, 1};
    Ring<OWN_STAGES> own = {0, 1};
    for (;; own.next()) {
        const Task task = next_task<OWN>(call, false, section);
        const Segment g = task.g;
        barrier_wait(&bars.own_empty[own.stage], own.phase);
        u64* own_full = &bars.own_full[own.stage];
        if (task.first >= 0)
#pragma unroll
            for (int i = 0; i < GROUPS; i++)
                copy_statistics<64>(rows_at(own.stage, i), call, HEADS * task.head + i % HEADS,
                                    task.first + i / HEADS * 64, g.q1);
        copies_arrive(own_full);
        __syncwarp();
        if (lane == 0) {
            task_at(own.stage) = task;
            if (task.first < 0) {
                barrier_arrive(own_full);
            } else {
                barrier_expect(own_full, 2 * Q_BYTES);
                u8* q = memory + own.stage * 2 * Q_BYTES;
#pragma unroll
                for (int p = 0; p < PANELS; p++)
#pragma unroll
                    for (int i = 0; i < GROUPS; i++) {
                        const int head = HEADS * task.head + i % HEADS, first = task.first + i / HEADS * 64;
                        u8* to = q + p * PANEL_OWN + i * 8192;
                        bulk_load(to, q_map, own_full, 64 * p, head, first);
                        bulk_load(to + Q_BYTES, do_map, own_full, 64 * p, head, first);
                    }
            }
        }
        if (task.first < 0) return;
        const int kv = HEADS * task.head / (call.heads / call.kv_heads);
#if MASK == 3
        int low = 0x7fffffff, high = 0;
        // The intervals of the lane's queries.
        Seen mine[OWN / 32];
#pragma unroll
        for (int i = 0; i < OWN / 32; i++) {
            const Seen s = mine[i] = sees(call, g, task.first + 32 * i + lane);
            if (s.a < s.b) {
                low = min(low, s.a);
                high = max(high, s.b);
            }
            if (s.c < s.d) {
                low = min(low, s.c);
                high = max(high, s.d);
            }
        }
        low = __reduce_min_sync(ALL_LANES, low);
        high = __reduce_max_sync(ALL_LANES, high);
#else
        const int low = sees(call, g, task.first).a, high = sees(call, g, min(task.first + OWN, g.q1) - 1).b;
#endif
        // Tiles are aligned to the segment's start.
        for (int first = g.k0 + max(low - g.k0, 0) / WALK * WALK; first < high; first += WALK) {
#if MASK == 3
            int flags = 0;
#pragma unroll
            for (int i = 0; i < OWN / 32; i++) {
                const Seen s = mine[i];
                const int end = first + WALK;
                const bool some = max(s.a, first) < min(s.b, end) || max(s.c, first) < min(s.d, end);
                // Queries past the segment's end have p = 0 through their statistics.
                const bool all = (s.a <= first && s.b >= end) || (s.c <= first && s.d >= end) ||
                                 task.first + 32 * i + lane >= g.q1;
                if (__any_sync(ALL_LANES, some)) flags |= MET(i / 2);
                if (!__all_sync(ALL_LANES, all)) flags |= MASKED(i / 2);
            }
            if (!(flags & ANY_MET)) continue;
#endif
            if (lane == 0) {
                u64 *k_full = &bars.k_full[walk.stage], *v_full = &bars.v_full[values.stage];
                barrier_wait(&bars.k_empty[walk.stage], walk.phase);
                first_at(walk.stage) = first;
#if MASK == 3
                flags_at(walk.stage) = flags;
#endif
                barrier_expect(k_full, K_BYTES);
                for (int p = 0; p < PANELS; p++)
                    bulk_load(memory + AT_K + walk.stage * K_BYTES + p * PANEL_WALK, k_map, k_full, 64 * p, kv, first);
                barrier_wait(&bars.v_empty[values.stage], values.phase);
                barrier_expect(v_full, K_BYTES);
                for (int p = 0; p < PANELS; p++)
                    bulk_load(memory + AT_V + values.stage * K_BYTES + p * PANEL_WALK, v_map, v_full, 64 * p, kv,
                              first);
            }
            walk.next();
            values.next();
        }
        if (lane == 0) {
            barrier_wait(&bars.k_empty[walk.stage], walk.phase);
            first_at(walk.stage) = -1;
            barrier_arrive(&bars.k_full[walk.stage]);
        }
        walk.next();
    }
}

// Processes a warpgroup's 64 queries of a tile.
__device__ __forceinline__ void queries_of_group(const Call& call, const Task& task, int part, u8* q_tile,
                                                 const float* rows, Ring<STAGES>& walk, Ring<V_STAGES>& values) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
    const int from = task.first + part / HEADS * 64;
    Barriers& bars = barriers();
    float shift[2], mean[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        shift[i] = rows[row + 8 * i];
        mean[i] = rows[64 + row + 8 * i];
    }
#if MASK != 3
    // All the warpgroup's queries attend to keys [bottom.a, top.b).
    const Seen top = sees(call, task.g, from), bottom = sees(call, task.g, min(from + 63, task.g.q1 - 1));
#endif
    u8* own = q_tile + part * 8192;
    const u64 q = along_k(own), d_o = along_k(own + Q_BYTES);
    float dq[SIZE / 2];
    u32 ds[WALK / 16][4] = {};
#pragma unroll
    for (int i = 0; i < SIZE / 2; i++) dq[i] = 0.0f;
    int before = -1;
    for (;;) {
        const int stage = walk.stage;
        barrier_wait(&bars.k_full[stage], walk.phase);
        walk.next();
        const int first = first_at(stage);
        if (first < 0) {
            release(&bars.k_empty[stage]);
            break;
        }
        u8 *keys = memory + AT_K + stage * K_BYTES, *value = memory + AT_V + values.stage * K_BYTES;
        // Rows past the last key may hold NaN, and 0 * NaN is NaN.
        if (first + WALK > task.g.k1) {
            clear_rows(keys, PANEL_WALK, task.g.k1 - first, WALK);
            fence_async();
            named_sync(2 + part, 128);
        }
#if MASK == 3
        const int flags = flags_at(stage);
        const bool met = flags & MET(part / HEADS), masked = flags & MASKED(part / HEADS);
#else
        const bool met = from < task.g.q1 && first < bottom.b && first + WALK > top.a;
        const bool masked = first < bottom.a || first + WALK > top.b;
#endif
        if (met) {
            float s[WALK / 2], dp[WALK / 2];
            product_arrive();
            product_of_heads(s, q, PANEL_OWN, along_k(keys));
            barrier_wait(&bars.v_full[values.stage], values.phase);
            product_arrive();
            product_of_heads(dp, d_o, PANEL_OWN, along_k(value));
            product_wait<2>();
            hold(dq);
            hold(ds);
            if (before >= 0) release(&bars.k_empty[before]);
            product_wait<1>();
            hold(s);
            if (masked) {
                const Seen seen[2] = {sees(call, task.g, from + row), sees(call, task.g, from + row + 8)};
#pragma unroll
                for (int j = 0; j < WALK / 8; j++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        if (!seen[e / 2].has(first + 8 * j + 2 * (lane % 4) + e % 2)) s[4 * j + e] = -infinity();
            }
#pragma unroll
            for (int j = 0; j < WALK / 2; j++)
                s[j] = exp2_fast(fmaf(s[j], call.scale * LOG2E, shift[j / 2 % 2]));
            // Done here, while the second product is in flight: the compiler would move it after the wait.
            hold(s);
            product_wait<0>();
            hold(dp);
            release(&bars.v_empty[values.stage]);
            // Values past the segment's end may be NaN.
#pragma unroll
            for (int j = 0; j < WALK / 2; j++) dp[j] = s[j] == 0.0f ? 0.0f : s[j] * (dp[j] + mean[j / 2 % 2]);
            pack(ds, dp);
            product_arrive();
            add_product(dq, ds, keys);
        } else {
            barrier_wait(&bars.v_full[values.stage], values.phase);
            release(&bars.v_empty[values.stage]);
            product_wait<0>();
            hold(dq);
            hold(ds);
            if (before >= 0) release(&bars.k_empty[before]);
        }
        before = stage;
        values.next();
    }
    product_wait<0>();
    hold(dq);
    hold(ds);
    if (before >= 0) release(&bars.k_empty[before]);
    named_sync(2 + part, 128);
    write(call.dq, HEADS * task.head + part % HEADS, from, task.g.q1, dq, call.scale, own, PANEL_OWN);
}

extern "C" __global__ void __launch_bounds__(128 * (GROUPS + 1), BLOCKS)
wgmma_dq(const __grid_constant__ Call call, const __grid_constant__ TensorMap q_map,
         const __grid_constant__ TensorMap do_map, const __grid_constant__ TensorMap k_map,
         const __grid_constant__ TensorMap v_map, int section) {
    Barriers& bars = barriers();
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&bars.k_full[i], 1);
            barrier_init(&bars.k_empty[i], 4 * GROUPS);
        }
        for (int i = 0; i < V_STAGES; i++) {
            barrier_init(&bars.v_full[i], 1);
            barrier_init(&bars.v_empty[i], 4 * GROUPS);
        }
        for (int i = 0; i < OWN_STAGES; i++) {
            barrier_init(&bars.own_full[i], 33);
            barrier_init(&bars.own_empty[i], 4 * GROUPS);
        }
        barrier_init_done();
    }
    __syncthreads();
    const int part = threadIdx.x / 128;
    if (part == GROUPS) {
        registers_down<FEEDER_REGISTERS>();
        if (threadIdx.x / 32 == 4 * GROUPS) feed(call, &q_map, &do_map, &k_map, &v_map, section);
        return;
    }
    registers_up<REGISTERS>();
    Ring<STAGES> walk = {0, 0};
    Ring<V_STAGES> values = {0, 0};
    Ring<OWN_STAGES> own = {0, 0};
    for (;; own.next()) {
        barrier_wait(&bars.own_full[own.stage], own.phase);
        const Task& task = task_at(own.stage);
        if (task.first < 0) return;
        queries_of_group(call, task, part, memory + own.stage * 2 * Q_BYTES, rows_at(own.stage, part), walk, values);
        // Orders generic reads and writes of the tile before TMA's.
        fence_async();
        release(&bars.own_empty[own.stage]);
    }
}
