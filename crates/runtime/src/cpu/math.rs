//! Branch-free f32 functions that the compiler vectorises, and the macro that selects the vector instructions.
//!
//! Nothing here depends on vector width: a sum is kept in sixteen lanes whatever the register size, so a CPU gives the same
//! bits for every thread count. `f32::mul_add` is one instruction in the two vector versions; the baseline version (x86 before
//! 2013) calls a function for it, which is correct but slow. Polynomials interpolate at the Chebyshev nodes of their interval.

use std::sync::atomic::{AtomicU8, Ordering};

/// The vector instructions that a loop is compiled for, narrowest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Level {
    Baseline = 1,
    /// AVX2 and FMA.
    Avx2 = 2,
    /// AVX-512 F, BW, DQ, VL.
    Avx512 = 3,
}

/// The vector extensions of this machine, detected once.
#[inline]
pub fn level() -> Level {
    static FOUND: AtomicU8 = AtomicU8::new(0);
    match FOUND.load(Ordering::Relaxed) {
        0 => {
            let found = detect();
            FOUND.store(found as u8, Ordering::Relaxed);
            found
        }
        1 => Level::Baseline,
        2 => Level::Avx2,
        _ => Level::Avx512,
    }
}

#[cfg(target_arch = "x86_64")]
fn detect() -> Level {
    let has_avx2 = is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("bmi1")
        && is_x86_feature_detected!("bmi2")
        && is_x86_feature_detected!("lzcnt");
    let has_avx512 = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    match (has_avx2, has_avx512) {
        (true, true) => Level::Avx512,
        (true, false) => Level::Avx2,
        _ => Level::Baseline,
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn detect() -> Level {
    Level::Baseline
}

/// Compiles functions for AVX-512, AVX2 and the baseline; a call dispatches to the widest supported, at the cost of one load
/// and a branch. Functions that the body calls must be `#[inline(always)]` to be compiled with it, and a closure with `mul_add`
/// small or called once: one that is not inlined loses the instructions and becomes ten times slower.
///
/// ```text
/// vectorised! {
///     /// y += a x
///     pub fn axpy(a: f32, x: &[f32], y: &mut [f32]) {
///         y.iter_mut().zip(x).for_each(|(y, x)| *y = a.mul_add(*x, *y));
///     }
/// }
/// ```
macro_rules! vectorised {
    ($($(#[$meta:meta])* $vis:vis fn $name:ident $(<$(const $g:ident : $gt:ty),+>)? ($($arg:ident : $ty:ty),* $(,)?)
        $(-> $ret:ty)? $body:block)*) => {
        $(
            $(#[$meta])*
            #[allow(clippy::too_many_arguments, reason = "the loops of a kernel take its tensors and constants")]
            $vis fn $name $(<$(const $g: $gt),+>)? ($($arg: $ty),*) $(-> $ret)? {
                #[inline(always)]
                #[allow(clippy::too_many_arguments, reason = "as above")]
                fn body $(<$(const $g: $gt),+>)? ($($arg: $ty),*) $(-> $ret)? $body

                #[cfg(target_arch = "x86_64")]
                {
                    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi1,bmi2,lzcnt")]
                    #[allow(clippy::too_many_arguments, reason = "as above")]
                    fn avx512 $(<$(const $g: $gt),+>)? ($($arg: $ty),*) $(-> $ret)? {
                        body $(::<$($g),+>)? ($($arg),*)
                    }
                    #[target_feature(enable = "avx2,fma,bmi1,bmi2,lzcnt")]
                    #[allow(clippy::too_many_arguments, reason = "as above")]
                    fn avx2 $(<$(const $g: $gt),+>)? ($($arg: $ty),*) $(-> $ret)? {
                        body $(::<$($g),+>)? ($($arg),*)
                    }
                    match $crate::cpu::math::level() {
                        // SAFETY: `level` detected every instruction set the function is compiled for.
                        $crate::cpu::math::Level::Avx512 => {
                            return unsafe { avx512 $(::<$($g),+>)? ($($arg),*) };
                        }
                        // SAFETY: as above.
                        $crate::cpu::math::Level::Avx2 => {
                            return unsafe { avx2 $(::<$($g),+>)? ($($arg),*) };
                        }
                        $crate::cpu::math::Level::Baseline => {}
                    }
                }
                body $(::<$($g),+>)? ($($arg),*)
            }
        )*
    };
}
pub(crate) use vectorised;

/// Number of lanes in which sums are kept, whatever the machine's vector size.
pub const LANES: usize = 16;

/// 1.5 * 2^23: adding it rounds to an integer, which then occupies the low bits.
const ROUNDER: f32 = 12_582_912.0;
const LN2_HIGH: f32 = 0.693_359_4;
const LN2_LOW: f32 = -2.121_944_4e-4;

/// e^x, with relative error 1.2e-7. Infinite above 88.72; 0 below -86.6 (results under 2.5e-38).
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    const LOW: f32 = -86.6;
    const HIGH: f32 = 88.722_84;
    // Comparisons instead of `clamp`, so that NaN propagates to the result.
    let c = if x < LOW { LOW } else { x };
    let c = if c > HIGH { HIGH } else { c };
    let t = c.mul_add(std::f32::consts::LOG2_E, ROUNDER);
    let n = t - ROUNDER;
    let r = n.mul_add(-LN2_LOW, n.mul_add(-LN2_HIGH, c));
    let p = 1.989_098_1e-4_f32;
    let p = p.mul_add(r, 1.393_364_2e-3);
    let p = p.mul_add(r, 8.333_310_5e-3);
    let p = p.mul_add(r, 4.166_646_7e-2);
    let p = p.mul_add(r, 1.666_666_7e-1);
    let p = p.mul_add(r, 0.5);
    let y = p.mul_add(r * r, r) + 1.0;
    // 2^(n - 1), then 2: n reaches 128, whose power is not an f32.
    let power = f32::from_bits(t.to_bits().wrapping_add(126) << 23);
    let y = y * power * 2.0;
    let y = if x < LOW { 0.0 } else { y };
    if x > HIGH { f32::INFINITY } else { y }
}

/// The natural logarithm, with relative error 1.5e-7; -inf at 0, NaN below.
#[inline(always)]
pub fn log(x: f32) -> f32 {
    let is_small = x < f32::MIN_POSITIVE;
    let scaled = if is_small { x * 8_388_608.0 } else { x };
    // Normalises the mantissa to [sqrt(1/2), sqrt(2)), so that numbers near 1 keep exponent 0.
    let bits = scaled.to_bits().wrapping_sub(0x3f35_04f3);
    let exponent = ((bits as i32) >> 23) as f32 - if is_small { 23.0 } else { 0.0 };
    let r = f32::from_bits((bits & 0x007f_ffff).wrapping_add(0x3f35_04f3)) - 1.0;
    let p = 6.971_612e-2_f32;
    let p = p.mul_add(r, -1.147_973_4e-1);
    let p = p.mul_add(r, 1.168_542e-1);
    let p = p.mul_add(r, -1.242_568_7e-1);
    let p = p.mul_add(r, 1.424_905_8e-1);
    let p = p.mul_add(r, -1.666_780_3e-1);
    let p = p.mul_add(r, 2.000_071_6e-1);
    let p = p.mul_add(r, -2.499_999_7e-1);
    let p = p.mul_add(r, 3.333_333e-1);
    let z = r * r;
    let tail = exponent.mul_add(LN2_LOW, p * r * z);
    let y = exponent.mul_add(LN2_HIGH, r + z.mul_add(-0.5, tail));
    let y = if x == 0.0 { f32::NEG_INFINITY } else { y };
    let y = if x == f32::INFINITY { x } else { y };
    if x >= 0.0 { y } else { f32::NAN }
}

/// 1 / (1 + e^-x), with relative error 3e-7.
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// Relative error 3e-7, also for small arguments.
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    let z = x * x;
    let p = -6.096_714e-3_f32;
    let p = p.mul_add(z, 2.099_718e-2);
    let p = p.mul_add(z, -5.385_090_8e-2);
    let p = p.mul_add(z, 1.333_277e-1);
    let p = p.mul_add(z, -3.333_332_8e-1);
    let near = (p * z).mul_add(x, x);
    let far = (1.0 - 2.0 / (exp(2.0 * x.abs()) + 1.0)).copysign(x);
    if x.abs() < 0.625 { near } else { far }
}

#[inline(always)]
pub fn silu(x: f32) -> f32 {
    x * sigmoid(x)
}

/// The derivative of `silu`.
#[inline(always)]
pub fn silu_slope(x: f32) -> f32 {
    let s = sigmoid(x);
    s * x.mul_add(1.0 - s, 1.0)
}

const GELU_INNER: f32 = flatout_ir::ops::elementwise::GELU_INNER as f32;
const GELU_CUBIC: f32 = flatout_ir::ops::elementwise::GELU_CUBIC as f32;

/// The tanh approximation, through 1 + tanh(u) = 2 sigmoid(2 u), which keeps its precision where tanh is near -1.
#[inline(always)]
pub fn gelu(x: f32) -> f32 {
    x * sigmoid(2.0 * GELU_INNER * x * (GELU_CUBIC * x).mul_add(x, 1.0))
}

/// The derivative of `gelu`.
#[inline(always)]
pub fn gelu_slope(x: f32) -> f32 {
    let s = sigmoid(2.0 * GELU_INNER * x * (GELU_CUBIC * x).mul_add(x, 1.0));
    let inner = 2.0 * GELU_INNER * (3.0 * GELU_CUBIC * x).mul_add(x, 1.0);
    s * (x * inner).mul_add(1.0 - s, 1.0)
}

/// The normal distribution's cumulative probability at x, with relative error 6e-7 from -1 and 4e-6 down to -6, and its
/// density. The tail is e^(-x^2 / 2) times a polynomial in 1 / (1 + 0.26 |x|), fitted with relative error 4e-8 up to 13.
#[inline(always)]
pub fn normal(x: f32) -> (f32, f32) {
    let bell = exp(-0.5 * x * x);
    let t = 1.0 / x.abs().mul_add(0.26, 1.0);
    let p = 0.030_952_618_f32;
    let p = p.mul_add(t, -0.155_017_39);
    let p = p.mul_add(t, 0.256_045_5);
    let p = p.mul_add(t, -0.156_207_07);
    let p = p.mul_add(t, 0.164_623_98);
    let p = p.mul_add(t, 0.049_437_34);
    let p = p.mul_add(t, 0.103_445_22);
    let p = p.mul_add(t, 0.102_957_14);
    let p = p.mul_add(t, 0.103_762_664);
    let tail = bell * p * t;
    (if x < 0.0 { tail } else { 1.0 - tail }, 0.398_942_3 * bell)
}

/// The exact form of GELU.
#[inline(always)]
pub fn gelu_exact(x: f32) -> f32 {
    x * normal(x).0
}

/// The derivative of `gelu_exact`.
#[inline(always)]
pub fn gelu_exact_slope(x: f32) -> f32 {
    let (share, density) = normal(x);
    x.mul_add(density, share)
}

/// The sum of the lanes, in a fixed tree.
#[inline(always)]
pub fn sum_lanes(mut lanes: [f32; LANES]) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
        half /= 2;
    }
    lanes[0]
}

