// Adds up on the device how long spans between two points of a stream take, such as a plan, or a launch's wait for an exchange.
//
// clock: for span s, word s is when it began, word 2 + s the nanoseconds of all that have ended (u64), and half s of word 4 the
// same in microseconds (u32, which wraps around after 71 minutes: its reader takes differences). One thread each; the stream
// orders them.

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
