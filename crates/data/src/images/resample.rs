//! Resizes a part of an image, mirrored where asked, in one pass from bytes to bytes.
//!
//! Pixel x of W is the weighted mean of the pixels i of a part of w pixels around c = (x + 1/2) w / W, with weights
//! f(|i + 1/2 - c| / s), where s = max(1, w / W) and f is the filter; the same holds vertically. With the bilinear filter
//! f(d) = max(0, 1 - d), this is bilinear interpolation when enlarging; when shrinking every pixel counts, which other tools
//! call antialiasing. Pixels outside the part have no weight, unless the part was cut out of an image that was scaled as a
//! whole.
//!
//! Sums are f32 and rounded once at the end: a byte differs from the definition only where its value is within 1e-4 of the
//! middle between two bytes.

use super::CHANNELS;
use super::decode::Plane;
use super::filter::Filter;
use super::stored::Picture;

/// A part of an image. Its sides are fractional where the image was decoded at a reduced scale.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Region {
    pub left: f64,
    pub top: f64,
    pub width: f64,
    pub height: f64,
    pub is_flipped: bool,
}

/// The filter and the edge handling of a resize.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Scaling {
    pub filter: Filter,
    /// Whether pixels outside the part have weight, as when the whole image is scaled and cropped afterwards.
    pub whole: bool,
}

/// A part along one axis: its start and length, and the range of pixels that may have weight.
#[derive(Debug, Clone, Copy)]
struct AxisRange {
    start: f64,
    extent: f64,
    begin: usize,
    end: usize,
}

impl AxisRange {
    /// `size` is the number of pixels of the image.
    fn new(start: f64, extent: f64, size: usize, whole: bool) -> Self {
        let (begin, end) = match whole {
            true => (0, size),
            false => (start.floor() as usize, ((start + extent).ceil() as usize).min(size)),
        };
        Self { start, extent, begin, end }
    }
}

/// The source pixels of each output pixel and their weights, which sum to 1.
struct Taps {
    /// First source pixel of each output pixel.
    first: Vec<usize>,
    /// Equally many weights per output pixel, padded with zeros.
    shares: Vec<f32>,
    each: usize,
}

impl Taps {
    /// For `count` output pixels.
    fn new(count: usize, axis: AxisRange, filter: Filter) -> Self {
        let AxisRange { start, extent, begin, end } = axis;
        let step = extent / count as f64;
        let scale = step.max(1.0);
        let reach = filter.reach() * scale;
        let centre = |place: usize| start + (place as f64 + 0.5) * step;
        let weight = |at: usize, centre: f64| filter.weight((at as f64 + 0.5 - centre) / scale);
        // The range of pixels with weight. At least one has: a centre is at most 1/2 from that of a pixel.
        let touched = |place: usize| {
            let centre = centre(place);
            let mut from = ((centre - reach - 0.5).floor().max(0.0) as usize).clamp(begin, end - 1);
            let mut to = ((centre + reach + 0.5).ceil().max(0.0) as usize).clamp(from + 1, end);
            while from + 1 < to && weight(from, centre) == 0.0 {
                from += 1;
            }
            while from + 1 < to && weight(to - 1, centre) == 0.0 {
                to -= 1;
            }
            (from, to)
        };
        let touched: Vec<(usize, usize)> = (0..count).map(touched).collect();
        let each = touched.iter().map(|(from, to)| to - from).max().unwrap_or(1);
        let mut taps =
            Self { first: Vec::with_capacity(count), shares: Vec::with_capacity(count * each), each };
        for (place, (from, to)) in touched.into_iter().enumerate() {
            let centre = centre(place);
            let sum: f64 = (from..to).map(|at| weight(at, centre)).sum();
            // Keeps the padded range inside the image.
            let first = from.min(end - each);
            let share =
                |at: usize| if (from..to).contains(&at) { (weight(at, centre) / sum) as f32 } else { 0.0 };
            taps.first.push(first);
            taps.shares.extend((first..first + each).map(share));
        }
        taps
    }

    fn at(&self, place: usize) -> (usize, &[f32]) {
        (self.first[place], &self.shares[place * self.each..(place + 1) * self.each])
    }
}

/// Pixels of `C` bytes each, in rows that are `stride` bytes apart.
#[derive(Clone, Copy)]
struct Grid<'a> {
    bytes: &'a [u8],
    width: usize,
    height: usize,
    stride: usize,
}