#[inline(always)]
pub fn sum(x: &[f32]) -> f32 {
    fold(x, [0.0; LANES], |sum, x| sum + x, sum_lanes)
}

#[inline(always)]
pub fn sum_squares(x: &[f32]) -> f32 {
    fold(x, [0.0; LANES], |sum, x| x.mul_add(x, sum), sum_lanes)
}

/// The largest element; NaN is ignored.
#[inline(always)]
pub fn max(x: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    fold(x, [f32::NEG_INFINITY; LANES], larger, |lanes| lanes.into_iter().fold(f32::NEG_INFINITY, larger))
}

#[inline(always)]
pub fn dot(x: &[f32], y: &[f32]) -> f32 {
    let n = x.len().min(y.len());
    let (x, y) = (&x[..n], &y[..n]);
    let mut lanes = [0.0; LANES];
    let (xs, ys) = (x.chunks_exact(LANES), y.chunks_exact(LANES));
    let (x_rest, y_rest) = (xs.remainder(), ys.remainder());
    for (x, y) in xs.zip(ys) {
        for i in 0..LANES {
            lanes[i] = x[i].mul_add(y[i], lanes[i]);
        }
    }
    for i in 0..x_rest.len() {
        lanes[i] = x_rest[i].mul_add(y_rest[i], lanes[i]);
    }
    sum_lanes(lanes)
}

