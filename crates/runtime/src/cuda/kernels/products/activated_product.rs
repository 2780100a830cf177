//! Products followed by an activation, or by its derivative: one kernel of ours where it is fastest, otherwise cuBLASLt's
//! product with the epilogues it supports, and separate kernels for the rest.
//!
//! Our kernel leaves sums over blocks of 64 rows in the workspace, where `partial_sums` adds them. The first output of a
//! gradient is always stored: the compiler never requests only its sum.

use flatout_ir::ops::activated_product::{self, sum_at};
use flatout_ir::ops::epilogue::Epilogue as LibraryEpilogue;
use flatout_ir::ops::gated::Act;
use flatout_ir::ops::product::Compute;
use flatout_ir::ops::reduce::Fold;
use flatout_ir::target::{KernelRow, Layout, Shapes};
use flatout_ir::types::{DType, TensorType};
use flatout_ir::{Launch, Op, OpKind, View};

use super::call::{Call, Epilogue, Extras, SUMMED};
use super::choice::{self, Untimed};
use super::product::{expressible, library_workspace};
use crate::cuda::context::{Facts, Kernel, Prepare, Prepared, Source, sequence};
use crate::cuda::kernels::reductions::partial_sums::partial_sums;
use crate::cuda::kernels::stage;
use crate::rows::kernel_row;

pub const KERNELS: &[Kernel] = &[
    Kernel { row: row("cuda.activated_product", OpKind::ActivatedProduct), sources, prepare },
    Kernel { row: row("cuda.activated_product_grad", OpKind::ActivatedProductGrad), sources, prepare },
];

const fn row(name: &'static str, op: OpKind) -> KernelRow {
    KernelRow { workspace, ..kernel_row(name, op, &[DType::BF16], Layout::Rows) }
}

/// The maximum of cuBLASLt's workspace and the partial sums of our kernel over blocks of 64 rows, which no other form exceeds.
fn workspace(shapes: &Shapes<'_>) -> usize {
    let out = &shapes.outs[0];
    let has_sum = matches!(shapes.node.op, Op::ActivatedProductGrad { sum: true, .. });
    let partial = if has_sum { out.dims[0].div_ceil(SUMMED) * out.dims[1] * 4 } else { 0 };
    library_workspace(out.elements()).max(partial)
}

/// A launch, forward or backward.
struct Problem<'a> {
    launch: &'a Launch,
    act: Act,
    tb: bool,
    epilogue: Epilogue,
}

impl<'a> Problem<'a> {
    /// `None` if there is nothing to compute.
    fn of(launch: &'a Launch) -> Option<Problem<'a>> {
        let is_wanted = |out: usize| launch.outs.get(out).is_some_and(Option::is_some);
        let (act, tb, epilogue) = match launch.op {
            Op::ActivatedProduct { act, tb, bias } => {
                let bias = bias.then(|| launch.ins[2].dtype);
                (act, tb, Epilogue::Activated { act, keep: is_wanted(0), bias })
            }
            Op::ActivatedProductGrad { act, tb, again, sum } => {
                let sum = sum_at(again, sum).is_some_and(is_wanted);
                (act, tb, Epilogue::ActivatedGrad { act, keep: again && is_wanted(1), sum })
            }
            _ => unreachable!("the rows are for activated products"),
        };
        let is_wanted = launch.outs.iter().flatten().any(|out| out.elements() > 0);
        is_wanted.then_some(Problem { launch, act, tb, epilogue })
    }

    fn out(&self, output: usize) -> Option<&'a View> {
        self.launch.outs.get(output).and_then(Option::as_ref)
    }

    /// The activation's value and the sum, for a gradient.
    fn value_and_sum(&self) -> [Option<&'a View>; 2] {
        let Op::ActivatedProductGrad { again, sum, .. } = self.launch.op else { return [None; 2] };
        [again.then_some(1), sum_at(again, sum)].map(|at| at.and_then(|at| self.out(at)))
    }

    /// The arguments of our kernel; `None` if an output that it always computes is not requested, or operands have no dense
    /// rows.
    fn call(&self, address: impl Fn(&View) -> u64) -> Option<Call> {
        let matrices = |view: &View, transposed: bool| {
            expressible(view, address(view), 0, transposed).filter(|m| m.is_transposed == transposed)
        };
        let ins = &self.launch.ins;
        let wanted = |view: Option<&View>| match view {
            Some(view) => matrices(view, false).map(Some),
            None => Some(None),
        };
        let is_bf16 = ins[..2].iter().all(|view| view.dtype == DType::BF16);
        let is_contiguous = |view: &View| view.strides.last().is_none_or(|stride| *stride == 1);
        let (outs, side, bias, partial) = match self.epilogue {
            Epilogue::Activated { bias, .. } => {
                let value = matrices(self.out(1)?, false)?;
                let bias =
                    if bias.is_some() { Some(&ins[2]).filter(|view| is_contiguous(view))? } else { &ins[0] };
                ([wanted(self.out(0))?, None, Some(value)], None, address(bias), 0)
            }
            _ => {
                let dh = matrices(self.out(0)?, false)?;
                let [again, _] = self.value_and_sum();
                let partial = self.launch.workspace.as_ref().map_or(0, &address);
                ([Some(dh), None, wanted(again)?], Some(matrices(&ins[2], false)?), 0, partial)
            }
        };
        is_bf16.then_some(Call {
            count: 1,
            a: matrices(&ins[0], false)?,
            b: matrices(&ins[1], self.tb)?,
            b2: None,
            outs,
            sides: [side, None],
            bias,
            partial,
            epilogue: self.epilogue,
            extras: Extras::default(),
        })
    }

