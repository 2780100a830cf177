//! Moments in eight bits. 256 neighbours share a scale, a power of two, and each is an 8-bit float times it: E4M3 for the first
//! moment, and for the second E4M4, which has no sign (4 bits of exponent, 4 of mantissa, up to 496).
//!
//! The codes are floats rather than uniform steps because moments of neighbours differ by orders of magnitude. Down to 14
//! octaves below a block's largest value, the relative step is 1/8 to 1/16 for a first moment and half of that for a second
//! one; below that steps are uniform, so precision fades gradually. The scale is a power of two rather than the largest value
//! itself: division is exact, an unchanged value is not rounded again, all backends compute the same bits with a handful of
//! integer instructions, and every value is exact in bf16, which is what checkpoints hold. It costs at most one octave of the
//! range.
//!
//! Rounding is stochastic between the two neighbours and has no bias, with one exception: a second moment above 0 stays above
//! 0, because an update is divided by its root.

use crate::types::{bf16_from_f32, bf16_to_f32};

/// Elements that share a scale.
pub const BLOCK: usize = 256;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// E4M3: first moments.
    Signed,
    /// E4M4: second moments.
    Unsigned,
}

/// A factor that moves the exponents of 8-bit floats to the bottom of f32's: the bits of a float times `LOW_INVERSE` are the
/// code's bits, shifted left by the extra mantissa bits of f32.
const LOW: f32 = f32::from_bits((127 + 120) << 23);
const LOW_INVERSE: f32 = f32::from_bits((127 - 120) << 23);

/// The exponent that a block's bound is scaled to: 256, which both types can represent.
pub const TOP: i32 = 8;

impl Code {
    /// Number of mantissa bits that f32 has more.
    const fn shift(self) -> u32 {
        match self {
            Code::Signed => 20,
            Code::Unsigned => 19,
        }
    }

    /// The range of exponents of the power of two that bounds a block. From the lower end on, every value of a block is exact
    /// in bf16; blocks of smaller values take the lower end.
    pub const EXPONENTS: [i32; 2] = [-90, 127];

    /// A block's scale and its inverse, from its largest magnitude.
    #[inline(always)]
    pub fn scale(largest: f32) -> [f32; 2] {
        // The exponent plus one, unless the value is a power of two itself.
        let above = (largest.to_bits().wrapping_add(0x7f_ffff) >> 23) as i32 - 127;
        let [least, most] = Code::EXPONENTS;
        let exponent = above.clamp(least, most) - TOP;
        [exponent, -exponent].map(|e| f32::from_bits(((e + 127) as u32) << 23))
    }

    /// The value of a code before it is multiplied by the scale.
    #[inline(always)]
    pub fn decode(self, code: u8) -> f32 {
        match self {
            Code::Signed => {
                let size = f32::from_bits((code as u32 & 0x7f) << self.shift()) * LOW;
                f32::from_bits(size.to_bits() | (code as u32 & 0x80) << 24)
            }
            Code::Unsigned => f32::from_bits((code as u32) << self.shift()) * LOW,
        }
    }

    /// Rounds x times the scale's inverse stochastically to one of the two neighbouring codes.
    #[inline(always)]
    pub fn drawn(self, x: f32, inverse: f32, draw: u16) -> u8 {
        // The midpoint of one of 65,536 parts of a step, so a value that is a code's stays there.
        let part = (2 * draw as u32 + 1) << (self.shift() - 17);
        const BOUND: f32 = f32::from_bits(((TOP + 127) as u32) << 23);
        let size = (x.abs() * inverse).min(BOUND) * LOW_INVERSE;
        let code = size.to_bits().wrapping_add(part) >> self.shift();
        match self {
            Code::Signed => (code | x.to_bits() >> 24 & 0x80) as u8,
            Code::Unsigned => code.max((x > 0.0) as u32) as u8,
        }
    }

    /// The values of a block in bf16, without loss.
    pub fn widened(self, codes: &[u8], scale: f32, to: &mut [u16]) {
        for (to, code) in to.iter_mut().zip(codes) {
            *to = bf16_from_f32(self.decode(*code) * scale);
        }
    }

    /// Encodes a block, rounding to nearest, and returns its scale. Values from `widened` are restored exactly, perhaps under
    /// another scale.
    pub fn narrowed(self, values: &[u16], codes: &mut [u8]) -> f32 {
        const HALF: u16 = 0x7fff;
        let largest = values.iter().fold(0.0, |most: f32, x| most.max(bf16_to_f32(*x).abs()));
        let [scale, inverse] = Code::scale(largest);
        for (code, x) in codes.iter_mut().zip(values) {
            *code = self.drawn(bf16_to_f32(*x), inverse, HALF);
        }
        scale
    }
}

/// The largest value of E4M4.
const E4M4_MAX: f32 = 496.0;

pub fn e4m4_to_f32(code: u8) -> f32 {
    Code::Unsigned.decode(code)
}

