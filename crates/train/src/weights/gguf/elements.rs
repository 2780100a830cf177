//! Element types in GGUF files: f32, f16, bf16, and blocks of 8-bit integers with a scale.

use flatout_ir::types::bf16_from_f32;

/// The types that are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Elements {
    F32,
    F16,
    Bf16,
    Q8_0,
}

/// Values per `Q8_0` block, which share a scale.
pub const BLOCK: usize = 32;

impl Elements {
    /// The type's number in a tensor's entry.
    pub fn code(self) -> u32 {
        match self {
            Elements::F32 => 0,
            Elements::F16 => 1,
            Elements::Q8_0 => 8,
            Elements::Bf16 => 30,
        }
    }

    /// The number by which a file states the type of most of its tensors.
    pub fn file_code(self) -> u32 {
        match self {
            Elements::F32 => 0,
            Elements::F16 => 1,
            Elements::Q8_0 => 7,
            Elements::Bf16 => 32,
        }
    }

    /// The bytes of this many values, which must fill whole blocks.
    pub fn bytes(self, values: usize) -> usize {
        match self {
            Elements::F32 => 4 * values,
            Elements::F16 | Elements::Bf16 => 2 * values,
            Elements::Q8_0 => values / BLOCK * (2 + BLOCK),
        }
    }

    /// The bytes of values, or the first value that the type cannot hold: f16 ends at 65,504, and a block has an f16 scale and no
    /// representation of non-finite values.
    pub fn encode(self, values: &[f32]) -> Result<Vec<u8>, f32> {
        let mut bytes = Vec::with_capacity(self.bytes(values.len()));
        match self {
            Elements::F32 => values.iter().for_each(|x| bytes.extend(x.to_le_bytes())),
            Elements::Bf16 => values.iter().for_each(|x| bytes.extend(bf16_from_f32(*x).to_le_bytes())),
            Elements::F16 => {
                for x in values {
                    bytes.extend(f16(*x)?.to_le_bytes());
                }
            }
            Elements::Q8_0 => {
                for block in values.as_chunks::<BLOCK>().0 {
                    bytes.extend(q8_0(block)?);
                }
            }
        }
        Ok(bytes)
    }
}

/// Rounds a finite value in range to f16; the error is the value.
fn f16(x: f32) -> Result<u16, f32> {
    match f16_from_f32(x) {
        half if x.is_finite() && half & 0x7fff == 0x7c00 => Err(x),
        half => Ok(half),
    }
}

/// IEEE half precision, rounded to nearest even.
fn f16_from_f32(x: f32) -> u16 {
    let bits = x.to_bits();
    let sign = (bits >> 16 & 0x8000) as u16;
    let magnitude = bits & 0x7fff_ffff;
    let half = match magnitude {
        // NaN stays NaN.
        0x7f80_0001.. => 0x7e00,
        // Values from halfway between the largest f16 and the next power of two on become infinite.
        0x477f_f000.. => 0x7c00,
        // Normal: the exponent's bias changes by 112, and 13 bits are rounded off.
        0x3880_0000.. => ((magnitude - 0x3800_0000 + 0xfff + (magnitude >> 13 & 1)) >> 13) as u16,
        // Subnormal: a multiple of 2^-24, to which the sum rounds because it has as many fractional digits.
        _ => (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits()) as u16,
    };
    sign | half
}

