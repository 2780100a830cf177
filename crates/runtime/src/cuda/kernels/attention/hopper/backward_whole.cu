// dq, dk and dv of attention on Hopper for sequences that fit in a block: bf16, heads of 16 to 64, equal sequences of up to 264
// tokens, as many keys as queries, no mask, one key head per query head. Deterministic.
//
//   s^T = k q^T, p^T = exp2(scale log2e s^T - log2e lse), dp^T = v do^T, ds^T = p^T (dp^T - delta), delta = sum(do o) - dlse
//   dv = p^T do, dk = scale ds^T q, dq^T = scale k^T ds^T
//
// A thread block holds all rows of q, k, v, do and o of one sequence and head in shared memory: each tensor crosses device
// memory once, 16 SIZE bytes per token and head, and a tile of 64 keys by 64 queries takes 5 products. One thread block per
// multiprocessor.
// Two consumer warpgroups own 64 keys each and walk all queries in tiles of 64, keys [0, 128) in the first round, [128, 256) in
// the second: dk and dv are accumulated in registers, and ds^T goes through shared memory to a third warpgroup, which
// accumulates dq^T of all queries in its registers over both rounds, in a fixed order, without sums in device memory.
// Up to 8 rows past the last full tile would leave a further tile mostly empty. As queries they form a tile of 16. As keys,
// their scores are computed before the last round with queries as rows, and their dk^T and dv^T with columns of the head as
// rows.
// In the fourth warpgroup one producer warp issues the TMA loads and two warps compute row statistics. A tile of queries is
// reloaded for the next head once the last round has released it, keys once their round has, so the next head starts without
// waiting. TMA fills rows past a sequence's end with zeros.
// Registers: no spills, but high pressure: a single accumulator that does not fit makes the assembler serialise all products
// (C7512). So dp^T starts when p^T is packed, and ds^T uses p^T as packed to bf16: error 2.9e-3 instead of 2.4e-3.
// 256 x 257 with 12 heads of 64 on an H200: 0.458 ms, by tiles 0.877, cuDNN 0.936; 256 x 256: 0.366, 0.653, 0.674.
//
// Defines: SIZE, MASK (0), Q_RAGGED and K_RAGGED (0), TILES (1 to 4), LAST (whether rows are left after them), REGISTERS (per
// thread that owns keys), DQ_REGISTERS, FEEDER_REGISTERS (of the producer).

#define ROUNDS ((TILES + 1) / 2)
// Rows of the narrow tile: the products' least step along K.
#define NARROW 16
#define SLOT_ROWS (64 * TILES + LAST * NARROW)
#define SLOT (SLOT_ROWS * 128)
#define AT_Q 0
#define AT_DO SLOT
#define AT_O (2 * SLOT)
#define AT_K (3 * SLOT)
#define AT_V (4 * SLOT)
// [2 warpgroups, 2] panels of ds^T.
#define AT_DS (5 * SLOT)
// ds^T and p^T of the keys after the last tile, one panel per tile of queries; ds^T is padded with zero rows to 16 keys.
#define AT_LAST_DS (AT_DS + 4 * 8192)
#define AT_LAST_P (AT_LAST_DS + (TILES + 1) * 2048)
#define AT_ROWS (AT_LAST_P + (TILES + 1) * 1024)
#define AT_BARRIERS (AT_ROWS + 2 * SLOT_ROWS * 4)

extern __shared__ __align__(1024) u8 memory[];

// The last element of each array is for the rows after the last tile.
struct Barriers {
    u64 q_full[TILES + 1], q_empty[TILES + 1], k_full[TILES + 1], k_empty[TILES + 1], rows_full[TILES + 1];
    u64 ds_full[2][2], ds_empty[2][2], last_full;
};

__device__ __forceinline__ Barriers& barriers() { return *(Barriers*)(memory + AT_BARRIERS); }
// For each query -log2e lse (-inf past the sequence's end), and SLOT_ROWS further -delta.
__device__ __forceinline__ float* rows_of_queries() { return (float*)(memory + AT_ROWS); }
__device__ __forceinline__ u8* slopes_at(int part, int stage) { return memory + AT_DS + (2 * part + stage) * 8192; }

