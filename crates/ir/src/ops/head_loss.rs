//! The head's product and the cross entropy, without holding all logits in memory unless a second pass is to read them.
//!
//! logits = x w^T, with an optional cap; logp[r] = logits[r, target[r]] - lse[r]; sum = -sum_r weight[r] logp[r]. A row whose
//! target is -1 has logp 0. best[r] is the largest log-probability of the row: the target is the most likely token where its
//! logp is as large. The backward pass takes lse and computes logits again: d logits = d_logp[r] (onehot - softmax), times the
//! slope of the cap; with `kept` it takes the logits too, the forward pass's last output, before the cap and in the type of x.
//! Where only the sum is differentiated, one pass computes both (`HeadLossTrain`).

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
    outs.push(logits_type(ins[0], ins[1]));
    Ok(outs)
}

fn logits_type(x: &TensorType, w: &TensorType) -> TensorType {
    TensorType::new(x.dtype, [x.dims[0], w.dims[0]])
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

pub fn infer_grad(base: bool, kept: bool, ins: &[&TensorType]) -> Result<Vec<TensorType>, String> {
    arity(ins, 5 + base as usize + kept as usize)?;
    loss_types(&[ins[0], ins[1], ins[2], ins[4]])?;
    expect("lse", ins[3], ins[4].dtype, &ins[4].dims)?;
    let logits = logits_type(ins[0], ins[1]);
    if kept {
        expect("the logits", ins[5], logits.dtype, &logits.dims)?;
    }
    gradient_types(ins[0], ins[1], base.then(|| ins[5 + kept as usize]))
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
    let is_read = |out: usize| at.d[out].is_some();
    assert!(!(2..5).any(is_read), "the gradient of head_loss's lse, best and logits is not built");
    let weight = at.ins[3];
    let rows = weight.dims();
    let of_sum = at.d[0].map(|d| -(weight * d.broadcast(&rows)));
    let Some(d_logp) = [of_sum, at.d[1]].into_iter().flatten().reduce(|a, b| a + b) else {
        return vec![None; 4];
    };
    let ins = [at.ins[0], at.ins[1], at.ins[2], at.outs[2], d_logp];
    let outs = b.ops(Op::HeadLossGrad { base: false, kept: false, compute, cap }, &ins);
    let dw = at.needs[1].then(|| outs[1].cast(at.ins[1].dtype()));
    let d_weight = at.d[0].filter(|_| at.needs[3]).map(|d| -(at.outs[1] * d.broadcast(&rows)));
    vec![Some(outs[0]), dw, None, d_weight]
}

pub fn expand<'g>(b: &'g Builder, compute: Compute, cap: Cap, ins: &[Tensor<'g>]) -> Vec<Tensor<'g>> {
    let (x, w, target, weight) = (ins[0], ins[1], ins[2], ins[3]);
    let logits = all_logits(b, x, w, compute);
    let Logs { best, lse, logp } = log_probabilities(b, logits, target, cap);
    let sum = -(weight * logp).sum(0);
    vec![sum, logp, lse, best, logits.cast(x.dtype())]
}

/// The logits before the cap.
fn all_logits<'g>(b: &'g Builder, x: Tensor<'g>, w: Tensor<'g>, compute: Compute) -> Tensor<'g> {
    b.op(product::plain(false, true, x.dtype().accumulator(), compute), &[x, w])
}

/// For every row: the largest log-probability, lse, and the target's log-probability.
struct Logs<'g> {
    best: Tensor<'g>,
    lse: Tensor<'g>,
    logp: Tensor<'g>,
}

fn log_probabilities<'g>(b: &'g Builder, logits: Tensor<'g>, target: Tensor<'g>, cap: Cap) -> Logs<'g> {
    let ([r, v], wide) = ([logits.dims()[0], logits.dims()[1]], logits.dtype());
    let logits = cap.apply(logits);
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
    [base, kept]: [bool; 2],
    compute: Compute,
    cap: Cap,
    ins: &[Tensor<'g>],
) -> Vec<Tensor<'g>> {
    let base = base.then(|| ins[5 + kept as usize]);
    if kept {
        let (x, w) = (ins[0], ins[1]);
        let logits = ins[5].cast(x.dtype().accumulator());
        let Logs { logp, .. } = log_probabilities(b, logits, ins[2], cap);
        let d = gradients(b, &[(logp, ins[4])], &[logits])[0].cast(x.dtype());
        let times = |ta, y| b.op(product::plain(ta, false, x.dtype(), compute), &[d, y]);
        return with_base(vec![times(false, w), times(true, x)], base);
    }
    let wrt = distinct(b, &ins[..2]);
    let Logs { logp, .. } = log_probabilities(b, all_logits(b, wrt[0], wrt[1], compute), ins[2], cap);
    with_base(gradients(b, &[(logp, ins[4])], &wrt), base)
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
