// Gradients of attention for one or few queries per segment over many keys: bf16, head sizes 8 to 256 in steps of 8, any mask
// and segments, grouped heads of up to 8 NQ rows.
//
//   p = exp(scale q k^T - lse), delta = sum(do o) - dlse, ds = p (do v^T - delta)
//   dq = scale ds k, dk = scale ds^T q, dv = p^T do
//
// Shapes and strides are those of call.cuh. Memory-bound: one pass reads every element of k and v and writes every element of
// dk and dv once, 8 SIZE bytes per key and key head. Split-K: a thread block of 4 warps takes one split of the keys of one key
// head with all its rows; its warps take STEP keys in turn. dk and dv of keys that no query attends to are zero. dq is reduced
// over the block's keys in f32 and, if there is more than one split, written to scratch [segments, key heads, splits, rows,
// SIZE], which `decode_merge_dq` sums.
//
// Five mma.sync products. Four have keys as the 16 rows (M): scores and do v^T have the query rows as columns (N); dv and dk
// have them as the inner axis (K) of length 8 NQ. dq has head elements as rows and keys as the inner axis: movmatrix transposes
// k's fragments in registers. The query rows' fragments, as columns and as inner axis, lie in shared memory, one 16-byte word
// per lane.
// Registers: no spills. Static shared memory: 16 ROWS (SIZE + 4) bytes, 33 KB at most.
// Every element has one writer and sums have a fixed order: deterministic.

// Packs two f32 results per word: elements 8 c .. 8 c + 7 of a row of 32, from four products.
__device__ __forceinline__ uint4 packed(const float (&x)[4][4], int half, float factor) {
    u32 y[4];
#pragma unroll
    for (int w = 0; w < 4; w++) y[w] = bf16x2(factor * x[w][2 * half], factor * x[w][2 * half + 1]);
    return make_uint4(y[0], y[1], y[2], y[3]);
}

// Writes rows from + g and from + g + 8 of dk or dv: weights [16 keys, ROWS] times the query rows, 32 columns per round.
__device__ __forceinline__ void write_keys(const Rows& to, int kv_head, int from, int end, const u32 (&weights)[NQ][2],
                                           const uint4* rows, float factor) {
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        float sum[4][4];
#pragma unroll
        for (int i = 0; i < 16; i++) sum[i / 4][i % 4] = 0.0f;
#pragma unroll
        for (int n = 0; n < NQ; n++) {
            const uint4 x = rows[(n * ROUNDS + r) * 32 + lane];
#pragma unroll
            for (int w = 0; w < 4; w++) mma8(sum[w], weights[n][0], weights[n][1], word(x, w));
        }
        if (4 * r + c < PIECES)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int key = from + 8 * h + g;
                bf16* at = to.at + key * to.token + kv_head * to.head + 8 * (4 * r + c);
                if (key < end) store_once(at, packed(sum, h, factor));
            }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
