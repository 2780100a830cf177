//! What DoRA divides by, of a weight and the adapter beside it: 1 / ||w + s b a|| by rows.
//!
//! (w [M, N], a f32 [R, N], b f32 [M, R]) -> f32 [M]. The sum of a row is never in memory. It is part of an update, not of
//! the model: nothing is differentiated through it.

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
    expect("a", ins[1], DType::F32, &[rank, columns])?;
    expect("b", ins[2], DType::F32, &[rows, rank])?;
    Ok(vec![TensorType::new(DType::F32, [rows])])
}

pub fn expand<'g>(scale: f64, ins: &[Tensor<'g>]) -> Tensor<'g> {
    let (w, a, b) = (ins[0], ins[1], ins[2]);
    let thin = w.b.op(plain(false, false, DType::F32, Compute::Full), &[b, a]).scale(scale);
    (w.cast(DType::F32) + thin).square().sum(1).rsqrt().reshape(&[w.dims()[0]])
}

/// Arithmetic: a product of low rank, an addition, a square and its sum.
pub fn flops(ins: &[&TensorType]) -> usize {
    ins[0].elements() * (2 * ins[1].dims[0] + 3)
}
