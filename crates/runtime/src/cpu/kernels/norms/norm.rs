//! RMS norm and layer norm with an optional residual addition, and their gradients, one pass over memory each.
//!
//! Forward, per row: h = x + residual, c = h or h - mean(h), y = c rstd g(w) + b. Backward: with u = dy g(w), dc = rstd u - c
//! rstd^3 mean(c u), dx = dc or dc - mean(dc) (+ dh), dw = sum over rows of dy c rstd, db = sum over rows of dy; optionally
//! also y again and the sum over rows of dx. Statistics are f32 in sixteen lanes. Sums over rows are accumulated in groups of
//! `GROUP` rows in the workspace, then over groups in order, so their bits depend on shapes alone.

use flatout_ir::ops::norm::{NormSpec, NormWeight, again_at, sums_rows};
use flatout_ir::target::{KernelRow, Layout, Shapes};
use flatout_ir::types::{DType, TensorType, bf16_to_f32};
use flatout_ir::{Launch, OpKind};

use crate::cpu::Kernel;
use crate::cpu::context::{Context, chunk};
use crate::cpu::kernels::reductions::reduce::{Shared, sum_rows};
use crate::cpu::math::{self, LANES, vectorised};
use crate::cpu::tensor::{Tensor, round_bf16};
use crate::rows::{FLOATS, kernel_row};

pub const KERNELS: &[Kernel] = &[
    Kernel { row: kernel_row("rms_norm", OpKind::RmsNorm, FLOATS, Layout::Any), run },
    Kernel {
        row: KernelRow { workspace, ..kernel_row("rms_norm_grad", OpKind::RmsNormGrad, FLOATS, Layout::Any) },
        run: run_grad,
    },
];

/// Rows whose contributions to dw, db and the sum of dx are accumulated together.
const GROUP: usize = 64;

fn workspace(shapes: &Shapes<'_>) -> usize {
    let sums = shapes.outs.len() - 1 - again_at(&shapes.node.op).iter().count();
    partial_bytes(sums, shapes.ins[0])
}

/// Workspace for vectors that are summed over the rows of a tensor.
pub(crate) fn partial_bytes(sums: usize, x: &TensorType) -> usize {
    sums * x.rows().div_ceil(GROUP) * x.last() * 4
}

/// The gains of a norm: w, 1 + w or ones, in f32.
///
/// # Safety
/// The tensors' contract.
pub(crate) unsafe fn gains(weight: NormWeight, w: Option<Tensor<'_>>, width: usize) -> Vec<f32> {
    let mut g = vec![1.0; width];
    if let Some(w) = w {
        // SAFETY: the caller guarantees the contract; w is one row.
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

    fn normed_back(h: &[f32], g: &[f32], eps: f32, dy: &[f32], dx: &mut [f32], dw: &mut [f32]) {
        normed_row_back(h, g, eps, dy, dx, dw);
    }

    fn center(x: &mut [f32]) {
        let mean = math::sum(x) / x.len() as f32;
        x.iter_mut().for_each(|x| *x -= mean);
    }
}

/// 1 / sqrt(mean of squares + eps).
#[inline(always)]
pub(crate) fn rstd(h: &[f32], eps: f32) -> f32 {
    1.0 / (math::sum_squares(h) / h.len() as f32 + eps).sqrt()
}

#[inline(always)]
pub(crate) fn normed_row(h: &[f32], g: &[f32], eps: f32, y: &mut [f32]) {
    let r = rstd(h, eps);
    y.iter_mut().zip(h).zip(g).for_each(|((y, h), g)| *y = h * r * g);
}

/// dx of one row; its contribution is added to dw, which may be empty.
#[inline(always)]
pub(crate) fn normed_row_back(h: &[f32], g: &[f32], eps: f32, dy: &[f32], dx: &mut [f32], dw: &mut [f32]) {
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

/// y of one row, including the mean subtraction of layer norm.
fn biased(h: &[f32], g: &[f32], eps: f32, bias: Option<&[f32]>, y: &mut [f32]) {
    normed(h, g, eps, y);
    if let Some(bias) = bias {
        add(bias, y);
    }
}

pub(crate) fn run(launch: &Launch, cx: &Context<'_>) -> Result<(), String> {
    let (spec, adds) = NormSpec::of(&launch.op).expect("the row is for rms_norm");
    let x = cx.input(0).rows();
    let residual = adds.then(|| cx.input(1).rows());
    let w = spec.weight.is_some().then(|| cx.input(1 + adds as usize));
    // SAFETY: weight and bias overlap no output.
    let (g, bias) = unsafe {
        let bias = spec.bias.then(|| gains(NormWeight::Plain, Some(cx.input(launch.ins.len() - 1)), x.width));
        (gains(spec.weight, w, x.width), bias)
    };
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
                    if spec.center {
                        center(&mut sum);
                    }
                    y.put(row, &mut buffer, |y| biased(&sum, &g, spec.eps, bias.as_deref(), y));
                }
            }
        }
    });
    Ok(())
}

