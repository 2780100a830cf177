//! Attention over equal sequences in bf16, as operation graphs of cuDNN.
//!
//! B sequences of T tokens, H query heads, HK key heads, head size D. cuDNN sees tensors [B, H, T, D] through strides into the
//! token-major buffers, so only lse is moved: cuDNN keeps its statistics dense [B, H, T], which a small kernel transposes to
//! our [B T, H] and back. Its accumulators in our dense scratch need no clearing.
//!
//! cuDNN's backward pass accumulates dq from several blocks in arbitrary order. The deterministic form computes dq in a single
//! product instead, for which cuDNN stores all scores in bf16: it runs over a few sequences, or a few heads of one, at a time.

use std::borrow::Cow;

use flatout_ir::ops::attention::{Mask, Segments};
use flatout_ir::types::DType;
use flatout_ir::{Launch, View};

use super::Problem;
use super::cudnn::{Data, Dims, Graph, Pointwise, Reduce, T, dense, transposed_axes};
use super::scratch::{ALIGN, Scratch};
use crate::cuda::context::{
    Arg, CudaError, Facts, Prepare, Prepared, Source, Work, launch as kernel_launch, sequence,
};

/// The oldest version the graphs were tested with: 9.14.
const LEAST_VERSION: u32 = 91400;
/// Head sizes and lengths cuDNN is used for; our kernels handle all others.
const HEAD_SIZES: std::ops::RangeInclusive<usize> = 32..=256;
pub(super) const LEAST_TOKENS: usize = 33;
/// Workspace that cuDNN needs beyond the terms of the formulas: 256 bytes were seen.
const SLACK: usize = 1 << 20;

/// Whether cuDNN serves a problem, provided the library is present and new enough.
pub(super) fn serves(p: &Problem, facts: &Facts) -> bool {
    facts.cudnn.is_some_and(|version| version >= LEAST_VERSION) && has_shapes(p)
}

/// Whether o, or all gradients, are requested.
pub(super) fn takes(p: &Problem, launch: &Launch) -> bool {
    if p.grad { launch.outs.iter().all(Option::is_some) } else { launch.outs[0].is_some() }
}

/// The part of `serves` that depends on shapes alone.
fn has_shapes(p: &Problem) -> bool {
    let mask = match p.mask {
        Mask::Full | Mask::Causal => true,
        Mask::Window { ahead, .. } => ahead == 0,
        Mask::TwoIntervals => false,
    };
    p.dtype == DType::BF16
        && has_equal_sequences(p)
        && p.tq == p.tk
        && mask
        && has_size(p)
        && p.q_longest() >= LEAST_TOKENS
        // cuDNN's backward pass computes sum(do o) itself, without a gradient of lse.
        && !p.d_lse
}

fn has_equal_sequences(p: &Problem) -> bool {
    matches!((p.q, p.k), (Segments::Uniform { len: q }, Segments::Uniform { len: k }) if q == k)
}

fn has_size(p: &Problem) -> bool {
    HEAD_SIZES.contains(&p.size) && p.size.is_multiple_of(8)
}

/// If only the head size keeps cuDNN from serving a problem, a sentence that says so: a user may choose another.
pub(super) fn unserved(p: &Problem) -> Option<String> {
    let is_alike = p.dtype == DType::BF16 && has_equal_sequences(p) && p.q_longest() >= LEAST_TOKENS;
    let (least, most) = (HEAD_SIZES.start(), HEAD_SIZES.end());
    (is_alike && !has_size(p))
        .then(|| format!("cuDNN takes heads of {least} to {most} in steps of 8, not of {}", p.size))
}

pub(super) fn source() -> Source {
    let code = Cow::Borrowed(concat!(include_str!("../prelude.cuh"), include_str!("dense.cu")));
    Source { name: "attention/dense.cu", code, defines: vec![] }
}

/// Extents of an operation graph.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Extents {
    batch: usize,
    heads: usize,
    kv_heads: usize,
    tokens: usize,
    size: usize,
}

