//! Resamples crops of a table's images to one size, as `flatout_ir::ops::resample` defines it.
//!
//! A task is one image, summed by one thread in a fixed order, so the bytes do not depend on the number of threads. A crop
//! outside its image is an error.

use flatout_ir::ops::resample::{ImageCrop, PART, resample};
use flatout_ir::target::Layout;
use flatout_ir::types::DType;
use flatout_ir::{Launch, Op, OpKind};

use crate::cpu::Kernel;
use crate::cpu::context::Context;
use crate::rows::kernel_row;

pub const KERNELS: &[Kernel] =
    &[Kernel { row: kernel_row("resample", OpKind::Resample, &[DType::U8, DType::I32], Layout::Dense), run }];

fn run(launch: &Launch, cx: &Context<'_>) -> Result<(), String> {
    let Op::Resample { height, width } = launch.op else { unreachable!("the row is for parts of images") };
    let Some(out) = cx.output(0) else { return Ok(()) };
    let (table, numbers) = (cx.input(0), cx.input(1));
    let dims = table.dims;
    let (image, seen) = (dims[1..].iter().product::<usize>(), height * width * dims[3]);
    // SAFETY: the numbers are not an output.
    let numbers = unsafe { numbers.i32s() };
    let parts: Vec<Option<ImageCrop>> =
        numbers.chunks_exact(PART).map(|part| ImageCrop::of(part, dims)).collect::<Result<_, _>>()?;
    // A pixel computed from four costs about as much as reading 16 bytes per output byte.
    cx.parallel(parts.len(), 16 * seen, |task| {
        // SAFETY: a dense output, of which a task writes only its own image.
        let out = unsafe { std::slice::from_raw_parts_mut(out.at(task * seen), seen) };
        match parts[task] {
            None => out.fill(0),
            Some(part) => {
                // SAFETY: a dense table, which nothing writes, and the crop's image is in range.
                let from = unsafe { std::slice::from_raw_parts(table.at(part.image * image), image) };
                resample(from, dims[2], part, [height, width], out);
            }
        }
    });
    Ok(())
}
