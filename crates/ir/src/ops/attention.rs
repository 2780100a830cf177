//! Attention, token-major: q [Tq, H, K] over k, v [Tk, HK, K], with queries and keys divided into segments that pair up in
//! order. Grouped heads read the same keys: head h reads key head h * HK / H.
//!
//! The outputs are o and lse, the logarithm of each row's sum of exponentials. A query that may see no key has o = 0 and lse =
//! -inf, and so has a row outside every segment.
//!
//! Both outputs may be differentiated. With p the probabilities, ds = p (do v^T - sum(do o) + d lse): the gradient of lse
//! contributes p itself, so it enters the backward pass as one number per row. Where scores s are capped, ds is multiplied by
//! 1 - (s / cap)^2.

mod merge;

pub use merge::merge;

use super::{arity, expect};
use crate::attr::Attr;
use crate::autodiff::{distinct, gradients};
use crate::builder::{Builder, Tensor};
use crate::ops::cap::Cap;
use crate::ops::reduce::Fold;
use crate::ops::{Grads, Op, Vjp};
use crate::types::{DType, TensorType};

/// The keys of its segment that a query sees. Positions are aligned so that the last query meets the last key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mask {
    Full,
    Causal,
    /// Keys from `back` before to `ahead` after the query, both inclusive.
    Window {
        back: usize,
        ahead: usize,
    },
    /// Given by an i32 input [Tq, 4]: key rows [a, b) and [c, d) of the whole key tensor.
    TwoIntervals,
}

/// The division of the token axis into sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Segments {
    /// Equal lengths, known when the graph is built.
    Uniform { len: usize },
    /// Two i32 inputs start [S], len [S] of static capacity; a length of 0 is an unused entry.
    Ragged { max_segments: usize, max_len: usize },
}

impl Segments {
    pub(super) fn inputs(self) -> usize {
        if matches!(self, Segments::Ragged { .. }) { 2 } else { 0 }
    }
}

impl Attr for Mask {
    fn to_text(&self) -> String {
        match self {
            Mask::Full => "full".into(),
            Mask::Causal => "causal".into(),
            Mask::Window { back, ahead } => format!("window:{back}:{ahead}"),
            Mask::TwoIntervals => "two_intervals".into(),
        }
    }
    fn read(text: &str) -> Result<Self, String> {
        match text.split(':').collect::<Vec<_>>()[..] {
            ["full"] => Ok(Mask::Full),
            ["causal"] => Ok(Mask::Causal),
            ["window", back, ahead] => {
                Ok(Mask::Window { back: usize::read(back)?, ahead: usize::read(ahead)? })
            }
            ["two_intervals"] => Ok(Mask::TwoIntervals),
            _ => Err(format!("`{text}` is not a mask")),
        }
    }
}

