//! The two passes of resizing with AVX2. The arithmetic is integer, so the bytes are those of the portable loops.
//!
//! A strip of 32 rows is transposed, so that the 32 bytes of a column are contiguous. The horizontal pass then has the same
//! form as the vertical one, sums of weighted runs of bytes, and its result is transposed back. One instruction multiplies two
//! bytes by two 16-bit weights and adds the products. Loops are used in place of closures, because the compiler may not inline
//! closures into code for these instructions.

use std::array::from_fn;

use pulp::x86::V3;
use pulp::{Simd, WithSimd, cast};

use super::scaling::{Passes, Rows, STRIP, Weights};
use crate::images::CHANNELS;

type Register = std::arch::x86_64::__m256i;
/// Bytes per register.
const WIDE: usize = 32;
/// Columns that are transposed at once.
const BLOCK: usize = 16;

pub(super) struct Avx2 {
    with: V3,
    /// Columns of a strip, with contiguous rows.
    columns: Vec<[u8; STRIP]>,
    /// The columns after the horizontal pass.
    scaled: Vec<[u8; STRIP]>,
}

impl Avx2 {
    /// `None` where the CPU has no AVX2.
    pub fn try_new() -> Option<Avx2> {
        Some(Avx2 { with: V3::try_new()?, columns: vec![], scaled: vec![] })
    }
}

impl Passes for Avx2 {
    fn across(&mut self, weights: &Weights, rows: Rows<'_>, out: &mut [u8]) {
        Simd::vectorize(self.with, Across { passes: self, weights, rows, out });
    }

    fn down(&mut self, weights: &Weights, place: usize, rows: Rows<'_>, out: &mut [u8]) {
        Simd::vectorize(self.with, Down { with: self.with, weights, place, rows, out });
    }
}

struct Across<'a> {
    passes: &'a mut Avx2,
    weights: &'a Weights,
    rows: Rows<'a>,
    out: &'a mut [u8],
}

impl WithSimd for Across<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { passes: Avx2 { with, columns, scaled }, weights, rows, out } = self;
        let (with, line) = (*with, weights.first.len() * CHANNELS);
        columns.resize(rows.stride.next_multiple_of(BLOCK), [0; STRIP]);
        scaled.resize(line.next_multiple_of(BLOCK), [0; STRIP]);
        for (block, columns) in columns.as_chunks_mut::<BLOCK>().0.iter_mut().enumerate() {
            let part = |row: usize| {
                if row < rows.count() { sixteen(rows.at(row), block * BLOCK) } else { [0; BLOCK] }
            };
            let mut halves = [with.avx._mm256_setzero_si256(); BLOCK];
            for (row, half) in halves.iter_mut().enumerate() {
                *half = cast([part(row), part(row + BLOCK)]);
            }
            for (column, register) in columns.iter_mut().zip(transposed(with, halves)) {
                *column = cast(register);
            }
        }
        for place in 0..weights.first.len() {
            let (first, own) = weights.at(place);
            let window = &columns[first * CHANNELS..(first + weights.each) * CHANNELS];
            let (pairs, last) = window.as_chunks::<{ 2 * CHANNELS }>();
            let (by_pairs, by_last) = own.as_chunks::<2>();
            for channel in 0..CHANNELS {
                let mut sums = Sums::new(with, weights);
                for (pair, by) in pairs.iter().zip(by_pairs) {
                    sums.add(cast(pair[channel]), cast(pair[CHANNELS + channel]), *by);
                }
                if let [by] = by_last {
                    sums.add(cast(last[channel]), cast([0u8; WIDE]), [*by, 0]);
                }
                scaled[place * CHANNELS + channel] = sums.bytes(weights);
            }
        }
        for (block, columns) in scaled.as_chunks::<BLOCK>().0.iter().enumerate() {
            let mut registers = [with.avx._mm256_setzero_si256(); BLOCK];
            for (register, column) in registers.iter_mut().zip(columns) {
                *register = cast(*column);
            }
            let transposed = transposed(with, registers);
            for (row, register) in transposed.into_iter().enumerate() {
                let halves: [[u8; BLOCK]; 2] = cast(register);
                for (row, half) in [row, row + BLOCK].into_iter().zip(halves) {
                    if row < rows.count() {
                        put_sixteen(&mut out[row * line..][..line], block * BLOCK, half);
                    }
                }
            }
        }
    }
}

/// Writes bytes of a row, up to its end.
#[inline(always)]
fn put_sixteen(row: &mut [u8], at: usize, bytes: [u8; BLOCK]) {
    let rest = &mut row[at..];
    match rest.first_chunk_mut::<BLOCK>() {
        Some(whole) => *whole = bytes,
        None => rest.iter_mut().zip(bytes).for_each(|(place, byte)| *place = byte),
    }
}

