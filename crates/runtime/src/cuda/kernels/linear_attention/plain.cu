// A weighted sum of linear attention in f32 arithmetic, for what the tensor-core kernels do not support: f32, and bf16 of odd
// sizes, strides or addresses (`weighted_sum.rs` lists the sums): out_i = sum over heads and j of W_ij x_j, W = M(scale a b^T),
// a [Ta, HA, inner] on the side of out [Ta, HO, width], b [Tb, HB, inner] and x [Tb, HX, width] on the opposite side, heads'
// rows at any stride. Rows outside every segment are neither read nor written, except by `clear`.
//
// A thread block of 16 x 16 threads owns 64 rows and SLICE columns of one head of `out`. It loops over tiles of 64 rows of the
// opposite side: weights are accumulated in registers, 4 x 4 per thread, over chunks of 32 columns of a and b in shared memory,
// then scaled, masked, stored in shared memory, and multiplied onto the result, 4 x SLICE / 16 per thread, over chunks of 64
// columns of x. 33 KiB of shared memory. The order of every sum follows from the shapes and the segments: deterministic. No
// spills.
//
// A_TURNED, B_TURNED, X_TURNED: the operand is rotated as it is read (pairs of neighbours) and rounded to its type; OUT_TURNED:
// the epilogue rotates the result back before rounding. ONTO: the result is then added to a base (1), which may be the same
// memory, and set to 0 where the query's element is not above 0 (2).
//
// OWNER: the role of the rows: 0 queries, 1 keys, 2 both (W_ij = M(scale a_i b_j) + M(scale a_j b_i)).

#define TILE 64
#define CHUNK 32
#define THREADS 256

// The rotation of rows; empty if no operand is rotated.
struct Turns {
#if TURNED
    const int* positions;
    const T_TABLE* table;
    int table_rows;
    // Cosine and sine of the pair that a column belongs to.
    __device__ __forceinline__ void of(int row, int column, float& c, float& s) const {
        float cosine[1], sine[1];
        turns_of(positions, table, table_rows, row, column / 2, cosine, sine);
        c = cosine[0];
        s = sine[0];
    }
#endif
};

// An element of a row, rotated.
__device__ __forceinline__ float turned_at(const T_X* from, int row, int column, const Turns& turns) {
#if TURNED
    float c, s;
    turns.of(row, column, c, s);
    const float low = f32(from[column / 2 * 2]), high = f32(from[column / 2 * 2 + 1]);
    return rounded<T_X>(column % 2 == 0 ? low * c - high * s : high * c + low * s);
#else
    return f32(from[column]);
#endif
}

// Loads ROWS rows of a head from `first`, columns [column, column + COLUMNS), widened; zeros past `end` and `columns`.
template <int COLUMNS, bool IS_TURNED>
__device__ __forceinline__ void stage(float* to, const T_X* from, i64 token, int first, int end, int column, int columns,
                                      const Turns& turns) {
    for (int i = threadIdx.x; i < TILE * COLUMNS; i += THREADS) {
        const int r = i / COLUMNS, c = i % COLUMNS;
        float x = 0.0f;
        if (first + r < end && column + c < columns) {
            const T_X* row = from + (first + r) * token;
            x = IS_TURNED ? turned_at(row, first + r, column + c, turns) : f32(row[column + c]);
        }
        to[r * (COLUMNS + 1) + c] = x;
    }
}

// sum[i][j] = dot product of row y + 16 i of a and row x + 16 j of b.
template <bool IS_A_TURNED, bool IS_B_TURNED>
__device__ __forceinline__ void products(float (&sum)[4][4], float* shared, const T_X* a, i64 a_token, int a_first,
                                         int a_end, const T_X* b, i64 b_token, int b_first, int b_end, int inner,
                                         const Turns& turns) {
    const int y = threadIdx.x / 16, x = threadIdx.x % 16;
    float *left = shared, *right = shared + TILE * (CHUNK + 1);
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) sum[i][j] = 0.0f;
    for (int column = 0; column < inner; column += CHUNK) {
        __syncthreads();
        stage<CHUNK, IS_A_TURNED>(left, a, a_token, a_first, a_end, column, inner, turns);
        stage<CHUNK, IS_B_TURNED>(right, b, b_token, b_first, b_end, column, inner, turns);
        __syncthreads();
#pragma unroll 4
        for (int e = 0; e < CHUNK; e++)
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    sum[i][j] = fmaf(left[(y + 16 * i) * (CHUNK + 1) + e], right[(x + 16 * j) * (CHUNK + 1) + e], sum[i][j]);
    }
}

