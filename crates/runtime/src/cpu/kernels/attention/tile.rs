//! The arithmetic of one attention tile: small products and the vector operations of the softmax.
//!
//! The right operand of a product lies in lanes; each function is compiled for the widest registers of the machine.
//!
//! The product is C[m, n] (+)= A[m, k] B[k, n]. A is read one element at a time and broadcast, so it may have any strides; B
//! and C are read as vectors along n. All five products of the backward pass have this form with operands in their existing
//! layout, so only q and do are ever transposed. Sums run over k in order: bits do not depend on threads.

/// Vector registers of f32, and the operations that the kernels need.
///
/// # Safety
/// Every method requires its implementation's instructions; `load` and `store` also `WIDTH` accessible elements at the pointer.
pub(super) trait Vector: Copy {
    const WIDTH: usize;
    /// Rows of a product's register tile, which is two vectors wide.
    const ROWS: usize;
    unsafe fn splat(x: f32) -> Self;
    unsafe fn load(at: *const f32) -> Self;
    unsafe fn store(self, at: *mut f32);
    unsafe fn add(self, b: Self) -> Self;
    unsafe fn sub(self, b: Self) -> Self;
    unsafe fn mul(self, b: Self) -> Self;
    /// The larger; b if either is NaN.
    unsafe fn max(self, b: Self) -> Self;
    /// self * a + b.
    unsafe fn mul_add(self, a: Self, b: Self) -> Self;
    /// Shifts the bits left by the 23 bits of the mantissa.
    unsafe fn to_exponent(self) -> Self;
    /// `to[c][r] = from[r][c]` for 8 x 8 elements, rows at the given strides.
    unsafe fn transpose8(from: *const f32, from_row: usize, to: *mut f32, to_row: usize);
}

/// 2^x to within 2 ulp for x up to 127; exactly 0 below -127, so that -inf masks a score.
///
/// # Safety
/// As for `Vector`.
#[inline(always)]
pub(super) unsafe fn exp2<V: Vector>(x: V) -> V {
    // Adding this rounds x to an integer n and leaves n + 127 in the lowest bits.
    const ROUND: f32 = (3 << 22) as f32 + 127.0;
    // SAFETY: the caller guarantees V's instructions.
    unsafe {
        // This operand order propagates NaN.
        let x = V::splat(-127.0).max(x);
        let rounded = x.add(V::splat(ROUND));
        let f = x.sub(rounded.sub(V::splat(ROUND)));
        // The minimax polynomial of degree 6 for 2^f on [-1/2, 1/2].
        let mut p = V::splat(1.534_581_2e-4);
        for c in [1.339_993_1e-3, 9.618_489e-3, 5.550_328_6e-2, 2.402_264_6e-1, 6.931_472e-1, 1.0] {
            p = p.mul_add(f, V::splat(c));
        }
        p.mul(rounded.to_exponent())
    }
}

/// Operands of a product. `a_row` and `a_col` are A's strides, `b_row` and `c_row` row strides; n is a multiple of 16.
pub(super) struct Product {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub a: *const f32,
    pub a_row: usize,
    pub a_col: usize,
    pub b: *const f32,
    pub b_row: usize,
    pub c: *mut f32,
    pub c_row: usize,
    /// Whether the product is added to C instead of replacing it.
    pub add: bool,
}

impl Product {
    /// # Safety
    /// The pointers hold m x k, k x n and m x n elements at their strides, C overlaps no input, and the machine has V's
    /// instructions.
    #[inline(always)]
    pub unsafe fn run<V: Vector>(&self) {
        // SAFETY: the panels tile exactly m x n, which the caller guarantees.
        unsafe {
            let mut col = 0;
            while col + 2 * V::WIDTH <= self.n {
                self.columns::<V, 2>(col);
                col += 2 * V::WIDTH;
            }
            if col < self.n {
                self.columns::<V, 1>(col);
            }
        }
    }

    #[inline(always)]
    unsafe fn columns<V: Vector, const N: usize>(&self, col: usize) {
        // SAFETY: as `run`.
        unsafe {
            let mut row = 0;
            while V::ROWS == 8 && row + 8 <= self.m {
                self.panel::<V, 8, N>(row, col);
                row += 8;
            }
            while row + 4 <= self.m {
                self.panel::<V, 4, N>(row, col);
                row += 4;
            }
            while row < self.m {
                self.panel::<V, 1, N>(row, col);
                row += 1;
            }
        }
    }

