//! A part of a picture at another size, mirrored where asked: one pass from bytes to bytes.
//!
//! Pixel x of W is, of a part of w pixels, the weighted mean of the part's pixels i around c = (x + 1/2) w / W, with
//! weights max(0, 1 - |i + 1/2 - c| / s) and s = max(1, w / W), and so it is in height. Where the part is smaller than
//! the view this is bilinear interpolation; where it is larger every pixel counts, so nothing flickers. No pixel outside
//! the part has a share. It is what other tools call bilinear with antialiasing.
//!
//! Sums are f32 and rounded once, at the end: a byte differs from that of the definition only where its value is within
//! 1e-4 of the middle between two bytes.

use super::CHANNELS;
use super::stored::Picture;

/// A part of a picture. Sides are not whole where the picture was decoded smaller than it is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Part {
    pub left: f64,
    pub top: f64,
    pub width: f64,
    pub height: f64,
    pub is_flipped: bool,
}

/// The pixels that one of the result is made of, and their shares, which sum to 1.
struct Taps {
    /// Of pixel x: the first in the picture, and where its shares begin in `shares`.
    begin: Vec<(usize, usize)>,
    shares: Vec<f32>,
}

impl Taps {
    /// For `count` pixels out of `extent` from `start` on, of `there` that the picture has.
    fn new(count: usize, start: f64, extent: f64, there: usize) -> Self {
        let first = start.floor() as usize;
        let end = ((start + extent).ceil() as usize).min(there);
        let step = extent / count as f64;
        let reach = step.max(1.0);
        let mut taps = Self { begin: Vec::with_capacity(count + 1), shares: Vec::new() };
        let mut weights = Vec::new();
        for place in 0..count {
            let centre = start + (place as f64 + 0.5) * step;
            let from = ((centre - reach - 0.5).ceil().max(0.0) as usize).clamp(first, end - 1);
            let to = ((centre + reach + 0.5).ceil().max(0.0) as usize).clamp(from + 1, end);
            let weight = |at: usize| (1.0 - (at as f64 + 0.5 - centre).abs() / reach).max(0.0);
            weights.clear();
            weights.extend((from..to).map(weight));
            let sum: f64 = weights.iter().sum();
            // Shares of 0 at the ends would only cost time.
            let led = weights.iter().take_while(|weight| **weight == 0.0).count();
            let kept = weights.len() - weights.iter().rev().take_while(|weight| **weight == 0.0).count();
            taps.begin.push((from + led, taps.shares.len()));
            taps.shares.extend(weights[led..kept].iter().map(|weight| (weight / sum) as f32));
        }
        taps.begin.push((0, taps.shares.len()));
        taps
    }

    fn at(&self, place: usize) -> (usize, &[f32]) {
        let (first, from) = self.begin[place];
        (first, &self.shares[from..self.begin[place + 1].1])
    }
}

/// Fills `out`, of `height` rows of `width` pixels, with a part of a picture.
pub(super) fn resample(picture: Picture<'_>, part: Part, width: usize, height: usize, out: &mut [u8]) {
    assert_eq!(out.len(), width * height * CHANNELS, "the view's bytes");
    let across = Taps::new(width, part.left, part.width, picture.width);
    let down = Taps::new(height, part.top, part.height, picture.height);
    let columns = (part.left.floor() as usize, ((part.left + part.width).ceil() as usize).min(picture.width));
    let range = columns.0 * CHANNELS..columns.1 * CHANNELS;
    // Rows first: they are sums of whole runs of bytes, which vector units do well, and the view has fewer rows.
    let mut sums = vec![0f32; range.len()];
    for (y, line) in out.chunks_exact_mut(width * CHANNELS).enumerate() {
        let (first, shares) = down.at(y);
        sums.fill(0.0);
        for (row, share) in shares.iter().enumerate() {
            let from = (first + row) * picture.width * CHANNELS;
            let bytes = &picture.rgb[from + range.start..from + range.end];
            for (sum, byte) in sums.iter_mut().zip(bytes) {
                *sum += share * f32::from(*byte);
            }
        }
        for x in 0..width {
            let (first, shares) = across.at(x);
            let pixels = &sums[(first - columns.0) * CHANNELS..][..shares.len() * CHANNELS];
            let mut pixel = [0f32; CHANNELS];
            for (share, value) in shares.iter().zip(pixels.chunks_exact(CHANNELS)) {
                for (sum, value) in pixel.iter_mut().zip(value) {
                    *sum += share * value;
                }
            }
            let x = if part.is_flipped { width - 1 - x } else { x };
            for (byte, value) in line[x * CHANNELS..][..CHANNELS].iter_mut().zip(pixel) {
                *byte = (value + 0.5) as u8;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::{key, mix};

    /// The definition, pixel by pixel in f64.
    fn defined(picture: Picture<'_>, part: Part, width: usize, height: usize) -> Vec<f64> {
        let weights = |place: usize, count: usize, start: f64, extent: f64, there: usize| {
            let (step, centre) =
                (extent / count as f64, start + (place as f64 + 0.5) * extent / count as f64);
            let end = ((start + extent).ceil() as usize).min(there);
            let weights = (start.floor() as usize..end)
                .map(|at| (at, (1.0 - (at as f64 + 0.5 - centre).abs() / step.max(1.0)).max(0.0)));
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

    fn noise(width: usize, height: usize) -> Vec<u8> {
        (0..width * height * CHANNELS).map(|at| mix(key(3, at as u64)) as u8).collect()
    }

    #[test]
    fn bytes_are_those_of_the_definition() {
        let (width, height) = (37, 29);
        let bytes = noise(width, height);
        let picture = Picture { width, height, rgb: &bytes };
        let part = |left, top, width, height, is_flipped| Part { left, top, width, height, is_flipped };
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
            resample(picture, part, w, h, &mut out);
            for (byte, value) in out.iter().zip(defined(picture, part, w, h)) {
                assert!((f64::from(*byte) - value).abs() <= 0.5001, "{byte} of {value} with {part:?}");
            }
        }
    }

    #[test]
    fn a_part_at_its_own_size_is_itself() {
        let bytes = noise(9, 7);
        let picture = Picture { width: 9, height: 7, rgb: &bytes };
        let whole = Part { left: 0.0, top: 0.0, width: 9.0, height: 7.0, is_flipped: false };
        let mut out = vec![0; bytes.len()];
        resample(picture, whole, 9, 7, &mut out);
        assert_eq!(out, bytes);
        resample(picture, Part { is_flipped: true, ..whole }, 9, 7, &mut out);
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
            let part = Part { left: 1.5, top: 3.25, width: 47.0, height: 31.5, is_flipped: false };
            let mut out = vec![9; 13 * 70 * CHANNELS];
            resample(picture, part, 13, 70, &mut out);
            assert!(out.iter().all(|byte| *byte == colour));
        }
    }
}
