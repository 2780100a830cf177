// Value and derivative of an activation. ACT: 0 SiLU, 1 GELU (tanh approximation), 2 ReLU, 3 GELU (exact).
__device__ __forceinline__ void activation(float x, float& value, float& slope) {
#if ACT == 0
    float s = sigmoid(x);
    value = x * s;
    slope = s * fmaf(x, 1.0f - s, 1.0f);
#elif ACT == 1
    value = gelu(x);
    slope = gelu_slope(x);
#elif ACT == 3
    value = gelu_exact(x);
    slope = gelu_exact_slope(x);
#else
    value = fmaxf(x, 0.0f);
    slope = x > 0.0f ? 1.0f : 0.0f;
#endif
}
