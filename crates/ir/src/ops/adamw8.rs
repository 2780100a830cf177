//! AdamW with moments in eight bits, in blocks of 256 elements (`block8`): the formulas of `adamw`, with moments decoded before
//! and encoded after. Inputs and outputs are dense; the last block may be short.
//!
//! A kernel rounds moments stochastically with the draws of `adamw`. `expand` rounds to nearest, so a kernel's codes may be the
//! neighbours of its codes; both compute the same scales, and p' is computed before anything is rounded.

use super::adamw::{self, Constants};
use super::expect;
use crate::block8::{BLOCK, Code, TOP};
use crate::builder::Tensor;
use crate::ops::Op;
use crate::ops::elementwise::Elementwise as E;
use crate::ops::reduce::Fold;
use crate::types::{DType, TensorType};

pub fn infer(copy: bool, first: u64, ins: &[&TensorType]) -> Result<Vec<TensorType>, String> {
    adamw::check_step(6, ins)?;
    let p = ins[0];
    let blocks = p.elements().div_ceil(BLOCK);
    expect("the gradient", ins[1], p.dtype, &p.dims)?;
    expect("the first moment", ins[2], DType::E4M3, &p.dims)?;
    expect("the second moment", ins[3], DType::E4M4, &p.dims)?;
    for (what, t) in ["the first moment's scales", "the second moment's scales"].iter().zip(&ins[4..6]) {
        expect(what, t, p.dtype, &[blocks])?;
    }
    adamw::check_first(first)?;
    let mut outs: Vec<TensorType> = [0, 2, 3, 4, 5].map(|i| ins[i].clone()).into();
    outs.extend(copy.then(|| p.with(DType::BF16)));
    Ok(outs)
}

pub fn expand<'g>(op: &Op, ins: &[Tensor<'g>]) -> Vec<Tensor<'g>> {
    let Op::AdamW8 { beta1, beta2, eps, weight_decay, lr_scale, copy, first: _ } = *op else {
        unreachable!("called for adamw8")
    };
    let ty = ins[0].ty();
    let blocks = ins[4].dims()[0];
    let decoded = |codes: Tensor<'g>, scales: Tensor<'g>| {
        let scales = scales.reshape(&[blocks, 1]).broadcast(&[blocks, BLOCK]);
        joined(cut(codes.cast(ty.dtype), blocks) * scales, &ty.dims)
    };
    let (m, v) = (decoded(ins[2], ins[4]), decoded(ins[3], ins[5]));
    let scalars = [ins[6], ins[7], ins[8], ins[9]];
    let constants = Constants { beta1, beta2, eps, weight_decay, lr_scale };
    let [p1, m1, v1] = adamw::updated(constants, [ins[0], ins[1], m, v], scalars);
    let mut outs = vec![p1];
    let mut scales = vec![];
    for (code, new, old, old_scales) in
        [(Code::Signed, m1, ins[2], ins[4]), (Code::Unsigned, v1, ins[3], ins[5])]
    {
        let (codes, new_scales) = encoded(code, new, blocks);
        let is_finite = |dims: &[usize]| ins[9].reshape(&vec![1; dims.len()]).broadcast(dims);
        let codes = is_finite(&ty.dims).select(codes, old.cast(ty.dtype));
        outs.push(codes.cast(old.dtype()));
        scales.push(is_finite(&[blocks]).select(new_scales, old_scales));
    }
    outs.extend(scales);
    outs.extend(copy.then(|| p1.cast(DType::BF16)));
    outs
}

/// All elements as rows of one block each, padded with zeros.
fn cut(x: Tensor<'_>, blocks: usize) -> Tensor<'_> {
    let n = x.ty().elements();
    let flat = x.reshape(&[n]);
    let after = blocks * BLOCK - n;
    let whole = if after == 0 { flat } else { x.b.op(Op::Pad { axis: 0, before: 0, after }, &[flat]) };
    whole.reshape(&[blocks, BLOCK])
}

/// The elements of blocks in their original shape, without padding.
fn joined<'g>(x: Tensor<'g>, dims: &[usize]) -> Tensor<'g> {
    let all = x.dims().iter().product();
    x.reshape(&[all]).slice(0, 0, dims.iter().product()).reshape(dims)
}

/// The values that the codes of `block8` represent, before rounding, and the scales. In f64, whose logarithm is exact enough to
/// tell powers of two from their neighbours.
fn encoded<'g>(code: Code, x: Tensor<'g>, blocks: usize) -> (Tensor<'g>, Tensor<'g>) {
    let (ty, rows) = (x.ty(), cut(x.cast(DType::F64), blocks));
    let b = x.b;
    let constant = |value: f64, like: Tensor<'g>| b.fill(value, like.dtype(), &like.dims());
    let largest = rows.zip(E::Max, -rows).reduce(1, Fold::Max);
    let [least, most] = Code::EXPONENTS.map(f64::from);
    let bounded = largest.zip(E::Max, constant(least.exp2(), largest));
    let exponent = bounded.zip(E::Min, constant(most.exp2(), largest)).log().scale(1.0 / 2f64.ln());
    // Rounds up by truncating after an offset that makes the number positive.
    const POSITIVE: f64 = 1000.0;
    let above = exponent.offset(POSITIVE + 1.0 - 1e-9).cast(DType::I32).cast(DType::F64);
    let scale = above.offset(-POSITIVE - TOP as f64).scale(2f64.ln()).exp();
    let scale = scale.cast(ty.dtype).cast(DType::F64);
    let values = rows.div(scale.broadcast(&rows.dims()));
    let bound = constant((TOP as f64).exp2(), values);
    let values = values.zip(E::Min, bound).zip(E::Max, -bound);
    let values = match code {
        Code::Signed => values,
        Code::Unsigned => {
            let least = constant(code.decode(1) as f64, values);
            rows.map(E::Step).select(values.zip(E::Max, least), values)
        }
    };
    (joined(values, &ty.dims).cast(ty.dtype), scale.reshape(&[blocks]).cast(ty.dtype))
}
