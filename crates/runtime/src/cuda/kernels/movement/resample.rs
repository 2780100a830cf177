//! Resamples crops of a table's images to one size, with the bytes of `flatout_ir::ops::resample`.
//!
//! The kernel is `resample.cu`.

use flatout_ir::target::Layout;
use flatout_ir::types::DType;
use flatout_ir::{Launch, Op, OpKind};

use crate::cuda::context::Kernel;
use crate::cuda::kernels::stage::{Draft, Stage, Stages, Value, at, blocks, count32, staged};
use crate::rows::kernel_row;

pub const KERNELS: &[Kernel] = &[staged!(
    kernel_row("cuda.resample", OpKind::Resample, &[DType::U8, DType::I32], Layout::Dense),
    |l, _| stages(l)
)];

fn stages(launch: &Launch) -> Stages {
    let Op::Resample { height, width } = launch.op else { unreachable!("the row is for parts of images") };
    let (table, parts) = (&launch.ins[0], &launch.ins[1]);
    let Some(out) = &launch.outs[0] else { return Ok(vec![]) };
    let pixels = parts.dims[0] * height * width;
    if out.elements() == 0 {
        return Ok(vec![]);
    }
    // Positions within an image and an output are counted in 32 bits.
    count32("bytes of an image", table.dims[1..].iter().product())?;
    count32("pixels of a view", height * width)?;
    let source = Draft::new("resample.cu")
        .define("ROWS", table.dims[1])
        .define("COLUMNS", table.dims[2])
        .define("CHANNELS", table.dims[3])
        .define("HEIGHT", height)
        .define("WIDTH", width)
        .source(include_str!("resample.cu"));
    Ok(vec![Stage {
        source,
        entry: "resample",
        grid: [blocks(pixels, 256)?, 1],
        block: 256,
        args: vec![
            at(table),
            at(parts),
            at(out),
            Value::I64(pixels as i64),
            count32("images", table.dims[0])?,
        ],
    }])
}
