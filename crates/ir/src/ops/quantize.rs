//! Quantises a matrix to an 8-bit type, together with its transpose: products of such types need the inner extent contiguous in
//! both operands.
//!
//! q = x / scale rounded to the type, by a multiplication with the scale's reciprocal; scales are powers of two (`fp8::scale`),
//! so only the last rounding loses precision. The scale is given, and the largest magnitude is recorded for later steps, or it
//! is computed from x itself, which costs another pass over x. A NaN stays a NaN and does not count for the largest magnitude.
//!
//! x is a tensor, or another operation computes it from its inputs in the same pass: a gated activation, a norm, or the
//! gradient of either. It is still rounded to its own type, and stored in that type only if something else reads it: the other
//! outputs of that operation, and the gradient of a norm itself, are further outputs.
//!
//! A gradient reads what the value in front of it was computed from. So it can also write that value's codes along columns,
//! which the weight's gradient multiplies, and they need not be kept from the forward pass.

use super::{arity, expect};
use crate::attr::Attr;
use crate::builder::Tensor;
use crate::ops::Op;
use crate::ops::elementwise::Elementwise as E;
use crate::ops::gated::{self, Act};
use crate::ops::norm::{self, NormSpec};
use crate::ops::reduce::Fold;
use crate::types::{DType, TensorType};

/// The source of the values that are quantised.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Source {
    /// (x)
    Given,
    /// (gate, up): act(gate) * up.
    Gated(Act),
    /// (gate, up, dy, scale?): d gate and d up side by side. With a scale, the activation's codes along columns, in
    /// `FORWARD`, are the fourth output.
    GatedGrad { act: Act, again: bool },
    /// (x, residual?, w?, bias?): the output of the norm; h = x + residual is a fourth output.
    Norm(NormSpec, bool),
    /// (h, w?, dy, dh?, scale?): dx + dh, which is also the fourth output; then dw? and d bias?. With a scale, the codes of the
    /// norm itself follow, as those of the activation do.
    NormGrad { spec: NormSpec, add: bool, again: bool },
}

/// The type of codes of the forward pass, which a gradient makes again.
pub const FORWARD: DType = DType::E4M3;

/// The width of a norm that is quantised in the same pass must be a multiple of this.
const NORM_MULTIPLE: usize = 16;
/// The largest widths, forward and backward: a kernel keeps the codes of 32 rows on chip to write them along columns, and a row
/// in the registers of a warp. With rows of 2048, sixteen at a time, an H200 took 163 us, and norm and quantisation as separate
/// kernels 105.
const NORM_WIDEST: usize = 1024;
const NORM_GRAD_WIDEST: usize = 768;

impl Source {
    pub fn inputs(self) -> usize {
        self.tensors() + self.makes_again() as usize
    }

    /// Whether the last input is the scale of a value of the forward pass, whose codes along columns are the last output.
    pub fn makes_again(self) -> bool {
        matches!(self, Source::GatedGrad { again: true, .. } | Source::NormGrad { again: true, .. })
    }

    /// Number of inputs without that scale.
    pub fn tensors(self) -> usize {
        match self {
            Source::Given => 1,
            Source::Gated(_) => 2,
            Source::GatedGrad { .. } => 3,
            Source::Norm(spec, residual) => {
                1 + residual as usize + spec.weight.is_some() as usize + spec.bias as usize
            }
            Source::NormGrad { spec, add, .. } => 2 + add as usize + spec.weight.is_some() as usize,
        }
    }

    pub fn act(self) -> Option<Act> {
        match self {
            Source::Gated(act) | Source::GatedGrad { act, .. } => Some(act),
            Source::Given | Source::Norm(..) | Source::NormGrad { .. } => None,
        }
    }

    /// Whether rows of `width` elements can be quantised by the operation that computes them.
    pub fn takes(self, width: usize) -> bool {
        match self {
            Source::Norm(..) => width.is_multiple_of(NORM_MULTIPLE) && width <= NORM_WIDEST,
            // More sums, and a bias, would leave too few registers for the norm as well.
            Source::NormGrad { spec, again: true, .. } if spec.center || spec.bias => false,
            Source::NormGrad { .. } => width.is_multiple_of(NORM_MULTIPLE) && width <= NORM_GRAD_WIDEST,
            Source::Given | Source::Gated(_) | Source::GatedGrad { .. } => true,
        }
    }

    /// The type of the quantised tensor, and the outputs beside its codes.
    fn infer(self, ins: &[&TensorType]) -> Result<(TensorType, Vec<TensorType>), String> {
        let mut further = vec![];
        let x = match self {
            Source::Given => ins[0].clone(),
            Source::Norm(spec, residual) => {
                further = norm::infer(spec.weight, spec.bias, residual, ins)?;
                further.remove(0)
            }
            Source::NormGrad { spec, add, again } => {
                further = norm::infer_grad(&spec.grad(add), &ins[..self.tensors()])?;
                if again {
                    further.push(along_columns(&further[0])?);
                }
                further[0].clone()
            }
            Source::Gated(_) => gated::infer(0.0, ins)?.remove(0),
            Source::GatedGrad { again, .. } => {
                let mut wide = gated::infer_grad(false, 0.0, &ins[..self.tensors()])?.remove(0);
                if again {
                    further.push(along_columns(&wide)?);
                }
                if let Some(columns) = wide.dims.last_mut() {
                    *columns *= 2;
                }
                wide
            }
        };
        if self.makes_again() {
            expect("the scale of the codes made again", ins[self.tensors()], DType::F32, &[1])?;
        }
        if !self.takes(x.last()) {
            return Err(format!("{x}: rows of so many elements are not quantised where they are made"));
        }
        Ok((x, further))
    }

