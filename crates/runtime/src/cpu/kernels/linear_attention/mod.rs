//! Attention without softmax, forward and backward, as the sums of `weighted_sum`.
//!
//! The mathematics is that of `flatout_ir::ops::linear_attention`: out_i = sum over j of W_ij x_j.
//!
//! A task is a tile of rows of one output head. It loops over the unmasked tiles: a tile's weights are one product, are scaled
//! and masked, and a second product adds to the result, which is rounded once. Segments are divided into tiles of equal height,
//! so that one row more than a tile does not cost a whole tile. bf16 is widened as it is read; all arithmetic is f32.
//!
//! Queries that are rotated as they are read are rotated in the widened copy and rounded to their type, as a separate rotation
//! would store them; their gradient is rotated back before it is rounded.
//!
//! The workspace is a few tiles per core. The rows of a task and the order of every sum depend on the shapes and the segments,
//! so bits do not depend on the number of threads.

#[cfg(test)]
mod tests;

use std::ops::Range;

use flatout_ir::ops::attention::Segments;
use flatout_ir::ops::linear_attention::{Accumulate, LinearAttend, LinearMask};
use flatout_ir::ops::rope::Pairs;
use flatout_ir::target::{KernelRow, Layout, Shapes};
use flatout_ir::types::{DType, bf16_from_f32, bf16_to_f32};
use flatout_ir::{Launch, OpKind};

use super::attention::mask::{Cut, Segment};
use super::attention::{fill, share, take};
use super::norms::rope::{Rotation, rotate};
use super::products::product::{Matrix, multiply};
use super::reductions::reduce::Shared;
use crate::cpu::Kernel;
use crate::cpu::context::Context;
use crate::cpu::tensor::{self, Tensor};
use crate::rows::{FLOATS, kernel_row};
use crate::weighted_sum::{Owner, WeightedSum, sums};

/// Maximum rows per tile.
const TILE: usize = 96;

const fn kernel(name: &'static str, op: OpKind) -> Kernel {
    let row = KernelRow { workspace, ..kernel_row(name, op, FLOATS, Layout::Rows) };
    Kernel { row, run }
}

pub const KERNELS: &[Kernel] = &[
    kernel("linear_attention", OpKind::LinearAttention),
    kernel("linear_attention_grad", OpKind::LinearAttentionGrad),
];

/// Floats of scratch per worker: two tiles of weights, the result, widened a, b and x, and a token's cosines and sines.
fn floats(inner: usize, width: usize) -> usize {
    2 * TILE * TILE + 2 * TILE * width + 2 * TILE * inner + inner.max(width)
}

fn workspace(shapes: &Shapes<'_>) -> usize {
    let (attend, is_grad) = LinearAttend::of(&shapes.node.op).expect("listed for linear attention");
    let of = |sum: &WeightedSum| floats(shapes.ins[sum.left].dims[2], shapes.ins[sum.rows].dims[2]);
    let most = sums(&attend, is_grad).iter().map(of).max().unwrap_or(0);
    most * shapes.cores * size_of::<f32>()
}

struct Sum<'a> {
    scale: f32,
    mask: LinearMask,
    owner: Owner,
    left: Operand<'a>,
    right: Operand<'a>,
    rows: Operand<'a>,
    out: Operand<'a>,
    /// The tensor that the result is accumulated onto.
    base: Option<Tensor<'a>>,
    /// If given, the result is set to 0 where this tensor is not above 0.
    above: Option<Tensor<'a>>,
    heads: usize,
}

/// A tensor of a sum, and the rotation of its heads when read, or its inverse when written.
#[derive(Clone, Copy)]
struct Operand<'a> {
    tensor: Tensor<'a>,
    rotation: Option<&'a Rotation<'a>>,
}

impl<'a> std::ops::Deref for Operand<'a> {
    type Target = Tensor<'a>;
    fn deref(&self) -> &Tensor<'a> {
        &self.tensor
    }
}

