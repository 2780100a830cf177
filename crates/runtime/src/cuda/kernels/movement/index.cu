// Rows by index: gather, scatter-add (sum of rows by destination), and replacement of rows. Negative indices are dropped.
//
// An index past the last row is an error in the data, which is checked before it gets here: gather marks such rows (NaN), the
// others drop them; nothing is read or written out of bounds.
// A row is WIDTH elements, at inner_* from the row's start; row r starts at r times ROW_*.

#if GATHER

// out[n] = table[index[n]], zeros for -1. Moves the index, rows in, rows out. A thread moves VEC elements.
extern "C" __global__ void __launch_bounds__(256)
    gather(const T_X* table, const int* index, T_X* out, i64 count, int rows) {
    i64 e = ((i64)blockIdx.x * 256 + threadIdx.x) * VEC;
    if (e >= count) return;
    i64 n = e / WIDTH;
    u32 c = (u32)(e % WIDTH);
    int i = index[n];
    Pack<T_X, VEC> p;
    if (i < 0) p.all((T_X)0);
    else if (i >= rows) p.all((T_X)MARK);
    else p.load(table + (i64)i * ROW_TABLE + inner_table(c));
    p.store(out + n * ROW_OUT + inner_out(c));
}

#elif ROW_SCATTER

// base with rows replaced; of several rows with one destination the last wins, in any order of execution: `claim` keeps the
// largest.
extern "C" __global__ void __launch_bounds__(256) unclaimed(int* winner, int rows) {
    int r = blockIdx.x * 256 + threadIdx.x;
    if (r < rows) winner[r] = -1;
}

extern "C" __global__ void __launch_bounds__(256) claim(const int* index, int* winner, int n, int rows) {
    int i = blockIdx.x * 256 + threadIdx.x;
    if (i < n && index[i] >= 0 && index[i] < rows) atomicMax(&winner[index[i]], i);
}

// With few rows, each checks the index itself for a later row with the same destination.
extern "C" __global__ void __launch_bounds__(256)
    row_scatter_few(const T_X* from, const int* index, T_X* out, i64 count, int n_rows, int rows) {
    i64 e = ((i64)blockIdx.x * 256 + threadIdx.x) * VEC;
    if (e >= count) return;
    int n = (int)(e / WIDTH);
    u32 c = (u32)(e % WIDTH);
    int i = index[n];
    if (i < 0 || i >= rows) return;
    Pack<T_X, VEC> p;
    p.load(from + (i64)n * ROW_FROM + inner_from(c));
    bool is_last = true;
#pragma unroll 16
    for (int later = n + 1; later < n_rows; later++) is_last &= index[later] != i;
    if (is_last) p.store(out + (i64)i * ROW_OUT + inner_out(c));
}

extern "C" __global__ void __launch_bounds__(256)
    row_scatter(const T_X* from, const int* index, const int* winner, T_X* out, i64 count, int rows) {
    i64 e = ((i64)blockIdx.x * 256 + threadIdx.x) * VEC;
    if (e >= count) return;
    i64 n = e / WIDTH;
    u32 c = (u32)(e % WIDTH);
    int i = index[n];
    if (i < 0 || i >= rows || winner[i] != n) return;
    Pack<T_X, VEC> p;
    p.load(from + n * ROW_FROM + inner_from(c));
    p.store(out + (i64)i * ROW_OUT + inner_out(c));
}

#else

// out[v] = base[v] + sum of the rows n with index[n] = v, in f32, in an order fixed by the index alone.
//
// 1. The rows are sorted by destination, stably: a radix sort with a counting pass per digit of 8 bits (`digits`,
// `starts_of_digits`, `place`), over tiles of TILE rows. Ranks are computed from integer counts, so all runs agree.
// 2. `sum_pieces` cuts the sorted list into pieces of PIECE rows. A thread block adds the rows of its piece, run by run; a run
// that is a complete destination is written, one that crosses the piece's edge leaves a partial row.
// 3. `join_pieces` adds the partial rows of a destination in order; `untouched` fills rows without a source, unless out and
// base are the same memory.
// So a destination with very many rows is split over blocks, and each row is read once. Moves the index and its sorted forms
// (16 bytes per row and pass), rows in, touched rows in and out, and at most two partial rows per piece. Deterministic.

static const int TILE = 2048;
static const int PIECE = 32;

// The destination of a row; `rows`, one past the last, if it is dropped.
__device__ __forceinline__ u32 key_of(int index, int rows) {
    return index < 0 || index >= rows ? (u32)rows : (u32)index;
}

