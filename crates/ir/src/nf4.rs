//! NF4: weights in four bits, bit for bit as bitsandbytes stores them.
//!
//! 64 neighbours of the flattened, row-major weight are a block. Its largest magnitude is the `absmax`, and every value has a
//! code of four bits: the nearest of 16 quantiles of the normal distribution, times the absmax. A byte holds two codes, the
//! first in its upper half. Magnitudes are in turn stored in eight bits (`Magnitudes`): their mean is subtracted, 256 of them
//! share a largest magnitude in f32, and each is the nearest of the 256 values of the signed dynamic map. So a value takes 4 +
//! 8 / 64 + 32 / (64 * 256) = 4.127 bits.
//!
//! All arithmetic is f32 without fused multiply-adds, and a value is rounded to bf16 once, at the end. The mean is summed in
//! the order in which PyTorch sums a vector on one thread of a CPU, eight lanes wide, and magnitudes are coded as in
//! bitsandbytes' kernel for CPUs. With several threads or on a GPU the last bits of the mean differ, and a magnitude midway
//! between two values may get the other code; weights that were quantised there keep their codes.

use crate::types::amax;

/// Values that share a magnitude.
pub const BLOCK: usize = 64;

/// Magnitudes that share a largest one.
pub const NESTED: usize = 256;

/// The values of the codes.
pub const CODES: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// The midpoints between neighbouring codes; a value at a midpoint takes the lower code.
const BOUNDS: [f32; 15] = {
    let mut bounds = [0.0; 15];
    let mut i = 0;
    while i < 15 {
        bounds[i] = (CODES[i] + CODES[i + 1]) / 2.0;
        i += 1;
    }
    bounds
};

/// Number of blocks for a number of values.
pub fn blocks(values: usize) -> usize {
    values.div_ceil(BLOCK)
}

/// Codes and magnitudes of values that start at a block boundary: a whole tensor, or a part of one. Fills `values.len()` / 2
/// bytes, rounded up, and one magnitude per block. All values must be finite.
pub fn quantize(values: &[f32], codes: &mut [u8], absmax: &mut [f32]) {
    assert_eq!((codes.len(), absmax.len()), (values.len().div_ceil(2), blocks(values.len())));
    for ((block, codes), absmax) in values.chunks(BLOCK).zip(codes.chunks_mut(BLOCK / 2)).zip(absmax) {
        // Divisor of a block of zeros, and the least magnitude of an incomplete last block.
        const LEAST: f32 = 1e-38;
        let largest = amax(block);
        // Zeros fill the last byte.
        let mut scaled = [0.0; BLOCK];
        if let Ok(block) = <&[f32; BLOCK]>::try_from(block) {
            *absmax = largest;
            let inverse = 1.0 / largest.max(LEAST);
            scaled.iter_mut().zip(block).for_each(|(to, x)| *to = x * inverse);
        } else {
            *absmax = largest.max(LEAST);
            scaled.iter_mut().zip(block).for_each(|(to, x)| *to = x / *absmax);
        }
        let mut single = [0; BLOCK];
        for (codes, values) in single.as_chunks_mut().0.iter_mut().zip(scaled.as_chunks().0) {
            *codes = nearest_codes(values);
        }
        for (byte, pair) in codes.iter_mut().zip(single.as_chunks::<2>().0) {
            *byte = (pair[0] << 4 | pair[1]) as u8;
        }
    }
}

/// The codes of scaled values. As many as a compiler keeps in vector registers.
fn nearest_codes(values: &[f32; 8]) -> [u32; 8] {
    let mut codes = [0; 8];
    for bound in BOUNDS {
        for (code, x) in codes.iter_mut().zip(values) {
            *code += (bound < *x) as u32;
        }
    }
    codes
}