fn run(launch: &Launch, ctx: &Context<'_>) -> Result<(), String> {
    let (attend, is_grad) = LinearAttend::of(&launch.op).expect("listed for linear attention");
    let (q, k) = (ctx.input(0), ctx.input(attend.tensors() - 2));
    let axes = vec![0; q.dims[2] / 2];
    let bounds = |segments: Segments, at: usize| {
        matches!(segments, Segments::Ragged { .. }).then(|| {
            // SAFETY: segment bounds are i32 inputs, which nothing writes during the launch.
            unsafe { [ctx.input(at).i32s(), ctx.input(at + 1).i32s()] }
        })
    };
    let [of_q, of_k] = attend.bounds();
    let k_segments = attend.k_segments();
    let tokens = (q.dims[0], k.dims[0]);
    let cut = Cut::new(
        (attend.q, bounds(attend.q, of_q)),
        (k_segments, bounds(k_segments, of_k)),
        tokens,
        !is_grad,
    )?;

    let positions = attend.positions();
    // SAFETY: positions and table are inputs that nothing writes during the launch.
    let rotation = attend.rotary.freq().map(|freq| unsafe {
        let table = attend.rotary.has_table().then(|| ctx.input(positions + 1));
        Rotation::new(freq, &axes, ctx.input(positions), table)
    });
    // Queries are input 0, and their gradient output 0.
    fn operand<'a>(tensor: Tensor<'a>, i: usize, rotation: Option<&'a Rotation<'a>>) -> Operand<'a> {
        Operand { tensor, rotation: rotation.filter(|_| i == 0) }
    }

    // SAFETY: this is the only call of this launch.
    let memory = unsafe { ctx.workspace() };
    let floats = memory.len();
    let scratch = Shared::new(memory);
    for sum in sums(&attend, is_grad) {
        let Some(out) = ctx.output(sum.out) else { continue };
        let idle = if sum.owner == Owner::Keys { &cut.idle_k } else { &cut.idle_q };
        fill(idle, &out, 0.0);
        let [left, right, rows] =
            [sum.left, sum.right, sum.rows].map(|i| operand(ctx.input(i), i, rotation.as_ref()));
        let out = operand(out, sum.out, rotation.as_ref().filter(|_| is_grad));
        let (scale, mask, owner, heads) = (attend.scale, attend.mask, sum.owner, q.dims[1]);
        let accumulate = if sum.out == 0 { Accumulate::of(&launch.op) } else { Accumulate::Nothing };
        let base = (accumulate != Accumulate::Nothing).then(|| ctx.input(attend.inputs() + 1));
        let above = (accumulate == Accumulate::Relu).then_some(q);
        let sum = Sum { scale, mask, owner, left, right, rows, out, base, above, heads };
        sum.run(&cut, scratch, floats, ctx);
    }
    Ok(())
}

/// Rotates a token's head; `sign` -1 rotates back. `angles` is scratch for the cosines and sines.
fn rotate_head(rotation: &Rotation<'_>, token: usize, sign: f32, angles: &mut [f32], head: &mut [f32]) {
    let (cos, sin) = angles[..head.len()].split_at_mut(head.len() / 2);
    rotation.of(token, cos, sin);
    rotate(Pairs::Interleaved, sign, cos, sin, head);
}

/// Splits rows into tiles of equal height.
fn tiles(rows: &Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
    let count = rows.len().div_ceil(TILE);
    let height = rows.len().div_ceil(count.max(1)).max(1);
    let end = rows.end;
    rows.clone().step_by(height).map(move |start| start..(start + height).min(end))
}

