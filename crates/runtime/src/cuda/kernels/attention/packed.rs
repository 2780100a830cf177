//! Attention over ragged segments in bf16, as operation graphs of cuDNN with offsets.
//!
//! S segments of at most L tokens, H query heads, HK key heads, head size D. Extents of the graph are capacities; starts and
//! lengths of segments are read on the device at every run. cuDNN sees tensors [S, H, L, D] through strides into the
//! token-major buffers, and its statistics have the layout of our lse.
//!
//! Only tested configurations are used (cuDNN 9.19 on Hopper; several other formulations build but give wrong results):
//! * queries and keys have the same segments; heads of 64, 128 and 256; no windows;
//! * lengths both bound every product and mask the scores: without the first the library crashes, without the second results
//!   are wrong if lengths are not multiples of its tiles;
//! * the f32 sums of dq have the strides and offsets of dq, which equal those of q; the per-query-head dk and dv, which are
//!   summed over groups of heads, have those of dk and dv times the group size. With q a slice of a wider tensor and dq dense,
//!   dq was wrong. So every tensor is dense, and v and dv, which usually are slices, are copied.
//!
//! Its time grows with S even if segments are empty.

use std::borrow::Cow;

use flatout_ir::ops::attention::{Mask, Segments};
use flatout_ir::types::DType;
use flatout_ir::{Launch, View};

use super::Problem;
use super::call::Call;
use super::cudnn::{Data, Dims, Graph, Pointwise, Reduce, T, dense, transposed_axes};
use super::dense::{D_O, DK, DQ, DQ_SUM, DV, K, LEAST_TOKENS, O, Q, STATS, SUM, V, apply_mask};
use super::scratch::{ALIGN, Scratch};
use super::tiles::{self, Heights};
use crate::cuda::argument::{Block, launch_blocks};
use crate::cuda::context::{Arg, CudaError, Facts, Prepare, Prepared, Source, Work, sequence};

/// The oldest version used; an older one gave silently wrong results for ragged heads of 256, which need the second.
const LEAST_VERSION: u32 = 91800;
const LEAST_VERSION_OF_256: u32 = 91900;
const HEAD_SIZES: [usize; 3] = [64, 128, 256];
/// cuDNN's workspace per segment, which it computes for at least 64 segments; 448 bytes and 1152 more were seen.
const SEGMENT_BYTES: usize = 512;
const SLACK: usize = 64 << 10;
/// Maximum number of tensors with their own offsets, in either direction.
const MOST_OFFSETS: usize = 9;

pub(super) fn serves(p: &Problem, facts: &Facts) -> bool {
    let least = if p.size > 128 { LEAST_VERSION_OF_256 } else { LEAST_VERSION };
    has_shapes(p)
        && facts.major == 9
        && !facts.deterministic
        && facts.cudnn.is_some_and(|version| version >= least)
}

fn has_shapes(p: &Problem) -> bool {
    let is_packed = match (p.q, p.k) {
        // If the longest segment may have one token, cuDNN returned NaN as the log-sum-exp.
        (Segments::Ragged { max_segments, .. }, k) => {
            p.q == k && max_segments > 0 && p.q_longest() >= LEAST_TOKENS
        }
        _ => false,
    };
    is_packed
        && p.tq == p.tk
        && p.dtype == DType::BF16
        && HEAD_SIZES.contains(&p.size)
        && matches!(p.mask, Mask::Full | Mask::Causal)
}

/// Whether queries and keys have the same segments, o or all gradients are requested, and all tensors but v and dv are dense.
pub(super) fn takes(p: &Problem, launch: &Launch) -> bool {
    let (ins, outs, n) = (&launch.ins, &launch.outs, p.inputs());
    let is_same = |a: &View, b: &View| a.offset == b.offset;
    let dense: Vec<Option<&View>> = match p.grad {
        false => vec![outs[0].as_ref(), Some(&ins[0]), Some(&ins[1])],
        true => {
            let read = [0, 1, n, n + 1, n + 2].map(|i| Some(&ins[i]));
            read.into_iter().chain([outs[0].as_ref(), outs[1].as_ref()]).collect()
        }
    };
    let has_lse = p.grad || outs[1].as_ref().is_none_or(View::is_dense);
    let has_dv = !p.grad || outs[2].is_some();
    is_same(&ins[3], &ins[5])
        && is_same(&ins[4], &ins[6])
        && has_lse
        && has_dv
        && dense.into_iter().all(|view| view.is_some_and(View::is_dense))
}

