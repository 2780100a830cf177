//! Draws the next token of every sequence from its logits, as `flatout_ir::ops::sample` defines it. A task is one sequence.

use flatout_ir::ops::sample::{NUMBERS, SHARES, sample};
use flatout_ir::target::Layout;
use flatout_ir::types::DType;
use flatout_ir::{Launch, OpKind};

use crate::cpu::Kernel;
use crate::cpu::context::Context;
use crate::rows::kernel_row;

pub const KERNELS: &[Kernel] =
    &[Kernel { row: kernel_row("sample", OpKind::Sample, &[DType::F32, DType::I32], Layout::Dense), run }];

fn run(_: &Launch, cx: &Context<'_>) -> Result<(), String> {
    let Some(out) = cx.output(0) else { return Ok(()) };
    let [logits, numbers, shares] = [0, 1, 2].map(|i| cx.input(i));
    let [rows, vocab] = [logits.dims[0], logits.dims[1]];
    // SAFETY: none of these is an output.
    let (logits, numbers, shares) = unsafe { (logits.f32s(), numbers.i32s(), shares.f32s()) };
    let (logits, shares) = logits.zip(shares).expect("the row is for dense tensors");
    // A token costs about as much as reading 64 bytes: an exponential, and its share of the sorting.
    cx.parallel(rows, 64 * vocab, |row| {
        let of = |width: usize| row * width..(row + 1) * width;
        let drawn = sample(&logits[of(vocab)], &numbers[of(NUMBERS)], &shares[of(SHARES)]);
        // SAFETY: a dense output, of which a task writes only its own row.
        let out = unsafe { std::slice::from_raw_parts_mut(out.at(row * 2).cast::<f32>(), 2) };
        out.copy_from_slice(&drawn.map(|x| x as f32));
    });
    Ok(())
}
