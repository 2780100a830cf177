//! Pixels to patches: normalised, mixed with those of other images, divided into patches, and projected to the width of a
//! model.
//!
//! B images of Y rows and X columns of pixels, P pixels per patch side, G patches per image. Pixels cross memory as bytes, [B,
//! Y, X, 3], top row first, red, green and blue interleaved, and are normalised where they are divided into patches.

use flatout_ir::{Builder, DType, Tensor};

use super::{Linear, row};
use crate::images::{CHANNELS, Mix};

/// Patches [B G, P P 3] of pixels u8 [B, Y, X, 3] in row order, normalised by channel: (x / 255 - mean) / std.
pub fn patches<'g>(
    pixels: Tensor<'g>,
    mix: Option<Mix<'g>>,
    patch: usize,
    mean: &[f64; CHANNELS],
    std: &[f64; CHANNELS],
) -> Tensor<'g> {
    let (b, dims) = (pixels.b, pixels.dims());
    let (n, rows, columns) = (dims[0], dims[1] / patch, dims[2] / patch);
    let normal = PixelNormalisation::new(b, mean, std);
    let cut = pixels.reshape(&[n, rows, patch, columns, patch, CHANNELS]);
    let cut = cut.transpose(&[0, 1, 3, 2, 4, 5]).cast(DType::F32); // [B, Y / P, X / P, P, P, 3]
    let cut = mix.map_or(cut, |mix| mixed(cut, mix));
    normal.of(cut).reshape(&[n * rows * columns, patch * patch * CHANNELS])
}

/// The normalisation of pixels: (x / 255 - mean) / std by channel. Constants are built first, so that they do not separate
/// operations on pixels.
pub struct PixelNormalisation<'g> {
    factor: Channels<'g>,
    shift: Channels<'g>,
}

impl<'g> PixelNormalisation<'g> {
    pub fn new(b: &'g Builder, mean: &[f64; CHANNELS], std: &[f64; CHANNELS]) -> Self {
        PixelNormalisation {
            factor: Channels::new(b, std.map(|std| 1.0 / (255.0 * std))),
            shift: Channels::new(b, [0, 1, 2].map(|c| -mean[c] / std[c])),
        }
    }

    /// Normalises pixels [.., 3] given as floats.
    pub fn of(&self, x: Tensor<'g>) -> Tensor<'g> {
        let x = self.factor.with(x, |x, f| x.scale(f), |x, f| x * f);
        self.shift.with(x, |x, s| x.offset(s), |x, s| x + s)
    }
}

/// Projects patches to the width of a model, like `Linear::apply` with both operands aligned.
pub fn project<'g>(b: &'g Builder, to: &Linear, patches: Tensor<'g>) -> Tensor<'g> {
    let weight = b.read(to.weight);
    let y = aligned(patches).linear(aligned(weight));
    to.bias.map_or(y, |bias| y + row(b.read(bias)))
}

/// Rows [.., K], padded with zeros to a multiple of the width that matrix units load at once. A patch of 14 pixels has 588
/// values, and unaligned rows make its products twenty times as slow.
fn aligned(rows: Tensor<'_>) -> Tensor<'_> {
    const LOADED: usize = 8;
    let (count, inner) = (rows.dims()[0], rows.dims()[1]);
    match inner.next_multiple_of(LOADED) - inner {
        0 => rows,
        missing => rows.b.concat(&[rows, rows.b.fill(0.0, rows.dtype(), &[count, missing])], 1),
    }
}

/// Patches [B, Y / P, X / P, P, P, 3] mixed with those of other images.
fn mixed<'g>(cut: Tensor<'g>, mix: Mix<'g>) -> Tensor<'g> {
    let (b, dims) = (cut.b, cut.dims());
    let (n, patch) = (dims[0], dims[3]);
    let pixels: usize = dims[1..].iter().product();
    let other = cut.reshape(&[n, pixels]).gather(mix.with).reshape(&dims);
    let to_all = |x: Tensor<'g>| x.reshape(&[n, 1, 1, 1, 1, 1]).broadcast(&dims);
    // The row, then the column, of each element in the image.
    let place = |patches: usize, within: usize| {
        b.iota(DType::I32, &dims, patches).scale(patch as f64) + b.iota(DType::I32, &dims, within)
    };
    let bound = |i: usize| to_all(mix.cut.slice(1, i, 1));
    let (row, column) = (place(1, 3), place(2, 4));
    let inside = bound(0).less_equal(row) * row.less(bound(1));
    let inside = inside * bound(2).less_equal(column) * column.less(bound(3));
    let rows = mix.cut.slice(1, 1, 1) - mix.cut.slice(1, 0, 1);
    let has_box = b.fill(0.0, DType::I32, &[n, 1]).less(rows).cast(DType::F32);
    let share = to_all(mix.share);
    let blended = cut * share + other * share.scale(-1.0).offset(1.0);
    let pasted = inside.cast(DType::F32).select(other, cut);
    to_all(has_box).select(pasted, blended)
}

/// A number for every channel of [.., 3]: a single one where all are equal, otherwise a row of three.
enum Channels<'g> {
    Same(f64),
    Row(Tensor<'g>),
}

impl<'g> Channels<'g> {
    fn new(b: &'g Builder, values: [f64; CHANNELS]) -> Self {
        if values.iter().all(|value| *value == values[0]) {
            return Channels::Same(values[0]);
        }
        Channels::Row(b.concat(&values.map(|value| b.fill(value, DType::F32, &[1])), 0))
    }

    fn with(
        &self,
        x: Tensor<'g>,
        one: impl Fn(Tensor<'g>, f64) -> Tensor<'g>,
        row: impl Fn(Tensor<'g>, Tensor<'g>) -> Tensor<'g>,
    ) -> Tensor<'g> {
        match *self {
            Channels::Same(value) => one(x, value),
            Channels::Row(values) => {
                let mut dims = vec![1; x.dims().len()];
                *dims.last_mut().expect("images have axes") = CHANNELS;
                row(x, values.reshape(&dims))
            }
        }
    }
}
