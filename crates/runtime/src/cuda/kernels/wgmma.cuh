// Hopper's own instructions, sm_90a: mbarriers in shared memory, TMA copies, wgmma products of a warpgroup.
//
// A tile in shared memory is a row of panels; a panel is [rows, 64] bf16 with 128 bytes per row, its 16-byte pieces swizzled
// (piece p of row r is stored at p ^ (r % 8)), as TMA writes it and the tensor cores read it. Panels are 1024-byte aligned.
// Element (r, c) of a tile is in panel c / 64.
//
// A product's accumulator is float d[N / 2]: thread t of the warpgroup, warp w = t / 32, lane l = t % 32, holds at
// d[4 j + 2 i + e] row 16 w + l / 4 + 8 i, column 8 j + 2 (l % 4) + e. Rounded to bf16 in pairs, d[8 k ..] is the A
// operand of columns [16 k, 16 k + 16) of a next product: `operand`.
// Products are asynchronous: `arrive` before the first after registers or shared memory changed, `commit` closes a group,
// `wait<n>` returns when at most n groups are in flight; `hold` keeps the compiler from moving uses of an accumulator across.
// The assembler still hoists a wait above arithmetic that does not need it, up to the last branch: work that should overlap a
// product must come before a branch (a loop's end), and its wait after it. Registers reassigned by `registers_up` (setmaxnreg)
// only take effect if each role is one side of one branch and nothing in it traps; otherwise the compiler spills.
//
// Defines: SPIN_LIMIT (optional, to find a deadlock) ends a wait after that many polls.

struct alignas(64) TensorMap {
    u64 opaque[16];
};

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// mbarriers: `arrivals` arrivals and all announced bytes complete a phase; phases alternate in parity, starting with 0.

__device__ __forceinline__ void barrier_init(u64* bar, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(arrivals) : "memory");
}
// Call after the inits, before any other thread or TMA uses the barriers; then __syncthreads.
__device__ __forceinline__ void barrier_init_done() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(u64* bar) {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(shared_address(bar)) : "memory");
}
// Arrives at the corresponding barrier of another block of the cluster. Without memory ordering: it only follows reads by
// products, which have completed, and a fence with cluster scope costs a microsecond.
__device__ __forceinline__ void barrier_arrive_at(u64* bar, u32 rank) {
    asm volatile("{ .reg .b32 at; mapa.shared::cluster.u32 at, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [at]; }" ::"r"(
                     shared_address(bar)),
                 "r"(rank)
                 : "memory");
}
// Arrives, and announces the bytes that TMA will write.
__device__ __forceinline__ void barrier_expect(u64* bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)),
                 "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ bool barrier_is_past(u64* bar, u32 parity) {
    u32 past;
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p; }"
                 : "=r"(past)
                 : "r"(shared_address(bar)), "r"(parity)
                 : "memory");
    return past;
}
// Whether the phase of this parity is complete, without waiting.
__device__ __forceinline__ bool barrier_was_past(u64* bar, u32 parity) {
    u32 past;
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p; }"
                 : "=r"(past)
                 : "r"(shared_address(bar)), "r"(parity)
                 : "memory");
    return past;
}
// Returns when the phase of this parity is complete.
__device__ __forceinline__ void barrier_wait(u64* bar, u32 parity) {
#ifdef SPIN_LIMIT
    for (u32 polls = 0; polls < SPIN_LIMIT && !barrier_is_past(bar, parity); polls++) {}
#else
    while (!barrier_is_past(bar, parity)) {}
#endif
}

// Named barriers 1 to 15 among `threads` threads; 0 is __syncthreads.
__device__ __forceinline__ void named_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// This block's rank in its cluster, and a barrier over all threads of the cluster.
__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Sets the registers per thread of this warpgroup from here on; all four warps must call it, and the block's total must fit.
template <int Count> __device__ __forceinline__ void registers_up() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}
template <int Count> __device__ __forceinline__ void registers_down() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}

// Orders earlier generic writes to shared memory before later products and TMA copies.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// TMA copies.

