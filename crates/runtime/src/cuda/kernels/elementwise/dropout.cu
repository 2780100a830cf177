// Counter-based dropout: x / (1 - p), and zero with probability p.
//
// Element c of token t draws 16 bits, half c mod 8 of Philox 4x32-10 at counter (c / 8, token, sample, step) under the key
// (seed low ^ node key low, seed high ^ node key high); (sample, token) = rows[t], (seed low, seed high, step) = rng. The
// element is dropped if its draw is less than `below`. The bits are the same on every backend.
// x, y [T, ..] with WIDTH elements per token at any strides; rng i32 [3]; rows i32 [T, 2]. Moves x in, y out. A thread takes
// VEC neighbouring elements of a token, so a draw of four words serves eight of them; 256 threads per block. Deterministic.

extern "C" __global__ void __launch_bounds__(256)
    dropout(const T_X* x, const int* rng, const int* rows, T_X* y, INDEX count, int key_low, int key_high, int below,
            float keep) {
    INDEX e = ((INDEX)blockIdx.x * 256 + threadIdx.x) * VEC;
    if (e >= count) return;
    INDEX t = e / WIDTH;
    u32 c = (u32)(e % WIDTH);
    Pack<T_X, VEC> p;
    p.load(x + at_x(e));
    i64 row = row_at(t);
    u32 key0 = (u32)rng[0] ^ (u32)key_low, key1 = (u32)rng[1] ^ (u32)key_high;
    u32 sample = (u32)rows[row], token = (u32)rows[row + 1], step = (u32)rng[2];
    u32 bits = kept<VEC>(c, token, sample, step, key0, key1, (u32)below);
    float v[VEC];
#pragma unroll
    for (int k = 0; k < VEC; k++) v[k] = bits >> k & 1 ? f32(p.x[k]) * keep : 0.0f;
    put(p, v);
    p.store(y + at_y(e));
}
