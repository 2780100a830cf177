//! Gated activations, act(gate) * up, and their gradient in one pass.
//!
//! d gate = dy up act'(gate), d up = dy act(gate). gate and up are usually the halves of one buffer's rows.

use flatout_ir::ops::gated::Act;
use flatout_ir::target::Layout;
use flatout_ir::{Launch, Op, OpKind, View};

use super::dropout::Draws;
use super::map::Tiles;
use crate::cpu::Kernel;
use crate::cpu::context::{Context, chunk};
use crate::cpu::math::{self, vectorised};
use crate::cpu::tensor::Rows;
use crate::rows::{FLOATS, kernel_row};

pub const KERNELS: &[Kernel] = &[
    Kernel { row: kernel_row("gated", OpKind::Gated, FLOATS, Layout::Any), run },
    Kernel { row: kernel_row("gated_grad", OpKind::GatedGrad, FLOATS, Layout::Any), run: run_grad },
];

/// Replaces gate by the value.
#[inline(always)]
fn forward_with(gate: &mut [f32], up: &[f32], act: impl Fn(f32) -> f32) {
    gate.iter_mut().zip(up).for_each(|(gate, up)| *gate = act(*gate) * up);
}

/// Replaces gate and up by their gradients. `both` returns value and derivative.
#[inline(always)]
fn backward_with(gate: &mut [f32], up: &mut [f32], dy: &[f32], both: impl Fn(f32) -> (f32, f32)) {
    for ((gate, up), dy) in gate.iter_mut().zip(up).zip(dy) {
        let (value, slope) = both(*gate);
        (*gate, *up) = (dy * *up * slope, dy * value);
    }
}

vectorised! {
    pub(super) fn forward(act: Act, gate: &mut [f32], up: &[f32]) {
        match act {
            Act::Silu => forward_with(gate, up, math::silu),
            Act::Gelu => forward_with(gate, up, math::gelu),
            Act::GeluExact => forward_with(gate, up, math::gelu_exact),
            Act::Relu => forward_with(gate, up, |x| x.max(0.0)),
        }
    }

    pub(super) fn backward(act: Act, gate: &mut [f32], up: &mut [f32], dy: &[f32]) {
        match act {
            Act::Silu => backward_with(gate, up, dy, |x| {
                let s = math::sigmoid(x);
                (x * s, s * x.mul_add(1.0 - s, 1.0))
            }),
            Act::Gelu => backward_with(gate, up, dy, |x| (math::gelu(x), math::gelu_slope(x))),
            Act::GeluExact => backward_with(gate, up, dy, |x| {
                let (share, density) = math::normal(x);
                (x * share, x.mul_add(density, share))
            }),
            Act::Relu => backward_with(gate, up, dy, |x| if x > 0.0 { (x, 1.0) } else { (0.0, 0.0) }),
        }
    }
}

/// Tiles per task: about 64 KiB of traffic.
const TILES_A_TASK: usize = 4;
const TILE_BYTES: usize = 5 * 4096;

fn run(launch: &Launch, cx: &Context<'_>) -> Result<(), String> {
    let Op::Gated { act, p } = launch.op else { unreachable!("the row is for gated") };
    if p > 0.0 {
        return run_dropped(launch, act, p, cx);
    }
    let (Some(out), Some(out_view)) = (cx.output(0), &launch.outs[0]) else { return Ok(()) };
    let (gate, up) = (cx.input(0), cx.input(1));
    let tiles = Tiles::new(&[&launch.ins[0], &launch.ins[1], out_view]);
    let count = tiles.count();
    cx.parallel(count.div_ceil(TILES_A_TASK), TILES_A_TASK * TILE_BYTES, |task| {
        let (mut a, mut b) = (vec![0.0; Tiles::LEN], vec![0.0; Tiles::LEN]);
        for t in chunk(task, TILES_A_TASK, count) {
            let tile = tiles.tile(t);
            let (a, b) = (&mut a[..tile.len()], &mut b[..tile.len()]);
            // SAFETY: a tile belongs to one task and is read before it is written.
            unsafe {
                tiles.load(0, &gate, &tile, a);
                tiles.load(1, &up, &tile, b);
                forward(act, a, b);
                tiles.store(2, &out, &tile, a);
            }
        }
    });
    Ok(())
}

