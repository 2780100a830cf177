//! Pools the hidden states of each text to one state.
//!
//! T tokens, S texts, L tokens of the longest text, D width. Tokens outside texts are ignored. A text without tokens gives
//! zeros, or with first-token pooling an arbitrary row.

use flatout_ir::ops::attention::Segments;
use flatout_ir::ops::elementwise::Elementwise;
use flatout_ir::ops::reduce::Fold;
use flatout_ir::{DType, Op, Tensor};

use crate::config::Pooling;

/// Pools states x [T, D] of the texts at `start`, `len` i32 [S] to [S, D].
pub fn pool<'g>(
    x: Tensor<'g>,
    start: Tensor<'g>,
    len: Tensor<'g>,
    texts: Segments,
    pooling: Pooling,
) -> Tensor<'g> {
    let Segments::Ragged { max_len, .. } = texts else { unreachable!("texts have lengths of their own") };
    match pooling {
        Pooling::Mean => mean(x, start, len),
        Pooling::Cls => x.gather(start),
        Pooling::Last => x.gather((start + len).offset(-1.0)),
        Pooling::Max => max(x, start, len, max_len),
        Pooling::ClsMean => unreachable!("validated: texts have other poolings"),
    }
}

fn mean<'g>(x: Tensor<'g>, start: Tensor<'g>, len: Tensor<'g>) -> Tensor<'g> {
    let (b, t, s) = (x.b, x.dims()[0], start.dims()[0]);
    // The text of each token, or -1.
    let row = |v: Tensor<'g>| v.reshape(&[1, s]).broadcast(&[t, s]);
    let token = b.iota(DType::I32, &[t, s], 0);
    let inside = row(start).less_equal(token) * token.less(row(start + len));
    let number = b.iota(DType::I32, &[t, s], 1).offset(1.0);
    let text = (inside * number).sum(1).offset(-1.0).reshape(&[t]);
    let wide = x.dtype().accumulator();
    let sum = b.op(Op::ScatterAdd { rows: s, out: wide, base: false }, &[x, text]);
    let count = len.cast(wide).zip(Elementwise::Max, b.fill(1.0, wide, &[s]));
    sum * count.recip().reshape(&[s, 1])
}

/// Maximum of every element. Where several tokens have it, each gets an equal part of the gradient.
fn max<'g>(x: Tensor<'g>, start: Tensor<'g>, len: Tensor<'g>, longest: usize) -> Tensor<'g> {
    let (b, d, s) = (x.b, x.dims()[1], start.dims()[0]);
    let column = |v: Tensor<'g>| v.reshape(&[s, 1]).broadcast(&[s, longest]);
    let place = b.iota(DType::I32, &[s, longest], 1);
    let inside = place.less(column(len));
    let index = inside.select(column(start) + place, b.fill(-1.0, DType::I32, &[s, longest]));
    let rows = x.gather(index.reshape(&[s * longest])).reshape(&[s, longest, d]);
    let all = [s, longest, d];
    let inside = inside.cast(x.dtype()).reshape(&[s, longest, 1]).broadcast(&all);
    let seen = inside.select(rows, b.fill(-1e30, x.dtype(), &all));
    let largest = seen.reduce(1, Fold::Max).broadcast(&all);
    // Cast through integers, so that which token is the maximum has no gradient.
    let hits = (seen.equal(largest) * inside).cast(DType::I32).cast(x.dtype());
    let count = hits.sum(1).zip(Elementwise::Max, b.fill(1.0, x.dtype().accumulator(), &[s, 1, d]));
    let share = hits * count.recip().cast(x.dtype()).broadcast(&all);
    (share * rows).sum(1).reshape(&[s, d])
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use flatout_ir::{Builder, oracle};

    use super::*;

    /// Seven tokens of width 2: a text of three, one outside texts, a text of two, one outside texts, and an unused entry.
    fn pooled(pooling: Pooling) -> Vec<f64> {
        let b = Builder::new();
        let x = b.input("x", DType::F32, &[7, 2]);
        let (start, len) = (b.input("start", DType::I32, &[3]), b.input("len", DType::I32, &[3]));
        let texts = Segments::Ragged { max_segments: 3, max_len: 4 };
        b.result("y", pool(x, start, len, texts, pooling));
        let states = [1.0, -1.0, 5.0, -3.0, 3.0, -2.0, 9.0, 9.0, -4.0, 7.0, -6.0, 8.0, 9.0, 9.0];
        let values = HashMap::from([
            ("x".to_string(), states.to_vec()),
            ("start".to_string(), vec![0.0, 4.0, 0.0]),
            ("len".to_string(), vec![3.0, 2.0, 0.0]),
        ]);
        oracle::run(&b.finish(), &values).results["y"][..4].to_vec()
    }

    #[test]
    fn texts_are_pooled_by_themselves() {
        assert_eq!(pooled(Pooling::Mean), [3.0, -2.0, -5.0, 7.5]);
        assert_eq!(pooled(Pooling::Cls), [1.0, -1.0, -4.0, 7.0]);
        assert_eq!(pooled(Pooling::Last), [3.0, -2.0, -6.0, 8.0]);
        assert_eq!(pooled(Pooling::Max), [5.0, -1.0, -4.0, 8.0]);
    }
}
