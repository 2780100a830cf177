//! Counter-based dropout, with the random bits of `flatout_ir::random`.
//!
//! Element c of a row draws half c mod 8 of block c / 8.

use flatout_ir::random::{RowDraw, drop_below};
use flatout_ir::target::Layout;
use flatout_ir::{Launch, Op, OpKind};

use crate::cpu::Kernel;
use crate::cpu::context::{Context, chunk};
use crate::cpu::math::vectorised;
use crate::rows::{FLOATS, kernel_row};

pub const KERNELS: &[Kernel] =
    &[Kernel { row: kernel_row("dropout", OpKind::Dropout, FLOATS, Layout::Any), run }];

/// Blocks of eight draws computed together, so that the rounds run in vector lanes.
const BLOCKS: usize = 16;

vectorised! {
    /// Drops elements of a token.
    fn apply_dropout(draw: RowDraw, below: u16, keep: f32, x: &mut [f32]) {
        for (i, x) in x.chunks_mut(8 * BLOCKS).enumerate() {
            let mut words = [[0_u32; 4]; BLOCKS];
            for (b, block) in words.iter_mut().enumerate() {
                *block = draw.block((i * BLOCKS + b) as u32);
            }
            let mut halves = [[0_u16; 2]; 4 * BLOCKS];
            for (half, word) in halves.iter_mut().zip(words.as_flattened()) {
                *half = [*word as u16, (*word >> 16) as u16];
            }
            for (x, half) in x.iter_mut().zip(halves.as_flattened()) {
                *x = if *half >= below { *x * keep } else { 0.0 };
            }
        }
    }
}

/// The random draws of a launch: its inputs `rng` and `rows`, its key and drop probability.
pub(super) struct Draws {
    rng: Vec<i32>,
    samples: Vec<i32>,
    key: u64,
    below: u16,
    keep: f32,
}

impl Draws {
    /// With rng at input `first`, followed by rows.
    ///
    /// # Safety
    ///
    /// Neither overlaps an output.
    pub(super) unsafe fn new(p: f32, key: u64, first: usize, cx: &Context<'_>) -> Self {
        // SAFETY: guaranteed by the caller.
        let (rng, samples) = unsafe { (cx.input(first).i32s(), cx.input(first + 1).i32s()) };
        Draws { rng, samples, key, below: drop_below(p), keep: (1.0 / (1.0 - p as f64)) as f32 }
    }

    /// Drops elements of a token, given all of its elements.
    pub(super) fn apply_dropout(&self, t: usize, token: &mut [f32]) {
        let [seed, high, step] = [self.rng[0], self.rng[1], self.rng[2]];
        let draw = RowDraw::new([seed, high, step], self.key, self.samples[2 * t], self.samples[2 * t + 1]);
        apply_dropout(draw, self.below, self.keep, token);
    }
}

fn run(launch: &Launch, cx: &Context<'_>) -> Result<(), String> {
    let Op::Dropout { p } = launch.op else { unreachable!("the row is for dropout") };
    let Some(out) = cx.output(0) else { return Ok(()) };
    let (x, to) = (cx.input(0).rows(), out.rows());
    // SAFETY: rng and rows are i32, and no output is.
    let draws = unsafe { Draws::new(p, launch.key, 1, cx) };
    let tokens = out.dims[0];
    // A one-dimensional tensor is one row of tokens with one element each.
    let is_flat = out.dims.len() == 1;
    let lines = if is_flat { 1 } else { to.count.checked_div(tokens).unwrap_or(0) };
    let width = if is_flat { 1 } else { to.width };
    let per_task = (8192 / (lines * width).max(1)).max(1);
    // Drawing costs about as much as reading 32 bytes per element.
    cx.parallel(tokens.div_ceil(per_task), 32 * per_task * lines * width, |task| {
        let mut token = vec![0.0; lines * width];
        for t in chunk(task, per_task, tokens) {
            let place = |line: usize| if is_flat { (0, t) } else { (t * lines + line, 0) };
            // SAFETY: a token belongs to one task and is read before it is written.
            unsafe {
                for (line, part) in token.chunks_exact_mut(width).enumerate() {
                    x.load(place(line).0, place(line).1, part);
                }
                draws.apply_dropout(t, &mut token);
                for (line, part) in token.chunks_exact(width).enumerate() {
                    to.store(place(line).0, place(line).1, part);
                }
            }
        }
    });
    Ok(())
}