    fn expand<'g>(self, ins: &[Tensor<'g>]) -> (Tensor<'g>, Vec<Tensor<'g>>) {
        let b = ins[0].b;
        match self {
            Source::Given => (ins[0], vec![]),
            Source::Gated(act) => (b.op(Op::Gated { act, p: 0.0 }, ins), vec![]),
            Source::GatedGrad { act, again } => {
                let outs = b.ops(Op::GatedGrad { act, again, p: 0.0 }, &ins[..self.tensors()]);
                let codes = again.then(|| codes(outs[2], FORWARD, ins[self.tensors()]).transpose(&[1, 0]));
                (b.concat(&outs[..2], 1), codes.into_iter().collect())
            }
            Source::Norm(spec, residual) => {
                let mut outs = b.ops(spec.op(residual), ins);
                (outs.remove(0), outs)
            }
            Source::NormGrad { spec, add, again } => {
                let mut outs = b.ops(spec.grad(add), &ins[..self.tensors()]);
                if again {
                    let shared = 1 + spec.weight.is_some() as usize;
                    let norm = b.op(spec.op(false), &ins[..shared]);
                    outs.push(codes(norm, FORWARD, ins[self.tensors()]).transpose(&[1, 0]));
                }
                (outs[0], outs)
            }
        }
    }
}

impl Attr for Source {
    fn to_text(&self) -> String {
        match self {
            Source::Given => "given".into(),
            Source::Gated(act) => format!("gated:{}", act.to_text()),
            Source::GatedGrad { act, again: false } => format!("gated_grad:{}", act.to_text()),
            Source::GatedGrad { act, again: true } => format!("gated_grad_again:{}", act.to_text()),
            Source::Norm(spec, residual) => format!("norm:{}:{residual}", spec.to_text()),
            Source::NormGrad { spec, add, again: false } => format!("norm_grad:{}:{add}", spec.to_text()),
            Source::NormGrad { spec, add, again: true } => {
                format!("norm_grad_again:{}:{add}", spec.to_text())
            }
        }
    }
    fn read(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "given" => Ok(Source::Given),
            Some(("gated", act)) => Ok(Source::Gated(Act::read(act)?)),
            Some((kind @ ("gated_grad" | "gated_grad_again"), act)) => {
                Ok(Source::GatedGrad { act: Act::read(act)?, again: kind == "gated_grad_again" })
            }
            Some((kind @ ("norm" | "norm_grad" | "norm_grad_again"), rest)) => {
                let (spec, adds) = rest.rsplit_once(':').ok_or_else(|| format!("`{text}` is no norm"))?;
                let (spec, add) = (NormSpec::read(spec)?, bool::read(adds)?);
                Ok(match kind {
                    "norm" => Source::Norm(spec, add),
                    _ => Source::NormGrad { spec, add, again: kind == "norm_grad_again" },
                })
            }
            _ => Err(format!("`{text}` is nothing to quantise")),
        }
    }
    fn omitted() -> Option<Self> {
        Some(Source::Given)
    }
}

/// Pairs that may share memory: the largest magnitude overwrites the previous one, and the fourth output overwrites the input
/// that is quantised, because a row of that is read before any of it is written.
pub fn in_place(of: Source) -> Vec<(usize, usize)> {
    let makes_room = |input: &usize| match of {
        Source::Norm(_, residual) => residual && *input < 2,
        Source::NormGrad { spec, .. } => !(spec.weight.is_some() && *input == 1),
        Source::Given | Source::Gated(_) | Source::GatedGrad { .. } => false,
    };
    let fourth = (0..of.tensors()).filter(makes_room).map(|input| (input, 3));
    [(of.inputs() + 1, 2)].into_iter().chain(fourth).collect()
}

pub fn infer(to: DType, current: bool, of: Source, ins: &[&TensorType]) -> Result<Vec<TensorType>, String> {
    arity(ins, of.inputs() + if current { 0 } else { 2 })?;
    let (ins, scaling) = ins.split_at(of.inputs());
    let (x, further) = of.infer(ins)?;
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
    let codes = [TensorType::new(to, [m, n]), TensorType::new(to, [n, m]), TensorType::new(DType::F32, [1])];
    Ok(codes.into_iter().chain(further).collect())
}

pub fn expand<'g>(to: DType, current: bool, of: Source, ins: &[Tensor<'g>]) -> Vec<Tensor<'g>> {
    let (ins, scaling) = ins.split_at(of.inputs());
    let (x, further) = of.expand(ins);
    let x = x.cast(DType::F32);
    let dims = x.dims();
    let largest = x.zip(E::Max, -x).reshape(&[dims[0] * dims[1]]).reduce(0, Fold::Max);
    let (scale, third) = if current {
        let scale = largest.map(E::Fp8Scale(to));
        (scale, scale)
    } else {
        (scaling[0], scaling[1].zip(E::Max, largest))
    };
    let q = codes(x, to, scale);
    [q, q.transpose(&[1, 0]), third].into_iter().chain(further).collect()
}

/// x / scale, rounded to an 8-bit type.
pub(super) fn codes<'g>(x: Tensor<'g>, to: DType, scale: Tensor<'g>) -> Tensor<'g> {
    (x.cast(DType::F32) * scale.recip().reshape(&[1, 1]).broadcast(&x.dims())).cast(to)
}

/// The type of a matrix's codes along columns.
fn along_columns(x: &TensorType) -> Result<TensorType, String> {
    let [m, n] = x.dims[..] else { return Err(format!("{x} is no matrix")) };
    Ok(TensorType::new(FORWARD, [n, m]))
}
