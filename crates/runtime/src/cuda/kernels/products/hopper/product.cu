// d [M, N] = a [M, K] b [K, N] in bf16 on Hopper, with an epilogue of ../call.cuh.
//
// Persistent: a thread block loops over tiles of d. A producer warp fills pipeline stages of a and b by TMA loads; two consumer
// warpgroups multiply. With PINGPONG each has its own tile, [64 MI, TN], and one's epilogue overlaps the other's products;
// otherwise both share a tile of [128 MI, TN]. The CLUSTER blocks of a cluster take vertically adjacent tiles, and each
// multicasts its part of b to all of them.
//
// Results are staged in shared memory and leave by TMA stores, which clip at the matrix. The inputs of gradients arrive by TMA
// loads, two panels ahead: a dedicated warp per warpgroup issues these loads and the stores of results. Sums have one order:
// the same bits every time, whatever the grid.

#define GROUPS 2
#define TM (PINGPONG ? 64 * MI : 64 * MI * GROUPS)
// Columns of d per tile.
#define WIDTH (EPILOGUE == GATED ? TN / 2 : TN)
#define PANEL_BYTES 8192
#define A_BYTES (TM * 128)
#define B_BYTES (TN * 128)
#define STAGE_BYTES (A_BYTES + B_BYTES)
#define THREADS (128 * (GROUPS + 1))
// Sets of panels that a gradient's epilogue has in flight: its inputs, which the results overwrite, and the value.
#define SETS 2
#define SET_PANELS (SIDES + 1)
// Panels of results per warpgroup in shared memory.
#define OUT_PANELS (HAS_SIDES ? SETS * SET_PANELS : PINGPONG ? 6 : 2)
#define BARRIER_BYTES 1024
// Panels [64, 64] of a warpgroup's tile.
#define STEPS (MI * TN / 64)

extern __shared__ __align__(1024) u8 memory[];

struct Barriers {
    u64 full[STAGES], empty[STAGES], loaded[GROUPS][SETS], made[GROUPS][SETS];
};

struct Place {
    int stage;
    u32 parity;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
    __device__ __forceinline__ void skip(int count) {
        const int to = stage + count;
        parity ^= (u32)(to / STAGES) & 1;
        stage = to % STAGES;
    }
};

__device__ __forceinline__ Tile tile_of(const Shape& s, int index, u32 rank) {
    const Position at = position_of(s, index);
    return {(at.row * CLUSTER + (int)rank) * TM, at.column * WIDTH, at.batch};
}
__device__ __forceinline__ int first_tile() { return (int)blockIdx.x / CLUSTER; }
__device__ __forceinline__ int next_tiles() { return (int)gridDim.x / CLUSTER; }

// A TMA load into shared memory, multicast to the same address in all blocks of the cluster.
__device__ __forceinline__ void load_shared(void* to, const TensorMap* map, u64* full, int c0, int c1, int c2) {
    if (CLUSTER > 1)
        bulk_load_all(to, map, full, c0, c1, c2, (1 << CLUSTER) - 1);
    else
        bulk_load(to, map, full, c0, c1, c2);
}

__device__ __forceinline__ void produce(const Shape& s, const TensorMap* a, const TensorMap* b, const TensorMap* b2,
                                        Barriers* bar, u32 rank) {
    Place at = {0, 1};
    for (int index = first_tile(); index < s.total; index += next_tiles()) {
        const Tile t = tile_of(s, index, rank);
#pragma unroll 1
        for (int block = 0; block < s.blocks; block++) {
            u8 *to_a = memory + at.stage * STAGE_BYTES, *to_b = to_a + A_BYTES;
            u64* full = &bar->full[at.stage];
            const int k = block * 64;
            barrier_wait(&bar->empty[at.stage], at.parity);
            barrier_expect(full, STAGE_BYTES);
#if A_MN
#pragma unroll
            for (int p = 0; p < TM / 64; p++) bulk_load(to_a + p * PANEL_BYTES, a, full, t.row + 64 * p, k, t.batch);
#else
            bulk_load(to_a, a, full, k, t.row, t.batch);
#endif
#if B_MN
#pragma unroll
            for (int i = 0; i < TN / 64 / CLUSTER; i++) {
                const int p = (int)rank * (TN / 64 / CLUSTER) + i;
                load_shared(to_b + p * PANEL_BYTES, b, full, t.column + 64 * p, k, t.batch);
            }
#elif EPILOGUE == GATED && CLUSTER > 1
            load_shared(to_b + rank * (B_BYTES / 2), rank ? b2 : b, full, k, t.column, t.batch);
#elif EPILOGUE == GATED
            bulk_load(to_b, b, full, k, t.column, t.batch);
            bulk_load(to_b + B_BYTES / 2, b2, full, k, t.column, t.batch);
#else
            load_shared(to_b + rank * (B_BYTES / CLUSTER), b, full, k, t.column + (int)rank * (TN / CLUSTER), t.batch);
#endif
            at.next();
        }
    }
}