// Grid: tiles of every segment on the owned side, output heads with slices innermost.
extern "C" __global__ void __launch_bounds__(THREADS, SLICE > 64 ? 1 : 2)
plain_sum(const T_X* a, const T_X* b, const T_X* x, T_X* out, const int* q_start, const int* q_len, const int* k_start,
          const int* k_len, i64 a_token, i64 a_head, i64 b_token, i64 b_head, i64 x_token, i64 x_head, i64 out_token,
          i64 out_head, int tq, int tk, int q_longest, int k_longest, int tiles, int heads, int a_heads, int b_heads,
          int x_heads, int out_heads, float scale, int inner, int width, int slices
#if TURNED
          , const int* positions, const T_TABLE* table, int table_rows
#endif
#if ONTO
          , const T_X* base, const T_X* queries, i64 base_token, i64 base_head, i64 queries_token, i64 queries_head
#endif
) {
#if TURNED
    const Turns turns = {positions, table, table_rows};
#else
    const Turns turns = {};
#endif
    __shared__ float chunks[2 * TILE * (CHUNK + 1)];
    __shared__ float weights[TILE * (TILE + 1)];
    const int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
    const int out_of = blockIdx.y / slices, slice = blockIdx.y % slices * SLICE;
    const Segment g =
        segment_of(blockIdx.x / tiles, q_start, q_len, k_start, k_len, tq, tk, q_longest, k_longest);
    const int own0 = OWNER == 1 ? g.k0 : g.q0, own1 = OWNER == 1 ? g.k1 : g.q1;
    const int walk0 = OWNER == 1 ? g.q0 : g.k0, walk1 = OWNER == 1 ? g.q1 : g.k1;
    const int first = own0 + (int)(blockIdx.x % tiles) * TILE, shift = g.k1 - g.q1;
    if (first >= own1) return;

    float result[SLICE / 64][4][4];
#pragma unroll
    for (int s = 0; s < SLICE / 64; s++)
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) result[s][i][j] = 0.0f;
    const int group = heads / out_heads;
    for (int head = out_of * group; head < (out_of + 1) * group; head++) {
        const T_X* a_of = a + head * a_heads / heads * a_head;
        const T_X* b_of = b + head * b_heads / heads * b_head;
        const T_X* x_of = x + head * x_heads / heads * x_head;
        for (int from = walk0; from < walk1; from += TILE) {
#if MASK != 0 && OWNER != 2
            // Skips tiles that are entirely masked.
            const int last = min(first + TILE, own1) - 1, last_walked = min(from + TILE, walk1) - 1;
            if (OWNER == 0 ? !sees(last + shift, from) : !sees(last_walked + shift, first)) continue;
#endif
            float sum[4][4];
            products<A_TURNED, B_TURNED>(sum, chunks, a_of, a_token, first, own1, b_of, b_token, from, walk1, inner, turns);
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const int own = first + ty + 16 * i, walk = from + tx + 16 * j;
                    const bool is_seen = OWNER == 1 ? sees(walk + shift, own) : sees(own + shift, walk);
                    sum[i][j] = is_seen ? sum[i][j] : 0.0f;
                }
#if OWNER == 2
            float others[4][4];
            products<B_TURNED, A_TURNED>(others, chunks, b_of, b_token, first, own1, a_of, a_token, from, walk1, inner, turns);
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    if (sees(from + tx + 16 * j, first + ty + 16 * i)) sum[i][j] += others[i][j];
#endif
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) weights[(ty + 16 * i) * (TILE + 1) + tx + 16 * j] = scale * sum[i][j];
#pragma unroll
            for (int s = 0; s < SLICE / 64; s++) {
                __syncthreads();
                stage<64, X_TURNED>(chunks, x_of, x_token, from, walk1, slice + 64 * s, width, turns);
                __syncthreads();
#pragma unroll 4
                for (int e = 0; e < TILE; e++)
#pragma unroll
                    for (int i = 0; i < 4; i++)
#pragma unroll
                        for (int j = 0; j < 4; j++)
                            result[s][i][j] = fmaf(weights[(ty + 16 * i) * (TILE + 1) + e], chunks[e * 65 + tx + 16 * j],
                                                   result[s][i][j]);
            }
        }
    }
#pragma unroll
    for (int s = 0; s < SLICE / 64; s++)
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int row = first + ty + 16 * i, column = slice + 64 * s + tx + 16 * j;
                float y = result[s][i][j];
#if OUT_TURNED
                // The pair's other element belongs to the neighbouring lane.
                const float other = __shfl_xor_sync(ALL_LANES, y, 1);
                if (row < own1 && column < width) {
                    float cosine, sine;
                    turns.of(row, column, cosine, sine);
                    y = y * cosine + (column % 2 == 0 ? other : -other) * sine;
                }
#endif
                if (row >= own1 || column >= width) continue;
#if ONTO
                y += f32(base[row * base_token + out_of * base_head + column]);
#endif
#if ONTO == 2
                if (!(f32(queries[row * queries_token + out_of * queries_head + column]) > 0.0f)) y = 0.0f;
#endif
                out[row * out_token + out_of * out_head + column] = As<T_X>::of(y);
            }
}