impl Attr for Segments {
    fn to_text(&self) -> String {
        match self {
            Segments::Uniform { len } => format!("uniform:{len}"),
            Segments::Ragged { max_segments, max_len } => format!("ragged:{max_segments}:{max_len}"),
        }
    }
    fn read(text: &str) -> Result<Self, String> {
        match text.split(':').collect::<Vec<_>>()[..] {
            ["uniform", len] => Ok(Segments::Uniform { len: usize::read(len)? }),
            ["ragged", s, l] => {
                Ok(Segments::Ragged { max_segments: usize::read(s)?, max_len: usize::read(l)? })
            }
            _ => Err(format!("`{text}` are not segments")),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attend {
    pub scale: f32,
    pub cap: Cap,
    pub mask: Mask,
    pub q: Segments,
    pub k: Segments,
}

impl Attend {
    pub fn op(&self) -> Op {
        let Attend { scale, cap, mask, q, k } = *self;
        Op::Attention { scale, cap, mask, q, k }
    }
}

/// The tensors that a mask and ragged segments need, in the order of the operation's inputs.
#[derive(Clone, Copy, Default)]
pub struct Masking<'g> {
    /// (start, len) of the queries' segments.
    pub q: Option<(Tensor<'g>, Tensor<'g>)>,
    pub k: Option<(Tensor<'g>, Tensor<'g>)>,
    pub intervals: Option<Tensor<'g>>,
}

impl<'g> Masking<'g> {
    pub fn tensors(&self) -> impl Iterator<Item = Tensor<'g>> + use<'g> {
        let pairs = [self.q, self.k].into_iter().flatten().flat_map(|(start, len)| [start, len]);
        pairs.chain(self.intervals)
    }
}

/// The number of inputs of the forward operation.
pub fn inputs(mask: Mask, q: Segments, k: Segments) -> usize {
    3 + q.inputs() + k.inputs() + (mask == Mask::TwoIntervals) as usize
}

pub fn infer(mask: Mask, q: Segments, k: Segments, ins: &[&TensorType]) -> Result<Vec<TensorType>, String> {
    arity(ins, inputs(mask, q, k))?;
    let (tq, tk) = (ins[0], ins[1]);
    if tq.rank() != 3 || tk.rank() != 3 || !tq.dtype.is_float() {
        return Err(format!("q is {tq} and k {tk}, wanted floats [tokens, heads, head size]"));
    }
    let (h, hk) = (tq.dims[1], tk.dims[1]);
    if hk == 0 || h % hk != 0 || tq.dims[2] != tk.dims[2] || tq.dtype != tk.dtype {
        return Err(format!("q {tq} does not attend to k {tk}"));
    }
    expect("v", ins[2], tk.dtype, &tk.dims)?;
    let sq = count("queries", q, tq.dims[0], &ins[3..])?;
    let sk = count("keys", k, tk.dims[0], &ins[3 + q.inputs()..])?;
    if sq != sk {
        return Err(format!("{sq} segments of queries and {sk} of keys do not pair up"));
    }
    if mask == Mask::TwoIntervals {
        expect("intervals", ins[ins.len() - 1], DType::I32, &[tq.dims[0], 4])?;
    }
    Ok(vec![tq.clone(), TensorType::new(tq.dtype.accumulator(), [tq.dims[0], h])])
}

/// Number of segments of a token axis; where they are ragged, `bounds` begins with starts and lengths.
pub(super) fn count(
    what: &str,
    segments: Segments,
    tokens: usize,
    bounds: &[&TensorType],
) -> Result<usize, String> {
    match segments {
        Segments::Uniform { len } if len > 0 && tokens.is_multiple_of(len) => Ok(tokens / len),
        Segments::Uniform { len } => Err(format!("{tokens} {what} do not cut into segments of {len}")),
        Segments::Ragged { max_segments, .. } => {
            expect("segment starts", bounds[0], DType::I32, &[max_segments])?;
            expect("segment lengths", bounds[1], DType::I32, &[max_segments])?;
            Ok(max_segments)
        }
    }
}

pub fn infer_grad(
    mask: Mask,
    q: Segments,
    k: Segments,
    d_lse: bool,
    ins: &[&TensorType],
) -> Result<Vec<TensorType>, String> {
    let n = inputs(mask, q, k);
    arity(ins, n + 3 + d_lse as usize)?;
    let forward = infer(mask, q, k, &ins[..n])?;
    expect("o", ins[n], forward[0].dtype, &forward[0].dims)?;
    expect("lse", ins[n + 1], forward[1].dtype, &forward[1].dims)?;
    expect("do", ins[n + 2], forward[0].dtype, &forward[0].dims)?;
    if d_lse {
        expect("d lse", ins[n + 3], forward[1].dtype, &forward[1].dims)?;
    }
    Ok(vec![ins[0].clone(), ins[1].clone(), ins[2].clone()])
}

/// Number of query-key pairs per head; an upper bound where lengths are only known on the device.
pub fn pairs(mask: Mask, q: Segments, k: Segments, ins: &[&TensorType]) -> usize {
    let (tq, tk) = (ins[0].dims[0], ins[1].dims[0]);
    let len = |s: Segments, tokens: usize| match s {
        Segments::Uniform { len } => len,
        Segments::Ragged { max_len, .. } => max_len.min(tokens),
    };
    let (lq, lk) = (len(q, tq), len(k, tk));
    match mask {
        Mask::Full => tq * lk,
        // Intervals cover tokens before the query: half of a segment on average, at most.
        Mask::TwoIntervals => tq * lk.div_ceil(2),
        Mask::Causal if lq <= lk => tq * (lk - lq) + tq * (lq + 1) / 2,
        Mask::Causal => tq * lk / 2,
        // With as many keys as queries, queries at the ends of a segment have fewer keys on one side.
        Mask::Window { back, ahead } if lq == lk && lq > 0 => {
            tq * (lq + within(lq, back) + within(lq, ahead)) / lq
        }
        Mask::Window { back, ahead } => tq * lk.min(back + ahead + 1),
    }
}

/// Number of pairs of a row of `len` elements at a distance of at most `most`, to one side.
fn within(len: usize, most: usize) -> usize {
    let most = most.min(len - 1);
    most * len - most * (most + 1) / 2
}

pub fn vjp<'g>(b: &'g Builder, op: &Op, at: &Vjp<'_, 'g>) -> Grads<'g> {
    let Op::Attention { scale, cap, mask, q, k } = *op else { unreachable!("called for attention") };
    let mut grads = vec![None; at.ins.len()];
    let (o, lse) = (at.outs[0], at.outs[1]);
    let d_o = at.d[0].unwrap_or_else(|| b.fill(0.0, o.dtype(), &o.dims()));
    let ins: Vec<_> = at.ins.iter().copied().chain([o, lse, d_o]).chain(at.d[1]).collect();
    let outs = b.ops(Op::AttentionGrad { scale, cap, mask, q, k, d_lse: at.d[1].is_some() }, &ins);
    for (i, d) in outs.into_iter().enumerate() {
        grads[i] = Some(d);
    }
    grads
}