/// Sixteen bytes of a row, with zeros past its end.
#[inline(always)]
fn sixteen(row: &[u8], at: usize) -> [u8; BLOCK] {
    match row[at..].first_chunk::<BLOCK>() {
        Some(whole) => *whole,
        None => from_fn(|i| row.get(at + i).copied().unwrap_or(0)),
    }
}

/// Transposes 16 x 16 bytes in both halves of the registers. Interleaving the bytes of registers i and i + 8 rotates the bits
/// of a byte's index by one; four times that exchanges row and column.
#[inline(always)]
fn transposed(with: V3, mut registers: [Register; BLOCK]) -> [Register; BLOCK] {
    for _ in 0..4 {
        let before = registers;
        for i in 0..BLOCK / 2 {
            let (a, b) = (before[i], before[i + BLOCK / 2]);
            registers[2 * i] = with.avx2._mm256_unpacklo_epi8(a, b);
            registers[2 * i + 1] = with.avx2._mm256_unpackhi_epi8(a, b);
        }
    }
    registers
}

struct Down<'a> {
    with: V3,
    weights: &'a Weights,
    place: usize,
    rows: Rows<'a>,
    out: &'a mut [u8],
}

impl WithSimd for Down<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { with, weights, place, rows, out } = self;
        let (pairs, last) = weights.at(place).1.as_chunks::<2>();
        let lines: Vec<&[u8]> = (0..weights.each).map(|row| rows.at(row)).collect();
        let (by_pairs, by_last) = lines.as_chunks::<2>();
        let (runs, rest) = out.as_chunks_mut::<WIDE>();
        let count = runs.len();
        for (run, out) in runs.iter_mut().enumerate() {
            let mut sums = Sums::new(with, weights);
            for ([a, b], by) in by_pairs.iter().zip(pairs) {
                sums.add(register(a, run), register(b, run), *by);
            }
            if let ([line], [by]) = (by_last, last) {
                sums.add(register(line, run), cast([0u8; WIDE]), [*by, 0]);
            }
            *out = sums.bytes(weights);
        }
        for (i, byte) in rest.iter_mut().enumerate() {
            let weighted = lines.iter().zip(weights.at(place).1);
            let sum: i32 =
                weighted.map(|(line, by)| i32::from(*by) * i32::from(line[count * WIDE + i])).sum();
            *byte = weights.byte(sum + weights.half());
        }
    }
}

/// A register from a row.
#[inline(always)]
fn register(line: &[u8], run: usize) -> Register {
    cast(line.as_chunks::<WIDE>().0[run])
}

/// 32 sums: bytes 0 to 3 and 16 to 19, then 4 to 7 and 20 to 23, and so on.
#[derive(Clone, Copy)]
struct Sums {
    with: V3,
    fours: [Register; 4],
}

impl Sums {
    #[inline(always)]
    fn new(with: V3, weights: &Weights) -> Sums {
        Sums { with, fours: [cast([weights.half(); 8]); 4] }
    }

    /// Adds bytes of two rows with their weights.
    #[inline(always)]
    fn add(&mut self, a: Register, b: Register, by: [i16; 2]) {
        let avx2 = self.with.avx2;
        let (by, zero): (Register, Register) = (cast([by; 8]), cast([0u8; WIDE]));
        let (low, high) = (avx2._mm256_unpacklo_epi8(a, b), avx2._mm256_unpackhi_epi8(a, b));
        let pairs = [
            avx2._mm256_unpacklo_epi8(low, zero),
            avx2._mm256_unpackhi_epi8(low, zero),
            avx2._mm256_unpacklo_epi8(high, zero),
            avx2._mm256_unpackhi_epi8(high, zero),
        ];
        self.fours = from_fn(|i| avx2._mm256_add_epi32(self.fours[i], avx2._mm256_madd_epi16(pairs[i], by)));
    }

    #[inline(always)]
    fn bytes(self, weights: &Weights) -> [u8; WIDE] {
        let avx2 = self.with.avx2;
        let bits = cast([u64::from(weights.bits), 0]);
        let mut whole = self.fours;
        for sums in &mut whole {
            *sums = avx2._mm256_sra_epi32(*sums, bits);
        }
        let [a, b, c, d] = whole;
        // Narrowing clips at 0 and 255.
        cast(avx2._mm256_packus_epi16(avx2._mm256_packs_epi32(a, b), avx2._mm256_packs_epi32(c, d)))
    }
}