pub(crate) fn run_grad(launch: &Launch, cx: &Context<'_>) -> Result<(), String> {
    let (spec, adds) = NormSpec::of(&launch.op).expect("the row is for rms_norm_grad");
    let has_w = spec.weight.is_some();
    let h = cx.input(0).rows();
    let h_type = h.tensor.dtype;
    let dy = cx.input(1 + has_w as usize).rows();
    let dh = adds.then(|| cx.input(2 + has_w as usize).rows());
    let y = again_at(&launch.op).and_then(|at| cx.output(at)).map(|y| y.rows());
    // SAFETY: weight and bias overlap no output.
    let (g, bias) = unsafe {
        let bias = (spec.bias && y.is_some())
            .then(|| gains(NormWeight::Plain, Some(cx.input(launch.ins.len() - 1)), h.width));
        (gains(spec.weight, has_w.then(|| cx.input(1)), h.width), bias)
    };
    let dx = cx.output(0).map(|dx| dx.rows());
    let dw = has_w.then(|| cx.output(1)).flatten();
    let db = spec.bias.then(|| cx.output(1 + has_w as usize)).flatten();
    let total = sums_rows(&launch.op).then(|| cx.output(launch.outs.len() - 1)).flatten();
    let groups = h.count.div_ceil(GROUP);
    // SAFETY: the only call of this launch.
    let partial = unsafe { cx.workspace() };
    let all = Shared::new(partial);
    // The groups' sums of dw, then those of db and of dx.
    let total_at = has_w as usize + spec.bias as usize;
    let sums = |at: usize| at * groups * h.width..(at + 1) * groups * h.width;
    cx.parallel(groups, 16 * GROUP.min(h.count) * h.width, |group| {
        let mut buffers: [Vec<f32>; 5] = std::array::from_fn(|_| vec![0.0; h.width]);
        let [h_row, dy_row, dh_row, dx_row, y_row] = &mut buffers;
        // SAFETY: a row belongs to one task, and all of it is read before dx, which may overlap it, is written; the group's
        // part of the workspace belongs to the task.
        unsafe {
            let part = |is_wanted: bool, at: usize| match is_wanted {
                true => all.slice(sums(at).start + group * h.width..sums(at).start + (group + 1) * h.width),
                false => &mut [],
            };
            let (dw, db) = (part(dw.is_some(), 0), part(db.is_some(), has_w as usize));
            let total = part(total.is_some(), total_at);
            dw.fill(0.0);
            db.fill(0.0);
            total.fill(0.0);
            for row in chunk(group, GROUP, h.count) {
                let h = match spec.center {
                    true => {
                        h.load(row, 0, h_row);
                        center(h_row);
                        &h_row[..]
                    }
                    false => h.get(row, h_row),
                };
                let dy = dy.get(row, dy_row);
                normed_back(h, &g, spec.eps, dy, dx_row, dw);
                add(dy, db);
                if spec.center {
                    center(dx_row);
                }
                if let Some(dh) = &dh {
                    add(dh.get(row, dh_row), dx_row);
                }
                if h_type == DType::BF16 && !total.is_empty() {
                    round(dx_row);
                }
                add(dx_row, total);
                if let Some(y) = &y {
                    y.put(row, y_row, |y| biased(h, &g, spec.eps, bias.as_deref(), y));
                }
                if let Some(dx) = &dx {
                    dx.store(row, 0, dx_row);
                }
            }
        }
    });
    if let Some(dw) = dw {
        sum_rows(&partial[sums(0)], h.width, &dw);
    }
    if let Some(db) = db {
        sum_rows(&partial[sums(has_w as usize)], h.width, &db);
    }
    if let Some(total) = total {
        sum_rows(&partial[sums(total_at)], h.width, &total);
    }
    Ok(())
}
