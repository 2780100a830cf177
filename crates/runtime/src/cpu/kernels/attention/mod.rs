//! Attention without materialised scores, forward and backward.
//!
//! The mathematics is that of `flatout_ir::ops::attention`.
//!
//! Work is divided into blocks of `LANES` rows, a row being a (query, head) pair; all rows of a block share one key head, so
//! grouped heads read their keys once. A block loops over its unmasked keys in tiles of `KEYS`; the scores of a tile are stored
//! as [keys, rows] with rows in vector lanes, so maxima and sums over keys need no shuffles. The forward pass keeps a running
//! maximum and sum per row; the backward pass recomputes probabilities from lse. bf16 is widened as it is read and rounded as
//! it is written; all arithmetic is f32.
//!
//! The workspace is a few tiles per core, and for the backward pass f32 accumulators of dk and dv: linear in the tokens. The
//! rows of a task and the order of every sum depend on shapes and segments, so bits do not depend on the number of threads.
//!
//! | GFLOP/s on one Zen 4 core, f32, q, k and v in one fused buffer, causal pairs only | forward | backward |
//! |---|---|---|
//! | 32 x 128 tokens, 4 heads on 2, size 32 | 68 | 71 |
//! | 2048 tokens, 12 heads on 4, size 64 | 98 | 95 |

mod backward;
mod forward;
pub(super) mod mask;
#[cfg(test)]
mod tests;
mod tile;
#[cfg(test)]
pub(super) mod trial;

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use flatout_ir::ops::attention::{Mask, Segments};
use flatout_ir::target::{KernelRow, Layout, Shapes};
use flatout_ir::types::DType;
use flatout_ir::{Launch, Op, OpKind};

use crate::cpu::Kernel;
use crate::cpu::context::Context;
use crate::cpu::math;
use crate::cpu::tensor::{self, Tensor};
use crate::rows::{FLOATS, kernel_row};
use mask::{Cut, LANES, Segment, Visible};
use tile::{Vector, transpose};

/// Keys per tile.
const KEYS: usize = 64;

pub const KERNELS: &[Kernel] = &[
    Kernel {
        row: KernelRow {
            workspace: forward::workspace,
            ..kernel_row("attention", OpKind::Attention, FLOATS, Layout::Rows)
        },
        run: forward::run,
    },
    Kernel {
        row: KernelRow {
            workspace: backward::workspace,
            ..kernel_row("attention_grad", OpKind::AttentionGrad, FLOATS, Layout::Rows)
        },
        run: backward::run,
    },
];

/// Padded head size in scratch: a multiple of 16, so that vectors need no remainder loop.
fn padded(size: usize) -> usize {
    size.next_multiple_of(16)
}

/// The longest possible key segment, and the number of (segment, key head) units.
fn extents(k: Segments, tokens: usize, kv_heads: usize) -> (usize, usize) {
    match k {
        Segments::Uniform { len } => (len, tokens / len * kv_heads),
        Segments::Ragged { max_segments, max_len } => (max_len.min(tokens), max_segments * kv_heads),
    }
}

/// The part of a launch that both directions use.
struct Problem<'a> {
    scale: f32,
    /// Soft cap of scores in base-2 units, like the scores; `None` without a cap.
    cap: Option<f32>,
    mask: Mask,
    cut: Cut,
    intervals: Option<Tensor<'a>>,
    q: Tensor<'a>,
    k: Tensor<'a>,
    v: Tensor<'a>,
    kv_heads: usize,
    /// Query heads per key head.
    group: usize,
    size: usize,
    /// Number of the operation's inputs; the gradient's own inputs follow.
    inputs: usize,
}

