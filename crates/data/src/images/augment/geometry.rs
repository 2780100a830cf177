//! Geometric operations of RandAugment, with Pillow's arithmetic: affine maps from output to input coordinates.

use super::canvas::Canvas;
use crate::images::CHANNELS;
use crate::images::filter::Filter;

/// Rotates counterclockwise around the centre.
pub(super) fn rotate(canvas: &mut Canvas<'_>, degrees: f64) {
    // Pillow rounds to 15 digits, so that right angles are exact.
    let rounded = |value: f64| (value * 1e15).round() / 1e15;
    let (sin, cos) = (-degrees.to_radians()).sin_cos();
    let (sin, cos) = (rounded(sin), rounded(cos));
    let (x, y) = (canvas.width as f64 / 2.0, canvas.height() as f64 / 2.0);
    let right = cos * -x + sin * -y + x;
    let down = -sin * -x + cos * -y + y;
    affine(canvas, [cos, sin, right, -sin, cos, down]);
}

pub(super) fn shear_x(canvas: &mut Canvas<'_>, factor: f64) {
    affine(canvas, [1.0, factor, 0.0, 0.0, 1.0, 0.0]);
}

pub(super) fn shear_y(canvas: &mut Canvas<'_>, factor: f64) {
    affine(canvas, [1.0, 0.0, 0.0, factor, 1.0, 0.0]);
}

/// Translates by a share of the width.
pub(super) fn translate_x(canvas: &mut Canvas<'_>, share: f64) {
    affine(canvas, [1.0, 0.0, share * canvas.width as f64, 0.0, 1.0, 0.0]);
}

/// Translates by a share of the height.
pub(super) fn translate_y(canvas: &mut Canvas<'_>, share: f64) {
    affine(canvas, [1.0, 0.0, 0.0, 0.0, 1.0, share * canvas.height() as f64]);
}

/// Takes the pixel at (x, y) from (a x + b y + c, d x + e y + f), where coordinates are those of pixel edges.
fn affine(canvas: &mut Canvas<'_>, [a, b, c, d, e, f]: [f64; 6]) {
    let source = Source { width: canvas.width, height: canvas.height(), pixels: canvas.spare };
    source.pixels.clear();
    source.pixels.extend_from_slice(canvas.pixels);
    let inside = [0.0..source.width as f64, 0.0..source.height as f64];
    for (y, row) in canvas.pixels.chunks_exact_mut(source.width * CHANNELS).enumerate() {
        for (x, pixel) in row.chunks_exact_mut(CHANNELS).enumerate() {
            let (x, y) = (x as f64 + 0.5, y as f64 + 0.5);
            let place = [a * x + b * y + c, d * x + e * y + f];
            let value = if inside[0].contains(&place[0]) && inside[1].contains(&place[1]) {
                source.at(canvas.filter, place.map(|along| along - 0.5))
            } else {
                canvas.fill
            };
            pixel.copy_from_slice(&value);
        }
    }
}

/// The input image.
struct Source<'a> {
    width: usize,
    height: usize,
    pixels: &'a mut Vec<u8>,
}

impl Source<'_> {
    /// The interpolated colour at a position, relative to the centre of the first pixel.
    fn at(&self, filter: Filter, [x, y]: [f64; 2]) -> [u8; CHANNELS] {
        let (left, top) = (x.floor(), y.floor());
        let (right, down) = (x - left, y - top);
        let (left, top) = (left as isize, top as isize);
        match filter {
            Filter::Bilinear => {
                let columns = [left, left + 1].map(|x| inside(x, self.width));
                let rows = [top, top + 1].map(|y| inside(y, self.height));
                self.mixed(
                    rows,
                    columns,
                    |[one, other]| one + (other - one) * right,
                    |[one, other]| one + (other - one) * down,
                )
            }
            // The scale is 1, so the four nearest pixels in each direction suffice.
            Filter::Bicubic | Filter::Lanczos => {
                let columns = [-1, 0, 1, 2].map(|by| inside(left + by, self.width));
                let rows = [-1, 0, 1, 2].map(|by| inside(top + by, self.height));
                self.mixed(rows, columns, |four| cubic(four, right), |four| cubic(four, down))
            }
        }
    }

    /// Interpolates along each of the given rows, and then across the rows.
    fn mixed<const N: usize>(
        &self,
        rows: [usize; N],
        columns: [usize; N],
        along: impl Fn([f64; N]) -> f64,
        across: impl Fn([f64; N]) -> f64,
    ) -> [u8; CHANNELS] {
        let rows = rows.map(|row| &self.pixels[row * self.width * CHANNELS..][..self.width * CHANNELS]);
        std::array::from_fn(|channel| {
            let value = |row: &[u8]| along(columns.map(|column| f64::from(row[column * CHANNELS + channel])));
            // The conversion saturates and truncates.
            across(rows.map(value)) as u8
        })
    }
}

/// The index itself, clamped to the image.
fn inside(place: isize, count: usize) -> usize {
    place.clamp(0, count as isize - 1) as usize
}

/// Pillow's cubic interpolation between the two middle values, with coefficient -1.
fn cubic([before, one, other, behind]: [f64; 4], by: f64) -> f64 {
    let slope = -before + other;
    let curve = 2.0 * (before - one) + other - behind;
    let bend = -before + one - other + behind;
    one + by * (slope + by * (curve + by * bend))
}
