// Rotary positions: rotates pairs of a head's elements by position * frequency; INVERSE rotates back.
//
//   low' = low cos - high sin, high' = high cos + low sin
//
// x, y [T, HEADS, 2 HALF], heads at any strides; positions i32 [axes, T]; table f32 [P, HALF, 2]. Moves x once in, once out;
// the table comes from cache. LANES threads rotate CHUNK heads of one token with the same cosines and sines, VEC frequencies
// each (TURNS times); 256 threads per block. Deterministic.

extern "C" __global__ void __launch_bounds__(256)
    rope(const T_X* x, const int* positions, const T_TABLE* table, T_X* y, i64 heads, int table_rows) {
    i64 head = ((i64)blockIdx.x * 256 + threadIdx.x) / LANES * CHUNK;
    if (head >= heads) return;
    int lane = threadIdx.x % LANES;
    int token = (int)(head / HEADS);
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
        int f = (i * LANES + lane) * VEC;
        if (HALF % (LANES * VEC) != 0 && f >= HALF) continue;
        Pairs<T_X> p[CHUNK];
#pragma unroll
        for (int j = 0; j < CHUNK; j++) p[j].load(x + head_x(head + j), f);
        float c[VEC], s[VEC];
        turns_of(positions, table, table_rows, token, f, c, s);
#pragma unroll
        for (int j = 0; j < CHUNK; j++) {
            float a[VEC], b[VEC];
#pragma unroll
            for (int k = 0; k < VEC; k++) {
                float sine = INVERSE ? -s[k] : s[k];
                a[k] = p[j].low(k) * c[k] - p[j].high(k) * sine;
                b[k] = p[j].high(k) * c[k] + p[j].low(k) * sine;
            }
            p[j].store(y + head_y(head + j), f, a, b);
        }
    }
}