#[inline(always)]
fn fold(
    x: &[f32],
    mut lanes: [f32; LANES],
    step: impl Fn(f32, f32) -> f32,
    join: impl Fn([f32; LANES]) -> f32,
) -> f32 {
    let chunks = x.chunks_exact(LANES);
    let rest = chunks.remainder();
    for x in chunks {
        for i in 0..LANES {
            lanes[i] = step(lanes[i], x[i]);
        }
    }
    for i in 0..rest.len() {
        lanes[i] = step(lanes[i], rest[i]);
    }
    join(lanes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use flatout_ir::ops::normal::{cdf, density};

    vectorised! {
        fn each_exp(x: &mut [f32]) { x.iter_mut().for_each(|x| *x = exp(*x)); }
        fn each_log(x: &mut [f32]) { x.iter_mut().for_each(|x| *x = log(*x)); }
        fn each_sigmoid(x: &mut [f32]) { x.iter_mut().for_each(|x| *x = sigmoid(*x)); }
        fn each_share(x: &mut [f32]) { x.iter_mut().for_each(|x| *x = normal(*x).0); }
        fn each_density(x: &mut [f32]) { x.iter_mut().for_each(|x| *x = normal(*x).1); }
        fn each_tanh(x: &mut [f32]) { x.iter_mut().for_each(|x| *x = tanh(*x)); }
        fn vector_dot(x: &[f32], y: &[f32]) -> f32 { dot(x, y) }
    }

    /// The largest relative error over a million points from `low` to `high`.
    fn worst(each: fn(&mut [f32]), exact: fn(f64) -> f64, low: f64, high: f64) -> f64 {
        worst_of(1_000_000, each, exact, low, high)
    }

    fn worst_of(count: usize, each: fn(&mut [f32]), exact: fn(f64) -> f64, low: f64, high: f64) -> f64 {
        let step = (high - low) / (count - 1) as f64;
        let points: Vec<f32> = (0..count).map(|i| (low + step * i as f64) as f32).collect();
        let mut got = points.clone();
        each(&mut got);
        let error = |(&x, &y): (&f32, &f32)| {
            let want = exact(x as f64);
            if want == 0.0 { y.abs() as f64 } else { ((y as f64 - want) / want).abs() }
        };
        points.iter().zip(&got).map(error).fold(0.0, f64::max)
    }

    #[test]
    fn functions_meet_their_stated_errors() {
        let sigmoid64 = |x: f64| 1.0 / (1.0 + (-x).exp());
        for (name, error, bound) in [
            ("exp", worst(each_exp, f64::exp, -86.5, 88.7), 1.2e-7),
            ("exp near 0", worst(each_exp, f64::exp, -1.0, 1.0), 1.2e-7),
            ("log", worst(each_log, f64::ln, 1e-30, 1e30), 1.5e-7),
            ("log near 1", worst(each_log, f64::ln, 0.5, 2.0), 1.5e-7),
            ("sigmoid", worst(each_sigmoid, sigmoid64, -80.0, 30.0), 3e-7),
            ("normal share", worst_of(50_000, each_share, cdf, -1.0, 9.0), 6e-7),
            ("normal share, low", worst_of(50_000, each_share, cdf, -6.0, -1.0), 4e-6),
            ("normal density", worst_of(50_000, each_density, density, -3.0, 3.0), 8e-7),
            ("tanh", worst(each_tanh, f64::tanh, -12.0, 12.0), 3e-7),
            ("tanh near 0", worst(each_tanh, f64::tanh, -1e-3, 1e-3), 3e-7),
        ] {
            assert!(error < bound, "{name}: {error:e}, not below {bound:e}");
        }
    }

    #[test]
    fn limits_and_nans() {
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-1000.0), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(f32::NAN).is_nan() && log(f32::NAN).is_nan() && tanh(f32::NAN).is_nan());
        assert_eq!(log(0.0), f32::NEG_INFINITY);
        assert_eq!(log(f32::INFINITY), f32::INFINITY);
        assert_eq!(log(1.0), 0.0);
        assert!(log(-1.0).is_nan());
        let denormal = 1e-40_f32;
        assert!((log(denormal) as f64 - (denormal as f64).ln()).abs() < 1e-4);
        assert_eq!((tanh(100.0), tanh(-100.0)), (1.0, -1.0));
        assert_eq!((sigmoid(-200.0), sigmoid(200.0)), (0.0, 1.0));
    }

    /// The three compilations of one loop agree to the bit, as far as the machine can run them.
    #[test]
    fn dot_has_the_same_bits_compiled_either_way() {
        let x: Vec<f32> = (0..1003).map(|i| (i as f32 * 0.37).sin()).collect();
        let y: Vec<f32> = (0..1003).map(|i| (i as f32 * 0.91).cos()).collect();
        assert_eq!(vector_dot(&x, &y).to_bits(), dot(&x, &y).to_bits());
    }
}
