//! Reductions along one axis, cut into pieces by shapes alone; the kernel is `reduce.cu`.

use flatout_ir::ops::reduce::Fold;
use flatout_ir::target::{KernelRow, Layout, Shapes};
use flatout_ir::types::{DType, TensorType};
use flatout_ir::{Launch, Op, OpKind, View};

use crate::cuda::context::{CudaError, Kernel};
use crate::cuda::kernels::address::{Walk, row_width};
use crate::cuda::kernels::stage::{Draft, Stage, Stages, Value, at, blocks, c_type, count32, staged};
use crate::rows::{ANY_TYPE, kernel_row};

pub const KERNELS: &[Kernel] = &[staged!(
    KernelRow { workspace, ..kernel_row("cuda.reduce", OpKind::Reduce, ANY_TYPE, Layout::Any) },
    |l, _| stages(l)
)];

/// Rows shorter than this take a warp each.
const SHORT: usize = 1024;
/// Minimum extent per block if an axis is cut: elements for `along`, rows for `across`.
const ALONG_PIECE: usize = 16 << 10;
const ACROSS_PIECE: usize = 64;
/// Number of blocks that fills a device.
const ENOUGH_BLOCKS: usize = 1024;

/// A tensor as [outer, n, inner].
#[derive(Clone, Copy)]
struct Shape {
    outer: usize,
    n: usize,
    inner: usize,
}

impl Shape {
    fn new(dims: &[usize], axis: usize) -> Shape {
        let (outer, inner) = (dims[..axis].iter().product(), dims[axis + 1..].iter().product());
        Shape { outer, n: dims[axis], inner }
    }

    fn folds(&self) -> usize {
        self.outer * self.inner
    }

    /// Number of pieces of the axis, so that the whole device has work.
    fn pieces(&self) -> usize {
        let (whole, piece) = match self.inner {
            1 => (self.outer, ALONG_PIECE),
            inner => (self.outer * inner.div_ceil(256), ACROSS_PIECE),
        };
        self.n.div_ceil(piece).min(ENOUGH_BLOCKS.div_ceil(whole.max(1))).max(1)
    }
}

fn workspace(shapes: &Shapes<'_>) -> usize {
    let Op::Reduce { axis, .. } = shapes.node.op else { unreachable!("the row is for reduce") };
    let shape = Shape::new(&shapes.ins[0].dims, axis);
    if shape.pieces() > 1 { shape.pieces() * shape.folds() * 4 } else { 0 }
}

fn stages(launch: &Launch) -> Stages {
    let Op::Reduce { axis, by } = launch.op else { unreachable!("the row is for reduce") };
    let (x, Some(y)) = (&launch.ins[0], &launch.outs[0]) else { return Ok(vec![]) };
    let shape = Shape::new(&x.dims, axis);
    if shape.folds() == 0 {
        return Ok(vec![]);
    }
    let pieces = shape.pieces();
    let (Some(scratch), true) = (&launch.workspace, pieces > 1) else {
        return Ok(vec![fold(x, axis, by, y, To::folded(y, axis), 1)?]);
    };
    let accumulator = x.dtype.accumulator();
    let partial =
        View::dense(scratch.offset, &TensorType::new(accumulator, [pieces, shape.outer, shape.inner]));
    let by_pieces = if by == Fold::Max { Fold::Max } else { Fold::Sum };
    Ok(vec![fold(x, axis, by, &partial, To::flat(&partial), pieces)?, join(&partial, by_pieces, y)?])
}

/// Folds the first axis of partial results, which are dense in the workspace.
fn join(partial: &View, by: Fold, to: &View) -> Result<Stage, CudaError> {
    let (pieces, folds) = (partial.dims[0], to.elements());
    let flat = View::dense(partial.offset, &TensorType::new(partial.dtype, [pieces, folds]));
    fold(&flat, 0, by, to, To::flat(to), 1)
}

/// Address functions of the result of (outer, inner).
struct To {
    outer: Walk,
    inner: Walk,
}

