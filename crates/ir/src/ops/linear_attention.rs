//! Attention without softmax, token-major: o = M(scale q k^T) v, q [Tq, H, N] over k [Tk, HK, N] and v [Tk, HV, D], where M
//! sets pairs to 0 that the mask excludes. Queries and keys are divided into segments that pair up in order, as in `attention`.
//! Heads may share keys and values, each at its own ratio: head h reads key head h * HK / H and value head h * HV / H.
//!
//! Where the queries r are also the keys, the scores are symmetric before the mask, and both roles share one gradient: with
//! ds = M(scale do v^T), dr = (ds + ds^T) r.
//!
//! The operation may rotate such r as it reads them: its input is then a with r = rope(a), by positions and interleaved pairs,
//! and its output da, rotated back.
//!
//! The gradient of queries may be accumulated onto their other gradients (`Accumulate`).
//!
//! A query that may see no key has o = 0, and so has a row outside every segment.

use super::attention::{self, Mask, Segments};
use super::{arity, expect};
use crate::attr::{Attr, named};
use crate::autodiff::{distinct, gradients};
use crate::builder::{Builder, Tensor};
use crate::ops::elementwise::Elementwise as E;
use crate::ops::frequency::Frequencies;
use crate::ops::rope::{self, Pairs};
use crate::ops::{Grads, Op, Vjp};
use crate::types::TensorType;

named! {
    /// The keys of its segment that a query sees. Positions are aligned so that the last query meets the last key.
    pub enum LinearMask {
        Full = "full",
        /// Keys up to the query's own position.
        Causal = "causal",
        /// Keys before the query's own position.
        Strict = "strict",
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keys {
    /// The queries, with the same heads and segments.
    Queries,
    /// A separate input with these segments.
    Given(Segments),
}

impl Attr for Keys {
    fn to_text(&self) -> String {
        match self {
            Keys::Queries => "queries".into(),
            Keys::Given(segments) => segments.to_text(),
        }
    }
    fn read(text: &str) -> Result<Self, String> {
        if text == "queries" { Ok(Keys::Queries) } else { Segments::read(text).map(Keys::Given) }
    }
}

/// The rotation of queries that are also the keys, as they are read.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rotary {
    None,
    /// By angles computed at every use.
    Angles(Frequencies),
    /// By the cosines and sines of a table.
    Table(Frequencies),
}

impl Rotary {
    pub fn freq(self) -> Option<Frequencies> {
        match self {
            Rotary::None => None,
            Rotary::Angles(freq) | Rotary::Table(freq) => Some(freq),
        }
    }

    pub fn has_table(self) -> bool {
        matches!(self, Rotary::Table(_))
    }

    /// Number of inputs that it needs: positions, and the table.
    pub fn inputs(self) -> usize {
        match self {
            Rotary::None => 0,
            Rotary::Angles(_) => 1,
            Rotary::Table(_) => 2,
        }
    }
}

/// `angles:10000`, `table:10000`.
impl Attr for Rotary {
    fn to_text(&self) -> String {
        match self {
            Rotary::None => "none".into(),
            Rotary::Angles(freq) => format!("angles:{}", freq.to_text()),
            Rotary::Table(freq) => format!("table:{}", freq.to_text()),
        }
    }
    fn read(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "none" => Ok(Rotary::None),
            Some(("angles", freq)) => Frequencies::read(freq).map(Rotary::Angles),
            Some(("table", freq)) => Frequencies::read(freq).map(Rotary::Table),
            _ => Err(format!("`{text}` is no way to rotate queries")),
        }
    }
    fn omitted() -> Option<Self> {
        Some(Rotary::None)
    }
}

named! {
    /// The tensor that the gradient of queries accumulates onto.
    pub enum Accumulate {
        Nothing = "nothing",
        /// Another input.
        Base = "base",
        /// Likewise, and 0 where a query's element is not above 0: the gradient before the ReLU that computed the queries.
        Relu = "relu",
    }
    omitted Nothing
}

