//! The per-head norm of queries or keys and their rotation in one pass over memory.

use super::{arity, expect_float, rope};
use crate::autodiff::gradients;
use crate::builder::{Builder, Tensor};
use crate::ops::norm::{NormSpec, NormWeight};
use crate::ops::{Grads, Op, Vjp};
use crate::types::TensorType;

pub fn infer(
    weight: NormWeight,
    first: usize,
    axis_of_freq: &[u8],
    table: bool,
    ins: &[&TensorType],
) -> Result<Vec<TensorType>, String> {
    let w = weight.is_some() as usize;
    arity(ins, 2 + w + table as usize)?;
    let x = ins[0];
    rope::check(x, axis_of_freq, ins[1 + w], table.then(|| ins[2 + w]))?;
    if first > 0 && (!weight.is_some() || first >= x.dims[1]) {
        return Err(format!("two weights for {first} and more of {} heads", x.dims[1]));
    }
    if weight.is_some() {
        expect_float("the norm's weight", ins[1], &[weights(first) * x.last()])?;
    }
    Ok(vec![x.clone()])
}

/// Number of weights of a head's size that lie side by side.
pub fn weights(first: usize) -> usize {
    1 + (first > 0) as usize
}

pub fn infer_grad(
    weight: NormWeight,
    first: usize,
    axis_of_freq: &[u8],
    table: bool,
    ins: &[&TensorType],
) -> Result<Vec<TensorType>, String> {
    let (dy, forward) = ins.split_last().ok_or("takes inputs")?;
    let mut outs = infer(weight, first, axis_of_freq, table, forward)?;
    expect_float("the gradient", dy, &outs[0].dims)?;
    if weight.is_some() {
        outs.push(TensorType::new(ins[0].dtype.accumulator(), [weights(first) * ins[0].last()]));
    }
    Ok(outs)
}

pub fn vjp<'g>(b: &'g Builder, op: &Op, at: &Vjp<'_, 'g>) -> Grads<'g> {
    let mut grads = vec![None; at.ins.len()];
    let Some(dy) = at.d[0] else { return grads };
    let Op::QkNormRope { eps, weight, first, freq, axis_of_freq, pairs, table } = op.clone() else {
        unreachable!("called for qk_norm_rope")
    };
    let ins: Vec<_> = at.ins.iter().copied().chain([dy]).collect();
    let outs = b.ops(Op::QkNormRopeGrad { eps, weight, first, freq, axis_of_freq, pairs, table }, &ins);
    for (i, d) in outs.into_iter().enumerate() {
        grads[i] = Some(d.cast(at.ins[i].dtype()));
    }
    grads
}

/// The norm and the rotary embedding that the fused operation combines.
pub fn expand<'g>(b: &'g Builder, op: &Op, ins: &[Tensor<'g>]) -> Tensor<'g> {
    let (Op::QkNormRope { eps, weight, first, freq, axis_of_freq, pairs, table }
    | Op::QkNormRopeGrad { eps, weight, first, freq, axis_of_freq, pairs, table }) = op.clone()
    else {
        unreachable!("called for qk_norm_rope")
    };
    let w = weight.is_some() as usize;
    let norm = |ins: &[Tensor<'g>]| b.op(NormSpec::rms(eps, weight).op(false), ins);
    let y = match first {
        0 => norm(&ins[..1 + w]),
        _ => {
            let (heads, size) = (ins[0].dims()[1], ins[0].dims()[2]);
            let part = |start: usize, len: usize, nth: usize| {
                norm(&[ins[0].slice(1, start, len), ins[1].slice(0, nth * size, size)])
            };
            b.op(Op::Concat { axis: 1 }, &[part(0, first, 0), part(first, heads - first, 1)])
        }
    };
    let rest: Vec<_> = [y].into_iter().chain(ins[1 + w..2 + w + table as usize].iter().copied()).collect();
    b.op(Op::Rope { freq, axis_of_freq, pairs, inverse: false, table }, &rest)
}

pub fn expand_grad<'g>(b: &'g Builder, op: &Op, ins: &[Tensor<'g>]) -> Vec<Tensor<'g>> {
    let Op::QkNormRopeGrad { weight, .. } = op else { unreachable!("called for its gradient") };
    let (w, wide) = (weight.is_some() as usize, ins[0].dtype().accumulator());
    // The weight is cast to the accumulator's type, which its gradient has.
    let mut forward = ins.to_vec();
    forward[1..1 + w].iter_mut().for_each(|w| *w = w.cast(wide));
    let y = expand(b, op, &forward);
    gradients(b, &[(y, ins[ins.len() - 1])], &forward[..1 + w])
}
