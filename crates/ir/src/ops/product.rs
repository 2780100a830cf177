//! The matrix product, batched over leading axes, operands stored either way round.

use super::{arity, expect_float};
use crate::builder::Tensor;
use crate::op::{Grads, Op, Vjp};
use crate::types::{DType, TensorType};

/// The extent summed over.
pub fn inner(ta: bool, a: &TensorType) -> usize {
    a.dims[a.rank() - if ta { 2 } else { 1 }]
}

pub fn infer(
    ta: bool,
    tb: bool,
    out: DType,
    base: bool,
    ins: &[&TensorType],
) -> Result<Vec<TensorType>, String> {
    arity(ins, 2 + base as usize)?;
    let (a, b) = (ins[0], ins[1]);
    let (ra, rb) = (a.rank(), b.rank());
    if ra < 2 || ra != rb || a.dims[..ra - 2] != b.dims[..rb - 2] {
        return Err(format!("{a} and {b} are not two stacks of matrices"));
    }
    if a.dtype != b.dtype || !a.dtype.is_float() {
        return Err(format!("{a} and {b} do not multiply: both must have one float type"));
    }
    let (m, ka) = if ta { (a.dims[ra - 1], a.dims[ra - 2]) } else { (a.dims[ra - 2], a.dims[ra - 1]) };
    let (kb, n) = if tb { (b.dims[rb - 1], b.dims[rb - 2]) } else { (b.dims[rb - 2], b.dims[rb - 1]) };
    if ka != kb {
        return Err(format!("{a}{} times {b}{}: inner extents {ka} and {kb} differ", mark(ta), mark(tb)));
    }
    let mut dims = a.dims[..ra - 2].to_vec();
    dims.extend([m, n]);
    if base {
        expect_float("the base", ins[2], &dims)?;
    }
    Ok(vec![TensorType::new(out, dims)])
}

fn mark(transposed: bool) -> &'static str {
    if transposed { " transposed" } else { "" }
}

pub fn vjp<'g>(ta: bool, tb: bool, base: bool, at: &Vjp<'_, 'g>) -> Grads<'g> {
    let Some(d) = at.d[0] else { return vec![None; at.ins.len()] };
    let (a, b) = (at.ins[0], at.ins[1]);
    let d_in = d.cast(a.dtype());
    // C = A B: dA = dC B^T, dB = A^T dC; a transposed operand gets the transposed gradient.
    let da = at.needs[0].then(|| if ta { b.product(d_in, tb, true) } else { d_in.product(b, false, !tb) });
    let db = at.needs[1].then(|| if tb { d_in.product(a, true, ta) } else { a.product(d_in, !ta, false) });
    let mut grads = vec![da, db];
    if base {
        grads.push(at.needs[2].then(|| d.cast(at.ins[2].dtype())));
    }
    grads
}

pub fn without_base<'g>(ta: bool, tb: bool, out: DType, ins: &[Tensor<'g>]) -> Tensor<'g> {
    let product = ins[0].b.op(Op::Product { ta, tb, out: ins[2].dtype(), base: false }, &ins[..2]);
    (product + ins[2]).cast(out)
}
