// Simulates an exchange between ranks on one GPU: occupies as many blocks as NCCL's kernels, for the predicted time, and moves
// the predicted number of bytes. Only schedules are measured with it.
//
// to [to_words], from [from_words] in 16-byte words: to[i] = from[i % from_words], as if all ranks held the same data. The copy
// is repeated until `moved_words` are moved, and paced so that it ends after `nanoseconds`; the argument bounds the wait.

#define TOGETHER 4

__device__ __forceinline__ unsigned long long now() {
    unsigned long long time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
    return time;
}

extern "C" __global__ void stand_in(
    uint4 *to, const uint4 *from, unsigned to_words, unsigned from_words, long long moved_words,
    long long nanoseconds
) {
    const unsigned long long begin = now();
    const long long mine = (moved_words + gridDim.x - 1) / gridDim.x;
    const long long first = blockIdx.x * mine;
    const long long stride = (long long)blockDim.x * TOGETHER;
    unsigned next = to_words > 0 ? (unsigned)((first + threadIdx.x) % to_words) : 0;
    for (long long done = 0; to_words > 0 && done < mine; done += stride) {
        uint4 values[TOGETHER];
        unsigned at[TOGETHER];
#pragma unroll
        for (int k = 0; k < TOGETHER; ++k) {
            at[k] = next;
            values[k] = from[next < from_words ? next : next % from_words];
            next += blockDim.x;
            if (next >= to_words) next %= to_words;
        }
#pragma unroll
        for (int k = 0; k < TOGETHER; ++k)
            to[at[k]] = values[k];
        const double part = (double)(done + stride < mine ? done + stride : mine) / (double)mine;
        while ((double)(now() - begin) < part * (double)nanoseconds)
            __nanosleep(100);
    }
    while (now() - begin < (unsigned long long)nanoseconds)
        __nanosleep(100);
}
