// dk and dv of attention on Hopper: bf16, head sizes 16 to 256.
//
//   s^T = k q^T, p^T = exp2(scale log2e s^T - log2e lse), dp^T = v do^T, ds^T = p^T (dp^T - delta)
//   dv = p^T do, dk = scale ds^T q
//
// A thread block owns 64 keys of a key head per consumer warpgroup and walks the queries that attend to them, of all query
// heads of the group, in tiles of 64: dk and dv are accumulated in registers in a fixed order, so they are deterministic. Keys
// are the rows of the scores, so p^T and ds^T go from accumulator to A operand without leaving registers. 4 products per tile.
// Heads above 128: dk and dv of 64 keys each fill the registers of a warpgroup, so one warpgroup computes p and dv and the
// other ds and dk; p goes from one to the other in f32 through shared memory.
// GROUPS consumer warpgroups and one producer warp. Registers: no spills. Reads 256 SIZE bytes from L2 per tile of 64 queries.
//
// Defines: SIZE, MASK, Q_RAGGED, K_RAGGED, GROUPS, BLOCKS (blocks per multiprocessor), STAGES and OWN_STAGES (pipeline stages
// of walked and owned tiles), REGISTERS and FEEDER_REGISTERS (per thread, after redistribution).

#define PAIR (SIZE > 128)
// Whether dp starts when p is packed, and ds uses p as packed; otherwise the accumulators do not fit in registers, and products
// are serialised. 16 heads on 8 of 128, 16 x 2048, causal: 0.96 ms instead of 1.22; dk's error 3.0e-3 instead of 2.5e-3.
#define LATE (SIZE > 112 && !PAIR)
// Whether dv is waited for before ds is computed: register pressure leaves no room for both.
#define LEAN (SIZE > 64 && !PAIR && !LATE)
#define OWN (PAIR ? 64 : 64 * GROUPS)
#define PANEL_OWN (OWN * 128)
#define Q_BYTES (PANELS * PANEL_WALK)
#define K_BYTES (PANELS * PANEL_OWN)
#define P_BYTES (64 * WALK * 4)
#define P_STAGES (MASK == 3 ? 1 : 2)
#define AT_STAGES (OWN_STAGES * 2 * K_BYTES)
#define AT_P (AT_STAGES + STAGES * 2 * Q_BYTES)
#define AT_ROWS (AT_P + (PAIR ? P_STAGES * P_BYTES : 0))
#define AT_SEEN (AT_ROWS + STAGES * 2 * WALK * 4)
#define AT_NOTES (AT_SEEN + (MASK == 3 ? STAGES * WALK * 16 : 0))
#define AT_TASKS (AT_NOTES + STAGES * 16)
#define AT_BARRIERS (AT_TASKS + OWN_STAGES * 32)

extern __shared__ __align__(1024) u8 memory[];

// Descriptor of a walked tile: its first query (negative: the walk is over), its query head, and with MASK 3 its flags.
struct Note {
    int first, head, flags;
};

struct Barriers {
    u64 full[STAGES], empty[STAGES], own_full[OWN_STAGES], own_empty[OWN_STAGES], p_full[2], p_empty[2];
};

__device__ __forceinline__ Barriers& barriers() { return *(Barriers*)(memory + AT_BARRIERS); }
__device__ __forceinline__ Note& note_at(int stage) { return *(Note*)(memory + AT_NOTES + stage * 16); }
__device__ __forceinline__ Task& task_at(int stage) { return *(Task*)(memory + AT_TASKS + stage * 32); }
__device__ __forceinline__ u8* queries_at(int stage) { return memory + AT_STAGES + stage * 2 * Q_BYTES; }
__device__ __forceinline__ int4* seen_at(int stage) { return (int4*)(memory + AT_SEEN) + stage * WALK; }
__device__ __forceinline__ float* rows_at(int stage) { return (float*)(memory + AT_ROWS) + stage * 2 * WALK; }

