//! Dequantises NF4 weights, with exactly the bits that `flatout_ir::nf4` defines.
//!
//! A task is one row of the weight. The 16 code values of a block are computed once for the part of a row that lies in it.

use flatout_ir::nf4::{self, NESTED};
use flatout_ir::ops::dequantize::{inputs_before_parts, inputs_of_a_part, parts};
use flatout_ir::target::{KernelRow, Layout};
use flatout_ir::types::{DType, bf16_from_f32};
use flatout_ir::{Launch, Op, OpKind};

use crate::cpu::Kernel;
use crate::cpu::context::Context;
use crate::rows::kernel_row;

const ROW: KernelRow = KernelRow {
    outs: Layout::Rows,
    ..kernel_row("dequantize", OpKind::Dequantize, &[DType::F32], Layout::Dense)
};

pub const KERNELS: &[Kernel] = &[Kernel { row: ROW, run }];

fn run(launch: &Launch, cx: &Context<'_>) -> Result<(), String> {
    let Op::Dequantize { rows, to, nested } = &launch.op else {
        unreachable!("the row is for weights in NF4")
    };
    let Some(out) = cx.output(0) else { return Ok(()) };
    let codes = cx.input(0);
    let (bytes, stride) = (codes.dims[1], out.strides[0]);
    // SAFETY: dense inputs, which no task writes.
    let codes = unsafe { codes.bytes() };
    for (part, of) in parts(rows).zip(0..) {
        let codes = &codes[bytes * part.start..bytes * part.end];
        let of_block = magnitudes(cx, *nested, of);
        cx.parallel(part.len(), 8 * bytes, |row| {
            let (from, place) = (2 * bytes * row, stride * (part.start + row));
            // SAFETY: rows are contiguous, and a task writes only its own.
            unsafe {
                match to {
                    DType::BF16 => {
                        let to = std::slice::from_raw_parts_mut(out.at(place).cast::<u16>(), 2 * bytes);
                        nf4::dequantize(codes, &of_block, bf16_from_f32, from, to);
                    }
                    _ => {
                        let to = std::slice::from_raw_parts_mut(out.at(place).cast::<f32>(), 2 * bytes);
                        nf4::dequantize(codes, &of_block, |x| x, from, to);
                    }
                }
            }
        });
    }
    Ok(())
}

/// The magnitude of each block of a part.
pub(super) fn magnitudes<'a>(
    cx: &'a Context<'_>,
    nested: bool,
    part: usize,
) -> Box<dyn Fn(usize) -> f32 + Sync + Send + 'a> {
    // SAFETY: dense inputs, which no task writes.
    let f32s = |input: usize| unsafe { cx.input(input).f32s() }.expect("dense f32");
    let first = inputs_before_parts(nested) + part * inputs_of_a_part(nested);
    if !nested {
        let absmax = f32s(first);
        return Box::new(|block| absmax[block]);
    }
    // SAFETY: as above.
    let absmax = unsafe { cx.input(first).bytes() };
    let [map, nested, offset] = [1, first + 1, first + 2].map(f32s);
    Box::new(move |block| nf4::magnitude(map[absmax[block] as usize], nested[block / NESTED], offset[0]))
}
