//! Requantises NF4 weights to E4M3. The 16 codes of a block are computed once for the part of a row that a task takes of it.

use flatout_ir::fp8::e4m3_from_f32;
use flatout_ir::nf4::{self, BLOCK};
use flatout_ir::ops::dequantize::parts;
use flatout_ir::target::{KernelRow, Layout};
use flatout_ir::types::{DType, bf16_from_f32, bf16_to_f32};
use flatout_ir::{Launch, Op, OpKind};

use super::dequantize::magnitudes;
use crate::cpu::Kernel;
use crate::cpu::context::Context;
use crate::rows::kernel_row;

const ROW: KernelRow = KernelRow {
    outs: Layout::Rows,
    ..kernel_row("requantize", OpKind::Requantize, &[DType::F32], Layout::Dense)
};

pub const KERNELS: &[Kernel] = &[Kernel { row: ROW, run }];

fn run(launch: &Launch, cx: &Context<'_>) -> Result<(), String> {
    let Op::Requantize { rows, transposed } = &launch.op else {
        unreachable!("the row is for weights in NF4")
    };
    let Some(out) = cx.output(0) else { return Ok(()) };
    let codes = cx.input(0);
    let (columns, pitch) = (2 * codes.dims[1], out.strides[0]);
    // SAFETY: dense inputs, which no task writes.
    let codes = unsafe { codes.bytes() };
    // SAFETY: as above.
    let scale = unsafe { cx.input(launch.ins.len() - 1).f32s() }.expect("dense f32")[0];
    let by = 1.0 / scale;
    let code = |x: f32| e4m3_from_f32(bf16_to_f32(bf16_from_f32(x)) * by);
    for (part, of) in parts(rows).zip(0..) {
        let codes = &codes[columns / 2 * part.start..columns / 2 * part.end];
        let magnitude = magnitudes(cx, true, of);
        if !transposed {
            cx.parallel(part.len(), 8 * columns, |row| {
                // SAFETY: rows are contiguous, and a task writes only its own.
                let to = unsafe {
                    std::slice::from_raw_parts_mut(out.at(pitch * (part.start + row)).cast::<u8>(), columns)
                };
                nf4::dequantize(codes, &magnitude, code, columns * row, to);
            });
            continue;
        }
        cx.parallel(columns.div_ceil(BLOCK), 8 * BLOCK * part.len(), |task| {
            let mut some = [0; BLOCK];
            let first = BLOCK * task;
            let some = &mut some[..BLOCK.min(columns - first)];
            for row in 0..part.len() {
                nf4::dequantize(codes, &magnitude, code, columns * row + first, some);
                for (code, column) in some.iter().zip(first..) {
                    // SAFETY: a task writes only rows of the output of its own.
                    unsafe { out.at(pitch * column + part.start + row).cast::<u8>().write(*code) };
                }
            }
        });
    }
    Ok(())
}