// Whether the walked tile attends to any of a warpgroup's keys from `from`; `masks` tells whether any pair is masked.
__device__ __forceinline__ bool meets(const Call& call, const Task& task, int part, int from, int stage) {
#if MASK == 3
    return note_at(stage).flags & MET(part);
#else
    return is_met(call, task.g, from, note_at(stage).first);
#endif
}
__device__ __forceinline__ bool masks(const Call& call, const Task& task, int part, int from, int stage) {
#if MASK == 3
    return note_at(stage).flags & MASKED(part);
#else
    return is_masked(call, task.g, from, note_at(stage).first);
#endif
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
#pragma unroll
                for (int p = 0; p < PANELS; p++)
#pragma unroll
                    for (int r = 0; r < OWN; r += 64) {
                        u8* to = k + p * PANEL_OWN + r * 128;
                        bulk_load(to, k_map, own_full, 64 * p, task.head, task.first + r);
                        bulk_load(to + K_BYTES, v_map, own_full, 64 * p, task.head, task.first + r);
                    }
            }
        }
        if (task.first < 0) return;
        const Segment g = task.g;
        const int group = call.heads / call.kv_heads;
        const Range walked = walked_by(call, g, task.first, OWN);
        for (int head = task.head * group; head < (task.head + 1) * group; head++) {
            // Tiles are aligned to the segment's start.
            int flags = 0;
#if MASK == 3
            int mine = 0;
#endif
            for (int first = g.q0 + (walked.low - g.q0) / WALK * WALK; first < walked.high; first += WALK) {
#if MASK == 3
                // Each lane computes the flags of one of the next 32 tiles.
                const int turn = (first - g.q0) / WALK % 32;
                if (turn == 0 && first > g.q0) mine = flags_of<OWN / 64>(call, g, task.first, first + lane * WALK);
                else if (turn == 0) mine = ahead;
                flags = __shfl_sync(ALL_LANES, mine, turn);
                if (!(flags & ANY_MET)) continue;
#endif
                u64* full = &bars.full[walk.stage];
                barrier_wait(&bars.empty[walk.stage], walk.phase);
#if MASK == 3
                if (flags & ANY_MASKED) copy_intervals(seen_at(walk.stage), call, first, g.q1);
#endif
                copy_statistics<WALK>(rows_at(walk.stage), call, head, first, g.q1);
                copies_arrive(full);
                __syncwarp();
                if (lane == 0) {
                    note_at(walk.stage) = {first, head, flags};
                    barrier_expect(full, 2 * Q_BYTES);
                    u8* to = queries_at(walk.stage);
                    for (int p = 0; p < PANELS; p++)
                        bulk_load(to + p * PANEL_WALK, q_map, full, 64 * p, head, first);
                    for (int p = 0; p < PANELS; p++)
                        bulk_load(to + Q_BYTES + p * PANEL_WALK, do_map, full, 64 * p, head, first);
                }
                walk.next();
            }
        }
        barrier_wait(&bars.empty[walk.stage], walk.phase);
        copies_arrive(&bars.full[walk.stage]);
        if (lane == 0) {
            note_at(walk.stage) = {-1, 0, 0};
            barrier_arrive(&bars.full[walk.stage]);
        }
        walk.next();
    }
}

// Zeroes rows past the last query: they may hold NaN, and 0 * NaN is NaN. Done by a warpgroup; the other may do the same.
__device__ __forceinline__ void clear_tail(int stage, int from, int barrier) {
    clear_rows(queries_at(stage), PANEL_WALK, from, WALK);
    clear_rows(queries_at(stage) + Q_BYTES, PANEL_WALK, from, WALK);
    fence_async();
    named_sync(barrier, 128);
}

// Turns s into p, for the warpgroup's keys from `from`.
__device__ __forceinline__ void weigh(float (&s)[WALK / 2], const Call& call, const Task& task, int from, int stage,
                                      bool masked) {
    if (masked) mask_scores(s, call, task.g, from, note_at(stage).first, seen_at(stage));
    const float* rows = rows_at(stage) + threadIdx.x % 4 * 2;
    const float unit = call.scale * LOG2E;
#pragma unroll
    for (int j = 0; j < WALK / 8; j++) {
        const float2 shift = *(const float2*)(rows + 8 * j);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            s[4 * j + 2 * i] = exp2_fast(fmaf(s[4 * j + 2 * i], unit, shift.x));
            s[4 * j + 2 * i + 1] = exp2_fast(fmaf(s[4 * j + 2 * i + 1], unit, shift.y));
        }
    }
}

