//! The matrix product, batched over leading axes, with either operand optionally stored transposed.

use super::{arity, expect, expect_float};
use crate::attr::named;
use crate::builder::Tensor;
use crate::ops::epilogue::{self, Epilogue};
use crate::ops::{Grads, Op, Vjp};
use crate::types::{DType, TensorType};

named! {
    /// The precision of the terms of a product of f32. Sums are f32 either way.
    pub enum Compute {
        Full = "full",
        /// Operands keep 10 bits of their mantissa, which matrix units multiply fast.
        Tf32 = "tf32",
    }
    omitted Full
}

/// The nearest value with 10 mantissa bits; ties round away from zero.
pub fn round_tf32(x: f32) -> f32 {
    if x.is_finite() { f32::from_bits((x.to_bits() + 0x1000) & !0x1fff) } else { x }
}

/// A product of two operands without base or epilogue.
pub fn plain(ta: bool, tb: bool, out: DType, compute: Compute) -> Op {
    Op::Product { ta, tb, out, base: false, compute, epilogue: Epilogue::None }
}

/// Whether a result is so much wider than the product's input that `recompute=wide` recomputes it.
pub fn is_wide(columns: usize, inner: usize) -> bool {
    columns >= 2 * inner
}

/// The extent summed over.
pub fn inner(ta: bool, a: &TensorType) -> usize {
    a.dims[a.rank() - if ta { 2 } else { 1 }]
}

pub fn infer(
    ta: bool,
    tb: bool,
    out: DType,
    base: bool,
    epilogue: Epilogue,
    ins: &[&TensorType],
) -> Result<Vec<TensorType>, String> {
    let is_scaled = ins.len() >= 2 && ins[0].dtype.is_fp8() && ins[1].dtype.is_fp8();
    arity(ins, 2 + (base || epilogue.takes_one()) as usize + 2 * is_scaled as usize)?;
    if base && !epilogue.takes_base() {
        return Err(format!("{epilogue:?} and a base do not go together"));
    }
    let (a, b) = (ins[0], ins[1]);
    let (ra, rb) = (a.rank(), b.rank());
    if ra < 2 || ra != rb || a.dims[..ra - 2] != b.dims[..rb - 2] {
        return Err(format!("{a} and {b} are not two stacks of matrices"));
    }
    if is_scaled {
        if epilogue != Epilogue::None || !matches!(out, DType::F32 | DType::BF16) {
            return Err(format!("{a} times {b} is stored in f32 or bf16, without an epilogue"));
        }
        expect("the scale of a", ins[ins.len() - 2], DType::F32, &[1])?;
        expect("the scale of b", ins[ins.len() - 1], DType::F32, &[1])?;
    } else if a.dtype != b.dtype || !a.dtype.is_float() {
        return Err(format!("{a} and {b} do not multiply: both must have one float type"));
    }
    let (m, ka) = if ta { (a.dims[ra - 1], a.dims[ra - 2]) } else { (a.dims[ra - 2], a.dims[ra - 1]) };
    let (kb, n) = if tb { (b.dims[rb - 1], b.dims[rb - 2]) } else { (b.dims[rb - 2], b.dims[rb - 1]) };
    if ka != kb {
        return Err(format!("{a}{} times {b}{}: inner extents {ka} and {kb} differ", mark(ta), mark(tb)));
    }
    let mut dims = a.dims[..ra - 2].to_vec();
    dims.extend([m, n]);
    if base {
        expect_float("the base", ins[2], &dims)?;
    }
    epilogue::infer(epilogue, TensorType::new(out, dims), epilogue.takes_one().then(|| ins[2]))
}

fn mark(transposed: bool) -> &'static str {
    if transposed { " transposed" } else { "" }
}

pub fn vjp<'g>(
    [ta, tb]: [bool; 2],
    base: bool,
    compute: Compute,
    epilogue: Epilogue,
    at: &Vjp<'_, 'g>,
) -> Grads<'g> {
    assert!(!at.ins[0].dtype().is_fp8(), "products of 8-bit floats come after autodiff");
    let Some(d) = epilogue::vjp(epilogue, at) else { return vec![None; at.ins.len()] };
    let (a, b) = (at.ins[0], at.ins[1]);
    let d_in = d.cast(a.dtype());
    // C = A B: dA = dC B^T, dB = A^T dC; a transposed operand gets the transposed gradient.
    let times = |a: Tensor<'g>, b: Tensor<'g>, ta, tb| a.b.op(plain(ta, tb, a.dtype(), compute), &[a, b]);
    let da = at.needs[0].then(|| if ta { times(b, d_in, tb, true) } else { times(d_in, b, false, !tb) });
    let db = at.needs[1].then(|| if tb { times(d_in, a, true, ta) } else { times(a, d_in, !ta, false) });
    let mut grads = vec![da, db];
    if epilogue.has_bias() {
        // After the weight's gradient, so that that product can also compute it.
        grads.push(at.needs[2].then(|| epilogue::bias_gradient(d, at.ins[2])));
    }
    if base {
        grads.push(at.needs[2].then(|| d.cast(at.ins[2].dtype())));
    }
    grads
}

/// The product of 8-bit operands, computed in f32 and multiplied by both scales.
pub fn of_wide<'g>(ta: bool, tb: bool, out: DType, base: bool, ins: &[Tensor<'g>]) -> Tensor<'g> {
    let wide = [ins[0].cast(DType::F32), ins[1].cast(DType::F32)];
    let c = ins[0].b.op(plain(ta, tb, DType::F32, Compute::Full), &wide);
    let dims = c.dims();
    let scale = (ins[ins.len() - 2] * ins[ins.len() - 1]).reshape(&vec![1; dims.len()]);
    let c = c * scale.broadcast(&dims);
    if base { (c + ins[2].cast(DType::F32)).cast(out) } else { c.cast(out) }
}

pub fn without_base<'g>(ta: bool, tb: bool, out: DType, compute: Compute, ins: &[Tensor<'g>]) -> Tensor<'g> {
    let product = ins[0].b.op(plain(ta, tb, ins[2].dtype(), compute), &ins[..2]);
    (product + ins[2]).cast(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The nearest value on the 10-bit grid, computed without bit operations.
    fn nearest(x: f64) -> f64 {
        let unit = 2f64.powi((x.abs().log2().floor() as i32).max(-126) - 10);
        let below = (x.abs() / unit).floor() * unit;
        let up = x.abs() - below >= below + unit - x.abs();
        x.signum() * if up { below + unit } else { below }
    }

    #[test]
    fn tf32_is_the_nearest_value_of_ten_bits_ties_away() {
        let mut bits = 1_u32;
        for _ in 0..50_000 {
            bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let x = f32::from_bits(bits);
            if x.is_nan() || x.abs() > 3e38 || x.abs() < f32::MIN_POSITIVE {
                continue;
            }
            assert_eq!(round_tf32(x) as f64, nearest(x as f64), "{x:e}");
        }
        let unit = 2f32.powi(-10);
        assert_eq!(round_tf32(1.0 + unit / 2.0), 1.0 + unit);
        assert_eq!(round_tf32(-1.0 - unit / 2.0), -1.0 - unit);
        assert_eq!(round_tf32(f32::NEG_INFINITY), f32::NEG_INFINITY);
        assert!(round_tf32(f32::NAN).is_nan() && round_tf32(-0.0).is_sign_negative());
    }
}
