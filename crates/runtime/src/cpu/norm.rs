//! RMS norm with the residual addition in front, and its gradient, one pass over memory each.
//!
//! Forward, a row: h = x + residual, y = h rstd g(w). Backward: with u = dy g(w), dx = rstd u - h rstd^3 mean(h u)
//! (+ dh), and dw = sum over rows of dy h rstd. Statistics in f32, in sixteen lanes. dw is summed over groups of `GROUP` rows
//! in the workspace, then over groups in order, so its bits depend on shapes alone.

use flatout_ir::ops::norm::NormWeight;
use flatout_ir::target::{KernelRow, Layout, Shapes, no_workspace};
use flatout_ir::types::{DType, bf16_to_f32};
use flatout_ir::{Launch, Op, OpKind};

use super::context::{Context, chunk};
use super::math::{self, LANES, vectorised};
use super::reduce::{Shared, sum_rows};
use super::tensor::{Tensor, round_bf16};
use super::{FLOATS, Kernel};

pub const KERNELS: &[Kernel] = &[
    Kernel {
        row: KernelRow {
            name: "rms_norm",
            op: OpKind::RmsNorm,
            dtypes: FLOATS,
            ins: Layout::Any,
            outs: Layout::Any,
            in_place: &[(0, 0), (0, 1), (1, 0), (1, 1)],
            workspace: no_workspace,
            deterministic: true,
        },
        run,
    },
    Kernel {
        row: KernelRow {
            name: "rms_norm_grad",
            op: OpKind::RmsNormGrad,
            dtypes: FLOATS,
            ins: Layout::Any,
            outs: Layout::Any,
            in_place: &[(0, 0), (2, 0), (3, 0)],
            workspace,
            deterministic: true,
        },
        run: run_grad,
    },
];

/// Rows whose share of dw is summed together.
const GROUP: usize = 64;

fn workspace(shapes: &Shapes<'_>) -> usize {
    let Op::RmsNormGrad { weight, .. } = shapes.node.op else { unreachable!("the row is for rms_norm_grad") };
    if weight.is_some() { shapes.ins[0].rows().div_ceil(GROUP) * shapes.ins[0].last() * 4 } else { 0 }
}

/// What a normed row is multiplied by: w, 1 + w or ones, in f32.
///
/// # Safety
/// The tensors' contract.
pub(super) unsafe fn gains(weight: NormWeight, w: Option<Tensor<'_>>, width: usize) -> Vec<f32> {
    let mut g = vec![1.0; width];
    if let Some(w) = w {
        // SAFETY: the caller keeps the contract; w is one row.
        unsafe { w.rows().load(0, 0, &mut g) };
        if weight == NormWeight::OnePlus {
            g.iter_mut().for_each(|g| *g += 1.0);
        }
    }
    g
}

vectorised! {
    fn add(x: &[f32], to: &mut [f32]) {
        to.iter_mut().zip(x).for_each(|(to, x)| *to += x);
    }

    fn round(x: &mut [f32]) {
        x.iter_mut().for_each(|x| *x = bf16_to_f32(round_bf16(*x)));
    }

    fn normed(h: &[f32], g: &[f32], eps: f32, y: &mut [f32]) {
        normed_row(h, g, eps, y);
    }

    fn normed_back(h: &[f32], g: &[f32], eps: f32, dy: &[f32], add: &[f32], dx: &mut [f32], dw: &mut [f32]) {
        normed_row_back(h, g, eps, dy, dx, dw);
        dx.iter_mut().zip(add).for_each(|(dx, add)| *dx += add);
    }
}

/// 1 / sqrt(mean of squares + eps).
#[inline(always)]
pub(super) fn rstd(h: &[f32], eps: f32) -> f32 {
    1.0 / (math::sum_squares(h) / h.len() as f32 + eps).sqrt()
}

#[inline(always)]
pub(super) fn normed_row(h: &[f32], g: &[f32], eps: f32, y: &mut [f32]) {
    let r = rstd(h, eps);
    y.iter_mut().zip(h).zip(g).for_each(|((y, h), g)| *y = h * r * g);
}

/// dx of one row; its share is added to dw, which may be empty.
#[inline(always)]
pub(super) fn normed_row_back(h: &[f32], g: &[f32], eps: f32, dy: &[f32], dx: &mut [f32], dw: &mut [f32]) {
    let n = h.len() as f32;
    let (squares, along) = squares_and_slope(h, g, dy);
    let r = 1.0 / (squares / n + eps).sqrt();
    let c = along / n * r * r * r;
    for (((dx, dy), g), h) in dx.iter_mut().zip(dy).zip(g).zip(h) {
        *dx = r.mul_add(dy * g, -(c * h));
    }
    dw.iter_mut().zip(dy).zip(h).for_each(|((dw, dy), h)| *dw = (dy * r).mul_add(*h, *dw));
}

