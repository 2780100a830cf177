// The next token of every sequence, drawn from its logits, and the token's log-probability.
//
// logits f32 [S, VOCAB]; numbers i32 [S, 6]: tokens to draw from, top_k, two words of a seed, the sequence, the place in it;
// shares f32 [S, 2]: temperature, top_p; out f32 [S, 2]: token, log-probability. All dense. As in `ops::sample`.
//
// A block a sequence. Tokens in the order of their likelihood are never sorted: what is kept by top_k and by top_p is a prefix of
// that order, and so is what comes before the token drawn, so each of the three is one search for the first prefix that has a wanted
// number of tokens or a wanted mass. A search descends three levels of a histogram over (largest - logit) / temperature, BINS bins
// each, which hold tokens and masses; one pass over the row fills a level, and all searches share the first. Bins reach as far as
// the least logit, so that tokens spread over them and additions seldom meet. Masses are whole numbers, parts of 2^40 of the
// largest, so sums do not depend on an order: equal numbers give equal tokens. Tokens below e^-SPAN of the largest have no mass.
// Tokens that differ by less than SPAN 2^-30 count as equally likely, and come by their numbers.
// Bytes: the logits from memory, and again from the cache for each pass: 4 passes where only the temperature is given, 8 at most.

#define THREADS 1024
#define BINS 1024
#define SPAN 28.0f
#define LOG2E 1.4426950408889634f
#define UNIT 1099511627776.0f

struct Bin {
    u64 mass;
    u32 count;
};

// Where a search ended: the key of the last token of the prefix, how many of that key belong to it, and the prefix.
struct Found {
    u64 mass;
    u32 key, of_key;
};

struct Histogram {
    u64 mass[BINS];
    u32 count[BINS];
};

__device__ __forceinline__ u64 more(u64 a, u64 b) { return a > b ? a : b; }

// Floats in the order of whole numbers.
__device__ __forceinline__ u32 ordered(float x) {
    u32 bits = __float_as_uint(x);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

struct Row {
    const float* logits;
    int size;
    float top, cold;  // the largest logit; 1 / temperature
    float bins;       // bins of a unit

    __device__ float below(int i) const { return (top - logits[i]) * cold; }
    // 30 bits that grow as tokens become less likely; more where there is no mass.
    __device__ u32 key(float below) const {
        float y = below * bins;
        if (!(y < (float)BINS)) return 0xffffffffu;
        u32 key = 0;
#pragma unroll
        for (int level = 0; level < 3; level++) {
            u32 bin = (u32)y;
            key = key * BINS + bin;
            y = (y - (float)bin) * (float)BINS;
        }
        return key;
    }
    __device__ u64 mass(float below) const { return (u64)(exp2f(-LOG2E * below) * UNIT); }
};

// Tokens and masses of the bins of a level, of those whose key begins as `key` does.
__device__ void fill(Histogram& h, const Row& row, int level, u32 key) {
    __syncthreads();
    for (int i = threadIdx.x; i < BINS; i += THREADS) {
        h.mass[i] = 0;
        h.count[i] = 0;
    }
    __syncthreads();
    const int low = 20 - 10 * level;
#pragma unroll 4
    for (int i = threadIdx.x; i < row.size; i += THREADS) {
        float below = row.below(i);
        u32 of = row.key(below);
        if (of == 0xffffffffu || (level > 0 && of >> (low + 10) != key >> (low + 10))) continue;
        u32 bin = of >> low & (BINS - 1);
        atomicAdd(&h.count[bin], 1u);
        atomicAdd(&h.mass[bin], row.mass(below));
    }
    __syncthreads();
}

// The first bin up to which, beginning with `before`, there are `wanted`: its number, what lies before it, and what it has.
struct Step {
    Bin before, in;
    u32 bin;
};

__device__ Step step(const Histogram& h, Bin before, bool by_mass, u64 wanted) {
    __shared__ Bin warps[THREADS / 32];
    __shared__ Step found;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Bin own = {h.mass[threadIdx.x], h.count[threadIdx.x]}, sum = own;
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
        u64 mass = __shfl_up_sync(ALL_LANES, sum.mass, o);
        u32 count = __shfl_up_sync(ALL_LANES, sum.count, o);
        if (lane >= o) sum.mass += mass, sum.count += count;
    }
    __syncthreads();
    if (lane == 31) warps[warp] = sum;
    if (threadIdx.x == 0) found.bin = BINS;
    __syncthreads();
    for (int i = 0; i < warp; i++) sum.mass += warps[i].mass, sum.count += warps[i].count;
    sum.mass += before.mass;
    sum.count += before.count;
    Bin first = {sum.mass - own.mass, sum.count - own.count};
    u64 reached = by_mass ? sum.mass : (u64)sum.count, missed = by_mass ? first.mass : (u64)first.count;
    if (missed < wanted && wanted <= reached) found = {first, own, threadIdx.x};
    __syncthreads();
    Step result = found;
    __syncthreads();
    return result;
}

