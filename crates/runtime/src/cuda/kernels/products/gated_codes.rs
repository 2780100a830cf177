//! Products of 8-bit operands followed by a gated activation that leaves in 8 bits: one kernel of ours where it is fastest,
//! otherwise a product and the kernel that quantises the activation.
//!
//! The second kernel reads gate and up from memory. If these are not kept, rows go through the workspace, as many at a time as
//! it holds.

use flatout_ir::ops::gated::Act;
use flatout_ir::ops::product::{Compute, plain};
use flatout_ir::ops::quantize::{FORWARD, Source as Of};
use flatout_ir::target::{KernelRow, Layout};
use flatout_ir::types::DType;
use flatout_ir::{Launch, Op, OpKind, View};

use super::call::{Call, Epilogue, Extras};
use super::choice::{self, Untimed};
use super::gated_product::{columns, matrices, rows, workspace};
use crate::cuda::context::{Facts, Kernel, Prepare, Prepared, Source, sequence};
use crate::cuda::kernels::elementwise::quantize;
use crate::cuda::kernels::stage::{self, Stage, Value, at};
use crate::rows::kernel_row;

pub const KERNELS: &[Kernel] = &[Kernel {
    row: KernelRow {
        workspace,
        ..kernel_row("cuda.gated_codes", OpKind::GatedProduct, &[DType::E4M3], Layout::Rows)
    },
    sources,
    prepare,
}];

struct Problem<'a> {
    launch: &'a Launch,
    act: Act,
    /// Columns of gate, and of up.
    half: usize,
}

impl<'a> Problem<'a> {
    /// `None` if there is nothing to compute.
    fn of(launch: &'a Launch) -> Option<Problem<'a>> {
        let Op::GatedProduct { act } = launch.op else { unreachable!("the row is for gated products") };
        let is_wanted = launch.outs.iter().flatten().any(|out| out.elements() > 0);
        is_wanted.then_some(Problem { launch, act, half: launch.ins[1].dims[0] / 2 })
    }

    fn out(&self, output: usize) -> Option<&'a View> {
        self.launch.outs.get(output).and_then(Option::as_ref)
    }

    fn epilogue(&self) -> Epilogue {
        Epilogue::GatedCodes { act: self.act, keep: self.out(0).is_some() }
    }

    /// The arguments of our kernel; `None` if the codes or their largest magnitude are not requested, or operands have no dense
    /// rows.
    fn call(&self, address: impl Fn(&View) -> u64) -> Option<Call> {
        let ins = &self.launch.ins;
        let matrices = |view: &View, transposed| matrices(view, address(view), transposed);
        let [gate, up] = [0, self.half].map(|start| matrices(&rows(&ins[1], start, self.half), true));
        let half = |wide: &View, start: usize| matrices(&columns(wide, start, self.half), false);
        let kept = match self.out(0) {
            Some(wide) => [Some(half(wide, 0)?), Some(half(wide, self.half)?)],
            None => [None; 2],
        };
        let codes = Some(matrices(self.out(1)?, false)?);
        let extras = Extras {
            scales: Some([&ins[2], &ins[3]].map(&address)),
            codes: [address(&ins[4]), address(self.out(2)?)],
            ..Extras::default()
        };
        Some(Call {
            count: 1,
            a: matrices(&ins[0], false)?,
            b: gate?,
            b2: Some(up?),
            outs: [kept[0], kept[1], codes],
            sides: [None; 2],
            bias: 0,
            partial: 0,
            epilogue: self.epilogue(),
            extras,
        })
    }

    /// The separate launches: a product and its quantised activation, over all rows or over as many as the workspace holds.
    fn separate_launches(&self) -> Vec<Launch> {
        let (count, columns_of_both) = (self.launch.ins[0].dims[0], 2 * self.half);
        let scratch = self.launch.workspace.as_ref();
        let (at_once, buffer) = match (self.out(0), scratch) {
            (Some(wide), _) => (count.max(1), wide.clone()),
            (None, Some(scratch)) => {
                let fit = scratch.span_bytes() / 2 / (columns_of_both * DType::BF16.bytes());
                let at_once = fit.clamp(1, count.max(1));
                let (dims, strides) = (vec![at_once, columns_of_both], vec![columns_of_both, 1]);
                (at_once, View { offset: scratch.offset, dtype: DType::BF16, dims, strides })
            }
            (None, None) => return vec![],
        };
        // The second half of the workspace is the product's own, all of it if nothing else uses it.
        let own = scratch.map(|scratch| {
            let used = if self.out(0).is_some() { 0 } else { scratch.span_bytes() / 2 };
            let used = used.next_multiple_of(256);
            let words = (scratch.span_bytes() - used) / scratch.dtype.bytes();
            View { offset: scratch.offset + used, dtype: scratch.dtype, dims: vec![words], strides: vec![1] }
        });
        let mut launches = vec![];
        for first in (0..count).step_by(at_once) {
            let length = at_once.min(count - first);
            let part = |view: &View| rows(view, first, length);
            let to = if self.out(0).is_some() { part(&buffer) } else { rows(&buffer, 0, length) };
            let ins = &self.launch.ins;
            let product = [vec![part(&ins[0])], ins[1..4].to_vec()].concat();
            let op = plain(false, true, DType::BF16, Compute::Full);
            let of = Launch {
                ins: product,
                outs: vec![Some(to.clone())],
                workspace: own.clone(),
                op,
                ..self.launch.clone()
            };
            launches.push(of);
            let (codes, amax) = (self.out(1).map(part), self.out(2));
            if codes.is_none() && amax.is_none() {
                continue;
            }
            // The largest magnitude grows from rows to rows.
            let before = if first > 0 { amax.unwrap_or(&ins[5]) } else { &ins[5] };
            let half = |start: usize| columns(&to, start, self.half);
            let quantized = vec![half(0), half(self.half), ins[4].clone(), before.clone()];
            launches.push(Launch {
                op: Op::Quantize { to: FORWARD, current: false, of: Of::Gated(self.act) },
                ins: quantized,
                outs: vec![codes, None, amax.cloned()],
                workspace: None,
                ..self.launch.clone()
            });
        }
        launches
    }

    fn library(&self, p: &Prepare<'_>) -> Prepared {
        choice::separate(self.separate_launches(), p)
    }

    /// Copies the largest magnitude so far to where our kernel raises it, unless it is there already.
    fn start(&self) -> Option<Stage> {
        let (before, to) = (&self.launch.ins[5], self.out(2)?);
        (before.offset != to.offset).then(|| Stage {
            source: quantize::start_source(),
            entry: "start",
            grid: [1, 1],
            block: 1,
            args: vec![at(before), Value::At(to.offset)],
        })
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
    if !own.is_empty() {
        sources.extend(problem.start().map(|stage| stage.source));
    }
    sources.extend(own);
    sources
}

fn prepare(launch: &Launch, p: &Prepare<'_>) -> Prepared {
    let Some(problem) = Problem::of(launch) else { return Ok(sequence(vec![])) };
    let library = || problem.library(p);
    let Some(call) = problem.call(|view| p.address(view)) else { return library() };
    let works = choice::fastest(&choice::name(launch), library, &call, &|| Ok(None), Untimed::Own, p)?;
    // Harmless before the separate launches, which do the same.
    match problem.start() {
        Some(start) if !choice::sources(&call, Untimed::Own, p.facts()).is_empty() => {
            Ok(sequence(vec![stage::prepare(Ok(vec![start]), p)?, works]))
        }
        _ => Ok(works),
    }
}
