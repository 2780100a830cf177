//! AdamW with decoupled decay over a parameter or a flat region of many.
//!
//! g' = scale g; m' = b1 m + (1 - b1) g'; v' = b2 v + (1 - b2) g'^2; with t applied updates, this one included:
//! p' = p - lr (m' / (1 - b1^t) / (sqrt(v' / (1 - b2^t)) + eps) + decay p). Where `is_finite` is 0 nothing changes. With
//! `copy`, p' also in bf16: the copy that products read, written in the same pass over memory.
//!
//! Moments have p's type or bf16. In bf16 a kernel rounds m' and v' stochastically (`random::rounding`, by the
//! element's index and t), after p' was computed from the unrounded values: at b2 = 0.999 an increment of v is often
//! below half a step of bf16, and rounding to nearest would never change v. `expand` rounds to nearest, so a kernel's
//! moments are within a step of its results. Element indices start at `first`, so that dividing a region does not
//! change the draws. Where ranks update adjacent shares of equal size, the last input is this rank's index, and its
//! elements are numbered after those of the ranks before it.

use super::{arity, expect};
use crate::builder::Tensor;
use crate::ops::Op;
use crate::types::{DType, TensorType};

const SCALARS: [&str; 4] = ["lr", "scale", "updates", "is_finite"];

/// Checks the inputs after the first `state`: the scalars of the step, and the rank where each rank updates its share.
pub(super) fn check_step(state: usize, ins: &[&TensorType]) -> Result<(), String> {
    let step = state + SCALARS.len();
    let has_rank = ins.len() == step + 1;
    arity(ins, step + has_rank as usize)?;
    for (what, t) in SCALARS.iter().zip(&ins[state..]) {
        expect(what, t, ins[0].dtype, &[1])?;
    }
    if has_rank { expect("the rank", ins[step], DType::I32, &[1]) } else { Ok(()) }
}

pub(super) fn check_first(first: u64) -> Result<(), String> {
    match first.is_multiple_of(4) {
        true => Ok(()),
        false => Err(format!("the first element is number {first}, and draws are made for four at a time")),
    }
}

pub fn infer(copy: bool, first: u64, ins: &[&TensorType]) -> Result<Vec<TensorType>, String> {
    check_step(4, ins)?;
    let p = ins[0];
    expect("the gradient", ins[1], p.dtype, &p.dims)?;
    let moments = if ins[2].dtype == DType::BF16 { DType::BF16 } else { p.dtype };
    for (what, t) in ["the first moment", "the second moment"].iter().zip(&ins[2..4]) {
        expect(what, t, moments, &p.dims)?;
    }
    check_first(first)?;
    let mut outs = vec![p.clone(), p.with(moments), p.with(moments)];
    outs.extend(copy.then(|| p.with(DType::BF16)));
    Ok(outs)
}

pub fn expand<'g>(op: &Op, ins: &[Tensor<'g>]) -> Vec<Tensor<'g>> {
    let Op::AdamW { beta1, beta2, eps, weight_decay, lr_scale, copy, first: _ } = *op else {
        unreachable!("called for adamw")
    };
    let [m, v] = [ins[2], ins[3]].map(|moment| moment.cast(ins[0].dtype()));
    let constants = Constants { beta1, beta2, eps, weight_decay, lr_scale };
    let [p, m, v] = updated(constants, [ins[0], ins[1], m, v], [ins[4], ins[5], ins[6], ins[7]]);
    let [m, v] = [m, v].map(|moment| moment.cast(ins[2].dtype()));
    let mut outs = vec![p, m, v];
    outs.extend(copy.then(|| p.cast(DType::BF16)));
    outs
}

#[derive(Clone, Copy)]
pub(super) struct Constants {
    pub beta1: f32,
    pub beta2: f32,
    pub eps: f32,
    pub weight_decay: f32,
    pub lr_scale: f32,
}

/// p', m' and v' from p, g, m and v in p's type, by lr, scale, updates and is_finite.
pub(super) fn updated<'g>(
    Constants { beta1, beta2, eps, weight_decay, lr_scale }: Constants,
    [p, g, m, v]: [Tensor<'g>; 4],
    [lr, scale, updates, is_finite]: [Tensor<'g>; 4],
) -> [Tensor<'g>; 3] {
    let ty = p.ty();
    let everywhere = |x: Tensor<'g>| x.reshape(&vec![1; ty.rank()]).broadcast(&ty.dims);
    let g = g * everywhere(scale);
    let lr = everywhere(lr.scale(lr_scale as f64));
    let is_finite = everywhere(is_finite);
    let (b1, b2) = (beta1 as f64, beta2 as f64);
    let correction = |beta: f64| everywhere((-updates.scale(beta.ln()).exp()).offset(1.0));
    let m1 = m.scale(b1) + g.scale(1.0 - b1);
    let v1 = v.scale(b2) + g.square().scale(1.0 - b2);
    let step = m1.div(correction(b1)).div(v1.div(correction(b2)).sqrt().offset(eps as f64));
    let p1 = p - lr * (step + p.scale(weight_decay as f64));
    [is_finite.select(p1, p), is_finite.select(m1, m), is_finite.select(v1, v)]
}
