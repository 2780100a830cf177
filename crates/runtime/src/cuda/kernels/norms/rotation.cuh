// Cosines and sines that rotate a token, and the positions of a pair's two elements.
//
// `FREQUENCIES[f]` is frequency f in half turns per position, `AXIS[f]` the row of positions it follows; both are constants of
// the source. With TABLE, cosines and sines of positions 0 to table_rows are loaded from memory; other positions are computed:
// reduced in f64, then in f32, within 3e-7 of the exact value. HALF frequencies per head; a thread holds VEC neighbouring ones,
// with LANES threads per head, TURNS times.

// Cosine and sine of one frequency, times AMPLITUDE, as a table holds them.
__device__ __forceinline__ void turn_of(int position, int f, float& c, float& s) {
    sincospif(half_turns(position * FREQUENCIES[f]), &s, &c);
    c *= AMPLITUDE;
    s *= AMPLITUDE;
}

// Cosine and sine of VEC frequencies from f.
__device__ __forceinline__ void turns_of(const int* positions, const T_TABLE* table, int table_rows, int token, int f,
                                         float (&c)[VEC], float (&s)[VEC]) {
#if AXES == 1
    int position = positions[position_at(0) + token];
#if TABLE
    if ((u32)position < (u32)table_rows) {
#if TABLE_VEC
        const T_TABLE* from = table + table_at(position, f);
        Pack<T_TABLE, 2 * TABLE_VEC> p[VEC / TABLE_VEC];
#pragma unroll
        for (int i = 0; i < VEC / TABLE_VEC; i++) p[i].load(from + 2 * TABLE_VEC * i);
#pragma unroll
        for (int k = 0; k < VEC; k++) {
            c[k] = f32(p[k / TABLE_VEC].x[k % TABLE_VEC * 2]);
            s[k] = f32(p[k / TABLE_VEC].x[k % TABLE_VEC * 2 + 1]);
        }
#else
        // Pairs that are apart or not aligned to their size.
#pragma unroll
        for (int k = 0; k < VEC; k++) {
            const T_TABLE* from = table + table_at(position, f + k);
            c[k] = f32(from[0]);
            s[k] = f32(from[1]);
        }
#endif
        return;
    }
#endif
#pragma unroll
    for (int k = 0; k < VEC; k++) turn_of(position, f + k, c[k], s[k]);
#else
#pragma unroll
    for (int k = 0; k < VEC; k++) {
        int position = positions[position_at(AXIS[f + k]) + token];
#if TABLE
        if ((u32)position < (u32)table_rows) {
            const T_TABLE* from = table + table_at(position, f + k);
            c[k] = f32(from[0]);
            s[k] = f32(from[1]);
            continue;
        }
#endif
        turn_of(position, f + k, c[k], s[k]);
    }
#endif
}

// The elements of VEC pairs of a head: `low` and `high` of each.
template <class Element> struct Pairs {
#if INTERLEAVED
    // PAIR is 2 VEC, or 1 if heads are not aligned to two elements.
    Pack<Element, PAIR> both[2 * VEC / PAIR];
    __device__ __forceinline__ void load(const Element* head, int f) {
#pragma unroll
        for (int i = 0; i < 2 * VEC / PAIR; i++) both[i].load(head + 2 * f + PAIR * i);
    }
    __device__ __forceinline__ float low(int k) const { return f32(both[2 * k / PAIR].x[2 * k % PAIR]); }
    __device__ __forceinline__ float high(int k) const {
        return f32(both[(2 * k + 1) / PAIR].x[(2 * k + 1) % PAIR]);
    }
    __device__ __forceinline__ void store(Element* head, int f, const float (&a)[VEC], const float (&b)[VEC]) {
#pragma unroll
        for (int i = 0; i < 2 * VEC / PAIR; i++) {
            float y[PAIR];
#pragma unroll
            for (int k = 0; k < PAIR; k++) {
                int at = PAIR * i + k;
                y[k] = at % 2 == 0 ? a[at / 2] : b[at / 2];
            }
            put(both[i], y);
            both[i].store(head + 2 * f + PAIR * i);
        }
    }
#else
    Pack<Element, VEC> lows, highs;
    __device__ __forceinline__ void load(const Element* head, int f) {
        lows.load(head + f);
        highs.load(head + HALF + f);
    }
    __device__ __forceinline__ float low(int k) const { return f32(lows.x[k]); }
    __device__ __forceinline__ float high(int k) const { return f32(highs.x[k]); }
    __device__ __forceinline__ void store(Element* head, int f, const float (&a)[VEC], const float (&b)[VEC]) {
        put(lows, a);
        put(highs, b);
        lows.store(head + f);
        highs.store(head + HALF + f);
    }
#endif
};

// Index of a head's low and high element of frequency f in a vector of K.
__device__ __forceinline__ int low_at(int f) { return INTERLEAVED ? 2 * f : f; }
__device__ __forceinline__ int high_at(int f) { return INTERLEAVED ? 2 * f + 1 : f + HALF; }
