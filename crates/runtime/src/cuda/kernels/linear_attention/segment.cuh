// A pair of segments: queries [q0, q1) and keys [k0, k1). Uniform ones follow from the index; ragged ones are read from device
// memory and clamped to the tensors.
struct Segment {
    int q0, q1, k0, k1;
};

__device__ __forceinline__ Segment segment_of(int s, const int* q_start, const int* q_len, const int* k_start,
                                              const int* k_len, int tq, int tk, int q_longest, int k_longest) {
    Segment g;
#if Q_RAGGED
    g.q0 = min(max(q_start[s], 0), tq);
    g.q1 = min(g.q0 + min(max(q_len[s], 0), q_longest), tq);
#else
    g.q0 = s * q_longest;
    g.q1 = g.q0 + q_longest;
#endif
#if K_RAGGED
    g.k0 = min(max(k_start[s], 0), tk);
    g.k1 = min(g.k0 + min(max(k_len[s], 0), k_longest), tk);
#else
    g.k0 = s * k_longest;
    g.k1 = g.k0 + k_longest;
#endif
    return g;
}

// Whether a query attends to a key; `stand` is the key aligned with the query.
__device__ __forceinline__ bool sees(int stand, int key) {
#if MASK == 0
    return true;
#elif MASK == 1
    return key <= stand;
#else
    return key < stand;
#endif
}