// The heads of sequences that a block processes, one after the other; `phase` is the parity of the barriers.
struct Turn {
    int index, phase;
    __device__ __forceinline__ bool is_left(const Call& call) const { return index < call.segments * call.heads; }
    __device__ __forceinline__ void next() {
        index += gridDim.x;
        phase ^= 1;
    }
    __device__ __forceinline__ int segment(const Call& call) const { return index / call.heads; }
    __device__ __forceinline__ int head(const Call& call) const { return index % call.heads; }
    // The sequence's first token.
    __device__ __forceinline__ i64 token(const Call& call) const { return (i64)segment(call) * call.q_longest; }
};
__device__ __forceinline__ Turn first_turn() { return {(int)blockIdx.x, 0}; }

// The producer warp, and the warps that compute statistics.

// TMA descriptors of the tensors.
struct Maps {
    const TensorMap *q, *d_o, *o, *k, *v;
};

// Issues the TMA loads of a tile of a tensor, in boxes of 16 rows; rows past the sequence's end are zero-filled.
__device__ __forceinline__ void load_tile(u8* slot, const TensorMap* map, u64* full, int tile, int head, int segment) {
    for (int r = 64 * tile; r < (tile < TILES ? 64 * tile + 64 : SLOT_ROWS); r += 16)
        bulk_load(slot + r * 128, map, full, 0, head, r, segment);
}
__device__ __forceinline__ u32 tile_bytes(int tile) { return (tile < TILES ? 64 : NARROW) * 128; }

// The producer's loop, by one thread: loads in the order of use, which is also the order of release.
__device__ __forceinline__ void feed(const Call& call, const Maps& maps) {
    Barriers& bars = barriers();
    for (Turn turn = first_turn(); turn.is_left(call); turn.next()) {
        const int head = turn.head(call), segment = turn.segment(call);
        const auto keys = [&](int tile) {
            u64* full = &bars.k_full[tile];
            barrier_wait(&bars.k_empty[tile], turn.phase ^ 1);
            barrier_expect(full, 2 * tile_bytes(tile));
            load_tile(memory + AT_K, maps.k, full, tile, head, segment);
            load_tile(memory + AT_V, maps.v, full, tile, head, segment);
        };
        const auto queries = [&](int tile) {
            u64* full = &bars.q_full[tile];
            barrier_wait(&bars.q_empty[tile], turn.phase ^ 1);
            barrier_expect(full, 3 * tile_bytes(tile));
            load_tile(memory + AT_Q, maps.q, full, tile, head, segment);
            load_tile(memory + AT_DO, maps.d_o, full, tile, head, segment);
            load_tile(memory + AT_O, maps.o, full, tile, head, segment);
        };
        for (int j = 0; j < TILES && j < 2; j++) keys(j);
        for (int i = 0; i < TILES; i++) queries(i);
        if (LAST) {
            queries(TILES);
            keys(TILES);
        }
        for (int j = 2; j < TILES; j++) keys(j);
    }
}

// Computes the statistics of a tile of queries, by two warps, one thread per row. Rows without any key get p = 0.
__device__ __forceinline__ void measure(const Call& call, int row, const float* d_lse, i64 d_lse_row) {
    Barriers& bars = barriers();
    for (Turn turn = first_turn(); turn.is_left(call); turn.next()) {
#pragma unroll 1
        for (int i = 0; i < TILES + LAST; i++) {
            const int query = 64 * i + row;
            float lse = -infinity(), sum = 0.0f;
            if (query < call.q_longest) {
                const i64 token = turn.token(call) + query;
                lse = call.lse[token * call.lse_row + turn.head(call)];
                if (d_lse) sum = d_lse[token * d_lse_row + turn.head(call)];
            }
            barrier_wait(&bars.q_full[i], turn.phase);
            if (query < SLOT_ROWS) {
#pragma unroll 1
                for (int piece = 0; piece < SIZE / 8; piece++) {
                    const u8* at = memory + query * 128 + (piece ^ (row % 8)) * 16;
                    const uint4 o = *(const uint4*)(at + AT_O), d_o = *(const uint4*)(at + AT_DO);
                    const u32 x[4] = {o.x, o.y, o.z, o.w}, y[4] = {d_o.x, d_o.y, d_o.z, d_o.w};
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        sum = fmaf(__uint_as_float(x[e] << 16), -__uint_as_float(y[e] << 16), sum);
                        sum = fmaf(__uint_as_float(x[e] & 0xffff0000u), -__uint_as_float(y[e] & 0xffff0000u), sum);
                    }
                }
                rows_of_queries()[query] = lse == -infinity() ? lse : -LOG2E * lse;
                rows_of_queries()[SLOT_ROWS + query] = sum;
            }
            // Orders generic reads of the tile before TMA's writes.
            fence_async();
            release(&bars.rows_full[i]);
        }
    }
}