impl Extents {
    fn of(p: &Problem) -> Self {
        let tokens = p.q_longest();
        Extents { batch: p.tq / tokens, heads: p.heads, kv_heads: p.kv_heads, tokens, size: p.size }
    }

    /// Bytes of [B, H, T] in f32.
    fn row_bytes(&self) -> usize {
        (4 * self.batch * self.heads * self.tokens).next_multiple_of(ALIGN)
    }

    /// Bytes of [B, H, T, D] in f32: the accumulators of dq, or dk and dv per query head in bf16.
    fn wide_bytes(&self) -> usize {
        (4 * self.batch * self.heads * self.tokens * self.size).next_multiple_of(ALIGN)
    }

    /// cuDNN's workspace for a backward graph with these extents.
    fn backward_bytes(&self, deterministic: bool) -> usize {
        let full_heads = if self.heads == self.kv_heads { 0 } else { self.wide_bytes() };
        let scores = 2 * self.batch * self.heads * self.tokens * self.tokens;
        full_heads + SLACK + if deterministic { scores.next_multiple_of(ALIGN) } else { 0 }
    }

    /// The extents of `batch` sequences and `kv_heads` key heads of the problem.
    fn part(&self, batch: usize, kv_heads: usize) -> Self {
        Extents { batch, kv_heads, heads: self.heads / self.kv_heads * kv_heads, ..*self }
    }

    /// All scratch of the form that does not store scores.
    fn fast_bytes(&self) -> usize {
        2 * self.row_bytes() + self.wide_bytes() + self.backward_bytes(false)
    }

    /// The extents that the deterministic form processes at a time: as many sequences as fit in the scratch of the other form,
    /// otherwise as many key heads of one sequence, at least one.
    fn deterministic_part(&self) -> Extents {
        let room = self.fast_bytes().saturating_sub(2 * self.row_bytes());
        let fits = |e: &Extents| e.backward_bytes(true) <= room;
        let divisors = |n: usize| (1..=n).rev().filter(move |d| n.is_multiple_of(*d));
        let whole = divisors(self.batch).map(|b| self.part(b, self.kv_heads)).find(fits);
        let cut = || divisors(self.kv_heads).map(|h| self.part(1, h)).find(fits);
        whole.or_else(cut).unwrap_or_else(|| self.part(1, 1))
    }
}

/// Upper bound on the scratch of either form.
pub(super) fn workspace(p: &Problem) -> usize {
    if !has_shapes(p) {
        return 0;
    }
    let e = Extents::of(p);
    if !p.grad {
        return e.row_bytes() + SLACK;
    }
    let deterministic = 2 * e.row_bytes() + e.deterministic_part().backward_bytes(true);
    e.fast_bytes().max(deterministic)
}

// Ids of the tensors in memory.
pub(super) const Q: i64 = 1;
pub(super) const K: i64 = 2;
pub(super) const V: i64 = 3;
pub(super) const O: i64 = 4;
pub(super) const STATS: i64 = 5;
pub(super) const D_O: i64 = 6;
pub(super) const DQ: i64 = 7;
pub(super) const DK: i64 = 8;
pub(super) const DV: i64 = 9;
pub(super) const SUM: i64 = 10;
pub(super) const DQ_SUM: i64 = 11;

/// The strides [B, H, T, D] of a token-major view of sequences of `tokens` tokens.
fn strides(view: &View, tokens: usize) -> Dims {
    let token = if view.dims[0] == 1 { view.dims[1] * view.dims[2] } else { view.strides[0] } as i64;
    let head = if view.dims[1] == 1 { view.dims[2] } else { view.strides[1] } as i64;
    [tokens as i64 * token, head, token, 1]
}

/// The inputs that both graphs are built from.
struct Shape {
    e: Extents,
    scale: f32,
    mask: Mask,
}

