//! Reductions along one axis, and the sum of other kernels' partial sums.
//!
//! Sums run over pieces of fixed size (`RUN` elements along a row, `GROUP` rows across) in sixteen or more f32 lanes; the
//! pieces are added in f64, in order. So bits depend on shapes alone, and the error of a sum is that of a piece.

use flatout_ir::ops::reduce::Fold;
use flatout_ir::target::{KernelRow, Layout, Shapes};
use flatout_ir::types::DType;
use flatout_ir::{Launch, Op, OpKind};

use crate::cpu::Kernel;
use crate::cpu::context::{Context, chunk};
use crate::cpu::math::{self, vectorised};
use crate::cpu::tensor::{Rows, Tensor};
use crate::rows::{ANY_TYPE, kernel_row};

pub const KERNELS: &[Kernel] = &[Kernel {
    row: KernelRow { workspace, ..kernel_row("reduce", OpKind::Reduce, ANY_TYPE, Layout::Any) },
    run,
}];

/// Elements along a row per piece.
const RUN: usize = 4096;
/// Rows across per piece.
pub(crate) const GROUP: usize = 64;

/// Number of pieces of a sum over `rows` rows.
pub(crate) fn pieces_across(rows: usize) -> usize {
    rows.div_ceil(GROUP)
}

/// One f32 per piece (along), or per column of a piece (across).
fn workspace(shapes: &Shapes<'_>) -> usize {
    let Op::Reduce { axis, .. } = shapes.node.op else { unreachable!("the row is for reduce") };
    let dims = &shapes.ins[0].dims;
    let outer: usize = dims[..axis].iter().product();
    let inner: usize = dims[axis + 1..].iter().product();
    let pieces = if axis + 1 == dims.len() { dims[axis].div_ceil(RUN) } else { dims[axis].div_ceil(GROUP) };
    outer * inner * pieces * 4
}

fn run(launch: &Launch, cx: &Context<'_>) -> Result<(), String> {
    let Op::Reduce { axis, by } = launch.op else { unreachable!("the row is for reduce") };
    let Some(out) = cx.output(0) else { return Ok(()) };
    let x = cx.input(0);
    if x.dtype == DType::I32 {
        integers(axis, by, &x, &out);
        return Ok(());
    }
    // SAFETY: the only call of this launch.
    let partial = unsafe { cx.workspace() };
    if axis + 1 == x.dims.len() {
        along(by, &x.rows(), &out, partial, cx);
    } else {
        across(axis, by, &x, &out, partial, cx);
    }
    Ok(())
}

vectorised! {
    fn piece_along(by: Fold, x: &[f32]) -> f32 {
        match by {
            Fold::Sum => math::sum(x),
            Fold::SumSquares => math::sum_squares(x),
            Fold::Max => math::max(x),
        }
    }

    fn piece_across(by: Fold, x: &[f32], so_far: &mut [f32]) {
        match by {
            Fold::Sum => so_far.iter_mut().zip(x).for_each(|(s, x)| *s += x),
            Fold::SumSquares => so_far.iter_mut().zip(x).for_each(|(s, x)| *s = x.mul_add(*x, *s)),
            Fold::Max => so_far.iter_mut().zip(x).for_each(|(s, x)| *s = if *x > *s { *x } else { *s }),
        }
    }
}

/// Adds a row to the sums of its columns.
pub(crate) fn add_across(row: &[f32], so_far: &mut [f32]) {
    piece_across(Fold::Sum, row, so_far);
}

/// Raises the maxima of columns by a row.
pub(crate) fn max_across(row: &[f32], so_far: &mut [f32]) {
    piece_across(Fold::Max, row, so_far);
}

/// The result of an empty fold.
fn identity(by: Fold) -> f32 {
    if by == Fold::Max { f32::NEG_INFINITY } else { 0.0 }
}

/// Folds the pieces' results in order.
fn join(by: Fold, pieces: impl Iterator<Item = f32>) -> f32 {
    match by {
        Fold::Max => pieces.fold(identity(by), f32::max),
        _ => pieces.map(|x| x as f64).sum::<f64>() as f32,
    }
}

/// Folds rows of the input, along the last axis.
fn along(by: Fold, rows: &Rows<'_>, out: &Tensor<'_>, partial: &mut [f32], cx: &Context<'_>) {
    let pieces = rows.width.div_ceil(RUN);
    let bytes = rows.tensor.dtype.bytes();
    let per_task = ((GROUP << 10) / (rows.width.min(RUN) * bytes).max(1)).max(1);
    let (count, all) = (rows.count * pieces, Shared::new(partial));
    cx.parallel(count.div_ceil(per_task), per_task * rows.width.min(RUN) * bytes, |task| {
        let mut buffer = [0.0; RUN];
        for i in chunk(task, per_task, count) {
            let (row, columns) = (i / pieces, chunk(i % pieces, RUN, rows.width));
            // SAFETY: the input is only read; entry `i` belongs to this task.
            unsafe {
                let x = if rows.is_f32() {
                    let at = rows.tensor.at(rows.offset(row) + columns.start).cast::<f32>();
                    std::slice::from_raw_parts(at, columns.len())
                } else {
                    rows.load(row, columns.start, &mut buffer[..columns.len()]);
                    &buffer[..columns.len()]
                };
                all.slice(i..i + 1)[0] = piece_along(by, x);
            }
        }
    });
    let out = out.rows();
    for row in 0..rows.count {
        let value = join(by, partial[row * pieces..(row + 1) * pieces].iter().copied());
        // SAFETY: output rows have one element each.
        unsafe { out.store(row, 0, &[value]) }
    }
}