// The warpgroups that own keys.

// Turns s into p, for queries from `query`.
template <int Count>
__device__ __forceinline__ void weigh(float (&s)[Count], int query, float unit, int keys) {
    const int lane = threadIdx.x % 32;
    // Past the last key p must be 0: the key is zero, but p may be infinite, which would corrupt dq.
    if (keys < 64) {
        const int key = threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
        for (int j = 0; j < Count; j++)
            if (key + j / 2 % 2 * 8 >= keys) s[j] = -infinity();
    }
    const float* shifts = rows_of_queries() + query + 2 * (lane % 4);
#pragma unroll
    for (int j = 0; j < Count / 4; j++) {
        const float2 shift = *(const float2*)(shifts + 8 * j);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            s[4 * j + 2 * i] = exp2_fast(fmaf(s[4 * j + 2 * i], unit, shift.x));
            s[4 * j + 2 * i + 1] = exp2_fast(fmaf(s[4 * j + 2 * i + 1], unit, shift.y));
        }
    }
}

// Turns dp into ds, with p as packed for the products: p in f32 would need more registers.
template <int Steps>
__device__ __forceinline__ void slope(float (&dp)[8 * Steps], const u32 (&p)[Steps][4], int query) {
    const float* means = rows_of_queries() + SLOT_ROWS + query + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int j = 0; j < 2 * Steps; j++) {
        const float2 mean = *(const float2*)(means + 8 * j);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const u32 pair = p[j / 2][j % 2 * 2 + i];
            dp[4 * j + 2 * i] = __uint_as_float(pair << 16) * (dp[4 * j + 2 * i] + mean.x);
            dp[4 * j + 2 * i + 1] = __uint_as_float(pair & 0xffff0000u) * (dp[4 * j + 2 * i + 1] + mean.y);
        }
    }
}

// Stores ds^T [64, 16 Steps] into the first columns of a panel with keys as rows.
template <int Steps> __device__ __forceinline__ void keep_slopes(const u32 (&a)[Steps][4], u8* panel) {
    const int lane = threadIdx.x % 32, r = threadIdx.x / 32 % 4 * 16 + lane % 16;
#pragma unroll
    for (int i = 0; i < Steps; i++)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                         shared_address(panel + r * 128 + ((2 * i + lane / 16) ^ (r % 8)) * 16)),
                     "r"(a[i][0]), "r"(a[i][1]), "r"(a[i][2]), "r"(a[i][3])
                     : "memory");
}

// A warpgroup's keys of a round, and their accumulators.
struct Owned {
    u64 k, v;
    int keys, part;
    float unit;
    float dk[SIZE / 2], dv[SIZE / 2];
};

// Processes a tile of 16 Steps queries. The products that accumulate dk and dv are left in flight, with p and ds as operands.
// `settled` is called when those of the previous tile are complete.
template <int Steps, class Settled>
__device__ __forceinline__ void meet(Owned& own, int tile, int phase, Ring<2>& ring, u32 (&p)[Steps][4],
                                     u32 (&ds)[Steps][4], Settled settled) {
    Barriers& bars = barriers();
    const u8 *q = memory + AT_Q + tile * 8192, *d_o = memory + AT_DO + tile * 8192;
    // Declared here, so that the accumulator, which a product overwrites, is not live before.
    float s[8 * Steps];
    barrier_wait(&bars.q_full[tile], phase);
    product_arrive();
    product_of_heads(s, own.k, 0, along_k(q));
    product_wait<1>();
    hold(own.dk);
    hold(own.dv);
    settled();
    barrier_wait(&bars.rows_full[tile], phase);
    product_wait<0>();
    hold(s);
    weigh(s, 64 * tile, own.unit, own.keys);
    pack(p, s);
    float dp[8 * Steps];
    product_arrive();
    product_of_heads(dp, own.v, 0, along_k(d_o));
    add_product(own.dv, p, d_o);
    product_wait<1>();
    hold(dp);
    slope(dp, p, 64 * tile);
    pack(ds, dp);
    barrier_wait(&bars.ds_empty[own.part][ring.stage], ring.phase ^ 1);
    keep_slopes(ds, slopes_at(own.part, ring.stage));
    fence_async();
    product_arrive();
    add_product(own.dk, ds, q);
    release(&bars.ds_full[own.part][ring.stage]);
    ring.next();
}

