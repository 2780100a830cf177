//! Merges attention over disjoint sets of keys into attention over all of them.
//!
//! lse = log(sum exp(lse_i)), o = sum exp(lse_i - lse) o_i. Elementwise, so it needs no kernel of its own.

use crate::builder::Tensor;
use crate::ops::elementwise::Elementwise as E;
use crate::types::DType;

/// (o [T, H, K], lse [T, H]) over all keys, from results of the same queries over disjoint sets of keys.
///
/// A part in which a query sees no key (lse = -inf, o = 0) adds nothing and gets no gradient; a query that sees no key in any
/// part again has o = 0 and lse = -inf.
#[track_caller]
pub fn merge<'g>(parts: &[(Tensor<'g>, Tensor<'g>)]) -> (Tensor<'g>, Tensor<'g>) {
    let (first, lse) = *parts.first().expect("there is something to merge");
    let (b, narrow, wide, dims) = (lse.b, first.dtype(), lse.dtype(), lse.dims());
    let zero = b.fill(0.0, wide, &dims);

    // Exponentials are taken relative to a number close to the largest lse. The result does not depend on it, so it must get no
    // gradient: casting to an integer stops the gradient.
    let top = parts[1..].iter().fold(lse, |top, (_, lse)| top.zip(E::Max, *lse));
    let base = top.map(E::Finite).select(top, zero).cast(DType::I32).cast(wide);
    let weights: Vec<_> = parts.iter().map(|(_, lse)| (*lse - base).exp()).collect();
    let total = weights.iter().copied().reduce(|a, b| a + b).expect("as many as parts");
    let empty = total.equal(zero);
    let share = (total + empty).recip();

    let across = |x: Tensor<'g>| x.reshape(&[dims[0], dims[1], 1]);
    let shares = weights.iter().map(|weight| across(*weight * share));
    let terms = parts.iter().zip(shares).map(|((o, _), share)| o.cast(wide) * share);
    let o = terms.reduce(|a, b| a + b).expect("as many as parts").cast(narrow);
    let none = b.fill(f64::NEG_INFINITY, wide, &dims);
    (o, empty.select(none, base + (total + empty).log()))
}