/// Resizes a part of a grid, row by row from the top: `put` receives the row's number and its values.
fn scaled<const C: usize>(
    grid: Grid<'_>,
    (part, scaling): (Region, Scaling),
    (width, height): (usize, usize),
    mut put: impl FnMut(usize, &[f32]),
) {
    let columns = AxisRange::new(part.left, part.width, grid.width, scaling.whole);
    let rows = AxisRange::new(part.top, part.height, grid.height, scaling.whole);
    let (across, down) = (Taps::new(width, columns, scaling.filter), Taps::new(height, rows, scaling.filter));
    let range = columns.begin * C..columns.end * C;
    let line = match across.each {
        1 => line::<C, 1>,
        2 => line::<C, 2>,
        3 => line::<C, 3>,
        4 => line::<C, 4>,
        5 => line::<C, 5>,
        6 => line::<C, 6>,
        _ => line::<C, 0>,
    };
    // Vertically first: these are sums over contiguous bytes, which vectorise well, and the view has fewer rows.
    let mut sums = vec![0f32; range.len()];
    let mut values = vec![0f32; width * C];
    for y in 0..height {
        let (first, shares) = down.at(y);
        let row = |number: usize| {
            let from = (first + number) * grid.stride;
            &grid.bytes[from + range.start..from + range.end]
        };
        for (sum, byte) in sums.iter_mut().zip(row(0)) {
            *sum = shares[0] * f32::from(*byte);
        }
        for (number, share) in shares.iter().enumerate().skip(1) {
            for (sum, byte) in sums.iter_mut().zip(row(number)) {
                *sum += share * f32::from(*byte);
            }
        }
        line(&across, columns.begin, &sums, part.is_flipped, &mut values);
        put(y, &values);
    }
}

/// Resizes a row. `EACH` is the number of taps, where the compiler should know it; 0 for any number.
fn line<const C: usize, const EACH: usize>(
    taps: &Taps,
    begin: usize,
    sums: &[f32],
    is_flipped: bool,
    values: &mut [f32],
) {
    let each = if EACH == 0 { taps.each } else { EACH };
    let one = |value: &mut [f32], first: usize, shares: &[f32]| {
        let pixels = &sums[(first - begin) * C..][..each * C];
        let mut pixel = [0f32; C];
        for tap in 0..each {
            for channel in 0..C {
                pixel[channel] += shares[tap] * pixels[tap * C + channel];
            }
        }
        value.copy_from_slice(&pixel);
    };
    let taps = taps.first.iter().zip(taps.shares.chunks_exact(each));
    let values = values.chunks_exact_mut(C);
    if is_flipped {
        values.rev().zip(taps).for_each(|(value, (first, shares))| one(value, *first, shares));
    } else {
        values.zip(taps).for_each(|(value, (first, shares))| one(value, *first, shares));
    }
}

/// The nearest byte. Adding 2^23 leaves the rounded integer in the lowest mantissa bits, which vectorises, unlike the
/// language's conversion.
#[inline(always)]
pub(super) fn byte(value: f32) -> u8 {
    (value.clamp(0.0, 255.0) + 8_388_608.0).to_bits() as u8
}

/// Fills `out`, of `height` rows of `width` pixels, with a part of an image.
pub(super) fn resample(
    picture: Picture<'_>,
    part: Region,
    scaling: Scaling,
    (width, height): (usize, usize),
    out: &mut [u8],
) {
    assert_eq!(out.len(), width * height * CHANNELS, "the view's bytes");
    let Picture { width: columns, height: rows, rgb } = picture;
    let grid = Grid { bytes: rgb, width: columns, height: rows, stride: columns * CHANNELS };
    scaled::<CHANNELS>(grid, (part, scaling), (width, height), |y, values| {
        let line = &mut out[y * width * CHANNELS..][..width * CHANNELS];
        line.iter_mut().zip(values).for_each(|(out, value)| *out = byte(*value));
    });
}

