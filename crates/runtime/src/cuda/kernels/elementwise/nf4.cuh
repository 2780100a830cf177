// Shared by kernels that read NF4 weights: the values of the codes, and a magnitude. The magnitude of a block of 64 is map[absmax[block]]
// nested[block / 256] + offset. All arithmetic is f32, never contracted: the bits are those of `flatout_ir::nf4` on every device.

__constant__ float NF4[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
    -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
    0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
    0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f,
};

// The magnitude of a block: its decoded code, the largest of its 256, and the mean.
__device__ __forceinline__ float nf4_magnitude(float decoded, float largest, float mean) {
    return __fadd_rn(__fmul_rn(decoded, largest), mean);
}
