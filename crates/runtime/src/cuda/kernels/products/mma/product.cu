// d [M, N] = a [M, K] b [K, N] in bf16 by mma.sync, from sm_80, with an epilogue of ../call.cuh.
//
// Rows of all matrices are 16-byte aligned, and N is a multiple of 8.
//
// A warp multiplies a tile of 64 by 64; a thread block has WARPS_M by WARPS_N of them, which share the tiles of a and b in
// shared memory. Copies (cp.async) run STAGES - 1 blocks of TK of K ahead; fragments are loaded one step of 16 of K ahead, so
// that neither waits for the other. Persistent: a thread block loops over tiles of d, and the copies of the next tile begin
// before the epilogue of this one. Copies zero-fill past the matrices' ends, element by element.
//
// Shared memory, for an operand of ROWS rows (along M or N) per tile: contiguous along K, ROWS rows of TK elements, 16-byte
// piece p of row r at p ^ (r / 2 % 4); contiguous along M or N, panels of 64 of them, TK rows of 128 bytes, piece p of row r at
// p ^ (r % 8). Eight rows at the same piece, which ldmatrix reads together, lie in different banks; so do the pieces that
// eight lanes copy.
//
// The epilogue needs no shared memory: the four lanes that hold a row of 32 columns exchange pairs so that each has eight
// adjacent columns, 16 bytes, which it loads and stores itself. In place is safe: a thread reads what it overwrites before.
// Deterministic: no sum depends on the grid.

#define TK 32
#define STEPS (TK / 16)
#define WARPS (WARPS_M * WARPS_N)
#define THREADS (32 * WARPS)
#define TM (64 * WARPS_M)
#define TN (64 * WARPS_N)
// Columns of d per tile, and per warp. With GATED a warp's columns of b are as many of gate, followed by those of up.
#define WIDTH (EPILOGUE == GATED ? TN / 2 : TN)
#define WARP_WIDTH (WIDTH / WARPS_N)
#define A_BYTES (TM * TK * 2)
#define B_BYTES (TN * TK * 2)
#define STAGE_BYTES (A_BYTES + B_BYTES)
#define PANEL_BYTES (TK * 128)

#if EPILOGUE == GATED && B_MN
#error "gate and up are contiguous along K"
#endif

extern __shared__ __align__(1024) u8 memory[];

// Rows at a distance of `pitch` elements, matrices of a batch at a distance of `step`.
struct Matrix {
    bf16* at;
    i64 pitch, step;
};

__device__ __forceinline__ Tile tile_of(const Shape& s, int index) {
    const Position at = position_of(s, index);
    return {at.row * TM, at.column * WIDTH, at.batch};
}

// Bytes of the 16 from an element that lie before the end, `left` elements further.
__device__ __forceinline__ int bytes_before(int left) { return 2 * max(0, min(left, 8)); }

