//! Products followed by a gated activation, or by its gradient: one kernel of ours where it is fastest, otherwise a product and
//! the activation's kernel, one after the other.
//!
//! The second kernel reads the product from memory. Forward, that is gate and up, if kept; backward, the buffer of the
//! activation's value, if requested. Without such a buffer, rows go through the workspace, as many at a time as it holds.

use flatout_ir::ops::gated::Act;
use flatout_ir::ops::product::Compute;
use flatout_ir::target::{KernelRow, Layout, Shapes};
use flatout_ir::types::DType;
use flatout_ir::{Launch, Op, OpKind, View};

use super::call::{Call, Epilogue, Extras};
use super::choice::{self, Untimed};
use super::lt::{Fusion, Matrices, Multiply};
use super::product::{expressible, library_workspace};
use crate::cuda::context::{CudaError, Facts, Kernel, Prepare, Prepared, Source, Work, sequence};
use crate::cuda::kernels::elementwise::gated;
use crate::cuda::kernels::stage;
use crate::rows::kernel_row;

pub const KERNELS: &[Kernel] = &[
    Kernel { row: row("cuda.gated_product", OpKind::GatedProduct), sources, prepare },
    Kernel { row: row("cuda.gated_product_grad", OpKind::GatedProductGrad), sources, prepare },
];

const fn row(name: &'static str, op: OpKind) -> KernelRow {
    KernelRow { workspace, ..kernel_row(name, op, &[DType::BF16], Layout::Rows) }
}

/// That of cuBLASLt. Rows that go through the workspace take half of it.
pub(super) fn workspace(shapes: &Shapes<'_>) -> usize {
    library_workspace(shapes.outs[0].elements())
}

/// A launch, forward or backward.
struct Problem<'a> {
    launch: &'a Launch,
    act: Act,
    /// x, or the incoming gradient.
    a: &'a View,
    b: &'a View,
    /// Columns of gate, and of up.
    half: usize,
    is_grad: bool,
}

/// A range of rows of the product, and the activation or its gradient over them.
struct ProductRows {
    a: View,
    /// The destination of the product.
    to: View,
    then: Option<Launch>,
}

impl<'a> Problem<'a> {
    /// `None` if there is nothing to compute.
    fn of(launch: &'a Launch) -> Option<Problem<'a>> {
        let (act, is_grad) = match launch.op {
            Op::GatedProduct { act } => (act, false),
            Op::GatedProductGrad { act, .. } => (act, true),
            _ => unreachable!("the rows are for gated products"),
        };
        let (a, b) = (&launch.ins[0], &launch.ins[1]);
        let half = if is_grad { b.dims[1] } else { b.dims[0] / 2 };
        let is_wanted = launch.outs.iter().flatten().any(|out| out.elements() > 0);
        is_wanted.then_some(Problem { launch, act, a, b, half, is_grad })
    }

    fn out(&self, output: usize) -> Option<&'a View> {
        self.launch.outs.get(output).and_then(Option::as_ref)
    }