// A panel [64, 64] of a warpgroup, 16 rows per warp: the lanes' addresses of the four matrices of columns [16 n, 16 n + 16).
__device__ __forceinline__ u32 matrices_at(const u8* panel, int n) {
    const int lane = threadIdx.x % 32, row = (int)threadIdx.x % 128 / 32 * 16 + lane % 16, piece = 2 * n + lane / 16;
    return shared_address(panel) + row * 128 + (piece ^ (row % 8)) * 16;
}

#if HAS_SIDES

// Sums of a panel's columns over the rows of each warp of a warpgroup.
struct Sums {
    float of_warp[4][64];
};
__device__ __forceinline__ Sums* sums_of(int group, int set) {
    u8* first = memory + STAGES * STAGE_BYTES + GROUPS * OUT_PANELS * PANEL_BYTES + BARRIER_BYTES;
    return (Sums*)first + group * SETS + set;
}

// Stores the panels that a warpgroup has computed and loads those it reads next: one warp, of which one lane issues the copies.
__device__ __forceinline__ void move_panels(const Shape& s, const TensorMap* side, const TensorMap* side2, const TensorMap* out,
                                            const TensorMap* out2, const TensorMap* out3, float* partial, Barriers* bar,
                                            u32 rank, int group) {
    u8* own = memory + STAGES * STAGE_BYTES + group * OUT_PANELS * PANEL_BYTES;
    const int lane = threadIdx.x % 32;
    const int first = first_tile() + group * next_tiles();
    // The tile and step to load next.
    int ahead = first, ahead_step = 0, ahead_set = 0;
    Tile to = {0, 0, 0};
    auto load = [&] {
        if (ahead >= s.total) return;
        if (ahead_step == 0) to = tile_of(s, ahead, rank);
        const int column = to.column + ahead_step % (TN / 64) * 64, row = to.row + ahead_step / (TN / 64) * 64;
        u64* loaded = &bar->loaded[group][ahead_set];
        u8* set = own + ahead_set * SET_PANELS * PANEL_BYTES;
        barrier_expect(loaded, SIDES * PANEL_BYTES);
        bulk_load(set, side, loaded, column, row, to.batch);
        if (SIDES == 2) bulk_load(set + PANEL_BYTES, side2, loaded, column, row, to.batch);
        ahead_set = ahead_set + 1 == SETS ? 0 : ahead_set + 1;
        if (++ahead_step == STEPS) {
            ahead_step = 0;
            ahead += 2 * next_tiles();
        }
    };
    if (lane == 0)
        for (int i = 0; i < SETS; i++) load();
    int at = 0;
    u32 parity = 0;
    for (int index = first; index < s.total; index += 2 * next_tiles()) {
        const Tile t = tile_of(s, index, rank);
        for (int step = 0; step < STEPS; step++) {
            const int column = t.column + step % (TN / 64) * 64, row = t.row + step / (TN / 64) * 64;
            const u8* set = own + at * SET_PANELS * PANEL_BYTES;
            barrier_wait(&bar->made[group][at], parity);
#if SUM
            const Sums* sums = sums_of(group, at);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int c = 32 * half + lane;
                const float sum = (sums->of_warp[0][c] + sums->of_warp[1][c]) + (sums->of_warp[2][c] + sums->of_warp[3][c]);
                if (row < s.m && column + c < s.n) partial[(i64)(row / 64) * s.n + column + c] = sum;
            }
#endif
            __syncwarp();
            if (lane == 0) {
                bulk_store(out, set, column, row, t.batch);
                if (SIDES == 2) bulk_store(out2, set + PANEL_BYTES, column, row, t.batch);
                if (KEEP) bulk_store(out3, set + SIDES * PANEL_BYTES, column, row, t.batch);
                bulk_commit();
                bulk_wait_read<0>();
                load();
            }
            if (++at == SETS) {
                at = 0;
                parity ^= 1;
            }
        }
    }
    if (lane == 0) bulk_wait<0>();
}