// A thread's copies of an operand that is contiguous along K: piece threadIdx.x % 4 of COUNT rows. With HALVES, groups of 32
// rows of a tile come in turns from two matrices.
template <int ROWS, bool HALVES> struct AlongK {
    static constexpr int APART = THREADS / (TK / 8), COUNT = ROWS / APART;
    static_assert(TK == 32 && APART % 8 == 0 && ROWS % APART == 0 && COUNT <= 32, "the swizzle repeats after 8 rows");

    const bf16 *from, *from_up;
    // Bit i: whether row i is within the matrix.
    u32 there;

    static __device__ __forceinline__ int row() { return threadIdx.x / (TK / 8); }
    static __device__ __forceinline__ int piece() { return threadIdx.x % (TK / 8); }
    // Rows of the matrix from the thread's first to its row i, and whether that is one of `up`. A thread's first row is less
    // than APART, which divides 32 or is 64.
    static __device__ __forceinline__ int further(int i) {
        return HALVES ? i * APART / 64 * 32 + i * APART % 32 : i * APART;
    }
    static __device__ __forceinline__ bool is_up(int i) {
        return HALVES && (APART > 32 ? row() / 32 : i * APART / 32 % 2);
    }

    __device__ __forceinline__ void begin(const Matrix& m, const Matrix& up, int first, int end, int batch) {
        first += HALVES ? row() % 32 : row();
        from = m.at + batch * m.step + first * m.pitch + 8 * piece();
        if (HALVES) from_up = up.at + batch * up.step + first * up.pitch + 8 * piece();
        there = 0;
#pragma unroll
        for (int i = 0; i < COUNT; i++) there |= (u32)(first + further(i) < end) << i;
    }

    __device__ __forceinline__ void copy(u32 to, const Matrix& m, const Matrix& up, int k, int k_end) const {
        const int bytes = bytes_before(k_end - k - 8 * piece());
        to += row() * (2 * TK) + (piece() ^ (row() / 2 % 4)) * 16;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const bf16* line = is_up(i) ? from_up + further(i) * up.pitch : from + further(i) * m.pitch;
            copy_first(to + i * APART * 2 * TK, line + k, there >> i & 1 ? bytes : 0);
        }
    }
};

// A thread's copies of an operand that is contiguous along M or N: one piece of COUNT rows.
template <int ROWS> struct Across {
    static constexpr int PIECES = ROWS / 8, APART = THREADS / PIECES, COUNT = TK / APART;
    static_assert((APART & (APART - 1)) == 0 && COUNT * APART == TK, "rows at powers of two");

    const bf16* from;
    // Bytes of the piece that are within the matrix.
    int bytes;

    static __device__ __forceinline__ int row() { return threadIdx.x / PIECES; }
    static __device__ __forceinline__ int piece() { return threadIdx.x % PIECES; }

    __device__ __forceinline__ void begin(const Matrix& m, const Matrix&, int first, int end, int batch) {
        bytes = bytes_before(end - first - 8 * piece());
        from = m.at + batch * m.step + row() * m.pitch + first + 8 * piece();
    }

    __device__ __forceinline__ void copy(u32 to, const Matrix& m, const Matrix&, int k, int k_end) const {
        to += piece() / 8 * PANEL_BYTES + row() * 128 + (piece() % 8 ^ row() % 8) * 16;
        const bf16* line = from + k * m.pitch;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            // The thread's first row is less than APART, a power of two: adding a multiple of that is an exclusive or.
            const u32 at = (to ^ (i * APART % 8 * 16)) + i * APART * 128;
            copy_first(at, line + i * APART * m.pitch, k + row() + i * APART < k_end ? bytes : 0);
        }
    }
};

#if A_MN
typedef Across<TM> CopiesOfA;
#else
typedef AlongK<TM, false> CopiesOfA;
#endif
#if B_MN
typedef Across<TN> CopiesOfB;
#else
typedef AlongK<TN, EPILOGUE == GATED> CopiesOfB;
#endif

// The copies into shared memory, of one block of K after the other, through all tiles of the thread block.
struct Copies {
    CopiesOfA a;
    CopiesOfB b;
    int tile, block;

    __device__ __forceinline__ void begin(const Shape& s, const Matrix& of_a, const Matrix& of_b, const Matrix& of_b2) {
        const Tile t = tile_of(s, tile);
        a.begin(of_a, of_a, t.row, s.m, t.batch);
        b.begin(of_b, of_b2, t.column, s.n, t.batch);
        block = 0;
    }
    // One group, empty after the last tile.
    __device__ __forceinline__ void next(const Shape& s, const Matrix& of_a, const Matrix& of_b, const Matrix& of_b2, u32 to) {
        if (tile < s.total) {
            a.copy(to, of_a, of_a, block * TK, s.k);
            b.copy(to + A_BYTES, of_b, of_b2, block * TK, s.k);
            if (++block == s.blocks) {
                tile += gridDim.x;
                if (tile < s.total) begin(s, of_a, of_b, of_b2);
            }
        }
        commit();
    }
};