// Processes a warpgroup's 64 keys of a round.
__device__ __forceinline__ void keys_of_round(const Call& call, const Turn& turn, int part, int round,
                                              Ring<2>& ring) {
    Barriers& bars = barriers();
    const int tile = 2 * round + part;
    // Whether the queries are released after this round.
    const bool is_through = round == ROUNDS - 1;
    Owned own;
    own.k = along_k(memory + AT_K + tile * 8192);
    own.v = along_k(memory + AT_V + tile * 8192);
    own.keys = call.q_longest - 64 * tile;
    own.part = part;
    own.unit = call.scale * LOG2E;
    u32 p[4][4] = {}, ds[4][4] = {};
#pragma unroll
    for (int i = 0; i < SIZE / 2; i++) own.dk[i] = own.dv[i] = 0.0f;
    barrier_wait(&bars.k_full[tile], turn.phase);
#pragma unroll 1
    for (int i = 0; i < TILES; i++)
        meet(own, i, turn.phase, ring, p, ds, [&] {
            hold(p);
            hold(ds);
            if (is_through && i > 0) release(&bars.q_empty[i - 1]);
        });
    if (LAST) {
        u32 last_p[NARROW / 16][4], last_ds[NARROW / 16][4];
        meet(own, TILES, turn.phase, ring, last_p, last_ds, [&] {
            hold(p);
            hold(ds);
            if (is_through) release(&bars.q_empty[TILES - 1]);
        });
        product_wait<0>();
        hold(last_p);
        hold(last_ds);
    }
    product_wait<0>();
    hold(own.dk);
    hold(own.dv);
    hold(p);
    hold(ds);
    release(&bars.k_empty[tile]);
    if (is_through) release(&bars.q_empty[LAST ? TILES : TILES - 1]);
    const i64 token = turn.token(call) + 64 * tile;
    if (call.dk.at) write_rows(call.dk, token, turn.head(call), own.keys, own.dk, call.scale);
    if (call.dv.at) write_rows(call.dv, token, turn.head(call), own.keys, own.dv, 1.0f);
}

// Processes the last keys, up to 8. Both warpgroups compute p and ds with queries as rows, for every other tile each; then the
// first computes dv^T and the second dk^T.
#define OWN_TILES (TILES / 2 + 1)
__device__ __forceinline__ void last_keys(const Call& call, const Turn& turn, int part) {
    Barriers& bars = barriers();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const u64 k = along_k(memory + AT_K + TILES * 8192), v = along_k(memory + AT_V + TILES * 8192);
    for (int i = 0; i < TILES + LAST; i++) {
        barrier_wait(&bars.q_full[i], turn.phase);
        barrier_wait(&bars.rows_full[i], turn.phase);
    }
    barrier_wait(&bars.k_full[TILES], turn.phase);
    float s[OWN_TILES][4], dp[OWN_TILES][4];
    product_arrive();
#pragma unroll
    for (int m = 0; m < OWN_TILES; m++) {
        const int tile = min(2 * m + part, TILES);
#pragma unroll
        for (int e = 0; e < STEPS; e++)
            Product<8>::of_shared<0, 0>(s[m], along_k(memory + AT_Q + tile * 8192) + e * 2, k + e * 2, e > 0);
#pragma unroll
        for (int e = 0; e < STEPS; e++)
            Product<8>::of_shared<0, 0>(dp[m], along_k(memory + AT_DO + tile * 8192) + e * 2, v + e * 2, e > 0);
    }
    product_commit();
    product_wait<0>();
#pragma unroll
    for (int m = 0; m < OWN_TILES; m++) {
        hold(s[m]);
        hold(dp[m]);
        const int tile = 2 * m + part;
        // Only the first warp has rows in the narrow tile.
        if (tile > TILES || (tile == TILES && warp)) break;
        u32 p[2], ds[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int query = 64 * tile + 16 * warp + lane / 4 + 8 * i;
            const float shift = rows_of_queries()[query], mean = rows_of_queries()[SLOT_ROWS + query];
            float x[2], y[2];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const bool is_there = 64 * TILES + 2 * (lane % 4) + e < call.q_longest;
                x[e] = is_there ? exp2_fast(fmaf(s[m][2 * i + e], call.scale * LOG2E, shift)) : 0.0f;
                y[e] = x[e] * (dp[m][2 * i + e] + mean);
            }
            p[i] = bf16x2(x[0], x[1]);
            ds[i] = bf16x2(y[0], y[1]);
        }
        // Stored transposed: eight queries of a key are contiguous.
        const u32 at = lane % 8 * 128 + ((2 * warp + lane / 8 % 2) ^ (lane % 8)) * 16;
        asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(
                         shared_address(memory + AT_LAST_P + tile * 1024) + at),
                     "r"(p[0]), "r"(p[1])
                     : "memory");
        asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(
                         shared_address(memory + AT_LAST_DS + tile * 2048) + at),
                     "r"(ds[0]), "r"(ds[1])
                     : "memory");
    }
    fence_async();
    release(&bars.last_full);
    barrier_wait(&bars.last_full, turn.phase);
    float sum[4];
    const u64 a = along_mn(memory + (part ? AT_Q : AT_DO), SLOT);
    const u8* b = memory + (part ? AT_LAST_DS : AT_LAST_P);
    const int pitch = part ? 2048 : 1024;
    product_arrive();
