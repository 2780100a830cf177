//! Products with the gated activation after them, or with its gradient.
//!
//! Forward, one product computes gate and up side by side, and their activation as they are written. Backward, the gradient of
//! the activation's value is a product too, but it is never stored: the kernel writes the gradients of gate and up.
//! `passes/fuse/gated_products.rs` creates these operations from products, slices and gated activations after autodiff.
//!
//! A product of 8-bit operands gives the activation in 8 bits too, by a scale that is given, and its largest magnitude: the
//! values are those of a product followed by a quantised activation.

use super::{arity, expect, gated};
use crate::builder::{Builder, Tensor};
use crate::ops::Op;
use crate::ops::epilogue::Epilogue;
use crate::ops::gated::Act;
use crate::ops::product::{self, Compute, plain};
use crate::ops::quantize::{FORWARD, Source};
use crate::types::{DType, TensorType};

/// Number of inputs of the product of 8-bit operands: x, w and their scales. The scale and the largest magnitude so far of
/// the activation follow.
const SCALED: usize = 4;

/// x [M, K] and w [2 F, K] -> x w^T, whose first F columns are the gate, and act(gate) * up [M, F].
pub fn infer(ins: &[&TensorType]) -> Result<Vec<TensorType>, String> {
    let is_fp8 = ins.first().is_some_and(|x| x.dtype.is_fp8());
    arity(ins, if is_fp8 { SCALED + 2 } else { 2 })?;
    let (product, scaling) = if is_fp8 { ins.split_at(SCALED) } else { (ins, &[][..]) };
    let dtype = if is_fp8 { DType::BF16 } else { ins[0].dtype };
    let wide = product::infer(false, true, dtype, false, Epilogue::None, product)?.remove(0);
    let &[rows, columns] = &wide.dims[..] else { return Err(format!("{wide} is not one matrix")) };
    if !columns.is_multiple_of(2) {
        return Err(format!("{wide} has no two halves: {columns} columns"));
    }
    let value = TensorType::new(if is_fp8 { FORWARD } else { wide.dtype }, [rows, columns / 2]);
    for (what, ty) in ["the scale", "the largest magnitude"].iter().zip(scaling) {
        expect(what, ty, DType::F32, &[1])?;
    }
    Ok([wide, value].into_iter().chain(scaling.last().map(|amax| (*amax).clone())).collect())
}

/// d [M, K], w [K, F], gate and up [M, F] -> d gate, d up, and with `again` act(gate) * up.
pub fn infer_grad(again: bool, ins: &[&TensorType]) -> Result<Vec<TensorType>, String> {
    arity(ins, 4)?;
    let dy = product::infer(false, false, ins[0].dtype, false, Epilogue::None, &ins[..2])?.remove(0);
    expect("the gate", ins[2], dy.dtype, &dy.dims)?;
    gated::infer_grad(again, 0.0, &[ins[2], ins[3], &dy])
}

pub fn expand<'g>(b: &'g Builder, act: Act, ins: &[Tensor<'g>]) -> Vec<Tensor<'g>> {
    let halves = |wide: Tensor<'g>| {
        let half = wide.dims()[1] / 2;
        [wide.slice(1, 0, half), wide.slice(1, half, half)]
    };
    if ins[0].dtype().is_fp8() {
        let (product, scaling) = ins.split_at(SCALED);
        let wide = b.op(plain(false, true, DType::BF16, Compute::Full), product);
        let quantize = Op::Quantize { to: FORWARD, current: false, of: Source::Gated(act) };
        let outs = b.ops(quantize, &[&halves(wide), scaling].concat());
        return vec![wide, outs[0], outs[2]];
    }
    let wide = b.op(plain(false, true, ins[0].dtype(), Compute::Full), ins);
    let value = b.op(Op::Gated { act, p: 0.0 }, &halves(wide));
    vec![wide, value]
}

pub fn expand_grad<'g>(b: &'g Builder, act: Act, again: bool, ins: &[Tensor<'g>]) -> Vec<Tensor<'g>> {
    let dy = b.op(plain(false, false, ins[0].dtype(), Compute::Full), &ins[..2]);
    b.ops(Op::GatedGrad { act, again, p: 0.0 }, &[ins[2], ins[3], dy])
}

/// Arithmetic: the product, and for each element of the activation's value that of `Gated` or of its gradient.
pub fn flops(ins: &[&TensorType], product_columns: usize, of_gated: usize) -> usize {
    2 * ins[0].elements() * product_columns + of_gated
}