/// Upper bound for any strides of v and dv.
pub(super) fn workspace(p: &Problem) -> usize {
    if !has_shapes(p) {
        return 0;
    }
    let e = Extents::of(p);
    let segments = e.offset_pitch() * MOST_OFFSETS * 8 + 2 * e.length_bytes();
    let rows = aligned(4 * p.tq * p.heads);
    let library = SEGMENT_BYTES * p.segments().max(64) + SLACK;
    let heads = |heads: usize, bytes: usize| aligned(bytes * p.tq * heads * p.size);
    let sums = heads(p.heads, 4);
    let full = if p.heads == p.kv_heads { 0 } else { 2 * heads(p.heads, 2) };
    let copies = heads(p.kv_heads, 2) * if p.grad { 2 } else { 1 };
    segments + rows + library + copies + if p.grad { sums + full } else { 0 }
}

fn aligned(bytes: usize) -> usize {
    bytes.next_multiple_of(ALIGN)
}

fn source() -> Source {
    let code = Cow::Borrowed(concat!(include_str!("../prelude.cuh"), include_str!("packed.cu")));
    Source { name: "attention/packed.cu", code, defines: vec![] }
}

pub(super) fn sources(p: &Problem) -> Vec<Source> {
    [source()].into_iter().chain(tiles::sources(p)).collect()
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Extents {
    segments: usize,
    longest: usize,
    heads: usize,
    kv_heads: usize,
    size: usize,
}

impl Extents {
    fn of(p: &Problem) -> Self {
        let (segments, longest) = (p.segments(), p.q_longest());
        Extents { segments, longest, heads: p.heads, kv_heads: p.kv_heads, size: p.size }
    }

    fn queries(&self) -> Dims {
        [self.segments, self.heads, self.longest, self.size].map(|x| x as i64)
    }
    fn keys(&self) -> Dims {
        [self.segments, self.kv_heads, self.longest, self.size].map(|x| x as i64)
    }
    fn scores(&self) -> Dims {
        [self.segments, self.heads, self.longest, self.longest].map(|x| x as i64)
    }
    fn rows(&self) -> Dims {
        [self.segments, self.heads, self.longest, 1].map(|x| x as i64)
    }
    /// Strides of statistics [tokens, heads].
    fn row_strides(&self) -> Dims {
        let heads = self.heads as i64;
        [self.longest as i64 * heads, 1, heads, 1]
    }

    /// Elements between the offsets of one tensor and those of the next.
    fn offset_pitch(&self) -> usize {
        aligned(8 * (self.segments + 1)) / 8
    }
    fn length_bytes(&self) -> usize {
        aligned(4 * self.segments)
    }
}

/// A token-major tensor: its address, and its strides along tokens and heads.
#[derive(Clone, Copy, Debug, PartialEq)]
struct StridedTensor {
    at: u64,
    token: i64,
    head: i64,
}

impl StridedTensor {
    fn of(view: &View, at: &Prepare<'_>) -> StridedTensor {
        let dense = |axis: usize| view.dims[axis + 1..].iter().product::<usize>();
        let step = |axis: usize| if view.dims[axis] == 1 { dense(axis) } else { view.strides[axis] } as i64;
        StridedTensor { at: at.address(view), token: step(0), head: step(1) }
    }

    /// [S, H, L, D]; the offsets, not the strides, move between segments.
    fn strides(&self, longest: usize) -> Dims {
        [longest as i64 * self.token, self.head, self.token, 1]
    }
}

/// Whether a tensor is read or written.
#[derive(Clone, Copy, PartialEq)]
enum Access {
    Read,
    Write,
}

/// Replaces a view, which may be a slice of a wider tensor, by a dense tensor: the view itself, or scratch and the copy between
/// the two, which must run before or after cuDNN.
fn as_dense(
    p: &Problem,
    view: &View,
    access: Access,
    scratch: &mut Scratch,
    at: &Prepare<'_>,
) -> Result<(StridedTensor, Option<Box<dyn Work>>), CudaError> {
    let strided = StridedTensor::of(view, at);
    if view.is_dense() {
        return Ok((strided, None));
    }
    let (heads, size) = (view.dims[1], view.dims[2]);
    let dense = StridedTensor {
        at: scratch.take(2 * p.tk * heads * size)?,
        token: (heads * size) as i64,
        head: size as i64,
    };
    let (from, to) = if access == Access::Read { (strided, dense) } else { (dense, strided) };
    let args = [
        Arg::Ptr(from.at),
        Arg::Ptr(to.at),
        Arg::I64(p.tk as i64),
        Arg::I32(heads as i32),
        Arg::I32(size as i32),
        Arg::I64(from.token),
        Arg::I64(from.head),
        Arg::I64(to.token),
        Arg::I64(to.head),
    ];
    let function = at.function(&source(), "move_rows")?;
    let blocks = (p.tk * heads * size / 8).div_ceil(1024);
    let copy = launch_blocks(function, [blocks, 1, 1], 1024, 0, args.map(Block::from).into())?;
    Ok((dense, Some(copy)))
}

// Ids in addition to those of equal sequences; the id of a tensor's offsets is its own plus OFFSETS.
const FULL_K: i64 = 12;
const FULL_V: i64 = 13;
const Q_LEN: i64 = 14;
const K_LEN: i64 = 15;
const OFFSETS: i64 = 100;

/// A graph with the offsets and lengths of its segments.
struct Packed<'a> {
    g: &'a mut Graph,
    e: Extents,
    q_len: T,
    k_len: T,
}

