// Row statistics for Hopper's backward kernels, and dq's sums in device memory, which the kernel that owns keys adds to.
//
// `call.scratch` holds the sums, f32 [heads, tq, SUM_ROW]. Every 8 queries of a tile form one run in the accumulator layout of
// dq^T: floats [4 t, 4 t + 4) belong to thread t, columns 16 w + l / 4 and 8 further of queries 2 (l % 4) and the next. Fewer
// than 8 at a segment's end are stored row by row.
//
// With SUMMED, statistics are interleaved in pairs of rows: [heads, pitch / 2] of two -log2e lse and two -delta.
//
// Defines: SIZE, SUMMED (whether dq is summed in device memory).

#define SUM_ROW ((SIZE + 15) / 16 * 16)
// Lanes per row, 8 elements each.
#define LANES (SIZE > 128 ? 32 : SIZE > 64 ? 16 : SIZE > 32 ? 8 : SIZE > 16 ? 4 : 2)

__device__ __forceinline__ float* sums_of(const Call& call, int head, int query) {
    return call.scratch + ((i64)head * call.tq + query) * SUM_ROW;
}

// Address of a row's first statistic, and the distance to its second.
__device__ __forceinline__ float* statistics_of(const Call& call, int head, i64 token) {
    return statistics(call, head) + (SUMMED ? token / 2 * 4 + token % 2 : token);
}
__device__ __forceinline__ i64 statistics_step(const Call& call) { return SUMMED ? 2 : pitch_of(call); }

// Computes -log2e lse and dlse - sum(do o), dlse if given, of up to 32 rows of a head before `end`, by a warp, so that its
// writes are coalesced into whole lines. Reads o and do once, writes 8 bytes per row.
__device__ __forceinline__ void measure_rows(const Call& call, int head, int first, int end, const float* d_lse,
                                             i64 d_lse_row) {
    const int lane = threadIdx.x % 32, e = lane % LANES * 8;
    float mine = 0.0f;
#pragma unroll 4
    for (int i = 0; i < LANES; i++) {
        const i64 token = first + i * (32 / LANES) + lane / LANES;
        float sum = 0.0f;
        if (token < end && e < SIZE) {
            Pack<bf16, 8> o, d_o;
            o.load(call.o.at + token * call.o.token + head * call.o.head + e);
            d_o.load(call.d_o.at + token * call.d_o.token + head * call.d_o.head + e);
#pragma unroll
            for (int j = 0; j < 8; j++) sum = fmaf(f32(o.x[j]), f32(d_o.x[j]), sum);
        }
        sum = lanes_sum<LANES>(sum);
        sum = __shfl_sync(ALL_LANES, sum, lane % (32 / LANES) * LANES);
        if (lane / (32 / LANES) == i) mine = sum;
    }
    const i64 token = first + lane;
    if (token >= end) return;
    // Rows without any key get p = 0 with any score.
    const float lse = call.lse[token * call.lse_row + head];
    float* to = statistics_of(call, head, token);
    to[0] = lse == -infinity() ? lse : -LOG2E * lse;
    to[statistics_step(call)] = (d_lse ? d_lse[token * d_lse_row + head] : 0.0f) - mine;
}

// Zeroes the sums of queries [first, end), by a warp.
__device__ __forceinline__ void clear_sums(const Call& call, int head, int first, int end) {
    float4* to = (float4*)sums_of(call, head, first);
    const int count = (end - first) * (SUM_ROW / 4);
#pragma unroll 4
    for (int i = threadIdx.x % 32; i < count; i += 32) to[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

// dq = scale times its sums, for up to 16 queries before `end` and the 16 columns from 16 `part`, by a warp. Reads 4 bytes and
// writes 2 per element, 16 per lane.
__device__ __forceinline__ void round_sums(const Call& call, int head, int first, int end, int part) {
    const int lane = threadIdx.x % 32, c = lane % 4;
    u32 words[4];
#pragma unroll
    for (int n = 0; n < 2; n++) {
        const float* run = sums_of(call, head, first + 8 * n);
        const int left = end - first - 8 * n;
        float4 d = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (left >= 8) {
            d = *((const float4*)run + 32 * part + lane);
        } else {
            const float* row = run + 2 * c * SUM_ROW + 16 * part + lane / 4;
            if (2 * c < left) d.x = row[0], d.z = row[8];
            if (2 * c + 1 < left) d.y = row[SUM_ROW], d.w = row[SUM_ROW + 8];
        }
        words[2 * n] = matrix_transpose(bf16x2(call.scale * d.x, call.scale * d.y));
        words[2 * n + 1] = matrix_transpose(bf16x2(call.scale * d.z, call.scale * d.w));
    }
    quad_transpose(words, c);
    const i64 query = first + 8 * (c / 2) + lane / 4;
    const int column = 16 * part + 8 * (c % 2);
    if (query < end && column < SIZE)
        *(uint4*)(call.dq.at + query * call.dq.token + head * call.dq.head + column) =
            make_uint4(words[0], words[1], words[2], words[3]);
}
