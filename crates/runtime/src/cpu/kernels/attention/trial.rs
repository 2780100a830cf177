//! Test harness: runs one launch against the oracle under worse conditions than any plan creates.
//!
//! Every float tensor has gaps between its rows; outputs, gaps and workspace start as NaN, and the gaps must stay unchanged.

use flatout_ir::oracle::{self, Values};
use flatout_ir::target::Shapes;
use flatout_ir::types::{bf16_from_f32, bf16_to_f32, contiguous_strides};
use flatout_ir::{Builder, DType, Graph, Launch, Op, TensorType, View};

use crate::arena::{ALIGN, Arena};
use crate::cpu::context::Context;
use crate::cpu::{KERNELS, Kernel};
use crate::launch;

/// An input: its type and its elements in row-major order.
#[derive(Clone)]
pub(in crate::cpu) struct TestInput {
    pub ty: TensorType,
    pub values: Vec<f64>,
}

impl TestInput {
    pub fn new(dtype: DType, dims: &[usize], value: impl FnMut(usize) -> f64) -> Self {
        let ty = TensorType::new(dtype, dims);
        let values = (0..ty.elements()).map(value).map(|x| dtype.round(x)).collect();
        TestInput { ty, values }
    }

    /// Numbers in [-1, 1), determined by the seed.
    pub fn noise(dtype: DType, dims: &[usize], seed: u32) -> Self {
        let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12345);
        Self::new(dtype, dims, |_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f64 / (1 << 23) as f64 - 1.0
        })
    }

    pub fn integers(values: &[i32]) -> Self {
        Self::new(DType::I32, &[values.len()], |i| values[i] as f64)
    }

    /// As `self`, with bf16 widened to f32.
    pub fn widened(&self) -> Self {
        TestInput { ty: self.ty.with(self.ty.dtype.accumulator()), values: self.values.clone() }
    }

    /// As `self`, with some rows (of the first axis) set to a value.
    pub fn with_rows(&self, value: f64, is_set: impl Fn(usize) -> bool) -> Self {
        let width = self.ty.elements() / self.ty.dims[0].max(1);
        let values = self.values.iter().enumerate();
        let values = values.map(|(i, x)| if is_set(i / width) { value } else { *x }).collect();
        TestInput { ty: self.ty.clone(), values }
    }
}

fn graph(op: &Op, ins: &[TestInput]) -> Graph {
    let b = Builder::new();
    let tensors: Vec<_> =
        ins.iter().enumerate().map(|(i, x)| b.input(&format!("x{i}"), x.ty.dtype, &x.ty.dims)).collect();
    for (i, y) in b.ops(op.clone(), &tensors).into_iter().enumerate() {
        b.result(&format!("y{i}"), y);
    }
    b.finish()
}

/// The operation's outputs, as defined by its mathematics.
pub(in crate::cpu) fn expected(op: &Op, ins: &[TestInput]) -> Vec<Vec<f64>> {
    let graph = graph(op, ins);
    let values: Values = ins.iter().enumerate().map(|(i, x)| (format!("x{i}"), x.values.clone())).collect();
    let mut results = oracle::run(&graph, &values).results;
    (0..graph.results.len())
        .map(|i| results.remove(&format!("y{i}")).expect("every output is a result"))
        .collect()
}

fn kernel(op: &Op) -> &'static Kernel {
    let mut all = KERNELS.iter().copied().flatten();
    all.find(|k| k.row.op == op.kind()).expect("the operation has a kernel")
}

/// The kernel's workspace in bytes for these inputs.
pub(in crate::cpu) fn workspace(op: &Op, ins: &[TestInput], cores: usize) -> usize {
    let graph = graph(op, ins);
    let node = graph.nodes.iter().find(|n| n.op == *op).expect("the graph holds it");
    (kernel(op).row.workspace)(&Shapes::of(&graph, node, cores))
}

/// How a launch differs from one that computes every output into separate memory.
#[derive(Clone, Copy, Default)]
pub(in crate::cpu) struct LaunchVariant<'a> {
    /// Outputs that are not requested.
    pub unread: &'a [usize],
    /// An (input, output) pair that shares memory.
    pub in_place: Option<(usize, usize)>,
}