impl To {
    /// The tensor with its axis folded to extent 1.
    fn folded(y: &View, axis: usize) -> To {
        let part = |axes: std::ops::Range<usize>| Walk::new(&y.dims[axes.clone()], &y.strides[axes]);
        To { outer: part(0..axis), inner: part(axis + 1..y.dims.len()) }
    }

    /// A flat tensor with as many elements as `inner` counts.
    fn flat(y: &View) -> To {
        To { outer: Walk::new(&[], &[]), inner: Walk::of(y) }
    }
}

/// One fold of `x` along `axis`; with several pieces `y` is [pieces, outer, inner], dense, in the accumulator's type.
fn fold(x: &View, axis: usize, by: Fold, y: &View, to: To, pieces: usize) -> Result<Stage, CudaError> {
    let shape = Shape::new(&x.dims, axis);
    let (n, along) = (shape.n, shape.inner == 1);
    let accumulator = x.dtype.accumulator();
    // Few columns and many rows: more warps per column.
    let is_tall = !along && pieces == 1 && n > 4 * ACROSS_PIECE;
    let (vec, warps) = match (along, is_tall) {
        (true, _) => (row_width(&[x], n), 8),
        (_, true) => (1, 32),
        _ => (row_width(&[x], shape.inner), 8),
    };
    // Vectors lie along the axis if it is innermost, otherwise along the axes inside it.
    let vec = if along && x.strides[axis] != 1 { 1 } else { vec };
    let (narrow, wide) = match x.dtype {
        DType::I32 => ("(x)", "(x)"),
        _ => ("As<T_Y>::of(x)", "f32(x)"),
    };
    let lowest = if x.dtype == DType::I32 { "(-2147483647 - 1)" } else { "(-infinity())" };
    let source = Draft::new("reduce.cu")
        .flag("ALONG", along)
        .define("VEC", vec)
        .define("WARPS", warps)
        .define("STEP", x.strides[axis])
        .dtype("T_X", x.dtype)
        .dtype("T_Y", y.dtype)
        .define("T_ACC", c_type(accumulator))
        .define(
            "BY",
            match by {
                Fold::Sum => 0,
                Fold::SumSquares => 1,
                Fold::Max => 2,
            },
        )
        .text(&format!("#define NARROW(x) {narrow}\n#define WIDE(x) {wide}\n#define LOWEST {lowest}\n"))
        .text(&Walk::new(&x.dims[..axis], &x.strides[..axis]).function("outer_x", "u32"))
        .text(&Walk::new(&x.dims[axis + 1..], &x.strides[axis + 1..]).function("inner_x", "u32"))
        .text(&to.outer.function("outer_y", "u32"))
        .text(&to.inner.function("inner_y", "u32"))
        .source(include_str!("reduce.cu"));
    let length = n.div_ceil(pieces).next_multiple_of(8);
    let (entry, grid, block, args): (_, _, _, Vec<Value>) = if along && n < SHORT {
        let rows = Value::I64(shape.outer as i64);
        ("short_rows", [blocks(shape.outer, 8)?, 1], 256, vec![Value::I64(n as i64), rows])
    } else if along {
        let args = vec![Value::I64(n as i64), Value::I64(length as i64), Value::I32(pieces as i32)];
        ("along", [blocks(shape.outer, 1)?, pieces as u32], 256, args)
    } else {
        let columns = shape.inner.div_ceil(32 * vec);
        let args = vec![
            Value::I64(n as i64),
            Value::I64(length as i64),
            Value::I64(shape.inner as i64),
            count32("blocks of columns", columns)?,
            Value::I32(pieces as i32),
        ];
        ("across", [blocks(shape.outer * columns, 1)?, pieces as u32], 32 * warps, args)
    };
    count32("rows", shape.outer)?;
    count32("columns", shape.inner)?;
    let args = [at(x), at(y)].into_iter().chain(args).collect();
    Ok(Stage { source, entry, grid, block, args })
}