impl Shape {
    fn queries(&self) -> Dims {
        [self.e.batch, self.e.heads, self.e.tokens, self.e.size].map(|x| x as i64)
    }
    fn keys(&self) -> Dims {
        [self.e.batch, self.e.kv_heads, self.e.tokens, self.e.size].map(|x| x as i64)
    }
    fn scores(&self) -> Dims {
        [self.e.batch, self.e.heads, self.e.tokens, self.e.tokens].map(|x| x as i64)
    }
    fn rows(&self) -> Dims {
        [self.e.batch, self.e.heads, self.e.tokens, 1].map(|x| x as i64)
    }

    /// The key of a plan without the strides.
    fn key(&self, form: i64) -> Vec<i64> {
        let mask = match self.mask {
            Mask::Full => [0, 0],
            Mask::Causal => [1, 0],
            Mask::Window { back, .. } => [2, back as i64],
            Mask::TwoIntervals => [3, 0],
        };
        let mut key = vec![form, self.scale.to_bits() as i64];
        key.extend(mask);
        key.extend(self.queries());
        key.push(self.e.kv_heads as i64);
        key
    }
}

/// Masks the keys that a query does not attend to. A window of `back` keys before the query's own is the causal mask together
/// with column + back + 1 > row.
pub(super) fn apply_mask(g: &mut Graph, mask: Mask, scores: T) -> Result<T, CudaError> {
    if mask == Mask::Full {
        return Ok(scores);
    }
    let (row, column) = (g.index(scores, 2, Data::Float)?, g.index(scores, 3, Data::Float)?);
    let keep = g.compare(Pointwise::CmpGe, row, column)?;
    let hidden = g.scalar(f32::NEG_INFINITY)?;
    let seen = g.select(scores, hidden, keep)?;
    let Mask::Window { back, .. } = mask else { return Ok(seen) };
    let (row, column) = (g.index(seen, 2, Data::Float)?, g.index(seen, 3, Data::Float)?);
    let reach = g.scalar(back as f32 + 1.0)?;
    let reached = g.binary(Pointwise::Add, column, reach, Data::Float)?;
    let keep = g.compare(Pointwise::CmpGt, reached, row)?;
    let hidden = g.scalar(f32::NEG_INFINITY)?;
    g.select(seen, hidden, keep)
}

/// o = softmax(scale q k^T) v, and the log-sum-exp of each row.
fn forward(g: &mut Graph, s: &Shape, [q, k, v, o]: [Dims; 4]) -> Result<(), CudaError> {
    let (queries, keys, scores, rows) = (s.queries(), s.keys(), s.scores(), s.rows());
    let q = g.real(Q, queries, q, Data::Bf16)?;
    let k = g.real(K, transposed_axes(keys), transposed_axes(k), Data::Bf16)?;
    let v = g.real(V, keys, v, Data::Bf16)?;
    let o = g.real(O, queries, o, Data::Bf16)?;
    let stats = g.real(STATS, rows, dense(rows), Data::Float)?;

    let products = g.hidden(scores, dense(scores), Data::Float)?;
    g.matmul(q, k, products)?;
    let scale = g.scalar(s.scale)?;
    let x = g.binary(Pointwise::Mul, products, scale, Data::Float)?;
    let x = apply_mask(g, s.mask, x)?;
    let top = g.hidden(rows, dense(rows), Data::Float)?;
    g.reduce(Reduce::Max, x, top)?;
    let below = g.binary(Pointwise::Sub, x, top, Data::Float)?;
    let e = g.unary(Pointwise::Exp, below)?;
    let total = g.hidden(rows, dense(rows), Data::Float)?;
    g.reduce(Reduce::Add, e, total)?;
    let log = g.unary(Pointwise::Log, total)?;
    g.pointwise(Pointwise::Add, top, Some(log), stats)?;
    let p = g.binary(Pointwise::Div, e, total, Data::Bf16)?;
    g.matmul(p, v, o)
}

/// The strides of the backward graph's tensors.
#[derive(Clone, Copy)]
struct Strides {
    q: Dims,
    k: Dims,
    v: Dims,
    o: Dims,
    d_o: Dims,
    dq: Dims,
    dk: Dims,
    dv: Dims,
}

