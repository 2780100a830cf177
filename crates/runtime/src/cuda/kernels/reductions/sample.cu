// Draws the next token of every sequence from its logits, and returns its log-probability.
//
// logits f32 [S, VOCAB]; numbers i32 [S, 6]: tokens to draw from, top_k, two words of a seed, the sequence, the position in it;
// shares f32 [S, 2]: temperature, top_p; out f32 [S, 2]: token, log-probability. All dense. As defined in `ops::sample`.
//
// RANKS thread blocks per sequence form a cluster, so that few sequences use more of the GPU; each takes every RANKS-th stretch
// of the tokens, and they combine results through distributed shared memory. Tokens are never sorted by likelihood: what top_k
// and top_p keep is a prefix of that order, and so are the tokens before the drawn one, so each of the three is a search for
// the first prefix with a given number of tokens or a given mass. A search descends three levels of a histogram over (largest -
// logit) / temperature, with BINS bins each that hold tokens and masses. One pass over the row fills the first level, which all
// searches share; a second one lists the tokens of the bin that a search found, and the deeper levels read this list. Only if the
// bin has more than LIST tokens in a block, as in rows of equal logits, does each level read the row again. Bins reach to the
// smallest logit, so that tokens spread over them and atomic additions seldom collide. Masses are integers, in units of 2^-40 of
// the largest, so sums do not depend on an order: deterministic, equal numbers give equal tokens. Tokens below e^-SPAN of the
// largest have no mass. Tokens that differ by less than SPAN 2^-30 count as equally likely and are ordered by their numbers.
// Moves the logits from memory, and again from cache for each pass: 3 passes if only the temperature is given, 5 with top_k and
// top_p.
//
// Defines: VOCAB, RANKS (1 before sm_90, which has no clusters).

#define THREADS 1024
#define BINS 1024
#define LIST 2048
#define SPAN 28.0f
#define LOG2E 1.4426950408889634f
#define UNIT 1099511627776.0f
#define NO_KEY 0xffffffffu

struct Bin {
    u64 mass;
    u32 count;
};

// The result of a search: the mass of the prefix, the key of its last token, and how many tokens of that key belong to it.
struct Found {
    u64 mass;
    u32 key, of_key;
};

// Masses are two words with a carry, as shared memory adds 32 bits at once but 64 only in a loop of compare-and-swap.
struct Histogram {
    u32 low[BINS], high[BINS], count[BINS];
};

// Tokens of one bin of the first level, of those that this block takes.
struct List {
    u32 keys[LIST], tokens[LIST], count;
};

#if RANKS > 1
#define CLUSTER __cluster_dims__(RANKS, 1, 1)
// A cluster barrier: earlier writes to shared memory are visible to all blocks of the cluster afterwards.
__device__ __forceinline__ void join() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The same address in another block's shared memory (distributed shared memory).
__device__ __forceinline__ u32 place_of(const void* own, int rank) {
    u32 at;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"((u32)__cvta_generic_to_shared(own)), "r"(rank));
    return at;
}
__device__ __forceinline__ u64 of_rank(const u64* own, int rank) {
    u64 x;
    asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(x) : "r"(place_of(own, rank)) : "memory");
    return x;
}
__device__ __forceinline__ u32 of_rank(const u32* own, int rank) {
    u32 x;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(x) : "r"(place_of(own, rank)) : "memory");
    return x;
}
#else
#define CLUSTER
__device__ __forceinline__ void join() { __syncthreads(); }
__device__ __forceinline__ u64 of_rank(const u64* own, int) { return *own; }
__device__ __forceinline__ u32 of_rank(const u32* own, int) { return *own; }
#endif
__device__ __forceinline__ float of_rank(const float* own, int rank) {
    return __uint_as_float(of_rank((const u32*)own, rank));
}

__device__ __forceinline__ u64 more(u64 a, u64 b) { return a > b ? a : b; }

