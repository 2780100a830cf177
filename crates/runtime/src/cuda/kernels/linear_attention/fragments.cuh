// Shared by the tensor-core kernels of linear attention: panels of rows in shared memory, their mma fragments, and the
// epilogue.
//
// A panel is ROWS rows of 64 bf16, 128 bytes each, swizzled: 16-byte piece p of row r is stored as piece p ^ (r & 7), so that
// eight rows of one column of pieces, which one matrix of ldmatrix reads, lie in different banks.

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ u32 piece_at(u32 panel, int row, int piece) {
    return panel + row * 128 + ((piece ^ (row & 7)) << 4);
}

// cp.async of 16 bytes from global to shared memory; zero-filled if `is_there` is false. L2 fetches 256 bytes at once, because
// a row's next panel follows this one.
__device__ __forceinline__ void copy_piece(u32 to, const void* from, bool is_there) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(is_there ? 16 : 0)
                 : "memory");
}
__device__ __forceinline__ void copies_end() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int Left> __device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Left) : "memory");
}

// Copies a lane's pieces of a strip of 16 rows of a panel: its piece of row lane / 8 and of the rows 4, 8 and 12 further.
// `from` is the address of the first, `token` the row stride, `left` the number of valid rows from the first.
__device__ __forceinline__ void load_strip(u32 panel, int strip, const bf16* from, i64 token, int left, bool is_column) {
    const int lane = threadIdx.x % 32;
    const u32 to = piece_at(panel, 16 * strip + lane / 8, lane % 8);
#pragma unroll
    for (int k = 0; k < 4; k++)
        copy_piece((to ^ (k % 2 * 64)) + 512 * k, from + 4 * k * token, is_column && 4 * k < left);
}

// Loads rows [first, first + ROWS) of a head, columns [column, column + 64), by all warps; zero-filled past `end` and past
// COLUMNS, a multiple of 8. Nothing past either is read.
template <int ROWS, int THREADS, int COLUMNS>
__device__ __forceinline__ void load_panel(u32 panel, const bf16* from, i64 token, int first, int end, int column) {
    const int lane = threadIdx.x % 32;
    const bool is_column = COLUMNS % 64 == 0 || column + 8 * (lane % 8) < COLUMNS;
#pragma unroll 1
    for (int strip = threadIdx.x / 32; strip < ROWS / 16; strip += THREADS / 32) {
        const int row = first + 16 * strip + lane / 8;
        load_strip(panel, strip, from + row * token + column + 8 * (lane % 8), token, end - row, is_column);
        if (ROWS * 2 == THREADS) break;
    }
}

struct Fragment {
    u32 x[4];
};

// A lane's address in a fragment at the start of a panel, in the panel's first 16 columns. Panels are 128-byte aligned, so 16
// columns further are an exclusive or with 32.
__device__ __forceinline__ u32 lane_offset() {
    const int lane = threadIdx.x % 32;
    return (lane % 16) * 128 + ((lane / 16 ^ (lane & 7)) << 4);
}

// Loads rows [row, row + 16), columns [16 step, 16 step + 16) of a panel: the left operand of mma, or, as (x0, x2) and (x1,
// x3), two right operands of 8 rows each.
__device__ __forceinline__ Fragment load_rows(u32 panel, int row, int step) {
    Fragment f;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(f.x[0]), "=r"(f.x[1]), "=r"(f.x[2]), "=r"(f.x[3])
                 : "r"((panel + row * 128 + lane_offset()) ^ (step << 5)));
    return f;
}

// Loads rows [row, row + 16), which are the inner axis, columns [16 step, 16 step + 16): as (x0, x1) and (x2, x3) two right
// operands of 8 columns each.
__device__ __forceinline__ Fragment load_columns(u32 panel, int row, int step) {
    Fragment f;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(f.x[0]), "=r"(f.x[1]), "=r"(f.x[2]), "=r"(f.x[3])
                 : "r"((panel + row * 128 + lane_offset()) ^ (step << 5)));
    return f;
}

