//! Products with an activation after them, or with its slope.
//!
//! Forward, the product adds its bias and stores both the activation's argument and its value. Backward, the gradient of that
//! value is a product too, but it is never stored: the kernel writes that gradient times the slope and, where requested, the
//! recomputed value of the activation and the sum over rows that is the gradient of the bias.
//! `passes/fuse/activated_products.rs` creates these operations from products and elementwise operations after autodiff.

use super::{arity, expect, expect_float};
use crate::builder::{Builder, Tensor};
use crate::graph::{Class, Graph, Init, Slot};
use crate::ops::Op;
use crate::ops::elementwise::Elementwise as E;
use crate::ops::epilogue::Epilogue;
use crate::ops::gated::Act;
use crate::ops::product::{self, Compute};
use crate::ops::reduce::Fold;
use crate::types::TensorType;

/// x [M, K], w and, with `bias`, a bias [N] -> h = x w + bias and act(h), each [M, N].
pub fn infer(tb: bool, bias: bool, ins: &[&TensorType]) -> Result<Vec<TensorType>, String> {
    arity(ins, 2 + bias as usize)?;
    let h = matrix(tb, &ins[..2])?;
    if let Some(bias) = ins.get(2) {
        expect_float("the bias", bias, &h.dims[1..])?;
    }
    Ok(vec![h.clone(), h])
}

/// d [M, K], w and h [M, N] -> d w times the slope at h; with `again` act(h); with `sum` the sum [1, N] of the first output
/// over its rows.
pub fn infer_grad(tb: bool, again: bool, sum: bool, ins: &[&TensorType]) -> Result<Vec<TensorType>, String> {
    arity(ins, 3)?;
    let dh = matrix(tb, &ins[..2])?;
    expect("h", ins[2], dh.dtype, &dh.dims)?;
    let row = TensorType::new(dh.dtype.accumulator(), [1, dh.dims[1]]);
    let again = again.then(|| dh.clone());
    Ok([dh].into_iter().chain(again).chain(sum.then_some(row)).collect())
}

fn matrix(tb: bool, ins: &[&TensorType]) -> Result<TensorType, String> {
    let c = product::infer(false, tb, ins[0].dtype, false, Epilogue::None, ins)?.remove(0);
    if c.rank() == 2 { Ok(c) } else { Err(format!("{c} is not one matrix")) }
}

/// Index of the output that is the sum, where there is one.
pub fn sum_at(again: bool, sum: bool) -> Option<usize> {
    sum.then_some(1 + again as usize)
}

/// The product before the activation.
pub fn before(tb: bool, bias: bool, ins: &[TensorType]) -> Op {
    let (out, compute) = (ins[0].dtype, Compute::Full);
    let epilogue = if bias { Epilogue::Bias } else { Epilogue::None };
    Op::Product { ta: false, tb, out, base: false, compute, epilogue }
}

pub fn expand<'g>(b: &'g Builder, act: Act, tb: bool, bias: bool, ins: &[Tensor<'g>]) -> Vec<Tensor<'g>> {
    let types: Vec<TensorType> = ins.iter().map(|x| x.ty()).collect();
    let h = b.op(before(tb, bias, &types), ins);
    vec![h, h.map(act.elementwise())]
}

pub fn expand_grad<'g>(act: Act, tb: bool, again: bool, sum: bool, ins: &[Tensor<'g>]) -> Vec<Tensor<'g>> {
    let dy = ins[0].product(ins[1], false, tb);
    let dh = dy * ins[2].map(act.slope());
    let again = again.then(|| ins[2].map(act.elementwise()));
    [dh].into_iter().chain(again).chain(sum.then(|| dh.sum(0))).collect()
}

/// The part of the gradient after its product, as the body of a region: (dy, h) -> dh, act(h), the sum.
pub fn region(act: Act, again: bool, sum: bool, ty: &TensorType) -> Graph {
    let mut body = Graph::default();
    let [dy, h] = ["dy", "h"].map(|path| {
        let (path, ty) = (path.to_string(), ty.clone());
        let slot = body.add_slot(Slot { path, ty, class: Class::Input, init: Init::Zeros, part: None });
        body.add(Op::Read { slot }, vec![], "")
    });
    let slope = body.add(Op::Map { f: act.slope() }, vec![h], "");
    let dh = body.add(Op::Map { f: E::Mul }, vec![dy, slope], "");
    let again = again.then(|| body.add(Op::Map { f: act.elementwise() }, vec![h], ""));
    let sum = sum.then(|| body.add(Op::Reduce { axis: 0, by: Fold::Sum }, vec![dh], ""));
    let outs = [Some(dh), again, sum].into_iter().flatten().enumerate();
    body.results = outs.map(|(i, v)| (format!("out{i}"), v)).collect();
    body
}