/// The magnitudes of a tensor's blocks in eight bits.
#[derive(Clone, Debug, PartialEq)]
pub struct Magnitudes {
    pub codes: Vec<u8>,
    /// The largest magnitude of every 256, after the mean is subtracted.
    pub nested: Vec<f32>,
    /// The mean, which was subtracted.
    pub offset: f32,
}

impl Magnitudes {
    pub fn of(absmax: &[f32]) -> Magnitudes {
        let mut magnitudes = Magnitudes::empty(absmax);
        let Magnitudes { codes, nested, offset } = &mut magnitudes;
        code_magnitudes(&dynamic_map(), *offset, absmax, codes, nested);
        magnitudes
    }

    /// The mean, and room for codes that `code_magnitudes` fills.
    pub fn empty(absmax: &[f32]) -> Magnitudes {
        let nested = vec![0.0; absmax.len().div_ceil(NESTED)];
        Magnitudes { codes: vec![0; absmax.len()], nested, offset: mean(absmax) }
    }

    pub fn get(&self, map: &[f32; 256], block: usize) -> f32 {
        magnitude(map[self.codes[block] as usize], self.nested[block / NESTED], self.offset)
    }
}

/// Codes magnitudes: all of a tensor, or a part that starts at a multiple of `NESTED`.
pub fn code_magnitudes(map: &[f32; 256], offset: f32, absmax: &[f32], codes: &mut [u8], nested: &mut [f32]) {
    for ((block, codes), nested) in absmax.chunks(NESTED).zip(codes.chunks_mut(NESTED)).zip(nested) {
        *nested = block.iter().fold(0.0, |most: f32, x| most.max((x - offset).abs()));
        let inverse = 1.0 / *nested;
        for (code, x) in codes.iter_mut().zip(block) {
            *code = if *nested == 0.0 { 0 } else { nearest(map, (x - offset) * inverse) };
        }
    }
}

/// Decodes a magnitude from the value of its code, the largest magnitude of its 256 and the mean.
#[inline(always)]
pub fn magnitude(value: f32, nested: f32, offset: f32) -> f32 {
    value * nested + offset
}

pub fn code_at(codes: &[u8], place: usize) -> u8 {
    if place.is_multiple_of(2) { codes[place / 2] >> 4 } else { codes[place / 2] & 15 }
}

/// Decodes the values of a tensor from element `first` on, given its codes and the magnitudes of its blocks, and rounds each
/// with `to`.
pub fn dequantize<T: Copy>(
    codes: &[u8],
    magnitude: impl Fn(usize) -> f32,
    to: impl Fn(f32) -> T,
    first: usize,
    values: &mut [T],
) {
    let (mut at, mut rest) = (first, values);
    while !rest.is_empty() {
        let (some, after) = rest.split_at_mut((BLOCK - at % BLOCK).min(rest.len()));
        let magnitude = magnitude(at / BLOCK);
        let table = CODES.map(|code| to(code * magnitude));
        for (value, place) in some.iter_mut().zip(at..) {
            *value = table[code_at(codes, place) as usize];
        }
        (at, rest) = (at + some.len(), after);
    }
}

