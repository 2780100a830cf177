//! The reciprocal norms that DoRA scales by, of a weight with its adapter: 1 / ||w + s b a|| by rows.
//!
//! (w [M, N], a f32 [R, N], b f32 [M, R]) -> f32 [M]. The sum w + s b a is never stored. The operation is part of an update,
//! not of the model: nothing is differentiated through it.

use super::{arity, expect};
use crate::builder::Tensor;
use crate::ops::product::{Compute, plain};
use crate::types::{DType, TensorType};

pub fn infer(ins: &[&TensorType]) -> Result<Vec<TensorType>, String> {
    arity(ins, 3)?;
    let [rows, columns] = ins[0].dims[..] else { return Err(format!("the weight is {}", ins[0])) };
    if !ins[0].dtype.is_float() {
        return Err(format!("the weight is {}, wanted floats", ins[0]));
    }
    let rank = ins[1].dims.first().copied().unwrap_or(0);
    // The weight's own type where that is wider than f32.
    let wide = if ins[0].dtype == DType::F64 { DType::F64 } else { DType::F32 };
    expect("a", ins[1], wide, &[rank, columns])?;
    expect("b", ins[2], wide, &[rows, rank])?;
    Ok(vec![TensorType::new(wide, [rows])])
}

pub fn expand<'g>(scale: f64, ins: &[Tensor<'g>]) -> Tensor<'g> {
    let (w, a, b) = (ins[0], ins[1], ins[2]);
    let thin = w.b.op(plain(false, false, a.dtype(), Compute::Full), &[b, a]).scale(scale);
    (w.cast(a.dtype()) + thin).square().sum(1).rsqrt().reshape(&[w.dims()[0]])
}

/// Arithmetic: the low-rank product, an addition, a square and its sum.
pub fn flops(ins: &[&TensorType]) -> usize {
    ins[0].elements() * (2 * ins[1].dims[0] + 3)
}