impl<'a> Problem<'a> {
    fn new(launch: &Launch, ctx: &Context<'a>) -> Result<Self, String> {
        let (Op::Attention { scale, cap, mask, q: q_segments, k: k_segments }
        | Op::AttentionGrad { scale, cap, mask, q: q_segments, k: k_segments, .. }) = launch.op
        else {
            unreachable!("listed for attention only")
        };
        let (q, k, v) = (ctx.input(0), ctx.input(1), ctx.input(2));
        let mut at = 3;
        let mut bounds = |segments: Segments| {
            matches!(segments, Segments::Ragged { .. }).then(|| {
                at += 2;
                // SAFETY: segment bounds are i32 inputs, which nothing writes during the launch.
                unsafe { [ctx.input(at - 2).i32s(), ctx.input(at - 1).i32s()] }
            })
        };
        let (q_bounds, k_bounds) = (bounds(q_segments), bounds(k_segments));
        let intervals = (mask == Mask::TwoIntervals).then(|| {
            at += 1;
            ctx.input(at - 1)
        });
        let may_share_keys = matches!(launch.op, Op::Attention { .. });
        let tokens = (q.dims[0], k.dims[0]);
        let cut = Cut::new((q_segments, q_bounds), (k_segments, k_bounds), tokens, may_share_keys)?;
        let kv_heads = k.dims[1];
        let (group, size) = (q.dims[1] / kv_heads, q.dims[2]);
        let cap = cap.0.map(|cap| cap * std::f32::consts::LOG2_E);
        Ok(Problem { scale, cap, mask, cut, intervals, q, k, v, kv_heads, group, size, inputs: at })
    }

    /// Number of threads the launch is worth: a small one is done before another thread wakes.
    fn workers(&self, ctx: &Context<'_>) -> usize {
        const SERIAL: usize = 1 << 17;
        let pairs: usize = self.cut.segments.iter().map(|s| s.q.len() * s.k.len()).sum();
        if pairs * self.kv_heads * self.group * self.size < SERIAL { 1 } else { ctx.threads }
    }

    /// Number of blocks that cover the rows of a segment.
    fn blocks(&self, segment: &Segment) -> usize {
        (segment.q.len() * self.group).div_ceil(LANES)
    }

    fn block(&self, segment: usize, kv_head: usize, index: usize) -> Block<'_> {
        let segment = &self.cut.segments[segment];
        let first = index * LANES;
        let count = LANES.min(segment.q.len() * self.group - first);
        let visible = Visible::new(self.mask, self.intervals.as_ref(), segment, self.group, first, count);
        Block { segment, kv_head, group: self.group, first, count, visible }
    }

    /// Keys or values of a tile as f32 rows: in place if vectors can read them there, otherwise widened and padded into
    /// `buffer`. Returns the first row and the row stride.
    fn tile(
        &self,
        of: &Tensor<'_>,
        block: &Block<'_>,
        keys: &Range<usize>,
        buffer: &mut [f32],
    ) -> (*const f32, usize) {
        let first = block.segment.k.start;
        let at = |key: usize| of.at((first + key) * of.strides[0] + block.kv_head * of.strides[1]);
        if of.dtype == DType::F32 && self.size.is_multiple_of(16) {
            return (at(keys.start).cast(), of.strides[0]);
        }
        let wide = padded(self.size);
        for (key, row) in keys.clone().zip(buffer.chunks_exact_mut(wide)) {
            // SAFETY: the key lies in its segment, which lies in the tensor; a row is contiguous and nothing writes it.
            unsafe { tensor::load(of.dtype, at(key), 1, &mut row[..self.size]) };
            row[self.size..].fill(0.0);
        }
        (buffer.as_ptr(), wide)
    }
}

/// Rows that share a key head: lane l is row `first + l` of the segment's (query, head) pairs.
struct Block<'a> {
    segment: &'a Segment,
    kv_head: usize,
    group: usize,
    first: usize,
    count: usize,
    visible: Visible,
}