impl Strides {
    fn all(&self) -> [Dims; 8] {
        [self.q, self.k, self.v, self.o, self.d_o, self.dq, self.dk, self.dv]
    }
}

/// p = exp(scale q k^T - stats); dv = p^T do; ds = scale p (do v^T - sum(do o)); dk = ds^T q; dq = ds k.
fn backward(g: &mut Graph, s: &Shape, at: &Strides, deterministic: bool) -> Result<(), CudaError> {
    let (queries, keys, scores, rows) = (s.queries(), s.keys(), s.scores(), s.rows());
    let [batch, head, ..] = dense(scores);
    let transposed = [batch, head, 1, s.e.tokens as i64];
    let q = g.real(Q, queries, at.q, Data::Bf16)?;
    let k = g.real(K, transposed_axes(keys), transposed_axes(at.k), Data::Bf16)?;
    let v = g.real(V, transposed_axes(keys), transposed_axes(at.v), Data::Bf16)?;
    let o = g.real(O, queries, at.o, Data::Bf16)?;
    let d_o = g.real(D_O, queries, at.d_o, Data::Bf16)?;
    let stats = g.real(STATS, rows, dense(rows), Data::Float)?;
    let dq = g.real(DQ, queries, at.dq, Data::Bf16)?;
    let dk = g.real(DK, keys, at.dk, Data::Bf16)?;
    let dv = g.real(DV, keys, at.dv, Data::Bf16)?;
    let sum = g.real(SUM, rows, dense(rows), Data::Float)?;
    let scale = g.scalar(s.scale)?;

    // Without the multiplication by 1 the engine stores all scores in f32.
    let product = g.hidden(queries, dense(queries), Data::Float)?;
    g.pointwise(Pointwise::Mul, d_o, Some(o), product)?;
    let folded = g.hidden(rows, dense(rows), Data::Float)?;
    g.reduce(Reduce::Add, product, folded)?;
    let one = g.scalar(1.0)?;
    g.pointwise(Pointwise::Mul, folded, Some(one), sum)?;

    let products = g.hidden(scores, dense(scores), Data::Float)?;
    g.matmul(q, k, products)?;
    let x = g.binary(Pointwise::Mul, products, scale, Data::Float)?;
    let x = g.binary(Pointwise::Sub, x, stats, Data::Float)?;
    let x = apply_mask(g, s.mask, x)?;
    let p = g.unary(Pointwise::Exp, x)?;

    // Gradients of query heads that share a key head are summed.
    let to_keys = |g: &mut Graph, left: T, right: T, to: T| {
        if s.e.heads == s.e.kv_heads {
            return g.matmul(left, right, to);
        }
        let full = g.hidden(queries, dense(queries), Data::Bf16)?;
        g.matmul(left, right, full)?;
        g.reduce(Reduce::Add, full, to)
    };
    let pt = g.hidden(scores, transposed, Data::Bf16)?;
    g.reshape(p, pt)?;
    to_keys(g, pt, d_o, dv)?;

    let dp = g.hidden(scores, dense(scores), Data::Float)?;
    g.matmul(d_o, v, dp)?;
    let x = g.binary(Pointwise::Sub, dp, sum, Data::Float)?;
    let x = g.binary(Pointwise::Mul, x, p, Data::Float)?;
    let ds = g.binary(Pointwise::Mul, x, scale, Data::Float)?;
    let dst = g.hidden(scores, transposed, Data::Bf16)?;
    g.reshape(ds, dst)?;
    to_keys(g, dst, q, dk)?;

    let back = g.hidden(keys, at.k, Data::Float)?;
    g.reshape(k, back)?;
    if deterministic {
        return g.matmul(ds, back, dq);
    }
    let dq_sum = g.real(DQ_SUM, queries, dense(queries), Data::Float)?;
    g.matmul(ds, back, dq_sum)?;
    g.pointwise(Pointwise::Identity, dq_sum, None, dq)
}