__device__ __forceinline__ void map_prefetch(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// TMA load of the map's box at these coordinates (innermost first) into shared memory, zero-filled outside the tensor. The
// barrier receives the bytes of the whole box.
__device__ __forceinline__ void bulk_load(void* to, const TensorMap* map, u64* bar, int c0, int c1, int c2) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, "
                 "%5}], [%2];" ::"r"(shared_address(to)),
                 "l"(map), "r"(shared_address(bar)), "r"(c0), "r"(c1), "r"(c2)
                 : "memory");
}
__device__ __forceinline__ void bulk_load(void* to, const TensorMap* map, u64* bar, int c0, int c1, int c2, int c3) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, "
                 "%5, %6}], [%2];" ::"r"(shared_address(to)),
                 "l"(map), "r"(shared_address(bar)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
                 : "memory");
}
// As above, multicast to the blocks of the cluster whose bits are set; the corresponding barrier of each receives the bytes.
__device__ __forceinline__ void bulk_load_all(void* to, const TensorMap* map, u64* bar, int c0, int c1, int c2, u32 blocks) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared_address(to)),
                 "l"(map), "r"(shared_address(bar)), "r"(c0), "r"(c1), "r"(c2), "h"((u16)blocks)
                 : "memory");
}
// TMA store from shared memory to the map's box; clipped at the tensor.
__device__ __forceinline__ void bulk_store(const TensorMap* map, const void* from, int c0, int c1, int c2) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
                 "r"(shared_address(from)), "r"(c0), "r"(c1), "r"(c2)
                 : "memory");
}
// Bulk copy of contiguous bytes (a multiple of 16, 16-byte aligned) without a map.
__device__ __forceinline__ void bulk_load_run(void* to, const void* from, u64* bar, u32 bytes) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(bar))
                 : "memory");
}
// Bulk reduction: adds contiguous f32 in shared memory to device memory; the order of additions is not fixed.
__device__ __forceinline__ void bulk_add_run(float* to, const void* from, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
                 "r"(shared_address(from)), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until at most `Pending` groups of this thread still read shared memory.
template <int Pending> __device__ __forceinline__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
}
// Waits until at most `Pending` groups of this thread are incomplete.
template <int Pending> __device__ __forceinline__ void bulk_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(Pending) : "memory");
}

// Descriptors of operands in panels: bits 0-13 address, 16-29 leading, 32-45 stride offset, all / 16; 62-63 swizzle. Adding d /
// 16 to a descriptor advances it by d bytes.

// Rows along M or N, 64 columns along K contiguous. The next 16 of K are 32 bytes further, the next 8 rows 1024.
__device__ __forceinline__ u64 along_k(const void* panel) {
    return (u64)1 << 62 | (u64)(1024 / 16) << 32 | (u64)1 << 16 | (u64)((shared_address(panel) & 0x3ffff) / 16);
}
// Rows along K, columns along M or N contiguous: the product reads it transposed. The next 16 of K are 16 rows of 128 bytes
// further; columns past the first 64 come from panels `panel_bytes` apart.
__device__ __forceinline__ u64 along_mn(const void* panel, u32 panel_bytes) {
    return (u64)1 << 62 | (u64)(1024 / 16) << 32 | (u64)(panel_bytes / 16) << 16 |
           (u64)((shared_address(panel) & 0x3ffff) / 16);
}

// Products.

__device__ __forceinline__ void product_arrive() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void product_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Pending> __device__ __forceinline__ void product_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}
template <int Count> __device__ __forceinline__ void hold(float (&d)[Count]) {
#pragma unroll
    for (int i = 0; i < Count; i++) asm volatile("" : "+f"(d[i])::"memory");
}
template <int Count> __device__ __forceinline__ void hold(u32 (&d)[Count]) {
#pragma unroll
    for (int i = 0; i < Count; i++) asm volatile("" : "+r"(d[i])::"memory");
}

// Columns [16 k, 16 k + 16) of an accumulator as the A operand.
template <int Count> __device__ __forceinline__ void operand(u32 (&a)[4], const float (&d)[Count], int k) {
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = bf16x2(d[8 * k + 2 * i], d[8 * k + 2 * i + 1]);
}

// Transposes an 8 x 8 matrix of bf16, a pair per lane.
__device__ __forceinline__ u32 matrix_transpose(u32 x) {
    u32 y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// Transposes words within a quad: lane c gets word c of each lane, a[i] from lane i.
__device__ __forceinline__ void quad_transpose(u32 (&a)[4], int c) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const u32 got = __shfl_xor_sync(ALL_LANES, c & 2 ? a[i] : a[i + 2], 2);
        a[i] = c & 2 ? got : a[i];
        a[i + 2] = c & 2 ? a[i + 2] : got;
    }
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const u32 got = __shfl_xor_sync(ALL_LANES, c & 1 ? a[i] : a[i + 1], 1);
        a[i] = c & 1 ? got : a[i];
        a[i + 1] = c & 1 ? a[i + 1] : got;
    }
}

// Writes the first (i = 0) or second of the thread's rows of an accumulator [64, 2 COUNT], scaled, 16 bytes per lane.
template <int COUNT>
__device__ __forceinline__ void write_row(bf16* to, bool is_there, int i, const float (&sum)[COUNT], float factor) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < (2 * COUNT + 31) / 32; n++) {
        u32 words[4];
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int j = 4 * (4 * n + c) + 2 * i;
            words[c] = j < COUNT ? bf16x2(sum[j % COUNT] * factor, sum[(j + 1) % COUNT] * factor) : 0;
        }
        quad_transpose(words, lane % 4);
        const int column = 32 * n + 8 * (lane % 4);
        if (is_there && column < 2 * COUNT) *(uint4*)(to + column) = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

