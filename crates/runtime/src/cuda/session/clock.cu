// Accumulates on the device how long spans of a stream take, such as a plan or a launch's wait for an exchange.
//
// clock: for span s, u64 word s is its start, u64 word 2 + s the summed nanoseconds of all ended spans, and u32 half s of word
// 4 the same in microseconds (wraps around after 71 minutes, so the reader takes differences). One thread per launch; stream
// order makes it race-free.

__device__ __forceinline__ unsigned long long now() {
    unsigned long long time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
    return time;
}

extern "C" __global__ void begin(unsigned long long *clock, int span) {
    clock[span] = now();
}

extern "C" __global__ void end(unsigned long long *clock, int span) {
    unsigned long long sum = clock[2 + span] + (now() - clock[span]);
    clock[2 + span] = sum;
    ((unsigned *)(clock + 4))[span] = (unsigned)(sum / 1000);
}
