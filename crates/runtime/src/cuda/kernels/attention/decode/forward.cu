// Attention for one or few queries per segment over many keys: bf16, head sizes 8 to 256 in steps of 8, any mask and segments,
// grouped heads.
//
//   scores = scale q k^T, p = softmax over the keys a query attends to, o = p v, lse = log of the sum of exponentials
//
// Shapes and strides are those of call.cuh. Memory-bound: every element of k and v is read once for up to 8 NQ rows of its key
// head (more rows take further thread blocks), 4 SIZE bytes per key and key head; all other traffic is negligible.
// Split-K: the keys of a segment are cut into splits of a fixed length, counted from its first key. A thread block of 4 warps
// takes one split of one key head; its warps take STEP keys in turn with separate running maxima and are reduced at the end. If
// there is more than one split, a block writes its partial result and its lse in f32 to scratch:
//
//   scratch: o [segments, row tiles, key heads, splits, rows, SIZE], then lse, in units of log 2, [.., rows]
//
// and `decode_merge` combines them. Blocks of splits past the segment's last key exit at once, so the grid may cover a
// capacity. Rows of o outside every segment of queries are cleared by further blocks of the same launch.
//
// Both products are mma.sync with keys or head elements as the 16 rows (M) and query rows as the 8 columns (N). Keys go from
// global memory straight into fragments, 16 bytes per lane. Values are loaded with 8 lanes per row, and byte permutes pair the
// elements of two keys. movmatrix passes the weights from the first product to the second. The main loop uses no shared memory:
// loads in flight take registers, of which 4 blocks a multiprocessor leave 128 a thread. That is enough for 8 rows of sizes up to
// 128, and then 64 sequences of 8 key heads run as one round of blocks on 132 multiprocessors. Query rows stay in registers up to
// that size and in shared memory above.
// Registers: no spills. Static shared memory: 16 ROWS (SIZE + 3) bytes, plus 16 SIZE above 128; 37 KB at most. Sums have a
// fixed order: deterministic.

// Rounds in which eight lanes load a row of values, 16 bytes each.
#define V_ROUNDS ((PIECES + 7) / 8)
// Pitch of a row of sums in pairs of elements, padded by one: rows of neighbouring lanes start at different banks.
#define PITCH (SIZE / 2 + 1)

// Blocks per multiprocessor for which the registers suffice.
#define RESIDENT (NQ == 1 && SIZE <= 128 && MASK <= 1 ? 4 : 2)

