// Gated activations and their gradient.
//
//   y = act(gate) up;  d gate = dy up act'(gate), d up = dy act(gate), and y again where it is asked for
//
// Tensors of one shape at any strides (at_* gives where element e of the row-major order lies); usually gate and up are
// the halves of one row, and so are their gradients. Bytes: each tensor once. A thread takes VEC neighbouring elements
// of every tensor, 16 bytes each; 256 threads a block. `activation` is in activation.cuh. Deterministic.

#if !GRAD

extern "C" __global__ void __launch_bounds__(256) gated(const T_X* gate, const T_X* up, T_X* y, INDEX count) {
    INDEX e = ((INDEX)blockIdx.x * 256 + threadIdx.x) * VEC;
    if (e >= count) return;
    Pack<T_X, VEC> g, u;
    g.load(gate + at_gate(e));
    u.load(up + at_up(e));
    float v[VEC];
#pragma unroll
    for (int k = 0; k < VEC; k++) {
        float value, slope;
        activation(f32(g.x[k]), value, slope);
        v[k] = value * f32(u.x[k]);
    }
    put(g, v);
    g.store(y + at_y(e));
}

#else

extern "C" __global__ void __launch_bounds__(256)
    gated_grad(const T_X* gate, const T_X* up, const T_X* dy, T_X* d_gate, T_X* d_up, T_X* y, INDEX count) {
    INDEX e = ((INDEX)blockIdx.x * 256 + threadIdx.x) * VEC;
    if (e >= count) return;
    Pack<T_X, VEC> g, u, d;
    g.load(gate + at_gate(e));
    u.load(up + at_up(e));
    d.load(dy + at_dy(e));
    float a[VEC], b[VEC], v[VEC];
#pragma unroll
    for (int k = 0; k < VEC; k++) {
        float value, slope;
        activation(f32(g.x[k]), value, slope);
        a[k] = f32(d.x[k]) * f32(u.x[k]) * slope;
        b[k] = f32(d.x[k]) * value;
        v[k] = value * f32(u.x[k]);
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
