// Resamples crops of a table's images to one size: y[b, row, column] is a weighted mean of pixels of image parts[b][0].
//
// table u8 [N, ROWS, COLUMNS, CHANNELS]; parts i32 [B, 6]: image, left, top, width, height, mirrored; y u8 [B, HEIGHT, WIDTH,
// CHANNELS], all dense. The weights are those of `ops::resample`, and so is every rounding: shares of f64 weights in f32, f32
// sums over rows and then columns, in ascending order, never contracted. So the bytes equal those of the loader. Deterministic.
// A thread computes a pixel, all channels: it reads two pixels in each direction if the crop is not larger than the output. 256
// threads per block. Moves about y in and y out. A crop outside the table, which the host never draws, gives zeros.

struct Axis {
    int first, end;
    double centre, reach, sum;
    // The weight of the pixel at an index.
    __device__ double weight(int at) const {
        double away = fabs(__dadd_rn(__dadd_rn((double)at, 0.5), -centre));
        double near = __dadd_rn(1.0, -__ddiv_rn(away, reach));
        return near > 0.0 ? near : 0.0;
    }
    __device__ float share(int at) const { return __double2float_rn(__ddiv_rn(weight(at), sum)); }
};

// The pixels that contribute to output pixel `place` of `count`, out of `extent` from `start`.
__device__ __forceinline__ Axis along(int place, int count, int start, int extent) {
    Axis a;
    double step = __ddiv_rn((double)extent, (double)count);
    a.reach = step > 1.0 ? step : 1.0;
    a.centre = __dadd_rn((double)start, __dmul_rn(__dadd_rn((double)place, 0.5), step));
    int from = (int)floor(__dadd_rn(__dadd_rn(a.centre, -a.reach), -0.5));
    int to = (int)ceil(__dadd_rn(__dadd_rn(a.centre, a.reach), 0.5));
    int last = start + extent;
    a.first = from < start ? start : from > last - 1 ? last - 1 : from;
    a.end = to < a.first + 1 ? a.first + 1 : to > last ? last : to;
    a.sum = 0.0;
    for (int at = a.first; at < a.end; at++) a.sum = __dadd_rn(a.sum, a.weight(at));
    return a;
}

extern "C" __global__ void __launch_bounds__(256) resample(const u8* table, const int* parts, u8* y, i64 pixels, int images) {
    i64 e = (i64)blockIdx.x * 256 + threadIdx.x;
    if (e >= pixels) return;
    int b = (int)(e / (HEIGHT * WIDTH)), pixel = (int)(e % (HEIGHT * WIDTH));
    int row = pixel / WIDTH, column = pixel % WIDTH;
    const int* part = parts + (i64)b * 6;
    int image = part[0], left = part[1], top = part[2], width = part[3], height = part[4];
    bool is_inside = image >= 0 && image < images && left >= 0 && width > 0 && width <= COLUMNS - left && top >= 0 &&
                     height > 0 && height <= ROWS - top;
    u8* to = y + e * CHANNELS;
    if (!is_inside) {
#pragma unroll
        for (int c = 0; c < CHANNELS; c++) to[c] = 0;
        return;
    }
    Axis across = along(part[5] ? WIDTH - 1 - column : column, WIDTH, left, width);
    Axis down = along(row, HEIGHT, top, height);
    const u8* from = table + (i64)image * (ROWS * COLUMNS * CHANNELS);
    float sum[CHANNELS];
#pragma unroll
    for (int c = 0; c < CHANNELS; c++) sum[c] = 0.0f;
    for (int x = across.first; x < across.end; x++) {
        float share_x = across.share(x), of_rows[CHANNELS];
#pragma unroll
        for (int c = 0; c < CHANNELS; c++) of_rows[c] = 0.0f;
        for (int r = down.first; r < down.end; r++) {
            float share = down.share(r);
            const u8* at = from + (r * COLUMNS + x) * CHANNELS;
#pragma unroll
            for (int c = 0; c < CHANNELS; c++) of_rows[c] = __fadd_rn(of_rows[c], __fmul_rn(share, (float)at[c]));
        }
#pragma unroll
        for (int c = 0; c < CHANNELS; c++) sum[c] = __fadd_rn(sum[c], __fmul_rn(share_x, of_rows[c]));
    }
#pragma unroll
    for (int c = 0; c < CHANNELS; c++) {
        u32 byte = __float2uint_rn(sum[c]);
        to[c] = (u8)(byte > 255 ? 255 : byte);
    }
}
