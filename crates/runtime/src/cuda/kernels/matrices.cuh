// Loads and stores of 8 x 8 matrices of 16-bit elements between shared memory and fragments (ldmatrix, stmatrix): lanes 8 i ..
// 8 i + 7 give the addresses of the rows of matrix i.

// Loads four matrices.
__device__ __forceinline__ void ldmatrix(u32 (&to)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
}
// Stores four matrices.
#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void stmatrix(u32 to, const u32 (&from)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(from[0]), "r"(from[1]),
                 "r"(from[2]), "r"(from[3])
                 : "memory");
}
#endif
// Loads two matrices, the first of four registers.
__device__ __forceinline__ void ldmatrix_half(u32 (&to)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(to[0]), "=r"(to[1])
                 : "r"(from)
                 : "memory");
}
// Loads four matrices, each transposed.
__device__ __forceinline__ void ldmatrix_across(u32 (&to)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
}
// Loads two matrices transposed.
__device__ __forceinline__ void ldmatrix_across_half(u32 (&to)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(to[0]), "=r"(to[1])
                 : "r"(from)
                 : "memory");
}
