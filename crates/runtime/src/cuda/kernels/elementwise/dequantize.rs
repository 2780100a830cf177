//! Dequantises NF4 weights; the kernel is `dequantize.cu`.

use flatout_ir::nf4::BLOCK;
use flatout_ir::ops::dequantize::{inputs_before_parts, inputs_of_a_part, parts};
use flatout_ir::target::{KernelRow, Layout};
use flatout_ir::types::DType;
use flatout_ir::{Launch, Op, OpKind, View};

use crate::cuda::context::Kernel;
use crate::cuda::kernels::address::{index_type, widths};
use crate::cuda::kernels::stage::{self, Draft, Stage, Stages, Value, at, blocks, staged};
use crate::rows::kernel_row;

const ROW: KernelRow = KernelRow {
    outs: Layout::Rows,
    ..kernel_row("cuda.dequantize", OpKind::Dequantize, &[DType::F32], Layout::Dense)
};

pub const KERNELS: &[Kernel] = &[staged!(ROW, |l, _| stages(l))];

/// Source code shared by the kernels that read NF4 weights.
pub(super) const NF4: &str = include_str!("nf4.cuh");

/// Most values per thread: 16 bytes of bf16.
const MOST: usize = 8;
/// Packs of values per thread.
const PACKS: usize = 4;
/// The widest access.
const ACCESS_BYTES: usize = 16;

/// One stage per part, because each weight has its own blocks.
fn stages(launch: &Launch) -> Stages {
    let Op::Dequantize { rows, nested, .. } = &launch.op else {
        unreachable!("the row is for weights in NF4")
    };
    let Some(out) = &launch.outs[0] else { return Ok(vec![]) };
    let codes = &launch.ins[0];
    let (columns, stride) = (out.dims[1], out.strides[0]);
    if columns == 0 {
        return Ok(vec![]);
    }
    let together = widths(MOST).find(|vec| takes(*vec, codes, out));
    // A byte has two codes, whose values may have any address.
    let vec = together.unwrap_or(2);
    let mut stages = vec![];
    for (part, of) in parts(rows).zip(0..).filter(|(part, _)| !part.is_empty()) {
        let first = inputs_before_parts(*nested) + of * inputs_of_a_part(*nested);
        let count = part.len() * columns;
        let index = index_type(count);
        let source = Draft::new("dequantize.cu")
            .flag("NESTED", *nested)
            .dtype("T_Y", out.dtype)
            .define("VEC", vec)
            .define("PACKS", PACKS)
            .flag("TOGETHER", together.is_some())
            .define("INDEX", index)
            .define("COLUMNS", columns)
            .define("STRIDE", stride)
            .text(NF4)
            .source(include_str!("dequantize.cu"));
        let mut args = vec![Value::At(codes.offset + part.start * columns / 2)];
        args.extend(nested.then(|| at(&launch.ins[1])));
        args.extend(launch.ins[first..first + inputs_of_a_part(*nested)].iter().map(at));
        args.push(Value::At(out.offset + part.start * stride * out.dtype.bytes()));
        args.push(stage::count(index, count));
        stages.push(Stage {
            source,
            entry: "dequantize",
            grid: [blocks(count, 256 * PACKS * vec)?, 1],
            block: 256,
            args,
        });
    }
    Ok(stages)
}

/// Whether `vec` values always lie in one row and one block, with aligned accesses to them and to their codes.
fn takes(vec: usize, codes: &View, out: &View) -> bool {
    let access = (vec * out.dtype.bytes()).min(ACCESS_BYTES);
    let row = out.strides[0] * out.dtype.bytes();
    vec >= 2
        && BLOCK.is_multiple_of(vec)
        && out.dims[1].is_multiple_of(vec)
        && codes.offset.is_multiple_of(vec / 2)
        && out.offset.is_multiple_of(access)
        && (row.is_multiple_of(access) || out.dims[0] == 1)
}