    /// A launch of another operation in place of this one.
    fn replacement(&self, op: Op, ins: Vec<View>, outs: Vec<Option<View>>) -> Launch {
        Launch { op, ins, outs, ..self.launch.clone() }
    }

    fn product(&self, epilogue: LibraryEpilogue, ins: Vec<View>, outs: Vec<Option<View>>) -> Launch {
        let (out, compute) = (self.launch.ins[0].dtype, Compute::Full);
        self.replacement(
            Op::Product { ta: false, tb: self.tb, out, base: false, compute, epilogue },
            ins,
            outs,
        )
    }

    /// The separate launches: cuBLASLt's product and other kernels.
    fn separate_launches(&self) -> Vec<Launch> {
        match self.launch.op {
            Op::ActivatedProduct { bias, .. } => self.forward_launches(bias),
            _ => self.backward_launches(),
        }
    }

    fn forward_launches(&self, bias: bool) -> Vec<Launch> {
        let ins = self.launch.ins.clone();
        let [h, value] = [0, 1].map(|out| self.out(out).cloned());
        if self.act == Act::Gelu {
            let epilogue = if bias { LibraryEpilogue::BiasGelu } else { LibraryEpilogue::Gelu };
            return vec![self.product(epilogue, ins, vec![value, h])];
        }
        let epilogue = if bias { LibraryEpilogue::Bias } else { LibraryEpilogue::None };
        // If the pre-activation value is not needed, it is activated in place.
        let Some(to) = h.or(value.clone()) else { return vec![] };
        let product = self.product(epilogue, ins, vec![Some(to.clone())]);
        let map = Op::Map { f: self.act.elementwise() };
        let activate = value.map(|value| self.replacement(map, vec![to], vec![Some(value)]));
        [product].into_iter().chain(activate).collect()
    }

    fn backward_launches(&self) -> Vec<Launch> {
        let h = self.launch.ins[2].clone();
        let [again, sum] = self.value_and_sum().map(Option::<&View>::cloned);
        let dh = self.out(0).cloned().expect("the pass joins no gradient that is only summed");
        if self.act == Act::Gelu {
            let product =
                self.product(LibraryEpilogue::GeluGrad, self.launch.ins.clone(), vec![Some(dh.clone())]);
            let map = Op::Map { f: self.act.elementwise() };
            let again = again.map(|again| self.replacement(map, vec![h], vec![Some(again)]));
            let fold = Op::Reduce { axis: 0, by: Fold::Sum };
            let sum = sum.map(|sum| self.replacement(fold, vec![dh], vec![Some(sum)]));
            return [product].into_iter().chain(again).chain(sum).collect();
        }
        let ins = self.launch.ins[..2].to_vec();
        let product = self.product(LibraryEpilogue::None, ins, vec![Some(dh.clone())]);
        let ty = TensorType::new(dh.dtype, dh.dims.clone());
        let body = activated_product::region(self.act, again.is_some(), sum.is_some(), &ty);
        let outs =
            [Some(dh.clone())].into_iter().chain([again, sum].into_iter().filter(Option::is_some)).collect();
        vec![product, self.replacement(Op::Region { body: Box::new(body) }, vec![dh, h], outs)]
    }

    fn library(&self, p: &Prepare<'_>) -> Prepared {
        choice::separate(self.separate_launches(), p)
    }

    /// The addition of the partial sums that our kernel leaves.
    fn finish(&self, p: &Prepare<'_>) -> Prepared {
        let scratch = self.launch.workspace.as_ref().map_or(0, |view| view.offset);
        stage::prepare(self.sums(scratch), p)
    }

    fn sums(&self, scratch: usize) -> stage::Stages {
        let [rows, columns] = [0, 1].map(|axis| self.launch.ins[2].dims[axis]);
        match self.value_and_sum() {
            [_, Some(sum)] => partial_sums(scratch, rows.div_ceil(SUMMED), columns, &[sum]),
            _ => Ok(vec![]),
        }
    }
}

/// The call of our kernels that would compute a launch, assuming an aligned arena; empty if there is none.
pub(super) fn calls(launch: &Launch) -> Vec<Call> {
    Vec::from_iter(Problem::of(launch).and_then(|problem| problem.call(|view| view.offset as u64)))
}

fn sources(launch: &Launch, facts: &Facts) -> Vec<Source> {
    let Some(problem) = Problem::of(launch) else { return vec![] };
    let mut sources = choice::separate_sources(&problem.separate_launches(), facts);
    let own: Vec<Source> =
        calls(launch).iter().flat_map(|call| choice::sources(call, Untimed::Own, facts)).collect();
    if !own.is_empty() && problem.epilogue.sums() {
        sources.extend(stage::sources(problem.sums(0)));
    }
    sources.extend(own);
    sources
}

fn prepare(launch: &Launch, p: &Prepare<'_>) -> Prepared {
    let Some(problem) = Problem::of(launch) else { return Ok(sequence(vec![])) };
    let library = || problem.library(p);
    let Some(call) = problem.call(|view| p.address(view)) else { return library() };
    let rest = || match problem.epilogue {
        Epilogue::ActivatedGrad { sum: true, .. } => problem.finish(p).map(Some),
        _ => Ok(None),
    };
    choice::fastest(&choice::name(launch), library, &call, &rest, Untimed::Own, p)
}
