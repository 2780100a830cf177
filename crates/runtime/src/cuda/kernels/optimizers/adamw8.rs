//! AdamW with 8-bit moments, in one pass; the kernel is `adamw8.cu`.
//!
//! `flatout_ir::block8` defines the codes.

use flatout_ir::block8::BLOCK;
use flatout_ir::target::Layout;
use flatout_ir::types::DType;
use flatout_ir::{Launch, Op, OpKind, View};

use crate::cuda::context::{Facts, Kernel};
use crate::cuda::kernels::address::{Walk, index_type};
use crate::cuda::kernels::stage::{
    self, Draft, PHILOX, Stage, Stages, Value, at, at_or_nothing, blocks, staged,
};
use crate::rows::kernel_row;

pub const KERNELS: &[Kernel] =
    &[staged!(kernel_row("cuda.adamw8", OpKind::AdamW8, &[DType::F32], Layout::Dense), stages)];

/// Thread blocks per multiprocessor, as the launch bounds guarantee, if all blocks of elements are complete: 48 registers a
/// thread.
const RESIDENT: u32 = 5;
/// As above if the last block is short, elements are counted in 64 bits, or a rank has a share: each takes more registers.
const RESIDENT_ELSE: u32 = 4;
/// Maximum thread blocks per multiprocessor, counting several waves. On an H200 these reach 94% of a copy's bandwidth, and five
/// with a grid-stride loop 90%: those end together, and the last of them run alone.
const GRID: u32 = 64;
/// Blocks of elements per block of 256 threads, one per warp.
const WARPS: usize = 8;

fn stages(launch: &Launch, facts: &Facts) -> Stages {
    let Op::AdamW8 { beta1, beta2, eps, weight_decay, lr_scale, copy, first } = launch.op else {
        unreachable!("the row is for adamw8")
    };
    let count = launch.ins[0].elements();
    if count == 0 || launch.outs.iter().all(Option::is_none) {
        return Ok(vec![]);
    }
    let index = index_type(count);
    let outs: Vec<Option<&View>> = (0..5)
        .map(|o| launch.outs[o].as_ref())
        .chain([launch.outs.get(5).filter(|_| copy).and_then(Option::as_ref)])
        .collect();
    // All blocks are complete, and four elements are one access.
    let tensors = launch.ins[..4].iter().chain(outs[..3].iter().chain(&outs[5..]).copied().flatten());
    let is_whole = count.is_multiple_of(BLOCK)
        && tensors.into_iter().all(|view| Walk::of(view).takes(4, view.dtype, view.offset));
    let has_rank = launch.ins.len() > 10;
    let resident = if is_whole && index == "u32" && !has_rank { RESIDENT } else { RESIDENT_ELSE };
    let names = ["HAS_P", "HAS_M", "HAS_V", "HAS_M_SCALE", "HAS_V_SCALE", "HAS_COPY"];
    let mut draft = Draft::new("adamw8.cu")
        .define("INDEX", index)
        .define("RESIDENT", resident)
        .flag("WHOLE", is_whole)
        .flag("HAS_RANK", has_rank)
        .text(PHILOX);
    for (name, out) in names.into_iter().zip(&outs) {
        draft = draft.flag(name, out.is_some());
    }
    let mut args: Vec<Value> = launch.ins.iter().map(at).collect();
    args.extend(outs.into_iter().map(at_or_nothing));
    args.extend([stage::count(index, count), Value::I64(first as i64)]);
    args.extend([lr_scale, beta1, beta2, eps, weight_decay].map(Value::F32));
    args.extend([beta1, beta2].map(|beta| Value::F64((beta as f64).ln())));
    Ok(vec![Stage {
        source: draft.source(include_str!("adamw8.cu")),
        entry: "adamw8",
        grid: [blocks(count.div_ceil(BLOCK), WARPS)?.min(facts.sms.max(1) * GRID), 1],
        block: 256,
        args,
    }])
}
