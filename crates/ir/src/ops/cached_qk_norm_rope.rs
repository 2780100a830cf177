//! The per-head norm of queries and keys and their rotation, which writes keys and values to their rows of the caches.

use super::{arity, expect_float, index, qk_norm_rope};
use crate::builder::{Builder, Tensor};
use crate::ops::Op;
use crate::types::TensorType;

/// With more tokens, the launches that this saves are a small part of the time.
pub const MOST_TOKENS: usize = 256;

/// Number of inputs of the norm and rotation, which come first.
pub fn rotated(op: &Op) -> usize {
    let Op::CachedQkNormRope { weight, table, .. } = op else {
        unreachable!("called for cached_qk_norm_rope")
    };
    2 + weight.is_some() as usize + *table as usize
}

pub fn infer(op: &Op, ins: &[&TensorType]) -> Result<Vec<TensorType>, String> {
    let Op::CachedQkNormRope { weight, first, axis_of_freq, table, .. } = op else {
        unreachable!("called for cached_qk_norm_rope")
    };
    let count = rotated(op);
    arity(ins, count + 4)?;
    let y = qk_norm_rope::infer(*weight, *first, axis_of_freq, *table, &ins[..count])?.remove(0);
    if *first == 0 {
        return Err("queries and keys are needed, which two weights norm".into());
    }
    let heads = |count: usize| TensorType::new(y.dtype, [y.dims[0], count, y.dims[2]]);
    let (queries, keys) = (heads(*first), heads(y.dims[1] - first));
    let [v, cached_k, cached_v, places] = [0, 1, 2, 3].map(|i| ins[count + i]);
    if cached_k != cached_v {
        return Err(format!("keys are cached in {cached_k} and values in {cached_v}"));
    }
    expect_float("the values", v, &keys.dims)?;
    let k = index::infer_row_scatter(&[cached_k, &keys, places])?.remove(0);
    let v = index::infer_row_scatter(&[cached_v, v, places])?.remove(0);
    Ok(vec![queries, k, v])
}

/// The norm with its rotation, and the two replacements of rows that the fused operation combines.
pub fn expand<'g>(b: &'g Builder, op: &Op, ins: &[Tensor<'g>]) -> Vec<Tensor<'g>> {
    let Op::CachedQkNormRope { eps, weight, first, freq, axis_of_freq, pairs, table } = op.clone() else {
        unreachable!("called for cached_qk_norm_rope")
    };
    let count = rotated(op);
    let y = b.op(Op::QkNormRope { eps, weight, first, freq, axis_of_freq, pairs, table }, &ins[..count]);
    let [v, cached_k, cached_v, places] = [0, 1, 2, 3].map(|i| ins[count + i]);
    let keys = y.slice(1, first, y.dims()[1] - first);
    vec![y.slice(1, 0, first), cached_k.row_scatter(keys, places), cached_v.row_scatter(v, places)]
}

/// The caches are replaced in place.
pub fn in_place(op: &Op) -> Vec<(usize, usize)> {
    let caches = rotated(op) + 1;
    vec![(caches, 1), (caches + 1, 2)]
}