// Unpacks a word of an operand to f32.
__device__ __forceinline__ float2 unpacked(u32 pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

// Turns four elements of dp into ds: a key and the key 8 further, each at two queries.
__device__ __forceinline__ void slope(float (&dp)[WALK / 2], int j, const float4& p, const float* rows) {
    const float2 shift = *(const float2*)(rows + WALK + 2 * (threadIdx.x % 4) + 8 * j);
    dp[4 * j] = p.x * (dp[4 * j] + shift.x);
    dp[4 * j + 1] = p.y * (dp[4 * j + 1] + shift.y);
    dp[4 * j + 2] = p.z * (dp[4 * j + 2] + shift.x);
    dp[4 * j + 3] = p.w * (dp[4 * j + 3] + shift.y);
}

#if !PAIR

// Processes a warpgroup's 64 keys of a tile. Task and tile descriptors stay in shared memory, because registers are full.
__device__ __forceinline__ void keys_of_group(const Call& call, const Task& task, int part, u8* k_tile,
                                              Ring<STAGES>& walk, int& turn) {
    u8* own = k_tile + part * 8192;
    const u64 k = along_k(own), v = along_k(own + K_BYTES);
    Barriers& bars = barriers();
    float dk[SIZE / 2], dv[SIZE / 2];
    u32 p[WALK / 16][4] = {}, ds[WALK / 16][4] = {};
#pragma unroll
    for (int i = 0; i < SIZE / 2; i++) dk[i] = dv[i] = 0.0f;
    int before = -1;
    for (;; turn++) {
        const int stage = walk.stage;
        barrier_wait(&bars.full[stage], walk.phase);
        walk.next();
        const int first = note_at(stage).first, from = task.first + 64 * part;
        if (first < 0) {
            release(&bars.empty[stage]);
            break;
        }
        if (first + WALK > task.g.q1) clear_tail(stage, task.g.q1 - first, 2 + part);
        u8* queries = queries_at(stage);
        if (meets(call, task, part, from, stage)) {
            // Declared here, so that the accumulator, which a product overwrites, is not live before.
            float s[WALK / 2], dp[WALK / 2];
            product_arrive();
            product_of_heads(s, k, PANEL_OWN, along_k(queries));
            if (!LATE) product_of_heads(dp, v, PANEL_OWN, along_k(queries + Q_BYTES));
            product_wait<LATE ? 1 : 2>();
            hold(dk);
            hold(dv);
            if (!LEAN) hold(p);
            hold(ds);
            if (before >= 0) release(&bars.empty[before]);
            product_wait<LATE ? 0 : 1>();
            hold(s);
            weigh(s, call, task, from, stage, masks(call, task, part, from, stage));
            pack(p, s);
            product_arrive();
            if (LATE) product_of_heads(dp, v, PANEL_OWN, along_k(queries + Q_BYTES));
            add_product(dv, p, queries + Q_BYTES);
            product_wait<LEAN ? 0 : 1>();
            hold(dp);
            if (LEAN) {
                hold(dv);
                hold(p);
            }
#pragma unroll
            for (int j = 0; j < WALK / 8; j++) {
                const float2 low = LATE ? unpacked(p[j / 2][j % 2 * 2]) : make_float2(s[4 * j], s[4 * j + 1]);
                const float2 high = LATE ? unpacked(p[j / 2][j % 2 * 2 + 1]) : make_float2(s[4 * j + 2], s[4 * j + 3]);
                slope(dp, j, make_float4(low.x, low.y, high.x, high.y), rows_at(stage));
            }
            pack(ds, dp);
            product_arrive();
            add_product(dk, ds, queries);
        } else {
            product_wait<0>();
            hold(dk);
            hold(dv);
            hold(p);
            hold(ds);
            if (before >= 0) release(&bars.empty[before]);
        }
        before = stage;
    }
    product_wait<0>();
    hold(dk);
    hold(dv);
    hold(p);
    hold(ds);
    if (before >= 0) release(&bars.empty[before]);
    // These keys and values are no longer read.
    named_sync(2 + part, 128);
    const int from = task.first + 64 * part;
    if (call.dk.at) write(call.dk, task.head, from, task.g.k1, dk, call.scale, own, PANEL_OWN);
    if (call.dv.at) write(call.dv, task.head, from, task.g.k1, dv, 1.0f, own + K_BYTES, PANEL_OWN);
}

#else

// Processes 64 keys with two warpgroups: 0 computes p and dv, 1 computes ds and dk.
__device__ __forceinline__ void keys_of_group(const Call& call, const Task& task, int part, u8* k_tile,
                                              Ring<STAGES>& walk, int& turn) {
    const u64 own = along_k(k_tile + part * K_BYTES);
    Barriers& bars = barriers();
    float sum[SIZE / 2];
    u32 a[WALK / 16][4] = {};
#pragma unroll
    for (int i = 0; i < SIZE / 2; i++) sum[i] = 0.0f;
    int before = -1;
    for (;; turn++) {
        const int stage = walk.stage;
        barrier_wait(&bars.full[stage], walk.phase);
        walk.next();
        const int first = note_at(stage).first, from = task.first;
        if (first < 0) {
            release(&bars.empty[stage]);
            break;
        }
        if (first + WALK > task.g.q1) clear_tail(stage, task.g.q1 - first, 2 + part);
        u8* queries = queries_at(stage);
        float x[WALK / 2];
        product_arrive();
        product_of_heads(x, own, PANEL_OWN, along_k(queries + part * Q_BYTES));
        product_wait<1>();
        hold(sum);
        hold(a);
        if (before >= 0) release(&bars.empty[before]);
        before = stage;
        product_wait<0>();
        hold(x);
        const int p_stage = turn % P_STAGES, p_phase = turn / P_STAGES % 2;
        float4* p = (float4*)(memory + AT_P + p_stage * P_BYTES) + threadIdx.x % 128;
        if (part == 0) {
            weigh(x, call, task, from, stage, masks(call, task, 0, from, stage));
            barrier_wait(&bars.p_empty[p_stage], p_phase ^ 1);
#pragma unroll
            for (int j = 0; j < WALK / 8; j++)
                p[j * 128] = make_float4(x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3]);
            release(&bars.p_full[p_stage]);
        } else {
            barrier_wait(&bars.p_full[p_stage], p_phase);
#pragma unroll
            for (int j = 0; j < WALK / 8; j++) slope(x, j, p[j * 128], rows_at(stage));
            release(&bars.p_empty[p_stage]);
        }
        pack(a, x);
        product_arrive();
        add_product(sum, a, queries + (1 - part) * Q_BYTES);
    }
    product_wait<0>();
    hold(sum);
    hold(a);
    if (before >= 0) release(&bars.empty[before]);
    named_sync(2 + part, 128);
    const Rows to = part ? call.dk : call.dv;
    const float factor = part ? call.scale : 1.0f;
    if (to.at) write(to, task.head, task.first, task.g.k1, sum, factor, k_tile + part * K_BYTES, PANEL_OWN);
}