#endif

#if EPILOGUE == ACTIVATED_GRAD && SUM

// Adds 16 values of every lane over the lanes that differ in bits 2 to 4: lane l ends up with the sums of values 2 q and 2 q +
// 1, where q is those bits, highest first.
__device__ __forceinline__ float2 rows_sum(float (&x)[16]) {
    halve<16, 8>(x);
    halve<8, 4>(x);
    halve<4, 2>(x);
    return make_float2(x[0], x[1]);
}

#endif

// Panels that are stored together.
#define TOGETHER (EPILOGUE == ACTIVATED && KEEP ? 2 : 1)

// A warpgroup's ring of panels for results.
struct Ring {
    u8* panels;
    int next, group;
    bool leads;
    // The next panel, once its previous store has read it.
    __device__ __forceinline__ u8* take() {
        u8* panel = panels + next * TOGETHER * PANEL_BYTES;
        next = next + 1 == OUT_PANELS / TOGETHER ? 0 : next + 1;
        if (leads) bulk_wait_read<OUT_PANELS / TOGETHER - 1>();
        named_sync(1 + group, 128);
        return panel;
    }
    __device__ __forceinline__ void send(const TensorMap* to, const u8* panel, int column, int row, int batch) {
        fence_async();
        named_sync(1 + group, 128);
        if (leads) {
            bulk_store(to, panel, column, row, batch);
            bulk_commit();
        }
    }
    __device__ __forceinline__ void send_both(const TensorMap* to, const TensorMap* to2, const u8* panel, int column, int row,
                                              int batch) {
        fence_async();
        named_sync(1 + group, 128);
        if (leads) {
            bulk_store(to, panel, column, row, batch);
            bulk_store(to2, panel + PANEL_BYTES, column, row, batch);
            bulk_commit();
        }
    }
};

__device__ __forceinline__ void consume(const Shape& s, const TensorMap* out, const TensorMap* out2, const TensorMap* out3,
                                        [[maybe_unused]] const T_BIAS* bias, Barriers* bar, u32 rank, int group) {
    const int lane = threadIdx.x % 32;
    const bool leads = threadIdx.x % 128 == 0;
    u8* own = memory + STAGES * STAGE_BYTES + group * OUT_PANELS * PANEL_BYTES;
    [[maybe_unused]] Ring ring = {own, 0, group, leads};
    [[maybe_unused]] int set = 0;
    [[maybe_unused]] u32 set_parity = 0;
    Place at = {0, 0};
    float sum[MI][TN / 2];
    int turn = 0;
#if PINGPONG
    if (group == 1) named_arrive(4, 256);
#endif
    for (int index = first_tile(); index < s.total; index += next_tiles(), turn ^= 1) {
#if PINGPONG
        if (turn != group) {
            at.skip(s.blocks);
            continue;
        }
        // Parities only distinguish adjacent phases: a warpgroup may look at stages only once the other has consumed its own.
        named_sync(4 + group, 256);
#endif
        int last = 0;
#pragma unroll 1
        for (int block = 0; block < s.blocks; block++) {
            barrier_wait(&bar->full[at.stage], at.parity);
            const u8* stage = memory + at.stage * STAGE_BYTES;
            const u8* rows = stage + (PINGPONG ? 0 : group * MI * PANEL_BYTES);
            const u64 a = A_MN ? along_mn(rows, PANEL_BYTES) : along_k(rows);
            const u64 b = B_MN ? along_mn(stage + A_BYTES, PANEL_BYTES) : along_k(stage + A_BYTES);
            product_arrive();
#pragma unroll
            for (int e = 0; e < 4; e++)
#pragma unroll
                for (int i = 0; i < MI; i++)
                    Product<TN>::template of_shared<A_MN, B_MN>(sum[i], a + (i * PANEL_BYTES + e * (A_MN ? 2048 : 32)) / 16,
                                                                b + e * (B_MN ? 2048 : 32) / 16, block + e > 0);
            product_commit();
            product_wait<1>();
            // The previous stage has been read.
            if (block > 0 && lane < CLUSTER) barrier_arrive_at(&bar->empty[last], lane);
            last = at.stage;
            at.next();
        }
#if PINGPONG
        named_arrive(5 - group, 256);
#endif
        product_wait<0>();
        if (lane < CLUSTER) barrier_arrive_at(&bar->empty[last], lane);
#pragma unroll
        for (int i = 0; i < MI; i++) hold(sum[i]);

#if !HAS_SIDES
        const Tile t = tile_of(s, index, rank);
        const int row = PINGPONG ? t.row : t.row + group * 64 * MI;
#endif
#if EPILOGUE == PLAIN
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const int i = step / (TN / 64), c = step % (TN / 64);
            u8* panel = ring.take();
#pragma unroll
            for (int n = 0; n < 4; n++) {
                u32 y[4];
#pragma unroll
                for (int j = 0; j < 4; j++)
                    y[j] = bf16x2(sum[i][32 * c + 8 * n + 2 * j], sum[i][32 * c + 8 * n + 2 * j + 1]);
                stmatrix(matrices_at(panel, n), y);
            }
            ring.send(out, panel, t.column + 64 * c, row + 64 * i, t.batch);
        }
#elif EPILOGUE == GATED
#pragma unroll
        for (int step = 0; step < STEPS / 2; step++) {
            const int i = step / (TN / 128), c = step % (TN / 128), column = t.column + 64 * c;
            u32 y[4][4];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                u8* panel = KEEP ? ring.take() : nullptr;
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    u32 x[4];
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        const int e = 32 * c + 8 * n + 2 * j;
                        x[j] = bf16x2(sum[i][half * TN / 4 + e], sum[i][half * TN / 4 + e + 1]);
                        if (half) y[n][j] = gated(bf16x2(sum[i][e], sum[i][e + 1]), x[j]);
                    }
                    if (KEEP) stmatrix(matrices_at(panel, n), x);
                }
                if (KEEP) ring.send(half ? out2 : out, panel, column, row + 64 * i, t.batch);
            }
            u8* panel = ring.take();
