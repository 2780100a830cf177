// Matrices of 8 by 8 numbers of 16 bits from shared memory to the registers that matrix units read: lanes 8 i .. 8 i + 7 give the
// addresses of the rows of matrix i.

// Four.
__device__ __forceinline__ void ldmatrix(u32 (&to)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
}
// The first two of them.
__device__ __forceinline__ void ldmatrix_half(u32 (&to)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(to[0]), "=r"(to[1])
                 : "r"(from)
                 : "memory");
}
// Four, each turned over.
__device__ __forceinline__ void ldmatrix_across(u32 (&to)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
}
// The first two of them.
__device__ __forceinline__ void ldmatrix_across_half(u32 (&to)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(to[0]), "=r"(to[1])
                 : "r"(from)
                 : "memory");
}
