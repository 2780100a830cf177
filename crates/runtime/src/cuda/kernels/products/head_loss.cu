// The loss of a chunk of logits, and its gradient in place of the logits.
//
//   lse = log sum exp(logits), logp = logits[target] - lse, best = max(logits) - lse, loss = -factor logp,
//   d logits = factor (softmax(logits) - onehot(target)), written where GRAD is 1, over the logits or apart from them.
//
// logits and d logits [rows, V] in T_X with row strides of a multiple of 16 bytes; the padding past V may hold anything. A row with
// target -1 or factor 0 has no loss and a gradient of exact zeros; a target outside the vocabulary gives NaN losses, so that no
// step is applied with it.
//
// Moves the row once in, and once out with GRAD: a thread block of up to 1024 threads takes one row, each thread keeping
// VECTORS accesses of 16 bytes in registers between the pass for the sum and the pass that writes. A row that is too long for
// that (VECTORS 0) is read a second time, from L2. If KNOWN is 1, lse is given and the first pass is skipped; a row without
// loss is then not read at all.
//
// Deterministic: threads fold their elements in order, lanes and warps in fixed trees. If CAP is defined, logits z are cap
// tanh(z / cap), and d logits are multiplied by its derivative, 1 - tanh(z / cap)^2.
//
// Defines: T_X, THREADS, VECTORS, GRAD, KNOWN, CAP.

#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f
#define N (16 / (int)sizeof(T_X))

typedef Pack<T_X, N> Vec;

// A logit after the optional soft cap.
__device__ __forceinline__ float logit(T_X x) {
#ifdef CAP
    return CAP * tanhf(f32(x) / CAP);
#else
    return f32(x);
#endif
}

// A running maximum, and the sum of exponentials relative to it. Scores are in base-2 units.
struct Sum {
    float top;
    float total;
};

__device__ __forceinline__ Sum join(Sum a, Sum b) {
    const float top = fmaxf(a.top, b.top);
    if (top == -infinity()) return {top, 0.0f};
    return {top, a.total * exp2f(a.top - top) + b.total * exp2f(b.top - top)};
}

// Folds the first `count` elements of the pack, which are logits.
__device__ __forceinline__ Sum fold(Sum sum, const Vec& v, int count) {
    float x[N];
    float top = sum.top;
#pragma unroll
    for (int i = 0; i < N; i++) {
        x[i] = i < count ? LOG2E * logit(v.x[i]) : -infinity();
        top = fmaxf(top, x[i]);
    }
    if (top == -infinity()) return sum;
    float total = sum.total * exp2f(sum.top - top);
#pragma unroll
    for (int i = 0; i < N; i++) total += exp2f(x[i] - top);
    return {top, total};
}

__device__ __forceinline__ Sum over_lanes(Sum sum) {
#pragma unroll
    for (int o = 16; o > 0; o /= 2) {
        Sum other = {__shfl_xor_sync(ALL_LANES, sum.top, o), __shfl_xor_sync(ALL_LANES, sum.total, o)};
        sum = join(sum, other);
    }
    return sum;
}

// The total, with the same bits in every thread. Also orders earlier reads before later writes.
__device__ __forceinline__ Sum over_block(Sum sum) {
    __shared__ Sum warps[32];
    sum = over_lanes(sum);
    const int lane = threadIdx.x % 32;
    if (lane == 0) warps[threadIdx.x / 32] = sum;
    __syncthreads();
    Sum none = {-infinity(), 0.0f};
    return over_lanes(lane < THREADS / 32 ? warps[lane] : none);
}

__device__ __forceinline__ Vec slope(const Vec& v, int column, float lse, float factor, int target) {
    float y[N];
#pragma unroll
    for (int i = 0; i < N; i++) {
        const float z = logit(v.x[i]);
        y[i] = factor * exp2f(fmaf(LOG2E, z, -lse));
        if (column + i == target) y[i] -= factor;
#ifdef CAP
        y[i] *= 1.0f - z / CAP * (z / CAP);
#endif
    }
    Vec out;
    put<N>(out, y);
    return out;
}

