//! RMS norm over the last axis, fused with the residual addition before it. On centred rows it is layer norm.
//!
//! y = c * rstd(c) * g(w) + b, rstd = 1 / sqrt(mean(c^2) + eps), c = h or h - mean(h), h = x + residual. Nothing is saved but
//! h: the backward pass reads h anyway, and recomputing its statistics costs no memory traffic.

use super::{arity, expect_axes, expect_float};
use crate::attr::{Attr, named};
use crate::autodiff::{distinct, gradients};
use crate::builder::{Builder, Tensor};
use crate::ops::{Grads, Op, Vjp};
use crate::types::TensorType;

named! {
    /// The factor made from the learned weight.
    pub enum NormWeight {
        Plain = "plain",
        /// 1 + w, as in Gemma.
        OnePlus = "one_plus",
        None = "none",
    }
}

impl NormWeight {
    pub fn is_some(self) -> bool {
        self != NormWeight::None
    }
}

/// The attributes of a norm that its forward and backward operations share.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormSpec {
    pub eps: f32,
    /// Whether the row's mean is subtracted first.
    pub center: bool,
    pub weight: NormWeight,
    /// Whether a learned vector is added last.
    pub bias: bool,
}

impl NormSpec {
    /// RMS norm without bias.
    pub fn rms(eps: f32, weight: NormWeight) -> Self {
        NormSpec { eps, center: false, weight, bias: false }
    }

    /// The norm of an operation, and whether it adds a residual (forward) or a gradient of h (backward).
    pub fn of(op: &Op) -> Option<(NormSpec, bool)> {
        match *op {
            Op::RmsNorm { eps, center, weight, bias, residual: add }
            | Op::RmsNormGrad { eps, center, weight, bias, add, .. } => {
                Some((NormSpec { eps, center, weight, bias }, add))
            }
            _ => None,
        }
    }

    pub fn op(self, residual: bool) -> Op {
        let NormSpec { eps, center, weight, bias } = self;
        Op::RmsNorm { eps, center, weight, bias, residual }
    }

    pub fn grad(self, add: bool) -> Op {
        self.grad_with_norm(add, false)
    }

    /// The gradient, which with `again` also returns the norm.
    pub fn grad_with_norm(self, add: bool, again: bool) -> Op {
        let NormSpec { eps, center, weight, bias } = self;
        Op::RmsNormGrad { eps, center, weight, bias, add, again, sum: false }
    }
}

/// Whether an operation is the gradient of a norm that also sums it over rows.
pub fn sums_rows(op: &Op) -> bool {
    matches!(op, Op::RmsNormGrad { sum: true, .. })
}

/// The index among the outputs of a norm's gradient of the recomputed norm, where requested.
pub fn again_at(op: &Op) -> Option<usize> {
    let Op::RmsNormGrad { weight, bias, again: true, .. } = op else { return None };
    Some(1 + weight.is_some() as usize + *bias as usize)
}

impl Attr for NormSpec {
    fn to_text(&self) -> String {
        let NormSpec { eps, center, weight, bias } = self;
        format!("{eps}:{center}:{}:{bias}", weight.to_text())
    }
    fn read(text: &str) -> Result<Self, String> {
        let words: Vec<&str> = text.split(':').collect();
        let [eps, center, weight, bias] = words[..] else { return Err(format!("`{text}` is no norm")) };
        let (eps, center) = (f32::read(eps)?, bool::read(center)?);
        Ok(NormSpec { eps, center, weight: NormWeight::read(weight)?, bias: bool::read(bias)? })
    }
}

pub fn infer(
    weight: NormWeight,
    bias: bool,
    residual: bool,
    ins: &[&TensorType],
) -> Result<Vec<TensorType>, String> {
    arity(ins, 1 + residual as usize + weight.is_some() as usize + bias as usize)?;
    let x = ins[0];
    expect_axes("x", x)?;
    if residual && ins[1] != x {
        return Err(format!("x is {x} and the residual {}: they must agree", ins[1]));
    }
    expect_float("x", x, &x.dims)?;
    if weight.is_some() {
        expect_float("the norm's weight", ins[1 + residual as usize], &[x.last()])?;
    }
    if bias {
        expect_float("the norm's bias", ins[ins.len() - 1], &[x.last()])?;
    }
    Ok(vec![x.clone(); 1 + residual as usize])
}

