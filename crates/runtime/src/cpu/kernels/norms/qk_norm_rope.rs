//! RMS norm of each head of q or k fused with its rotation, and their gradient, one pass over memory each.
//!
//! The backward pass rotates dy back, then computes the norm's gradient of each head. dw is accumulated over groups of `GROUP`
//! tokens in the workspace, then over groups in order.

use std::ops::Range;

use flatout_ir::ops::qk_norm_rope::weights;
use flatout_ir::ops::rope::Pairs;
use flatout_ir::target::{KernelRow, Layout, Shapes};
use flatout_ir::{Launch, Op, OpKind};

use super::norm::{gains, normed_row, normed_row_back};
use super::rope::{Rotation, Tokens, rotate_heads};
use crate::cpu::Kernel;
use crate::cpu::context::{Context, chunk};
use crate::cpu::kernels::reductions::reduce::{Shared, sum_rows};
use crate::cpu::math::vectorised;
use crate::rows::{FLOATS, kernel_row};

pub const KERNELS: &[Kernel] = &[
    Kernel { row: kernel_row("qk_norm_rope", OpKind::QkNormRope, FLOATS, Layout::Any), run },
    Kernel {
        row: KernelRow {
            workspace,
            ..kernel_row("qk_norm_rope_grad", OpKind::QkNormRopeGrad, FLOATS, Layout::Any)
        },
        run: run_grad,
    },
];

/// Tokens whose contributions to dw are accumulated together.
const GROUP: usize = 32;

fn workspace(shapes: &Shapes<'_>) -> usize {
    let Op::QkNormRopeGrad { weight, first, .. } = shapes.node.op else {
        unreachable!("the row is for its gradient")
    };
    let x = shapes.ins[0];
    if weight.is_some() { x.dims[0].div_ceil(GROUP) * weights(first) * x.last() * 4 } else { 0 }
}

vectorised! {
    fn forward(x: &[f32], g: &[f32], first: usize, eps: f32, pairs: Pairs, cos: &[f32], sin: &[f32],
        y: &mut [f32]) {
        let size = 2 * cos.len();
        let heads = x.chunks_exact(size).zip(y.chunks_exact_mut(size));
        for (head, (x, y)) in heads.enumerate() {
            normed_row(x, &g[own(head, first, size)], eps, y);
        }
        rotate_heads(pairs, 1.0, cos, sin, y);
    }

    fn backward(x: &[f32], g: &[f32], first: usize, eps: f32, pairs: Pairs, cos: &[f32], sin: &[f32],
        dy: &mut [f32], dx: &mut [f32], dw: &mut [f32]) {
        rotate_heads(pairs, -1.0, cos, sin, dy);
        let size = 2 * cos.len();
        let heads = x.chunks_exact(size).zip(dy.chunks_exact(size)).zip(dx.chunks_exact_mut(size));
        for (head, ((x, dy), dx)) in heads.enumerate() {
            let own = own(head, first, size);
            let dw = if dw.is_empty() { &mut [] } else { &mut dw[own.clone()] };
            normed_row_back(x, &g[own], eps, dy, dx, dw);
        }
    }
}

/// The range of a head's weight among adjacent weights.
fn own(head: usize, first: usize, size: usize) -> Range<usize> {
    let nth = (first > 0 && head >= first) as usize;
    nth * size..(nth + 1) * size
}

fn run(launch: &Launch, cx: &Context<'_>) -> Result<(), String> {
    let Op::QkNormRope { eps, weight, first, freq, ref axis_of_freq, pairs, table } = launch.op else {
        unreachable!("the row is for qk_norm_rope")
    };
    let Some(out) = cx.output(0) else { return Ok(()) };
    let w = weight.is_some() as usize;
    let (x, to) = (Tokens::new(cx.input(0)), Tokens::new(out));
    let (tokens, half) = (out.dims[0], axis_of_freq.len());
    // SAFETY: only x may overlap the output.
    let (g, rotation) = unsafe {
        let g = gains(weight, weight.is_some().then(|| cx.input(1)), weights(first) * 2 * half);
        (g, Rotation::new(freq, axis_of_freq, cx.input(1 + w), table.then(|| cx.input(2 + w))))
    };
    cx.parallel(tokens.div_ceil(GROUP), 8 * GROUP * x.width(), |group| {
        let (mut token, mut y) = (vec![0.0; x.width()], vec![0.0; x.width()]);
        let (mut cos, mut sin) = (vec![0.0; half], vec![0.0; half]);
        for t in chunk(group, GROUP, tokens) {
            // SAFETY: a token belongs to one task and is read before it is written.
            unsafe {
                rotation.of(t, &mut cos, &mut sin);
                x.load(t, &mut token);
                forward(&token, &g, first, eps, pairs, &cos, &sin, &mut y);
                to.store(t, &y);
            }
        }
    });
    Ok(())
}

fn run_grad(launch: &Launch, cx: &Context<'_>) -> Result<(), String> {
    let Op::QkNormRopeGrad { eps, weight, first, freq, ref axis_of_freq, pairs, table } = launch.op else {
        unreachable!("the row is for its gradient")
    };
    let w = weight.is_some() as usize;
    let (x, dy) = (Tokens::new(cx.input(0)), Tokens::new(cx.input(launch.ins.len() - 1)));
    let (tokens, half) = (launch.ins[0].dims[0], axis_of_freq.len());
    let size = weights(first) * 2 * half;
    // SAFETY: weight, positions and table overlap no output.
    let (g, rotation) = unsafe {
        let g = gains(weight, weight.is_some().then(|| cx.input(1)), size);
        (g, Rotation::new(freq, axis_of_freq, cx.input(1 + w), table.then(|| cx.input(2 + w))))
    };
    let (dx, dw) = (cx.output(0).map(Tokens::new), weight.is_some().then(|| cx.output(1)).flatten());
    let groups = tokens.div_ceil(GROUP);
    // SAFETY: the only call of this launch.
    let partial = unsafe { cx.workspace() };
    let all = Shared::new(partial);
    cx.parallel(groups, 12 * GROUP * x.width(), |group| {
        let mut buffers: [Vec<f32>; 3] = std::array::from_fn(|_| vec![0.0; x.width()]);
        let [x_token, dy_token, dx_token] = &mut buffers;
        let (mut cos, mut sin) = (vec![0.0; half], vec![0.0; half]);
        // SAFETY: a token belongs to one task and is read before dx, which may overlap it, is written; the group's part of the
        // workspace belongs to the task.
        unsafe {
            let dw = match dw {
                Some(_) => all.slice(group * size..(group + 1) * size),
                None => &mut [],
            };
            dw.fill(0.0);
            for t in chunk(group, GROUP, tokens) {
                rotation.of(t, &mut cos, &mut sin);
                x.load(t, x_token);
                dy.load(t, dy_token);
                backward(x_token, &g, first, eps, pairs, &cos, &sin, dy_token, dx_token, dw);
                if let Some(dx) = &dx {
                    dx.store(t, dx_token);
                }
            }
        }
    });
    if let Some(dw) = dw {
        sum_rows(&partial[..groups * size], size, &dw);
    }
    Ok(())
}