decode_backward(const __grid_constant__ Call call, const Splits splits, const float* d_lse, i64 d_lse_row) {
    __shared__ union {
        struct {
            // The query rows as columns and as the inner axis of a product.
            uint4 q_columns[NQ * ROUNDS * 32], q_inner[NQ * ROUNDS * 32];
            uint4 do_columns[NQ * ROUNDS * 32], do_inner[NQ * ROUNDS * 32];
        };
        float sums[WARPS][ROWS][SIZE + 4];
    } shared;
    __shared__ float logs[ROWS], deltas[ROWS];
    __shared__ Seen seen[ROWS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
    const Share at = share(splits);
    const Segment seg = segment(call, at.segment);
    const int rows = min(ROWS, GROUP * max(seg.q1 - seg.q0, 0));
    const int first = seg.k0 + at.split * splits.keys, end = min(first + splits.keys, seg.k1);
    if (splits.count > 1 && first >= seg.k1) return;

    for (int i = warp; i < NQ * ROUNDS; i += WARPS) {
        const Row row = row_of(seg, at, i / ROUNDS * 8 + g);
        const bool is_there = row.query < seg.q1;
        const uint4 q = piece(call.q.at + row.query * call.q.token + row.head * call.q.head, i % ROUNDS * 4 + c, is_there);
        const uint4 d_o =
            piece(call.d_o.at + row.query * call.d_o.token + row.head * call.d_o.head, i % ROUNDS * 4 + c, is_there);
        shared.q_columns[i * 32 + lane] = q;
        shared.do_columns[i * 32 + lane] = d_o;
        shared.q_inner[i * 32 + lane] = make_uint4(transposed(q.x), transposed(q.y), transposed(q.z), transposed(q.w));
        shared.do_inner[i * 32 + lane] =
            make_uint4(transposed(d_o.x), transposed(d_o.y), transposed(d_o.z), transposed(d_o.w));
    }
    for (int r = warp; r < ROWS; r += WARPS) {
        const Row row = row_of(seg, at, r);
        float sum = 0.0f, log = 0.0f;
        if (row.query < seg.q1) {
            const bf16* o = call.o.at + row.query * call.o.token + row.head * call.o.head;
            const bf16* d_o = call.d_o.at + row.query * call.d_o.token + row.head * call.d_o.head;
            for (int e = lane; e < SIZE; e += 32) sum = fmaf(f32(o[e]), f32(d_o[e]), sum);
            if (lane == 0 && d_lse) sum -= d_lse[row.query * d_lse_row + row.head];
            log = LOG2E * call.lse[row.query * call.lse_row + row.head];
            // Rows without any key get probability 0; their lse may be any finite number.
            log = log == -infinity() ? 0.0f : log;
        }
        sum = lanes_sum<32>(sum);
        if (lane == 0) {
            logs[r] = log;
            deltas[r] = sum;
            seen[r] = sees(call, seg, row.query);
        }
    }
    __syncthreads();

    float of_q[ROUNDS][2][NQ][4];
#pragma unroll
    for (int i = 0; i < ROUNDS * 2 * NQ * 4; i++) (&of_q[0][0][0][0])[i] = 0.0f;
    const bf16* keys = call.k.at + at.kv_head * call.k.head;
    const bf16* values = call.v.at + at.kv_head * call.v.head;
    const float unit = call.scale * LOG2E;

    for (int from = first + warp * STEP; from < end; from += WARPS * STEP) {
        uint4 k[REP][2][ROUNDS], v[REP][2][ROUNDS];
#pragma unroll
        for (int m = 0; m < REP; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int key = from + 16 * m + 8 * h + g;
#pragma unroll
                for (int r = 0; r < ROUNDS; r++) {
                    k[m][h][r] = piece(keys + key * call.k.token, 4 * r + c, key < end);
                    v[m][h][r] = piece(values + key * call.v.token, 4 * r + c, key < end);
                }
            }
#pragma unroll
        for (int m = 0; m < REP; m++) {
            u32 weights[NQ][2], changes[NQ][2];
#pragma unroll
            for (int n = 0; n < NQ; n++) {
                float p[4] = {0.0f, 0.0f, 0.0f, 0.0f}, ds[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
                for (int r = 0; r < ROUNDS; r++) {
                    add_products(p, k[m][0][r], k[m][1][r], shared.q_columns[(n * ROUNDS + r) * 32 + lane]);
                    add_products(ds, v[m][0][r], v[m][1][r], shared.do_columns[(n * ROUNDS + r) * 32 + lane]);
                }
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int row = 8 * n + 2 * c + i % 2;
                    const bool is_here = is_seen(seen[row], from + 16 * m + i / 2 * 8 + g);
                    p[i] = is_here ? exp2_of(fmaf(unit, p[i], -logs[row])) : 0.0f;
                    ds[i] = is_here ? p[i] * (ds[i] - deltas[row]) : 0.0f;
                }
                weights[n][0] = bf16x2(p[0], p[1]);
                weights[n][1] = bf16x2(p[2], p[3]);
                changes[n][0] = bf16x2(ds[0], ds[1]);
                changes[n][1] = bf16x2(ds[2], ds[3]);
            }
            if (call.dv.at) write_keys(call.dv, at.kv_head, from + 16 * m, end, weights, shared.do_inner, 1.0f);
            if (call.dk.at) write_keys(call.dk, at.kv_head, from + 16 * m, end, changes, shared.q_inner, call.scale);
#pragma unroll
            for (int n = 0; n < NQ; n++) {
                changes[n][0] = transposed(changes[n][0]);
                changes[n][1] = transposed(changes[n][1]);
            }
#pragma unroll
            for (int r = 0; r < ROUNDS; r++)
#pragma unroll
                for (int w = 0; w < 2; w++) {
                    const u32 a0 = transposed(word(k[m][0][r], 2 * w)), a1 = transposed(word(k[m][0][r], 2 * w + 1));
                    const u32 a2 = transposed(word(k[m][1][r], 2 * w)), a3 = transposed(word(k[m][1][r], 2 * w + 1));
#pragma unroll
                    for (int n = 0; n < NQ; n++) mma16(of_q[r][w][n], a0, a1, a2, a3, changes[n][0], changes[n][1]);
                }
        }
    }
    if (!call.dq.at) return;

    // Reduction over the warps. The rows' fragments are no longer needed, so the sums may reuse their memory.
    __syncthreads();
#pragma unroll
    for (int t = 0; t < ROUNDS * 2 * NQ * 4; t++) {
        const int i = t % 4, n = t / 4 % NQ, pair = t / 4 / NQ % 2, r = t / 4 / NQ / 2;
        const int row = 8 * n + 2 * c + i % 2, e = 32 * r + g / 2 * 8 + 4 * pair + i / 2 * 2 + g % 2;
        if (SIZE % 32 == 0 || e < SIZE) shared.sums[warp][row][e] = of_q[r][pair][n][i];
    }
    __syncthreads();
    const i64 part = first_part(call, splits, at) + at.split;
    for (int i = threadIdx.x; i < rows * PIECES; i += THREADS) {
        const int row = i / PIECES, index = i % PIECES;
        float x[8];
#pragma unroll
        for (int e = 0; e < 8; e++) {
            x[e] = shared.sums[0][row][index * 8 + e];
#pragma unroll
            for (int w = 1; w < WARPS; w++) x[e] += shared.sums[w][row][index * 8 + e];
            x[e] *= call.scale;
        }
        const Row place = row_of(seg, at, row);
        if (splits.count > 1) {
            float4* to = reinterpret_cast<float4*>(call.scratch + (part * kept_rows(call) + row) * SIZE + index * 8);
            to[0] = make_float4(x[0], x[1], x[2], x[3]);
            to[1] = make_float4(x[4], x[5], x[6], x[7]);
        } else {
            bf16* to = call.dq.at + place.query * call.dq.token + place.head * call.dq.head + index * 8;
            *reinterpret_cast<uint4*>(to) =
                make_uint4(bf16x2(x[0], x[1]), bf16x2(x[2], x[3]), bf16x2(x[4], x[5]), bf16x2(x[6], x[7]));
        }
    }
}

// Sums dq over the splits that have keys. One thread block per query and head. Grid: heads, queries of a segment, segments.
#define MERGERS 256
#define QUARTERS (SIZE / 4)
#define SLOTS (MERGERS / QUARTERS)

extern "C" __global__ void __launch_bounds__(MERGERS)
decode_merge_dq(const __grid_constant__ Call call, const Splits splits) {
    __shared__ float4 sums[SLOTS][QUARTERS];
    const int head = blockIdx.x, segment_index = blockIdx.z;
    const Segment seg = segment(call, segment_index);
    const int query = seg.q0 + (int)blockIdx.y, row = (int)blockIdx.y * GROUP + head % GROUP;
    if (query >= seg.q1) return;
    const i64 part = first_part(call, splits, {head / GROUP, 0, 0, segment_index});
    const int kept = kept_rows(call), count = (max(seg.k1 - seg.k0, 0) + splits.keys - 1) / splits.keys;
    const int slot = threadIdx.x / QUARTERS, quarter = threadIdx.x % QUARTERS;
    const float4* from = reinterpret_cast<const float4*>(call.scratch + (part * kept + row) * SIZE) + quarter;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (slot < SLOTS) {
#pragma unroll 8
        for (int i = slot; i < count; i += SLOTS) {
            const float4 x = from[(i64)i * kept * QUARTERS];
            sum.x += x.x;
            sum.y += x.y;
            sum.z += x.z;
            sum.w += x.w;
        }
        sums[slot][quarter] = sum;
    }
    __syncthreads();
    if (threadIdx.x >= QUARTERS) return;
    for (int i = 1; i < SLOTS; i++) {
        const float4 x = sums[i][threadIdx.x];
        sum.x += x.x;
        sum.y += x.y;
        sum.z += x.z;
        sum.w += x.w;
    }
    bf16* to = call.dq.at + query * call.dq.token + head * call.dq.head + 4 * threadIdx.x;
    *reinterpret_cast<uint2*>(to) = make_uint2(bf16x2(sum.x, sum.y), bf16x2(sum.z, sum.w));
}