pub fn infer_grad(op: &Op, ins: &[&TensorType]) -> Result<Vec<TensorType>, String> {
    let (NormSpec { weight, bias, .. }, add) = NormSpec::of(op).expect("called for a norm's gradient");
    let again = again_at(op).is_some();
    let tensors = 2 + add as usize + weight.is_some() as usize;
    arity(ins, tensors + (again && bias) as usize)?;
    let h = ins[0];
    expect_axes("h", h)?;
    for d in &ins[1 + weight.is_some() as usize..tensors] {
        expect_float("a gradient", d, &h.dims)?;
    }
    if let Some(bias) = ins.get(tensors) {
        expect_float("the norm's bias", bias, &[h.last()])?;
    }
    let vector = TensorType::new(h.dtype.accumulator(), [h.last()]);
    let mut outs = vec![h.clone()];
    if weight.is_some() {
        expect_float("the norm's weight", ins[1], &[h.last()])?;
        outs.push(vector.clone());
    }
    outs.extend(bias.then(|| vector.clone()));
    outs.extend(again.then(|| h.clone()));
    outs.extend(sums_rows(op).then_some(vector));
    Ok(outs)
}

pub fn vjp<'g>(b: &'g Builder, op: &Op, at: &Vjp<'_, 'g>) -> Grads<'g> {
    let (spec, residual) = NormSpec::of(op).expect("called for a norm");
    let h = if residual { at.outs[1] } else { at.ins[0] };
    let dh = at.d.get(1).copied().flatten();
    // Weight and bias, where present.
    let vectors = &at.ins[1 + residual as usize..];
    let Some(dy) = at.d[0] else {
        let mut grads = vec![dh; 1 + residual as usize];
        grads.extend(vec![None; vectors.len()]);
        return grads;
    };
    let w = spec.weight.is_some().then(|| vectors[0]);
    let ins: Vec<_> = [Some(h), w, Some(dy), dh].into_iter().flatten().collect();
    let outs = b.ops(spec.grad(dh.is_some()), &ins);
    let mut grads = vec![Some(outs[0]); 1 + residual as usize];
    grads.extend(outs[1..].iter().zip(vectors).map(|(d, of)| Some(d.cast(of.dtype()))));
    grads
}

/// Computes h from x and residual, and y from h, in the type of the statistics.
pub fn expand<'g>(op: &Op, ins: &[Tensor<'g>]) -> Vec<Tensor<'g>> {
    let (spec, residual) = NormSpec::of(op).expect("called for a norm");
    let h = if residual { ins[0] + ins[1] } else { ins[0] };
    let w = spec.weight.is_some().then(|| ins[1 + residual as usize]);
    let y = normed(h, spec, w, spec.bias.then(|| ins[ins.len() - 1]));
    if residual { vec![y, h] } else { vec![y] }
}

fn normed<'g>(h: Tensor<'g>, spec: NormSpec, w: Option<Tensor<'g>>, bias: Option<Tensor<'g>>) -> Tensor<'g> {
    let (ty, wide) = (h.ty(), h.dtype().accumulator());
    let axis = ty.rank() - 1;
    let x = h.cast(wide);
    let x = if spec.center { x - x.mean(axis) } else { x };
    let mut y = x * x.square().mean(axis).offset(spec.eps as f64).rsqrt();
    let mut dims = vec![1; ty.rank()];
    dims[axis] = ty.last();
    if let Some(w) = w {
        let w = w.cast(wide).reshape(&dims);
        y = y * if spec.weight == NormWeight::OnePlus { w.offset(1.0) } else { w };
    }
    if let Some(bias) = bias {
        y = y + bias.cast(wide).reshape(&dims);
    }
    y.cast(ty.dtype)
}

pub fn expand_grad<'g>(b: &'g Builder, op: &Op, ins: &[Tensor<'g>]) -> Vec<Tensor<'g>> {
    let (spec, add) = NormSpec::of(op).expect("called for a norm's gradient");
    let dy_at = 1 + spec.weight.is_some() as usize;
    let mut wrt = distinct(b, &ins[..dy_at]);
    let (h, wide) = (wrt[0], ins[0].dtype().accumulator());
    // The weight is cast to the accumulator's type, which its gradient has.
    let w = wrt.get_mut(1).map(|w| {
        *w = w.cast(wide);
        *w
    });
    let dy = ins[dy_at];
    let y = normed(h, spec, w, None);
    let mut grads = gradients(b, &[(y, dy)], &wrt);
    let (rows, width) = (h.ty().rows(), h.ty().last());
    let over_rows = |x: Tensor<'g>| x.cast(wide).reshape(&[rows, width]).sum(0).reshape(&[width]);
    if spec.bias {
        grads.push(over_rows(dy));
    }
    if add {
        grads[0] = grads[0] + ins[dy_at + 1];
    }
    if again_at(op).is_some() {
        let bias = spec.bias.then(|| ins[ins.len() - 1]);
        grads.push(normed(ins[0], spec, spec.weight.is_some().then(|| ins[1]), bias));
    }
    if sums_rows(op) {
        grads.push(over_rows(grads[0]));
    }
    grads
}
