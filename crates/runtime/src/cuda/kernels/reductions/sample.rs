//! The next token of every sequence, drawn on the device from its logits; the kernel is `sample.cu`.

use flatout_ir::target::Layout;
use flatout_ir::types::DType;
use flatout_ir::{Launch, OpKind};

use crate::cuda::context::{Facts, Kernel};
use crate::cuda::kernels::stage::{Draft, PHILOX, Stage, Stages, at, blocks, count32, staged};
use crate::rows::kernel_row;

pub const KERNELS: &[Kernel] =
    &[staged!(kernel_row("cuda.sample", OpKind::Sample, &[DType::F32, DType::I32], Layout::Dense), stages)];

/// Maximum blocks per sequence.
const MOST_RANKS: usize = 8;

/// Thread blocks per sequence, on devices with clusters: as many as there are multiprocessors for.
fn ranks(sequences: usize, facts: &Facts) -> usize {
    let fits = |ranks: &usize| sequences * ranks <= facts.sms as usize;
    [MOST_RANKS, 4, 2].into_iter().find(|ranks| facts.major >= 9 && fits(ranks)).unwrap_or(1)
}

fn stages(launch: &Launch, facts: &Facts) -> Stages {
    let [logits, numbers, shares] = [0, 1, 2].map(|i| &launch.ins[i]);
    let Some(out) = launch.outs[0].as_ref().filter(|out| out.elements() > 0) else { return Ok(vec![]) };
    count32("tokens", logits.dims[1])?;
    let ranks = ranks(logits.dims[0], facts);
    let source = Draft::new("sample.cu")
        .define("VOCAB", logits.dims[1])
        .define("RANKS", ranks)
        .text(PHILOX)
        .source(include_str!("sample.cu"));
    Ok(vec![Stage {
        source,
        entry: "sample",
        grid: [blocks(logits.dims[0] * ranks, 1)?, 1],
        block: 1024,
        args: vec![at(logits), at(numbers), at(shares), at(out)],
    }])
}
