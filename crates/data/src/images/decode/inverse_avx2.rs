//! The full inverse cosine transform with AVX2.
//!
//! The operations are those of [`super::inverse`] in the same order, each rounded separately, so the bytes are the same; a
//! register holds eight numbers.

use std::ops::{Add, Mul, Sub};

use pulp::x86::V3;

use super::inverse::{Eight, Transform, transform};

#[derive(Clone, Copy)]
struct Lanes {
    with: V3,
    x: std::arch::x86_64::__m256,
}

impl Add for Lanes {
    type Output = Lanes;
    #[inline(always)]
    fn add(self, other: Lanes) -> Lanes {
        Lanes { x: self.with.avx._mm256_add_ps(self.x, other.x), ..self }
    }
}

impl Sub for Lanes {
    type Output = Lanes;
    #[inline(always)]
    fn sub(self, other: Lanes) -> Lanes {
        Lanes { x: self.with.avx._mm256_sub_ps(self.x, other.x), ..self }
    }
}

impl Mul<f32> for Lanes {
    type Output = Lanes;
    #[inline(always)]
    fn mul(self, factor: f32) -> Lanes {
        Lanes { x: self.with.avx._mm256_mul_ps(self.x, self.with.avx._mm256_set1_ps(factor)), ..self }
    }
}

impl Eight for Lanes {}

impl Transform for V3 {
    #[inline(always)]
    fn full(self, block: &[i16; 64], steps: &[f32; 64], plane: &mut [u8], stride: usize) {
        let (avx, avx2) = (self.avx, self.avx2);
        let (columns, steps) = (block.as_chunks::<8>().0, steps.as_chunks::<8>().0);
        // Loops in place of closures, which the compiler may leave as calls without these instructions.
        let mut c = [Lanes { with: self, x: avx._mm256_setzero_ps() }; 8];
        for u in 0..8 {
            let wide = avx._mm256_cvtepi32_ps(avx2._mm256_cvtepi16_epi32(pulp::cast(columns[u])));
            c[u].x = avx._mm256_mul_ps(wide, pulp::cast(steps[u]));
        }
        let c = transform(c);
        let c = [c[0].x, c[1].x, c[2].x, c[3].x, c[4].x, c[5].x, c[6].x, c[7].x];
        // Transposes: pairs, fours, halves.
        let low = |a, b| avx._mm256_unpacklo_ps(a, b);
        let high = |a, b| avx._mm256_unpackhi_ps(a, b);
        let pairs = [
            low(c[0], c[1]),
            high(c[0], c[1]),
            low(c[2], c[3]),
            high(c[2], c[3]),
            low(c[4], c[5]),
            high(c[4], c[5]),
            low(c[6], c[7]),
            high(c[6], c[7]),
        ];
        let first = |a, b| avx._mm256_shuffle_ps::<0x44>(a, b);
        let second = |a, b| avx._mm256_shuffle_ps::<0xee>(a, b);
        let fours = [
            first(pairs[0], pairs[2]),
            second(pairs[0], pairs[2]),
            first(pairs[1], pairs[3]),
            second(pairs[1], pairs[3]),
            first(pairs[4], pairs[6]),
            second(pairs[4], pairs[6]),
            first(pairs[5], pairs[7]),
            second(pairs[5], pairs[7]),
        ];
        let mut rows = [Lanes { with: self, x: avx._mm256_setzero_ps() }; 8];
        for i in 0..4 {
            rows[i].x = avx._mm256_permute2f128_ps::<0x20>(fours[i], fours[i + 4]);
            rows[i + 4].x = avx._mm256_permute2f128_ps::<0x31>(fours[i], fours[i + 4]);
        }
        let rows = transform(rows);
        // Rounds to nearest. Narrowing clips at 0 but wraps numbers out of range, so they are clipped at 255 before.
        let mut whole = [avx._mm256_setzero_si256(); 8];
        for (whole, row) in whole.iter_mut().zip(rows) {
            let moved = avx._mm256_add_ps(row.x, avx._mm256_set1_ps(128.0));
            *whole = avx._mm256_cvtps_epi32(avx._mm256_min_ps(moved, avx._mm256_set1_ps(255.0)));
        }
        let order = pulp::cast([0i32, 4, 1, 5, 2, 6, 3, 7]);
        for (half, four) in
            [[whole[0], whole[1], whole[2], whole[3]], [whole[4], whole[5], whole[6], whole[7]]]
                .into_iter()
                .enumerate()
        {
            let words =
                (avx2._mm256_packs_epi32(four[0], four[1]), avx2._mm256_packs_epi32(four[2], four[3]));
            let bytes = avx2._mm256_packus_epi16(words.0, words.1);
            let lines: [[u8; 8]; 4] = pulp::cast(avx2._mm256_permutevar8x32_epi32(bytes, order));
            for (y, line) in lines.iter().enumerate() {
                let from = (4 * half + y) * stride;
                plane[from..from + 8].copy_from_slice(line);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::inverse::Portable;
    use super::*;
    use crate::random::Uniform;

    #[test]
    fn bytes_are_those_of_the_portable_transform() {
        let Some(with) = V3::try_new() else { return };
        let mut uniform = Uniform::new(9);
        for trial in 0..2000 {
            // Scales up to numbers that only damaged images have.
            let scale = [1.0, 40.0, 3000.0, 1e9][trial % 4];
            let steps: [f32; 64] = std::array::from_fn(|_| (1.0 + uniform.draw() * scale) as f32);
            let block: [i16; 64] = std::array::from_fn(|at| {
                let most = if trial % 3 == 0 { 32_767.0 } else { 300.0 / (1 + at) as f64 };
                ((uniform.draw() * 2.0 - 1.0) * most) as i16
            });
            let mut planes = [vec![0; 80], vec![0; 80]];
            with.full(&block, &steps, &mut planes[0], 10);
            Portable.full(&block, &steps, &mut planes[1], 10);
            assert_eq!(planes[0], planes[1], "trial {trial}");
        }
    }
}
