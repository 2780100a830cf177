//! Deterministic noise for timing and checking kernels at real sizes, generated alike on the device and on the host.

use std::borrow::Cow;

use crate::cuda::context::{Arg, CudaError, Function, Source, Stream, launch};

/// A range of numbers: the random bits of each 16-bit half, and the bits that are always set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Noise {
    keep: u16,
    base: u16,
}

impl Noise {
    pub const ZERO: Noise = Noise { keep: 0, base: 0 };
    /// From 2^-7 to 2, of either sign: eight exponents, seven bits of mantissa.
    pub const WIDE: Noise = Noise { keep: 0x83FF, base: 0x3C00 };
    /// From 1/16 to 1/8, of either sign.
    pub const SMALL: Noise = Noise { keep: 0x807F, base: 0x3D80 };
    /// From 1/16 to 1/8.
    pub const POSITIVE: Noise = Noise { keep: 0x007F, base: 0x3D80 };

    /// As 8-bit floats positive and finite: 0.5 to 2 in e4m3, 1/16 to 1/8 in e4m4.
    pub const BYTES: Noise = Noise { keep: 0x0F0F, base: 0x3030 };

    fn words(self) -> [u32; 2] {
        [self.keep, self.base].map(|half| half as u32 * 0x1_0001)
    }

    /// Word `i`, equal to what `noise.cu` writes.
    pub fn word(self, seed: u32, i: u64) -> u32 {
        let [keep, base] = self.words();
        let mut h = (i as u32).wrapping_mul(0x9E37_79B1)
            ^ ((i >> 32) as u32).wrapping_mul(0x85EB_CA77)
            ^ seed.wrapping_mul(0xC2B2_AE3D);
        h = (h ^ (h >> 16)).wrapping_mul(0x7FEB_352D);
        h = (h ^ (h >> 15)).wrapping_mul(0x846C_A68B);
        (h ^ (h >> 16)) & keep | base
    }
}

pub fn source() -> Source {
    Source { name: "noise.cu", code: Cow::Borrowed(include_str!("noise.cu")), defines: vec![] }
}

/// Enough blocks to fill any device; threads iterate with a grid stride.
const BLOCKS: u32 = 2048;

/// Fills whole words of device memory, in stream order.
///
/// # Safety
/// `words` words from `at` lie in memory of this device that stays allocated until the stream has executed the call.
pub unsafe fn fill(
    function: &Function,
    at: u64,
    words: usize,
    seed: u32,
    noise: Noise,
    stream: Stream,
) -> Result<(), CudaError> {
    let [keep, base] = noise.words();
    let args = vec![
        Arg::Ptr(at),
        Arg::I64(words as i64),
        Arg::I32(seed as i32),
        Arg::I32(keep as i32),
        Arg::I32(base as i32),
    ];
    launch(function.clone(), [BLOCKS, 1, 1], 256, 0, args).enqueue(stream)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_is_in_range() {
        for (noise, low, high, signed) in [
            (Noise::WIDE, 1.0 / 128.0, 2.0, true),
            (Noise::SMALL, 1.0 / 16.0, 0.125, true),
            (Noise::POSITIVE, 1.0 / 16.0, 0.125, false),
        ] {
            let mut negative = 0;
            for i in 0..10_000 {
                let word = noise.word(3, i);
                for x in
                    [f32::from_bits(word), f32::from_bits(word << 16), f32::from_bits(word & 0xFFFF_0000)]
                {
                    assert!((low..high).contains(&x.abs()), "{noise:?} word {i}: {x}");
                    negative += (x < 0.0) as usize;
                }
            }
            assert!(if signed { (13_000..17_000).contains(&negative) } else { negative == 0 }, "{negative}");
        }
        let differ = (0..1000).filter(|i| Noise::WIDE.word(1, *i) != Noise::WIDE.word(2, *i)).count();
        assert!(differ > 990, "{differ}");
    }
}
