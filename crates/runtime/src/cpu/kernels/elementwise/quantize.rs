//! Quantisation to 8-bit types, row-major and transposed in one pass.
//!
//! Tiles of a few rows are read once; their codes are written along the rows and, transposed, down the columns. Exact: the
//! codes are x times the reciprocal of the scale, rounded by the type's definition.

use std::sync::atomic::{AtomicU32, Ordering};

use flatout_ir::ops::quantize::{FORWARD, Source};
use flatout_ir::target::{KernelRow, Layout, Shapes};
use flatout_ir::types::{DType, TensorType, bf16_to_f32};
use flatout_ir::{Launch, Op, OpKind, View, fp8};

use super::gated;
use crate::cpu::Kernel;
use crate::cpu::context::{Context, chunk};
use crate::cpu::kernels::norms::norm;
use crate::cpu::tensor::{Rows, Tensor, round_bf16};
use crate::rows::{FLOATS, kernel_row};

pub const KERNELS: &[Kernel] = &[Kernel {
    row: KernelRow { workspace, ..kernel_row("quantize", OpKind::Quantize, FLOATS, Layout::Any) },
    run,
}];

/// Rows per task: columns of the transposed output are written this many elements at a time.
const ROWS_A_TASK: usize = 16;

/// Workspace for a norm's output, for that of a norm that its gradient makes again, and for the norm itself.
fn workspace(shapes: &Shapes<'_>) -> usize {
    let x = shapes.ins[0];
    match shapes.node.op {
        Op::Quantize { of: Source::Norm(..), .. } => x_bytes(x.elements(), x.dtype),
        Op::Quantize { of: Source::NormGrad { again, .. }, .. } => {
            let tensors = 1 + again as usize;
            tensors * x_bytes(x.elements(), x.dtype) + norm::partial_bytes(shapes.outs.len() - 3 - tensors, x)
        }
        _ => 0,
    }
}

/// Bytes of the tensor to quantise, rounded up to the next allocation.
fn x_bytes(elements: usize, dtype: DType) -> usize {
    (elements * dtype.bytes()).next_multiple_of(64)
}

type Run = fn(&Launch, &Context<'_>) -> Result<(), String>;

/// Lets the norm's own kernel write x to its output or to scratch, and quantises it from there; likewise a norm that its
/// gradient makes again.
fn run_norm(launch: &Launch, cx: &Context<'_>, of: Source) -> Result<(), String> {
    let Op::Quantize { to, .. } = launch.op else { unreachable!("the row is for quantize") };
    let scratch = launch.workspace.as_ref().expect("a norm is quantised through scratch");
    let ty = TensorType::new(launch.ins[0].dtype, launch.ins[0].dims.clone());
    let bytes = x_bytes(ty.elements(), ty.dtype);
    let spare = |i: usize| View::dense(scratch.offset + i * bytes, &ty);
    let (codes, further) = launch.outs.split_at(3);
    let (mut outs, mut tensors) = (further.to_vec(), 1);
    let (op, kernel): (Op, Run) = match of {
        Source::Norm(spec, residual) => {
            outs.insert(0, None);
            (spec.op(residual), norm::run)
        }
        Source::NormGrad { spec, add, again } => {
            if again {
                outs.pop();
                outs.push(Some(spare(1)));
                tensors += 1;
            }
            (spec.grad_with_norm(add, again), norm::run_grad)
        }
        _ => unreachable!("called for norms"),
    };
    let x = outs[0].get_or_insert_with(|| spare(0)).clone();
    let begins = scratch.offset + tensors * bytes;
    let rest = (scratch.offset + scratch.elements() * scratch.dtype.bytes() - begins) / 4;
    let workspace = Some(View::dense(begins, &TensorType::new(DType::F32, [rest])));
    let inner = Launch { op, ins: launch.ins[..of.tensors()].to_vec(), outs, workspace, ..launch.clone() };
    kernel(&inner, &cx.part(&inner))?;
    let quantize = |to: DType, ins: Vec<View>, outs: Vec<Option<View>>| {
        let op = Op::Quantize { to, current: false, of: Source::Given };
        let given = Launch { op, ins, outs, workspace: None, ..launch.clone() };
        run(&given, &cx.part(&given))
    };
    let scaling = &launch.ins[of.inputs()..];
    quantize(to, [&[x], scaling].concat(), codes.to_vec())?;
    match further.last().filter(|_| of.makes_again()) {
        Some(columns @ Some(_)) => {
            let scale = &launch.ins[of.tensors()];
            quantize(FORWARD, vec![spare(1), scale.clone(), scale.clone()], vec![None, columns.clone(), None])
        }
        _ => Ok(()),
    }
}

fn run(launch: &Launch, cx: &Context<'_>) -> Result<(), String> {
    let Op::Quantize { to, current, of } = launch.op else { unreachable!("the row is for quantize") };
    if matches!(of, Source::Norm(..) | Source::NormGrad { .. }) {
        return run_norm(launch, cx, of);
    }
    let x = X { of, ins: (0..of.tensors()).map(|i| cx.input(i).rows()).collect() };
    let (count, width) = (x.ins[0].count, x.width());
    let (codes, transposed, third) = (cx.output(0), cx.output(1), cx.output(2));
    let (scale, amax) = if current {
        (fp8::scale(to, largest(&x.ins[0], cx)), 0.0)
    } else {
        // SAFETY: one element each; the second is read before it is written.
        unsafe { (cx.input(of.inputs()).scalar(), cx.input(of.inputs() + 1).scalar()) }
    };
    let by = 1.0 / scale;
    let again = of.makes_again().then(|| cx.output(3)).flatten();
    // SAFETY: one element.
    let by_again = again.as_ref().map_or(0.0, |_| 1.0 / unsafe { cx.input(of.tensors()).scalar() });
    let top = Top::new(amax);
    let bytes = ROWS_A_TASK * width * (x.ins[0].tensor.dtype.bytes() + 2);
    cx.parallel(count.div_ceil(ROWS_A_TASK), bytes, |task| {
        let rows = chunk(task, ROWS_A_TASK, count);
        let mut tile = vec![0.0; rows.len() * width];
        let mut spare = vec![0.0; width];
        for (row, tile) in rows.clone().zip(tile.chunks_mut(width.max(1))) {
            x.load(row, tile, &mut spare);
            if !current {
                top.raise(magnitude(tile));
            }
            tile.iter_mut().for_each(|x| *x *= by);
            if let Some(codes) = &codes {
                // SAFETY: a row belongs to one task.
                unsafe { codes.rows().store(row, 0, tile) };
            }
        }
        if let Some(transposed) = &transposed {
            transpose(&tile, width, rows.start, transposed);
        }
        if let Some(again) = &again {
            let width = x.ins[0].width;
            let tile = &mut tile[..rows.len() * width];
            for (row, tile) in rows.clone().zip(tile.chunks_mut(width.max(1))) {
                x.load_again(row, tile, &mut spare[..width]);
                tile.iter_mut().for_each(|x| *x *= by_again);
            }
            transpose(tile, width, rows.start, again);
        }
    });
    if let Some(third) = third {
        let value = if current { scale } else { top.get() };
        // SAFETY: one element, written after the input that it may overlap was read.
        unsafe { third.rows().store(0, 0, &[value]) };
    }
    Ok(())
}

/// Writes a tile of rows along columns, starting at element `at` of each column; these elements belong to one task.
fn transpose(tile: &[f32], width: usize, at: usize, to: &Tensor<'_>) {
    let mut column = vec![0.0; tile.len().checked_div(width).unwrap_or(0)];
    for c in 0..width {
        column.iter_mut().enumerate().for_each(|(r, y)| *y = tile[r * width + c]);
        // SAFETY: these elements of the column belong to one task.
        unsafe { to.rows().store(c, at, &column) };
    }
}

/// The input of the quantisation, by the operation that computes it.
struct X<'a> {
    of: Source,
    ins: Vec<Rows<'a>>,
}