    #[inline(always)]
    unsafe fn panel<V: Vector, const R: usize, const N: usize>(&self, row: usize, col: usize) {
        // SAFETY: as `run`.
        unsafe {
            let mut sum = [[V::splat(0.0); N]; R];
            let (mut a, mut b) = (self.a.add(row * self.a_row), self.b.add(col));
            for _ in 0..self.k {
                let mut lanes = [V::splat(0.0); N];
                for (n, lane) in lanes.iter_mut().enumerate() {
                    *lane = V::load(b.add(n * V::WIDTH));
                }
                for (r, sum) in sum.iter_mut().enumerate() {
                    let x = V::splat(*a.add(r * self.a_row));
                    for n in 0..N {
                        sum[n] = x.mul_add(lanes[n], sum[n]);
                    }
                }
                a = a.wrapping_add(self.a_col);
                b = b.wrapping_add(self.b_row);
            }
            for (r, sum) in sum.iter().enumerate() {
                for (n, &sum) in sum.iter().enumerate() {
                    let c = self.c.add((row + r) * self.c_row + col + n * V::WIDTH);
                    if self.add { V::load(c).add(sum).store(c) } else { sum.store(c) }
                }
            }
        }
    }
}

/// `to[c][r] = from[r][c]` over rows x cols elements, both multiples of 8.
///
/// # Safety
/// Both hold that many elements at their strides, and the machine has V's instructions.
#[inline(always)]
pub(super) unsafe fn transpose<V: Vector>(
    (rows, cols): (usize, usize),
    (from, from_row): (*const f32, usize),
    (to, to_row): (*mut f32, usize),
) {
    for r in (0..rows).step_by(8) {
        for c in (0..cols).step_by(8) {
            // SAFETY: the 8 x 8 blocks tile rows x cols.
            unsafe { V::transpose8(from.add(r * from_row + c), from_row, to.add(c * to_row + r), to_row) }
        }
    }
}

