// The gains of a head's norm, for a thread that holds VEC pairs of the head's elements, f and f + HALF or neighbours.
//
// Defines: T_W and WEIGHT (0: none, 1: w, 2: 1 + w), and those of rotation.cuh.

__device__ __forceinline__ bool inside(int f) { return HALF % (LANES * VEC) == 0 || f < HALF; }

// g of VEC pairs.
__device__ __forceinline__ void gains(const T_W* w, int f, float (&low)[VEC], float (&high)[VEC]) {
#if WEIGHT
    Pairs<T_W> p;
    p.load(w, f);
#pragma unroll
    for (int k = 0; k < VEC; k++) {
        low[k] = p.low(k) + (WEIGHT == 2 ? 1.0f : 0.0f);
        high[k] = p.high(k) + (WEIGHT == 2 ? 1.0f : 0.0f);
    }
#else
#pragma unroll
    for (int k = 0; k < VEC; k++) low[k] = high[k] = 1.0f;
#endif
}
