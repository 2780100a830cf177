//! The inverse discrete cosine transform of a block, at full or reduced scale.
//!
//! Blocks are stored by columns: coefficient (u horizontal, v vertical) is at 8 u + v. The full transform is that of Arai, Agui
//! and Nakajima: its scale factors are folded into the quantisation steps ([`steps`]), and a row of eight numbers is processed
//! at once, so that the compiler vectorises it. At 1/2, 1/4 and 1/8 scale, the lowest 4, 2 or 1 frequencies of each direction
//! go through the transform of that size, which is how an image of that size would be coded.

use std::array::from_fn;
use std::f64::consts::PI;
use std::ops::{Add, Mul, Sub};

use super::huffman::place;
use crate::images::resample::byte;

/// Eight numbers in one vector, of any representation.
pub(super) trait Eight:
    Copy + Add<Output = Self> + Sub<Output = Self> + Mul<f32, Output = Self>
{
}
impl Eight for Row {}

/// Eight numbers as an array.
#[derive(Debug, Clone, Copy)]
struct Row([f32; 8]);

impl Add for Row {
    type Output = Row;
    #[inline(always)]
    fn add(self, other: Row) -> Row {
        Row(from_fn(|at| self.0[at] + other.0[at]))
    }
}

impl Sub for Row {
    type Output = Row;
    #[inline(always)]
    fn sub(self, other: Row) -> Row {
        Row(from_fn(|at| self.0[at] - other.0[at]))
    }
}

impl Mul<f32> for Row {
    type Output = Row;
    #[inline(always)]
    fn mul(self, factor: f32) -> Row {
        Row(from_fn(|at| self.0[at] * factor))
    }
}

/// The quantisation steps of a table, from zigzag order to block positions, scaled as a transform to `size` x `size` pixels
/// expects.
pub(super) fn steps(table: &[u16; 64], size: usize) -> [f32; 64] {
    let mut steps = [0.0; 64];
    for (zigzag, step) in table.iter().enumerate() {
        let place = place(zigzag);
        let factor = match size {
            8 => scale(place / 8) * scale(place % 8) / 8.0,
            _ => size as f64 / 8.0,
        };
        steps[place] = (f64::from(*step) * factor) as f32;
    }
    steps
}

/// 1 for the DC coefficient, and sqrt(2) cos(k pi / 16) for the AC ones.
fn scale(frequency: usize) -> f64 {
    if frequency == 0 { 1.0 } else { 2f64.sqrt() * (frequency as f64 * PI / 16.0).cos() }
}

/// One direction of the full transform, for eight columns at once.
#[inline(always)]
pub(super) fn transform<R: Eight>([a0, a1, a2, a3, a4, a5, a6, a7]: [R; 8]) -> [R; 8] {
    const ROOT: f32 = std::f32::consts::SQRT_2;
    // 2 cos(pi/8), 2 (cos(pi/8) - cos(3 pi/8)), 2 (cos(pi/8) + cos(3 pi/8)).
    const C1: f32 = 1.847_759_1;
    const C2: f32 = 1.082_392_2;
    const C3: f32 = 2.613_126;
    let (sum, difference) = (a0 + a4, a0 - a4);
    let turned = a2 + a6;
    let other = (a2 - a6) * ROOT - turned;
    let (e0, e3, e1, e2) = (sum + turned, sum - turned, difference + other, difference - other);
    let (z13, z10, z11, z12) = (a5 + a3, a5 - a3, a1 + a7, a1 - a7);
    let o7 = z11 + z13;
    let z5 = (z10 + z12) * C1;
    let o6 = z5 - z10 * C3 - o7;
    let o5 = (z11 - z13) * ROOT - o6;
    let o4 = z5 - z12 * C2 - o5;
    [e0 + o7, e1 + o6, e2 + o5, e3 + o4, e3 - o4, e2 - o5, e1 - o6, e0 - o7]
}

/// The full transform, for an instruction set. All implementations give the same bytes.
pub(super) trait Transform: Copy {
    /// Writes the pixels of an 8 x 8 block of coefficients into a plane with distance `stride` between rows.
    fn full(self, block: &[i16; 64], steps: &[f32; 64], plane: &mut [u8], stride: usize);
}

/// The compiler's own vectorisation of rows of eight.
#[derive(Clone, Copy)]
pub(super) struct Portable;

impl Transform for Portable {
    #[inline(always)]
    fn full(self, block: &[i16; 64], steps: &[f32; 64], plane: &mut [u8], stride: usize) {
        let columns =
            transform(from_fn(|u| Row(from_fn(|v| f32::from(block[8 * u + v]) * steps[8 * u + v]))));
        let rows = transform(from_fn(|v| Row(from_fn(|x| columns[x].0[v]))));
        for (y, row) in rows.iter().enumerate() {
            let line: &mut [u8] = &mut plane[y * stride..y * stride + 8];
            line.iter_mut().zip(row.0).for_each(|(out, value)| *out = byte(value + 128.0));
        }
    }
}