#pragma unroll
            for (int n = 0; n < 4; n++) stmatrix(matrices_at(panel, n), y[n]);
            ring.send(out3, panel, column, row + 64 * i, t.batch);
        }
#elif EPILOGUE == GATED_GRAD
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const int i = step / (TN / 64), c = step % (TN / 64);
            u8 *gate = own + set * SET_PANELS * PANEL_BYTES, *up = gate + PANEL_BYTES, *value = up + PANEL_BYTES;
            u64* made = &bar->made[group][set];
            barrier_wait(&bar->loaded[group][set], set_parity);
            if (++set == SETS) {
                set = 0;
                set_parity ^= 1;
            }
#pragma unroll
            for (int n = 0; n < 4; n++) {
                u32 g[4], u[4], y[4];
                ldmatrix(g, matrices_at(gate, n));
                ldmatrix(u, matrices_at(up, n));
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const int e = 32 * c + 8 * n + 2 * j;
                    y[j] = gated_grad(sum[i][e], sum[i][e + 1], g[j], u[j]);
                }
                stmatrix(matrices_at(gate, n), g);
                stmatrix(matrices_at(up, n), u);
                if (KEEP) stmatrix(matrices_at(value, n), y);
            }
            fence_async();
            __syncwarp();
            if (lane == 0) barrier_arrive(made);
        }
#elif EPILOGUE == ACTIVATED
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const int i = step / (TN / 64), c = step % (TN / 64), column = t.column + 64 * c;
            u8 *panel = ring.take(), *value = KEEP ? panel + PANEL_BYTES : panel;
#pragma unroll
            for (int n = 0; n < 4; n++) {
                u32 h[4], y[4];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const int e = 32 * c + 8 * n + 2 * j;
#if HAS_BIAS
                    const int first = column + 16 * n + j / 2 * 8 + 2 * (lane % 4);
                    const float2 added = first < s.n ? pair_of(bias + first) : make_float2(0.0f, 0.0f);
                    h[j] = bf16x2(sum[i][e] + added.x, sum[i][e + 1] + added.y);
#else
                    h[j] = bf16x2(sum[i][e], sum[i][e + 1]);
#endif
                    y[j] = activated(h[j]);
                }
                if (KEEP) stmatrix(matrices_at(panel, n), h);
                stmatrix(matrices_at(value, n), y);
            }
            if (KEEP)
                ring.send_both(out, out3, panel, column, row + 64 * i, t.batch);
            else
                ring.send(out3, panel, column, row + 64 * i, t.batch);
        }