__device__ __forceinline__ u32 key_at(const int* index, const u32* keys, int i, int rows, int shift) {
    return shift == 0 ? key_of(index[i], rows) : keys[i];
}

// counts[digit, tile]: the number of occurrences of each digit in a tile.
extern "C" __global__ void __launch_bounds__(256)
    digits(const int* index, const u32* keys, u32* counts, int n, int rows, int shift) {
    __shared__ u32 count[256];
    count[threadIdx.x] = 0;
    __syncthreads();
    int first = blockIdx.x * TILE;
    for (int i = first + threadIdx.x; i < first + TILE && i < n; i += 256)
        atomicAdd(&count[key_at(index, keys, i, rows, shift) >> shift & 255], 1u);
    __syncthreads();
    counts[threadIdx.x * gridDim.x + blockIdx.x] = count[threadIdx.x];
}

// Exclusive prefix sums of `counts`, in place, by one block: the position where each tile's rows with a digit begin.
extern "C" __global__ void __launch_bounds__(1024) starts_of_digits(u32* counts, int n) {
    __shared__ u32 warps[32];
    int each = (n + 1023) / 1024, from = threadIdx.x * each, to = from + each < n ? from + each : n;
    u32 sum = 0;
    for (int i = from; i < to; i++) sum += counts[i];
    u32 upto = sum;
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
        u32 below = __shfl_up_sync(ALL_LANES, upto, o);
        if (threadIdx.x % 32 >= o) upto += below;
    }
    if (threadIdx.x % 32 == 31) warps[threadIdx.x / 32] = upto;
    __syncthreads();
    u32 before = upto - sum;
    for (int i = 0; i < threadIdx.x / 32; i++) before += warps[i];
    for (int i = from; i < to; i++) {
        u32 here = counts[i];
        counts[i] = before;
        before += here;
    }
}

// Moves the rows of a tile after those with smaller digits, preserving the order of equal digits. A warp takes an eighth of the
// tile.
extern "C" __global__ void __launch_bounds__(256)
    place(const int* index, const u32* keys, const u32* places, const u32* starts, u32* keys_out, u32* places_out,
          int n, int rows, int shift) {
    __shared__ u32 next[8][256];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 8; i++) next[i][threadIdx.x] = 0;
    __syncthreads();
    int first = blockIdx.x * TILE + warp * (TILE / 8);
    for (int i = first + lane; i < first + TILE / 8 && i < n; i += 32)
        atomicAdd(&next[warp][key_at(index, keys, i, rows, shift) >> shift & 255], 1u);
    __syncthreads();
    u32 begin = starts[threadIdx.x * gridDim.x + blockIdx.x];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        u32 count = next[i][threadIdx.x];
        next[i][threadIdx.x] = begin;
        begin += count;
    }
    __syncthreads();
    for (int i0 = first; i0 < first + TILE / 8; i0 += 32) {
        int i = i0 + lane;
        bool is_there = i < n;
        u32 key = is_there ? key_at(index, keys, i, rows, shift) : 0;
        u32 digit = is_there ? key >> shift & 255 : 256 + lane;
        u32 same = __match_any_sync(ALL_LANES, digit);
        u32 rank = __popc(same & ((1u << lane) - 1));
        u32 at = is_there ? next[warp][digit] + rank : 0;
        __syncwarp();
        if (is_there && rank == 0) next[warp][digit] += __popc(same);
        __syncwarp();
        if (is_there) {
            keys_out[at] = key;
            places_out[at] = shift == 0 ? (u32)i : places[i];
        }
    }
}

// Adds VEC elements of a row of any float type.
__device__ __forceinline__ void add_row(const Pack<T_X, VEC>& p, float (&sum)[VEC]) {
#pragma unroll
    for (int k = 0; k < VEC; k++) sum[k] += f32(p.x[k]);
}

// out[v] = base[v] + sum, for VEC columns from c.
__device__ __forceinline__ void finish(const T_BASE* base, T_OUT* out, u32 v, u32 c, float (&sum)[VEC]) {
#if BASE
    Pack<T_BASE, VEC> b;
    b.load(base + (i64)v * ROW_BASE + inner_base(c));
#pragma unroll
    for (int k = 0; k < VEC; k++) sum[k] += f32(b.x[k]);
#endif
    Pack<T_OUT, VEC> o;
    put(o, sum);
    o.store(out + (i64)v * ROW_OUT + inner_out(c));
}