// Clears o, and lse, of the tokens in no segment, 32 at a time. Grid: as below, in the planes past the segments.
__device__ __forceinline__ void clear_outside(const Call& call) {
    __shared__ u32 found[WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first_head = (int)blockIdx.x * GROUP;
    const int plane = (int)blockIdx.z - call.segments, planes = (int)gridDim.z - call.segments;
    for (i64 base = 32 * (i64)plane; base < call.tq; base += 32 * (i64)planes) {
        u32 inside = 0;
        for (int s = threadIdx.x; s < call.segments; s += THREADS) {
            const Segment g = segment(call, s);
            const i64 from = max((i64)g.q0 - base, (i64)0), to = min((i64)g.q1 - base, (i64)32);
            if (from < to) inside |= ALL_LANES >> (32 - (to - from)) << from;
        }
        inside = __reduce_or_sync(ALL_LANES, inside);
        __syncthreads();
        if (lane == 0) found[warp] = inside;
        __syncthreads();
#pragma unroll
        for (int w = 0; w < WARPS; w++) inside |= found[w];
        for (int t = warp; t < 32 && base + t < call.tq; t += WARPS) {
            if (inside >> t & 1) continue;
            bf16* o = call.o.at + (base + t) * call.o.token + first_head * call.o.head;
            for (int i = lane; call.o.at && i < GROUP * PIECES; i += 32)
                *reinterpret_cast<uint4*>(o + i / PIECES * call.o.head + i % PIECES * 8) = make_uint4(0, 0, 0, 0);
            for (int h = lane; call.lse && h < GROUP; h += 32)
                call.lse[(base + t) * call.lse_row + first_head + h] = -infinity();
        }
    }
}

// Grid: as described at `Share`, and planes along z past the segments that clear.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
decode_forward(const __grid_constant__ Call call, const Splits splits, NEXT_WEIGHT) {
    __shared__ float tops[WARPS][ROWS], totals[WARPS][ROWS];
    __shared__ float2 sums[WARPS][ROWS][PITCH];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
    const Share at = share(splits);
#if Q_RAGGED
    if (at.segment >= call.segments) {
        if (blockIdx.y == 0) clear_outside(call);
        return;
    }
#endif
    const Segment seg = segment(call, at.segment);
    const int rows = min(ROWS, GROUP * (seg.q1 - seg.q0) - at.tile * ROWS);
    const int first = seg.k0 + at.split * splits.keys;
    if (rows <= 0 || (splits.count > 1 && first >= seg.k1)) return;

    // The query rows as columns of the first product, and the keys that the rows of this lane's results attend to.
#if SIZE > 128
    __shared__ uint4 columns[NQ][ROUNDS][32];
#define COLUMNS(n, r) columns[n][r][lane]
#else
    uint4 columns[NQ][ROUNDS];
#define COLUMNS(n, r) columns[n][r]
#endif
    Seen seen[NQ][2];
    int low = 0x7fffffff, high = 0;
#pragma unroll
    for (int n = 0; n < NQ; n++) {
        const Row row = row_of(seg, at, 8 * n + g);
        const bf16* q = call.q.at + row.query * call.q.token + row.head * call.q.head;
#pragma unroll
        for (int r = 0; r < ROUNDS; r++)
            if (SIZE <= 128 || r % WARPS == warp) COLUMNS(n, r) = piece(q, 4 * r + c, row.query < seg.q1);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const Seen s = seen[n][i] = sees(call, seg, row_of(seg, at, 8 * n + 2 * c + i).query);
            if (s.a < s.b) low = min(low, s.a), high = max(high, s.b);
            if (s.c < s.d) low = min(low, s.c), high = max(high, s.d);
        }
    }
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) {
        low = min(low, __shfl_xor_sync(ALL_LANES, low, lanes));
        high = max(high, __shfl_xor_sync(ALL_LANES, high, lanes));
    }
    if (SIZE > 128) __syncthreads();
    low = max(low, first);
    high = min(high, min(first + splits.keys, seg.k1));

    float top[NQ][2], total[NQ][2], sum[V_ROUNDS][4][NQ][4];
#pragma unroll
    for (int n = 0; n < NQ; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            top[n][i] = -infinity();
            total[n][i] = 0.0f;
        }
#pragma unroll
    for (int i = 0; i < V_ROUNDS * 4 * NQ * 4; i++) (&sum[0][0][0][0])[i] = 0.0f;
    const bf16* keys = call.k.at + at.kv_head * call.k.head;
    const bf16* values = call.v.at + at.kv_head * call.v.head;
    const float unit = call.scale * LOG2E;

    // Steps count from the split's first key, so that a mask never moves a key to another step.
    int step = low < high ? (low - first) / STEP : 0;
    step += (warp - step) & (WARPS - 1);
    for (int from = first + step * STEP; from < high; from += WARPS * STEP) {
#if MASK == 3
        bool any = false;
#pragma unroll
        for (int i = 0; i < 2 * NQ; i++) {
            const Seen& s = seen[i / 2][i % 2];
            any |= max(s.a, from) < min(s.b, from + STEP) || max(s.c, from) < min(s.d, from + STEP);
        }
        if (!__any_sync(ALL_LANES, any)) continue;
#endif
        uint4 k[REP][2][ROUNDS], v[REP][4][V_ROUNDS];
#pragma unroll
        for (int m = 0; m < REP; m++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int key = from + 16 * m + 8 * h + g;
#pragma unroll
                for (int r = 0; r < ROUNDS; r++) k[m][h][r] = piece(keys + key * call.k.token, 4 * r + c, key < high);
            }
        }
#pragma unroll
        for (int m = 0; m < REP; m++) {
#pragma unroll
            for (int h = 0; h < 4; h++) {
                const int key = from + 16 * m + h / 2 * 8 + 2 * c + h % 2;
#pragma unroll
                for (int r = 0; r < V_ROUNDS; r++)
                    v[m][h][r] = piece(values + key * call.v.token, 8 * r + g, key < high);
            }
        }
        float p[REP][NQ][4];
