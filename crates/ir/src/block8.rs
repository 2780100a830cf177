//! Moments in eight bits. 256 neighbours share a scale, a power of two, and each is an 8-bit float times it: E4M3 for the
//! first moment, and for the second E4M4, which has no sign (4 bits of exponent, 4 of mantissa, up to 496).
//!
//! Floats rather than even steps, because moments of neighbours differ by orders of magnitude: from a block's largest value
//! 14 octaves down, a step is an eighth to a sixteenth of a first moment and half of that of a second one, and below that
//! steps are even, so nothing ends abruptly. A power of two rather than the largest value itself, because then dividing is
//! exact, a value that does not change is not rounded again, all backends have the same bits from a handful of integer
//! instructions, and every value is exact in bf16, which is what checkpoints hold. It costs at most one octave of the range.
//!
//! Rounding is at random between the two neighbours and has no bias; but a second moment above 0 stays above 0, as a step is
//! divided by its root.

use crate::types::{bf16_from_f32, bf16_to_f32};

/// Elements that share a scale.
pub const BLOCK: usize = 256;

/// How a moment is coded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// E4M3: first moments.
    Signed,
    /// E4M4: second moments.
    Unsigned,
}

/// Places the 8-bit float's exponents at the bottom of f32's: multiplied by its inverse, the bits of a float are those of
/// the code, shifted left by the bits of mantissa that f32 has more.
const LOW: f32 = f32::from_bits((127 + 120) << 23);
const LOW_INVERSE: f32 = f32::from_bits((127 - 120) << 23);

/// The exponent of the value that a block's bound is divided down to: 256, which both types hold.
pub const TOP: i32 = 8;

impl Code {
    /// How much further up the bits are in f32.
    const fn shift(self) -> u32 {
        match self {
            Code::Signed => 20,
            Code::Unsigned => 19,
        }
    }

    /// The least and the largest exponent of the power of two that bounds a block. Down to the least, every value of a block
    /// is exact in bf16; smaller blocks take the least.
    pub const EXPONENTS: [i32; 2] = [-90, 127];

    /// A block's scale and its inverse, from the size of its largest element.
    #[inline(always)]
    pub fn scale(largest: f32) -> [f32; 2] {
        // One more than the exponent, unless it is a power of two itself.
        let above = (largest.to_bits().wrapping_add(0x7f_ffff) >> 23) as i32 - 127;
        let [least, most] = Code::EXPONENTS;
        let exponent = above.clamp(least, most) - TOP;
        [exponent, -exponent].map(|e| f32::from_bits(((e + 127) as u32) << 23))
    }

    /// The code's value, to be multiplied by the scale.
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

    /// One of the two codes next to x times the scale's inverse, the nearer the likelier.
    #[inline(always)]
    pub fn drawn(self, x: f32, inverse: f32, draw: u16) -> u8 {
        // In the middle of one of 65,536 parts of a step: what lies on a code stays there.
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

    /// A block from its values, to nearest, and its scale. Those that `widened` gave come back as they were, if under another
    /// scale.
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

/// Rounds to nearest even. Values that are too large become the largest value; values below 0, and NaN, become 0.
pub fn e4m4_from_f32(x: f32) -> u8 {
    // `max` takes the number of the two, where `clamp` would keep a NaN.
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
            // E4M3 has a NaN where this would go on; no block reaches that far.
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

    /// Values of very different sizes, a block each time.
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

    /// Checkpoints give back every value to the bit, whatever was drawn, and from sizes at which even f32 ends.
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
    fn rounding_at_random_has_no_bias_and_is_between_neighbours() {
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
                // Five deviations of the mean of 4,096 draws; below the least code second moments are rounded up.
                let is_least = code == Code::Unsigned && c <= 1;
                let off = (sum / updates as f64 - *x as f64).abs();
                assert!(is_least || off < 5.0 * 0.5 * step / 64.0, "{code:?}: {x} is off by {off}");
            }
        }
    }

    #[test]
    fn second_moments_above_zero_stay_so_and_codes_stay_where_they_are() {
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
            // Values that no block should hold become the largest value instead of nonsense.
            let (codes, scale) = encoded(code, &[f32::INFINITY; 4], 0);
            assert_eq!(code.decode(codes[0]) * scale, 2f32.powi(127));
        }
    }
}