impl<'a> Packed<'a> {
    fn new(g: &'a mut Graph, e: Extents) -> Result<Packed<'a>, CudaError> {
        let dims = [e.segments as i64, 1, 1, 1];
        let q_len = g.real(Q_LEN, dims, [1; 4], Data::Int32)?;
        let k_len = g.real(K_LEN, dims, [1; 4], Data::Int32)?;
        Ok(Packed { g, e, q_len, k_len })
    }

    /// The offsets of the tensor with this id.
    fn offsets(&mut self, id: i64) -> Result<T, CudaError> {
        self.g.real(OFFSETS + id, [self.e.segments as i64 + 1, 1, 1, 1], [1; 4], Data::Int64)
    }

    fn tensor(&mut self, id: i64, dims: Dims, strides: Dims) -> Result<T, CudaError> {
        let offsets = self.offsets(id)?;
        self.g.ragged(id, dims, strides, Data::Bf16, offsets)
    }

    /// Masks rows and columns past the segment's end.
    fn within(&mut self, scores: T) -> Result<T, CudaError> {
        let row = self.g.index(scores, 2, Data::Int32)?;
        let column = self.g.index(scores, 3, Data::Int32)?;
        let row_is_in = self.g.compare(Pointwise::CmpLt, row, self.q_len)?;
        let column_is_in = self.g.compare(Pointwise::CmpLt, column, self.k_len)?;
        let keep = self.g.compare(Pointwise::LogicalAnd, row_is_in, column_is_in)?;
        let hidden = self.g.scalar(f32::NEG_INFINITY)?;
        self.g.select(scores, hidden, keep)
    }

    /// Queries times keys.
    fn scores(&mut self, a: T, b: T) -> Result<T, CudaError> {
        let scores = self.g.hidden(self.e.scores(), dense(self.e.scores()), Data::Float)?;
        self.g.matmul_within(a, b, scores, [Some(self.q_len), Some(self.k_len), None])?;
        Ok(scores)
    }

    /// Scores times rows of keys.
    fn sum_keys(&mut self, scores: T, b: T, to: T) -> Result<(), CudaError> {
        self.g.matmul_within(scores, b, to, [Some(self.q_len), None, Some(self.k_len)])
    }

    /// Transposed scores times rows of queries; query heads that share keys are then summed from `full`.
    fn sum_queries(&mut self, transposed: T, b: T, to: T, full: Option<T>) -> Result<(), CudaError> {
        let extents = [Some(self.k_len), None, Some(self.q_len)];
        let Some(full) = full else { return self.g.matmul_within(transposed, b, to, extents) };
        self.g.matmul_within(transposed, b, full, extents)?;
        self.g.reduce(Reduce::Add, full, to)
    }
}

/// o = softmax(scale q k^T) v within segments, and the log-sum-exp of each row.
fn forward(g: &mut Graph, e: Extents, scale: f32, mask: Mask, at: [Dims; 4]) -> Result<(), CudaError> {
    let (queries, keys, rows) = (e.queries(), e.keys(), e.rows());
    let mut b = Packed::new(g, e)?;
    let [q, k, v, o] = at;
    let q = b.tensor(Q, queries, q)?;
    let k = b.tensor(K, transposed_axes(keys), transposed_axes(k))?;
    let v = b.tensor(V, keys, v)?;
    let o = b.tensor(O, queries, o)?;
    let offsets = b.offsets(STATS)?;
    let stats = b.g.ragged(STATS, rows, e.row_strides(), Data::Float, offsets)?;

    let products = b.scores(q, k)?;
    let scale = b.g.scalar(scale)?;
    let x = b.g.binary(Pointwise::Mul, products, scale, Data::Float)?;
    let x = b.within(x)?;
    let x = apply_mask(b.g, mask, x)?;
    let top = b.g.hidden(rows, dense(rows), Data::Float)?;
    b.g.reduce(Reduce::Max, x, top)?;
    let below = b.g.binary(Pointwise::Sub, x, top, Data::Float)?;
    let exp = b.g.unary(Pointwise::Exp, below)?;
    let total = b.g.hidden(rows, dense(rows), Data::Float)?;
    b.g.reduce(Reduce::Add, exp, total)?;
    let log = b.g.unary(Pointwise::Log, total)?;
    b.g.pointwise(Pointwise::Add, top, Some(log), stats)?;
    let p = b.g.binary(Pointwise::Div, exp, total, Data::Bf16)?;
    b.sum_keys(p, v, o)
}

/// As in `dense`, within segments. `at` holds the strides of q, k, v, o, do, dq, dk and dv, in this order.
fn backward(g: &mut Graph, e: Extents, scale: f32, mask: Mask, at: [Dims; 8]) -> Result<(), CudaError> {
    let (queries, keys, scores, rows) = (e.queries(), e.keys(), e.scores(), e.rows());
    let [batch, head, ..] = dense(scores);
    let transposed = [batch, head, 1, e.longest as i64];
    let group = (e.heads / e.kv_heads) as i64;
    let mut b = Packed::new(g, e)?;
    let [q_at, k_at, v_at, o_at, do_at, dq_at, dk_at, dv_at] = at;
    let q = b.tensor(Q, queries, q_at)?;
    let k = b.tensor(K, transposed_axes(keys), transposed_axes(k_at))?;
    let v = b.tensor(V, transposed_axes(keys), transposed_axes(v_at))?;
    let o = b.tensor(O, queries, o_at)?;
    let d_o = b.tensor(D_O, queries, do_at)?;
    let of_rows = b.offsets(STATS)?;
    let stats = b.g.ragged(STATS, rows, e.row_strides(), Data::Float, of_rows)?;
    let sum = b.g.ragged(SUM, rows, e.row_strides(), Data::Float, of_rows)?;
    let (of_dq, of_dk, of_dv) = (b.offsets(DQ)?, b.offsets(DK)?, b.offsets(DV)?);
    let dq = b.g.ragged(DQ, queries, dq_at, Data::Bf16, of_dq)?;
    let dk = b.g.ragged(DK, keys, dk_at, Data::Bf16, of_dk)?;
    let dv = b.g.ragged(DV, keys, dv_at, Data::Bf16, of_dv)?;
    let dq_sum = b.g.ragged(DQ_SUM, queries, dq_at, Data::Float, of_dq)?;
    let full = |b: &mut Packed<'_>, id: i64, [batch, head, token, one]: Dims, offsets: T| {
        let strides = [batch * group, head, token * group, one];
        let full = (group > 1).then(|| b.g.ragged(id, queries, strides, Data::Bf16, offsets));
        full.transpose()
    };
    let full_k = full(&mut b, FULL_K, dk_at, of_dk)?;
    let full_v = full(&mut b, FULL_V, dv_at, of_dv)?;
    let scale = b.g.scalar(scale)?;

