// Rows of D in the registers of LANES threads, VECS vectors of VEC elements each, ROWS rows per block; and the gains of a norm.
//
// Defines: D, VEC, VECS, LANES, ROWS; T_W and WEIGHT (0: none, 1: w, 2: 1 + w).

static const int WARPS = LANES / 32;
static const int THREADS = LANES * ROWS;

// Two sums over the threads of a row. With several warps, `turn` selects a half of the buffer, so that one barrier per call
// suffices: a warp that overwrites a half has passed the barrier of the other half, and so have those that read it.
__device__ __forceinline__ void row_sums(float& a, float& b, int turn) {
    a = lanes_sum<(LANES < 32 ? LANES : 32)>(a);
    b = lanes_sum<(LANES < 32 ? LANES : 32)>(b);
#if LANES > 32
    __shared__ float parts[2][2][WARPS];
    int warp = threadIdx.x / 32;
    if (threadIdx.x % 32 == 0) {
        parts[turn][0][warp] = a;
        parts[turn][1][warp] = b;
    }
    __syncthreads();
    a = b = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; i++) {
        a += parts[turn][0][i];
        b += parts[turn][1][i];
    }
#endif
}

__device__ __forceinline__ bool inside(int column) { return D % (LANES * VEC) == 0 || column < D; }

// The rows of a warp finish together: a row past the last one sums zeros alongside the others.
__device__ __forceinline__ bool is_behind(int row, int rows) {
    return (LANES < 32 ? row - (int)(threadIdx.x % 32 / LANES) : row) >= rows;
}
__device__ __forceinline__ bool is_here(int row, int rows) { return LANES >= 32 || row < rows; }

// Loads the thread's vectors of a row; zeros if there is none.
template <class Element>
__device__ __forceinline__ void load_row(Pack<Element, VEC> (&p)[VECS], const Element* from, bool here) {
#pragma unroll
    for (int i = 0; i < VECS; i++) {
        int column = (i * LANES + (int)(threadIdx.x % LANES)) * VEC;
        if (inside(column) && here) p[i].load(from + column);
        else zero(p[i]);
    }
}

// g of VEC columns.
__device__ __forceinline__ void gains(const T_W* w, int column, float (&g)[VEC]) {
#if WEIGHT
    Pack<T_W, VEC> p;
    p.load(w + column);
#pragma unroll
    for (int k = 0; k < VEC; k++) g[k] = f32(p.x[k]) + (WEIGHT == 2 ? 1.0f : 0.0f);
#else
#pragma unroll
    for (int k = 0; k < VEC; k++) g[k] = 1.0f;
#endif
}