// partial[piece, 0]: the run that continues from the previous piece; partial[piece, 1]: the run that continues in the next. A
// run that does both is in the first.
extern "C" __global__ void __launch_bounds__(BLOCK)
    sum_pieces(const T_X* x, const u32* keys, const u32* places, const T_BASE* base, T_OUT* out, float* partial, int n,
               int rows) {
    __shared__ u32 key[PIECE + 2], from[PIECE];
    int first = blockIdx.x * PIECE, count = n - first < PIECE ? n - first : PIECE;
    // The keys of the piece and of its neighbours; past both ends a sentinel that equals no key.
    for (int i = threadIdx.x; i < PIECE + 2; i += BLOCK) {
        int at = first + i - 1;
        key[i] = at >= 0 && at < n ? keys[at] : 0xffffffffu;
        if (i < count) from[i] = places[first + i];
    }
    __syncthreads();
    u32 c = (blockIdx.y * BLOCK + threadIdx.x) * VEC;
    if (c >= WIDTH) return;
    x += inner_x(c);
    partial += (i64)blockIdx.x * 2 * WIDTH + c;
    float sum[VEC];
#pragma unroll
    for (int k = 0; k < VEC; k++) sum[k] = 0.0f;
    bool is_begun_before = key[0] == key[1];
    for (int i0 = 0; i0 < count; i0 += 4) {
        Pack<T_X, VEC> p[4];
#pragma unroll
        for (int u = 0; u < 4; u++)
            if (i0 + u < count && key[i0 + u + 1] < (u32)rows) p[u].load(x + (i64)from[i0 + u] * ROW_X);
#pragma unroll
        for (int u = 0; u < 4; u++) {
            int i = i0 + u;
            if (i >= count || key[i + 1] >= (u32)rows) continue;
            add_row(p[u], sum);
            bool goes_on = key[i + 2] == key[i + 1];
            if (goes_on && i + 1 < count) continue;
            if (goes_on || is_begun_before) {
                Pack<float, VEC> row;
                put(row, sum);
                row.store(partial + (is_begun_before ? 0 : WIDTH));
            } else {
                finish(base, out, key[i + 1], c, sum);
            }
#pragma unroll
            for (int k = 0; k < VEC; k++) sum[k] = 0.0f;
            is_begun_before = false;
        }
    }
}

// The block of the piece in which a destination begins adds the partial rows of later pieces.
extern "C" __global__ void __launch_bounds__(BLOCK)
    join_pieces(const u32* keys, const T_BASE* base, T_OUT* out, const float* partial, int n, int rows) {
    int piece = blockIdx.x, last = (piece + 1) * PIECE - 1;
    if (last + 1 >= n) return;
    u32 v = keys[last];
    if (v >= (u32)rows || keys[last + 1] != v) return;
    // It began in an earlier piece, whose block handles it.
    if (piece > 0 && keys[piece * PIECE - 1] == v) return;
    u32 c = (blockIdx.y * BLOCK + threadIdx.x) * VEC;
    if (c >= WIDTH) return;
    // Binary search for the last piece that holds v, as keys are sorted.
    int low = piece + 1, high = (n - 1) / PIECE;
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (keys[middle * PIECE] == v) low = middle;
        else high = middle - 1;
    }
    float sum[VEC];
    const float* from = partial + (i64)piece * 2 * WIDTH + c;
    Pack<float, VEC> row;
    row.load(from + WIDTH);
#pragma unroll
    for (int k = 0; k < VEC; k++) sum[k] = row.x[k];
#pragma unroll 4
    for (int i = piece + 1; i <= low; i++) {
        from += 2 * WIDTH;
        row.load(from);
#pragma unroll
        for (int k = 0; k < VEC; k++) sum[k] += row.x[k];
    }
    finish(base, out, v, c, sum);
}

// Rows without a source: the base, or zeros.
extern "C" __global__ void __launch_bounds__(256)
    untouched(const u32* keys, const T_BASE* base, T_OUT* out, int n, int rows) {
    // One warp per row; its lanes search the row's key together by bisection.
    int v = blockIdx.x * 8 + threadIdx.x / 32;
    if (v >= rows) return;
    int low = 0, high = n;
    while (low < high) {
        int middle = (low + high) / 2;
        if (keys[middle] < (u32)v) low = middle + 1;
        else high = middle;
    }
    if (low < n && keys[low] == (u32)v) return;
    for (u32 c = threadIdx.x % 32 * VEC; c < WIDTH; c += 32 * VEC) {
        float sum[VEC];
#pragma unroll
        for (int k = 0; k < VEC; k++) sum[k] = 0.0f;
        finish(base, out, (u32)v, c, sum);
    }
}

#endif
