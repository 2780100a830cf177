//! The two 8-bit floats: E4M3 (4 bits of exponent, 3 of mantissa, up to 448, no infinity) and E5M2 (5 and 2, up to
//! 57344). Rounding is to nearest even; what is too large becomes the largest finite value, an infinity too.

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

fn encode(x: f32, layout: Layout) -> u8 {
    if x.is_nan() {
        return 0x7f;
    }
    let size = x.abs().min(layout.max);
    // Below the least exponent the steps stay what they are there.
    let exponent = ((size.to_bits() >> 23) as i32 - 127).max(1 - layout.bias);
    // Exact: the quotient by a power of two.
    let steps = (size as f64 / 2f64.powi(exponent - layout.mantissa as i32)).round_ties_even() as i32;
    // Steps that reach the next exponent carry into it.
    let code = ((exponent + layout.bias) << layout.mantissa) + steps - (1 << layout.mantissa);
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

    /// Between every two neighbours: the nearer one, and of two as near the even one.
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