// d [64, N] = (add ? d : 0) + a [64, 16] b [16, N]. `of_shared` takes a from shared memory, `of_registers` from registers; TA
// and TB are 1 if the operand is `along_mn`, 0 if `along_k`.
template <int N> struct Product;

// The accumulator's registers as asm operands, four per 8 columns, and their numbers.
#define F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define OPERANDS_8 F4(0)
#define NUMBERS_8 "%0, %1, %2, %3"
#define OPERANDS_16 OPERANDS_8, F4(4)
#define NUMBERS_16 NUMBERS_8 ", %4, %5, %6, %7"
#define OPERANDS_24 OPERANDS_16, F4(8)
#define NUMBERS_24 NUMBERS_16 ", %8, %9, %10, %11"
#define OPERANDS_32 OPERANDS_24, F4(12)
#define NUMBERS_32 NUMBERS_24 ", %12, %13, %14, %15"
#define OPERANDS_40 OPERANDS_32, F4(16)
#define NUMBERS_40 NUMBERS_32 ", %16, %17, %18, %19"
#define OPERANDS_48 OPERANDS_40, F4(20)
#define NUMBERS_48 NUMBERS_40 ", %20, %21, %22, %23"
#define OPERANDS_56 OPERANDS_48, F4(24)
#define NUMBERS_56 NUMBERS_48 ", %24, %25, %26, %27"
#define OPERANDS_64 OPERANDS_56, F4(28)
#define NUMBERS_64 NUMBERS_56 ", %28, %29, %30, %31"
#define OPERANDS_72 OPERANDS_64, F4(32)
#define NUMBERS_72 NUMBERS_64 ", %32, %33, %34, %35"
#define OPERANDS_80 OPERANDS_72, F4(36)
#define NUMBERS_80 NUMBERS_72 ", %36, %37, %38, %39"
#define OPERANDS_88 OPERANDS_80, F4(40)
#define NUMBERS_88 NUMBERS_80 ", %40, %41, %42, %43"
#define OPERANDS_96 OPERANDS_88, F4(44)
#define NUMBERS_96 NUMBERS_88 ", %44, %45, %46, %47"
#define OPERANDS_104 OPERANDS_96, F4(48)
#define NUMBERS_104 NUMBERS_96 ", %48, %49, %50, %51"
#define OPERANDS_112 OPERANDS_104, F4(52)
#define NUMBERS_112 NUMBERS_104 ", %52, %53, %54, %55"
#define OPERANDS_120 OPERANDS_112, F4(56)
#define NUMBERS_120 NUMBERS_112 ", %56, %57, %58, %59"
#define OPERANDS_128 OPERANDS_120, F4(60)
#define NUMBERS_128 NUMBERS_120 ", %60, %61, %62, %63"
#define OPERANDS_136 OPERANDS_128, F4(64)
#define NUMBERS_136 NUMBERS_128 ", %64, %65, %66, %67"
#define OPERANDS_144 OPERANDS_136, F4(68)
#define NUMBERS_144 NUMBERS_136 ", %68, %69, %70, %71"
#define OPERANDS_152 OPERANDS_144, F4(72)
#define NUMBERS_152 NUMBERS_144 ", %72, %73, %74, %75"
#define OPERANDS_160 OPERANDS_152, F4(76)
#define NUMBERS_160 NUMBERS_152 ", %76, %77, %78, %79"
#define OPERANDS_168 OPERANDS_160, F4(80)
#define NUMBERS_168 NUMBERS_160 ", %80, %81, %82, %83"
#define OPERANDS_176 OPERANDS_168, F4(84)
#define NUMBERS_176 NUMBERS_168 ", %84, %85, %86, %87"
#define OPERANDS_184 OPERANDS_176, F4(88)
#define NUMBERS_184 NUMBERS_176 ", %88, %89, %90, %91"
#define OPERANDS_192 OPERANDS_184, F4(92)
#define NUMBERS_192 NUMBERS_184 ", %92, %93, %94, %95"
#define OPERANDS_200 OPERANDS_192, F4(96)
#define NUMBERS_200 NUMBERS_192 ", %96, %97, %98, %99"
#define OPERANDS_208 OPERANDS_200, F4(100)
#define NUMBERS_208 NUMBERS_200 ", %100, %101, %102, %103"
#define OPERANDS_216 OPERANDS_208, F4(104)
#define NUMBERS_216 NUMBERS_208 ", %104, %105, %106, %107"
#define OPERANDS_224 OPERANDS_216, F4(108)
#define NUMBERS_224 NUMBERS_216 ", %108, %109, %110, %111"
#define OPERANDS_232 OPERANDS_224, F4(112)
#define NUMBERS_232 NUMBERS_224 ", %112, %113, %114, %115"
#define OPERANDS_240 OPERANDS_232, F4(116)
#define NUMBERS_240 NUMBERS_232 ", %116, %117, %118, %119"
#define OPERANDS_248 OPERANDS_240, F4(120)
#define NUMBERS_248 NUMBERS_240 ", %120, %121, %122, %123"
#define OPERANDS_256 OPERANDS_248, F4(124)
#define NUMBERS_256 NUMBERS_248 ", %124, %125, %126, %127"