#elif EPILOGUE == ACTIVATED_GRAD
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const int i = step / (TN / 64), c = step % (TN / 64);
            u8 *from = own + set * SET_PANELS * PANEL_BYTES, *value = from + PANEL_BYTES;
            u64* made = &bar->made[group][set];
            barrier_wait(&bar->loaded[group][set], set_parity);
#if SUM
            float columns[16];
            Sums* sums = sums_of(group, set);
#endif
            if (++set == SETS) {
                set = 0;
                set_parity ^= 1;
            }
#pragma unroll
            for (int n = 0; n < 4; n++) {
                u32 h[4], y[4];
                ldmatrix(h, matrices_at(from, n));
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const int e = 32 * c + 8 * n + 2 * j;
                    y[j] = activated_grad(sum[i][e], sum[i][e + 1], h[j]);
                }
#if SUM
#pragma unroll
                for (int j = 0; j < 4; j += 2) {
                    columns[4 * n + j] = low(h[j]) + low(h[j + 1]);
                    columns[4 * n + j + 1] = high(h[j]) + high(h[j + 1]);
                }
#endif
                stmatrix(matrices_at(from, n), h);
                if (KEEP) stmatrix(matrices_at(value, n), y);
            }
#if SUM
            const int octet = lane / 16 * 4 + lane / 8 % 2 * 2 + lane / 4 % 2;
            *(float2*)&sums->of_warp[threadIdx.x % 128 / 32][8 * octet + 2 * (lane % 4)] = rows_sum(columns);
#endif
            fence_async();
            __syncwarp();
            if (lane == 0) barrier_arrive(made);
        }
#endif
    }
    if (leads) bulk_wait<0>();
}

#if CLUSTER > 1
#define OF_CLUSTER __cluster_dims__(CLUSTER, 1, 1)
#else
#define OF_CLUSTER
#endif

extern "C" __global__ void OF_CLUSTER __launch_bounds__(THREADS, 1)
product(const __grid_constant__ Shape shape, const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
        const __grid_constant__ TensorMap b2, const __grid_constant__ TensorMap out, const __grid_constant__ TensorMap out2,
        const __grid_constant__ TensorMap out3, const __grid_constant__ TensorMap side,
        const __grid_constant__ TensorMap side2, const T_BIAS* bias, float* partial) {
    Barriers* bar = (Barriers*)(memory + STAGES * STAGE_BYTES + GROUPS * OUT_PANELS * PANEL_BYTES);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&bar->full[i], 1);
            barrier_init(&bar->empty[i], 4 * (PINGPONG ? 1 : GROUPS) * CLUSTER);
        }
        for (int i = 0; i < GROUPS; i++)
            for (int j = 0; j < SETS; j++) {
                barrier_init(&bar->loaded[i][j], 1);
                barrier_init(&bar->made[i][j], 4);
            }
        barrier_init_done();
    }
    const u32 rank = CLUSTER > 1 ? cluster_rank() : 0;
    // Neither block begins before the barriers of both are initialised.
    if (CLUSTER > 1)
        cluster_sync();
    else
        __syncthreads();
    if (threadIdx.x >= 128 * GROUPS) {
        registers_down<56>();
        if (threadIdx.x == 128 * GROUPS) produce(shape, &a, &b, &b2, bar, rank);
#if HAS_SIDES
        const int mover = (int)threadIdx.x / 32 - 4 * GROUPS - 1;
        if (mover == 0 || mover == 1)
            move_panels(shape, &side, &side2, &out, &out2, &out3, partial, bar, rank, __shfl_sync(ALL_LANES, mover, 0));
#endif
    } else {
        registers_up<224>();
        // A shuffle makes it evidently warp-uniform to the compiler.
        consume(shape, &out, &out2, &out3, bias, bar, rank, __shfl_sync(ALL_LANES, (int)threadIdx.x / 128, 0));
    }
    // A block must stay until the others of its cluster no longer multicast into its shared memory.
    if (CLUSTER > 1) {
        __syncwarp();
        cluster_sync();
    }
}
