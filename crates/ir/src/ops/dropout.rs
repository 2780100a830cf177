//! Dropout, drawn by counter: the same element of the same sample of the same step draws the same number whatever the
//! micro-batch, the schedule or the backend. The gradient is the same operation with the same key.
//!
//! rng = (seed low, seed high, step); rows[t] = (global sample index, token within the sample).

use super::{arity, expect, expect_axes, expect_float};
use crate::builder::Builder;
use crate::ops::{Grads, Op, Vjp};
use crate::types::{DType, TensorType};

pub fn infer(p: f32, ins: &[&TensorType]) -> Result<Vec<TensorType>, String> {
    arity(ins, 3)?;
    if !(0.0..1.0).contains(&p) {
        return Err(format!("a share of {p} cannot be dropped"));
    }
    expect_axes("x", ins[0])?;
    expect_float("x", ins[0], &ins[0].dims)?;
    expect("rng", ins[1], DType::I32, &[3])?;
    expect("rows", ins[2], DType::I32, &[ins[0].dims[0], 2])?;
    Ok(vec![ins[0].clone()])
}

pub fn vjp<'g>(b: &'g Builder, p: f32, at: &Vjp<'_, 'g>) -> Grads<'g> {
    let d = at.d[0].map(|d| b.op_keyed(Op::Dropout { p }, &[d, at.ins[1], at.ins[2]], at.key));
    vec![d, None, None]
}
