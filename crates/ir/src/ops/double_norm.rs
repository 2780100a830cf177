//! Two RMS norms around a residual addition, as models have it that norm what a block gives before they add it: the row that
//! was normed, added and normed again is in registers all the while.
//!
//! n = norm(y), h = x + n, out = norm(h). In the backward pass h is read, or made again from x and y, which are read anyway:
//! then it need not be kept.

use super::norm::NormSpec;
use super::{arity, expect_axes, expect_float};
use crate::builder::{Builder, Tensor};
use crate::types::TensorType;

/// The attributes both passes share: the norm inside the addition and the one behind it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DoubleNorm {
    pub inner: NormSpec,
    pub outer: NormSpec,
}

impl DoubleNorm {
    /// Whether two norms can be one operation: of rows as they are, with a weight each and no bias.
    pub fn of(inner: NormSpec, outer: NormSpec) -> Option<DoubleNorm> {
        let is_plain = |spec: &NormSpec| !spec.center && !spec.bias && spec.weight.is_some();
        let is_alike = inner.weight == outer.weight;
        (is_alike && is_plain(&inner) && is_plain(&outer)).then_some(DoubleNorm { inner, outer })
    }
}

/// (y, x, w inner, w outer) to out and h.
pub fn infer(ins: &[&TensorType]) -> Result<Vec<TensorType>, String> {
    arity(ins, 4)?;
    rows(ins, &ins[..2])?;
    Ok(vec![ins[0].clone(); 2])
}

/// (y, x or h, w inner, w outer, d out, dh?) to dx and dy.
pub fn infer_grad(add: bool, ins: &[&TensorType]) -> Result<Vec<TensorType>, String> {
    arity(ins, 5 + add as usize)?;
    rows(ins, &[&ins[..2], &ins[4..]].concat())?;
    Ok(vec![ins[0].clone(); 2])
}

fn rows(ins: &[&TensorType], alike: &[&TensorType]) -> Result<(), String> {
    let y = ins[0];
    expect_axes("y", y)?;
    for x in alike {
        expect_float("a row", x, &y.dims)?;
    }
    ins[2..4].iter().try_for_each(|w| expect_float("the norm's weight", w, &[y.last()]))
}

pub fn expand<'g>(b: &'g Builder, norms: DoubleNorm, ins: &[Tensor<'g>]) -> Vec<Tensor<'g>> {
    let n = b.op(norms.inner.op(false), &[ins[0], ins[2]]);
    b.ops(norms.outer.op(true), &[n, ins[1], ins[3]])
}

pub fn expand_grad<'g>(
    b: &'g Builder,
    norms: DoubleNorm,
    of_sum: bool,
    ins: &[Tensor<'g>],
) -> Vec<Tensor<'g>> {
    let [y, x, inner, outer] = [0, 1, 2, 3].map(|i| ins[i]);
    let h = if of_sum { x } else { x + b.op(norms.inner.op(false), &[y, inner]) };
    let dx = b.ops(norms.outer.grad(ins.len() > 5), &[&[h, outer], &ins[4..]].concat())[0];
    let dy = b.ops(norms.inner.grad(false), &[y, inner, dx])[0];
    vec![dx, dy]
}
