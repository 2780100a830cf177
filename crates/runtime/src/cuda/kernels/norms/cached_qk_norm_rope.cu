// The RMS norm of each head of q and k and their rotation, with keys and values written to their rows of the caches.
//
//   y = rotated(x r g(w)) as in qk_norm_rope.cu; q = y of the first FIRST heads; keys[index[t]] = y of the others of token t,
//   values[index[t]] = v of token t
//
// x [T, HEADS, 2 HALF], v [T, HEADS - FIRST, 2 HALF], q [T, FIRST, 2 HALF], keys, values [R, HEADS - FIRST, 2 HALF], heads at any
// strides inside their rows; w [2, 2 HALF]; positions i32 [axes, T]; table f32 [P, HALF, 2]; index i32 [T]. Rows of a negative
// index, or of one past the last, are dropped; of several tokens with one row the last wins, which the lanes of a head find out
// from the index of later tokens. Moves x and v in and q, keys and values out, once.
// For few tokens, whose time is latency: LANES threads hold a head, VEC pairs each (TURNS times), and everything that a head
// needs is loaded before its sum is known. Deterministic.

static const int HEADS_A_BLOCK = 256 / LANES;
static const int KEYS = HEADS - FIRST;

// Whether a later token has this row too; called by all lanes of a head.
__device__ __forceinline__ bool is_replaced(const int* index, int row, int token, int tokens, int lane, bool asks) {
    float later = 0.0f;
    for (int t = token + 1 + lane; asks && t < tokens; t += LANES) later += index[t] == row;
    return lanes_sum<LANES>(later) > 0.0f;
}

extern "C" __global__ void __launch_bounds__(256)
    cached_qk_norm_rope(const T_X* x, const T_W* w, const int* positions, const T_TABLE* table, const T_X* v,
                        const int* index, T_X* q, T_X* keys, T_X* values, int tokens, int rows, int table_rows, float eps) {
    // The heads of a token: queries, keys, values.
    const u32 head = blockIdx.x * HEADS_A_BLOCK + threadIdx.x / LANES;
    const int lane = threadIdx.x % LANES, token = (int)(head / (HEADS + KEYS)), h = (int)(head % (HEADS + KEYS));
    const bool is_there = token < tokens, is_query = h < FIRST, is_value = h >= HEADS;
    const T_X* from = is_value ? v + head_v((u32)token * KEYS + h - HEADS) : x + head_x((u32)token * HEADS + h);
    Pairs<T_X> p[TURNS];
    float c[TURNS][VEC], s[TURNS][VEC], low_g[TURNS][VEC], high_g[TURNS][VEC];
    const int row = is_there && !is_query ? index[token] : -1;
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
        const int f = (i * LANES + lane) * VEC;
        if (!is_there || !inside(f)) continue;
        p[i].load(from, f);
        if (is_value) continue;
        turns_of(positions, table, table_rows, token, f, c[i], s[i]);
        gains(w + (is_query ? 0 : 2 * HALF), f, low_g[i], high_g[i]);
    }
    const bool is_kept = row >= 0 && row < rows;
    const bool is_last = !is_replaced(index, row, token, tokens, lane, is_kept);
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
        if (!is_there || !inside((i * LANES + lane) * VEC)) continue;
#pragma unroll
        for (int k = 0; k < VEC; k++) {
            const float low = p[i].low(k), high = p[i].high(k);
            squares = fmaf(high, high, fmaf(low, low, squares));
        }
    }
    const float r = rsqrtf(lanes_sum<LANES>(squares) / (2 * HALF) + eps);
    T_X* to = is_query ? q : is_value ? values : keys;
    if (!is_there || !to || !(is_query || (is_kept && is_last))) return;
    if (is_query) to += head_q((u32)token * FIRST + h);
    else if (is_value) to += head_values((u32)row * KEYS + h - HEADS);
    else to += head_keys((u32)row * KEYS + h - FIRST);
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
        const int f = (i * LANES + lane) * VEC;
        if (!inside(f)) continue;
        float a[VEC], b[VEC];
#pragma unroll
        for (int k = 0; k < VEC; k++) {
            a[k] = p[i].low(k);
            b[k] = p[i].high(k);
            if (is_value) continue;
            const float low = a[k] * r * low_g[i][k], high = b[k] * r * high_g[i][k];
            a[k] = low * c[i][k] - high * s[i][k];
            b[k] = high * c[i][k] + low * s[i][k];
        }
        p[i].store(to, f, a, b);
    }
}
