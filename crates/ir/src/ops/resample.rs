//! Crops of the images of a table, resized to one size: the samples of a small data set that lies on the device.
//!
//! (table u8 [N, H, W, C], parts i32 [B, 6]) -> u8 [B, h, w, C]. A part is an image's index, its first column, its first row,
//! its number of columns and of rows, and 1 where it is mirrored left to right. Image -1 results in zeros. A part lies inside
//! its image and is never empty.
//!
//! For a part of e columns that starts at column a, pixel x of w is the mean of pixels i around c = a + (x + 1/2) e / w,
//! weighted by max(0, 1 - |i + 1/2 - c| / max(1, e / w)); rows likewise. The image loader computes the same, and the two must
//! agree to the byte on every backend, so the arithmetic is part of the definition. Weights are f64, and f32 once normalised.
//! Sums are f32, over rows and then over columns, in ascending order, without fused multiply-adds.

use super::{arity, expect};
use crate::types::{DType, TensorType};

pub const PART: usize = 6;

pub fn infer(height: usize, width: usize, ins: &[&TensorType]) -> Result<Vec<TensorType>, String> {
    arity(ins, 2)?;
    let (table, parts) = (ins[0], ins[1]);
    if table.rank() != 4 || table.dtype != DType::U8 {
        return Err(format!("the table is {table}, wanted u8 [images, rows, columns, channels]"));
    }
    if height == 0 || width == 0 {
        return Err(format!("{height} x {width} pixels show nothing"));
    }
    let count = parts.dims.first().copied().unwrap_or(0);
    expect("the parts", parts, DType::I32, &[count, PART])?;
    Ok(vec![TensorType::new(DType::U8, [count, height, width, table.dims[3]])])
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageCrop {
    pub image: usize,
    pub left: usize,
    pub top: usize,
    pub width: usize,
    pub height: usize,
    pub is_flipped: bool,
}

impl ImageCrop {
    /// Parses the six numbers of a part of a table with these extents: `None` for image -1, an error where it lies outside.
    pub fn of(numbers: &[i32], table: &[usize]) -> Result<Option<ImageCrop>, String> {
        if numbers[0] < 0 {
            return Ok(None);
        }
        let [image, left, top, width, height, flip] = [0, 1, 2, 3, 4, 5].map(|i| i64::from(numbers[i]));
        let [images, rows, columns] = [0, 1, 2].map(|axis| table[axis] as i64);
        let is_inside =
            |from: i64, extent: i64, there: i64| from >= 0 && extent > 0 && from + extent <= there;
        if image >= images || !is_inside(left, width, columns) || !is_inside(top, height, rows) {
            return Err(format!("the part {numbers:?} lies outside the table {table:?}"));
        }
        let [image, left, top, width, height] = [image, left, top, width, height].map(|n| n as usize);
        Ok(Some(ImageCrop { image, left, top, width, height, is_flipped: flip != 0 }))
    }
}

/// The source pixels of one result pixel, with their normalised weights.
struct Taps {
    first: usize,
    shares: Vec<f32>,
}

/// The taps of pixel `place` of `count`, from `extent` source pixels that begin at `start`.
fn taps(place: usize, count: usize, start: usize, extent: usize) -> Taps {
    let step = extent as f64 / count as f64;
    let reach = step.max(1.0);
    let centre = start as f64 + (place as f64 + 0.5) * step;
    let weight = |at: usize| (1.0 - (at as f64 + 0.5 - centre).abs() / reach).max(0.0);
    let end = start + extent;
    let first = ((centre - reach - 0.5).floor().max(0.0) as usize).clamp(start, end - 1);
    let to = ((centre + reach + 0.5).ceil() as usize).clamp(first + 1, end);
    let sum: f64 = (first..to).map(weight).sum();
    Taps { first, shares: (first..to).map(|at| (weight(at) / sum) as f32).collect() }
}

/// Fills `out`, `height` rows of `width` pixels, with a crop of an image of `columns` pixels per row.
pub fn resample(image: &[u8], columns: usize, part: ImageCrop, [height, width]: [usize; 2], out: &mut [u8]) {
    let channels = out.len() / (height * width).max(1);
    let across: Vec<Taps> = (0..width).map(|x| taps(x, width, part.left, part.width)).collect();
    let mut sums = vec![0f32; part.width * channels];
    for (y, line) in out.chunks_exact_mut(width * channels).enumerate() {
        let down = taps(y, height, part.top, part.height);
        sums.fill(0.0);
        for (row, share) in (down.first..).zip(&down.shares) {
            let from = (row * columns + part.left) * channels;
            for (sum, byte) in sums.iter_mut().zip(&image[from..]) {
                *sum += share * f32::from(*byte);
            }
        }
        for (x, taps) in across.iter().enumerate() {
            let to = if part.is_flipped { width - 1 - x } else { x };
            for channel in 0..channels {
                let mut value = 0f32;
                for (column, share) in (taps.first - part.left..).zip(&taps.shares) {
                    value += share * sums[column * channels + channel];
                }
                line[to * channels + channel] = value.round_ties_even().clamp(0.0, 255.0) as u8;
            }
        }
    }
}