// c [16, 8] += a [16, 16] b [16, 8].
__device__ __forceinline__ void mma(float (&c)[4], const Fragment& a, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b0), "r"(b1));
}

// Transposes an 8 x 8 matrix of bf16, which is a quarter of a fragment with a pair per lane.
__device__ __forceinline__ u32 transposed(u32 x) {
    u32 y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

template <int Tiles> __device__ __forceinline__ void clear(float (&sum)[Tiles][4]) {
#pragma unroll
    for (int n = 0; n < Tiles; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) sum[n][i] = 0.0f;
}

// A warp stages its results in a panel of 16 rows, so that rows are stored in 16-byte pieces. Rounds TILES tiles of 8 columns
// into it, from tile `from`.
template <int TILES> __device__ __forceinline__ void round_tiles(u32 panel, const float (*sum)[4], int from) {
    const int lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4;
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const u32 word = bf16x2(sum[n][2 * half], sum[n][2 * half + 1]);
            const u32 at = ((panel + group * 144 + 4 * pair) ^ ((from + n) << 4)) + 1024 * half;
            asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(word) : "memory");
        }
}

__device__ __forceinline__ uint4 take_piece(u32 at) {
    uint4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(at));
    return x;
}
__device__ __forceinline__ void put_piece(u32 at, uint4 x) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

// The default epilogue of a piece of a result: none. Other epilogues keep state (`Walk`) from row to row of a column of pieces,
// STEP rows apart.
struct AsItIs {
    struct Walk {
        __device__ __forceinline__ uint4 change(uint4 x, int) const { return x; }
        __device__ __forceinline__ void next() const {}
    };
    template <int STEP> __device__ __forceinline__ Walk walk(int, int) const { return Walk(); }
};

// Stores the panel to rows below `end` and columns below `columns`. The lines are evicted from L2 first, which keeps inputs
// that other heads share.
template <class Way = AsItIs>
__device__ __forceinline__ void store_panel(u32 panel, bf16* to, i64 token, int first, int end, int column, int columns,
                                            const Way& way = Way()) {
    const int lane = threadIdx.x % 32, piece = lane % 8;
    const int at = column + 8 * piece;
    __syncwarp();
    auto walk = way.template walk<4>(first + lane / 8, at);
#pragma unroll 1
    for (int i = 0; i < 4; i++) {
        const int row = 4 * i + lane / 8;
        const uint4 x = take_piece(piece_at(panel, row, piece));
        if (first + row < end && at < columns)
            __stcs(reinterpret_cast<uint4*>(to + (first + row) * token + at), walk.change(x, first + row));
        walk.next();
    }
    __syncwarp();
}

// As above, for two tiles of 8 columns at a time and rows of 32 columns, 64 bytes each, swizzled: piece p of row r is stored as
// p ^ (r / 2 & 3), so that eight rows again lie in different banks. Each call rounds 16 rows; 32 are stored at once.
__device__ __forceinline__ void round_halves(u32 rows_out, const float (&sum)[2][4], int from) {
    const int lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4;
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const u32 word = bf16x2(sum[n][2 * half], sum[n][2 * half + 1]);
            const u32 at = rows_out + group * 64 + ((from + n ^ group / 2) << 4) + 4 * pair + 512 * half;
            asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(word) : "memory");
        }
}

template <class Way = AsItIs>
__device__ __forceinline__ void store_halves(u32 rows_out, bf16* to, i64 token, int first, int end, int column,
                                             int columns, const Way& way = Way()) {
    const int lane = threadIdx.x % 32, piece = lane % 4;
    const int at = column + 8 * piece;
    __syncwarp();
    auto walk = way.template walk<8>(first + lane / 4, at);
#pragma unroll 1
    for (int i = 0; i < 4; i++) {
        const int row = 8 * i + lane / 4;
        const uint4 x = take_piece(rows_out + row * 64 + ((piece ^ (row / 2 & 3)) << 4));
        if (first + row < end && at < columns)
            __stcs(reinterpret_cast<uint4*>(to + (first + row) * token + at), walk.change(x, first + row));
        walk.next();
    }
    __syncwarp();
}