/// The sums of h^2 and of h dy g, in one pass.
#[inline(always)]
fn squares_and_slope(h: &[f32], g: &[f32], dy: &[f32]) -> (f32, f32) {
    let (mut squares, mut slope) = ([0.0; LANES], [0.0; LANES]);
    let (hs, gs, dys) = (h.as_chunks::<LANES>(), g.as_chunks::<LANES>(), dy.as_chunks::<LANES>());
    for ((h, g), dy) in hs.0.iter().zip(gs.0).zip(dys.0) {
        for i in 0..LANES {
            squares[i] = h[i].mul_add(h[i], squares[i]);
            slope[i] = (h[i] * g[i]).mul_add(dy[i], slope[i]);
        }
    }
    for (i, ((h, g), dy)) in hs.1.iter().zip(gs.1).zip(dys.1).enumerate() {
        squares[i] = h.mul_add(*h, squares[i]);
        slope[i] = (h * g).mul_add(*dy, slope[i]);
    }
    (math::sum_lanes(squares), math::sum_lanes(slope))
}

fn run(launch: &Launch, cx: &Context<'_>) -> Result<(), String> {
    let Op::RmsNorm { eps, weight, residual } = launch.op else { unreachable!("the row is for rms_norm") };
    let x = cx.input(0).rows();
    let residual = residual.then(|| cx.input(1).rows());
    let w = weight.is_some().then(|| cx.input(launch.ins.len() - 1));
    // SAFETY: the weight lies on no output.
    let g = unsafe { gains(weight, w, x.width) };
    let y = cx.output(0).map(|y| y.rows());
    let h = residual.and_then(|_| cx.output(1)).map(|h| h.rows());
    let rows_a_task = (8192 / x.width.max(1)).clamp(1, GROUP);
    cx.parallel(x.count.div_ceil(rows_a_task), 12 * rows_a_task * x.width, |task| {
        let mut sum = vec![0.0; x.width];
        let mut buffer = vec![0.0; x.width];
        for row in chunk(task, rows_a_task, x.count) {
            // SAFETY: a row belongs to one task and is read into `sum` before any output is written.
            unsafe {
                x.load(row, 0, &mut sum);
                if let Some(residual) = &residual {
                    add(residual.get(row, &mut buffer), &mut sum);
                    if x.tensor.dtype == DType::BF16 {
                        round(&mut sum);
                    }
                }
                if let Some(h) = &h {
                    h.store(row, 0, &sum);
                }
                if let Some(y) = &y {
                    y.put(row, &mut buffer, |y| normed(&sum, &g, eps, y));
                }
            }
        }
    });
    Ok(())
}

fn run_grad(launch: &Launch, cx: &Context<'_>) -> Result<(), String> {
    let Op::RmsNormGrad { eps, weight, add } = launch.op else {
        unreachable!("the row is for rms_norm_grad")
    };
    let h = cx.input(0).rows();
    let dy = cx.input(1 + weight.is_some() as usize).rows();
    let dh = add.then(|| cx.input(launch.ins.len() - 1).rows());
    // SAFETY: the weight lies on no output.
    let g = unsafe { gains(weight, weight.is_some().then(|| cx.input(1)), h.width) };
    let (dx, dw) = (cx.output(0).map(|dx| dx.rows()), weight.is_some().then(|| cx.output(1)).flatten());
    let groups = h.count.div_ceil(GROUP);
    // SAFETY: the only call of this launch.
    let partial = unsafe { cx.workspace() };
    let all = Shared::new(partial);
    cx.parallel(groups, 16 * GROUP.min(h.count) * h.width, |group| {
        let mut buffers: [Vec<f32>; 4] = std::array::from_fn(|_| vec![0.0; h.width]);
        let [h_row, dy_row, dh_row, dx_row] = &mut buffers;
        // SAFETY: a row belongs to one task, and all of it is read before dx, which may lie on it, is written; the
        // group's part of the workspace is the task's.
        unsafe {
            let dw = match dw {
                Some(_) => all.slice(group * h.width..(group + 1) * h.width),
                None => &mut [],
            };
            dw.fill(0.0);
            for row in chunk(group, GROUP, h.count) {
                let (h, dy) = (h.get(row, h_row), dy.get(row, dy_row));
                let dh = dh.as_ref().map_or(&[][..], |dh| dh.get(row, dh_row));
                normed_back(h, &g, eps, dy, dh, dx_row, dw);
                if let Some(dx) = &dx {
                    dx.store(row, 0, dx_row);
                }
            }
        }
    });
    if let Some(dw) = dw {
        sum_rows(&partial[..groups * h.width], h.width, &dw);
    }
    Ok(())
}
