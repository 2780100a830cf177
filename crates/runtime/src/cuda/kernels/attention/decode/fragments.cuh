// Shared by the decoding kernels: query rows, 16-byte pieces of rows as mma.sync fragments, split keys.
//
// The rows of a key head are the (query, head) pairs that read it: row i is query i / group, head i % group of the group. A
// thread block takes ROWS = 8 NQ of them as columns of the products, so that keys are rows and no key is loaded twice. In a
// fragment, lane (g, c) = (lane / 4, lane % 4). An inner product may sum its elements in any order, so a lane loads 16
// contiguous bytes of row g, elements 8 c .. 8 c + 7 of 32, where one instruction expects two separate pairs: they serve two
// instructions.
//
// Defines: SIZE, NQ, GROUP (query heads per key head), REP (sets of 16 keys per step of a warp), and those of call.cuh.

#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f
#define THREADS 128
#define WARPS (THREADS / 32)
#define ROWS (8 * NQ)
// 16-byte pieces of a row, and rounds in which four lanes load one each.
#define PIECES (SIZE / 8)
#define ROUNDS ((PIECES + 3) / 4)

#define STEP (16 * REP)

// How the keys of a segment, counted from its first, and the rows of a key head are divided.
struct Splits {
    int keys;   // keys per split
    int count;  // splits of the longest segment
    int tiles;  // tiles of ROWS rows
};

// The work of a thread block. Grid: key heads, splits with tiles innermost, segments; neighbours read neighbouring memory.
struct Share {
    int kv_head, split, tile, segment;
};

__device__ __forceinline__ Share share(const Splits& splits) {
    const int y = blockIdx.y;
    if (splits.tiles == 1) return {(int)blockIdx.x, y, 0, (int)blockIdx.z};
    return {(int)blockIdx.x, y / splits.tiles, y % splits.tiles, (int)blockIdx.z};
}

// Index of the first split's partial result of a tile of rows.
__device__ __forceinline__ i64 first_part(const Call& call, const Splits& splits, const Share& s) {
    return (((i64)s.segment * splits.tiles + s.tile) * call.kv_heads + s.kv_head) * splits.count;
}

// Rows stored per partial result.
__device__ __forceinline__ int kept_rows(const Call& call) { return min(ROWS, GROUP * call.q_longest); }

// Token and head of a row; past the segment's end if there is no such row.
struct Row {
    int query, head;
};

__device__ __forceinline__ Row row_of(const Segment& g, const Share& s, int row) {
    const int i = s.tile * ROWS + row;
    return {g.q0 + i / GROUP, s.kv_head * GROUP + i % GROUP};
}

// Loads 16 bytes that are read once, bypassing L1.
__device__ __forceinline__ uint4 load_once(const bf16* p) {
    uint4 x;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(p));
    return x;
}

// Stores 16 bytes that are not read again soon: a streaming store, evicted first.
__device__ __forceinline__ void store_once(bf16* p, const uint4& x) {
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" : : "l"(p), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

// A predicated load of a piece of a row; zeros if it does not exist.
__device__ __forceinline__ uint4 piece(const bf16* row, int index, bool is_there) {
    return is_there && index < PIECES ? load_once(row + 8 * index) : make_uint4(0, 0, 0, 0);
}

__device__ __forceinline__ u32 word(const uint4& x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

// d [16, 8] += a [16, 16] b [16, 8].
__device__ __forceinline__ void mma16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// d [16, 8] += a [16, 8] b [8, 8].
__device__ __forceinline__ void mma8(float (&d)[4], u32 a0, u32 a1, u32 b0) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(b0));
}

// Transposes an 8 x 8 matrix held as two neighbouring elements of row g per lane.
__device__ __forceinline__ u32 transposed(u32 x) {
    u32 y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// Accumulates scores of 16 keys by 8 rows over 32 elements: `low` and `high` are pieces of two key rows.
__device__ __forceinline__ void add_products(float (&d)[4], const uint4& low, const uint4& high, const uint4& rows) {
    mma16(d, low.x, high.x, low.y, high.y, rows.x, rows.y);
    mma16(d, low.z, high.z, low.w, high.w, rows.z, rows.w);
}

__device__ __forceinline__ float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ bool is_seen(const Seen& seen, int key) {
#if MASK <= 1
    return key < seen.b;
#elif MASK == 2
    return key >= seen.a && key < seen.b;
#else
    return seen.has(key);
#endif
}
