//! Copies between any two strided views, constants and indices.
//!
//! A copy moves elements in row-major order of both views, whatever their axes: axes are split until both views have the same
//! ones, then merged where both have compatible strides. Moves each element once in, once out.

use flatout_ir::target::Layout;
use flatout_ir::types::{DType, bf16_from_f32, contiguous_strides};
use flatout_ir::{Launch, Op, OpKind, View};

use crate::cpu::Kernel;
use crate::cpu::context::{Context, chunk};
use crate::cpu::tensor::Tensor;
use crate::rows::{ANY_TYPE, EVERY_TYPE, kernel_row};

pub const KERNELS: &[Kernel] = &[
    Kernel { row: kernel_row("copy", OpKind::Reshape, EVERY_TYPE, Layout::Any), run },
    Kernel { row: kernel_row("fill", OpKind::Fill, ANY_TYPE, Layout::Any), run: fill },
    Kernel { row: kernel_row("iota", OpKind::Iota, ANY_TYPE, Layout::Any), run: iota },
];

/// The strides of two views along shared axes.
#[derive(Clone, Debug, PartialEq)]
pub struct Walk {
    pub dims: Vec<usize>,
    pub from: Vec<usize>,
    pub to: Vec<usize>,
}

impl Walk {
    /// `None` if the axes of the views do not nest.
    fn new(from: &View, to: &View) -> Option<Walk> {
        let mut walk = Walk { dims: vec![], from: vec![], to: vec![] };
        let axes = |view: &View| -> Vec<(usize, usize)> {
            view.dims.iter().copied().zip(view.strides.iter().copied()).filter(|(d, _)| *d != 1).collect()
        };
        let (mut a, mut b) = (axes(from), axes(to));
        while let (Some((an, astep)), Some((bn, bstep))) = (a.pop(), b.pop()) {
            let n = an.min(bn);
            if n == 0 || !an.is_multiple_of(n) || !bn.is_multiple_of(n) {
                return None;
            }
            if an > n {
                a.push((an / n, astep * n));
            }
            if bn > n {
                b.push((bn / n, bstep * n));
            }
            walk.join(n, astep, bstep);
        }
        for part in [&mut walk.dims, &mut walk.from, &mut walk.to] {
            part.reverse();
        }
        Some(walk)
    }

    /// Adds an outer axis, merged with the previous one if the strides of both sides allow it.
    fn join(&mut self, n: usize, from: usize, to: usize) {
        if let (Some(last), Some(f), Some(t)) = (self.dims.last_mut(), self.from.last(), self.to.last())
            && from == f * *last
            && to == t * *last
        {
            *last *= n;
            return;
        }
        self.dims.push(n);
        self.from.push(from);
        self.to.push(to);
    }

    /// The offsets of a row of the last axis, in elements.
    fn row(&self, row: usize) -> (usize, usize) {
        let (mut rest, mut from, mut to) = (row, 0, 0);
        for axis in (0..self.dims.len().saturating_sub(1)).rev() {
            let i = rest % self.dims[axis];
            (from, to) = (from + i * self.from[axis], to + i * self.to[axis]);
            rest /= self.dims[axis];
        }
        (from, to)
    }

    /// Copies rows of the last axis.
    ///
    /// # Safety
    /// Both sides hold the walk's elements, of `bytes` each; written memory does not overlap memory that is read.
    unsafe fn copy(&self, bytes: usize, from: *const u8, to: *mut u8, rows: std::ops::Range<usize>) {
        let (n, from_step, to_step) = match (self.dims.last(), self.from.last(), self.to.last()) {
            (Some(n), Some(f), Some(t)) => (*n, *f, *t),
            _ => (1, 1, 1),
        };
        for row in rows {
            let (f, t) = self.row(row);
            // SAFETY: offsets of elements of the walk.
            unsafe {
                let (from, to) = (from.add(f * bytes), to.add(t * bytes));
                match bytes {
                    _ if from_step == 1 && to_step == 1 => std::ptr::copy_nonoverlapping(from, to, n * bytes),
                    4 => strided::<u32>(from.cast(), from_step, to.cast(), to_step, n),
                    1 => strided::<u8>(from, from_step, to, to_step, n),
                    _ => strided::<u16>(from.cast(), from_step, to.cast(), to_step, n),
                }
            }
        }
    }
}