impl Accumulate {
    pub fn of(op: &Op) -> Accumulate {
        if let Op::LinearAttentionGrad { accumulate, .. } = op { *accumulate } else { Accumulate::Nothing }
    }
}

/// The attributes that both directions share.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinearAttend {
    pub scale: f32,
    pub mask: LinearMask,
    pub q: Segments,
    pub k: Keys,
    pub rotary: Rotary,
}

impl LinearAttend {
    /// The attributes of an operation, and whether it is the gradient.
    pub fn of(op: &Op) -> Option<(LinearAttend, bool)> {
        match *op {
            Op::LinearAttention { scale, mask, q, k, rotary } => {
                Some((LinearAttend { scale, mask, q, k, rotary }, false))
            }
            Op::LinearAttentionGrad { scale, mask, q, k, rotary, accumulate: _ } => {
                Some((LinearAttend { scale, mask, q, k, rotary }, true))
            }
            _ => None,
        }
    }

    pub fn op(&self) -> Op {
        let LinearAttend { scale, mask, q, k, rotary } = *self;
        Op::LinearAttention { scale, mask, q, k, rotary }
    }

    pub fn grad(&self) -> Op {
        self.accumulating_grad(Accumulate::Nothing)
    }

    pub fn accumulating_grad(&self, accumulate: Accumulate) -> Op {
        let LinearAttend { scale, mask, q, k, rotary } = *self;
        Op::LinearAttentionGrad { scale, mask, q, k, rotary, accumulate }
    }

    /// The attributes for queries that are already rotated.
    pub fn unrotated(&self) -> LinearAttend {
        LinearAttend { rotary: Rotary::None, ..*self }
    }

    pub fn k_segments(&self) -> Segments {
        if let Keys::Given(k) = self.k { k } else { self.q }
    }

    /// Number of tensors among queries, keys and values.
    pub fn tensors(&self) -> usize {
        if self.k == Keys::Queries { 2 } else { 3 }
    }

    /// The number of inputs of the forward operation.
    pub fn inputs(&self) -> usize {
        let of_keys = if let Keys::Given(k) = self.k { k.inputs() } else { 0 };
        self.tensors() + self.q.inputs() + of_keys + self.rotary.inputs()
    }

    /// Index of the positions among the inputs; the table follows them.
    pub fn positions(&self) -> usize {
        self.inputs() - self.rotary.inputs()
    }

    /// The indices of the inputs where the starts and lengths of queries and of keys begin.
    pub fn bounds(&self) -> [usize; 2] {
        let q = self.tensors();
        [q, if self.k == Keys::Queries { q } else { q + self.q.inputs() }]
    }

    /// Number of query-key pairs per head; an upper bound where lengths are only known on the device.
    pub fn pairs(&self, q: &TensorType, k: &TensorType) -> usize {
        let of = |mask: Mask| attention::pairs(mask, self.q, self.k_segments(), &[q, k]);
        match self.mask {
            LinearMask::Full => of(Mask::Full),
            LinearMask::Causal => of(Mask::Causal),
            LinearMask::Strict => of(Mask::Causal).saturating_sub(q.dims[0]),
        }
    }

    /// Arithmetic of the forward pass: two products.
    pub fn flops(&self, ins: &[&TensorType]) -> usize {
        let (q, k, v) = (ins[0], ins[self.tensors() - 2], ins[self.tensors() - 1]);
        2 * self.pairs(q, k) * q.dims[1] * (q.dims[2] + v.dims[2])
    }

    /// Arithmetic of the backward pass: scores and their gradient again, then dq, dk and dv. Without a mask dr is one product,
    /// because ds + ds^T is summed before it.
    pub fn grad_flops(&self, ins: &[&TensorType]) -> usize {
        let (q, k, v) = (ins[0], ins[self.tensors() - 2], ins[self.tensors() - 1]);
        let of_keys = if self.k == Keys::Queries && self.mask == LinearMask::Full { 2 } else { 3 };
        2 * self.pairs(q, k) * q.dims[1] * (of_keys * q.dims[2] + 2 * v.dims[2])
    }
}