// Maps floats to integers with the same order.
__device__ __forceinline__ u32 ordered(float x) {
    u32 bits = __float_as_uint(x);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

struct Row {
    const float* logits;
    int size, rank;
    float top, cold;  // the largest logit; 1 / temperature
    float bins;       // bins per unit
    float fine;       // the exponent of 2 per unit of a key

    // A 30-bit key that grows as tokens become less likely; larger for tokens without mass. Scaling by 2^20 is exact.
    __device__ __forceinline__ u32 key(float logit) const {
        const float y = (top - logit) * cold * bins;
        return y < (float)BINS ? (u32)(y * (float)(BINS * BINS)) : NO_KEY;
    }
    // Mass of each token with this key.
    __device__ __forceinline__ u64 mass(u32 key) const { return (u64)(exp2f(-fine * (float)key) * UNIT); }
};

// Calls `use` with number and logit of the tokens that this block takes. The loads of BATCH tokens are in flight together.
template <int BATCH, class Use> __device__ __forceinline__ void each_token(const Row& row, Use use) {
    const int step = RANKS * THREADS;
    for (int from = row.rank * THREADS + threadIdx.x; from < row.size; from += BATCH * step) {
        float x[BATCH];
#pragma unroll
        for (int u = 0; u < BATCH; u++) x[u] = u * step < row.size - from ? row.logits[from + u * step] : 0.0f;
#pragma unroll
        for (int u = 0; u < BATCH; u++)
            if (u * step < row.size - from) use(from + u * step, x[u]);
    }
}

// Empties the histogram, after other blocks have read it.
__device__ __forceinline__ void clear(Histogram& h) {
    join();
    h.low[threadIdx.x] = h.high[threadIdx.x] = h.count[threadIdx.x] = 0;
    __syncthreads();
}

__device__ __forceinline__ void add(Histogram& h, u32 bin, u64 mass, bool counts) {
    const u32 low = (u32)mass, old = atomicAdd(&h.low[bin], low);
    const u32 high = (u32)(mass >> 32) + (old + low < low);
    if (high > 0) atomicAdd(&h.high[bin], high);
    if (counts) atomicAdd(&h.count[bin], 1u);
}

// This thread's bin of the whole cluster.
__device__ __forceinline__ Bin collect(const Histogram& h) {
    join();
    Bin own = {0, 0};
#pragma unroll 4
    for (int r = 0; r < RANKS; r++) {
        own.mass += (u64)of_rank(&h.high[threadIdx.x], r) << 32;
        own.mass += of_rank(&h.low[threadIdx.x], r);
        own.count += of_rank(&h.count[threadIdx.x], r);
    }
    return own;
}

// The bin whose tokens are listed, and whether every block's list holds all of its tokens. Equal in all threads of a cluster.
struct Listed {
    u32 bin;
    bool fits;
};

__device__ void list_bin(List& list, Listed& listed, const Row& row, u32 bin) {
    if (listed.bin == bin) return;
    __syncthreads();
    if (threadIdx.x == 0) list.count = 0;
    __syncthreads();
    each_token<8>(row, [&](int token, float logit) {
        const u32 key = row.key(logit);
        if (key >> 20 != bin) return;
        const u32 at = atomicAdd(&list.count, 1u);
        if (at < LIST) list.keys[at] = key, list.tokens[at] = (u32)token;
    });
    join();
    listed = {bin, true};
#pragma unroll
    for (int r = 0; r < RANKS; r++) listed.fits &= of_rank(&list.count, r) <= LIST;
}

// Fills a level's histogram, below the first, with the tokens whose key has the prefix of `key`; returns this thread's bin.
__device__ Bin fill(Histogram& h, const List& list, bool fits, const Row& row, int level, u32 key) {
    clear(h);
    const int low = 20 - 10 * level;
    auto put = [&](u32 of) {
        if (of != NO_KEY && of >> (low + 10) == key >> (low + 10)) add(h, of >> low & (BINS - 1), row.mass(of), true);
    };
    if (fits)
        for (u32 i = threadIdx.x; i < list.count; i += THREADS) put(list.keys[i]);
    else
        each_token<4>(row, [&](int, float logit) { put(row.key(logit)); });
    return collect(h);
}

// The first bin at which the running total from `before` reaches `wanted`: its index, the total before it, and its content.
struct Step {
    Bin before, in;
    u32 bin;
};

__device__ Step step(Bin own, Bin before, bool by_mass, u64 wanted) {
    __shared__ Bin warps[THREADS / 32];
    __shared__ Step found;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Bin sum = own;
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

// The sum of all bins.
__device__ Bin whole(Bin own) {
    __shared__ Bin warps[THREADS / 32];
#pragma unroll
    for (int o = 16; o > 0; o /= 2) {
        own.mass += __shfl_xor_sync(ALL_LANES, own.mass, o);
        own.count += __shfl_xor_sync(ALL_LANES, own.count, o);
    }
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = own;
    __syncthreads();
    Bin all = {0, 0};
    for (int i = 0; i < THREADS / 32; i++) all.mass += warps[i].mass, all.count += warps[i].count;
    return all;
}

// The first prefix with at least `wanted` tokens or mass, given that there is as much.
__device__ Found search(Bin first, Histogram& h, List& list, Listed& listed, const Row& row, bool by_mass, u64 wanted) {
    Step at = step(first, {0, 0}, by_mass, wanted);
    u32 key = at.bin << 20;
    list_bin(list, listed, row, at.bin);
#pragma unroll
    for (int level = 1; level < 3; level++) {
        Bin own = fill(h, list, listed.fits, row, level, key);
        at = step(own, at.before, by_mass, wanted);
        key |= at.bin << (20 - 10 * level);
    }
    u64 each = at.in.mass / (at.in.count ? at.in.count : 1), missing = wanted - (by_mass ? at.before.mass : (u64)at.before.count);
    u64 of_key = !by_mass ? missing : each == 0 ? 1 : (missing + each - 1) / each;
    if (of_key > at.in.count) of_key = at.in.count;
    u64 mass = at.before.mass + (of_key == at.in.count ? at.in.mass : of_key * each);
    return {mass, key, (u32)of_key};
}

// The `nth` token with a key, counted from 1 by token number; called by the first block of a cluster. Few tokens share a key:
// they are collected in any order, and the one with `nth` - 1 smaller numbers is taken. If there are more than BINS, stretches
// of the row are counted in order.
__device__ int token_of(Histogram& h, const List& list, bool fits, const Row& row, u32 key, u32 nth) {
    __shared__ int token;
    __shared__ u32 found;
    u32* alike = h.count;
    if (threadIdx.x == 0) token = row.size - 1, found = 0;
    __syncthreads();
    auto put = [&](u32 of, u32 token) {
        if (of != key) return;
        const u32 at = atomicAdd(&found, 1u);
        if (at < BINS) alike[at] = token;
    };
    if (fits) {
        for (int r = 0; r < RANKS; r++) {
            const u32 count = of_rank(&list.count, r);
            for (u32 i = threadIdx.x; i < count; i += THREADS) put(of_rank(&list.keys[i], r), of_rank(&list.tokens[i], r));
        }
    } else {
        for (int i = threadIdx.x; i < row.size; i += THREADS) put(row.key(row.logits[i]), (u32)i);
    }
    __syncthreads();
    if (found <= BINS) {
        u32 smaller = 0;
        if (threadIdx.x < found)
            for (u32 i = 0; i < found; i++) smaller += alike[i] < alike[threadIdx.x];
        if (threadIdx.x < found && smaller + 1 == nth) token = (int)alike[threadIdx.x];
    } else {
        u32 before = 0;
        for (int from = 0; from < row.size; from += THREADS) {
            int i = from + threadIdx.x;
            bool is_one = i < row.size && row.key(row.logits[i]) == key;
            u32 here = (u32)__syncthreads_count(is_one);
            if (before + here >= nth) {
                // The nth token lies in this stretch: count those of earlier threads.
                h.low[threadIdx.x] = is_one;
                __syncthreads();
                u32 place = before + 1;
                if (is_one)
                    for (int j = 0; j < (int)threadIdx.x; j++) place += h.low[j];
                if (is_one && place == nth) token = i;
                break;
            }
            before += here;
        }
    }
    __syncthreads();
    return token;
}

extern "C" __global__ void CLUSTER __launch_bounds__(THREADS, 1)
    sample(const float* logits, const int* numbers, const float* shares, float* out) {
    __shared__ Histogram h;
    __shared__ List list;
    __shared__ u64 bests[THREADS / 32], best_here;
    __shared__ float sums[THREADS / 32], leasts[THREADS / 32], least_here, sum_here;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, s = blockIdx.x / RANKS, rank = blockIdx.x % RANKS;
    const int* number = numbers + 6 * s;
    const float temperature = shares[2 * s], top_p = shares[2 * s + 1];
    const int size = number[0] < VOCAB ? number[0] : VOCAB, top_k = number[1];
    if (size <= 0) {
        if (threadIdx.x == 0 && rank == 0) {
            out[2 * s] = -1.0f;
            out[2 * s + 1] = 0.0f;
        }
        return;
    }
    Row row = {logits + (i64)s * VOCAB, size, rank, 0.0f, 1.0f, 1.0f, 0.0f};

    // The largest logit, the first among equals, and the smallest.
    u64 best = 0;
    float least = infinity();
    each_token<8>(row, [&](int i, float logit) {
        best = more(best, (u64)ordered(logit) << 32 | (u32)~i);
        least = fminf(least, logit);
    });
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
    if (threadIdx.x == 0) {
        for (int i = 0; i < THREADS / 32; i++) {
            best = more(best, bests[i]);
            least = fminf(least, leasts[i]);
        }
        best_here = best;
        least_here = least;
    }
    join();
    for (int r = 0; r < RANKS; r++) {
        best = more(best, of_rank(&best_here, r));
        least = fminf(least, of_rank(&least_here, r));
    }
    int token = (int)~(u32)best;
    row.top = row.logits[token];

    // The sum of probabilities relative to that of the largest; in the same pass the first level of the histogram, if a token is
    // drawn. It counts tokens only for top_k.
    const bool draws = temperature > 0.0f;
    if (draws) {
        row.cold = 1.0f / temperature;
        // Slightly larger than the actual span, so that the smallest logit is in the last bin.
        const float span = fminf(SPAN, (row.top - least) * row.cold * 1.001f);
        row.bins = span > 0.0f ? (float)BINS / span : 1.0f;
        row.fine = LOG2E / (row.bins * (float)(BINS * BINS));
        clear(h);
    }
    float sum = 0.0f;
    each_token<8>(row, [&](int, float logit) {
        sum += exp2f(LOG2E * (logit - row.top));
        if (!draws) return;
        const u32 key = row.key(logit);
        if (key != NO_KEY) add(h, key >> 20, row.mass(key), top_k > 0);
    });
    sum = lanes_sum<32>(sum);
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        sum = 0.0f;
        for (int i = 0; i < THREADS / 32; i++) sum += sums[i];
        sum_here = sum;
    }
    join();
    sum = 0.0f;
    for (int r = 0; r < RANKS; r++) sum += of_rank(&sum_here, r);

    if (draws) {
        const Bin first = collect(h);
        Listed listed = {NO_KEY, false};
        Bin all = whole(first);
        u64 mass = all.mass;
        if (top_k > 0 && (u32)top_k < all.count) mass = search(first, h, list, listed, row, false, (u64)top_k).mass;
        if (top_p < 1.0f) {
            u64 wanted = (u64)ceil((double)top_p * (double)mass);
            if (wanted < 1) wanted = 1;
            if (wanted < mass) mass = search(first, h, list, listed, row, true, wanted).mass;
        }
        uint4 words = philox(make_uint4((u32)number[5], 0u, (u32)number[4], 0u), (u32)number[2], (u32)number[3]);
        u64 unit = (u64)words.x << 21 | (u64)(words.y >> 11);
        Found found = search(first, h, list, listed, row, true, __umul64hi(unit << 11, mass) + 1);
        // The other blocks have finished reading this block's bins.
        join();
        if (rank == 0) token = token_of(h, list, listed.fits, row, found.key, found.of_key);
    }
    if (threadIdx.x == 0 && rank == 0) {
        out[2 * s] = (float)token;
        out[2 * s + 1] = row.logits[token] - row.top - logf(sum);
    }
    // A block must not exit while others read its shared memory.
    join();
}
