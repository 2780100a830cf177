//! Two RMS norms around a residual addition, for models that norm the output of a block before they add it: the row stays in
//! registers through norm, addition and second norm.
//!
//! n = norm(y), h = x + n, out = norm(h). The backward pass reads h, or recomputes it from x and y, which it reads anyway: then
//! h need not be kept.

use super::norm::NormSpec;
use super::{arity, expect_axes, expect_float};
use crate::builder::{Builder, Tensor};
use crate::types::TensorType;

/// The attributes that both passes share: the norm before the addition and the one after it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DoubleNorm {
    pub inner: NormSpec,
    pub outer: NormSpec,
}

impl DoubleNorm {
    /// Joins two norms, if neither centres its rows and each has a weight and no bias.
    pub fn of(inner: NormSpec, outer: NormSpec) -> Option<DoubleNorm> {
        let is_plain = |spec: &NormSpec| !spec.center && !spec.bias && spec.weight.is_some();
        let is_alike = inner.weight == outer.weight;
        (is_alike && is_plain(&inner) && is_plain(&outer)).then_some(DoubleNorm { inner, outer })
    }
}

/// (y, x, w inner, w outer) -> out, h.
pub fn infer(ins: &[&TensorType]) -> Result<Vec<TensorType>, String> {
    arity(ins, 4)?;
    rows(ins, &ins[..2])?;
    Ok(vec![ins[0].clone(); 2])
}

/// (y, x or h, w inner, w outer, d out, dh?) -> dx, dy.
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