/// Pairs of the gradient that may share memory: dq overwrites its base, which is the last input.
pub fn in_place(op: &Op) -> Vec<(usize, usize)> {
    let attend = LinearAttend::of(op).map(|(attend, _)| attend);
    let base = attend.filter(|_| Accumulate::of(op) != Accumulate::Nothing).map(|attend| attend.inputs() + 1);
    base.map(|base| (base, 0)).into_iter().collect()
}

pub fn infer(at: &LinearAttend, ins: &[&TensorType]) -> Result<Vec<TensorType>, String> {
    arity(ins, at.inputs())?;
    let (q, k, v) = (ins[0], ins[at.tensors() - 2], ins[at.tensors() - 1]);
    if q.rank() != 3 || k.rank() != 3 || v.rank() != 3 || !q.dtype.is_float() {
        return Err(format!("q is {q}, k {k} and v {v}, wanted floats [tokens, heads, size]"));
    }
    let divides = |heads: usize| heads > 0 && q.dims[1].is_multiple_of(heads);
    if !divides(k.dims[1]) || q.dims[2] != k.dims[2] || q.dtype != k.dtype {
        return Err(format!("q {q} does not attend to k {k}"));
    }
    if !divides(v.dims[1]) || v.dims[0] != k.dims[0] || v.dtype != k.dtype {
        return Err(format!("{} heads over k {k} do not read v {v}", q.dims[1]));
    }
    let [of_q, of_k] = at.bounds();
    let count = attention::count("queries", at.q, q.dims[0], &ins[of_q..])?;
    let of_keys = attention::count("keys", at.k_segments(), k.dims[0], &ins[of_k..])?;
    if count != of_keys {
        return Err(format!("{count} segments of queries and {of_keys} of keys do not pair up"));
    }
    if at.rotary != Rotary::None {
        if at.k != Keys::Queries {
            return Err("only queries that are their own keys are rotated".into());
        }
        let table = at.rotary.has_table().then(|| ins[at.positions() + 1]);
        rope::check(q, &vec![0; q.dims[2] / 2], ins[at.positions()], table)?;
    }
    Ok(vec![TensorType::new(q.dtype, [q.dims[0], q.dims[1], v.dims[2]])])
}

pub fn infer_grad(
    at: &LinearAttend,
    accumulate: Accumulate,
    ins: &[&TensorType],
) -> Result<Vec<TensorType>, String> {
    let n = at.inputs();
    arity(ins, n + 1 + (accumulate != Accumulate::Nothing) as usize)?;
    let o = infer(at, &ins[..n])?;
    expect("do", ins[n], o[0].dtype, &o[0].dims)?;
    if accumulate != Accumulate::Nothing {
        expect("the base", ins[n + 1], ins[0].dtype, &ins[0].dims)?;
        if matches!(at.q, Segments::Ragged { .. }) {
            return Err("a base is for equal segments: rows of none would have to be copied".into());
        }
    }
    Ok(ins[..at.tensors()].iter().map(|ty| (*ty).clone()).collect())
}

pub fn vjp<'g>(b: &'g Builder, attend: &LinearAttend, at: &Vjp<'_, 'g>) -> Grads<'g> {
    let mut grads = vec![None; at.ins.len()];
    let Some(d) = at.d[0] else { return grads };
    let ins: Vec<_> = at.ins.iter().copied().chain([d]).collect();
    for (i, d) in b.ops(attend.grad(), &ins).into_iter().enumerate() {
        grads[i] = Some(d);
    }
    grads
}

/// The rotation of the queries, or its inverse.
fn rope_of(at: &LinearAttend, size: usize, inverse: bool) -> Option<Op> {
    let freq = at.rotary.freq()?;
    let (axis_of_freq, pairs, table) = (vec![0; size / 2], Pairs::Interleaved, at.rotary.has_table());
    Some(Op::Rope { freq, axis_of_freq, pairs, inverse, table })
}

