//! Requantises weights in NF4 (`nf4`) to E4M3, for products of 8-bit floats.
//!
//! (inputs of `dequantize` with nested magnitudes, scale f32 [1]) -> [M, N] in E4M3, or [N, M] if it is transposed: products of
//! such types need the inner extent contiguous in both operands. The codes are those of the dequantised weight in bf16, divided
//! by the scale, so that bits do not depend on whether the values are stored in between. N must be a multiple of 16, as the
//! extents of these products are.

use super::{dequantize, expect, quantize};
use crate::builder::Tensor;
use crate::ops::Op;
use crate::types::{DType, TensorType};

/// The type of the dequantised values, and that of their codes.
const VALUES: DType = DType::BF16;
const CODES: DType = DType::E4M3;

const MULTIPLE: usize = 16;

pub fn infer(rows: &[usize], transposed: bool, ins: &[&TensorType]) -> Result<Vec<TensorType>, String> {
    let Some((scale, stored)) = ins.split_last() else { return Err("there are no inputs".into()) };
    let values = dequantize::infer(rows, VALUES, true, stored)?.remove(0);
    expect("the scale", scale, DType::F32, &[1])?;
    let [m, n] = values.dims[..] else { unreachable!("a matrix is dequantised") };
    if !n.is_multiple_of(MULTIPLE) {
        return Err(format!("rows of {n} values are no multiple of {MULTIPLE}"));
    }
    Ok(vec![TensorType::new(CODES, if transposed { [n, m] } else { [m, n] })])
}

pub fn expand<'g>(rows: &[usize], transposed: bool, ins: &[Tensor<'g>]) -> Tensor<'g> {
    let (scale, stored) = ins.split_last().expect("a scale");
    let values = Op::Dequantize { rows: rows.to_vec(), to: VALUES, nested: true };
    let codes = quantize::codes(scale.b.op(values, stored), CODES, *scale);
    if transposed { codes.transpose(&[1, 0]) } else { codes }
}