/// As [`resample`], for the planes of a JPEG, which are converted to RGB at the size of the view.
pub(super) fn resample_planes(
    planes: &[Plane],
    filter: Filter,
    (width, height): (usize, usize),
    out: &mut [u8],
) {
    let scaling = Scaling { filter, whole: false };
    assert_eq!(out.len(), width * height * CHANNELS, "the view's bytes");
    let values = planes.iter().map(|plane| {
        let mut values = vec![0f32; width * height];
        let Plane { bytes, stride, part, .. } = plane;
        let grid = Grid { bytes, width: plane.width, height: plane.height, stride: *stride };
        scaled::<1>(grid, (*part, scaling), (width, height), |y, row| {
            values[y * width..][..width].copy_from_slice(row)
        });
        values
    });
    let values: Vec<Vec<f32>> = values.collect();
    match values.as_slice() {
        [grey] => out.chunks_exact_mut(CHANNELS).zip(grey).for_each(|(pixel, grey)| pixel.fill(byte(*grey))),
        [light, blue, red] => {
            // One channel at a time, so that the compiler vectorises it.
            let mut bytes: [Vec<u8>; CHANNELS] = std::array::from_fn(|_| vec![0; width]);
            for (y, line) in out.chunks_exact_mut(width * CHANNELS).enumerate() {
                let row = y * width..(y + 1) * width;
                let (light, blue, red) = (&light[row.clone()], &blue[row.clone()], &red[row]);
                let [reds, greens, blues] = &mut bytes;
                for at in 0..width {
                    let (light, blue, red) = (light[at], blue[at] - 128.0, red[at] - 128.0);
                    reds[at] = byte(light + 1.402 * red);
                    greens[at] = byte(light - 0.344_136_3 * blue - 0.714_136_3 * red);
                    blues[at] = byte(light + 1.772 * blue);
                }
                let colours = reds.iter().zip(greens.iter()).zip(blues.iter());
                for (pixel, ((red, green), blue)) in line.chunks_exact_mut(CHANNELS).zip(colours) {
                    pixel.copy_from_slice(&[*red, *green, *blue]);
                }
            }
        }
        _ => unreachable!("a JPEG of planes has one or three"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::{key, mix};

    /// The definition, pixel by pixel in f64.
    fn defined(
        picture: Picture<'_>,
        part: Region,
        Scaling { filter, whole }: Scaling,
        width: usize,
        height: usize,
    ) -> Vec<f64> {
        let weights = |place: usize, count: usize, start: f64, extent: f64, size: usize| {
            let (step, centre) =
                (extent / count as f64, start + (place as f64 + 0.5) * extent / count as f64);
            let end = ((start + extent).ceil() as usize).min(size);
            let all = if whole { 0..size } else { start.floor() as usize..end };
            let weights = all.map(|at| (at, filter.weight((at as f64 + 0.5 - centre) / step.max(1.0))));
            weights.collect::<Vec<_>>()
        };
        let mut out = Vec::new();
        for y in 0..height {
            let down = weights(y, height, part.top, part.height, picture.height);
            for x in 0..width {
                let x = if part.is_flipped { width - 1 - x } else { x };
                let across = weights(x, width, part.left, part.width, picture.width);
                for channel in 0..CHANNELS {
                    let (mut sum, mut total) = (0.0, 0.0);
                    for (row, share) in &down {
                        for (column, part) in &across {
                            let at = (row * picture.width + column) * CHANNELS + channel;
                            sum += share * part * f64::from(picture.rgb[at]);
                            total += share * part;
                        }
                    }
                    out.push(sum / total);
                }
            }
        }
        out
    }

    const BICUBIC: Scaling = Scaling { filter: Filter::Bicubic, whole: false };

    fn noise(width: usize, height: usize) -> Vec<u8> {
        (0..width * height * CHANNELS).map(|at| mix(key(3, at as u64)) as u8).collect()
    }

    #[test]
    fn bytes_are_those_of_the_definition() {
        let (width, height) = (37, 29);
        let bytes = noise(width, height);
        let picture = Picture { width, height, rgb: &bytes };
        let part = |left, top, width, height, is_flipped| Region { left, top, width, height, is_flipped };
        for (part, w, h) in [
            (part(0.0, 0.0, 37.0, 29.0, false), 37, 29),
            (part(3.0, 2.0, 30.0, 20.0, true), 8, 9),
            (part(3.0, 2.0, 5.0, 4.0, false), 31, 64),
            (part(36.0, 28.0, 1.0, 1.0, true), 6, 5),
            (part(0.0, 7.0, 37.0, 1.0, false), 1, 3),
            (part(1.25, 2.5, 20.125, 25.75, true), 16, 16),
            (part(0.0, 0.0, 37.0, 29.0, true), 36, 30),
        ] {
            let mut out = vec![0; w * h * CHANNELS];
            for (filter, whole) in Filter::ALL.iter().flat_map(|filter| [(*filter, false), (*filter, true)]) {
                let scaling = Scaling { filter, whole };
                resample(picture, part, scaling, (w, h), &mut out);
                for (byte, value) in out.iter().zip(defined(picture, part, scaling, w, h)) {
                    let value = value.clamp(0.0, 255.0);
                    assert!((f64::from(*byte) - value).abs() <= 0.5001, "{byte} of {value} with {part:?}");
                }
            }
        }
    }

    #[test]
    fn a_part_at_its_own_size_is_itself() {
        let bytes = noise(9, 7);
        let picture = Picture { width: 9, height: 7, rgb: &bytes };
        let whole = Region { left: 0.0, top: 0.0, width: 9.0, height: 7.0, is_flipped: false };
        let mut out = vec![0; bytes.len()];
        resample(picture, whole, BICUBIC, (9, 7), &mut out);
        assert_eq!(out, bytes);
        resample(picture, Region { is_flipped: true, ..whole }, BICUBIC, (9, 7), &mut out);
        let mirrored: Vec<u8> = bytes
            .chunks(9 * CHANNELS)
            .flat_map(|row| row.chunks(CHANNELS).rev().flatten().copied().collect::<Vec<_>>())
            .collect();
        assert_eq!(out, mirrored);
    }

    #[test]
    fn one_colour_stays_that_colour() {
        for colour in [0, 1, 127, 254, 255] {
            let bytes = vec![colour; 50 * 40 * CHANNELS];
            let picture = Picture { width: 50, height: 40, rgb: &bytes };
            let part = Region { left: 1.5, top: 3.25, width: 47.0, height: 31.5, is_flipped: false };
            let mut out = vec![9; 13 * 70 * CHANNELS];
            resample(picture, part, BICUBIC, (13, 70), &mut out);
            assert!(out.iter().all(|byte| *byte == colour));
        }
    }
}