/// The inputs of unrotated linear attention, forward or backward, and the inverse rotation of its first gradient.
fn unrotated_inputs<'g>(
    b: &'g Builder,
    at: &LinearAttend,
    ins: &[Tensor<'g>],
) -> Option<(Vec<Tensor<'g>>, impl Fn(Tensor<'g>) -> Tensor<'g>)> {
    let size = ins[0].dims()[2];
    let (there, back) = (rope_of(at, size, false)?, rope_of(at, size, true)?);
    let (positions, end) = (at.positions(), at.inputs());
    let by: Vec<_> = ins[positions..end].to_vec();
    let through = move |op: &Op, x: Tensor<'g>| b.op(op.clone(), &[vec![x], by.clone()].concat());
    let r = through(&there, ins[0]);
    let rest = [vec![r], ins[1..positions].to_vec(), ins[end..].to_vec()].concat();
    Some((rest, move |dr| through(&back, dr)))
}

/// Materialises the scores, masks them, and multiplies them by v. Heads that share keys or values read copies of them.
pub fn expand<'g>(b: &'g Builder, at: &LinearAttend, ins: &[Tensor<'g>]) -> Tensor<'g> {
    if let Some((ins, _)) = unrotated_inputs(b, at, ins) {
        return b.op(at.unrotated().op(), &ins);
    }
    let (q, k, v) = (ins[0], ins[at.tensors() - 2], ins[at.tensors() - 1]);
    let (tq, h, tk) = (q.dims()[0], q.dims()[1], k.dims()[0]);
    let wide = q.dtype().accumulator();
    let of_heads = |x: Tensor<'g>| {
        let dims = x.dims();
        let (tokens, heads, size) = (dims[0], dims[1], dims[2]);
        let x = x.cast(wide).transpose(&[1, 0, 2]).reshape(&[heads, 1, tokens, size]);
        x.broadcast(&[heads, h / heads, tokens, size]).reshape(&[h, tokens, size])
    };
    let segments = [at.q, at.k_segments()];
    let bounds = at.bounds().map(|from| &ins[from.min(ins.len())..]);
    let allowed = |mask: Mask| attention::allowed(b, wide, mask, segments, bounds, tq, tk, q);
    let allowed = match at.mask {
        LinearMask::Full => allowed(Mask::Full),
        LinearMask::Causal => allowed(Mask::Causal),
        // The strict mask is the causal one without its diagonal.
        LinearMask::Strict => allowed(Mask::Causal) - allowed(Mask::Window { back: 0, ahead: 0 }),
    };
    let allowed = allowed.reshape(&[1, tq, tk]).broadcast(&[h, tq, tk]);
    // Here too, queries that are also the keys are one tensor, whose gradient is rounded once.
    let queries = of_heads(q);
    let keys = if at.k == Keys::Queries { queries } else { of_heads(k) };
    let scores = queries.product(keys, false, true).scale(at.scale as f64);
    let scores = allowed.select(scores, b.fill(0.0, wide, &[h, tq, tk]));
    scores.product(of_heads(v), false, false).transpose(&[1, 0, 2]).cast(q.dtype())
}

pub fn expand_grad<'g>(
    b: &'g Builder,
    at: &LinearAttend,
    accumulate: Accumulate,
    ins: &[Tensor<'g>],
) -> Vec<Tensor<'g>> {
    if accumulate != Accumulate::Nothing {
        let base = at.inputs() + 1;
        let mut grads = b.ops(at.grad(), &ins[..base]);
        grads[0] = grads[0] + ins[base];
        if accumulate == Accumulate::Relu {
            grads[0] = grads[0] * ins[0].map(E::Step);
        }
        return grads;
    }
    if let Some((ins, back)) = unrotated_inputs(b, at, ins) {
        let mut grads = b.ops(at.unrotated().grad(), &ins);
        grads[0] = back(grads[0]);
        return grads;
    }
    let (tensors, n) = (at.tensors(), at.inputs());
    let wrt = distinct(b, &ins[..tensors]);
    let forward: Vec<_> = wrt.iter().chain(&ins[tensors..n]).copied().collect();
    gradients(b, &[(expand(b, at, &forward), ins[n])], &wrt)
}
