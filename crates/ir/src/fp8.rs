//! The two 8-bit floats: E4M3 (4 bits of exponent, 3 of mantissa, up to 448, no infinity) and E5M2 (5 and 2, up to 57344).
//! Rounding is to nearest even; too large values, infinities included, saturate at the largest finite value.
//!
//! Tensors are divided by a scale before they are rounded. Scales are powers of two, so that the division is exact and every
//! device computes the same codes.

use crate::types::DType;

/// An 8-bit float by its layout.
#[derive(Clone, Copy)]
struct Layout {
    mantissa: u32,
    bias: i32,
    max: f32,
}

const E4M3: Layout = Layout { mantissa: 3, bias: 7, max: 448.0 };
const E5M2: Layout = Layout { mantissa: 2, bias: 15, max: 57_344.0 };

pub fn e4m3_from_f32(x: f32) -> u8 {
    encode(x, E4M3)
}

pub fn e5m2_from_f32(x: f32) -> u8 {
    encode(x, E5M2)
}

pub fn e4m3_to_f32(code: u8) -> f32 {
    if code & 0x7f == 0x7f { f32::NAN } else { decode(code, E4M3) }
}

pub fn e5m2_to_f32(code: u8) -> f32 {
    match code & 0x7f {
        0x7d.. => f32::NAN,
        0x7c => f32::INFINITY.copysign(if code & 0x80 == 0 { 1.0 } else { -1.0 }),
        _ => decode(code, E5M2),
    }
}

/// The exponent of the largest value, which is 1.75 times a power of two in both types.
pub fn top_exponent(dtype: DType) -> u32 {
    match dtype {
        DType::E4M3 => 8,
        DType::E5M2 => 15,
        other => panic!("{} is no 8-bit float", other.name()),
    }
}

/// The least power of two such that a tensor of largest magnitude `amax`, divided by it, fits the type; 1 where `amax` is 0 or
/// not finite.
pub fn scale(dtype: DType, amax: f32) -> f32 {
    if !(amax.is_finite() && amax > 0.0) {
        return 1.0;
    }
    // A mantissa above 1.75 carries into the exponent. Scales stay normal numbers, and so do their reciprocals.
    let exponent = (amax.to_bits() + 0x1f_ffff) >> 23;
    f32::from_bits(exponent.saturating_sub(top_exponent(dtype)).max(1) << 23)
}

fn encode(x: f32, layout: Layout) -> u8 {
    if x.is_nan() {
        return 0x7f;
    }
    let Layout { mantissa, bias, max } = layout;
    let size = x.abs().min(max);
    let bits = size.to_bits();
    let code = if bits >> 23 < (128 - bias) as u32 {
        // Subnormal codes have uniform steps: adding this number rounds to them, in the last bits of the sum.
        let sum = f32::from_bits(((151 - bias) as u32 - mantissa) << 23);
        (size + sum).to_bits() - sum.to_bits()
    } else {
        // Half a step, less one where the last bit is even. A mantissa that overflows carries into the exponent.
        let shift = 23 - mantissa;
        let rounded = bits + ((1 << (shift - 1)) - 1) + (bits >> shift & 1);
        (rounded >> shift) - (((127 - bias) as u32) << mantissa)
    };
    code as u8 | if x.is_sign_negative() { 0x80 } else { 0 }
}

fn decode(code: u8, layout: Layout) -> f32 {
    let (field, steps) =
        ((code & 0x7f) as i32 >> layout.mantissa, code as i32 & ((1 << layout.mantissa) - 1));
    let steps = if field == 0 { steps } else { steps + (1 << layout.mantissa) };
    let size = steps as f32 * 2f32.powi(field.max(1) - layout.bias - layout.mantissa as i32);
    if code & 0x80 == 0 { size } else { -size }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Convert = (fn(f32) -> u8, fn(u8) -> f32, u8, f32);
    const TYPES: [Convert; 2] =
        [(e4m3_from_f32, e4m3_to_f32, 0x7e, 448.0), (e5m2_from_f32, e5m2_to_f32, 0x7b, 57_344.0)];

    #[test]
    fn every_code_is_its_own_value() {
        for (from, to, last, max) in TYPES {
            assert_eq!(to(last), max);
            for code in 0..=255u8 {
                let x = to(code);
                if code & 0x7f <= last {
                    assert_eq!(from(x), code, "{x}");
                } else {
                    assert!(x.is_nan() || x.is_infinite(), "{code:#x} is {x}");
                }
            }
        }
        assert_eq!([0x01, 0x08, 0x38].map(e4m3_to_f32), [2f32.powi(-9), 2f32.powi(-6), 1.0]);
        assert_eq!([0x01, 0x04, 0x3c].map(e5m2_to_f32), [2f32.powi(-16), 2f32.powi(-14), 1.0]);
    }

    #[test]
    fn the_scale_is_the_least_power_of_two_that_fits() {
        for (dtype, max) in [(DType::E4M3, 448.0), (DType::E5M2, 57_344.0)] {
            let mut bits = 1_u32;
            for _ in 0..20_000 {
                bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let amax = f32::from_bits(bits & 0x7fff_ffff);
                if !amax.is_finite() || amax < 1e-30 {
                    continue;
                }
                let s = scale(dtype, amax);
                assert_eq!(s.to_bits() & 0x7f_ffff, 0, "{s} is a power of two");
                assert!(amax / s <= max && amax / (s / 2.0) > max, "{amax:e} over {s:e}");
            }
            assert_eq!((scale(dtype, max), scale(dtype, max.next_up())), (1.0, 2.0));
            assert_eq!([0.0, f32::NAN, f32::INFINITY, -1.0].map(|x| scale(dtype, x)), [1.0; 4]);
            assert_eq!([1e-45, 1e-38].map(|x| scale(dtype, x)), [f32::MIN_POSITIVE; 2]);
            assert!((1.0 / scale(dtype, f32::MAX)).is_normal());
        }
    }

    /// Between any two neighbours: the nearer one, and of two equally near the even one.
    #[test]
    fn rounding_is_to_nearest_even_and_saturates() {
        for (from, to, last, max) in TYPES {
            for code in 0..last {
                let (low, high) = (to(code), to(code + 1));
                let middle = (low + high) / 2.0;
                assert_eq!(from(middle), code + (code & 1), "{middle}");
                assert_eq!(from(middle.next_down()), code, "{middle}");
                assert_eq!(from(middle.next_up()), code + 1, "{middle}");
                assert_eq!(from(-middle.next_up()), (code + 1) | 0x80, "{middle}");
            }
            for x in [max * 1.01, max * 1.5, f32::MAX, f32::INFINITY] {
                assert_eq!((from(x), from(-x)), (last, last | 0x80), "{x}");
            }
            assert!(to(from(f32::NAN)).is_nan());
            assert_eq!((from(0.0), from(-0.0)), (0, 0x80));
        }
    }
}