// A lane's offset in the tile of an operand, for the four matrices of 16 rows (along M or N) and 16 of K. Their order is that
// of a fragment of a: the second matrix is 8 rows further, the third 8 of K.
template <bool MN> __device__ __forceinline__ u32 lane_of_a(int warp) {
    const int lane = threadIdx.x % 32;
    if (MN) {
        const int k = lane / 16 * 8 + lane % 8, piece = lane / 8 % 2;
        return warp * PANEL_BYTES + k * 128 + (piece ^ (k % 8)) * 16;
    }
    const int row = 64 * warp + lane % 16, piece = lane / 16;
    return row * (2 * TK) + (piece ^ (row / 2 % 4)) * 16;
}
// As above, for two fragments of b: the second matrix is 8 of K further, the third 8 rows.
template <bool MN> __device__ __forceinline__ u32 lane_of_b(int warp) {
    const int lane = threadIdx.x % 32;
    if (MN) {
        const int k = lane % 16, piece = lane / 16;
        return warp * PANEL_BYTES + k * 128 + (piece ^ (k % 8)) * 16;
    }
    const int row = 64 * warp + lane / 16 * 8 + lane % 8, piece = lane / 8 % 2;
    return row * (2 * TK) + (piece ^ (row / 2 % 4)) * 16;
}
// Loads rows [16 i, 16 i + 16) of the warp's, step e of a stage: two pieces further are an exclusive or with 32.
template <bool MN> __device__ __forceinline__ void load_fragment(u32 (&to)[4], u32 at, int i, int e) {
    if (MN)
        ldmatrix_across(to, (at ^ (32 * i)) + e * 16 * 128);
    else
        ldmatrix(to, (at ^ (32 * e)) + i * 16 * 2 * TK);
}

// Transposes 4 by 4 words over the four lanes of a quad: word i of lane j becomes word j of lane i.
__device__ __forceinline__ void exchange(u32 (&x)[4]) {
    const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const u32 got = __shfl_xor_sync(ALL_LANES, odd ? x[i] : x[i + 1], 1);
        x[i] = odd ? got : x[i];
        x[i + 1] = odd ? x[i + 1] : got;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const u32 got = __shfl_xor_sync(ALL_LANES, upper ? x[i] : x[i + 2], 2);
        x[i] = upper ? got : x[i];
        x[i + 2] = upper ? x[i + 2] : got;
    }
}

// Strips of 8 rows and 32 columns that a warp's epilogue takes one at a time, those of the same rows first: otherwise the
// compiler keeps the addresses of all rows for the next columns.
#define ABREAST (WARP_WIDTH / 32)
#define STRIPS (8 * ABREAST)

// The part of a strip of matrices of d's shape that a lane loads and stores: eight columns of a row, 16 bytes.
struct Lane {
    int row, column, batch, m, n;

    __device__ __forceinline__ bool is_within(int strip) const {
        return row + strip / ABREAST * 8 < m && column + strip % ABREAST * 32 < n;
    }
    __device__ __forceinline__ bf16* place(const Matrix& of, int strip) const {
        return of.at + batch * of.step + (row + strip / ABREAST * 8) * of.pitch + column + strip % ABREAST * 32;
    }
    // Zeros outside the matrix.
    __device__ __forceinline__ uint4 load(const Matrix& from, int strip) const {
        return is_within(strip) ? *(const uint4*)place(from, strip) : make_uint4(0, 0, 0, 0);
    }
    // Stores pairs in the order of fragments.
    __device__ __forceinline__ void store(const Matrix& to, u32 (&x)[4], int strip) const {
        exchange(x);
        if (is_within(strip)) *(uint4*)place(to, strip) = make_uint4(x[0], x[1], x[2], x[3]);
    }
};

