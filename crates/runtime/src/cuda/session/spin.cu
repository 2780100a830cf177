// Keeps a stream waiting for a time, so that the host can enqueue what is to be timed behind it.
//
// One thread reads the device's clock until `nanoseconds` have passed; it touches no memory. The wait is bounded by its
// argument, so a host that never comes back leaves nothing stuck.

extern "C" __global__ void spin(long long nanoseconds) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - begin < (unsigned long long)nanoseconds);
}