/// Folds rows onto each other, along any other axis.
fn across(axis: usize, by: Fold, x: &Tensor<'_>, out: &Tensor<'_>, partial: &mut [f32], cx: &Context<'_>) {
    let rows = x.rows();
    let outer: usize = x.dims[..axis].iter().product();
    let (n, middle) = (x.dims[axis], x.dims[axis + 1..x.dims.len() - 1].iter().product::<usize>());
    let inner = middle * rows.width;
    let groups = n.div_ceil(GROUP);
    let all = Shared::new(partial);
    cx.parallel(outer * groups, GROUP.min(n) * inner * x.dtype.bytes(), |task| {
        let (o, group) = (task / groups, task % groups);
        let mut buffer = vec![0.0; rows.width];
        // SAFETY: the input is only read; the task's entries are exclusive.
        unsafe {
            let so_far = all.slice(task * inner..(task + 1) * inner);
            so_far.fill(identity(by));
            for a in chunk(group, GROUP, n) {
                for m in 0..middle {
                    let x = rows.get((o * n + a) * middle + m, &mut buffer);
                    piece_across(by, x, &mut so_far[m * rows.width..(m + 1) * rows.width]);
                }
            }
        }
    });
    let to = out.rows();
    let mut line = vec![0.0; rows.width];
    for o in 0..outer {
        for m in 0..middle {
            for (c, y) in line.iter_mut().enumerate() {
                let at = |group: usize| (o * groups + group) * inner + m * rows.width + c;
                *y = join(by, (0..groups).map(|group| partial[at(group)]));
            }
            // SAFETY: rows of the output that belong to this task.
            unsafe { to.store(o * middle + m, 0, &line) }
        }
    }
}

/// Sums the rows of `partial`, of `width` each, into a vector of any float type: rows in order, in f64.
pub(crate) fn sum_rows(partial: &[f32], width: usize, out: &Tensor<'_>) {
    let out = out.rows();
    let mut sums = vec![0.0_f64; width];
    for row in partial.chunks_exact(width) {
        sums.iter_mut().zip(row).for_each(|(s, x)| *s += *x as f64);
    }
    let sums: Vec<f32> = sums.into_iter().map(|s| s as f32).collect();
    // SAFETY: the only row of an output, written after the tasks that read the inputs are done.
    unsafe { out.store(0, 0, &sums) }
}

fn integers(axis: usize, by: Fold, x: &Tensor<'_>, out: &Tensor<'_>) {
    // SAFETY: nothing is written yet.
    let values = unsafe { x.i32s() };
    let (n, inner) = (x.dims[axis], x.dims[axis + 1..].iter().product::<usize>());
    let to = out.rows();
    for o in 0..out.elements() {
        let at = |a: usize| values[(o / inner * n + a) * inner + o % inner];
        let value = match by {
            Fold::Sum => (0..n).map(at).fold(0, i32::wrapping_add),
            Fold::SumSquares => (0..n).map(|a| at(a).wrapping_mul(at(a))).fold(0, i32::wrapping_add),
            Fold::Max => (0..n).map(at).max().unwrap_or(i32::MIN),
        };
        let (row, column) = (o / to.width, o % to.width);
        // SAFETY: an element of the output.
        unsafe { *out.at(to.offset(row) + column * to.stride).cast() = value }
    }
}

/// Scratch that tasks write at different offsets.
#[derive(Clone, Copy)]
pub(crate) struct Shared {
    pub start: *mut f32,
    len: usize,
}

// SAFETY: `slice` requires its caller to guarantee disjointness.
unsafe impl Sync for Shared {}
// SAFETY: as above.
unsafe impl Send for Shared {}

impl Shared {
    pub(crate) fn new(all: &mut [f32]) -> Self {
        Shared { start: all.as_mut_ptr(), len: all.len() }
    }

    /// # Safety
    /// No other slice of the range is alive, and the scratch still is.
    #[allow(clippy::mut_from_ref, reason = "the caller answers for disjointness")]
    pub(crate) unsafe fn slice(&self, range: std::ops::Range<usize>) -> &mut [f32] {
        assert!(range.start <= range.end && range.end <= self.len, "scratch is as large as its formula says");
        // SAFETY: in range, and guaranteed by the caller.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}
