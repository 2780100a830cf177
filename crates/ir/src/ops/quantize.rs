//! A matrix in an 8-bit type, both ways round: what products of such types read, whose inner extents must lie without
//! gaps in both operands.
//!
//! q = x / scale rounded to the type, by a multiplication with the scale's reciprocal; scales are powers of two
//! (`fp8::scale`), so only the last rounding loses anything. The scale is given, and what it should have been is
//! gathered for later steps, or it is taken from x itself, which costs another pass over x. A NaN stays one and counts
//! for nothing in the largest magnitude.
//!
//! x is a tensor, or what a gated activation or its gradient makes of its inputs in the same pass: then x in its own
//! type, to which it is rounded all the same, is never stored.

use super::{arity, expect};
use crate::attr::Attr;
use crate::builder::Tensor;
use crate::op::Op;
use crate::ops::elementwise::Elementwise as E;
use crate::ops::gated::{self, Act};
use crate::ops::reduce::Fold;
use crate::types::{DType, TensorType};

/// What is quantised.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Source {
    /// (x)
    Given,
    /// (gate, up): act(gate) * up.
    Gated(Act),
    /// (gate, up, dy): d gate and d up side by side.
    GatedGrad(Act),
}

impl Source {
    pub fn inputs(self) -> usize {
        match self {
            Source::Given => 1,
            Source::Gated(_) => 2,
            Source::GatedGrad(_) => 3,
        }
    }

    pub fn act(self) -> Option<Act> {
        match self {
            Source::Given => None,
            Source::Gated(act) | Source::GatedGrad(act) => Some(act),
        }
    }

    fn infer(self, ins: &[&TensorType]) -> Result<TensorType, String> {
        Ok(match self {
            Source::Given => ins[0].clone(),
            Source::Gated(_) => gated::infer(ins)?.remove(0),
            Source::GatedGrad(_) => {
                let mut wide = gated::infer_grad(false, ins)?.remove(0);
                if let Some(columns) = wide.dims.last_mut() {
                    *columns *= 2;
                }
                wide
            }
        })
    }

    fn expand<'g>(self, ins: &[Tensor<'g>]) -> Tensor<'g> {
        let b = ins[0].b;
        match self {
            Source::Given => ins[0],
            Source::Gated(act) => b.op(Op::Gated { act }, ins),
            Source::GatedGrad(act) => b.concat(&b.ops(Op::GatedGrad { act, again: false }, ins), 1),
        }
    }
}

impl Attr for Source {
    fn show(&self) -> String {
        match self {
            Source::Given => "given".into(),
            Source::Gated(act) => format!("gated:{}", act.show()),
            Source::GatedGrad(act) => format!("gated_grad:{}", act.show()),
        }
    }
    fn read(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "given" => Ok(Source::Given),
            Some(("gated", act)) => Ok(Source::Gated(Act::read(act)?)),
            Some(("gated_grad", act)) => Ok(Source::GatedGrad(Act::read(act)?)),
            _ => Err(format!("`{text}` is nothing to quantise")),
        }
    }
    fn unsaid() -> Option<Self> {
        Some(Source::Given)
    }
}

pub fn infer(to: DType, current: bool, of: Source, ins: &[&TensorType]) -> Result<Vec<TensorType>, String> {
    arity(ins, of.inputs() + if current { 0 } else { 2 })?;
    let (ins, scaling) = ins.split_at(of.inputs());
    let x = of.infer(ins)?;
    if !to.is_fp8() || !matches!(x.dtype, DType::F32 | DType::BF16) {
        return Err(format!("{x} to {}: f32 or bf16 is quantised to an 8-bit float", to.name()));
    }
    if current && of != Source::Given {
        return Err("a current scale needs the tensor before it is quantised".into());
    }
    let [m, n] = x.dims[..] else { return Err(format!("{x} is no matrix")) };
    for (what, t) in ["the scale", "the largest magnitude"].iter().zip(scaling) {
        expect(what, t, DType::F32, &[1])?;
    }
    Ok(vec![TensorType::new(to, [m, n]), TensorType::new(to, [n, m]), TensorType::new(DType::F32, [1])])
}

pub fn expand<'g>(to: DType, current: bool, of: Source, ins: &[Tensor<'g>]) -> Vec<Tensor<'g>> {
    let (ins, scaling) = ins.split_at(of.inputs());
    let x = of.expand(ins).cast(DType::F32);
    let dims = x.dims();
    let largest = x.zip(E::Max, -x).reshape(&[dims[0] * dims[1]]).reduce(0, Fold::Max);
    let (scale, third) = if current {
        let scale = largest.map(E::Fp8Scale(to));
        (scale, scale)
    } else {
        (scaling[0], scaling[1].zip(E::Max, largest))
    };
    let q = (x * scale.recip().reshape(&[1, 1]).broadcast(&dims)).cast(to);
    vec![q, q.transpose(&[1, 0]), third]
}