/// Converts between lse and cuDNN's statistics.
fn transposition(
    entry: &str,
    [from, to]: [u64; 2],
    lse: &View,
    e: &Extents,
    p: &Prepare<'_>,
) -> Result<Box<dyn Work>, CudaError> {
    let row = if lse.dims[0] == 1 { e.heads } else { lse.strides[0] };
    let args = vec![
        Arg::Ptr(from),
        Arg::Ptr(to),
        Arg::I32(e.tokens as i32),
        Arg::I32(e.heads as i32),
        Arg::I64(row as i64),
    ];
    let grid = [(e.tokens.div_ceil(32) * e.batch) as u32, e.heads.div_ceil(32) as u32, 1];
    Ok(kernel_launch(p.function(&source(), entry)?, grid, 256, 0, args))
}

pub(super) fn prepare(problem: &Problem, launch: &Launch, p: &Prepare<'_>) -> Prepared {
    if problem.grad { prepare_backward(problem, launch, p) } else { prepare_forward(problem, launch, p) }
}

fn prepare_forward(problem: &Problem, launch: &Launch, p: &Prepare<'_>) -> Prepared {
    let cudnn = p.cudnn()?;
    let e = Extents::of(problem);
    let shape = Shape { e, scale: problem.scale, mask: problem.mask };
    let o = launch.outs[0].as_ref().ok_or_else(|| CudaError::new("attention without its output"))?;
    let views = [&launch.ins[0], &launch.ins[1], &launch.ins[2], o];
    let at = views.map(|view| strides(view, e.tokens));
    let key = [shape.key(0), at.concat()].concat();
    let plan = cudnn.plan(&key, |g| forward(g, &shape, at))?;

    let mut scratch = Scratch::of(launch, p);
    let stats = scratch.take(e.row_bytes())?;
    let workspace = scratch.take(plan.workspace_bytes)?;
    let [q, k, v, o] = views.map(|view| p.address(view));
    let tensors = [(Q, q), (K, k), (V, v), (O, o), (STATS, stats)];
    let mut works = vec![plan.bind(cudnn, &tensors, workspace)?];
    if let Some(lse) = &launch.outs[1] {
        works.push(transposition("stats_to_lse", [stats, p.address(lse)], lse, &e, p)?);
    }
    Ok(sequence(works))
}

fn prepare_backward(problem: &Problem, launch: &Launch, p: &Prepare<'_>) -> Prepared {
    let cudnn = p.cudnn()?;
    let whole = Extents::of(problem);
    let deterministic = p.facts().deterministic;
    let part = if deterministic { whole.deterministic_part() } else { whole };
    let n = problem.inputs();
    let [Some(dq), Some(dk), Some(dv)] = &launch.outs[..] else {
        return Err(CudaError::new("attention's gradient without one of its outputs"));
    };
    let lse = &launch.ins[n + 1];
    let views =
        [&launch.ins[0], &launch.ins[1], &launch.ins[2], &launch.ins[n], &launch.ins[n + 2], dq, dk, dv];
    let [q, k, v, o, d_o, dq, dk, dv] = views.map(|view| strides(view, whole.tokens));
    let at = Strides { q, k, v, o, d_o, dq, dk, dv };
    let shape = Shape { e: part, scale: problem.scale, mask: problem.mask };
    let key = [shape.key(1 + deterministic as i64), at.all().concat()].concat();
    let plan = cudnn.plan(&key, |g| backward(g, &shape, &at, deterministic))?;

    let mut scratch = Scratch::of(launch, p);
    let (stats, sum) = (scratch.take(part.row_bytes())?, scratch.take(part.row_bytes())?);
    let dq_sum = if deterministic { None } else { Some(scratch.take(whole.wide_bytes())?) };
    let workspace = scratch.take(plan.workspace_bytes)?;

    let mut works = vec![];
    let group = whole.heads / whole.kv_heads;
    for batch in (0..whole.batch).step_by(part.batch) {
        for kv_head in (0..whole.kv_heads).step_by(part.kv_heads) {
            // The parts run one after the other and share one buffer for their statistics.
            let rows = batch * whole.tokens * lse.strides[0] + group * kv_head;
            let from = p.address(lse) + 4 * rows as u64;
            works.push(transposition("lse_to_stats", [from, stats], lse, &part, p)?);
            // q, o, do and dq advance by query heads; k, v, dk and dv by key heads.
            let heads = [group, 1, 1, group, group, group, 1, 1].map(|per| per * kv_head);
            let ids = [Q, K, V, O, D_O, DQ, DK, DV];
            let mut tensors: Vec<(i64, u64)> = (0..views.len())
                .map(|i| {
                    let [of_batch, of_head, ..] = at.all()[i];
                    let elements = batch as i64 * of_batch + heads[i] as i64 * of_head;
                    (ids[i], p.address(views[i]) + 2 * elements as u64)
                })
                .collect();
            tensors.extend([(STATS, stats), (SUM, sum)]);
            tensors.extend(dq_sum.map(|at| (DQ_SUM, at)));
            works.push(plan.bind(cudnn, &tensors, workspace)?);
        }
    }
    Ok(sequence(works))
}

