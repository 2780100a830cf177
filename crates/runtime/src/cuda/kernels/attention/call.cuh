// The argument struct of our attention kernels, passed by value; `call.rs` has the same struct.
//
// Defines: MASK (0 full, 1 causal, 2 window, 3 two intervals), Q_RAGGED, K_RAGGED (whether the segments of queries or keys are
// read from device memory), CAP (soft cap of the scores; undefined without one).

// Element e of head h of token t is at[t * token + h * head + e]; strides count elements of the tensor's type, also for f32.
// Null if the tensor is absent.
struct Rows {
    bf16* at;
    i64 token, head;
};

// Rows [first, first + height) of the whole tensor, clipped at the segment's end. A negative segment marks an unused entry.
struct Tile {
    int segment, first;
};

struct Call {
    Rows q, k, v, o, d_o, dq, dk, dv;              // q, o, d_o, dq [tq, heads, SIZE]; the others [tk, kv_heads, SIZE]
    float* lse;                                    // [tq, heads], lse_row elements from token to token
    float* delta;                                  // scratch [heads, tq]: sum(do o) of each row
    float* scratch;                                // further scratch of the kernel
    const int *q_start, *q_len, *k_start, *k_len;  // [segments]; null if uniform
    const int* intervals;                          // [tq, 4]: keys [a, b) and [c, d), interval_row from token to token
    const Tile* q_tiles;                           // q_tile_count entries; null if uniform
    const Tile* k_tiles;
    i64 lse_row, interval_row;
    int tq, tk, q_longest, k_longest, segments, q_tile_count, k_tile_count, heads, kv_heads, back, ahead;
    float scale;
};

// A pair of segments: query rows [q0, q1) and key rows [k0, k1). Empty if q1 <= q0.
struct Segment {
    int q0, q1, k0, k1;
};

// Loads a pair of segments, clamped to the tensors: starts and lengths below 0 to 0, lengths to the longest, ends to the last
// token.
__device__ __forceinline__ Segment segment(const Call& call, int s) {
    Segment g;
    g.q0 = Q_RAGGED ? max(call.q_start[s], 0) : s * call.q_longest;
    const int queries = Q_RAGGED ? max(min(call.q_len[s], call.q_longest), 0) : call.q_longest;
    g.q1 = min(min(g.q0, call.tq) + queries, call.tq);
    g.k0 = K_RAGGED ? max(call.k_start[s], 0) : s * call.k_longest;
    const int keys = K_RAGGED ? max(min(call.k_len[s], call.k_longest), 0) : call.k_longest;
    g.k1 = min(min(g.k0, call.tk) + keys, call.tk);
    return g;
}

// The keys that a query attends to: [a, b) and [c, d).
struct Seen {
    int a, b, c, d;
    __device__ __forceinline__ bool has(int key) const { return (key >= a && key < b) || (key >= c && key < d); }
};

// The keys that a query attends to; none past the segment's end.
__device__ __forceinline__ Seen sees(const Call& call, const Segment& g, int query) {
    Seen seen = {0, 0, 0, 0};
    if (query >= g.q1) return seen;
    seen.a = g.k0;
    seen.b = g.k1;
    // The causal position of a query is key query + k1 - q1: the last query is aligned with the last key.
#if MASK == 1
    seen.b = min(seen.b, query + g.k1 - g.q1 + 1);
#elif MASK == 2
    const int stand = query + g.k1 - g.q1;
    seen.a = max(seen.a, stand - call.back);
    seen.b = min(seen.b, stand + call.ahead + 1);
#elif MASK == 3
    const int* at = call.intervals + query * call.interval_row;
    seen.c = max(g.k0, at[2]);
    seen.d = min(g.k1, at[3]);
    seen.a = max(g.k0, at[0]);
    seen.b = min(g.k1, at[1]);
#endif
    return seen;
}

#ifdef CAP
// Soft-caps the product of q and k; `unit` scales a product to a score in base-2 units.
__device__ __forceinline__ float capped(float product, float unit) {
    const float cap = CAP * 1.4426950408889634f;
    return cap / unit * tanhf(unit * product / cap);
}
#endif

// Gradient of a score from the gradient of the capped score; `product` is the result of `capped`.
__device__ __forceinline__ float through_cap(float slope, float product, float unit) {
#ifdef CAP
    const float share = unit * product / (CAP * 1.4426950408889634f);
    return slope * (1.0f - share * share);
#else
    return slope;
#endif
}

// Tile i of HEIGHT queries, or of keys: from the list, or computed if segments are uniform.
template <int HEIGHT> __device__ __forceinline__ Tile q_tile(const Call& call, int i) {
    if (Q_RAGGED) return call.q_tiles[i];
    const int each = (call.q_longest + HEIGHT - 1) / HEIGHT;
    return {i / each, i / each * call.q_longest + i % each * HEIGHT};
}
template <int HEIGHT> __device__ __forceinline__ Tile k_tile(const Call& call, int i) {
    if (K_RAGGED) return call.k_tiles[i];
    const int each = (call.k_longest + HEIGHT - 1) / HEIGHT;
    return {i / each, i / each * call.k_longest + i % each * HEIGHT};
}