    // Without the multiplication by 1 the engine stores all scores in f32.
    let product = b.g.hidden(queries, dense(queries), Data::Float)?;
    b.g.pointwise(Pointwise::Mul, d_o, Some(o), product)?;
    let folded = b.g.hidden(rows, dense(rows), Data::Float)?;
    b.g.reduce(Reduce::Add, product, folded)?;
    let one = b.g.scalar(1.0)?;
    b.g.pointwise(Pointwise::Mul, folded, Some(one), sum)?;

    let products = b.scores(q, k)?;
    let x = b.g.binary(Pointwise::Mul, products, scale, Data::Float)?;
    let x = b.within(x)?;
    let x = b.g.binary(Pointwise::Sub, x, stats, Data::Float)?;
    let x = apply_mask(b.g, mask, x)?;
    let p = b.g.unary(Pointwise::Exp, x)?;
    let pt = b.g.hidden(scores, transposed, Data::Bf16)?;
    b.g.reshape(p, pt)?;
    b.sum_queries(pt, d_o, dv, full_v)?;

    let dp = b.scores(d_o, v)?;
    let x = b.g.binary(Pointwise::Sub, dp, sum, Data::Float)?;
    let x = b.g.binary(Pointwise::Mul, x, p, Data::Float)?;
    let ds = b.g.binary(Pointwise::Mul, x, scale, Data::Float)?;
    let dst = b.g.hidden(scores, transposed, Data::Bf16)?;
    b.g.reshape(ds, dst)?;
    b.sum_queries(dst, q, dk, full_k)?;