#[cfg(test)]
mod tests {
    use super::*;
    use flatout_ir::ops::cap::Cap;

    fn problem(batch: usize, heads: usize, kv_heads: usize, len: usize, size: usize) -> Problem {
        let segments = Segments::Uniform { len };
        Problem {
            grad: true,
            d_lse: false,
            dtype: DType::BF16,
            tq: batch * len,
            tk: batch * len,
            heads,
            kv_heads,
            size,
            scale: 0.125,
            cap: Cap::NONE,
            mask: Mask::Causal,
            q: segments,
            k: segments,
        }
    }

    #[test]
    fn cudnn_serves_equal_sequences_in_bf16() {
        let good = problem(4, 12, 4, 197, 64);
        assert!(has_shapes(&good));
        assert!(has_shapes(&Problem { mask: Mask::Window { back: 100, ahead: 0 }, ..good }));
        let ragged = Segments::Ragged { max_segments: 4, max_len: 197 };
        for bad in [
            Problem { dtype: DType::F32, ..good },
            Problem { size: 60, ..good },
            Problem { size: 264, ..good },
            Problem { mask: Mask::Window { back: 100, ahead: 1 }, ..good },
            Problem { mask: Mask::TwoIntervals, ..good },
            Problem { q: ragged, k: ragged, ..good },
            Problem { q: Segments::Uniform { len: 1 }, tq: 4, ..good },
            Problem { d_lse: true, ..good },
        ] {
            assert!(!has_shapes(&bad), "{bad:?}");
        }
    }

    /// The workspace that cuDNN 9.19 reported, against the formulas.
    #[test]
    fn scratch_is_bounded_in_both_forms() {
        let p = problem(32, 12, 4, 2048, 64);
        let e = Extents::of(&p);
        assert_eq!(e.wide_bytes(), 201_326_592);
        assert_eq!(e.fast_bytes(), 2 * 3_145_728 + 2 * 201_326_592 + SLACK);
        assert_eq!(e.deterministic_part(), e.part(2, 4));
        assert_eq!(workspace(&p), e.fast_bytes());
        // One long sequence is split by key heads.
        let p = problem(1, 16, 8, 8192, 128);
        let e = Extents::of(&p);
        assert_eq!(e.deterministic_part(), e.part(1, 1));
        assert!(workspace(&p) < 300 << 20);
        assert_eq!(Extents::of(&problem(6, 4, 4, 64, 64)).deterministic_part().batch, 6);
    }

    #[test]
    fn a_slice_of_a_fused_buffer_is_described_by_its_strides() {
        let view = View { offset: 0, dtype: DType::BF16, dims: vec![20, 4, 64], strides: vec![512, 64, 1] };
        assert_eq!(strides(&view, 10), [5120, 64, 512, 1]);
    }
}