/// Rounds to nearest even. Too large values saturate; negative values and NaN become 0.
pub fn e4m4_from_f32(x: f32) -> u8 {
    // `max` returns the number where one operand is NaN; `clamp` would keep the NaN.
    let above = x.max(0.0);
    let bits = (above.min(E4M4_MAX) * LOW_INVERSE).to_bits();
    ((bits + 0x3_ffff + (bits >> 19 & 1)) >> 19) as u8
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fp8::e4m3_to_f32;
    use crate::random::{normal, rounding};

    const CODES: [Code; 2] = [Code::Signed, Code::Unsigned];

    #[test]
    fn every_code_is_its_own_value() {
        assert_eq!([0x01, 0x10, 0x70, 0xff].map(e4m4_to_f32), [2f32.powi(-10), 2f32.powi(-6), 1.0, E4M4_MAX]);
        for code in 0..=255 {
            assert_eq!(e4m4_from_f32(e4m4_to_f32(code)), code);
            let signed = Code::Signed.decode(code);
            // 0x7f is E4M3's NaN; values of blocks stay below it.
            if code & 0x7f != 0x7f {
                assert_eq!(signed.to_bits(), e4m3_to_f32(code).to_bits(), "{code:#x}");
            }
        }
        for code in 0..255 {
            let middle = (e4m4_to_f32(code) + e4m4_to_f32(code + 1)) / 2.0;
            assert_eq!(e4m4_from_f32(middle), code + (code & 1), "{middle}");
            assert_eq!(e4m4_from_f32(middle * 1.0001), code + 1, "{middle}");
            assert_eq!(e4m4_from_f32(middle * 0.9999), code, "{middle}");
        }
        assert_eq!([f32::INFINITY, -1.0, f32::NAN].map(e4m4_from_f32), [255, 0, 0]);
    }

    /// A block of values of very different sizes.
    fn block(seed: u64, code: Code, size: f32) -> Vec<f32> {
        let draw = |i: usize, stream| normal(seed, stream, i as u64);
        let value = |i: usize| size * draw(i, 0) * (4.0 * draw(i, 1)).exp();
        let values = (0..BLOCK).map(value);
        values.map(|x| if code == Code::Unsigned { x.abs() } else { x }).collect()
    }

    fn encoded(code: Code, values: &[f32], updates: u32) -> (Vec<u8>, f32) {
        let largest = values.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
        let [scale, inverse] = Code::scale(largest);
        let word = |i: usize| rounding(i as u64 / 4, updates)[i % 4] as u16;
        (values.iter().enumerate().map(|(i, x)| code.drawn(*x, inverse, word(i))).collect(), scale)
    }

    /// Every value survives a checkpoint bit for bit, whatever the draws, also near the limits of f32.
    #[test]
    fn values_survive_bf16_and_back() {
        for (seed, size) in
            [1e-30, 1e-25, 1e-12, 1e-3, 1.0, 3e7, 1e30].into_iter().cycle().take(700).enumerate()
        {
            for code in CODES {
                let (codes, scale) = encoded(code, &block(seed as u64, code, size), seed as u32);
                let (mut saved, mut back) = (vec![0; BLOCK], vec![0; BLOCK]);
                code.widened(&codes, scale, &mut saved);
                let new_scale = code.narrowed(&saved, &mut back);
                for (old, new) in codes.iter().zip(&back) {
                    let (old, new) = (code.decode(*old) * scale, code.decode(*new) * new_scale);
                    assert_eq!(
                        old.to_bits(),
                        new.to_bits(),
                        "{code:?}, {size:e}, scale {scale:e}, {new_scale:e}"
                    );
                }
            }
        }
    }

    #[test]
    fn stochastic_rounding_is_unbiased_and_between_neighbours() {
        for code in CODES {
            let values = block(5, code, 1.0);
            let mut sums = vec![0.0; BLOCK];
            let updates = 4096;
            for t in 0..updates {
                let (codes, scale) = encoded(code, &values, t);
                for ((sum, x), c) in sums.iter_mut().zip(&values).zip(codes) {
                    let got = code.decode(c) * scale;
                    let step = (x.abs() / 8.0).max(scale * code.decode(1));
                    assert!((got - x).abs() <= step, "{code:?}: {x} became {got}");
                    *sum += got as f64;
                }
            }
            let (codes, scale) = encoded(code, &values, 0);
            for ((sum, x), c) in sums.iter().zip(&values).zip(codes) {
                let step = (x.abs() / 8.0).max(scale * code.decode(1)) as f64;
                // Five standard deviations of the mean of 4,096 draws. Below the smallest code second moments are rounded up.
                let is_least = code == Code::Unsigned && c <= 1;
                let off = (sum / updates as f64 - *x as f64).abs();
                assert!(is_least || off < 5.0 * 0.5 * step / 64.0, "{code:?}: {x} is off by {off}");
            }
        }
    }

    #[test]
    fn positive_second_moments_stay_positive_and_codes_are_stable() {
        let values: Vec<f32> =
            (0..BLOCK).map(|i| if i == 0 { 1.0 } else { 1e-30 * (i % 2) as f32 }).collect();
        let (codes, _) = encoded(Code::Unsigned, &values, 1);
        assert!(codes.iter().zip(&values).all(|(code, x)| (*code > 0) == (*x > 0.0)));
        for code in CODES {
            let (codes, scale) = encoded(code, &block(9, code, 1.0), 3);
            let values: Vec<f32> = codes.iter().map(|c| code.decode(*c) * scale).collect();
            for t in 0..100 {
                let (again, new_scale) = encoded(code, &values, t);
                let values_again = again.iter().map(|c| code.decode(*c) * new_scale);
                assert!(values_again.eq(values.iter().copied()), "{code:?}");
            }
            // Values too large for any block saturate.
            let (codes, scale) = encoded(code, &[f32::INFINITY; 4], 0);
            assert_eq!(code.decode(codes[0]) * scale, 2f32.powi(127));
        }
    }
}