/// # Safety
/// `n` elements at the given strides may be read and written.
unsafe fn strided<T: Copy>(from: *const T, from_step: usize, to: *mut T, to_step: usize, n: usize) {
    // SAFETY: guaranteed by the caller. The host's bytes need not be aligned to elements.
    (0..n).for_each(|i| unsafe {
        to.add(i * to_step).write_unaligned(from.add(i * from_step).read_unaligned())
    });
}

/// The offset of row-major element `i`, in elements.
fn offset_of(view: &View, i: usize) -> usize {
    let (mut rest, mut offset) = (i, 0);
    for axis in (0..view.dims.len()).rev() {
        offset += rest % view.dims[axis] * view.strides[axis];
        rest /= view.dims[axis];
    }
    offset
}

/// Elements per task.
const TASK: usize = 16 << 10;

pub(super) fn run(launch: &Launch, cx: &Context<'_>) -> Result<(), String> {
    let (Some(to), Some(to_view)) = (cx.output(0), &launch.outs[0]) else { return Ok(()) };
    let (from, from_view) = (cx.input(0), &launch.ins[0]);
    let (bytes, elements) = (from.dtype.bytes(), from_view.elements());
    if elements == 0 {
        return Ok(());
    }
    if let Some(walk) = Walk::new(from_view, to_view) {
        let width = walk.dims.last().copied().unwrap_or(1);
        let rows = elements / width;
        let rows_a_task = (TASK / width).max(1);
        cx.parallel(rows.div_ceil(rows_a_task), 2 * bytes * width * rows_a_task, |task| {
            // SAFETY: the views hold the walk's elements and do not overlap; tasks have different rows.
            unsafe { walk.copy(bytes, from.at(0), to.at(0), chunk(task, rows_a_task, rows)) }
        });
        return Ok(());
    }
    cx.parallel(elements.div_ceil(TASK), 16 * TASK, |task| {
        for i in chunk(task, TASK, elements) {
            let (f, t) = (from.at(offset_of(from_view, i)), to.at(offset_of(to_view, i)));
            // SAFETY: both are element `i` of their view; the views do not overlap.
            unsafe { std::ptr::copy_nonoverlapping(f, t, bytes) }
        }
    });
    Ok(())
}

/// Copies rows of the first axis between two views of the same type and inner dimensions, row `rows[i].0` of `from` to row
/// `rows[i].1` of `to`, in order.
///
/// # Safety
/// The tensors' contract; the rows lie in the views.
pub(super) unsafe fn row_copies(
    from: &Tensor<'_>,
    to: &Tensor<'_>,
    rows: impl Iterator<Item = (usize, usize)>,
) {
    let inner = |t: &Tensor<'_>| View {
        offset: 0,
        dtype: t.dtype,
        dims: t.dims[1..].to_vec(),
        strides: t.strides[1..].to_vec(),
    };
    let (from_inner, to_inner) = (inner(from), inner(to));
    if from_inner.elements() == 0 {
        return;
    }
    let walk = Walk::new(&from_inner, &to_inner).expect("equal dimensions have a common walk");
    let lines = from_inner.elements() / walk.dims.last().copied().unwrap_or(1);
    for (f, t) in rows {
        // SAFETY: whole rows of both views.
        unsafe {
            walk.copy(from.dtype.bytes(), from.at(f * from.strides[0]), to.at(t * to.strides[0]), 0..lines)
        }
    }
}

fn fill(launch: &Launch, cx: &Context<'_>) -> Result<(), String> {
    let Op::Fill { value, .. } = launch.op else { unreachable!("the row is for fill") };
    write_each(cx, |_| value);
    Ok(())
}

fn iota(launch: &Launch, cx: &Context<'_>) -> Result<(), String> {
    let Op::Iota { axis, ref dims, .. } = launch.op else { unreachable!("the row is for iota") };
    let (inner, n) = (dims[axis + 1..].iter().product::<usize>(), dims[axis]);
    write_each(cx, |i| (i / inner % n) as f64);
    Ok(())
}