/// Writes the pixels of a block at `SIZE` x `SIZE`: 4, 2 or 1.
#[inline(always)]
pub(super) fn reduced<const SIZE: usize>(
    block: &[i16; 64],
    steps: &[f32; 64],
    plane: &mut [u8],
    stride: usize,
) {
    let basis = Basis::<SIZE>::NUMBERS;
    let amplitude = |at: usize| f32::from(block[at]) * steps[at];
    // Horizontally for every vertical frequency, then vertically.
    let across: [[f32; SIZE]; SIZE] =
        from_fn(|x| from_fn(|v| (0..SIZE).map(|u| basis[x][u] * amplitude(8 * u + v)).sum()));
    for y in 0..SIZE {
        for x in 0..SIZE {
            let value: f32 = (0..SIZE).map(|v| basis[y][v] * across[x][v]).sum();
            plane[y * stride + x] = byte(value + 128.0);
        }
    }
}

struct Basis<const SIZE: usize>;

impl<const SIZE: usize> Basis<SIZE> {
    /// For position x and frequency u: sqrt(2 / SIZE) cos((2 x + 1) u pi / (2 SIZE)), and sqrt(1 / SIZE) for DC.
    const NUMBERS: [[f32; SIZE]; SIZE] = {
        let mut numbers = [[0.0; SIZE]; SIZE];
        let mut at = 0;
        while at < SIZE * SIZE {
            let (x, u) = (at / SIZE, at % SIZE);
            numbers[x][u] = match (SIZE, u) {
                (1, _) => 1.0,
                (2, 0) => std::f32::consts::FRAC_1_SQRT_2,
                (2, _) => [std::f32::consts::FRAC_1_SQRT_2, -std::f32::consts::FRAC_1_SQRT_2][x],
                (_, 0) => 0.5,
                // sqrt(1/2) times the cosines of pi/8 and 3 pi/8.
                (_, 1) => [0.653_281_5, 0.270_598_05, -0.270_598_05, -0.653_281_5][x],
                (_, 2) => [0.5, -0.5, -0.5, 0.5][x],
                _ => [0.270_598_05, -0.653_281_5, 0.653_281_5, -0.270_598_05][x],
            };
            at += 1;
        }
        numbers
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition, for any size: the sum of orthonormal cosines with these amplitudes.
    fn defined(amplitudes: &[[f64; 8]; 8], size: usize) -> Vec<f64> {
        let wave = |x: usize, u: usize| {
            let norm = if u == 0 { (1.0 / size as f64).sqrt() } else { (2.0 / size as f64).sqrt() };
            norm * ((2 * x + 1) as f64 * u as f64 * PI / (2 * size) as f64).cos()
        };
        let mut pixels = Vec::new();
        for y in 0..size {
            for x in 0..size {
                let mut sum = 0.0;
                for (v, row) in amplitudes.iter().enumerate().take(size) {
                    for (u, amplitude) in row.iter().enumerate().take(size) {
                        sum += amplitude * wave(x, u) * wave(y, v) * size as f64 / 8.0;
                    }
                }
                pixels.push((sum + 128.0).clamp(0.0, 255.0));
            }
        }
        pixels
    }

    #[test]
    fn transforms_are_those_of_the_definition() {
        let mut uniform = crate::random::Uniform::new(4);
        for trial in 0..200 {
            // Amplitudes fall with frequency, as in photographs.
            let mut amplitudes = [[0.0; 8]; 8];
            let mut table = [0u16; 64];
            for (zigzag, step) in table.iter_mut().enumerate() {
                *step = 1 + (uniform.draw() * 20.0) as u16;
                let (u, v) = (place(zigzag) / 8, place(zigzag) % 8);
                let level = (uniform.draw() * 2.0 - 1.0) * 400.0 / ((1 + u * u + v * v) as f64);
                amplitudes[v][u] = (level / f64::from(*step)).round() * f64::from(*step);
            }
            for size in [8, 4, 2, 1] {
                let steps = steps(&table, size);
                let mut block = [0; 64];
                for (zigzag, step) in table.iter().enumerate() {
                    let at = place(zigzag);
                    block[at] = (amplitudes[at % 8][at / 8] / f64::from(*step)) as i16;
                }
                let mut plane = vec![0; size * size];
                match size {
                    8 => Portable.full(&block, &steps, &mut plane, 8),
                    4 => reduced::<4>(&block, &steps, &mut plane, 4),
                    2 => reduced::<2>(&block, &steps, &mut plane, 2),
                    _ => reduced::<1>(&block, &steps, &mut plane, 1),
                }
                for (byte, value) in plane.iter().zip(defined(&amplitudes, size)) {
                    assert!(
                        (f64::from(*byte) - value).abs() < 0.501,
                        "{byte} of {value} at {size}, trial {trial}"
                    );
                }
            }
        }
    }
}
