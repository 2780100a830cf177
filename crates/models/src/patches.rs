//! Images as tokens: bytes normalised and cut into patches, each a row for one product.

use flatout_ir::{DType, Tensor};

/// Red, green and blue.
pub const CHANNELS: usize = 3;

/// Pixels [B, H, W, 3], from 0 to 255, as (x / 255 - mean) / std, to patches [B * (H / P) * (W / P), 3 * P * P]: patches by
/// rows of the image, and in each its channels one after the other, as the weights of a convolution lie.
pub fn patches<'g>(
    pixels: Tensor<'g>,
    patch: usize,
    mean: [f64; CHANNELS],
    std: [f64; CHANNELS],
) -> Tensor<'g> {
    let [images, height, width, _] = pixels.dims()[..] else { unreachable!("pixels are [B, H, W, 3]") };
    let (down, across) = (height / patch, width / patch);
    let cut = pixels.reshape(&[images, down, patch, across, patch, CHANNELS]).transpose(&[0, 1, 3, 5, 2, 4]);
    let cut = cut.reshape(&[images * down * across, CHANNELS, patch * patch]).cast(DType::F32);
    let normed = |channel: usize| {
        let x = cut.slice(1, channel, 1);
        x.scale(1.0 / (255.0 * std[channel])).offset(-mean[channel] / std[channel])
    };
    let all = match mean.iter().all(|m| *m == mean[0]) && std.iter().all(|s| *s == std[0]) {
        true => cut.scale(1.0 / (255.0 * std[0])).offset(-mean[0] / std[0]),
        false => pixels.b.concat(&[normed(0), normed(1), normed(2)], 1),
    };
    all.reshape(&[images * down * across, CHANNELS * patch * patch])
}
