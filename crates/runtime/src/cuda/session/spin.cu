// Delays a stream, so that the host can enqueue the work to be timed behind the delay.
//
// One thread polls the device's clock until `nanoseconds` have passed; it touches no memory. The argument bounds the wait, so a
// host that dies leaves nothing stuck.

extern "C" __global__ void spin(long long nanoseconds) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - begin < (unsigned long long)nanoseconds);
}