/// Materialises and masks the scores; their softmax times v. Equal segments are a batch axis; otherwise scores cover all pairs
/// of tokens, and 0/1 matrices match tokens to segments.
pub fn expand<'g>(b: &'g Builder, attend: &Attend, ins: &[Tensor<'g>]) -> Vec<Tensor<'g>> {
    let Attend { scale, cap, mask, q: q_segments, k: k_segments } = *attend;
    let (qt, kt) = (ins[0].ty(), ins[1].ty());
    let (h, n, hk) = (qt.dims[1], qt.dims[2], kt.dims[1]);
    let wide = qt.dtype.accumulator();
    // S sequences of TQ queries and TK keys. Intervals index the rows of all keys, so they need one sequence.
    let (tq, tk) = match (q_segments, k_segments) {
        (Segments::Uniform { len: tq }, Segments::Uniform { len: tk }) if mask != Mask::TwoIntervals => {
            (tq, tk)
        }
        _ => (qt.dims[0], kt.dims[0]),
    };
    let s = qt.dims[0] / tq;
    let rows = h / hk * tq;
    // Heads that share keys become rows of one product: [S * HK, H/HK * TQ, K].
    let q = ins[0].cast(wide).reshape(&[s, tq, hk, h / hk, n]).transpose(&[0, 2, 3, 1, 4]);
    let q = q.reshape(&[s * hk, rows, n]);
    let keyed = |x: Tensor<'g>| {
        x.cast(wide).reshape(&[s, tk, hk, n]).transpose(&[0, 2, 1, 3]).reshape(&[s * hk, tk, n])
    };
    let (k, v) = (keyed(ins[1]), keyed(ins[2]));

    let q_inputs = &ins[3..];
    let k_inputs = &ins[3 + q_segments.inputs()..];
    let allowed =
        allowed(b, wide, mask, [q_segments, k_segments], [q_inputs, k_inputs], tq, tk, ins[ins.len() - 1]);
    let allowed = allowed.reshape(&[1, 1, tq, tk]).broadcast(&[s * hk, h / hk, tq, tk]);
    let allowed = allowed.reshape(&[s * hk, rows, tk]);

    let scores = cap.apply(q.product(k, false, true).scale(scale as f64));
    let scores = allowed.select(scores, b.fill(-1e30, wide, &[s * hk, rows, tk]));
    let shift = scores.reduce(2, Fold::Max);
    let p = allowed * (scores - shift).exp();
    let total = p.sum(2);
    let empty = total.equal(b.fill(0.0, wide, &[s * hk, rows, 1]));
    let o = (p * (total + empty).recip()).product(v, false, false);
    // After the select, so that the gradient of an empty row's logarithm is 0 and not 0/0.
    let none = b.fill(f64::NEG_INFINITY, wide, &[s * hk, rows, 1]);
    let lse = empty.select(none, shift + (total + empty).log());
    let o = o.reshape(&[s, hk, h / hk, tq, n]).transpose(&[0, 3, 1, 2, 4]);
    let o = o.reshape(&[s * tq, h, n]).cast(qt.dtype);
    let lse = lse.reshape(&[s, h, tq]).transpose(&[0, 2, 1]).reshape(&[s * tq, h]);
    vec![o, lse]
}