#pragma unroll
    for (int i = 0; i < SLOT_ROWS / 16; i++)
        Product<8>::of_shared<1, 0>(sum, a + i * 2048 / 16, along_k(b + i / 4 * pitch) + i % 4 * 2, i > 0);
    product_commit();
    product_wait<0>();
    hold(sum);
    release(&bars.k_empty[TILES]);
    const Rows& to = part ? call.dk : call.dv;
    const float factor = part ? call.scale : 1.0f;
    const int key = 64 * TILES + lane / 4;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const u32 word = matrix_transpose(bf16x2(factor * sum[2 * i], factor * sum[2 * i + 1]));
        const int column = 16 * warp + 8 * i + 2 * (lane % 4);
        if (to.at && key < call.q_longest && column < SIZE)
            *(u32*)(to.at + (turn.token(call) + key) * to.token + turn.head(call) * to.head + column) = word;
    }
}

__device__ __forceinline__ void own_keys(const Call& call, int part) {
    Barriers& bars = barriers();
    Ring<2> ring = {0, 0};
    for (Turn turn = first_turn(); turn.is_left(call); turn.next())
#pragma unroll 1
        for (int round = 0; round < ROUNDS; round++) {
            // Before the last round, after which the queries are gone.
            if (LAST && round == ROUNDS - 1) last_keys(call, turn, part);
            if (2 * round + part < TILES) {
                keys_of_round(call, turn, part, round, ring);
            } else {
                // The last round has only one tile, so this warpgroup just releases the queries.
                for (int i = 0; i < TILES + LAST; i++) {
                    barrier_wait(&bars.q_full[i], turn.phase);
                    release(&bars.q_empty[i]);
                }
            }
        }
}

// The warpgroup that sums dq.

// d^T [64, 2 Count] += k^T ds^T over 16 Steps keys.
template <int Steps, int Count>
__device__ __forceinline__ void add_slopes(float (&d)[Count], const u8* keys, const u8* slopes) {
    const u64 a = along_mn(keys, SLOT), b = along_mn(slopes, 8192);
#pragma unroll
    for (int i = 0; i < Steps; i++)
        Product<2 * Count>::template of_shared<1, 1>(d, a + i * 2048 / 16, b + i * 2048 / 16, 1);
}

// Writes the warpgroup's columns of dq^T [64, 8 Count / 4] as rows of dq, 16 bytes per thread.
template <int Count>
__device__ __forceinline__ void write_turned(const Rows& to, i64 token, int head, int rows, const float (&d)[Count],
                                             float factor) {
    const int lane = threadIdx.x % 32, c = lane % 4;
    const int column = threadIdx.x / 32 % 4 * 16 + 8 * (c % 2);
#pragma unroll
    for (int j = 0; j < Count; j += 8) {
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            words[i] = j + 2 * i < Count
                           ? matrix_transpose(bf16x2(factor * d[(j + 2 * i) % Count], factor * d[(j + 2 * i + 1) % Count]))
                           : 0;
        quad_transpose(words, c);
        const int row = 2 * j + 8 * (c / 2) + lane / 4;
        if (row < rows && 2 * j + 8 * (c / 2) < 2 * Count && column < SIZE)
            *(uint4*)(to.at + (token + row) * to.token + head * to.head + column) =
                make_uint4(words[0], words[1], words[2], words[3]);
    }
}