    let back = b.g.hidden(keys, k_at, Data::Float)?;
    b.g.reshape(k, back)?;
    b.sum_keys(ds, back, dq_sum)?;
    b.g.pointwise(Pointwise::Identity, dq_sum, None, dq)
}

/// Device arrays with the start of each segment in several tensors, and the lengths.
struct Offsets {
    lengths: [u64; 2],
    /// By tensor id.
    of: Vec<(i64, u64)>,
    work: Box<dyn Work>,
}

impl Offsets {
    /// `steps` holds the token stride of each tensor id.
    fn prepare(
        p: &Problem,
        launch: &Launch,
        steps: &[(i64, i64)],
        scratch: &mut Scratch,
        at: &Prepare<'_>,
    ) -> Result<Offsets, CudaError> {
        let e = Extents::of(p);
        let lengths = [scratch.take(e.length_bytes())?, scratch.take(e.length_bytes())?];
        let pitch = e.offset_pitch();
        let first = scratch.take(8 * pitch * steps.len())?;
        let mut words = [0; MOST_OFFSETS];
        steps.iter().zip(&mut words).for_each(|((_, step), word)| *word = *step as u64);
        let int = |x: usize| Block::from(Arg::I32(i32::try_from(x).unwrap_or(i32::MAX)));
        let pointer = |x: u64| Block::from(Arg::Ptr(x));
        let args = vec![
            pointer(at.address(&launch.ins[3])),
            pointer(at.address(&launch.ins[4])),
            int(e.segments),
            int(p.tq),
            int(e.longest),
            Block::of_words(&words),
            int(steps.len()),
            pointer(first),
            Block::from(Arg::I64(pitch as i64)),
            pointer(lengths[0]),
            pointer(lengths[1]),
        ];
        let function = at.function(&source(), "packed_offsets")?;
        let work = launch_blocks(function, [1, 1, 1], 1024, 0, args)?;
        let of = steps.iter().enumerate().map(|(i, (id, _))| (OFFSETS + id, first + (8 * pitch * i) as u64));
        Ok(Offsets { lengths, of: of.collect(), work })
    }

