//! A matrix in an 8-bit type, both ways round: what products of such types read, whose inner extents must lie without
//! gaps in both operands.
//!
//! q = x / scale rounded to the type, by a multiplication with the scale's reciprocal; scales are powers of two
//! (`fp8::scale`), so only the last rounding loses anything. The scale is given, and what it should have been is
//! gathered for later steps, or it is taken from x itself, which costs another pass over x. A NaN stays one and counts
//! for nothing in the largest magnitude.

use super::{arity, expect};
use crate::builder::Tensor;
use crate::ops::elementwise::Elementwise as E;
use crate::ops::reduce::Fold;
use crate::types::{DType, TensorType};

pub fn infer(to: DType, current: bool, ins: &[&TensorType]) -> Result<Vec<TensorType>, String> {
    arity(ins, if current { 1 } else { 3 })?;
    let x = ins[0];
    if !to.is_fp8() || !matches!(x.dtype, DType::F32 | DType::BF16) {
        return Err(format!("{x} to {}: f32 or bf16 is quantised to an 8-bit float", to.name()));
    }
    let [m, n] = x.dims[..] else { return Err(format!("{x} is no matrix")) };
    for (what, t) in ["the scale", "the largest magnitude"].iter().zip(&ins[1..]) {
        expect(what, t, DType::F32, &[1])?;
    }
    Ok(vec![TensorType::new(to, [m, n]), TensorType::new(to, [n, m]), TensorType::new(DType::F32, [1])])
}

pub fn expand<'g>(to: DType, current: bool, ins: &[Tensor<'g>]) -> Vec<Tensor<'g>> {
    let x = ins[0].cast(DType::F32);
    let dims = x.dims();
    let largest = x.zip(E::Max, -x).reshape(&[dims[0] * dims[1]]).reduce(0, Fold::Max);
    let (scale, third) = if current {
        let scale = largest.map(E::Fp8Scale(to));
        (scale, scale)
    } else {
        (ins[1], ins[2].zip(E::Max, largest))
    };
    let q = (x * scale.recip().reshape(&[1, 1]).broadcast(&dims)).cast(to);
    vec![q, q.transpose(&[1, 0]), third]
}
