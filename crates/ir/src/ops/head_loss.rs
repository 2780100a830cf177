//! The head's product and the cross entropy, without ever holding all logits in memory.
//!
//! logits = x w^T, with an optional cap; logp[r] = logits[r, target[r]] - lse[r]; sum = -sum_r weight[r] logp[r]. A row whose
//! target is -1 has logp 0. best[r] is the largest log-probability of the row: the target is the most likely token where its
//! logp is as large. The backward pass recomputes logits from lse: d logits = d_logp[r] (onehot - softmax), times the slope of
//! the cap. Where only the sum is differentiated, one pass computes both (`HeadLossTrain`).

use super::{arity, expect};
use crate::autodiff::{distinct, gradients};
use crate::builder::{Builder, Tensor};
use crate::ops::cap::Cap;
use crate::ops::product::{self, Compute};
use crate::ops::reduce::Fold;
use crate::ops::{Grads, Op, Vjp};
use crate::types::{DType, TensorType};

pub fn infer(ins: &[&TensorType]) -> Result<Vec<TensorType>, String> {
    let mut outs = loss_types(ins)?;
    outs.push(outs[1].clone());
    Ok(outs)
}

/// sum, logp and lse.
fn loss_types(ins: &[&TensorType]) -> Result<Vec<TensorType>, String> {
    arity(ins, 4)?;
    let (x, w) = (ins[0], ins[1]);
    if x.rank() != 2 || w.rank() != 2 || x.last() != w.last() || x.dtype != w.dtype || !x.dtype.is_float() {
        return Err(format!("rows {x} do not go through a head {w}"));
    }
    let (r, wide) = (x.dims[0], x.dtype.accumulator());
    expect("targets", ins[2], DType::I32, &[r])?;
    expect("row weights", ins[3], wide, &[r])?;
    Ok(vec![TensorType::new(wide, [1]), TensorType::new(wide, [r]), TensorType::new(wide, [r])])
}

pub fn infer_grad(base: bool, ins: &[&TensorType]) -> Result<Vec<TensorType>, String> {
    arity(ins, 5 + base as usize)?;
    loss_types(&[ins[0], ins[1], ins[2], ins[4]])?;
    expect("lse", ins[3], ins[4].dtype, &ins[4].dims)?;
    gradient_types(ins[0], ins[1], base.then(|| ins[5]))
}

pub fn infer_train(base: bool, ins: &[&TensorType]) -> Result<Vec<TensorType>, String> {
    arity(ins, 4 + base as usize)?;
    let mut outs = loss_types(&ins[..4])?;
    outs.extend(gradient_types(ins[0], ins[1], base.then(|| ins[4]))?);
    Ok(outs)
}

fn gradient_types(
    x: &TensorType,
    w: &TensorType,
    base: Option<&TensorType>,
) -> Result<Vec<TensorType>, String> {
    let dw = w.with(w.dtype.accumulator());
    if let Some(base) = base {
        expect("the base", base, dw.dtype, &dw.dims)?;
    }
    Ok(vec![x.clone(), dw])
}

pub fn vjp<'g>(b: &'g Builder, compute: Compute, cap: Cap, at: &Vjp<'_, 'g>) -> Grads<'g> {
    assert!(at.d[2].is_none() && at.d[3].is_none(), "the gradient of head_loss's lse and best is not built");
    let weight = at.ins[3];
    let rows = weight.dims();
    let of_sum = at.d[0].map(|d| -(weight * d.broadcast(&rows)));
    let Some(d_logp) = [of_sum, at.d[1]].into_iter().flatten().reduce(|a, b| a + b) else {
        return vec![None; 4];
    };
    let ins = [at.ins[0], at.ins[1], at.ins[2], at.outs[2], d_logp];
    let outs = b.ops(Op::HeadLossGrad { base: false, compute, cap }, &ins);
    let dw = at.needs[1].then(|| outs[1].cast(at.ins[1].dtype()));
    let d_weight = at.d[0].filter(|_| at.needs[3]).map(|d| -(at.outs[1] * d.broadcast(&rows)));
    vec![Some(outs[0]), dw, None, d_weight]
}

pub fn expand<'g>(b: &'g Builder, compute: Compute, cap: Cap, ins: &[Tensor<'g>]) -> Vec<Tensor<'g>> {
    let (x, w, target, weight) = (ins[0], ins[1], ins[2], ins[3]);
    let Logs { best, lse, logp } = log_probabilities(b, [x, w, target], compute, cap);
    let sum = -(weight * logp).sum(0);
    vec![sum, logp, lse, best]
}

/// For every row: the largest log-probability, lse, and the target's log-probability.
struct Logs<'g> {
    best: Tensor<'g>,
    lse: Tensor<'g>,
    logp: Tensor<'g>,
}

fn log_probabilities<'g>(
    b: &'g Builder,
    [x, w, target]: [Tensor<'g>; 3],
    compute: Compute,
    cap: Cap,
) -> Logs<'g> {
    let (r, v, wide) = (x.dims()[0], w.dims()[0], x.dtype().accumulator());
    let logits = cap.apply(b.op(product::plain(false, true, wide, compute), &[x, w]));
    let shift = logits.reduce(1, Fold::Max);
    let lse = (shift + (logits - shift).exp().sum(1).log()).reshape(&[r]);
    let target = target.cast(wide);
    let hot = b.iota(wide, &[r, v], 1).equal(target.reshape(&[r, 1]).broadcast(&[r, v]));
    let chosen = (logits * hot).sum(1).reshape(&[r]);
    let counted = b.fill(0.0, wide, &[r]).less_equal(target);
    Logs { best: shift.reshape(&[r]) - lse, lse, logp: counted * (chosen - lse) }
}

pub fn expand_grad<'g>(
    b: &'g Builder,
    base: bool,
    compute: Compute,
    cap: Cap,
    ins: &[Tensor<'g>],
) -> Vec<Tensor<'g>> {
    let wrt = distinct(b, &ins[..2]);
    let Logs { logp, .. } = log_probabilities(b, [wrt[0], wrt[1], ins[2]], compute, cap);
    with_base(gradients(b, &[(logp, ins[4])], &wrt), base.then(|| ins[5]))
}

pub fn expand_train<'g>(
    b: &'g Builder,
    base: bool,
    compute: Compute,
    cap: Cap,
    ins: &[Tensor<'g>],
) -> Vec<Tensor<'g>> {
    let wrt = distinct(b, &ins[..2]);
    let mut outs = expand(b, compute, cap, &[wrt[0], wrt[1], ins[2], ins[3]]);
    outs.truncate(3);
    outs.extend(with_base(gradients(b, &[(outs[1], -ins[3])], &wrt), base.then(|| ins[4])));
    outs
}

fn with_base<'g>(grads: Vec<Tensor<'g>>, base: Option<Tensor<'g>>) -> Vec<Tensor<'g>> {
    let dw = grads[1].cast(grads[1].dtype().accumulator());
    vec![grads[0], if let Some(base) = base { dw + base } else { dw }]
}