    /// A buffer for the product of all rows, if there is one.
    fn buffer(&self) -> Option<&'a View> {
        if self.is_grad { self.out(2) } else { self.out(0) }
    }

    /// The separate launches: a product and the activation's kernel.
    fn parts(&self) -> Vec<ProductRows> {
        let rows = self.a.dims[0];
        let columns = if self.is_grad { self.half } else { 2 * self.half };
        if let Some(buffer) = self.buffer() {
            return vec![self.part(0, rows, buffer.clone())];
        }
        let scratch = self.launch.workspace.as_ref();
        let space = scratch.map_or(0, |scratch| scratch.span_bytes() / 2);
        let at_once = (space / (columns * DType::BF16.bytes())).clamp(1, rows.max(1));
        let through = |first: usize| {
            let count = at_once.min(rows - first);
            let offset = scratch.map_or(0, |scratch| scratch.offset);
            let to =
                View { offset, dtype: DType::BF16, dims: vec![count, columns], strides: vec![columns, 1] };
            self.part(first, count, to)
        };
        (0..rows).step_by(at_once).map(through).collect()
    }

    fn part(&self, first: usize, count: usize, to: View) -> ProductRows {
        let rows = |view: &View| rows(view, first, count);
        let half = |view: &View, start: usize| columns(view, start, self.half);
        let gate_up = if self.is_grad {
            [rows(&self.launch.ins[2]), rows(&self.launch.ins[3])]
        } else {
            [half(&to, 0), half(&to, self.half)]
        };
        let then = if self.is_grad {
            let outs: Vec<Option<View>> = (0..3).map(|out| self.out(out).map(rows)).collect();
            let op = Op::GatedGrad { act: self.act, again: true, p: 0.0 };
            let ins = gate_up.into_iter().chain([to.clone()]).collect();
            outs.iter().any(Option::is_some).then(|| Launch { op, ins, outs, ..self.launch.clone() })
        } else {
            let op = Op::Gated { act: self.act, p: 0.0 };
            let y = self.out(1).map(rows);
            y.map(|y| Launch { op, ins: gate_up.to_vec(), outs: vec![Some(y)], ..self.launch.clone() })
        };
        ProductRows { a: rows(self.a), to, then }
    }

    fn epilogue(&self) -> Epilogue {
        match self.is_grad {
            true => Epilogue::GatedGrad { act: self.act, keep: self.out(2).is_some() },
            false => Epilogue::Gated { act: self.act, keep: self.out(0).is_some() },
        }
    }

    /// The arguments of our kernel; `None` if an output that it always computes is not requested, or operands have no dense
    /// rows.
    fn call(&self, address: impl Fn(&View) -> u64) -> Option<Call> {
        let matrices = |view: &View, transposed| matrices(view, address(view), transposed);
        let part = |view: &View, start: usize| matrices(&columns(view, start, self.half), false);
        let (b, b2, outs, sides) = if self.is_grad {
            let sides = [matrices(&self.launch.ins[2], false)?, matrices(&self.launch.ins[3], false)?];
            let outs = [Some(matrices(self.out(0)?, false)?), Some(matrices(self.out(1)?, false)?)];
            let value = self.out(2).map(|y| matrices(y, false));
            let value = if let Some(value) = value { Some(value?) } else { None };
            (matrices(self.b, false)?, None, [outs[0], outs[1], value], sides.map(Some))
        } else {
            let [gate, up] = [0, self.half].map(|start| matrices(&rows(self.b, start, self.half), true));
            let y = Some(matrices(self.out(1)?, false)?);
            let kept = self.out(0).map(|wide| [part(wide, 0), part(wide, self.half)]);
            let outs =
                if let Some([gate, up]) = kept { [Some(gate?), Some(up?), y] } else { [None, None, y] };
            (gate?, Some(up?), outs, [None; 2])
        };
        Some(Call {
            count: 1,
            a: matrices(self.a, false)?,
            b,
            b2,
            outs,
            sides,
            bias: 0,
            partial: 0,
            epilogue: self.epilogue(),
            extras: Extras::default(),
        })
    }

    fn library(&self, p: &Prepare<'_>) -> Prepared {
        let scratch = self.launch.workspace.as_ref().map_or((0, 0), |w| (p.address(w), w.span_bytes()));
        let workspace = match self.buffer() {
            Some(_) => scratch,
            None => (scratch.0 + (scratch.1 / 2) as u64, scratch.1 - scratch.1 / 2),
        };
        let mut works: Vec<Box<dyn Work>> = vec![];
        for part in self.parts() {
            let operand = |view: &View, transposed| {
                matrices(view, p.address(view), transposed)
                    .ok_or_else(|| CudaError::new(format!("strides {:?} are no matrices", view.strides)))
            };
            let multiply = Multiply {
                count: 1,
                a: operand(&part.a, false)?,
                b: operand(self.b, !self.is_grad)?,
                c: None,
                d: operand(&part.to, false)?,
                compute: Compute::Full,
                scales: None,
                fusion: Fusion::NONE,
                workspace,
            };
            works.push(multiply.prepare(p)?);
            if let Some(then) = &part.then {
                works.push(stage::prepare(gated::stages(then), p)?);
            }
        }
        Ok(sequence(works))
    }

    /// The cache key of its times, besides the device and our sources.
    fn name(&self) -> String {
        let views = self.launch.ins.iter().chain(self.launch.outs.iter().flatten());
        let shapes: Vec<_> = views.map(|view| (&view.dims, &view.strides)).collect();
        format!("{:?} of {shapes:?}", self.launch.op)
    }
}

pub(super) fn matrices(view: &View, at: u64, transposed: bool) -> Option<Matrices> {
    expressible(view, at, 0, transposed).filter(|m| m.is_transposed == transposed)
}

pub(super) fn rows(view: &View, first: usize, count: usize) -> View {
    let mut part = view.clone();
    part.offset += first * view.strides[0] * view.dtype.bytes();
    part.dims[0] = count;
    part
}

pub(super) fn columns(view: &View, first: usize, count: usize) -> View {
    let mut part = view.clone();
    part.offset += first * view.strides[1] * view.dtype.bytes();
    part.dims[1] = count;
    part
}

/// The call of our kernels that would compute a launch, assuming an aligned arena; empty if there is none.
pub(super) fn calls(launch: &Launch) -> Vec<Call> {
    Vec::from_iter(Problem::of(launch).and_then(|problem| problem.call(|view| view.offset as u64)))
}

fn sources(launch: &Launch, facts: &Facts) -> Vec<Source> {
    let Some(problem) = Problem::of(launch) else { return vec![] };
    let parts = problem.parts();
    let then = parts.iter().filter_map(|part| part.then.as_ref());
    let mut sources: Vec<Source> = then.flat_map(|then| stage::sources(gated::stages(then))).collect();
    sources.extend(calls(launch).iter().flat_map(|call| choice::sources(call, Untimed::Own, facts)));
    sources
}

fn prepare(launch: &Launch, p: &Prepare<'_>) -> Prepared {
    let Some(problem) = Problem::of(launch) else { return Ok(sequence(vec![])) };
    let library = || problem.library(p);
    match problem.call(|view| p.address(view)) {
        Some(call) => choice::fastest(&problem.name(), library, &call, &|| Ok(None), Untimed::Own, p),
        None => library(),
    }
}