// Puts pairs in the order of fragments.
__device__ __forceinline__ void as_fragments(u32 (&x)[4], const uint4& loaded) {
    x[0] = loaded.x;
    x[1] = loaded.y;
    x[2] = loaded.z;
    x[3] = loaded.w;
    exchange(x);
}

struct Results {
    Matrix out, out2, out3, side, side2;
};

// sum[i][j] is the fragment of rows [16 i, 16 i + 16) and columns [8 j, 8 j + 8) of the warp's tile.
__device__ __forceinline__ void finish(const Shape& s, const float (&sum)[4][8][4], const Results& to,
                                       [[maybe_unused]] const T_BIAS* bias, [[maybe_unused]] float* partial, Tile t) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = t.row + warp / WARPS_N * 64, column = t.column + warp % WARPS_N * WARP_WIDTH;
    const Lane own = {row + lane / 4, column + lane % 4 * 8, t.batch, s.m, s.n};
#if HAS_SIDES
    // The sides of the next strip are loaded before this one's results are stored.
    uint4 ahead = own.load(to.side, 0);
    [[maybe_unused]] uint4 ahead2;
    if (SIDES == 2) ahead2 = own.load(to.side2, 0);
#endif
#if EPILOGUE == ACTIVATED_GRAD && SUM
    // Results of the 8 rows above, and sums over 16 rows.
    u32 above[ABREAST][4];
    float sums[ABREAST][4];
#endif
#pragma unroll
    for (int strip = 0; strip < STRIPS; strip++) {
        const int group = strip % ABREAST, half = strip / ABREAST % 2, i = strip / ABREAST / 2, first = 4 * group;
        auto c = [&](int j, int e) { return sum[i][first + j][2 * half + e]; };
#if !HAS_SIDES
        // Besides saving work at the edges, the branch keeps the assembler from interleaving all strips, for which registers do
        // not suffice.
        if (row + strip / ABREAST * 8 >= s.m || column + 32 * group >= s.n) continue;
#endif
        u32 x[4];
        [[maybe_unused]] u32 value[4];
#if EPILOGUE == PLAIN
#pragma unroll
        for (int j = 0; j < 4; j++) x[j] = bf16x2(c(j, 0), c(j, 1));
        own.store(to.out, x, strip);
#elif EPILOGUE == GATED
        u32 up[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            x[j] = bf16x2(c(j, 0), c(j, 1));
            up[j] = bf16x2(c(4 + j, 0), c(4 + j, 1));
            value[j] = gated(x[j], up[j]);
        }
        if (KEEP) {
            own.store(to.out, x, strip);
            own.store(to.out2, up, strip);
        }
        own.store(to.out3, value, strip);
#elif EPILOGUE == ACTIVATED
#pragma unroll
        for (int j = 0; j < 4; j++) {
#if HAS_BIAS
            const int at = column + 32 * group + 8 * j + 2 * (lane % 4);
            const float2 added = at < s.n ? pair_of(bias + at) : make_float2(0.0f, 0.0f);
            x[j] = bf16x2(c(j, 0) + added.x, c(j, 1) + added.y);
#else
            x[j] = bf16x2(c(j, 0), c(j, 1));
#endif
            value[j] = activated(x[j]);
        }
        if (KEEP) own.store(to.out, x, strip);
        own.store(to.out3, value, strip);
#else
        as_fragments(x, ahead);
        if (strip + 1 < STRIPS) ahead = own.load(to.side, strip + 1);
#if EPILOGUE == GATED_GRAD
        u32 up[4];
        as_fragments(up, ahead2);
        if (strip + 1 < STRIPS) ahead2 = own.load(to.side2, strip + 1);
#pragma unroll
        for (int j = 0; j < 4; j++) value[j] = gated_grad(c(j, 0), c(j, 1), x[j], up[j]);
        own.store(to.out2, up, strip);
#else
#pragma unroll
        for (int j = 0; j < 4; j++) value[j] = activated_grad(c(j, 0), c(j, 1), x[j]);
#if SUM
        if (half) {
            float columns[8];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                columns[2 * j] = low(above[group][j]) + low(x[j]);
                columns[2 * j + 1] = high(above[group][j]) + high(x[j]);
            }
            halve<16, 4>(columns);
            halve<8, 2>(columns);
            halve<4, 1>(columns);
            sums[group][i] = columns[0];
        } else {
#pragma unroll
            for (int j = 0; j < 4; j++) above[group][j] = x[j];
        }
        if (half && i == 3) {
            // The lane's bits 4, 3 and 2 are those of the value's index: fragment and element of a pair.
            const int j = lane / 16 * 2 + lane / 8 % 2, element = lane / 4 % 2;
            const int at = column + 32 * group + 8 * j + 2 * (lane % 4) + element;
            const float total = (sums[group][0] + sums[group][1]) + (sums[group][2] + sums[group][3]);
            if (row < s.m && at < s.n) partial[(i64)(row / 64) * s.n + at] = total;
        }