/// 1 where a query may see a key: [Tq, Tk].
#[allow(clippy::too_many_arguments, reason = "the arguments are the operation's own")]
pub(super) fn allowed<'g>(
    b: &'g Builder,
    wide: DType,
    mask: Mask,
    segments: [Segments; 2],
    inputs: [&[Tensor<'g>]; 2],
    tq: usize,
    tk: usize,
    intervals: Tensor<'g>,
) -> Tensor<'g> {
    let count = match segments[0] {
        Segments::Uniform { len } => tq / len,
        Segments::Ragged { max_segments, .. } => max_segments,
    };
    // Starts and lengths as [1, S], whether static or read from the device.
    let bounds = |s: Segments, inputs: &[Tensor<'g>]| match s {
        Segments::Uniform { len } => {
            (b.iota(wide, &[1, count], 1).scale(len as f64), b.fill(len as f64, wide, &[1, count]))
        }
        Segments::Ragged { .. } => {
            (inputs[0].cast(wide).reshape(&[1, count]), inputs[1].cast(wide).reshape(&[1, count]))
        }
    };
    let (q_start, q_len) = bounds(segments[0], inputs[0]);
    let (k_start, k_len) = bounds(segments[1], inputs[1]);
    let member = |tokens: usize, start: Tensor<'g>, len: Tensor<'g>| {
        let row = b.iota(wide, &[tokens, count], 0);
        start.broadcast(&[tokens, count]).less_equal(row) * row.less(start + len)
    };
    let (in_q, in_k) = (member(tq, q_start, q_len), member(tk, k_start, k_len));
    let same = in_q.product(in_k, false, true);
    if mask == Mask::Full {
        return same;
    }
    if mask == Mask::TwoIntervals {
        let row = b.iota(wide, &[tq, tk], 1);
        let edge = |i: usize| intervals.slice(1, i, 1).cast(wide).broadcast(&[tq, tk]);
        let inside = |i: usize| edge(i).less_equal(row) * row.less(edge(i + 1));
        let (one, two) = (inside(0), inside(2));
        return same * (one + two - one * two);
    }
    // The key row of a query: its own row, shifted so that the last query meets the last key.
    let shift = in_q.product((k_start + k_len) - (q_start + q_len), false, true);
    let stand = (b.iota(wide, &[tq, 1], 0) + shift).broadcast(&[tq, tk]);
    let key = b.iota(wide, &[tq, tk], 1);
    match mask {
        Mask::Causal => same * key.less_equal(stand),
        Mask::Window { back, ahead } => {
            same * stand.offset(-(back as f64)).less_equal(key) * key.less_equal(stand.offset(ahead as f64))
        }
        Mask::Full | Mask::TwoIntervals => unreachable!("returned above"),
    }
}

pub fn expand_grad<'g>(b: &'g Builder, op: &Op, ins: &[Tensor<'g>]) -> Vec<Tensor<'g>> {
    let Op::AttentionGrad { scale, cap, mask, q, k, d_lse } = *op else {
        unreachable!("called for its gradient")
    };
    let n = inputs(mask, q, k);
    let wrt = distinct(b, &ins[..3]);
    let forward: Vec<_> = wrt.iter().chain(&ins[3..n]).copied().collect();
    let outs = expand(b, &Attend { scale, cap, mask, q, k }, &forward);
    let mut seeds = vec![(outs[0], ins[n + 2])];
    if d_lse {
        seeds.push((outs[1], ins[n + 3]));
    }
    gradients(b, &seeds, &wrt)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn window_pair_counts_are_exact() {
        let q = |tokens| TensorType::new(DType::F32, [tokens, 1, 1]);
        for (len, back, ahead) in
            [(7, 3, 0), (7, 0, 0), (7, 6, 0), (7, 90, 0), (7, 2, 2), (8, 3, 90), (1, 5, 5)]
        {
            let sees = |i: usize, j: usize| j + back >= i && j <= i + ahead;
            let shown =
                (0..len).flat_map(|i| (0..len).map(move |j| (i, j))).filter(|(i, j)| sees(*i, *j)).count();
            let of = Segments::Uniform { len };
            let both = [&q(3 * len), &q(3 * len)];
            assert_eq!(pairs(Mask::Window { back, ahead }, of, of, &both), 3 * shown, "{len} {back} {ahead}");
        }
        let (of, both) = (Segments::Uniform { len: 9 }, [&q(18), &q(18)]);
        assert_eq!(
            pairs(Mask::Window { back: 8, ahead: 0 }, of, of, &both),
            pairs(Mask::Causal, of, of, &both),
            "a window of the whole segment is none"
        );
    }
}
