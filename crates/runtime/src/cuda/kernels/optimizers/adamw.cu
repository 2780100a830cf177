// AdamW over a parameter or a flat region of many, in one launch.
//
//   g' = scale g; m' = b1 m + (1 - b1) g'; v' = b2 v + (1 - b2) g'^2
//   p' = p - lr (m' / (1 - b1^t) / (sqrt(v' / (1 - b2^t)) + eps) + decay p)
//
// t (the number of applied updates including this one), lr, scale and go are read from device memory; go = 0 leaves p, m and v
// as they are. Tensors of one shape at any strides, usually flat f32. Moves 16 bytes in and 12 out per f32 element, 14 with p'
// in bf16 as well; moments in bf16 take 4 fewer each way. These are rounded stochastically (philox.cuh) by t and the element's
// number, counted from `number`; p' is computed from the unrounded moments. Four elements share a draw. If ranks update shares
// of `count` elements each, `number` is that of rank 0's first element. The grid is one wave, what the device holds at once:
// the two bias corrections are computed in f64 by one thread per block (an f32 power loses four digits of 1 - b2^t in the first
// steps), then threads run a grid-stride loop with VEC elements of all four tensors in flight each. Deterministic.

extern "C" __global__ void __launch_bounds__(256, 4)
    adamw(const T_X* p, const T_X* g, const T_M* m, const T_M* v, const T_X* lr, const T_X* scale, const T_X* updates,
          const T_X* go,
#if HAS_RANK
          const int* rank,
#endif
          T_X* p_out, T_M* m_out, T_M* v_out, bf16* p_copy, INDEX count, i64 number, float lr_scale, float beta1, float beta2,
          float eps, float decay, double log_beta1, double log_beta2) {
    __shared__ float corrections[2];
    if (threadIdx.x == 0) {
        double t = (double)f32(*updates);
        corrections[0] = (float)(-1.0 / expm1(t * log_beta1));
        corrections[1] = (float)(-1.0 / expm1(t * log_beta2));
    }
    __syncthreads();
    float first = corrections[0], second = corrections[1];
    float rate = f32(*lr) * lr_scale, by = f32(*scale), rest1 = 1.0f - beta1, rest2 = 1.0f - beta2;
    bool is_on = f32(*go) != 0.0f;
    u32 t = (u32)f32(*updates);
#if HAS_RANK
    number += (i64)*rank * (i64)count;
#endif
    for (INDEX e = ((INDEX)blockIdx.x * 256 + threadIdx.x) * VEC; e < count; e += (INDEX)gridDim.x * 256 * VEC) {
        Pack<T_X, VEC> pp, pg;
        Pack<T_M, VEC> pm, pv;
        pp.load(p + at_p(e));
        pg.load(g + at_g(e));
        pm.load(m + at_m(e));
        pv.load(v + at_v(e));
        float np[VEC], nm[VEC], nv[VEC];
#pragma unroll
        for (int k = 0; k < VEC; k++) {
            np[k] = f32(pp.x[k]);
            nm[k] = f32(pm.x[k]);
            nv[k] = f32(pv.x[k]);
            if (is_on) {
                float d = f32(pg.x[k]) * by;
                nm[k] = fmaf(beta1, nm[k], rest1 * d);
                nv[k] = fmaf(beta2, nv[k], rest2 * d * d);
                float step = nm[k] * first / (sqrtf(nv[k] * second) + eps);
                // Explicit fma: the compiler's choice would depend on which outputs are written.
                np[k] = fmaf(-rate, fmaf(decay, np[k], step), np[k]);
            }
        }
#if HAS_P
        put(pp, np);
        pp.store(p_out + at_p_out(e));
#endif
#if HAS_COPY
        Pack<bf16, VEC> narrow;
        put(narrow, np);
        narrow.store(p_copy + at_p_copy(e));
#endif
#if DRAWN
        // VEC elements from a multiple of VEC share one draw of four.
        u64 first = (u64)number + e;
        uint4 words = rounding(first / 4, t);
        u32 drawn[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int k = 0; k < VEC; k++) {
            u32 at = (u32)(first + k) % 4;
            u32 word = VEC == 4 ? drawn[k % 4] : at == 0 ? drawn[0] : at == 1 ? drawn[1] : at == 2 ? drawn[2] : drawn[3];
            pm.x[k].bits = (u16)((__float_as_uint(nm[k]) + (word & 0xffffu)) >> 16);
            pv.x[k].bits = (u16)((__float_as_uint(nv[k]) + (word >> 16)) >> 16);
        }
#else
        put(pm, nm);
        put(pv, nv);
#endif
#if HAS_M
        pm.store(m_out + at_m_out(e));
#endif
#if HAS_V
        pv.store(v_out + at_v_out(e));
#endif
    }
}
