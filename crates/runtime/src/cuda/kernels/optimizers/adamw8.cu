// AdamW with 8-bit moments over a flat region, in one launch.
//
//   m = scale_m * e4m3, v = scale_v * e4m4 (unsigned); the update is that of adamw.cu; m' and v' are encoded again
//
// 256 neighbours are a block with one scale per moment, a power of two: 2^c / 256, with 2^c the smallest not below the block's
// largest magnitude. Dividing is exact. Shifting the bits of the quotient right by 20 or 19, with its exponent rebased to the
// bottom of f32's, leaves the code; a random number added below it rounds stochastically, without bias (philox.cuh; 16 bits by
// t and the element's number, counted from `number` as in adamw.cu). A positive second moment keeps a positive code. The bits
// are those of `flatout_ir::block8`. go = 0 leaves everything as it is.
//
// Tensors are dense; COUNT elements, the last block may be short. Moves 10 bytes in and 6 out per element, 8 with p' in bf16,
// and 16 per block. A warp takes a block: lane l has elements 4 l to 4 l + 3 of either half, so that all accesses are
// coalesced, and the maximum is one instruction over the lanes. Thread blocks run a grid-stride loop if there are more elements
// than the grid has warps. Deterministic.

// Decodes a code divided by 2^120; exact also below f32's smallest normal number.
__device__ __forceinline__ float low_signed(u32 code) { return __uint_as_float((code & 0x7fu) << 20 | (code & 0x80u) << 24); }
__device__ __forceinline__ float low_unsigned(u32 code) { return __uint_as_float((code & 0xffu) << 19); }

// The bits of a scale, from those of the largest magnitude.
__device__ __forceinline__ u32 scale_bits(u32 largest) {
    int above = (int)((largest + 0x7fffffu) >> 23) - 127;
    return (u32)(min(max(above, -90), 127) - 8 + 127) << 23;
}

// The power of two with the opposite exponent.
__device__ __forceinline__ float inverse(u32 scale) { return __uint_as_float((254u << 23) - scale); }