/// Index of the value of a sorted map that is nearest to x. As in bitsandbytes, which uses a lookup table, x is first rounded
/// to the nearest of 65,536 uniform steps.
fn nearest(map: &[f32; 256], x: f32) -> u8 {
    const STEPS: f32 = 65_535.0;
    let step = ((x.clamp(-1.0, 1.0) + 1.0) * 0.5).mul_add(STEPS, 0.5) as u32;
    let x = 2.0 * step as f32 / STEPS - 1.0;
    let (mut low, mut high) = (0, 255);
    while low < high {
        let middle = (low + high) / 2;
        let bound = (map[middle] + map[middle + 1]) * 0.5;
        if bound < x {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    low as u8
}

/// The signed dynamic map: 0, 1, and seven decades of both signs up to 1, each with twice as many uniform steps as the one
/// below it; the map has the midpoints of the steps. PyTorch computes it with fused multiply-adds where the CPU has them, and
/// with different last bits where it has none, so a checkpoint contains the map that its magnitudes were coded with.
pub fn dynamic_map() -> [f32; 256] {
    let mut map = vec![0.0, 1.0];
    for decade in 0..7 {
        let steps = 1 << decade;
        let size = 10f64.powi(decade - 6) as f32;
        let bounds = even_steps(steps);
        for pair in bounds.windows(2) {
            let middle = (pair[0] + pair[1]) / 2.0;
            map.extend([size * middle, -size * middle]);
        }
    }
    map.sort_unstable_by(f32::total_cmp);
    map.try_into().expect("2 and 2 times 1 + 2 + 4 and so on up to 64")
}

/// The bounds of uniform steps from 0.1 to 1, each computed from the nearer end.
fn even_steps(steps: usize) -> Vec<f32> {
    let (from, to) = (0.1f32, 1.0f32);
    let step = (to - from) / steps as f32;
    let halfway = steps.div_ceil(2);
    let at = |i: usize| match i < halfway {
        true => step.mul_add(i as f32, from),
        false => (-step).mul_add((steps - i) as f32, to),
    };
    (0..=steps).map(at).collect()
}

/// The mean in PyTorch's order: see `sum`.
fn mean(values: &[f32]) -> f32 {
    sum(values) / values.len() as f32
}

/// The lanes of a vector in PyTorch's sums, and the number of vectors summed side by side.
const LANES: usize = 8;
const ROWS: usize = 4;

/// The sum in PyTorch's order: vectors of eight lanes in four running sums, each a cascade of four levels of about the fourth
/// root of all terms; then the four sums one after the other, the elements that do not fill a vector, and the lanes.
fn sum(values: &[f32]) -> f32 {
    const LEVELS: usize = 4;
    type Vector = [f32; LANES];
    let (vectors, rest) = values.as_chunks::<LANES>();
    let add = |to: &mut Vector, x: &Vector| to.iter_mut().zip(x).for_each(|(to, x)| *to += x);
    let (groups, single) = vectors.as_chunks::<ROWS>();
    // Number of terms per level, a power of two.
    let log = groups.len().next_power_of_two().trailing_zeros() as usize;
    let power = (log / LEVELS).max(4);
    let step = 1 << power;
    let mut sums = [[[0.0; LANES]; ROWS]; LEVELS];
    for (i, group) in groups.iter().enumerate() {
        (0..ROWS).for_each(|row| add(&mut sums[0][row], &group[row]));
        let done = i + 1;
        if !done.is_multiple_of(step) {
            continue;
        }
        for level in 1..LEVELS {
            let (below, above) = sums.split_at_mut(level);
            for (to, from) in above[0].iter_mut().zip(&mut below[level - 1]) {
                add(to, from);
                *from = [0.0; LANES];
            }
            if done & ((step - 1) << (level * power)) != 0 {
                break;
            }
        }
    }
    let [mut total, above @ ..] = sums;
    for level in above {
        total.iter_mut().zip(&level).for_each(|(to, x)| add(to, x));
    }
    let [mut first, others @ ..] = total;
    single.iter().for_each(|x| add(&mut first, x));
    others.iter().for_each(|x| add(&mut first, x));
    let tail: f32 = rest.iter().fold(0.0, |sum, x| sum + x);
    first.iter().fold(tail, |sum, x| sum + x)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::bf16_from_f32;

    /// Numbers that bitsandbytes wrote, one after the other; `tests/golden/make_nf4.py` documents their order.
    struct Golden(&'static [u8]);

    impl Golden {
        fn bytes(&mut self, count: usize) -> &'static [u8] {
            let (taken, rest) = self.0.split_at(count);
            self.0 = rest;
            taken
        }
        fn count(&mut self) -> usize {
            u32::from_le_bytes(self.bytes(4).try_into().unwrap()) as usize
        }
        fn f32s(&mut self, count: usize) -> Vec<f32> {
            self.bytes(4 * count).as_chunks::<4>().0.iter().map(|word| f32::from_le_bytes(*word)).collect()
        }
        fn u16s(&mut self, count: usize) -> Vec<u16> {
            self.bytes(2 * count).as_chunks::<2>().0.iter().map(|half| u16::from_le_bytes(*half)).collect()
        }
    }

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|x| x.to_bits()).collect()
    }

    #[test]
    fn every_bit_is_that_of_bitsandbytes() {
        let mut golden = Golden(include_bytes!("../tests/golden/nf4.bin"));
        assert_eq!(bits(&CODES), bits(&golden.f32s(16)));
        let map = dynamic_map();
        assert_eq!(bits(&map), bits(&golden.f32s(256)));
        for case in 0..golden.count() {
            let n = golden.count();
            let values = golden.f32s(n);
            let (mut codes, mut absmax) = (vec![0; n.div_ceil(2)], vec![0.0; blocks(n)]);
            quantize(&values, &mut codes, &mut absmax);
            assert_eq!(codes, golden.bytes(codes.len()), "case {case}: codes");
            assert_eq!(bits(&absmax), bits(&golden.f32s(blocks(n))), "case {case}: magnitudes");
            let small = Magnitudes::of(&absmax);
            assert_eq!(small.offset.to_bits(), golden.f32s(1)[0].to_bits(), "case {case}: mean");
            assert_eq!(bits(&small.nested), bits(&golden.f32s(small.nested.len())), "case {case}: nested");
            assert_eq!(small.codes, golden.bytes(blocks(n)), "case {case}: codes of magnitudes");
            let (mut wide, mut narrow) = (vec![0.0; n], vec![0; n]);
            let of_block = |block: usize| small.get(&map, block);
            dequantize(&codes, of_block, |x| x, 0, &mut wide);
            assert_eq!(bits(&wide), bits(&golden.f32s(n)), "case {case}: f32");
            dequantize(&codes, of_block, bf16_from_f32, 0, &mut narrow);
            assert_eq!(narrow, golden.u16s(n), "case {case}: bf16");
            for first in [1, 63, 64, 100].into_iter().filter(|first| *first < n) {
                let mut rest = vec![0.0; n - first];
                dequantize(&codes, of_block, |x| x, first, &mut rest);
                assert_eq!(bits(&rest), bits(&wide[first..]), "case {case}: from {first} on");
            }
            // A part that starts at a block boundary has the codes of the whole.
            let half = n / 2 / BLOCK * BLOCK;
            let (mut part, mut of_part) = (vec![0; (n - half).div_ceil(2)], vec![0.0; blocks(n - half)]);
            quantize(&values[half..], &mut part, &mut of_part);
            assert_eq!((&part[..], &of_part[..]), (&codes[half / 2..], &absmax[half / BLOCK..]));
        }
        // Means of the magnitudes of larger weights.
        for _ in 0..golden.count() {
            let n = golden.count();
            let drawn = |i: usize| (i as u32).wrapping_mul(2_654_435_761) >> 8;
            let values: Vec<f32> = (0..n).map(|i| drawn(i) as f32 / (1 << 24) as f32).collect();
            assert_eq!(mean(&values).to_bits(), golden.f32s(1)[0].to_bits(), "the mean of {n}");
        }
        assert!(golden.0.is_empty(), "{} bytes are left", golden.0.len());
    }

    #[test]
    fn decoded_values_encode_to_the_same_codes() {
        let codes: Vec<u8> = (0..BLOCK as u8 / 2).map(|i| i.wrapping_mul(0x23) ^ 0xf0).collect();
        let mut values = [0.0; BLOCK];
        dequantize(&codes, |_| 0.37, |x| x, 0, &mut values);
        let (mut again, mut absmax) = (vec![0; BLOCK / 2], [0.0]);
        quantize(&values, &mut again, &mut absmax);
        assert_eq!((again, absmax), (codes, [0.37]));
    }
}