// Row `first_row` + blockIdx.x of the launch. `factor` is the row's weight times `sign`; logp, lse, best and loss may be null.
extern "C" __global__ void __launch_bounds__(THREADS)
head_rows(const T_X* logits, i64 pitch, T_X* gradient, i64 gradient_pitch, int vocabulary, int first_row, float sign, const int* targets, const float* factors,
          const float* known_lse, float* logps, float* lses, float* bests, float* losses) {
    const int row = first_row + blockIdx.x;
    const T_X* x = logits + (i64)blockIdx.x * pitch;
    [[maybe_unused]] T_X* d = gradient + (i64)blockIdx.x * gradient_pitch;
    const int packs = (vocabulary + N - 1) / N;
    const int target = targets[row];
    const float factor = sign * factors[row];
    const bool counts = target != -1 && factor != 0.0f;

    if (!counts && (KNOWN || (!logps && !lses && !bests))) {
        Vec none;
        zero(none);
        if (GRAD) for (int p = threadIdx.x; p < packs; p += THREADS) none.store(d + p * N);
        if (losses && threadIdx.x == 0) losses[row] = 0.0f;
        return;
    }

    float chosen = __uint_as_float(0x7fc00000u);
    if (threadIdx.x == 0 && target >= 0 && target < vocabulary) chosen = logit(x[target]);

#if VECTORS
    Vec kept[VECTORS];
#pragma unroll
    for (int j = 0; j < VECTORS; j++) {
        const int p = threadIdx.x + j * THREADS;
        if (p < packs) kept[j].load(x + p * N);
    }
#endif

    float lse;
    if (KNOWN) {
        lse = known_lse[row];
    } else {
        Sum sum = {-infinity(), 0.0f};
#if VECTORS
#pragma unroll
        for (int j = 0; j < VECTORS; j++) {
            const int p = threadIdx.x + j * THREADS;
            if (p < packs) sum = fold(sum, kept[j], vocabulary - p * N);
        }
#else
#pragma unroll 4
        for (int p = threadIdx.x; p < packs; p += THREADS) {
            Vec v;
            v.load(x + p * N);
            sum = fold(sum, v, vocabulary - p * N);
        }
#endif
        sum = over_block(sum);
        lse = LN2 * (sum.top + log2f(sum.total));
        if (threadIdx.x == 0) {
            const float logp = target == -1 ? 0.0f : chosen - lse;
            if (logps) logps[row] = logp;
            if (lses) lses[row] = lse;
            // Same bits as logp if the target has the largest logit.
            if (bests) bests[row] = LOG2E * chosen == sum.top ? chosen - lse : LN2 * sum.top - lse;
            if (losses) losses[row] = counts ? -factor * logp : 0.0f;
        }
    }

#if GRAD
    const float shift = LOG2E * lse;
#if VECTORS
#pragma unroll
    for (int j = 0; j < VECTORS; j++) {
        const int p = threadIdx.x + j * THREADS;
        if (p < packs) {
            Vec out = slope(kept[j], p * N, shift, factor, target);
            if (!counts) zero(out);
            out.store(d + p * N);
        }
    }
#else
#pragma unroll 4
    for (int p = threadIdx.x; p < packs; p += THREADS) {
        Vec v;
        v.load(x + p * N);
        Vec out = slope(v, p * N, shift, factor, target);
        if (!counts) zero(out);
        out.store(d + p * N);
    }
#endif
#endif
}

// Sum of all rows' losses: 1024 threads, each in the order of its rows, then a fixed tree, in f64.
extern "C" __global__ void __launch_bounds__(1024) head_sum(const float* losses, int rows, float* sum) {
    __shared__ double parts[1024];
    double total = 0.0;
    for (int row = threadIdx.x; row < rows; row += 1024) total += losses[row];
    parts[threadIdx.x] = total;
    for (int half = 512; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) parts[threadIdx.x] += parts[threadIdx.x + half];
    }
    if (threadIdx.x == 0) *sum = (float)parts[0];
}
