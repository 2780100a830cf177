//! Copies between any two strided views, constants and indices; the kernel is `copy.cu`.

use flatout_ir::target::Layout;
use flatout_ir::types::{DType, bf16_from_f32};
use flatout_ir::{Launch, Op, OpKind, View};

use crate::cuda::context::Kernel;
use crate::cuda::kernels::address::{Walk, index_type, most, width};
use crate::cuda::kernels::stage::{self, Draft, Stage, Stages, Value, at, blocks, c_bits, staged};
use crate::rows::{ANY_TYPE, EVERY_TYPE, kernel_row};

pub const KERNELS: &[Kernel] = &[
    staged!(kernel_row("cuda.copy", OpKind::Reshape, EVERY_TYPE, Layout::Any), |l, _| stages(l)),
    staged!(kernel_row("cuda.fill", OpKind::Fill, ANY_TYPE, Layout::Any), |l, _| fill(l)),
    staged!(kernel_row("cuda.iota", OpKind::Iota, ANY_TYPE, Layout::Any), |l, _| iota(l)),
];

fn stages(launch: &Launch) -> Stages {
    match &launch.outs[0] {
        Some(to) => copy(&launch.ins[0], to),
        None => Ok(vec![]),
    }
}

/// Vectors per thread.
const UNROLL: usize = 4;

/// Copies elements in row-major order of both views.
pub(in crate::cuda::kernels) fn copy(from: &View, to: &View) -> Stages {
    let count = from.elements();
    if count == 0 {
        return Ok(vec![]);
    }
    if let Some(stage) = transpose(from, to)? {
        return Ok(vec![stage]);
    }
    let views = [from, to];
    let (vec, index) = (width(&views, most(&views)), index_type(count));
    let source = Draft::new("copy.cu")
        .flag("COPY", true)
        .define("VEC", vec)
        .define("UNROLL", UNROLL)
        .define("INDEX", index)
        .define("T_X", c_bits(from.dtype))
        .text(&Walk::of(from).function("at_from", index))
        .text(&Walk::of(to).function("at_to", index))
        .source(include_str!("copy.cu"));
    Ok(vec![Stage {
        source,
        entry: "copy",
        grid: [blocks(count, UNROLL * 256 * vec)?, 1],
        block: 256,
        args: vec![at(from), at(to), stage::count(index, count)],
    }])
}

/// A copy between equal shapes in which the source has stride 1 along another axis than the destination, whose last axis it is.
fn transpose(from: &View, to: &View) -> Result<Option<Stage>, crate::cuda::CudaError> {
    let last = to.dims.len().saturating_sub(1);
    let is_long = |view: &View, axis: usize| view.strides[axis] == 1 && view.dims[axis] >= 32;
    if from.dims != to.dims || last == 0 || !is_long(to, last) || from.strides[last] <= 1 {
        return Ok(None);
    }
    let Some(along) = (0..last).find(|&axis| is_long(from, axis)) else { return Ok(None) };
    let rest = |view: &View| {
        let axes = (0..last).filter(|a| *a != along);
        let (dims, strides): (Vec<usize>, Vec<usize>) = axes.map(|a| (view.dims[a], view.strides[a])).unzip();
        (dims.iter().product::<usize>(), Walk::new(&dims, &strides))
    };
    let ((outer, outer_from), (_, outer_to)) = (rest(from), rest(to));
    let (m, n) = (to.dims[along], to.dims[last]);
    let source = Draft::new("copy.cu")
        .flag("COPY", false)
        .flag("TRANSPOSE", true)
        .define("M", format!("{m}u"))
        .define("N", format!("{n}u"))
        .define("FROM_N", from.strides[last])
        .define("TO_M", to.strides[along])
        .define("INDEX", "u32")
        .define("T_X", c_bits(from.dtype))
        .text(&outer_from.function("outer_from", "u32"))
        .text(&outer_to.function("outer_to", "u32"))
        .source(include_str!("copy.cu"));
    Ok(Some(Stage {
        source,
        entry: "transpose",
        grid: [blocks(outer * m.div_ceil(32) * n.div_ceil(32), 1)?, 1],
        block: 256,
        args: vec![at(from), at(to)],
    }))
}

fn fill(launch: &Launch) -> Stages {
    let Op::Fill { value, .. } = launch.op else { unreachable!("the row is for fill") };
    let Some(to) = &launch.outs[0] else { return Ok(vec![]) };
    let count = to.elements();
    if count == 0 {
        return Ok(vec![]);
    }
    let bits = match to.dtype {
        DType::BF16 => bf16_from_f32(value as f32) as i32,
        DType::I32 => value as i32,
        _ => (value as f32).to_bits() as i32,
    };
    let (vec, index) = (width(&[to], most(&[to])), index_type(count));
    let source = Draft::new("copy.cu")
        .flag("COPY", false)
        .flag("TRANSPOSE", false)
        .flag("FILL", true)
        .define("VEC", vec)
        .define("INDEX", index)
        .define("T_X", c_bits(to.dtype))
        .text(&Walk::of(to).function("at_to", index))
        .source(include_str!("copy.cu"));
    Ok(vec![Stage {
        source,
        entry: "fill",
        grid: [blocks(count, 256 * vec)?, 1],
        block: 256,
        args: vec![at(to), stage::count(index, count), Value::I32(bits)],
    }])
}

fn iota(launch: &Launch) -> Stages {
    let Op::Iota { axis, ref dims, .. } = launch.op else { unreachable!("the row is for iota") };
    let Some(to) = &launch.outs[0] else { return Ok(vec![]) };
    let count = to.elements();
    if count == 0 {
        return Ok(vec![]);
    }
    let index = index_type(count);
    let convert = if to.dtype == DType::I32 { "(int)(x)" } else { "As<T_X>::of((float)(x))" };
    let source = Draft::new("copy.cu")
        .flag("COPY", false)
        .flag("TRANSPOSE", false)
        .flag("FILL", false)
        .define("INDEX", index)
        .define("INNER", format!("{}u", dims[axis + 1..].iter().product::<usize>()))
        .define("N", format!("{}u", dims[axis]))
        .dtype("T_X", to.dtype)
        .text(&format!("#define CONVERT(x) {convert}\n"))
        .text(&Walk::of(to).function("at_to", index))
        .source(include_str!("copy.cu"));
    Ok(vec![Stage {
        source,
        entry: "iota",
        grid: [blocks(count, 256)?, 1],
        block: 256,
        args: vec![at(to), stage::count(index, count)],
    }])
}
