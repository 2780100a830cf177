// Brings the beginning of every row of the weight that the next launch multiplies by into L2, so that memory is busy while this
// kernel ends and the next one begins. A request takes no register and is not waited for. The rows are dealt to all blocks, so
// that a product finds a part of whatever it begins with. Nothing before sm_90, which has no requests of many bytes.
//
// NEXT_WEIGHT declares the parameters, which `Value::NextWeight` and `NextWeight::block` fill; without a weight it has no rows.

#define NEXT_WEIGHT const u8 *next_weight, u32 next_rows, u32 next_pitch, u32 next_bytes

__device__ __forceinline__ void fetch_ahead(NEXT_WEIGHT) {
#if __CUDA_ARCH__ >= 900
    const u32 blocks = gridDim.x * gridDim.y * gridDim.z;
    const u32 block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    for (u32 row = threadIdx.x * blocks + block; row < next_rows; row += blockDim.x * blocks)
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" : : "l"(next_weight + (u64)row * next_pitch), "r"(next_bytes));
#endif
}
