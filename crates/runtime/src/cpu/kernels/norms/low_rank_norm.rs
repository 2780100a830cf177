//! The reciprocal row norms 1 / ||w + s b a|| of a weight with its adapter.
//!
//! As `flatout_ir::ops::low_rank_norm` defines it; a task is one row, summed in f32.

use flatout_ir::target::Layout;
use flatout_ir::{Launch, Op, OpKind};

use crate::cpu::Kernel;
use crate::cpu::context::Context;
use crate::cpu::math::{self, vectorised};
use crate::rows::{FLOATS, kernel_row};

pub const KERNELS: &[Kernel] =
    &[Kernel { row: kernel_row("low_rank_norm", OpKind::LowRankNorm, FLOATS, Layout::Dense), run }];

vectorised! {
    fn add_times(x: &[f32], by: f32, to: &mut [f32]) {
        to.iter_mut().zip(x).for_each(|(to, x)| *to += by * x);
    }

    fn inverse_norm(x: &[f32]) -> f32 {
        1.0 / math::sum_squares(x).sqrt()
    }
}

fn run(launch: &Launch, cx: &Context<'_>) -> Result<(), String> {
    let Op::LowRankNorm { scale } = launch.op else { unreachable!("the row is for norms of sums") };
    let Some(out) = cx.output(0) else { return Ok(()) };
    let (w, a, b) = (cx.input(0), cx.input(1), cx.input(2));
    let (rows, columns, rank) = (w.dims[0], w.dims[1], a.dims[0]);
    // SAFETY: inputs, which no task writes.
    let (a, b) = unsafe { (a.f32s(), b.f32s()) };
    let (a, b) = (a.expect("dense f32"), b.expect("dense f32"));
    cx.parallel(rows, columns * (rank + 1), |row| {
        let mut sum = vec![0.0; columns];
        // SAFETY: the weight is an input.
        unsafe { w.rows().load(row, 0, &mut sum) };
        for r in 0..rank {
            add_times(&a[r * columns..][..columns], scale as f32 * b[row * rank + r], &mut sum);
        }
        // SAFETY: a dense output, of which a task writes only its own element.
        unsafe { *out.at(row).cast::<f32>() = inverse_norm(&sum) };
    });
    Ok(())
}
