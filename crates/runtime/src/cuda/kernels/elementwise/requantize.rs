//! Requantises NF4 weights to E4M3; the kernel is `requantize.cu`.

use flatout_ir::ops::dequantize::{inputs_before_parts, inputs_of_a_part, parts};
use flatout_ir::target::{KernelRow, Layout};
use flatout_ir::types::DType;
use flatout_ir::{Launch, Op, OpKind};

use super::dequantize::NF4;
use super::quantize::CODES;
use crate::cuda::context::Kernel;
use crate::cuda::kernels::stage::{Draft, Stage, Stages, Value, at, blocks, count32, staged};
use crate::rows::kernel_row;

const ROW: KernelRow = KernelRow {
    outs: Layout::Rows,
    ..kernel_row("cuda.requantize", OpKind::Requantize, &[DType::F32], Layout::Dense)
};

pub const KERNELS: &[Kernel] = &[staged!(ROW, |l, _| stages(l))];

/// The tile of a block: 16 columns and 4 rows per thread.
const THREADS: usize = 256;
const COLUMNS: usize = 128;
const ROWS: usize = 4 * THREADS / (COLUMNS / 16);

/// One stage per part, because each weight has its own blocks.
fn stages(launch: &Launch) -> Stages {
    let Op::Requantize { rows, transposed } = &launch.op else {
        unreachable!("the row is for weights in NF4")
    };
    let Some(out) = &launch.outs[0] else { return Ok(vec![]) };
    let (codes, scale) = (&launch.ins[0], launch.ins.last().expect("a scale"));
    let (columns, pitch) = (2 * codes.dims[1], out.strides[0]);
    if columns == 0 {
        return Ok(vec![]);
    }
    let mut stages = vec![];
    for (part, of) in parts(rows).zip(0..).filter(|(part, _)| !part.is_empty()) {
        let first = inputs_before_parts(true) + of * inputs_of_a_part(true);
        let from = codes.offset + part.start * columns / 2;
        let to = out.offset + if *transposed { part.start } else { part.start * pitch };
        let is_aligned = to.is_multiple_of(16) && pitch.is_multiple_of(16);
        let source = Draft::new("requantize.cu")
            .define("TO", 4)
            .define("THREADS", THREADS)
            .define("COLUMNS", COLUMNS)
            .flag("TRANSPOSED", *transposed)
            .define("VEC_CODES", if from.is_multiple_of(8) { 8 } else { 1 })
            .define("VEC_Y", if is_aligned { 16 } else { 1 })
            .text(CODES)
            .text(NF4)
            .source(include_str!("requantize.cu"));
        let mut args = vec![Value::At(from), at(&launch.ins[1])];
        args.extend(launch.ins[first..first + inputs_of_a_part(true)].iter().map(at));
        args.extend([at(scale), Value::At(to)]);
        args.extend([count32("rows", part.len())?, count32("columns", columns)?, Value::I64(pitch as i64)]);
        stages.push(Stage {
            source,
            entry: "requantize",
            grid: [blocks(part.len().div_ceil(ROWS) * columns.div_ceil(COLUMNS), 1)?, 1],
            block: THREADS as u32,
            args,
        });
    }
    Ok(stages)
}