/// Defines `$name`, which calls the generic `$body` compiled for the widest available instructions.
macro_rules! dispatch {
    ($(#[$doc:meta])* $name:ident = $body:ident($($arg:ident: $ty:ty),* $(,)?)) => {
        $(#[$doc])*
        unsafe fn $name($($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
            unsafe fn avx512($($arg: $ty),*) {
                // SAFETY: the function is compiled for these instructions; the caller guarantees the rest.
                unsafe { $body::<std::arch::x86_64::__m512>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            unsafe fn avx2($($arg: $ty),*) {
                // SAFETY: the function is compiled for these instructions; the caller guarantees the rest.
                unsafe { $body::<std::arch::x86_64::__m256>($($arg),*) }
            }
            // SAFETY: `level` detected the instructions; the caller guarantees the rest.
            unsafe {
                match $crate::cpu::math::level() {
                    #[cfg(target_arch = "x86_64")]
                    $crate::cpu::math::Level::Avx512 => avx512($($arg),*),
                    #[cfg(target_arch = "x86_64")]
                    $crate::cpu::math::Level::Avx2 => avx2($($arg),*),
                    _ => $body::<[f32; 4]>($($arg),*),
                }
            }
        }
    };
}
pub(super) use dispatch;

impl Vector for [f32; 4] {
    const WIDTH: usize = 4;
    const ROWS: usize = 4;
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        [x; 4]
    }
    #[inline(always)]
    unsafe fn load(at: *const f32) -> Self {
        // SAFETY: the caller guarantees four elements.
        unsafe { at.cast::<[f32; 4]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(self, at: *mut f32) {
        // SAFETY: the caller guarantees four elements.
        unsafe { at.cast::<[f32; 4]>().write_unaligned(self) }
    }
    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        std::array::from_fn(|i| self[i] + b[i])
    }
    #[inline(always)]
    unsafe fn sub(self, b: Self) -> Self {
        std::array::from_fn(|i| self[i] - b[i])
    }
    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        std::array::from_fn(|i| self[i] * b[i])
    }
    #[inline(always)]
    unsafe fn max(self, b: Self) -> Self {
        std::array::from_fn(|i| if self[i] > b[i] { self[i] } else { b[i] })
    }
    #[inline(always)]
    unsafe fn mul_add(self, a: Self, b: Self) -> Self {
        std::array::from_fn(|i| self[i] * a[i] + b[i])
    }
    #[inline(always)]
    unsafe fn to_exponent(self) -> Self {
        self.map(|x| f32::from_bits(x.to_bits() << 23))
    }
    #[inline(always)]
    unsafe fn transpose8(from: *const f32, from_row: usize, to: *mut f32, to_row: usize) {
        for r in 0..8 {
            for c in 0..8 {
                // SAFETY: the caller guarantees 8 x 8 elements on both sides.
                unsafe { *to.add(c * to_row + r) = *from.add(r * from_row + c) }
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::Vector;
    use std::arch::x86_64::*;

    macro_rules! vector {
        ($ty:ty, $width:literal, $rows:literal, $splat:ident, $load:ident, $store:ident, $add:ident, $sub:ident,
         $mul:ident, $max:ident, $fma:ident, $shift:expr) => {
            impl Vector for $ty {
                const WIDTH: usize = $width;
                const ROWS: usize = $rows;
                #[inline(always)]
                unsafe fn splat(x: f32) -> Self {
                    // SAFETY: the caller guarantees the instructions.
                    unsafe { $splat(x) }
                }
                #[inline(always)]
                unsafe fn load(at: *const f32) -> Self {
                    // SAFETY: the caller guarantees the instructions and the elements.
                    unsafe { $load(at) }
                }
                #[inline(always)]
                unsafe fn store(self, at: *mut f32) {
                    // SAFETY: the caller guarantees the instructions and the elements.
                    unsafe { $store(at, self) }
                }
                #[inline(always)]
                unsafe fn add(self, b: Self) -> Self {
                    // SAFETY: the caller guarantees the instructions.
                    unsafe { $add(self, b) }
                }
                #[inline(always)]
                unsafe fn sub(self, b: Self) -> Self {
                    // SAFETY: the caller guarantees the instructions.
                    unsafe { $sub(self, b) }
                }
                #[inline(always)]
                unsafe fn mul(self, b: Self) -> Self {
                    // SAFETY: the caller guarantees the instructions.
                    unsafe { $mul(self, b) }
                }
                #[inline(always)]
                unsafe fn max(self, b: Self) -> Self {
                    // SAFETY: the caller guarantees the instructions.
                    unsafe { $max(self, b) }
                }
                #[inline(always)]
                unsafe fn mul_add(self, a: Self, b: Self) -> Self {
                    // SAFETY: the caller guarantees the instructions.
                    unsafe { $fma(self, a, b) }
                }
                #[inline(always)]
                unsafe fn to_exponent(self) -> Self {
                    // SAFETY: the caller guarantees the instructions.
                    unsafe { $shift(self) }
                }
                #[inline(always)]
                unsafe fn transpose8(from: *const f32, from_row: usize, to: *mut f32, to_row: usize) {
                    // SAFETY: both instruction sets include AVX; the caller guarantees the elements.
                    unsafe { transpose8(from, from_row, to, to_row) }
                }
            }
        };
    }

    vector!(
        __m512,
        16,
        8,
        _mm512_set1_ps,
        _mm512_loadu_ps,
        _mm512_storeu_ps,
        _mm512_add_ps,
        _mm512_sub_ps,
        _mm512_mul_ps,
        _mm512_max_ps,
        _mm512_fmadd_ps,
        |x| _mm512_castsi512_ps(_mm512_slli_epi32::<23>(_mm512_castps_si512(x)))
    );
    vector!(
        __m256,
        8,
        4,
        _mm256_set1_ps,
        _mm256_loadu_ps,
        _mm256_storeu_ps,
        _mm256_add_ps,
        _mm256_sub_ps,
        _mm256_mul_ps,
        _mm256_max_ps,
        _mm256_fmadd_ps,
        |x| _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_castps_si256(x)))
    );

    #[inline(always)]
    unsafe fn transpose8(from: *const f32, from_row: usize, to: *mut f32, to_row: usize) {
        // SAFETY: AVX is available, and there are 8 elements in each of the 8 rows on both sides.
        unsafe {
            let r: [__m256; 8] = std::array::from_fn(|i| _mm256_loadu_ps(from.add(i * from_row)));
            // Interleaves pairs of rows, then groups of four, then swaps the halves of registers.
            let mut t = r;
            for i in (0..8).step_by(2) {
                t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
                t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
            }
            let mut u = t;
            for i in [0, 4] {
                u[i] = _mm256_shuffle_ps::<0x44>(t[i], t[i + 2]);
                u[i + 1] = _mm256_shuffle_ps::<0xee>(t[i], t[i + 2]);
                u[i + 2] = _mm256_shuffle_ps::<0x44>(t[i + 1], t[i + 3]);
                u[i + 3] = _mm256_shuffle_ps::<0xee>(t[i + 1], t[i + 3]);
            }
            for i in 0..4 {
                _mm256_storeu_ps(to.add(i * to_row), _mm256_permute2f128_ps::<0x20>(u[i], u[i + 4]));
                _mm256_storeu_ps(to.add((i + 4) * to_row), _mm256_permute2f128_ps::<0x31>(u[i], u[i + 4]));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a check with every vector type that this machine supports.
    macro_rules! on_all {
        ($check:ident) => {
            $check::<[f32; 4]>();
            #[cfg(target_arch = "x86_64")]
            {
                use crate::cpu::math::{Level, level};
                if level() >= Level::Avx2 {
                    $check::<std::arch::x86_64::__m256>();
                }
                if level() >= Level::Avx512 {
                    $check::<std::arch::x86_64::__m512>();
                }
            }
        };
    }

    fn noise(count: usize) -> Vec<f32> {
        (0..count).map(|i| (i as f32 * 0.73).sin()).collect()
    }

    fn products<V: Vector>() {
        for (m, n, k, add) in [(1, 16, 1, false), (13, 48, 5, true), (8, 32, 64, false), (31, 16, 7, true)] {
            let (a, b, old) = (noise(k * (m + 2)), noise(k * (n + 3)), noise(m * (n + 1)));
            let mut c = old.clone();
            let product = Product {
                m,
                n,
                k,
                a: a.as_ptr(),
                a_row: 1,
                a_col: m + 2,
                b: b.as_ptr(),
                b_row: n + 3,
                c: c.as_mut_ptr(),
                c_row: n + 1,
                add,
            };
            // SAFETY: the vectors match the products' extents, and `on_all` detected the instructions.
            unsafe { product.run::<V>() };
            for (i, got) in c.iter().enumerate() {
                let (row, col) = (i / (n + 1), i % (n + 1));
                let term = |l: usize| a[l * (m + 2) + row] as f64 * b[l * (n + 3) + col] as f64;
                let sum: f64 = (0..k).map(term).sum();
                let want = match (col == n, add) {
                    (true, _) => old[i] as f64,
                    (false, add) => sum + if add { old[i] as f64 } else { 0.0 },
                };
                assert!(
                    (*got as f64 - want).abs() < 1e-5,
                    "{m} x {n} x {k} at {row}, {col}: {got} for {want}"
                );
            }
        }
    }

    fn powers<V: Vector>() {
        let mut x: Vec<f32> = (0..16_000).map(|i| i as f32 / 63.7 - 125.5).collect();
        x.extend([0.0, -127.5, f32::NEG_INFINITY, f32::NAN, 1.0, -1.0, 0.5, -0.5].repeat(2));
        let mut y = vec![0.0; x.len()];
        for i in (0..x.len()).step_by(V::WIDTH) {
            // SAFETY: the length is a multiple of 16, and `on_all` detected the instructions.
            unsafe { exp2(V::load(x.as_ptr().add(i))).store(y.as_mut_ptr().add(i)) };
        }
        for (x, y) in x.iter().zip(&y) {
            let want = (*x as f64).exp2();
            match x {
                x if x.is_nan() => assert!(y.is_nan()),
                x if *x < -127.0 => assert_eq!(*y, 0.0, "2^{x}"),
                _ => assert!((*y as f64 / want - 1.0).abs() < 1.5e-7, "2^{x} is {want:e}, not {y:e}"),
            }
        }
        assert_eq!(y[16_000], 1.0, "2^0");
    }

    fn transposes<V: Vector>() {
        let from = noise(32 * 27);
        let mut to = vec![0.0; 24 * 33];
        // SAFETY: 32 rows of 24 at strides 27 and 33 fit both; `on_all` detected the instructions.
        unsafe { transpose::<V>((32, 24), (from.as_ptr(), 27), (to.as_mut_ptr(), 33)) };
        for (r, c) in (0..32).flat_map(|r| (0..24).map(move |c| (r, c))) {
            assert_eq!(to[c * 33 + r], from[r * 27 + c]);
        }
    }

    #[test]
    fn every_vector_type_multiplies_exponentiates_and_transposes() {
        on_all!(products);
        on_all!(powers);
        on_all!(transposes);
    }
}