/// Sets every element of output 0 from its row-major index.
fn write_each(cx: &Context<'_>, value: impl Fn(usize) -> f64 + Sync) {
    let Some(out) = cx.output(0) else { return };
    let rows = out.rows();
    let rows_a_task = (TASK / rows.width.max(1)).max(1);
    cx.parallel(rows.count.div_ceil(rows_a_task), 4 * rows.width * rows_a_task, |task| {
        for row in chunk(task, rows_a_task, rows.count) {
            for c in 0..rows.width {
                let (at, x) = (out.at(rows.offset(row) + c * rows.stride), value(row * rows.width + c));
                // SAFETY: an element of the output, written by this task alone.
                unsafe {
                    match out.dtype {
                        DType::F32 => *at.cast() = x as f32,
                        DType::BF16 => *at.cast() = bf16_from_f32(x as f32),
                        DType::I32 => *at.cast() = x as i32,
                        other => unreachable!("nothing fills {}", other.name()),
                    }
                }
            }
        }
    });
}

fn dense(view: &View) -> View {
    View { offset: 0, strides: contiguous_strides(&view.dims), ..view.clone() }
}

/// The elements of a view of `arena`, in row-major order.
pub fn gather(view: &View, arena: &[u8]) -> Vec<u8> {
    let mut out = vec![0; view.elements() * view.dtype.bytes()];
    if out.is_empty() {
        return out;
    }
    assert!(view.offset + view.span_bytes() <= arena.len(), "{view:?} lies in the arena");
    let walk = Walk::new(view, &dense(view)).expect("equal dimensions have a common walk");
    let rows = view.elements() / walk.dims.last().copied().unwrap_or(1);
    // SAFETY: the view was just checked to lie in the arena, and `out` has room for its elements.
    unsafe {
        walk.copy(view.dtype.bytes(), arena.as_ptr().add(view.offset), out.as_mut_ptr(), 0..rows);
    }
    out
}

/// Writes elements in row-major order into a view of `arena`.
pub fn scatter(view: &View, arena: &mut [u8], bytes: &[u8]) {
    if bytes.is_empty() {
        return;
    }
    assert_eq!(bytes.len(), view.elements() * view.dtype.bytes(), "one value an element of {view:?}");
    assert!(view.offset + view.span_bytes() <= arena.len(), "{view:?} lies in the arena");
    let walk = Walk::new(&dense(view), view).expect("equal dimensions have a common walk");
    let rows = view.elements() / walk.dims.last().copied().unwrap_or(1);
    // SAFETY: as in `gather`.
    unsafe {
        walk.copy(view.dtype.bytes(), bytes.as_ptr(), arena.as_mut_ptr().add(view.offset), 0..rows);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(dims: &[usize], strides: &[usize]) -> View {
        View { offset: 0, dtype: DType::F32, dims: dims.into(), strides: strides.into() }
    }

    #[test]
    fn a_walk_merges_axes_with_compatible_strides() {
        let dense = Walk::new(&view(&[4, 6], &[6, 1]), &view(&[2, 12], &[12, 1])).unwrap();
        assert_eq!(dense, Walk { dims: vec![24], from: vec![1], to: vec![1] });
        // Heads of a fused buffer: [T, H, K] by strides to [T, H K].
        let heads = Walk::new(&view(&[5, 2, 3], &[18, 3, 1]), &view(&[5, 6], &[6, 1])).unwrap();
        assert_eq!(heads, Walk { dims: vec![5, 6], from: vec![18, 1], to: vec![6, 1] });
        assert_eq!(Walk::new(&view(&[4, 6], &[8, 1]), &view(&[6, 4], &[5, 1])), None);
    }

    #[test]
    fn scatter_then_gather_is_the_identity_and_touches_nothing_else() {
        let view = View { offset: 8, dtype: DType::BF16, dims: vec![3, 2, 2], strides: vec![1, 12, 5] };
        let mut arena = vec![0xEE; 64];
        let bytes: Vec<u8> = (0..24).collect();
        scatter(&view, &mut arena, &bytes);
        assert_eq!(gather(&view, &arena), bytes);
        assert_eq!(arena.iter().filter(|b| **b == 0xEE).count(), 64 - 24);
    }
}
