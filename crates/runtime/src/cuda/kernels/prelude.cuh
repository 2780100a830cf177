// Shared by all kernels: element types, vectors of them, sums over threads, activations. Arithmetic is f32; bf16 is rounded to
// nearest even. Pointers may alias exactly (in place), so nothing is __restrict__: a thread reads all it needs before it
// writes.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct bf16 {
    u16 bits;
};

// 8-bit floats with 4 + 3 and 5 + 2 bits of exponent and mantissa.
struct e4m3 {
    u8 bits;
};
struct e5m2 {
    u8 bits;
};

__device__ __forceinline__ float f32(float x) { return x; }
__device__ __forceinline__ float f32(u8 x) { return (float)x; }
__device__ __forceinline__ float f32(bf16 x) { return __uint_as_float((u32)x.bits << 16); }

// Places exponent and mantissa where f32 has them and rescales by a power of two: exact, also for subnormals.
__device__ __forceinline__ float f32(e4m3 x) {
    u32 size = x.bits & 0x7fu;
    float y = size == 0x7fu ? __uint_as_float(0x7fc00000u) : __uint_as_float(size << 20) * 0x1p120f;
    return x.bits & 0x80u ? -y : y;
}
__device__ __forceinline__ float f32(e5m2 x) {
    u32 size = x.bits & 0x7fu;
    float y = size >= 0x7cu ? __uint_as_float(size == 0x7cu ? 0x7f800000u : 0x7fc00000u)
                            : __uint_as_float(size << 21) * 0x1p112f;
    return x.bits & 0x80u ? -y : y;
}

template <class Element> struct As;
template <> struct As<float> {
    static __device__ __forceinline__ float of(float x) { return x; }
};
template <> struct As<bf16> {
    static __device__ __forceinline__ bf16 of(float x) {
        bf16 y;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
        return y;
    }
};

#if __CUDA_ARCH__ >= 890
// Rounds to nearest even and saturates at the largest finite value.
template <> struct As<e4m3> {
    static __device__ __forceinline__ e4m3 of(float x) {
        u16 pair;
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
        return {(u8)pair};
    }
};
template <> struct As<e5m2> {
    static __device__ __forceinline__ e5m2 of(float x) {
        u16 pair;
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
        return {(u8)pair};
    }
};
#endif

// Packs two bf16 into a word, the first in the low half.
__device__ __forceinline__ u32 bf16x2(float low, float high) {
    u32 word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

// The value after a round trip through Element.
template <class Element> __device__ __forceinline__ float rounded(float x) { return f32(As<Element>::of(x)); }

// Contiguous elements in their memory format, moved in accesses of at most 16 bytes.
template <int Bytes> struct Word;
template <> struct Word<1> { typedef u8 type; };
template <> struct Word<2> { typedef u16 type; };
template <> struct Word<4> { typedef u32 type; };
template <> struct Word<8> { typedef uint2 type; };
template <> struct Word<16> { typedef uint4 type; };

template <class Element, int Size> struct Pack {
    static const int Bytes = (int)sizeof(Element) * Size;
    static const int Step = Bytes < 16 ? Bytes : 16;
    static const int Count = Bytes / Step;
    typedef typename Word<Step>::type Access;
    union {
        Access words[Count];
        Element x[Size];
    };

    __device__ __forceinline__ Pack() {}
    __device__ __forceinline__ void load(const Element* p) {
#pragma unroll
        for (int i = 0; i < Count; i++) words[i] = reinterpret_cast<const Access*>(p)[i];
    }
    __device__ __forceinline__ void store(Element* p) const {
#pragma unroll
        for (int i = 0; i < Count; i++) reinterpret_cast<Access*>(p)[i] = words[i];
    }
    __device__ __forceinline__ void all(Element value) {
#pragma unroll
        for (int i = 0; i < Size; i++) x[i] = value;
    }
};

template <class Element, int Size> __device__ __forceinline__ void zero(Pack<Element, Size>& p) {
    p.all(As<Element>::of(0.0f));
}

// Rounds values into a pack.
template <int Size> __device__ __forceinline__ void put(Pack<float, Size>& p, const float (&y)[Size]) {
#pragma unroll
    for (int i = 0; i < Size; i++) p.x[i] = y[i];
}
template <int Size> __device__ __forceinline__ void put(Pack<int, Size>& p, const int (&y)[Size]) {
#pragma unroll
    for (int i = 0; i < Size; i++) p.x[i] = y[i];
}
#if __CUDA_ARCH__ >= 890
template <int Size> __device__ __forceinline__ void put(Pack<e4m3, Size>& p, const float (&y)[Size]) {
#pragma unroll
    for (int i = 0; i < Size; i++) p.x[i] = As<e4m3>::of(y[i]);
}
template <int Size> __device__ __forceinline__ void put(Pack<e5m2, Size>& p, const float (&y)[Size]) {
#pragma unroll
    for (int i = 0; i < Size; i++) p.x[i] = As<e5m2>::of(y[i]);
}
#endif
template <int Size> __device__ __forceinline__ void put(Pack<bf16, Size>& p, const float (&y)[Size]) {
    if (Size == 1) {
        p.x[0] = As<bf16>::of(y[0]);
    } else {
#pragma unroll
        for (int i = 0; i + 1 < Size; i += 2) {
            u32 pair = bf16x2(y[i], y[i + 1]);
            p.x[i].bits = (u16)pair;
            p.x[i + 1].bits = (u16)(pair >> 16);
        }
    }
}

#define ALL_LANES 0xffffffffu

// Sum over Width neighbouring lanes, with the same bits in each: addition commutes, and every lane uses the same tree.
template <int Width> __device__ __forceinline__ float lanes_sum(float x) {
#pragma unroll
    for (int o = Width / 2; o > 0; o /= 2) x += __shfl_xor_sync(ALL_LANES, x, o);
    return x;
}

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }

