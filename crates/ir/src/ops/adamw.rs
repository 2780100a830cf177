//! AdamW with decoupled decay over a parameter or a flat region of many.
//!
//! g' = scale g; m' = b1 m + (1 - b1) g'; v' = b2 v + (1 - b2) g'^2; with t applied updates, this one included:
//! p' = p - lr (m' / (1 - b1^t) / (sqrt(v' / (1 - b2^t)) + eps) + decay p). Where `go` is 0 nothing changes.
//! With `copy`, p' also in bf16: what products read, written in the same pass over memory.

use super::{arity, expect};
use crate::builder::Tensor;
use crate::op::Op;
use crate::types::{DType, TensorType};

pub fn infer(copy: bool, ins: &[&TensorType]) -> Result<Vec<TensorType>, String> {
    arity(ins, 8)?;
    let p = ins[0];
    for (what, t) in ["the gradient", "the first moment", "the second moment"].iter().zip(&ins[1..4]) {
        expect(what, t, p.dtype, &p.dims)?;
    }
    for (what, t) in ["lr", "scale", "updates", "go"].iter().zip(&ins[4..]) {
        expect(what, t, p.dtype, &[1])?;
    }
    let mut outs = vec![p.clone(); 3];
    outs.extend(copy.then(|| p.with(DType::BF16)));
    Ok(outs)
}

pub fn expand<'g>(op: &Op, ins: &[Tensor<'g>]) -> Vec<Tensor<'g>> {
    let Op::AdamW { beta1, beta2, eps, weight_decay, lr_scale, copy } = *op else {
        unreachable!("called for adamw")
    };
    let ty = ins[0].ty();
    let everywhere = |x: Tensor<'g>| x.reshape(&vec![1; ty.rank()]).broadcast(&ty.dims);
    let (p, m, v) = (ins[0], ins[2], ins[3]);
    let g = ins[1] * everywhere(ins[5]);
    let lr = everywhere(ins[4].scale(lr_scale as f64));
    let go = everywhere(ins[7]);
    let (b1, b2) = (beta1 as f64, beta2 as f64);
    let correction = |beta: f64| everywhere((-ins[6].scale(beta.ln()).exp()).offset(1.0));
    let m1 = m.scale(b1) + g.scale(1.0 - b1);
    let v1 = v.scale(b2) + g.square().scale(1.0 - b2);
    let step = m1.div(correction(b1)).div(v1.div(correction(b2)).sqrt().offset(eps as f64));
    let p1 = p - lr * (step + p.scale(weight_decay as f64));
    let mut outs = vec![go.select(p1, p), go.select(m1, m), go.select(v1, v)];
    outs.extend(copy.then(|| outs[0].cast(DType::BF16)));
    outs
}
