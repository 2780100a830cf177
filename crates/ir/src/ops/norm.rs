//! RMS norm over the last axis, with the residual addition in front of it in the same pass.
//!
//! y = h * rstd(h) * g(w), rstd = 1 / sqrt(mean(h^2) + eps), h = x + residual. Nothing is saved but h: the backward
//! pass reads h anyway, and its statistics cost no memory traffic.

use super::{arity, expect_axes, expect_float};
use crate::attr::named;
use crate::autodiff::{distinct, gradients};
use crate::builder::{Builder, Tensor};
use crate::op::{Grads, Op, Vjp};
use crate::types::TensorType;

named! {
    /// How the learned weight enters.
    pub enum NormWeight {
        Plain = "plain",
        /// 1 + w, as Gemma has it.
        OnePlus = "one_plus",
        None = "none",
    }
}

impl NormWeight {
    pub fn is_some(self) -> bool {
        self != NormWeight::None
    }
}

pub fn infer(weight: NormWeight, residual: bool, ins: &[&TensorType]) -> Result<Vec<TensorType>, String> {
    arity(ins, 1 + residual as usize + weight.is_some() as usize)?;
    let x = ins[0];
    expect_axes("x", x)?;
    if residual && ins[1] != x {
        return Err(format!("x is {x} and the residual {}: they must agree", ins[1]));
    }
    expect_float("x", x, &x.dims)?;
    if weight.is_some() {
        expect_float("the norm's weight", ins[ins.len() - 1], &[x.last()])?;
    }
    Ok(vec![x.clone(); 1 + residual as usize])
}

pub fn infer_grad(weight: NormWeight, add: bool, ins: &[&TensorType]) -> Result<Vec<TensorType>, String> {
    arity(ins, 2 + add as usize + weight.is_some() as usize)?;
    let h = ins[0];
    expect_axes("h", h)?;
    for d in &ins[1 + weight.is_some() as usize..] {
        expect_float("a gradient", d, &h.dims)?;
    }
    let mut outs = vec![h.clone()];
    if weight.is_some() {
        expect_float("the norm's weight", ins[1], &[h.last()])?;
        outs.push(TensorType::new(h.dtype.accumulator(), [h.last()]));
    }
    Ok(outs)
}

pub fn vjp<'g>(b: &'g Builder, eps: f32, weight: NormWeight, residual: bool, at: &Vjp<'_, 'g>) -> Grads<'g> {
    let h = if residual { at.outs[1] } else { at.ins[0] };
    let dh = at.d.get(1).copied().flatten();
    let Some(dy) = at.d[0] else {
        let mut grads = vec![dh; 1 + residual as usize];
        grads.extend(weight.is_some().then_some(None));
        return grads;
    };
    let w = weight.is_some().then(|| at.ins[at.ins.len() - 1]);
    let ins: Vec<_> = [Some(h), w, Some(dy), dh].into_iter().flatten().collect();
    let outs = b.ops(Op::RmsNormGrad { eps, weight, add: dh.is_some() }, &ins);
    let mut grads = vec![Some(outs[0]); 1 + residual as usize];
    grads.extend(outs.get(1).zip(w).map(|(dw, w)| Some(dw.cast(w.dtype()))));
    grads
}

/// x and residual to h, h to y, in the type of the statistics.
pub fn expand<'g>(eps: f32, weight: NormWeight, residual: bool, ins: &[Tensor<'g>]) -> Vec<Tensor<'g>> {
    let h = if residual { ins[0] + ins[1] } else { ins[0] };
    let y = normed(h, eps, weight, weight.is_some().then(|| ins[ins.len() - 1]));
    if residual { vec![y, h] } else { vec![y] }
}

fn normed<'g>(h: Tensor<'g>, eps: f32, weight: NormWeight, w: Option<Tensor<'g>>) -> Tensor<'g> {
    let (ty, wide) = (h.ty(), h.dtype().accumulator());
    let axis = ty.rank() - 1;
    let x = h.cast(wide);
    let y = x * x.square().mean(axis).offset(eps as f64).rsqrt();
    let Some(w) = w else { return y.cast(ty.dtype) };
    let mut dims = vec![1; ty.rank()];
    dims[axis] = ty.last();
    let w = w.cast(wide).reshape(&dims);
    let w = if weight == NormWeight::OnePlus { w.offset(1.0) } else { w };
    (y * w).cast(ty.dtype)
}

pub fn expand_grad<'g>(
    b: &'g Builder,
    eps: f32,
    weight: NormWeight,
    add: bool,
    ins: &[Tensor<'g>],
) -> Vec<Tensor<'g>> {
    let mut wrt = distinct(b, &ins[..1 + weight.is_some() as usize]);
    let h = wrt[0];
    // The weight's gradient leaves in the accumulator's type, so it is differentiated as that type.
    let w = wrt.get_mut(1).map(|w| {
        *w = w.cast(h.dtype().accumulator());
        *w
    });
    let dy = ins[1 + weight.is_some() as usize];
    let y = normed(h, eps, weight, w);
    let mut grads = gradients(b, &[(y, dy)], &wrt);
    if add {
        grads[0] = grads[0] + ins[ins.len() - 1];
    }
    grads
}
