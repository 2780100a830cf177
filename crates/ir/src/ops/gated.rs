//! Gated activations: act(gate) * up in one pass.

use super::{arity, expect};
use crate::attr::named;
use crate::autodiff::{distinct, gradients};
use crate::builder::{Builder, Tensor};
use crate::op::{Grads, Op, Vjp};
use crate::ops::elementwise::Elementwise;
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

    /// The activation a plain elementwise function is, if it is one.
    pub fn of(f: Elementwise) -> Option<Act> {
        Act::ALL.iter().copied().find(|a| a.elementwise() == f)
    }
}

pub fn infer(ins: &[&TensorType]) -> Result<Vec<TensorType>, String> {
    arity(ins, 2)?;
    expect("up", ins[1], ins[0].dtype, &ins[0].dims)?;
    Ok(vec![ins[0].clone()])
}

pub fn infer_grad(again: bool, ins: &[&TensorType]) -> Result<Vec<TensorType>, String> {
    arity(ins, 3)?;
    infer(&ins[..2])?;
    expect("the gradient", ins[2], ins[0].dtype, &ins[0].dims)?;
    Ok(vec![ins[0].clone(); 2 + again as usize])
}

pub fn vjp<'g>(b: &'g Builder, act: Act, at: &Vjp<'_, 'g>) -> Grads<'g> {
    let Some(dy) = at.d[0] else { return vec![None; 2] };
    b.ops(Op::GatedGrad { act, again: false }, &[at.ins[0], at.ins[1], dy]).into_iter().map(Some).collect()
}

pub fn expand<'g>(act: Act, ins: &[Tensor<'g>]) -> Tensor<'g> {
    ins[0].activate(act) * ins[1]
}

pub fn expand_grad<'g>(b: &'g Builder, act: Act, again: bool, ins: &[Tensor<'g>]) -> Vec<Tensor<'g>> {
    let wrt = distinct(b, &ins[..2]);
    let mut outs = gradients(b, &[(expand(act, &wrt), ins[2])], &wrt);
    outs.extend(again.then(|| expand(act, ins)));
    outs
}
