//! Resizes a whole image with the arithmetic of the transformers library's processors.
//!
//! The filter is bicubic with antialiasing: pixel x of W is the weighted sum of the pixels i around c = (x + 1/2) w / W with
//! normalised weights f((i + 1/2 - c) / s), where s = max(1, w / W). The horizontal pass comes first and is rounded to bytes,
//! then the vertical one. Weights are fixed-point: w 2^p rounded, with the largest p for which the largest weight fits 16 bits.
//! Sums are exact, rounded once and clipped to 0 and 255. A direction whose size stays the same is skipped.
//!
//! Rows pass horizontally in strips, into a window of the rows that an output row depends on, so that they are still in the
//! cache for the vertical pass.

use std::ops::Range;

#[cfg(target_arch = "x86_64")]
use super::scaling_avx2::Avx2;
use crate::images::{CHANNELS, Filter};

/// The source pixels of each output pixel, and their weights times 2^`bits`.
pub(super) struct Weights {
    /// First source pixel of each output pixel.
    pub first: Vec<usize>,
    /// Equally many weights per output pixel, padded with zeros.
    pub all: Vec<i16>,
    pub each: usize,
    pub bits: u32,
}

/// Most fractional bits of a weight.
const MOST_BITS: u32 = 22;

impl Weights {
    /// For `to` pixels from `from`.
    fn new(from: usize, to: usize) -> Weights {
        let step = from as f64 / to as f64;
        let scale = step.max(1.0);
        let (reach, narrowed) = (Filter::Bicubic.reach() * scale, 1.0 / scale);
        let exact = |place: usize| {
            let centre = step * (place as f64 + 0.5);
            let begin = (centre - reach + 0.5).max(0.0) as usize;
            let end = ((centre + reach + 0.5) as usize).min(from);
            let weight = |at: usize| Filter::Bicubic.weight((at as f64 - centre + 0.5) * narrowed);
            let weights: Vec<f64> = (begin..end).map(weight).collect();
            let sum: f64 = weights.iter().sum();
            (begin, weights.into_iter().map(|weight| weight / sum).collect::<Vec<f64>>())
        };
        let exact: Vec<(usize, Vec<f64>)> = (0..to).map(exact).collect();
        let each = exact.iter().map(|(_, weights)| weights.len()).max().unwrap_or(1);
        let largest = exact.iter().flat_map(|(_, weights)| weights).fold(0.0, |a: f64, b| a.max(*b));
        let overflows =
            |bits: &u32| (0.5 + largest * f64::from(1u32 << (bits + 1))) as i32 > i32::from(i16::MAX);
        let bits = (0..MOST_BITS).find(overflows).unwrap_or(MOST_BITS);
        let whole = |weight: &f64| (weight * f64::from(1u32 << bits)).round() as i16;
        let mut made = Weights { first: vec![], all: Vec::with_capacity(to * each), each, bits };
        for (begin, weights) in &exact {
            // Pixels after the last one must not be read, even with weight 0.
            let first = (*begin).min(from - each);
            made.first.push(first);
            made.all.extend(std::iter::repeat_n(0, begin - first));
            made.all.extend(weights.iter().map(whole));
            made.all.resize(made.first.len() * each, 0);
        }
        made
    }

    pub fn at(&self, place: usize) -> (usize, &[i16]) {
        (self.first[place], &self.all[place * self.each..][..self.each])
    }

    #[inline(always)]
    pub fn byte(&self, sum: i32) -> u8 {
        (sum >> self.bits).clamp(0, 255) as u8
    }

    /// The initial value of a sum, which makes it round to nearest.
    #[inline(always)]
    pub fn half(&self) -> i32 {
        1 << (self.bits - 1)
    }
}

/// Rows per strip of the horizontal pass.
pub(super) const STRIP: usize = 32;
/// Extra strips in the window, besides the rows that it must hold.
const STRIPS: usize = 4;

/// Contiguous rows of bytes.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    pub bytes: &'a [u8],
    /// Bytes per row.
    pub stride: usize,
}

impl<'a> Rows<'a> {
    pub fn count(&self) -> usize {
        self.bytes.len() / self.stride
    }

    pub fn at(&self, row: usize) -> &'a [u8] {
        &self.bytes[row * self.stride..][..self.stride]
    }

    fn range(&self, rows: Range<usize>) -> Rows<'a> {
        Rows { bytes: &self.bytes[rows.start * self.stride..rows.end * self.stride], ..*self }
    }
}