extern "C" __global__ void __launch_bounds__(256, RESIDENT)
    adamw8(const float* p, const float* g, const u32* m, const u32* v, const float* m_scale, const float* v_scale,
           const float* lr, const float* scale, const float* updates, const float* go,
#if HAS_RANK
           const int* rank,
#endif
           float* p_out, u32* m_out, u32* v_out,
           float* m_scale_out, float* v_scale_out, bf16* p_copy, INDEX count, i64 number, float lr_scale, float beta1,
           float beta2, float eps, float decay, double log_beta1, double log_beta2) {
    __shared__ float corrections[2];
    if (threadIdx.x == 0) {
        double t = (double)*updates;
        corrections[0] = (float)(-1.0 / expm1(t * log_beta1));
        corrections[1] = (float)(-1.0 / expm1(t * log_beta2));
    }
    __syncthreads();
    float first = corrections[0], second = corrections[1];
    float rate = *lr * lr_scale, by = *scale, rest1 = 1.0f - beta1, rest2 = 1.0f - beta2;
    bool is_on = *go != 0.0f;
    u32 t = (u32)*updates;
#if HAS_RANK
    number += (i64)*rank * (i64)count;
#endif
    u32 lane = threadIdx.x % 32;
    INDEX blocks = (count + 255) / 256;
    for (INDEX b = (INDEX)blockIdx.x * 8 + threadIdx.x / 32; b < blocks; b += (INDEX)gridDim.x * 8) {
        Pack<float, 4> pp[2], pg[2];
        u32 cm[2], cv[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            INDEX e = b * 256 + h * 128 + lane * 4;
#if WHOLE
            pp[h].load(p + e);
            pg[h].load(g + e);
            cm[h] = m[e / 4];
            cv[h] = v[e / 4];
#else
            cm[h] = cv[h] = 0;
#pragma unroll
            for (int k = 0; k < 4; k++) {
                bool is_in = e + k < count;
                pp[h].x[k] = is_in ? p[e + k] : 0.0f;
                pg[h].x[k] = is_in ? g[e + k] : 0.0f;
                cm[h] |= (is_in ? (u32)((const u8*)m)[e + k] : 0u) << 8 * k;
                cv[h] |= (is_in ? (u32)((const u8*)v)[e + k] : 0u) << 8 * k;
            }
#endif
        }
        float sm = m_scale[b], sv = v_scale[b];
        if (is_on) {
            float nm[2][4], nv[2][4];
            u32 most_m = 0, most_v = 0;
#pragma unroll
            for (int h = 0; h < 2; h++) {
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    float d = pg[h].x[k] * by;
                    float om = low_signed(cm[h] >> 8 * k) * 0x1p120f * sm;
                    float ov = low_unsigned(cv[h] >> 8 * k) * 0x1p120f * sv;
                    float am = fmaf(beta1, om, rest1 * d), av = fmaf(beta2, ov, rest2 * d * d);
                    float step = am * first / (sqrtf(av * second) + eps);
                    pp[h].x[k] = fmaf(-rate, fmaf(decay, pp[h].x[k], step), pp[h].x[k]);
                    nm[h][k] = am;
                    nv[h][k] = av;
                    most_m = max(most_m, __float_as_uint(am) & 0x7fffffffu);
                    most_v = max(most_v, __float_as_uint(av) & 0x7fffffffu);
                }
            }
            u32 bits_m = scale_bits(__reduce_max_sync(ALL_LANES, most_m));
            u32 bits_v = scale_bits(__reduce_max_sync(ALL_LANES, most_v));
            float under_m = inverse(bits_m), under_v = inverse(bits_v);
            sm = __uint_as_float(bits_m);
            sv = __uint_as_float(bits_v);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                uint4 words = rounding(((u64)number + b * 256 + h * 128 + lane * 4) / 4, t);
                u32 drawn[4] = {words.x, words.y, words.z, words.w};
                cm[h] = cv[h] = 0;
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    float low_m = fminf(fabsf(nm[h][k]) * under_m, 0x1p8f) * 0x1p-120f;
                    float low_v = fminf(nv[h][k] * under_v, 0x1p8f) * 0x1p-120f;
                    u32 code_m = (__float_as_uint(low_m) + ((drawn[k] << 16 >> 12) | 8u)) >> 20;
                    u32 code_v = (__float_as_uint(low_v) + ((drawn[k] >> 16 << 3) | 4u)) >> 19;
                    code_m |= __float_as_uint(nm[h][k]) >> 24 & 0x80u;
                    code_v = max(code_v, nv[h][k] > 0.0f ? 1u : 0u);
                    cm[h] |= code_m << 8 * k;
                    cv[h] |= code_v << 8 * k;
                }
            }
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            INDEX e = b * 256 + h * 128 + lane * 4;
#if HAS_COPY
            float np[4] = {pp[h].x[0], pp[h].x[1], pp[h].x[2], pp[h].x[3]};
            Pack<bf16, 4> narrow;
            put(narrow, np);
#endif
#if WHOLE
#if HAS_P
            pp[h].store(p_out + e);
#endif
#if HAS_COPY
            narrow.store(p_copy + e);
#endif
#if HAS_M
            m_out[e / 4] = cm[h];
#endif
#if HAS_V
            v_out[e / 4] = cv[h];
#endif
#else
#pragma unroll
            for (int k = 0; k < 4; k++) {
                if (e + k >= count) continue;
#if HAS_P
                p_out[e + k] = pp[h].x[k];
#endif
#if HAS_COPY
                p_copy[e + k] = narrow.x[k];
#endif
#if HAS_M
                ((u8*)m_out)[e + k] = (u8)(cm[h] >> 8 * k);
#endif
#if HAS_V
                ((u8*)v_out)[e + k] = (u8)(cv[h] >> 8 * k);
#endif
            }
#endif
        }
        if (lane == 0) {
#if HAS_M_SCALE
            m_scale_out[b] = sm;
#endif
#if HAS_V_SCALE
            v_scale_out[b] = sv;
#endif
        }
    }
}
