// Gated activations and their gradient, followed by dropout if DROP is 1.
//
//   y = act(gate) up;  d gate = dy up act'(gate), d up = dy act(gate), and optionally y again
//   dropped: y keep, and zero with probability p; dy likewise, with the same draws (see dropout.cu)
//
// Tensors of one shape at any strides (at_* map row-major index e to an address); usually gate and up are the halves of one
// row, and so are their gradients. Moves each tensor once. A thread takes VEC neighbouring elements of every tensor, 16 bytes
// each, of a single token of WIDTH elements if DROP is 1; 256 threads per block. `activation` is in activation.cuh.
// Deterministic.
// With FEW tokens, the weight of the product after it is requested ahead (ahead.cuh).

#if FEW
#define AHEAD , NEXT_WEIGHT
#else
#define AHEAD
#endif

#if DROP
#define DRAWS , const int* rng, const int* rows, int key_low, int key_high, int below, float keep

__device__ __forceinline__ u32 kept_of(INDEX e DRAWS) {
    INDEX t = e / WIDTH;
    u32 token = (u32)rows[row_at(2 * t + 1)], sample = (u32)rows[row_at(2 * t)], step = (u32)rng[rng_at(2)];
    u32 key0 = (u32)rng[rng_at(0)] ^ (u32)key_low, key1 = (u32)rng[rng_at(1)] ^ (u32)key_high;
    return kept<VEC>((u32)(e % WIDTH), token, sample, step, key0, key1, (u32)below);
}
#define DROPPED(x, k) (bits >> k & 1 ? (x) * keep : 0.0f)
#define DRAW u32 bits = kept_of(e, rng, rows, key_low, key_high, below, keep)
#else
#define DRAWS
#define DROPPED(x, k) (x)
#define DRAW
#endif

#if !GRAD

extern "C" __global__ void __launch_bounds__(256) gated(const T_X* gate, const T_X* up, T_X* y, INDEX count DRAWS AHEAD) {
    INDEX e = ((INDEX)blockIdx.x * 256 + threadIdx.x) * VEC;
    if (e >= count) return;
    Pack<T_X, VEC> g, u;
    g.load(gate + at_gate(e));
    u.load(up + at_up(e));
#if FEW
    fetch_ahead(next_weight, next_rows, next_pitch, next_bytes);
#endif
    DRAW;
    float v[VEC];
#pragma unroll
    for (int k = 0; k < VEC; k++) {
        float value, slope;
        activation(f32(g.x[k]), value, slope);
        v[k] = DROPPED(value * f32(u.x[k]), k);
    }
    put(g, v);
    g.store(y + at_y(e));
}

#else

extern "C" __global__ void __launch_bounds__(256)
    gated_grad(const T_X* gate, const T_X* up, const T_X* dy, T_X* d_gate, T_X* d_up, T_X* y, INDEX count DRAWS) {
    INDEX e = ((INDEX)blockIdx.x * 256 + threadIdx.x) * VEC;
    if (e >= count) return;
    Pack<T_X, VEC> g, u, d;
    g.load(gate + at_gate(e));
    u.load(up + at_up(e));
    d.load(dy + at_dy(e));
    DRAW;
    float a[VEC], b[VEC], v[VEC];
#pragma unroll
    for (int k = 0; k < VEC; k++) {
        float value, slope, dy_k = DROPPED(f32(d.x[k]), k);
        activation(f32(g.x[k]), value, slope);
        a[k] = dy_k * f32(u.x[k]) * slope;
        b[k] = dy_k * value;
        v[k] = DROPPED(value * f32(u.x[k]), k);
    }
#if HAS_D_GATE
    put(g, a);
    g.store(d_gate + at_d_gate(e));
#endif
#if HAS_D_UP
    put(u, b);
    u.store(d_up + at_d_up(e));
#endif
#if HAS_Y
    put(d, v);
    d.store(y + at_y(e));
#endif
}

#endif