impl Block<'_> {
    /// Token and head of a lane.
    fn place(&self, lane: usize) -> (usize, usize) {
        let row = self.first + lane;
        (self.segment.q.start + row / self.group, self.kv_head * self.group + row % self.group)
    }

    /// Copies the rows of a [tokens, heads, size] tensor into [LANES, padded] and zeroes the rest.
    fn gather(&self, of: &Tensor<'_>, to: &mut [f32]) {
        let size = of.dims[2];
        for (lane, row) in to.chunks_exact_mut(padded(size)).enumerate().take(LANES) {
            if lane >= self.count {
                row.fill(0.0);
                continue;
            }
            let (token, head) = self.place(lane);
            let at = of.at(token * of.strides[0] + head * of.strides[1]);
            // SAFETY: token and head lie in the tensor, a row is contiguous, and nothing writes it.
            unsafe { tensor::load(of.dtype, at, 1, &mut row[..size]) };
            row[size..].fill(0.0);
        }
    }

    /// Writes [LANES, padded] to the rows of a tensor.
    fn scatter(&self, from: &[f32], to: &Tensor<'_>) {
        let size = to.dims[2];
        for (lane, row) in from.chunks_exact(padded(size)).enumerate().take(self.count) {
            let (token, head) = self.place(lane);
            let at = to.at(token * to.strides[0] + head * to.strides[1]);
            // SAFETY: token and head lie in the tensor, a row is contiguous, and only this block writes it.
            unsafe { tensor::store(to.dtype, at, 1, &row[..size]) };
        }
    }

    /// The lanes' elements of a [tokens, heads] f32 tensor; 0 in lanes without a row.
    fn gather_scalars(&self, of: &Tensor<'_>) -> [f32; LANES] {
        let mut out = [0.0; LANES];
        for (lane, out) in out.iter_mut().enumerate().take(self.count) {
            let (token, head) = self.place(lane);
            // SAFETY: token and head lie in the tensor, which is f32 and which nothing writes.
            *out = unsafe { *of.at(token * of.strides[0] + head * of.strides[1]).cast::<f32>() };
        }
        out
    }

    fn scatter_scalars(&self, from: &[f32; LANES], to: &Tensor<'_>) {
        for (lane, x) in from.iter().enumerate().take(self.count) {
            let (token, head) = self.place(lane);
            // SAFETY: token and head lie in the tensor, which is f32, and only this block writes them.
            unsafe { *to.at(token * to.strides[0] + head * to.strides[1]).cast::<f32>() = *x };
        }
    }
}

/// Soft-caps scores: s = cap tanh(s / cap).
fn soft_cap(cap: f32, scores: &mut [f32]) {
    scores.iter_mut().for_each(|s| *s = cap * math::tanh(*s / cap));
}

/// Splits the unmasked keys into tiles.
fn tiles(visible: &Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
    let end = visible.end;
    visible.clone().step_by(KEYS).map(move |start| start..(start + KEYS).min(end))
}

/// Transposes [LANES, padded] to [padded, LANES], scaled by a factor.
///
/// # Safety
/// The machine has V's instructions.
#[inline(always)]
unsafe fn to_lanes<V: Vector>(rows: &[f32], wide: usize, factor: f32, to: &mut [f32]) {
    assert!(rows.len() >= LANES * wide && to.len() >= LANES * wide);
    // SAFETY: both sides hold LANES * wide elements, and wide is a multiple of 16; the caller guarantees V's instructions.
    unsafe { transpose::<V>((LANES, wide), (rows.as_ptr(), wide), (to.as_mut_ptr(), LANES)) };
    to[..LANES * wide].iter_mut().for_each(|x| *x *= factor);
}

/// Fills the rows of a [tokens, heads, ..] tensor that lie in no segment.
pub(super) fn fill(ranges: &[Range<usize>], to: &Tensor<'_>, value: f32) {
    let width = to.dims.get(2).copied().unwrap_or(1);
    let row = vec![value; width];
    for token in ranges.iter().flat_map(Clone::clone) {
        for head in 0..to.dims[1] {
            let at = to.at(token * to.strides[0] + head * to.strides[1]);
            // SAFETY: token and head lie in the tensor, a row is contiguous, and no block writes it.
            unsafe { tensor::store(to.dtype, at, 1, &row) };
        }
    }
}

/// Distributes the tasks, in order, over up to `workers` threads; `run` receives the worker and the task.
pub(super) fn share(
    ctx: &Context<'_>,
    workers: usize,
    tasks: usize,
    run: impl Fn(usize, usize) + Sync + Send,
) {
    let next = AtomicUsize::new(0);
    ctx.parallel(workers.min(tasks), usize::MAX, |worker| {
        loop {
            let task = next.fetch_add(1, Ordering::Relaxed);
            if task >= tasks {
                break;
            }
            run(worker, task);
        }
    });
}

/// Splits off the first `floats` floats of `scratch`.
pub(super) fn take<'s>(scratch: &mut &'s mut [f32], floats: usize) -> &'s mut [f32] {
    let (head, tail) = std::mem::take(scratch).split_at_mut(floats);
    *scratch = tail;
    head
}

fn bytes(floats: usize) -> usize {
    floats * std::mem::size_of::<f32>()
}

/// The shapes of the first two inputs: head size, key tokens and key heads.
fn key_shape(shapes: &Shapes<'_>) -> (usize, usize, usize) {
    let k = shapes.ins[1];
    (k.dims[2], k.dims[0], k.dims[1])
}