// Uses the hardware's exponential and reciprocal, each within 2 ulp.
__device__ __forceinline__ float sigmoid(float x) {
    float e, y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(-1.44269504f * x));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.0f + e));
    return y;
}

#define GELU_INNER 0.797884560802865f
#define GELU_CUBIC 0.044715f

// 1 + tanh(u) = 2 sigmoid(2 u) keeps its precision where tanh is near -1.
__device__ __forceinline__ float gelu_gate(float x) {
    return sigmoid(2.0f * GELU_INNER * x * fmaf(GELU_CUBIC * x, x, 1.0f));
}

__device__ __forceinline__ float silu(float x) { return x * sigmoid(x); }
__device__ __forceinline__ float silu_slope(float x) {
    float s = sigmoid(x);
    return s * fmaf(x, 1.0f - s, 1.0f);
}
__device__ __forceinline__ float gelu(float x) { return x * gelu_gate(x); }
__device__ __forceinline__ float gelu_slope(float x) {
    float s = gelu_gate(x);
    float inner = 2.0f * GELU_INNER * fmaf(3.0f * GELU_CUBIC * x, x, 1.0f);
    return s * fmaf(x * inner, 1.0f - s, 1.0f);
}
// Exact GELU from the normal distribution: its cumulative probability at x, and e = exp(-x^2 / 2), from which its density
// follows. The probability beyond |x| is e times a polynomial in t = 1 / (1 + 0.3 |x|), fitted with relative error 1e-7 up to
// |x| = 12, where it is 2e-33; a library function is so expensive that GELU took twice as long as its memory traffic.
__device__ __forceinline__ float normal_share(float x, float& e) {
    float t = __fdividef(1.0f, fmaf(0.3f, fabsf(x), 1.0f));
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(-0.72134752f * x * x));
    float p = 0.03674206f;
    p = fmaf(p, t, -0.16168134f);
    p = fmaf(p, t, 0.21413635f);
    p = fmaf(p, t, -0.06092304f);
    p = fmaf(p, t, 0.13244175f);
    p = fmaf(p, t, 0.09871877f);
    p = fmaf(p, t, 0.12094914f);
    p = fmaf(p, t, 0.11961627f);
    float beyond = p * t * e;
    return x < 0.0f ? beyond : 1.0f - beyond;
}
__device__ __forceinline__ float gelu_exact(float x) {
    float e;
    return x * normal_share(x, e);
}
__device__ __forceinline__ float gelu_exact_slope(float x) {
    float e, share = normal_share(x, e);
    return fmaf(0.398942280f * x, e, share);
}

// Reduces to half turns in [-1, 1] in f64: sine and cosine without the slow path for large arguments.
__device__ __forceinline__ float half_turns(double t) { return (float)(t - 2.0 * rint(0.5 * t)); }

// Converts a value computed in f64 to i32: truncates, saturates, and maps NaN to 0.
__device__ __forceinline__ int whole(double x) { return x == x ? (int)x : 0; }

__device__ __forceinline__ float is_finite(float x) {
    return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u ? 1.0f : 0.0f;
}

// The smallest power of two by which a tensor of this largest magnitude fits an 8-bit type whose maximum is 1.75 times 2^top; 1
// if the magnitude is unknown.
__device__ __forceinline__ float fp8_scale(float amax, u32 top) {
    if (!(amax > 0.0f) || is_finite(amax) == 0.0f) return 1.0f;
    u32 exponent = (__float_as_uint(amax) + 0x1fffffu) >> 23;
    return __uint_as_float((exponent > top + 1u ? exponent - top : 1u) << 23);
}
