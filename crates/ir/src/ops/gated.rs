//! Gated activations: act(gate) * up in one pass, with an optional dropout after them.

use super::{arity, dropout, expect};
use crate::attr::named;
use crate::autodiff::{distinct, gradients};
use crate::builder::{Builder, Tensor};
use crate::ops::elementwise::Elementwise;
use crate::ops::{Grads, Op, Vjp};
use crate::types::TensorType;

named! {
    pub enum Act {
        Silu = "silu",
        /// The tanh form.
        Gelu = "gelu",
        /// The exact form, by the normal distribution.
        GeluExact = "gelu_exact",
        Relu = "relu",
    }
}

impl Act {
    pub fn elementwise(self) -> Elementwise {
        match self {
            Act::Silu => Elementwise::Silu,
            Act::Gelu => Elementwise::Gelu,
            Act::GeluExact => Elementwise::GeluExact,
            Act::Relu => Elementwise::Relu,
        }
    }

    pub fn slope(self) -> Elementwise {
        match self {
            Act::Silu => Elementwise::SiluSlope,
            Act::Gelu => Elementwise::GeluSlope,
            Act::GeluExact => Elementwise::GeluExactSlope,
            Act::Relu => Elementwise::Step,
        }
    }

    /// The activation that a function computes, or computes the slope of.
    pub fn with_slope(f: Elementwise) -> Option<Act> {
        Act::ALL.iter().copied().find(|a| a.elementwise() == f || a.slope() == f)
    }

    /// The activation that an elementwise function computes, if any.
    pub fn of(f: Elementwise) -> Option<Act> {
        Act::ALL.iter().copied().find(|a| a.elementwise() == f)
    }
}

/// Number of inputs of the dropout: rng and rows, or none without dropout.
fn draws(p: f32) -> usize {
    if p > 0.0 { 2 } else { 0 }
}

pub fn infer(p: f32, ins: &[&TensorType]) -> Result<Vec<TensorType>, String> {
    arity(ins, 2 + draws(p))?;
    expect("up", ins[1], ins[0].dtype, &ins[0].dims)?;
    if p > 0.0 {
        dropout::infer(p, &[ins[0], ins[2], ins[3]])?;
    }
    Ok(vec![ins[0].clone()])
}

pub fn infer_grad(again: bool, p: f32, ins: &[&TensorType]) -> Result<Vec<TensorType>, String> {
    arity(ins, 3 + draws(p))?;
    infer(p, &[&ins[..2], &ins[3..]].concat())?;
    expect("the gradient", ins[2], ins[0].dtype, &ins[0].dims)?;
    Ok(vec![ins[0].clone(); 2 + again as usize])
}

pub fn vjp<'g>(b: &'g Builder, act: Act, p: f32, at: &Vjp<'_, 'g>) -> Grads<'g> {
    let Some(dy) = at.d[0] else { return vec![None; at.ins.len()] };
    let ins = [&at.ins[..2], &[dy], &at.ins[2..]].concat();
    let mut grads: Grads<'g> =
        b.ops_keyed(Op::GatedGrad { act, again: false, p }, &ins, at.key).into_iter().map(Some).collect();
    grads.resize(at.ins.len(), None);
    grads
}

pub fn expand<'g>(act: Act, p: f32, key: u64, ins: &[Tensor<'g>]) -> Tensor<'g> {
    let y = ins[0].activate(act) * ins[1];
    if p > 0.0 { y.b.op_keyed(Op::Dropout { p }, &[y, ins[2], ins[3]], key) } else { y }
}

pub fn expand_grad<'g>(
    b: &'g Builder,
    act: Act,
    again: bool,
    p: f32,
    key: u64,
    ins: &[Tensor<'g>],
) -> Vec<Tensor<'g>> {
    let forward = |gate_up: &[Tensor<'g>]| expand(act, p, key, &[gate_up, &ins[3..]].concat());
    let wrt = distinct(b, &ins[..2]);
    let mut outs = gradients(b, &[(forward(&wrt), ins[2])], &wrt);
    outs.extend(again.then(|| forward(&ins[..2])));
    outs
}