/// The operation's outputs from its kernel, on a number of threads.
pub(in crate::cpu) fn launched(
    op: &Op,
    ins: &[TestInput],
    threads: usize,
    variant: LaunchVariant<'_>,
) -> Result<Vec<Option<Vec<f64>>>, String> {
    let graph = graph(op, ins);
    let node = graph.nodes.iter().find(|n| n.op == *op).expect("the graph holds it");
    let mut end = 0;
    let mut place = |ty: &TensorType| {
        let view = View { offset: end, dtype: ty.dtype, dims: ty.dims.clone(), strides: gapped(ty) };
        end = (end + view.span_bytes() + 8).next_multiple_of(ALIGN);
        view
    };
    let in_views: Vec<View> = ins.iter().map(|x| place(&x.ty)).collect();
    let out_views: Vec<Option<View>> = (0..node.outs.len())
        .map(|o| match variant.in_place {
            _ if variant.unread.contains(&o) => None,
            Some((i, out)) if out == o => Some(in_views[i].clone()),
            _ => Some(place(&node.outs[o])),
        })
        .collect();
    let scratch = workspace(op, ins, threads) / 4;
    let scratch = (scratch > 0).then(|| place(&TensorType::new(DType::F32, [scratch])));

    let mut arena = Arena::new(end).expect("the arena fits in memory");
    // In this pattern every half word is a bf16 NaN and every word an f32 NaN.
    arena.bytes().iter_mut().for_each(|b| *b = 0xff);
    for (view, given) in in_views.iter().zip(ins) {
        each_offset(view, |i, at| write(arena.bytes(), view.dtype, at, given.values[i]));
    }
    let launch = Launch {
        kernel: kernel(op).row.name,
        op: op.clone(),
        ins: in_views,
        outs: out_views,
        workspace: scratch,
        path: String::new(),
        key: 0,
        flops: 0,
        queue: flatout_ir::Queue::Compute,
        joins: None,
    };
    launch::check(&launch, &kernel(op).row, end, threads)?;
    let before = arena.bytes().to_vec();
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads start");
    // SAFETY: checked above, and nothing else uses the arena meanwhile.
    let context = unsafe { Context::new(&launch, arena.start(), threads) };
    pool.install(|| (kernel(op).run)(&launch, &context))?;

    let mut is_written = vec![false; end];
    for view in launch.outs.iter().chain([&launch.workspace]).flatten() {
        each_offset(view, |_, at| is_written[at..at + view.dtype.bytes()].fill(true));
    }
    let touched = (0..end).find(|&i| !is_written[i] && arena.bytes()[i] != before[i]);
    assert_eq!(touched, None, "a byte of the arena outside every output was written");
    let bytes = arena.bytes();
    let read_all = |view: &View| {
        let mut values = vec![0.0; view.elements()];
        each_offset(view, |i, at| values[i] = read(bytes, view.dtype, at));
        values
    };
    Ok(launch.outs.iter().map(|view| view.as_ref().map(read_all)).collect())
}

/// Strides with gaps of three elements between rows of floats and five more between those of the outermost axis.
fn gapped(ty: &TensorType) -> Vec<usize> {
    if ty.dtype == DType::I32 || ty.rank() < 2 {
        return contiguous_strides(&ty.dims);
    }
    let mut strides = vec![1; ty.rank()];
    for axis in (0..ty.rank() - 1).rev() {
        let gap = if axis == ty.rank() - 2 { 3 } else { 5 };
        strides[axis] = strides[axis + 1] * ty.dims[axis + 1] + gap;
    }
    strides
}

/// Calls `each` with row-major index and byte offset of every element.
fn each_offset(view: &View, mut each: impl FnMut(usize, usize)) {
    for i in 0..view.elements() {
        let (mut rest, mut at) = (i, 0);
        for axis in (0..view.dims.len()).rev() {
            at += rest % view.dims[axis] * view.strides[axis];
            rest /= view.dims[axis];
        }
        each(i, view.offset + at * view.dtype.bytes());
    }
}

fn write(bytes: &mut [u8], dtype: DType, at: usize, x: f64) {
    match dtype {
        DType::F32 => bytes[at..at + 4].copy_from_slice(&(x as f32).to_ne_bytes()),
        DType::BF16 => bytes[at..at + 2].copy_from_slice(&bf16_from_f32(x as f32).to_ne_bytes()),
        DType::I32 => bytes[at..at + 4].copy_from_slice(&(x as i32).to_ne_bytes()),
        DType::E4M3 | DType::E5M2 | DType::E4M4 | DType::F64 | DType::U8 => {
            unreachable!("no kernel takes this type")
        }
    }
}

fn read(bytes: &[u8], dtype: DType, at: usize) -> f64 {
    match dtype {
        DType::F32 => f32::from_ne_bytes(bytes[at..at + 4].try_into().expect("four bytes")) as f64,
        DType::BF16 => {
            bf16_to_f32(u16::from_ne_bytes(bytes[at..at + 2].try_into().expect("two bytes"))) as f64
        }
        _ => unreachable!("no output has this type"),
    }
}

/// Asserts a relative L2 distance. Elements below 0.01 count as if they were that large, because gradients that cancel to 0
/// have no significant digits. Infinite elements must be infinite in both.
pub(in crate::cpu) fn assert_near(got: &[f64], want: &[f64], bound: f64, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}: as many elements");
    let (mut error, mut norm) = (0.0, 0.0);
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        if w.is_infinite() || !g.is_finite() {
            assert_eq!(g, w, "{what}: element {i}");
            continue;
        }
        error += (g - w) * (g - w);
        norm += w * w;
    }
    let (distance, norm) = (error.sqrt(), norm.sqrt().max(0.01 * (got.len() as f64).sqrt()));
    assert!(distance <= bound * norm, "{what}: {distance:.3e} off a norm of {norm:.3e}");
}
