//! Reduction of one axis to extent 1.

use super::arity;
use crate::attr::named;
use crate::ops::{Grads, Vjp};
use crate::types::TensorType;

named! {
    pub enum Fold {
        Sum = "sum",
        Max = "max",
        SumSquares = "sum_squares",
    }
}

/// Sums are kept in the accumulator type; a maximum keeps the type of its input.
pub fn infer(axis: usize, by: Fold, ins: &[&TensorType]) -> Result<Vec<TensorType>, String> {
    arity(ins, 1)?;
    let mut ty = ins[0].clone();
    if axis >= ty.rank() {
        return Err(format!("{ty} has no axis {axis}"));
    }
    ty.dims[axis] = 1;
    if by != Fold::Max {
        ty.dtype = ty.dtype.accumulator();
    }
    Ok(vec![ty])
}

pub fn vjp<'g>(by: Fold, at: &Vjp<'_, 'g>) -> Grads<'g> {
    let Some(d) = at.d[0] else { return vec![None] };
    let x = at.ins[0];
    let d = d.cast(x.dtype()).broadcast(&x.dims());
    vec![Some(match by {
        Fold::Sum => d,
        Fold::SumSquares => (d * x).scale(2.0),
        // Where several elements tie for the maximum each gets the gradient; expansions only use the maximum as a
        // shift, whose gradient cancels.
        Fold::Max => d * x.equal(at.outs[0].broadcast(&x.dims())),
    })]
}