// P0 .. P6: the numbers of the operands after the accumulator.
#define PRODUCT(N, P0, P1, P2, P3, P4, P5, P6)                                                                        \
    template <> struct Product<N> {                                                                                   \
        template <int TA, int TB>                                                                                     \
        static __device__ __forceinline__ void of_shared(float (&d)[N / 2], u64 a, u64 b, int add) {                  \
            asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #P2 ", 0; wgmma.mma_async.sync.aligned.m64n" #N           \
                         "k16.f32.bf16.bf16 {" NUMBERS_##N "}, %" #P0 ", %" #P1 ", p, 1, 1, %" #P3 ", %" #P4 "; }"    \
                         : OPERANDS_##N                                                                               \
                         : "l"(a), "l"(b), "r"(add), "n"(TA), "n"(TB));                                               \
        }                                                                                                             \
        template <int TB>                                                                                             \
        static __device__ __forceinline__ void of_registers(float (&d)[N / 2], const u32 (&a)[4], u64 b, int add) {   \
            asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #P5 ", 0; wgmma.mma_async.sync.aligned.m64n" #N           \
                         "k16.f32.bf16.bf16 {" NUMBERS_##N "}, {%" #P0 ", %" #P1 ", %" #P2 ", %" #P3 "}, %" #P4       \
                         ", p, 1, 1, %" #P6 "; }"                                                                     \
                         : OPERANDS_##N                                                                               \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TB));                    \
        }                                                                                                             \
    };
PRODUCT(8, 4, 5, 6, 7, 8, 9, 10)
PRODUCT(16, 8, 9, 10, 11, 12, 13, 14)
PRODUCT(24, 12, 13, 14, 15, 16, 17, 18)
PRODUCT(32, 16, 17, 18, 19, 20, 21, 22)
PRODUCT(40, 20, 21, 22, 23, 24, 25, 26)
PRODUCT(48, 24, 25, 26, 27, 28, 29, 30)
PRODUCT(56, 28, 29, 30, 31, 32, 33, 34)
PRODUCT(64, 32, 33, 34, 35, 36, 37, 38)
PRODUCT(72, 36, 37, 38, 39, 40, 41, 42)
PRODUCT(80, 40, 41, 42, 43, 44, 45, 46)
PRODUCT(88, 44, 45, 46, 47, 48, 49, 50)
PRODUCT(96, 48, 49, 50, 51, 52, 53, 54)
PRODUCT(104, 52, 53, 54, 55, 56, 57, 58)
PRODUCT(112, 56, 57, 58, 59, 60, 61, 62)
PRODUCT(120, 60, 61, 62, 63, 64, 65, 66)
PRODUCT(128, 64, 65, 66, 67, 68, 69, 70)
PRODUCT(136, 68, 69, 70, 71, 72, 73, 74)
PRODUCT(144, 72, 73, 74, 75, 76, 77, 78)
PRODUCT(152, 76, 77, 78, 79, 80, 81, 82)
PRODUCT(160, 80, 81, 82, 83, 84, 85, 86)
PRODUCT(168, 84, 85, 86, 87, 88, 89, 90)
PRODUCT(176, 88, 89, 90, 91, 92, 93, 94)
PRODUCT(184, 92, 93, 94, 95, 96, 97, 98)
PRODUCT(192, 96, 97, 98, 99, 100, 101, 102)
PRODUCT(200, 100, 101, 102, 103, 104, 105, 106)
PRODUCT(208, 104, 105, 106, 107, 108, 109, 110)
PRODUCT(216, 108, 109, 110, 111, 112, 113, 114)
PRODUCT(224, 112, 113, 114, 115, 116, 117, 118)
PRODUCT(232, 116, 117, 118, 119, 120, 121, 122)
PRODUCT(240, 120, 121, 122, 123, 124, 125, 126)
PRODUCT(248, 124, 125, 126, 127, 128, 129, 130)
PRODUCT(256, 128, 129, 130, 131, 132, 133, 134)
