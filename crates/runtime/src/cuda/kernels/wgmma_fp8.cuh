// wgmma products of 8-bit floats of types T_A and T_B (e4m3 or e5m2), after wgmma.cuh. Both operands are in panels of 128 bytes
// per row, 128 elements along K, and read `along_k`: the instruction has no transposed form. The next 32 of K are 32 bytes
// further. The tensor cores keep about 14 bits of a sum; a caller that needs f32 adds short sums itself.

#define NAME_OF(type) #type
#define NAME(type) NAME_OF(type)

// d [64, N] = (add ? d : 0) + a [64, 32] b [32, N].
template <int N> struct Fp8Product;

// P0 .. P2: the numbers of the operands after the accumulator.
#define FP8_PRODUCT(N, P0, P1, P2)                                                                                    \
    template <> struct Fp8Product<N> {                                                                                \
        static __device__ __forceinline__ void of_shared(float (&d)[N / 2], u64 a, u64 b, int add) {                  \
            asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #P2 ", 0; wgmma.mma_async.sync.aligned.m64n" #N           \
                         "k32.f32." NAME(T_A) "." NAME(T_B) " {" NUMBERS_##N "}, %" #P0 ", %" #P1 ", p, 1, 1; }"      \
                         : OPERANDS_##N                                                                               \
                         : "l"(a), "l"(b), "r"(add));                                                                 \
        }                                                                                                             \
    };
FP8_PRODUCT(64, 32, 33, 34)
FP8_PRODUCT(96, 48, 49, 50)
FP8_PRODUCT(128, 64, 65, 66)
FP8_PRODUCT(192, 96, 97, 98)
FP8_PRODUCT(256, 128, 129, 130)