// The first prefix with `wanted` tokens or mass, of which there is as much.
__device__ Found search(const Histogram& first, Histogram& deeper, const Row& row, bool by_mass, u64 wanted) {
    Step at = step(first, {0, 0}, by_mass, wanted);
    u32 key = at.bin << 20;
#pragma unroll
    for (int level = 1; level < 3; level++) {
        fill(deeper, row, level, key);
        at = step(deeper, at.before, by_mass, wanted);
        key |= at.bin << (20 - 10 * level);
    }
    u64 each = at.in.mass / (at.in.count ? at.in.count : 1), missing = wanted - (by_mass ? at.before.mass : (u64)at.before.count);
    u64 of_key = !by_mass ? missing : each == 0 ? 1 : (missing + each - 1) / each;
    if (of_key > at.in.count) of_key = at.in.count;
    u64 mass = at.before.mass + (of_key == at.in.count ? at.in.mass : of_key * each);
    return {mass, key, (u32)of_key};
}

// The number of the `nth` token of a key, counted from 1.
__device__ int token_of(const Row& row, u32 key, u32 nth) {
    __shared__ int token;
    __shared__ u32 warps[THREADS / 32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 before = 0;
    if (threadIdx.x == 0) token = row.size - 1;
    for (int from = 0; from < row.size; from += THREADS) {
        int i = from + threadIdx.x;
        bool is_one = i < row.size && row.key(row.below(i)) == key;
        u32 here = (u32)__syncthreads_count(is_one);
        if (before + here < nth) {
            before += here;
            continue;
        }
        u32 same = __ballot_sync(ALL_LANES, is_one);
        if (lane == 0) warps[warp] = __popc(same);
        __syncthreads();
        u32 place = before + __popc(same & ((1u << lane) - 1)) + 1;
        for (int w = 0; w < warp; w++) place += warps[w];
        if (is_one && place == nth) token = i;
        break;
    }
    __syncthreads();
    return token;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    sample(const float* logits, const int* numbers, const float* shares, float* out) {
    __shared__ Histogram first, deeper;
    __shared__ u64 bests[THREADS / 32];
    __shared__ float sums[THREADS / 32], leasts[THREADS / 32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, s = blockIdx.x;
    const int* number = numbers + 6 * s;
    const float temperature = shares[2 * s], top_p = shares[2 * s + 1];
    const int size = number[0] < VOCAB ? number[0] : VOCAB, top_k = number[1];
    if (size <= 0) {
        if (threadIdx.x == 0) {
            out[2 * s] = -1.0f;
            out[2 * s + 1] = 0.0f;
        }
        return;
    }
    Row row = {logits + (i64)s * VOCAB, size, 0.0f, 1.0f, 0.0f};

    // The largest, of several the first, and the least.
    u64 best = 0;
    float least = infinity();
#pragma unroll 8
    for (int i = threadIdx.x; i < size; i += THREADS) {
        best = more(best, (u64)ordered(row.logits[i]) << 32 | (u32)~i);
        least = fminf(least, row.logits[i]);
    }
#pragma unroll
    for (int o = 16; o > 0; o /= 2) {
        best = more(best, __shfl_xor_sync(ALL_LANES, best, o));
        least = fminf(least, __shfl_xor_sync(ALL_LANES, least, o));
    }
    if (lane == 0) {
        bests[warp] = best;
        leasts[warp] = least;
    }
    __syncthreads();
    for (int i = 0; i < THREADS / 32; i++) {
        best = more(best, bests[i]);
        least = fminf(least, leasts[i]);
    }
    int token = (int)~(u32)best;
    row.top = row.logits[token];

    // The sum of probabilities over that of the largest.
    float sum = 0.0f;
#pragma unroll 8
    for (int i = threadIdx.x; i < size; i += THREADS) sum += exp2f(LOG2E * (row.logits[i] - row.top));
    sum = lanes_sum<32>(sum);
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    sum = 0.0f;
    for (int i = 0; i < THREADS / 32; i++) sum += sums[i];

    if (temperature > 0.0f) {
        row.cold = 1.0f / temperature;
        // A little more than there is, so that the last bin has the least logit.
        const float span = fminf(SPAN, (row.top - least) * row.cold * 1.001f);
        row.bins = span > 0.0f ? (float)BINS / span : 0.0f;
        fill(first, row, 0, 0);
        u64 mass = 0;
        u32 count = 0;
        for (int i = lane; i < BINS; i += 32) mass += first.mass[i], count += first.count[i];
#pragma unroll
        for (int o = 16; o > 0; o /= 2) {
            mass += __shfl_xor_sync(ALL_LANES, mass, o);
            count += __shfl_xor_sync(ALL_LANES, count, o);
        }
        if (top_k > 0 && (u32)top_k < count) mass = search(first, deeper, row, false, (u64)top_k).mass;
        if (top_p < 1.0f) {
            u64 wanted = (u64)ceil((double)top_p * (double)mass);
            if (wanted < 1) wanted = 1;
            if (wanted < mass) mass = search(first, deeper, row, true, wanted).mass;
        }
        uint4 words = philox(make_uint4((u32)number[5], 0u, (u32)number[4], 0u), (u32)number[2], (u32)number[3]);
        u64 unit = (u64)words.x << 21 | (u64)(words.y >> 11);
        Found found = search(first, deeper, row, true, __umul64hi(unit << 11, mass) + 1);
        token = token_of(row, found.key, found.of_key);
    }
    if (threadIdx.x == 0) {
        out[2 * s] = (float)token;
        out[2 * s + 1] = row.logits[token] - row.top - logf(sum);
    }
}