#endif
#endif
        own.store(to.out, x, strip);
        if (KEEP) own.store(to.out3, value, strip);
#endif
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, PER_SM)
product(const __grid_constant__ Shape s, const __grid_constant__ Matrix of_a, const __grid_constant__ Matrix of_b,
        const __grid_constant__ Matrix of_b2, const __grid_constant__ Results to, const T_BIAS* bias, float* partial) {
    const u32 first = shared_address(memory);
    const int warp = threadIdx.x / 32;
    const u32 lane_a = lane_of_a<A_MN>(warp / WARPS_N), lane_b = A_BYTES + lane_of_b<B_MN>(warp % WARPS_N);
    Copies copies;
    copies.tile = blockIdx.x;
    copies.begin(s, of_a, of_b, of_b2);
#pragma unroll 1
    for (int stage = 0; stage < STAGES - 1; stage++) copies.next(s, of_a, of_b, of_b2, first + stage * STAGE_BYTES);
    // The stage that is multiplied, and the one that copies fill.
    u32 now = first, fill = first + (STAGES - 1) * STAGE_BYTES;
    auto next = [&](u32 stage) {
        stage += STAGE_BYTES;
        return stage == first + STAGES * STAGE_BYTES ? first : stage;
    };
    u32 a[2][4][4], b[2][4][4];
    auto load = [&](int e) {
#pragma unroll
        for (int i = 0; i < 4; i++) load_fragment<A_MN>(a[e % 2][i], now + lane_a, i, e);
#pragma unroll
        for (int j = 0; j < 4; j++) load_fragment<B_MN>(b[e % 2][j], now + lane_b, j, e);
    };
    arrived<STAGES - 2>();
    __syncthreads();
    for (int tile = blockIdx.x; tile < s.total; tile += gridDim.x) {
        // Loaded again for the next tile, so that no fragments occupy registers during the epilogue.
        load(0);
        float sum[4][8][4];
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 8; j++)
#pragma unroll
                for (int x = 0; x < 4; x++) sum[i][j][x] = 0.0f;
#pragma unroll 1
        for (int block = 0; block < s.blocks; block++) {
#pragma unroll
            for (int e = 0; e < STEPS; e++) {
                if (e + 1 < STEPS) {
                    load(e + 1);
                } else {
                    // All warps have loaded this stage's fragments, and all copies of the next stage have arrived.
                    arrived<STAGES - 2>();
                    __syncthreads();
                    now = next(now);
                    load(0);
                }
                if (e == 0) {
                    copies.next(s, of_a, of_b, of_b2, fill);
                    fill = next(fill);
                }
#pragma unroll
                for (int i = 0; i < 4; i++)
#pragma unroll
                    for (int j = 0; j < 8; j++)
                        mma(sum[i][j], a[e % 2][i], b[e % 2][j / 2][j % 2 * 2], b[e % 2][j / 2][j % 2 * 2 + 1]);
            }
        }
        finish(s, sum, to, bias, partial, tile_of(s, tile));
    }
}
