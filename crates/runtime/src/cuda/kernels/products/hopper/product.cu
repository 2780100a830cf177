// d [M, N] = a [M, K] b [K, N] in bf16 or 8-bit floats on Hopper, with an epilogue of ../call.cuh.
//
// Persistent: a thread block loops over tiles of d. A producer warp fills pipeline stages of a and b by TMA loads; two consumer
// warpgroups multiply. With PINGPONG each has its own tile, [64 MI, TN], and one's epilogue overlaps the other's products;
// otherwise both share a tile of [128 MI, TN]. The CLUSTER blocks of a cluster take vertically adjacent tiles, and each
// multicasts its part of b to all of them.
// With FP8, a and b are of the 8-bit types T_A and T_B, contiguous along K, and their product is multiplied by one scale each.
// With PROMOTE, the sum over each 128 of K is added to an f32 accumulator by ordinary additions: for that, a warpgroup multiplies
// its tile in slices, whose sums and the tile's fit in its registers, and one warpgroup adds while the other multiplies. Without,
// the tensor cores accumulate all of K, in fewer bits than f32 where operands have 8: over 65536 of K the relative error of a
// product was 7e-3 instead of 1e-4, which is cuBLASLt's too. With STAGGER, the second warpgroup of a tile begins that number of
// stages after the first.
//
// With SPLIT, d is f32, and its matrices are the products over consecutive parts of K of the one a and b, which another kernel
// adds.
//
// Results are staged in shared memory and leave by TMA stores, which clip at the matrix. The inputs of gradients arrive by TMA
// loads, two panels ahead: a dedicated warp per warpgroup issues these loads and the stores of results. A base, which may be out
// itself, is read by the threads that add it. Sums have one order: the same bits every time, whatever the grid.

#define GROUPS 2
#define TM (PINGPONG ? 64 * MI : 64 * MI * GROUPS)
// Columns of d per tile.
#define WIDTH (IS_GATED ? TN / 2 : TN)
#define PANEL_BYTES 8192
// Elements of K per stage: 128 bytes of a row.
#define DEPTH (FP8 ? 128 : 64)
// Columns of the sums that a warpgroup promotes at once.
#define SLICE (TN > 128 ? TN / 2 : TN)
// Registers per thread of the consumers, and of the producer's warpgroup.
#define MANY_REGISTERS (PROMOTE ? 240 : 224)
#define FEW_REGISTERS (PROMOTE ? 24 : 56)
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

#if FP8 || HAS_BASE
// Scales of the operands, the base of PLAIN, whose rows are `pitch` elements apart and its matrices `step`, and the scale and the
// largest magnitude of codes.
struct Extras {
    const float *a_scale, *b_scale;
    const T_OUT* base;
    i64 pitch, step;
    const float* out_scale;
    u32* amax;
};
#endif

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
#if SPLIT
            const int k = (t.batch * s.blocks + block) * DEPTH, batch = 0;
#else
            const int k = block * DEPTH, batch = t.batch;
#endif
            barrier_wait(&bar->empty[at.stage], at.parity);
            barrier_expect(full, STAGE_BYTES);
#if A_MN
#pragma unroll
            for (int p = 0; p < TM / 64; p++) bulk_load(to_a + p * PANEL_BYTES, a, full, t.row + 64 * p, k, batch);
#else
            bulk_load(to_a, a, full, k, t.row, batch);
#endif
#if B_MN
#pragma unroll
            for (int i = 0; i < TN / 64 / CLUSTER; i++) {
                const int p = (int)rank * (TN / 64 / CLUSTER) + i;
                load_shared(to_b + p * PANEL_BYTES, b, full, t.column + 64 * p, k, batch);
            }
#elif IS_GATED && CLUSTER > 1
            load_shared(to_b + rank * (B_BYTES / 2), rank ? b2 : b, full, k, t.column, batch);
#elif IS_GATED
            bulk_load(to_b, b, full, k, t.column, batch);
            bulk_load(to_b + B_BYTES / 2, b2, full, k, t.column, batch);
#else
            load_shared(to_b + rank * (B_BYTES / CLUSTER), b, full, k, t.column + (int)rank * (TN / CLUSTER), batch);
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

#if F32_OUT

// Writes 32 columns of a warpgroup's sums to a panel [64, 32] of f32.
__device__ __forceinline__ void store_f32(u8* panel, const float* sum) {
    const int lane = threadIdx.x % 32, row = (int)threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int piece = (2 * j + lane % 4 / 2) ^ (row % 8);
            float* to = (float*)(panel + (row + 8 * r) * 128 + piece * 16 + lane % 2 * 8);
            *(float2*)to = make_float2(sum[4 * j + 2 * r], sum[4 * j + 2 * r + 1]);
        }
}

#endif