__device__ __forceinline__ void sum_queries(const Call& call) {
    Barriers& bars = barriers();
    Ring<2> rings[2] = {};
    float dq[TILES][32], last[4];
    for (Turn turn = first_turn(); turn.is_left(call); turn.next()) {
#pragma unroll
        for (int i = 0; i < TILES * 32; i++) dq[i / 32][i % 32] = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; i++) last[i] = 0.0f;
#pragma unroll 1
        for (int round = 0; round < ROUNDS; round++) {
            const u8 *keys = memory + AT_K + 2 * round * 8192, *last_keys = memory + AT_K + TILES * 8192;
            const int parts = min(TILES - 2 * round, 2);
            const bool takes_last = LAST && round == ROUNDS - 1;
            for (int part = 0; part < parts; part++) barrier_wait(&bars.k_full[2 * round + part], turn.phase);
            if (takes_last) {
                barrier_wait(&bars.k_full[TILES], turn.phase);
                barrier_wait(&bars.last_full, turn.phase);
            }
            // The barrier of the data that the product in flight reads, released when the product is complete.
            u64* before = nullptr;
            const auto add = [&](auto& d, int tile) {
#pragma unroll
                for (int part = 0; part < 2; part++) {
                    if (part == parts) break;
                    Ring<2>& ring = rings[part];
                    barrier_wait(&bars.ds_full[part][ring.stage], ring.phase);
                    product_arrive();
                    add_slopes<4>(d, keys + part * 8192, slopes_at(part, ring.stage));
                    if (takes_last && part == parts - 1)
                        add_slopes<1>(d, last_keys, memory + AT_LAST_DS + tile * 2048);
                    product_commit();
                    product_wait<1>();
                    if (before) release(before);
                    before = &bars.ds_empty[part][ring.stage];
                    ring.next();
                }
            };
#pragma unroll
            for (int i = 0; i < TILES; i++) add(dq[i], i);
            if (LAST) add(last, TILES);
            product_wait<0>();
            release(before);
            for (int part = 0; part < parts; part++) release(&bars.k_empty[2 * round + part]);
            if (takes_last) release(&bars.k_empty[TILES]);
        }
#pragma unroll
        for (int i = 0; i < TILES; i++) hold(dq[i]);
        hold(last);
        if (!call.dq.at) continue;
#pragma unroll
        for (int i = 0; i < TILES; i++)
            write_turned(call.dq, turn.token(call) + 64 * i, turn.head(call), call.q_longest - 64 * i, dq[i], call.scale);
        if (LAST)
            write_turned(call.dq, turn.token(call) + 64 * TILES, turn.head(call), call.q_longest - 64 * TILES, last,
                         call.scale);
    }
}

extern "C" __global__ void __launch_bounds__(512, 1)
wgmma_whole(const __grid_constant__ Call call, const __grid_constant__ TensorMap q_map,
            const __grid_constant__ TensorMap do_map, const __grid_constant__ TensorMap o_map,
            const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map, const float* d_lse,
            i64 d_lse_row) {
    Barriers& bars = barriers();
    if (threadIdx.x == 0) {
        for (int i = 0; i <= TILES; i++) {
            barrier_init(&bars.q_full[i], 1);
            barrier_init(&bars.q_empty[i], 8);
            barrier_init(&bars.k_full[i], 1);
            // Both warpgroups use the last keys.
            barrier_init(&bars.k_empty[i], i < TILES ? 8 : 12);
            barrier_init(&bars.rows_full[i], 2);
        }
        for (int i = 0; i < 4; i++) {
            barrier_init(&bars.ds_full[i / 2][i % 2], 4);
            barrier_init(&bars.ds_empty[i / 2][i % 2], 4);
        }
        barrier_init(&bars.last_full, 8);
        barrier_init_done();
    }
    for (int i = threadIdx.x; i < (TILES + 1) * 128; i += 512)
        ((uint4*)(memory + AT_LAST_DS))[i] = make_uint4(0, 0, 0, 0);
    fence_async();
    __syncthreads();
    const int part = threadIdx.x / 128;
    if (part == 3) {
        registers_down<FEEDER_REGISTERS>();
        const int warp = threadIdx.x / 32 % 4;
        if (warp == 0 && threadIdx.x % 32 == 0) feed(call, {&q_map, &do_map, &o_map, &k_map, &v_map});
        if (warp == 1 || warp == 2) measure(call, threadIdx.x % 128 - 32, d_lse, d_lse_row);
    } else if (part == 2) {
        registers_up<DQ_REGISTERS>();
        sum_queries(call);
    } else {
        registers_up<REGISTERS>();
        own_keys(call, __shfl_sync(ALL_LANES, part, 0));
    }
}