/// The two passes, for an instruction set. All implementations give the same bytes.
pub(super) trait Passes {
    /// Horizontal pass over at most a strip of rows, into rows of `out`.
    fn across(&mut self, weights: &Weights, rows: Rows<'_>, out: &mut [u8]);

    /// Vertical pass: fills row `place` of the output from `rows`, which begin with the first source row.
    fn down(&mut self, weights: &Weights, place: usize, rows: Rows<'_>, out: &mut [u8]);
}

/// The compiler's own vectorisation of plain loops.
pub(super) struct Portable;

impl Passes for Portable {
    fn across(&mut self, weights: &Weights, rows: Rows<'_>, out: &mut [u8]) {
        let lines = out.chunks_exact_mut(weights.first.len() * CHANNELS);
        for (row, line) in lines.enumerate().take(rows.count()) {
            let pixels = rows.at(row).as_chunks::<CHANNELS>().0;
            for (place, out) in line.as_chunks_mut::<CHANNELS>().0.iter_mut().enumerate() {
                let (first, own) = weights.at(place);
                let mut sums = [weights.half(); CHANNELS];
                for (weight, pixel) in own.iter().zip(&pixels[first..]) {
                    for (sum, byte) in sums.iter_mut().zip(pixel) {
                        *sum += i32::from(*weight) * i32::from(*byte);
                    }
                }
                *out = sums.map(|sum| weights.byte(sum));
            }
        }
    }

    fn down(&mut self, weights: &Weights, place: usize, rows: Rows<'_>, out: &mut [u8]) {
        let mut sums = vec![weights.half(); out.len()];
        for (row, weight) in weights.at(place).1.iter().enumerate() {
            for (sum, byte) in sums.iter_mut().zip(rows.at(row)) {
                *sum += i32::from(*weight) * i32::from(*byte);
            }
        }
        out.iter_mut().zip(&sums).for_each(|(byte, sum)| *byte = weights.byte(*sum));
    }
}

/// Resizes an RGB image, and calls `put` with each output row and its number, from the top.
pub(super) fn scale(rgb: &[u8], from: (usize, usize), to: (usize, usize), put: impl FnMut(usize, &[u8])) {
    #[cfg(target_arch = "x86_64")]
    if let Some(mut passes) = Avx2::try_new() {
        return scale_by(&mut passes, rgb, from, to, put);
    }
    scale_by(&mut Portable, rgb, from, to, put);
}

/// As [`scale`], with these passes; sizes are width and height.
fn scale_by(
    passes: &mut impl Passes,
    rgb: &[u8],
    from: (usize, usize),
    to: (usize, usize),
    mut put: impl FnMut(usize, &[u8]),
) {
    assert_eq!(rgb.len(), from.0 * from.1 * CHANNELS, "the image's bytes");
    let image = Rows { bytes: rgb, stride: from.0 * CHANNELS };
    let across = (from.0 != to.0).then(|| Weights::new(from.0, to.0));
    let down = (from.1 != to.1).then(|| Weights::new(from.1, to.1));
    let (line, held) = (to.0 * CHANNELS, down.as_ref().map_or(1, |down| down.each));
    // Rows `begin` to `end` of the image after the horizontal pass, if it is needed.
    let (mut window, mut begin, mut end) = (vec![], 0, 0);
    if across.is_some() {
        window.resize((held + STRIPS * STRIP) * line, 0);
    }
    let mut result = vec![0; if down.is_some() { line } else { 0 }];
    for y in 0..to.1 {
        let first = down.as_ref().map_or(y, |down| down.first[y]);
        if let Some(across) = &across {
            while end < first + held {
                if (end - begin + STRIP) * line > window.len() {
                    window.copy_within((first - begin) * line..(end - begin) * line, 0);
                    begin = first;
                }
                let strip = image.range(end..(end + STRIP).min(from.1));
                passes.across(across, strip, &mut window[(end - begin) * line..][..strip.count() * line]);
                end += strip.count();
            }
        }
        let rows = match &across {
            Some(_) => Rows { bytes: &window, stride: line }.range(first - begin..first - begin + held),
            None => image.range(first..first + held),
        };
        match &down {
            None => put(y, rows.at(0)),
            Some(down) => {
                passes.down(down, y, rows, &mut result);
                put(y, &result);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::{key, mix};

    fn noise(width: usize, height: usize) -> Vec<u8> {
        (0..width * height * CHANNELS).map(|at| mix(key(5, at as u64)) as u8).collect()
    }

    fn scaled(passes: &mut impl Passes, from: (usize, usize), to: (usize, usize)) -> Vec<u8> {
        let mut out = vec![];
        scale_by(passes, &noise(from.0, from.1), from, to, |y, row| {
            assert_eq!(out.len(), y * row.len());
            out.extend_from_slice(row);
        });
        assert_eq!(out.len(), to.0 * to.1 * CHANNELS);
        out
    }

    /// Weights of a pixel sum to 1, up to half of the last bit of each.
    #[test]
    fn weights_sum_to_one() {
        for (from, to) in [(1, 7), (7, 1), (720, 704), (45, 256), (1000, 32), (2000, 32)] {
            let weights = Weights::new(from, to);
            for place in 0..to {
                let (first, own) = weights.at(place);
                assert!(first + own.len() <= from);
                let sum: i32 = own.iter().map(|weight| i32::from(*weight)).sum();
                assert!(
                    (sum - (1 << weights.bits)).abs() <= own.len() as i32 / 2 + 1,
                    "{from} to {to}: {sum}"
                );
            }
        }
    }

    #[test]
    fn an_image_of_its_own_size_is_itself() {
        assert_eq!(scaled(&mut Portable, (9, 7), (9, 7)), noise(9, 7));
    }

    /// Full and partial strips, moving windows, odd numbers of weights, rows of any length.
    #[cfg(target_arch = "x86_64")]
    #[test]
    fn bytes_do_not_depend_on_instructions() {
        let Some(mut passes) = Avx2::try_new() else { return };
        for (from, to) in [
            ((1, 1), (32, 32)),
            ((45, 30), (64, 32)),
            ((37, 29), (11, 5)),
            ((33, 300), (64, 352)),
            ((64, 301), (64, 288)),
            ((65, 96), (96, 96)),
            ((130, 333), (7, 40)),
            ((300, 31), (288, 32)),
            ((5, 700), (32, 3)),
        ] {
            let (fast, plain) = (scaled(&mut passes, from, to), scaled(&mut Portable, from, to));
            assert!(fast == plain, "{from:?} to {to:?}");
        }
    }
}
