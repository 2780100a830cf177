//! Matrices in 8-bit types, both ways round. Tiles of a few rows are read once; their codes are written along and, turned,
//! down the columns. Exact: the codes are the type's own rounding of x times the scale's reciprocal.

use std::sync::atomic::{AtomicU32, Ordering};

use flatout_ir::ops::quantize::Source;
use flatout_ir::target::{KernelRow, Layout, no_workspace};
use flatout_ir::types::{DType, bf16_to_f32};
use flatout_ir::{Launch, Op, OpKind, fp8};

use super::context::{Context, chunk};
use super::gated;
use super::tensor::{Rows, round_bf16};
use super::{FLOATS, Kernel};

pub const KERNELS: &[Kernel] = &[Kernel {
    row: KernelRow {
        name: "quantize",
        op: OpKind::Quantize,
        dtypes: FLOATS,
        ins: Layout::Any,
        outs: Layout::Any,
        in_place: &[(2, 2), (3, 2), (4, 2)],
        workspace: no_workspace,
        deterministic: true,
    },
    run,
}];

/// Rows a task covers: columns of the turned output are written so many elements at a time.
const ROWS_A_TASK: usize = 16;

fn run(launch: &Launch, cx: &Context<'_>) -> Result<(), String> {
    let Op::Quantize { to, current, of } = launch.op else { unreachable!("the row is for quantize") };
    let x = X { of, ins: (0..of.inputs()).map(|i| cx.input(i).rows()).collect() };
    let (count, width) = (x.ins[0].count, x.width());
    let (codes, turned, third) = (cx.output(0), cx.output(1), cx.output(2));
    let (scale, amax) = if current {
        (fp8::scale(to, largest(&x.ins[0], cx)), 0.0)
    } else {
        // SAFETY: one element each; the second is read before it is written.
        unsafe { (cx.input(of.inputs()).scalar(), cx.input(of.inputs() + 1).scalar()) }
    };
    let by = 1.0 / scale;
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
        let Some(turned) = &turned else { return };
        let mut column = vec![0.0; rows.len()];
        for c in 0..width {
            column.iter_mut().enumerate().for_each(|(r, y)| *y = tile[r * width + c]);
            // SAFETY: these elements of the column belong to one task.
            unsafe { turned.rows().store(c, rows.start, &column) };
        }
    });
    if let Some(third) = third {
        let value = if current { scale } else { top.get() };
        // SAFETY: one element, written after the input it may lie on was read.
        unsafe { third.rows().store(0, 0, &[value]) };
    }
    Ok(())
}

/// What is quantised, by what it is made of.
struct X<'a> {
    of: Source,
    ins: Vec<Rows<'a>>,
}

impl X<'_> {
    fn width(&self) -> usize {
        if matches!(self.of, Source::GatedGrad(_)) { 2 * self.ins[0].width } else { self.ins[0].width }
    }

    /// A row of x, rounded to x's own type.
    fn load(&self, row: usize, to: &mut [f32], spare: &mut [f32]) {
        let n = self.ins[0].width;
        // SAFETY: inputs are only read, and no output lies on them.
        unsafe {
            match self.of {
                Source::Given => return self.ins[0].load(row, 0, to),
                Source::Gated(act) => {
                    self.ins[0].load(row, 0, to);
                    self.ins[1].load(row, 0, spare);
                    gated::forward(act, to, spare);
                }
                Source::GatedGrad(act) => {
                    let (gate, up) = to.split_at_mut(n);
                    self.ins[0].load(row, 0, gate);
                    self.ins[1].load(row, 0, up);
                    self.ins[2].load(row, 0, &mut spare[..n]);
                    gated::backward(act, gate, up, &spare[..n]);
                }
            }
        }
        if self.ins[0].tensor.dtype == DType::BF16 {
            to.iter_mut().for_each(|x| *x = bf16_to_f32(round_bf16(*x)));
        }
    }
}

/// The largest magnitude of a slice; a NaN counts for nothing.
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

/// A maximum that tasks raise. Magnitudes are not negative, so their bits are in the order of their values.
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