fn run_grad(launch: &Launch, cx: &Context<'_>) -> Result<(), String> {
    let Op::GatedGrad { act, again, p } = launch.op else { unreachable!("the row is for gated_grad") };
    if p > 0.0 {
        return run_dropped(launch, act, p, cx);
    }
    let (gate, up, dy) = (cx.input(0), cx.input(1), cx.input(2));
    let outs = [cx.output(0), cx.output(1), again.then(|| cx.output(2)).flatten()];
    let views: Vec<&View> = launch.ins.iter().chain(launch.outs.iter().flatten()).collect();
    let tiles = Tiles::new(&views);
    let count = tiles.count();
    cx.parallel(count.div_ceil(TILES_A_TASK), TILES_A_TASK * TILE_BYTES, |task| {
        let mut buffers: [Vec<f32>; 4] = std::array::from_fn(|_| vec![0.0; Tiles::LEN]);
        for t in chunk(task, TILES_A_TASK, count) {
            let tile = tiles.tile(t);
            let [a, b, d, y] = buffers.each_mut().map(|buffer| &mut buffer[..tile.len()]);
            // SAFETY: a tile belongs to one task, and all three inputs are read before an output is written.
            unsafe {
                tiles.load(0, &gate, &tile, a);
                tiles.load(1, &up, &tile, b);
                tiles.load(2, &dy, &tile, d);
                if outs[2].is_some() {
                    // Uses the forward pass's function, for the same bits.
                    y.copy_from_slice(a);
                    forward(act, y, b);
                }
                backward(act, a, b, d);
                let wanted =
                    outs.iter().zip([a, b, y]).filter_map(|(out, values)| Some((out.as_ref()?, values)));
                for (operand, (out, values)) in wanted.enumerate() {
                    tiles.store(3 + operand, out, &tile, values);
                }
            }
        }
    });
    Ok(())
}

/// Either direction with dropout, token by token: the elements of a token share a counter.
fn run_dropped(launch: &Launch, act: Act, p: f32, cx: &Context<'_>) -> Result<(), String> {
    let is_grad = matches!(launch.op, Op::GatedGrad { .. });
    let ins: Vec<Rows<'_>> = (0..if is_grad { 3 } else { 2 }).map(|i| cx.input(i).rows()).collect();
    let outs: Vec<Option<Rows<'_>>> =
        (0..launch.outs.len()).map(|i| cx.output(i).map(|out| out.rows())).collect();
    // SAFETY: rng and rows are i32, and no output is.
    let draws = unsafe { Draws::new(p, launch.key, ins.len(), cx) };
    let (tokens, is_flat) = (launch.ins[0].dims[0], launch.ins[0].dims.len() == 1);
    let width = if is_flat { 1 } else { ins[0].width };
    let lines = if is_flat { 1 } else { ins[0].count.checked_div(tokens).unwrap_or(0) };
    let place = |t: usize, line: usize| if is_flat { (0, t) } else { (t * lines + line, 0) };
    let per_task = (8192 / (lines * width).max(1)).max(1);
    cx.parallel(tokens.div_ceil(per_task), 40 * per_task * lines * width, |task| {
        let mut buffers: [Vec<f32>; 4] = std::array::from_fn(|_| vec![0.0; lines * width]);
        for t in chunk(task, per_task, tokens) {
            let [a, b, d, y] = buffers.each_mut().map(Vec::as_mut_slice);
            // SAFETY: a token belongs to one task, and all its inputs are read before an output is written.
            unsafe {
                for (rows, values) in ins.iter().zip([&mut *a, &mut *b, &mut *d]) {
                    for (line, part) in values.chunks_exact_mut(width).enumerate() {
                        let (row, from) = place(t, line);
                        rows.load(row, from, part);
                    }
                }
                y.copy_from_slice(a);
                forward(act, y, b);
                draws.apply_dropout(t, y);
                if is_grad {
                    draws.apply_dropout(t, d);
                    backward(act, a, b, d);
                }
                let values: &[&[f32]] = if is_grad { &[a, b, y] } else { &[y] };
                for (out, values) in outs.iter().zip(values) {
                    let Some(out) = out else { continue };
                    for (line, part) in values.chunks_exact(width).enumerate() {
                        let (row, from) = place(t, line);
                        out.store(row, from, part);
                    }
                }
            }
        }
    });
    Ok(())
}