// A product of one instruction, which takes 32 bytes of K.
template <int N> __device__ __forceinline__ void multiply(float (&d)[N / 2], u64 a, u64 b, int add) {
#if FP8
    Fp8Product<N>::of_shared(d, a, b, add);
#else
    Product<N>::template of_shared<A_MN, B_MN>(d, a, b, add);
#endif
}

#if HAS_BASE

__device__ __forceinline__ float2 pair_at(const bf16* p) {
    const u32 pair = *(const u32*)p;
    return make_float2(low(pair), high(pair));
}
__device__ __forceinline__ float2 pair_at(const float* p) { return *(const float2*)p; }

#endif

#if FP8 || HAS_BASE

// Scales 64 columns of a warpgroup's sums and adds the base; row and column are the first of the 64 by 64.
[[maybe_unused]] __device__ __forceinline__ void finish(float* sum, const Shape& s, const Extras& extras, float scale, int row, int column,
                                       int batch) {
#if HAS_BASE
    const int lane = threadIdx.x % 32, first = row + (int)threadIdx.x % 128 / 32 * 16 + lane / 4;
    const T_OUT* from = extras.base + batch * extras.step + column + 2 * (lane % 4);
    float2 base[16];
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const bool is_there = first + 8 * r < s.m && column + 8 * j + 2 * (lane % 4) < s.n;
            base[2 * j + r] = is_there ? pair_at(from + (first + 8 * r) * extras.pitch + 8 * j) : make_float2(0.0f, 0.0f);
        }
#pragma unroll
    for (int e = 0; e < 16; e++) {
        sum[2 * e] = fmaf(sum[2 * e], scale, base[e].x);
        sum[2 * e + 1] = fmaf(sum[2 * e + 1], scale, base[e].y);
    }
#else
#pragma unroll
    for (int e = 0; e < 32; e++) sum[e] *= scale;
#endif
}

#endif

__device__ __forceinline__ void consume(const Shape& s, const TensorMap* out, const TensorMap* out2, const TensorMap* out3,
                                        [[maybe_unused]] const T_BIAS* bias,
#if FP8 || HAS_BASE
                                        const Extras& extras,
#endif
                                        Barriers* bar, u32 rank, int group) {
    const int lane = threadIdx.x % 32;
    const bool leads = threadIdx.x % 128 == 0;
    u8* own = memory + STAGES * STAGE_BYTES + group * OUT_PANELS * PANEL_BYTES;
    [[maybe_unused]] Ring ring = {own, 0, group, leads};
    [[maybe_unused]] int set = 0;
    [[maybe_unused]] u32 set_parity = 0;
    Place at = {0, 0};
    float sum[MI][TN / 2];
#if FP8
    const float scale = *extras.a_scale * *extras.b_scale;
#elif HAS_BASE
    const float scale = 1.0f;
#endif
#if EPILOGUE == GATED_CODES
    const float by = 1.0f / *extras.out_scale;
    float largest = 0.0f;
#endif
    int turn = 0;
#if PINGPONG
    if (group == 1) named_arrive(4, 256);
#endif
#if STAGGER
    // The second warpgroup stays behind the first, so that the epilogue of one overlaps products of the other.
    if (group == 1) named_sync(6, 256);
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
#if PROMOTE
#pragma unroll
        for (int i = 0; i < MI; i++)
#pragma unroll
            for (int k = 0; k < TN / 2; k++) sum[i][k] = 0.0f;
#pragma unroll 1
        for (int block = 0; block < s.blocks; block++) {
            barrier_wait(&bar->full[at.stage], at.parity);
            const u8* stage = memory + at.stage * STAGE_BYTES;
            const u64 a = along_k(stage + (PINGPONG ? 0 : group * MI * PANEL_BYTES)), b = along_k(stage + A_BYTES);
#pragma unroll
            for (int i = 0; i < MI; i++)
#pragma unroll
                for (int c = 0; c < TN; c += SLICE) {
                    float part[SLICE / 2];
                    product_arrive();
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        multiply<SLICE>(part, a + (i * PANEL_BYTES + e * 32) / 16, b + (c * 128 + e * 32) / 16, e > 0);
                    product_commit();
                    product_wait<0>();
                    hold(part);
                    if (i == MI - 1 && c == TN - SLICE && lane < CLUSTER) barrier_arrive_at(&bar->empty[at.stage], lane);
#pragma unroll
                    for (int k = 0; k < SLICE / 2; k++) sum[i][c / 2 + k] += part[k];
                }
            at.next();
#if STAGGER
            if (group == 0 && index == first_tile() && block == min(STAGGER, s.blocks) - 1) named_arrive(6, 256);
#endif
        }
#if PINGPONG
        named_arrive(5 - group, 256);
#endif
#else
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
                    multiply<TN>(sum[i], a + (i * PANEL_BYTES + e * (A_MN ? 2048 : 32)) / 16, b + e * (B_MN ? 2048 : 32) / 16,
                                 block + e > 0);
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
#endif

#if !HAS_SIDES
        const Tile t = tile_of(s, index, rank);
        const int row = PINGPONG ? t.row : t.row + group * 64 * MI;
#endif
#if EPILOGUE == PLAIN
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const int i = step / (TN / 64), c = step % (TN / 64);
#if FP8 || HAS_BASE
            finish(sum[i] + 32 * c, s, extras, scale, row + 64 * i, t.column + 64 * c, t.batch);
#endif
#if F32_OUT
#pragma unroll
            for (int half = 0; half < 2; half++) {
                u8* panel = ring.take();
                store_f32(panel, sum[i] + 32 * c + 16 * half);
                ring.send(out, panel, t.column + 64 * c + 32 * half, row + 64 * i, t.batch);
            }
#else
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
#endif
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
#elif EPILOGUE == GATED_CODES
#pragma unroll
        for (int i = 0; i < MI; i++) {
            // Two codes of each row that a lane holds of 8 columns.
            u16 codes[2][4][4];
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const int column = t.column + 64 * c;
                u32 gate[4][4];
                u8* panel = KEEP ? ring.take() : nullptr;
#pragma unroll
                for (int n = 0; n < 4; n++) {
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        const int e = 32 * c + 8 * n + 2 * j;
                        gate[n][j] = bf16x2(sum[i][e] * scale, sum[i][e + 1] * scale);
                    }
                    if (KEEP) stmatrix(matrices_at(panel, n), gate[n]);
                }
                if (KEEP) ring.send(out, panel, column, row + 64 * i, t.batch);
                panel = KEEP ? ring.take() : nullptr;
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    u32 up[4];
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        const int e = TN / 4 + 32 * c + 8 * n + 2 * j;
                        up[j] = bf16x2(sum[i][e] * scale, sum[i][e + 1] * scale);
                        float v0, v1, slope;
                        activation(low(gate[n][j]), v0, slope);
                        activation(high(gate[n][j]), v1, slope);
                        const u32 y = bf16x2(v0 * low(up[j]), v1 * high(up[j]));
                        largest = fmaxf(largest, fmaxf(fabsf(low(y)), fabsf(high(y))));
                        codes[c][n][j] = (u16)codes_of<e4m3>(low(y) * by, high(y) * by);
                    }
                    if (KEEP) stmatrix(matrices_at(panel, n), up);
                }
                if (KEEP) ring.send(out2, panel, column, row + 64 * i, t.batch);
            }
            // Codes of 128 columns are a panel of 128 bytes per row.
            u8* panel = ring.take();
            const int warp_row = (int)threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
            for (int c = 0; c < 2; c++)