#endif

extern "C" __global__ void __launch_bounds__(128 * (GROUPS + 1), BLOCKS)
wgmma_dkv(const __grid_constant__ Call call, const __grid_constant__ TensorMap q_map,
          const __grid_constant__ TensorMap do_map, const __grid_constant__ TensorMap k_map,
          const __grid_constant__ TensorMap v_map, int section) {
    Barriers& bars = barriers();
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&bars.full[i], 33);
            barrier_init(&bars.empty[i], 4 * GROUPS);
        }
        for (int i = 0; i < OWN_STAGES; i++) {
            barrier_init(&bars.own_full[i], 1);
            barrier_init(&bars.own_empty[i], 4 * GROUPS);
        }
        for (int i = 0; i < 2; i++) {
            barrier_init(&bars.p_full[i], 4);
            barrier_init(&bars.p_empty[i], 4);
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
    Ring<OWN_STAGES> own = {0, 0};
    for (int turn = 0;; own.next()) {
        barrier_wait(&bars.own_full[own.stage], own.phase);
        const Task& task = task_at(own.stage);
        if (task.first < 0) return;
        u8* k_tile = memory + own.stage * 2 * K_BYTES;
        const int behind = task.g.k1 - task.first;
        if (behind < OWN) {
            // Each warpgroup clears its own 64 rows; a pair shares them, and both clear the same ones.
            const int from = PAIR ? behind : max(behind - 64 * part, 0);
            u8* rows = k_tile + (PAIR ? 0 : part * 8192);
            if (from < 64) {
                clear_rows(rows, PANEL_OWN, from, 64);
                clear_rows(rows + K_BYTES, PANEL_OWN, from, 64);
                fence_async();
            }
            named_sync(1, 128 * GROUPS);
        }
        keys_of_group(call, task, part, k_tile, walk, turn);
        // Orders generic reads and writes of the tile before TMA's.
        fence_async();
        release(&bars.own_empty[own.stage]);
    }
}
