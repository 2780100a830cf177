// Prologue and epilogue of cuDNN's attention over ragged segments: the offset of each segment in each tensor, and copies of
// rows from a slice of a wider tensor into a dense one or back.

#define THREADS 1024
#define MOST 9

// Elements from token to token of each tensor that has offsets.
struct Steps {
    i64 of[MOST];
};

// first[s] = the segment's first token, first[segments] = the end of the last one; offsets[t][s] = first[s] times the token
// stride of tensor t, with `pitch` elements between tensors; lengths are written twice, clamped to the tensors as `segment`
// does. An empty segment starts at the end of the segments before it, because cuDNN needs non-decreasing offsets. One thread
// block. Reads 8 bytes per segment; writes 8 per segment and tensor, and 8 per segment.
extern "C" __global__ void __launch_bounds__(THREADS)
packed_offsets(const int* start, const int* len, int segments, int tokens, int longest,
               const __grid_constant__ Steps steps, int tensors, i64* offsets, i64 pitch, int* q_len, int* k_len) {
    __shared__ int tops[THREADS / 32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int before = 0;
    for (int from = 0; from <= segments; from += THREADS) {
        const int s = from + (int)threadIdx.x;
        int first = 0, rows = 0;
        if (s < segments) {
            first = min(max(start[s], 0), tokens);
            rows = min(max(min(len[s], longest), 0), tokens - first);
        }
        // The maximum end of this and all earlier segments.
        int end = rows > 0 ? first + rows : 0;
#pragma unroll
        for (int o = 1; o < 32; o *= 2) {
            const int below = __shfl_up_sync(ALL_LANES, end, o);
            if (lane >= o) end = max(end, below);
        }
        if (lane == 31) tops[warp] = end;
        __syncthreads();
        int earlier = before, all = before;
        for (int w = 0; w < THREADS / 32; w++) {
            if (w < warp) earlier = max(earlier, tops[w]);
            all = max(all, tops[w]);
        }
        __syncthreads();
        end = max(end, earlier);
        before = all;
        if (s <= segments) {
            const i64 at = rows > 0 ? first : end;
            for (int t = 0; t < tensors; t++) offsets[t * pitch + s] = at * steps.of[t];
        }
        if (s < segments) {
            q_len[s] = rows;
            k_len[s] = rows;
        }
    }
}

// to[t, h, e] = from[t, h, e] with token and head strides; the `size` elements of a head (a multiple of 8) are contiguous. A
// thread moves 16 bytes. Grid: pieces of 8 elements, in blocks of 1024.
extern "C" __global__ void __launch_bounds__(THREADS)
move_rows(const bf16* from, bf16* to, i64 tokens, int heads, int size, i64 from_token, i64 from_head, i64 to_token,
          i64 to_head) {
    const i64 piece = (i64)blockIdx.x * THREADS + threadIdx.x;
    const int pieces = size / 8;
    const i64 row = piece / pieces;
    if (row >= tokens * heads) return;
    const i64 token = row / heads, head = row % heads, e = piece % pieces * 8;
    *reinterpret_cast<uint4*>(to + token * to_token + head * to_head + e) =
        *reinterpret_cast<const uint4*>(from + token * from_token + head * from_head + e);
}