    fn tensors(&self) -> impl Iterator<Item = (i64, u64)> + '_ {
        let lengths = [(Q_LEN, self.lengths[0]), (K_LEN, self.lengths[1])];
        self.of.iter().copied().chain(lengths)
    }
}

fn key(p: &Problem, form: i64, at: &[Dims]) -> Vec<i64> {
    let e = Extents::of(p);
    let mut key = vec![form, p.scale.to_bits() as i64, (p.mask == Mask::Causal) as i64];
    key.extend(e.queries());
    key.push(e.kv_heads as i64);
    key.extend(at.concat());
    key
}

/// Clears rows outside every segment; builds no list of tiles.
fn clear(
    p: &Problem,
    launch: &Launch,
    scratch: &mut Scratch,
    at: &Prepare<'_>,
) -> Result<Option<Box<dyn Work>>, CudaError> {
    tiles::prepare(p, &mut Call::of(p, launch, at), Heights { q: None, k: None }, scratch, at)
}

pub(super) fn prepare(p: &Problem, launch: &Launch, at: &Prepare<'_>) -> Prepared {
    if p.grad { prepare_backward(p, launch, at) } else { prepare_forward(p, launch, at) }
}

// For plan keys; `dense` uses smaller numbers.
const FORWARD: i64 = 10;
const BACKWARD: i64 = 11;

fn prepare_forward(p: &Problem, launch: &Launch, at: &Prepare<'_>) -> Prepared {
    let cudnn = at.cudnn()?;
    let e = Extents::of(p);
    let o = launch.outs[0].as_ref().ok_or_else(|| CudaError::new("attention without its output"))?;
    let mut scratch = Scratch::of(launch, at);
    let [q, k, o] = [&launch.ins[0], &launch.ins[1], o].map(|view| StridedTensor::of(view, at));
    let (v, bring) = as_dense(p, &launch.ins[2], Access::Read, &mut scratch, at)?;
    let places = [q, k, v, o];
    let strides = places.map(|place| place.strides(e.longest));
    let plan = cudnn.plan(&key(p, FORWARD, &strides), |g| forward(g, e, p.scale, p.mask, strides))?;

    let ids = [Q, K, V, O];
    let mut steps: Vec<(i64, i64)> = ids.into_iter().zip(places.map(|place| place.token)).collect();
    steps.push((STATS, p.heads as i64));
    let offsets = Offsets::prepare(p, launch, &steps, &mut scratch, at)?;
    let stats = match &launch.outs[1] {
        Some(lse) => at.address(lse),
        None => scratch.take(4 * p.tq * p.heads)?,
    };
    let workspace = scratch.take(plan.workspace_bytes)?;
    let mut tensors: Vec<(i64, u64)> = ids.into_iter().zip(places.map(|place| place.at)).collect();
    tensors.push((STATS, stats));
    tensors.extend(offsets.tensors());
    let mut works = vec![offsets.work];
    works.extend(bring);
    works.push(plan.bind(cudnn, &tensors, workspace)?);
    works.extend(clear(p, launch, &mut scratch, at)?);
    Ok(sequence(works))
}