impl Sum<'_> {
    fn run(&self, cut: &Cut, scratch: Shared, scratch_floats: usize, ctx: &Context<'_>) {
        let by_keys = self.owner == Owner::Keys;
        let own = |segment: &Segment| if by_keys { segment.k.clone() } else { segment.q.clone() };
        let tasks: Vec<(&Segment, usize, Range<usize>)> = cut
            .segments
            .iter()
            .flat_map(|segment| {
                let heads = 0..self.out.dims[1];
                heads.flat_map(move |head| tiles(&own(segment)).map(move |tile| (segment, head, tile)))
            })
            .collect();
        let floats = floats(self.left.dims[2], self.rows.dims[2]);
        // A small launch is done before another thread wakes.
        const SERIAL: usize = 1 << 17;
        let pairs: usize = cut.segments.iter().map(|s| s.q.len() * s.k.len()).sum();
        let work = pairs * self.heads * (self.left.dims[2] + self.rows.dims[2]);
        let workers = if work < SERIAL { 1 } else { ctx.threads.min(scratch_floats / floats) };
        share(ctx, workers, tasks.len(), |worker, task| {
            let (segment, head, tile) = &tasks[task];
            // SAFETY: a worker runs one task at a time, and the ranges are disjoint.
            let scratch = unsafe { scratch.slice(worker * floats..(worker + 1) * floats) };
            self.tile(segment, *head, tile, scratch);
        });
    }

    /// Computes a tile of rows of an output head.
    fn tile(&self, segment: &Segment, head: usize, own: &Range<usize>, mut scratch: &mut [f32]) {
        let (inner, width) = (self.left.dims[2], self.rows.dims[2]);
        let weights = take(&mut scratch, TILE * TILE);
        let others = take(&mut scratch, TILE * TILE);
        let result = take(&mut scratch, TILE * width);
        let x_copy = take(&mut scratch, TILE * width);
        let (a_copy, b_copy) = (take(&mut scratch, TILE * inner), take(&mut scratch, TILE * inner));
        let angles = take(&mut scratch, inner.max(width));
        let walked = if self.owner == Owner::Keys { &segment.q } else { &segment.k };
        let group = self.heads / self.out.dims[1];
        result[..own.len() * width].fill(0.0);
        for h in head * group..(head + 1) * group {
            for walk in tiles(walked).filter(|walk| self.meets(segment, own, walk)) {
                let [m, n] = [own.len(), walk.len()];
                self.weigh(
                    segment,
                    h,
                    (own, &walk),
                    self.owner == Owner::Keys,
                    weights,
                    (a_copy, b_copy, angles),
                );
                if self.owner == Owner::Both {
                    self.weigh(segment, h, (own, &walk), true, others, (a_copy, b_copy, angles));
                    weights[..m * n].iter_mut().zip(&*others).for_each(|(w, other)| *w += *other);
                }
                let x = self.matrix(&self.rows, h, &walk, x_copy, angles);
                let w = Matrix { start: weights.as_mut_ptr(), row: n, column: 1 };
                let c = Matrix { start: result.as_mut_ptr(), row: width, column: 1 };
                // SAFETY: a tile of weights, as many rows of x, and a result of `own` rows.
                unsafe { multiply([m, width, n], c, true, w, x, 1) };
            }
        }
        for (token, row) in own.clone().zip(result.chunks_exact_mut(width)) {
            if let Some(rotation) = self.out.rotation {
                rotate_head(rotation, token, -1.0, angles, row);
            }
            let other = &mut x_copy[..width];
            let load = |x: &Tensor<'_>, to: &mut [f32]| {
                // SAFETY: token and head lie in the tensor, whose rows are contiguous; only the base may overlap the output,
                // and no other task writes its row.
                unsafe { tensor::load(x.dtype, x.at(token * x.strides[0] + head * x.strides[1]), 1, to) };
            };
            if let Some(base) = &self.base {
                load(base, other);
                row.iter_mut().zip(&*other).for_each(|(y, base)| *y += base);
            }
            if let Some(above) = &self.above {
                load(above, other);
                row.iter_mut().zip(&*other).for_each(|(y, x)| *y = if *x > 0.0 { *y } else { 0.0 });
            }
            let at = self.out.at(token * self.out.strides[0] + head * self.out.strides[1]);
            // SAFETY: token and head lie in the tensor, a row is contiguous, and only this task writes it.
            unsafe { tensor::store(self.out.dtype, at, 1, row) };
        }
    }

    /// W [own, walk] = M(scale a b^T). If the owner is the key, the walked rows are the queries; a is then on the keys' side,
    /// and for `Both` a and b are exchanged.
    fn weigh(
        &self,
        segment: &Segment,
        head: usize,
        (own, walk): (&Range<usize>, &Range<usize>),
        by_keys: bool,
        weights: &mut [f32],
        (a_copy, b_copy, angles): (&mut [f32], &mut [f32], &mut [f32]),
    ) {
        let swaps = self.owner == Owner::Both && by_keys;
        let (left, right) = if swaps { (&self.right, &self.left) } else { (&self.left, &self.right) };
        let a = self.matrix(left, head, own, a_copy, angles);
        let b = self.matrix(right, head, walk, b_copy, angles);
        let [m, n, k] = [own.len(), walk.len(), left.dims[2]];
        let w = Matrix { start: weights.as_mut_ptr(), row: n, column: 1 };
        // SAFETY: rows of a and b lie in their tensors or copies; the weights belong to this worker.
        unsafe { multiply([m, n, k], w, false, a, Matrix { row: b.column, column: b.row, ..b }, 1) };
        for (i, row) in own.clone().zip(weights.chunks_exact_mut(n)) {
            let seen = self.seen(segment, i, by_keys);
            for (j, w) in walk.clone().zip(row) {
                *w = if seen.contains(&(j as i64)) { *w * self.scale } else { 0.0 };
            }
        }
    }

    /// The rows of the opposite side for which row i has a weight.
    fn seen(&self, segment: &Segment, i: usize, by_keys: bool) -> Range<i64> {
        let shift = segment.k.end as i64 - segment.q.end as i64;
        let i = i as i64;
        let walked = if by_keys { &segment.q } else { &segment.k };
        let (start, end) = (walked.start as i64, walked.end as i64);
        match (self.mask, by_keys) {
            (LinearMask::Full, _) => start..end,
            (LinearMask::Causal, false) => start..end.min(i + shift + 1),
            (LinearMask::Strict, false) => start..end.min(i + shift),
            (LinearMask::Causal, true) => start.max(i - shift)..end,
            (LinearMask::Strict, true) => start.max(i - shift + 1)..end,
        }
    }

    /// Whether any row of one tile has a weight with any row of the other.
    fn meets(&self, segment: &Segment, own: &Range<usize>, walk: &Range<usize>) -> bool {
        let reaches = |i: usize, by_keys: bool| {
            let seen = self.seen(segment, i, by_keys);
            seen.start < (walk.end as i64) && (walk.start as i64) < seen.end && !seen.is_empty()
        };
        // The last query and the first key have the most.
        match self.owner {
            Owner::Queries => reaches(own.end - 1, false),
            Owner::Keys => reaches(own.start, true),
            Owner::Both => reaches(own.end - 1, false) || reaches(own.start, true),
        }
    }

    /// Rows of the head that head `h` reads: in place if they are f32 and not rotated, otherwise computed into `copy`.
    fn matrix(
        &self,
        of: &Operand<'_>,
        h: usize,
        rows: &Range<usize>,
        copy: &mut [f32],
        angles: &mut [f32],
    ) -> Matrix {
        let head = h * of.dims[1] / self.heads;
        let at = |row: usize| of.at(row * of.strides[0] + head * of.strides[1]);
        if of.dtype == DType::F32 && of.rotation.is_none() {
            return Matrix { start: at(rows.start).cast(), row: of.strides[0], column: 1 };
        }
        let size = of.dims[2];
        for (row, to) in rows.clone().zip(copy.chunks_exact_mut(size)) {
            // SAFETY: row and head lie in the tensor; a row is contiguous and nothing writes it.
            unsafe { tensor::load(of.dtype, at(row), 1, to) };
            if let Some(rotation) = of.rotation {
                rotate_head(rotation, row, 1.0, angles, to);
                to.iter_mut()
                    .filter(|_| of.dtype == DType::BF16)
                    .for_each(|x| *x = bf16_to_f32(bf16_from_f32(*x)));
            }
        }
        Matrix { start: copy.as_mut_ptr(), row: size, column: 1 }
    }
}
