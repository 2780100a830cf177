//! Rows by index, for embeddings, supervised rows and caches. Index -1 stands for no row: gathers give zeros, scatters drop it.

use super::{arity, expect, expect_axes, expect_float};
use crate::builder::Tensor;
use crate::ops::{Grads, Op, Vjp};
use crate::types::{DType, TensorType};

pub fn infer_gather(ins: &[&TensorType]) -> Result<Vec<TensorType>, String> {
    arity(ins, 2)?;
    let (table, index) = (ins[0], ins[1]);
    if table.rank() == 0 || index.rank() != 1 {
        return Err(format!("rows of {table} by {index}: wanted a table and a list"));
    }
    expect("the index", index, DType::I32, &index.dims)?;
    let mut dims = table.dims.clone();
    dims[0] = index.dims[0];
    Ok(vec![TensorType::new(table.dtype, dims)])
}

pub fn infer_scatter_add(
    rows: usize,
    out: DType,
    base: bool,
    ins: &[&TensorType],
) -> Result<Vec<TensorType>, String> {
    arity(ins, 2 + base as usize)?;
    expect_axes("the rows", ins[0])?;
    let mut dims = ins[0].dims.clone();
    expect("the index", ins[1], DType::I32, &dims[..1])?;
    dims[0] = rows;
    if base {
        expect_float("the base", ins[2], &dims)?;
    }
    Ok(vec![TensorType::new(out, dims)])
}

pub fn infer_row_scatter(ins: &[&TensorType]) -> Result<Vec<TensorType>, String> {
    arity(ins, 3)?;
    let (base, rows) = (ins[0], ins[1]);
    if base.rank() == 0
        || rows.rank() != base.rank()
        || base.dims[1..] != rows.dims[1..]
        || base.dtype != rows.dtype
    {
        return Err(format!("rows {rows} do not go into {base}"));
    }
    expect("the index", ins[2], DType::I32, &rows.dims[..1])?;
    Ok(vec![base.clone()])
}

pub fn vjp_gather<'g>(at: &Vjp<'_, 'g>) -> Grads<'g> {
    let (table, index) = (at.ins[0], at.ins[1]);
    let ty = table.ty();
    let op = Op::ScatterAdd { rows: ty.dims[0], out: ty.dtype.accumulator(), base: false };
    vec![at.d[0].map(|d| d.b.op(op, &[d, index]).cast(ty.dtype)), None]
}

pub fn vjp_scatter_add<'g>(base: bool, at: &Vjp<'_, 'g>) -> Grads<'g> {
    let mut grads = vec![at.d[0].map(|d| d.cast(at.ins[0].dtype()).gather(at.ins[1])), None];
    if base {
        grads.push(at.d[0].map(|d| d.cast(at.ins[2].dtype())));
    }
    grads
}

pub fn without_base<'g>(rows: usize, out: DType, ins: &[Tensor<'g>]) -> Tensor<'g> {
    let sum = ins[0].b.op(Op::ScatterAdd { rows, out: ins[2].dtype(), base: false }, &ins[..2]);
    (sum + ins[2]).cast(out)
}
