//! Reshape, transpose, slice, concatenate, pad, broadcast: no arithmetic, and in a plan mostly no copy either.

use super::arity;
use crate::ops::{Grads, Op, Vjp};
use crate::types::TensorType;

pub fn infer(op: &Op, ins: &[&TensorType]) -> Result<Vec<TensorType>, String> {
    if let Op::Concat { axis } = op {
        return infer_concat(*axis, ins);
    }
    arity(ins, 1)?;
    let x = ins[0];
    let in_range =
        |axis: usize| if axis < x.rank() { Ok(()) } else { Err(format!("{x} has no axis {axis}")) };
    let mut dims = x.dims.clone();
    match op {
        Op::Reshape { dims: to } => {
            if to.iter().product::<usize>() != x.elements() {
                return Err(format!("{x} does not reshape to {to:?}"));
            }
            dims = to.clone();
        }
        Op::Transpose { perm } => {
            let mut sorted = perm.clone();
            sorted.sort_unstable();
            if sorted != (0..x.rank()).collect::<Vec<_>>() {
                return Err(format!("{perm:?} is no permutation of the axes of {x}"));
            }
            dims = perm.iter().map(|&p| x.dims[p]).collect();
        }
        Op::Slice { axis, start, len } => {
            in_range(*axis)?;
            if start + len > x.dims[*axis] {
                return Err(format!("{start}..{} lies outside axis {axis} of {x}", start + len));
            }
            dims[*axis] = *len;
        }
        Op::Pad { axis, before, after } => {
            in_range(*axis)?;
            dims[*axis] += before + after;
        }
        Op::Broadcast { dims: to } => {
            let fits =
                to.len() == x.rank() && to.iter().zip(&x.dims).all(|(&to, &from)| from == to || from == 1);
            if !fits {
                return Err(format!("{x} does not broadcast to {to:?}"));
            }
            dims = to.clone();
        }
        _ => unreachable!("{} is no movement", op.name()),
    }
    Ok(vec![TensorType::new(x.dtype, dims)])
}

fn infer_concat(axis: usize, ins: &[&TensorType]) -> Result<Vec<TensorType>, String> {
    let first = ins.first().ok_or("concat of nothing")?;
    let mut ty = (*first).clone();
    if axis >= ty.rank() {
        return Err(format!("{first} has no axis {axis}"));
    }
    ty.dims[axis] = 0;
    for part in ins {
        let alike = part.dtype == ty.dtype
            && part.rank() == ty.rank()
            && (0..ty.rank()).all(|i| i == axis || part.dims[i] == ty.dims[i]);
        if !alike {
            return Err(format!("{first} and {part} do not join along axis {axis}"));
        }
        ty.dims[axis] += part.dims[axis];
    }
    Ok(vec![ty])
}

pub fn vjp<'g>(op: &Op, at: &Vjp<'_, 'g>) -> Grads<'g> {
    let Some(d) = at.d[0] else { return vec![None; at.ins.len()] };
    let x = at.ins[0].dims();
    match op {
        Op::Reshape { .. } => vec![Some(d.reshape(&x))],
        Op::Transpose { perm } => {
            let mut back = vec![0; perm.len()];
            perm.iter().enumerate().for_each(|(to, &from)| back[from] = to);
            vec![Some(d.transpose(&back))]
        }
        Op::Slice { axis, start, len } => {
            let after = x[*axis] - start - len;
            vec![Some(d.b.op(Op::Pad { axis: *axis, before: *start, after }, &[d]))]
        }
        Op::Pad { axis, before, .. } => vec![Some(d.slice(*axis, *before, x[*axis]))],
        Op::Broadcast { dims } => {
            let repeated = (0..dims.len()).filter(|&i| x[i] != dims[i]);
            vec![Some(repeated.fold(d, |d, axis| d.sum(axis)).cast(at.ins[0].dtype()))]
        }
        Op::Concat { axis } => {
            let mut start = 0;
            let mut part = |i: usize| {
                let len = at.ins[i].dims()[*axis];
                start += len;
                at.needs[i].then(|| d.slice(*axis, start - len, len))
            };
            (0..at.ins.len()).map(&mut part).collect()
        }
        _ => unreachable!("{} is no movement", op.name()),
    }
}