/// A block: the scale as f16, then the values divided by the scale, rounded half away from zero.
fn q8_0(block: &[f32; BLOCK]) -> Result<[u8; 2 + BLOCK], f32> {
    if let Some(x) = block.iter().find(|x| !x.is_finite()) {
        return Err(*x);
    }
    let largest = block.iter().fold(0f32, |largest, x| largest.max(x.abs()));
    let scale = largest / 127.0;
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    let mut bytes = [0; 2 + BLOCK];
    bytes[..2].copy_from_slice(&f16(scale).map_err(|_| largest)?.to_le_bytes());
    for (byte, x) in bytes[2..].iter_mut().zip(block) {
        *byte = (x * inverse).round() as i8 as u8;
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn widened(half: u16) -> f64 {
        let (exponent, fraction) = (half >> 10 & 31, f64::from(half & 1023));
        let magnitude = match exponent {
            0 => fraction * 2f64.powi(-24),
            _ => (1.0 + fraction / 1024.0) * 2f64.powi(i32::from(exponent) - 15),
        };
        if half & 0x8000 == 0 { magnitude } else { -magnitude }
    }

    /// Every f16 value converts to itself; between two neighbours the nearer one is taken, and in the middle the even one.
    #[test]
    fn halves_are_the_nearest() {
        for half in 0..0x7bff_u16 {
            let [here, next] = [widened(half), widened(half + 1)];
            assert_eq!(f16_from_f32(here as f32), half);
            assert_eq!(f16_from_f32(-here as f32), half | 0x8000);
            let middle = (here + next) / 2.0;
            let even = half + half % 2;
            assert_eq!(f16_from_f32(middle as f32), even, "{middle}");
            let (below, above) = ((middle as f32).next_down(), (middle as f32).next_up());
            assert_eq!([f16_from_f32(below), f16_from_f32(above)], [half, half + 1], "{middle}");
        }
        assert_eq!(
            [f16_from_f32(65504.0), f16_from_f32(65519.0), f16_from_f32(65520.0)],
            [0x7bff, 0x7bff, 0x7c00]
        );
        assert_eq!(f16_from_f32(f32::NAN) & 0x7c00, 0x7c00);
        assert_eq!(Elements::F16.encode(&[1.0, -70_000.0]), Err(-70_000.0));
        assert_eq!(Elements::Q8_0.encode(&[1e8; 32]), Err(1e8));
        for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut block = [1.0; 32];
            block[7] = wrong;
            let found = Elements::Q8_0.encode(&block).unwrap_err();
            assert_eq!(found.to_bits(), wrong.to_bits());
            assert!(Elements::F16.encode(&block).is_ok(), "a half can say it");
        }
    }

    /// By definition each value is within half a step of itself, and the largest one is 127 steps.
    #[test]
    fn blocks_hold_values_within_half_a_step() {
        let values: Vec<f32> = (0..4 * BLOCK).map(|i| ((i * 37 % 101) as f32 - 50.0) * 1e-3).collect();
        let bytes = Elements::Q8_0.encode(&values).unwrap();
        assert_eq!(bytes.len(), Elements::Q8_0.bytes(values.len()));
        for (block, values) in bytes.chunks_exact(34).zip(values.chunks_exact(BLOCK)) {
            let scale = widened(u16::from_le_bytes([block[0], block[1]])) as f32;
            let steps: Vec<i8> = block[2..].iter().map(|byte| *byte as i8).collect();
            assert_eq!(steps.iter().map(|step| step.unsigned_abs()).max(), Some(127));
            for (step, value) in steps.iter().zip(values) {
                // Half a step, plus the rounding error of the scale.
                assert!(
                    (f32::from(*step) * scale - value).abs() <= scale * (0.5 + 127.0 / 2048.0),
                    "{value}"
                );
            }
        }
        assert_eq!(Elements::Q8_0.encode(&[0.0; BLOCK]).unwrap(), [0; 34], "a block of zeros has no scale");
    }

    /// The bytes that llama.cpp's own package writes, generated by `golden/make_golden.py`.
    #[test]
    fn bytes_are_those_of_llama_cpps_package() {
        let golden = include_bytes!("golden/elements.bin");
        let count = u32::from_le_bytes(golden[..4].try_into().unwrap()) as usize;
        let (values, mut rest) = golden[4..].split_at(4 * count);
        let values: Vec<f32> =
            values.as_chunks::<4>().0.iter().map(|word| f32::from_le_bytes(*word)).collect();
        for elements in [Elements::F16, Elements::Bf16, Elements::Q8_0] {
            let (expected, behind) = rest.split_at(elements.bytes(count));
            assert!(elements.encode(&values).unwrap() == expected, "{elements:?}");
            rest = behind;
        }
        assert!(rest.is_empty());
    }
}