#pragma unroll
        for (int n = 0; n < NQ; n++) {
            float peak[2] = {-infinity(), -infinity()};
#pragma unroll
            for (int m = 0; m < REP; m++) {
                float (&scores)[4] = p[m][n];
#pragma unroll
                for (int i = 0; i < 4; i++) scores[i] = 0.0f;
#pragma unroll
                for (int r = 0; r < ROUNDS; r++) add_products(scores, k[m][0][r], k[m][1][r], COLUMNS(n, r));
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const bool is_here = is_seen(seen[n][i % 2], from + 16 * m + i / 2 * 8 + g);
                    scores[i] = is_here ? unit * scores[i] : -infinity();
                    peak[i % 2] = fmaxf(peak[i % 2], scores[i]);
                }
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
#pragma unroll
                for (int lanes = 4; lanes < 32; lanes *= 2)
                    peak[i] = fmaxf(peak[i], __shfl_xor_sync(ALL_LANES, peak[i], lanes));
                peak[i] = fmaxf(peak[i], top[n][i]);
                // A row without any key so far has only zeros to rescale and to add.
                const float base = peak[i] == -infinity() ? 0.0f : peak[i];
                const float shrink = exp2_of(top[n][i] - base);
                top[n][i] = peak[i];
                total[n][i] *= shrink;
#pragma unroll
                for (int t = 0; t < V_ROUNDS * 4; t++) {
                    sum[t / 4][t % 4][n][i] *= shrink;
                    sum[t / 4][t % 4][n][i + 2] *= shrink;
                }
#pragma unroll
                for (int m = 0; m < REP; m++)
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        const float e = exp2_of(p[m][n][i + 2 * h] - base);
                        total[n][i] += e;
                        p[m][n][i + 2 * h] = e;
                    }
            }
        }
#pragma unroll
        for (int m = 0; m < REP; m++) {
            u32 weights[NQ][2];
#pragma unroll
            for (int n = 0; n < NQ; n++) {
                weights[n][0] = transposed(bf16x2(p[m][n][0], p[m][n][1]));
                weights[n][1] = transposed(bf16x2(p[m][n][2], p[m][n][3]));
            }
#pragma unroll
            for (int r = 0; r < V_ROUNDS; r++)
#pragma unroll
                for (int w = 0; w < 4; w++) {
                    u32 a[4];
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        const u32 even = word(v[m][2 * h][r], w), odd = word(v[m][2 * h + 1][r], w);
                        a[2 * h] = __byte_perm(even, odd, 0x5410);
                        a[2 * h + 1] = __byte_perm(even, odd, 0x7632);
                    }
#pragma unroll
                    for (int n = 0; n < NQ; n++)
                        mma16(sum[r][w][n], a[0], a[1], a[2], a[3], weights[n][0], weights[n][1]);
                }
        }
    }

    // Blocks that finish first leave memory to the others and to the product after this.
    fetch_ahead(next_weight, next_rows, next_pitch, next_bytes);

    // Reduction over the warps.
#pragma unroll
    for (int n = 0; n < NQ; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = 8 * n + 2 * c + i;
#pragma unroll
            for (int lanes = 4; lanes < 32; lanes *= 2)
                total[n][i] += __shfl_xor_sync(ALL_LANES, total[n][i], lanes);
            if (g == 0) {
                tops[warp][row] = top[n][i];
                totals[warp][row] = total[n][i];
            }
#pragma unroll
            for (int r = 0; r < V_ROUNDS; r++)
                if (8 * r + g < PIECES)
#pragma unroll
                    for (int w = 0; w < 4; w++)
                        sums[warp][row][32 * r + 4 * g + w] = make_float2(sum[r][w][n][i], sum[r][w][n][i + 2]);
        }
    __syncthreads();
    const i64 part = first_part(call, splits, at) + at.split;
    const i64 parts = (i64)call.segments * splits.tiles * call.kv_heads * splits.count;
    const int kept = kept_rows(call);
    for (int i = threadIdx.x; i < rows * PIECES; i += THREADS) {
        const int row = i / PIECES, index = i % PIECES;
        float best = -infinity(), whole = 0.0f, factor[WARPS];
#pragma unroll
        for (int w = 0; w < WARPS; w++) best = fmaxf(best, tops[w][row]);
        const float base = best == -infinity() ? 0.0f : best;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            factor[w] = exp2_of(tops[w][row] - base);
            whole = fmaf(factor[w], totals[w][row], whole);
        }
        // Not `whole > 0`, so that NaN scores propagate.
        const float share_of = whole == 0.0f ? 0.0f : 1.0f / whole;
        float x[8];
