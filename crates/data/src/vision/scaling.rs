//! A whole image at another size, with the arithmetic of transformers' processors.
//!
//! The filter is bicubic with antialiasing: pixel x of W is the weighted sum of the pixels i around c = (x + 1/2) w / W with
//! weights f((i + 1/2 - c) / s), s = max(1, w / W), made to sum to 1. Rows are scaled across, rounded to bytes, and then
//! down. Weights are whole numbers: w 2^p rounded, with the largest p at which the largest of them has 16 bits. Sums are exact,
//! rounded once and cut off at 0 and 255. A direction whose extent stays the same is left alone.

use pulp::{Arch, Simd, WithSimd};

use crate::images::{CHANNELS, Filter};

/// The pixels that each of the result is made of, and their weights times 2^`bits`.
pub(super) struct Weights {
    /// The first pixel for each.
    pub first: Vec<usize>,
    /// Of each as many: those that reach less far have weights of 0.
    pub all: Vec<i16>,
    pub each: usize,
    pub bits: u32,
}

/// Bits behind the point that a weight has at most.
const MOST_BITS: u32 = 22;

impl Weights {
    /// `to` pixels out of `from`.
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
        let is_too_fine =
            |bits: &u32| (0.5 + largest * f64::from(1u32 << (bits + 1))) as i32 > i32::from(i16::MAX);
        let bits = (0..MOST_BITS).find(is_too_fine).unwrap_or(MOST_BITS);
        let whole = |weight: &f64| (weight * f64::from(1u32 << bits)).round() as i16;
        let mut made = Weights { first: vec![], all: Vec::with_capacity(to * each), each, bits };
        for (begin, weights) in &exact {
            // No pixel beyond the last is read, though its weight would be 0.
            let first = (*begin).min(from - each);
            made.first.push(first);
            made.all.extend(std::iter::repeat_n(0, begin - first));
            made.all.extend(weights.iter().map(whole));
            made.all.resize(made.first.len() * each, 0);
        }
        made
    }

    fn at(&self, place: usize) -> (usize, &[i16]) {
        (self.first[place], &self.all[place * self.each..][..self.each])
    }

    #[inline(always)]
    pub fn byte(&self, sum: i32) -> u8 {
        (sum >> self.bits).clamp(0, 255) as u8
    }

    /// A sum's beginning, by which it is rounded to the nearest.
    #[inline(always)]
    pub fn half(&self) -> i32 {
        1 << (self.bits - 1)
    }
}

/// Scales rows of red, green and blue, and gives each row of the result with its number, from the top.
pub(super) fn scale(rgb: &[u8], from: (usize, usize), to: (usize, usize), put: impl FnMut(usize, &[u8])) {
    assert_eq!(rgb.len(), from.0 * from.1 * CHANNELS, "the image's bytes");
    // Whole numbers throughout: bytes do not depend on how wide vectors are.
    Arch::new().dispatch(Scaling { rgb, from, to, put });
}

struct Scaling<'a, P> {
    rgb: &'a [u8],
    /// Width and height.
    from: (usize, usize),
    to: (usize, usize),
    put: P,
}

impl<P: FnMut(usize, &[u8])> WithSimd for Scaling<'_, P> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { rgb, from, to, mut put } = self;
        let across = (from.0 != to.0).then(|| Weights::new(from.0, to.0));
        let down = (from.1 != to.1).then(|| Weights::new(from.1, to.1));
        let (stride, line) = (from.0 * CHANNELS, to.0 * CHANNELS);
        // Rows at their new width, as many as a row of the result is made of: row y of the image is at y mod `held`.
        let held = down.as_ref().map_or(1, |down| down.each);
        let mut narrow = vec![0; if across.is_some() { held * line } else { 0 }];
        let mut made = 0;
        let mut result = vec![0; if down.is_some() { line } else { 0 }];
        let mut sums = vec![0; if down.is_some() { line } else { 0 }];
        for y in 0..to.1 {
            let (first, weights) = down.as_ref().map_or((y, &[][..]), |down| down.at(y));
            if let Some(across) = &across {
                for row in made.max(first)..first + held {
                    scale_across(
                        across,
                        &rgb[row * stride..][..stride],
                        &mut narrow[row % held * line..][..line],
                    );
                }
                made = first + held;
            }
            let row = |number: usize| match across.is_some() {
                true => &narrow[number % held * line..][..line],
                false => &rgb[number * stride..][..stride],
            };
            match &down {
                None => put(y, row(first)),
                Some(down) => {
                    sums.fill(down.half());
                    for (number, weight) in weights.iter().enumerate() {
                        for (sum, byte) in sums.iter_mut().zip(row(first + number)) {
                            *sum += i32::from(*weight) * i32::from(*byte);
                        }
                    }
                    result.iter_mut().zip(&sums).for_each(|(byte, sum)| *byte = down.byte(*sum));
                    put(y, &result);
                }
            }
        }
    }
}

/// A row at its new width.
#[inline(always)]
fn scale_across(weights: &Weights, row: &[u8], out: &mut [u8]) {
    let pixels = row.as_chunks::<CHANNELS>().0;
    for (place, out) in out.as_chunks_mut::<CHANNELS>().0.iter_mut().enumerate() {
        let (first, shares) = weights.at(place);
        let mut sums = [weights.half(); CHANNELS];
        for (share, pixel) in shares.iter().zip(&pixels[first..]) {
            for (sum, byte) in sums.iter_mut().zip(pixel) {
                *sum += i32::from(*share) * i32::from(*byte);
            }
        }
        *out = sums.map(|sum| weights.byte(sum));
    }
}