#pragma unroll
                for (int n = 0; n < 4; n++)
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        const int piece = (4 * c + n) ^ (warp_row % 8);
                        *(u16*)(panel + (warp_row + j % 2 * 8) * 128 + piece * 16 + j / 2 * 8 + lane % 4 * 2) = codes[c][n][j];
                    }
            ring.send(out3, panel, t.column, row + 64 * i, t.batch);
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
#if EPILOGUE == GATED_CODES
    // Magnitudes are not negative, so their bits compare like the numbers.
    const u32 bits = __reduce_max_sync(ALL_LANES, __float_as_uint(largest));
    if (lane == 0 && bits > *(volatile u32*)extras.amax) atomicMax(extras.amax, bits);
#endif
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
        const __grid_constant__ TensorMap side2, const T_BIAS* bias, float* partial
#if FP8 || HAS_BASE
        ,
        const __grid_constant__ Extras extras
#endif
) {
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
        registers_down<FEW_REGISTERS>();
        if (threadIdx.x == 128 * GROUPS) produce(shape, &a, &b, &b2, bar, rank);
#if HAS_SIDES
        const int mover = (int)threadIdx.x / 32 - 4 * GROUPS - 1;
        if (mover == 0 || mover == 1)
            move_panels(shape, &side, &side2, &out, &out2, &out3, partial, bar, rank, __shfl_sync(ALL_LANES, mover, 0));
#endif
    } else {
        registers_up<MANY_REGISTERS>();
        // A shuffle makes it evidently warp-uniform to the compiler.
        consume(shape, &out, &out2, &out3, bias,
#if FP8 || HAS_BASE
                extras,
#endif
                bar, rank, __shfl_sync(ALL_LANES, (int)threadIdx.x / 128, 0));
    }
    // A block must stay until the others of its cluster no longer multicast into its shared memory.
    if (CLUSTER > 1) {
        __syncwarp();
        cluster_sync();
    }
}