#pragma unroll
        for (int e = 0; e < 8; e += 2) {
            float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
            for (int w = 0; w < WARPS; w++) {
                const float2 y = sums[w][row][index * 4 + e / 2];
                sum.x = fmaf(factor[w], y.x, sum.x);
                sum.y = fmaf(factor[w], y.y, sum.y);
            }
            x[e] = share_of * sum.x;
            x[e + 1] = share_of * sum.y;
        }
        const float lse = whole == 0.0f ? -infinity() : best + log2f(whole);
        const Row place = row_of(seg, at, row);
        if (splits.count > 1) {
            float4* to = reinterpret_cast<float4*>(call.scratch + (part * kept + row) * SIZE + index * 8);
            to[0] = make_float4(x[0], x[1], x[2], x[3]);
            to[1] = make_float4(x[4], x[5], x[6], x[7]);
            if (index == 0) call.scratch[parts * kept * SIZE + part * kept + row] = lse;
        } else {
            bf16* to = call.o.at + place.query * call.o.token + place.head * call.o.head + index * 8;
            if (call.o.at)
                *reinterpret_cast<uint4*>(to) =
                    make_uint4(bf16x2(x[0], x[1]), bf16x2(x[2], x[3]), bf16x2(x[4], x[5]), bf16x2(x[6], x[7]));
            if (index == 0 && call.lse) call.lse[place.query * call.lse_row + place.head] = LN2 * lse;
        }
    }
}

// o = sum exp2(lse_i - lse) o_i over the splits that have keys. One block per query and head. Grid: heads, queries, segments.
#define MERGERS 256
#define QUARTERS (SIZE / 4)
#define SLOTS (MERGERS / QUARTERS)

extern "C" __global__ void __launch_bounds__(MERGERS)
decode_merge(const __grid_constant__ Call call, const Splits splits) {
    __shared__ float4 sums[SLOTS][QUARTERS];
    const int head = blockIdx.x, segment_index = blockIdx.z;
    const Segment seg = segment(call, segment_index);
    const int query = seg.q0 + (int)blockIdx.y, row = (int)blockIdx.y * GROUP + head % GROUP;
    if (query >= seg.q1) return;
    const Share at = {head / GROUP, 0, row / ROWS, segment_index};
    const i64 part = first_part(call, splits, at);
    const i64 parts = (i64)call.segments * splits.tiles * call.kv_heads * splits.count;
    const int kept = kept_rows(call), count = (max(seg.k1 - seg.k0, 0) + splits.keys - 1) / splits.keys;
    const float* lse = call.scratch + parts * kept * SIZE + part * kept + row % ROWS;

    float best = -infinity(), whole = 0.0f;
    for (int i = threadIdx.x % 32; i < count; i += 32) best = fmaxf(best, lse[(i64)i * kept]);
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) best = fmaxf(best, __shfl_xor_sync(ALL_LANES, best, lanes));
    const float base = best == -infinity() ? 0.0f : best;
    for (int i = threadIdx.x % 32; i < count; i += 32) whole += exp2_of(lse[(i64)i * kept] - base);
    whole = lanes_sum<32>(whole);
    const float share_of = whole == 0.0f ? 0.0f : 1.0f / whole;
    if (call.lse && threadIdx.x == 0)
        call.lse[query * call.lse_row + head] = whole == 0.0f ? -infinity() : LN2 * (base + log2f(whole));
    if (!call.o.at) return;

    const int slot = threadIdx.x / QUARTERS, quarter = threadIdx.x % QUARTERS;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const float4* from =
        reinterpret_cast<const float4*>(call.scratch + (part * kept + row % ROWS) * SIZE) + quarter;
    if (slot < SLOTS)
#pragma unroll 8
        for (int i = slot; i < count; i += SLOTS) {
            const float weight = share_of * exp2_of(lse[(i64)i * kept] - base);
            const float4 x = from[(i64)i * kept * QUARTERS];
            sum.x = fmaf(weight, x.x, sum.x);
            sum.y = fmaf(weight, x.y, sum.y);
            sum.z = fmaf(weight, x.z, sum.z);
            sum.w = fmaf(weight, x.w, sum.w);
        }
    if (slot < SLOTS) sums[slot][quarter] = sum;
    __syncthreads();
    if (threadIdx.x >= QUARTERS) return;
    for (int i = 1; i < SLOTS; i++) {
        const float4 x = sums[i][threadIdx.x];
        sum.x += x.x;
        sum.y += x.y;
        sum.z += x.z;
        sum.w += x.w;
    }
    bf16* to = call.o.at + query * call.o.token + head * call.o.head + 4 * threadIdx.x;
    *reinterpret_cast<uint2*>(to) = make_uint2(bf16x2(sum.x, sum.y), bf16x2(sum.z, sum.w));
}