fn prepare_backward(p: &Problem, launch: &Launch, at: &Prepare<'_>) -> Prepared {
    let cudnn = at.cudnn()?;
    let e = Extents::of(p);
    let n = p.inputs();
    let ins = &launch.ins;
    let [Some(dq), Some(dk), Some(dv)] = &launch.outs[..] else {
        return Err(CudaError::new("attention's gradient without one of its outputs"));
    };
    let mut scratch = Scratch::of(launch, at);
    let [q, k, o, d_o, dq, dk] =
        [&ins[0], &ins[1], &ins[n], &ins[n + 2], dq, dk].map(|view| StridedTensor::of(view, at));
    let (v, bring) = as_dense(p, &ins[2], Access::Read, &mut scratch, at)?;
    let (dv, place) = as_dense(p, dv, Access::Write, &mut scratch, at)?;
    let places = [q, k, v, o, d_o, dq, dk, dv];
    let strides = places.map(|place| place.strides(e.longest));
    let plan = cudnn.plan(&key(p, BACKWARD, &strides), |g| backward(g, e, p.scale, p.mask, strides))?;

    let ids = [Q, K, V, O, D_O, DQ, DK, DV];
    let mut steps: Vec<(i64, i64)> = ids.into_iter().zip(places.iter().map(|place| place.token)).collect();
    steps.push((STATS, p.heads as i64));
    let offsets = Offsets::prepare(p, launch, &steps, &mut scratch, at)?;
    let mut tensors: Vec<(i64, u64)> = ids.into_iter().zip(places.iter().map(|place| place.at)).collect();
    tensors.push((STATS, at.address(&ins[n + 1])));
    tensors.push((SUM, scratch.take(4 * p.tq * p.heads)?));
    tensors.push((DQ_SUM, scratch.take(4 * p.tq * p.heads * p.size)?));
    if p.heads != p.kv_heads {
        tensors.push((FULL_K, scratch.take(2 * p.tq * p.heads * p.size)?));
        tensors.push((FULL_V, scratch.take(2 * p.tq * p.heads * p.size)?));
    }
    tensors.extend(offsets.tensors());
    let workspace = scratch.take(plan.workspace_bytes)?;
    let bound = plan.bind(cudnn, &tensors, workspace)?;
    let mut works = vec![offsets.work];
    works.extend(bring);
    works.push(bound);
    works.extend(place);
    works.extend(clear(p, launch, &mut scratch, at)?);
    Ok(sequence(works))
}

#[cfg(test)]
mod tests {
    use super::*;
    use flatout_ir::ops::cap::Cap;

    fn packed(segments: usize, longest: usize, tokens: usize, heads: usize, kv_heads: usize) -> Problem {
        let segments = Segments::Ragged { max_segments: segments, max_len: longest };
        Problem {
            grad: true,
            d_lse: false,
            dtype: DType::BF16,
            tq: tokens,
            tk: tokens,
            heads,
            kv_heads,
            size: 64,
            scale: 0.125,
            cap: Cap::NONE,
            mask: Mask::Causal,
            q: segments,
            k: segments,
        }
    }

    #[test]
    fn only_tested_configurations_are_served() {
        let good = packed(328, 512, 65536, 12, 4);
        let hopper = Facts { cudnn: Some(91900), ..Facts::on_paper("sm_90a") };
        assert!(serves(&good, &hopper));
        let uniform = Segments::Uniform { len: 64 };
        for bad in [
            Problem { size: 96, ..good },
            Problem { dtype: DType::F32, ..good },
            Problem { mask: Mask::Window { back: 64, ahead: 0 }, ..good },
            Problem { q: uniform, k: uniform, ..good },
            Problem { k: Segments::Ragged { max_segments: 328, max_len: 256 }, ..good },
        ] {
            assert!(!serves(&bad, &hopper), "{bad:?}");
            assert_eq!(workspace(&bad), 0);
        }
        let wide = Problem { size: 256, ..good };
        for (p, facts, is_served) in [
            (&wide, &hopper, true),
            (&wide, &Facts { cudnn: Some(91801), ..hopper.clone() }, false),
            (&good, &Facts { cudnn: Some(91801), ..hopper.clone() }, true),
            (&good, &Facts { cudnn: Some(91400), ..hopper.clone() }, false),
            (&good, &Facts { cudnn: None, ..hopper.clone() }, false),
            (&good, &Facts { deterministic: true, ..hopper.clone() }, false),
            (&good, &Facts { cudnn: Some(91900), ..Facts::on_paper("sm_86") }, false),
        ] {
            assert_eq!(serves(p, facts), is_served, "{facts:?}");
        }
    }

    /// The workspace grows with the tokens, not with segments times the longest.
    #[test]
    fn workspace_grows_with_the_tokens_alone() {
        let p = packed(328, 512, 65536, 12, 4);
        let row = 65536 * 12 * 64;
        let all = 4 * row + 2 * 2 * row + 2 * 2 * row / 3;
        assert!((all..all + (5 << 20)).contains(&workspace(&p)), "{} of {all}", workspace(&p));
        assert_eq!(workspace(&packed(328, 4096, 65536, 12, 4)), workspace(&p));
    }
}