impl X<'_> {
    fn width(&self) -> usize {
        if matches!(self.of, Source::GatedGrad { .. }) { 2 * self.ins[0].width } else { self.ins[0].width }
    }

    /// Computes a row of x, rounded to the type of x.
    fn load(&self, row: usize, to: &mut [f32], spare: &mut [f32]) {
        let n = self.ins[0].width;
        // SAFETY: inputs are only read, and no output overlaps them.
        unsafe {
            match self.of {
                Source::Given => return self.ins[0].load(row, 0, to),
                Source::Gated(act) => {
                    self.ins[0].load(row, 0, to);
                    self.ins[1].load(row, 0, spare);
                    gated::forward(act, to, spare);
                }
                Source::GatedGrad { act, .. } => {
                    let (gate, up) = to.split_at_mut(n);
                    self.ins[0].load(row, 0, gate);
                    self.ins[1].load(row, 0, up);
                    self.ins[2].load(row, 0, &mut spare[..n]);
                    gated::backward(act, gate, up, &spare[..n]);
                }
                Source::Norm(..) | Source::NormGrad { .. } => unreachable!("a norm is made before"),
            }
        }
        self.round(to);
    }

    /// Computes a row of the value whose codes a gradient makes again.
    fn load_again(&self, row: usize, to: &mut [f32], spare: &mut [f32]) {
        let Source::GatedGrad { act, .. } = self.of else { unreachable!("called for a gradient") };
        // SAFETY: inputs are only read, and no output overlaps them.
        unsafe {
            self.ins[0].load(row, 0, to);
            self.ins[1].load(row, 0, spare);
        }
        gated::forward(act, to, spare);
        self.round(to);
    }

    /// Rounds values to the type of x.
    fn round(&self, values: &mut [f32]) {
        if self.ins[0].tensor.dtype == DType::BF16 {
            values.iter_mut().for_each(|x| *x = bf16_to_f32(round_bf16(*x)));
        }
    }
}

/// The largest magnitude of a slice; NaN is ignored.
fn magnitude(x: &[f32]) -> f32 {
    x.iter().fold(0.0, |top: f32, x| top.max(x.abs()))
}

fn largest(x: &Rows<'_>, cx: &Context<'_>) -> f32 {
    let top = Top::new(0.0);
    cx.parallel(x.count.div_ceil(ROWS_A_TASK), ROWS_A_TASK * x.width * x.tensor.dtype.bytes(), |task| {
        let mut buffer = vec![0.0; x.width];
        for row in chunk(task, ROWS_A_TASK, x.count) {
            // SAFETY: the input is only read.
            top.raise(magnitude(unsafe { x.get(row, &mut buffer) }));
        }
    });
    top.get()
}

/// A maximum that tasks raise. Magnitudes are non-negative, so their bits have the order of their values.
struct Top(AtomicU32);

impl Top {
    fn new(x: f32) -> Top {
        Top(AtomicU32::new(x.to_bits()))
    }

    fn raise(&self, x: f32) {
        self.0.fetch_max(x.to_bits(), Ordering::Relaxed);
    }

    fn get(&self) -> f32 {
        f32::from_bits(self.0.load(Ordering::Relaxed))
    }
}
