//! Linear attention on the GPU: chooses among its three kernels.
//!
//! If queries double as keys and segments fit in one tile, a kernel that computes the symmetric scores once is used
//! (`symmetric`); other bf16 cases are weighted sums on tensor cores (`sum`); f32, and bf16 of odd sizes, use the same sums in
//! plain arithmetic (`plain`). All are deterministic, and no scores are stored. Queries that are rotated as they are read are
//! supported by the first and the last.

mod plain;
mod sum;
mod symmetric;

use std::borrow::Cow;

use flatout_ir::ops::attention::Segments;
use flatout_ir::ops::linear_attention::{Accumulate, LinearAttend, LinearMask, Rotary};
use flatout_ir::ops::rope::Pairs;
use flatout_ir::target::{KernelRow, Layout, Shapes};
use flatout_ir::types::{DType, TensorType};
use flatout_ir::{Launch, OpKind, View};

use super::norms::rope::Rotation;
use super::stage::PRELUDE;
use crate::cuda::context::{
    Arg, CudaError, Facts, Kernel, Prepare, Source, Work, launch as kernel_launch, sequence,
};
use crate::rows::{FLOATS, kernel_row};
use crate::weighted_sum::{Owner, WeightedSum, sums};

const fn kernel(name: &'static str, op: OpKind) -> Kernel {
    Kernel { row: KernelRow { workspace, ..kernel_row(name, op, FLOATS, Layout::Rows) }, sources, prepare }
}

pub const KERNELS: &[Kernel] = &[
    kernel("cuda.linear_attention", OpKind::LinearAttention),
    kernel("cuda.linear_attention_grad", OpKind::LinearAttentionGrad),
];

/// The shapes and options of either direction.
#[derive(Clone, Copy, Debug)]
struct Problem {
    attend: LinearAttend,
    is_grad: bool,
    accumulate: Accumulate,
    dtype: DType,
    tq: usize,
    tk: usize,
    heads: usize,
    v_heads: usize,
    /// N and D.
    inner: usize,
    width: usize,
}

impl Problem {
    fn new((attend, is_grad): (LinearAttend, bool), q: &TensorType, k: &TensorType, v: &TensorType) -> Self {
        Problem {
            attend,
            is_grad,
            accumulate: Accumulate::Nothing,
            dtype: q.dtype,
            tq: q.dims[0],
            tk: k.dims[0],
            heads: q.dims[1],
            v_heads: v.dims[1],
            inner: q.dims[2],
            width: v.dims[2],
        }
    }

    fn of(launch: &Launch) -> Self {
        let of = LinearAttend::of(&launch.op).expect("the rows are for linear attention");
        let tensors = of.0.tensors();
        let ty = |i: usize| TensorType::new(launch.ins[i].dtype, launch.ins[i].dims.clone());
        let accumulate = Accumulate::of(&launch.op);
        Problem { accumulate, ..Problem::new(of, &ty(0), &ty(tensors - 2), &ty(tensors - 1)) }
    }

    fn q_longest(&self) -> usize {
        longest(self.attend.q, self.tq)
    }

    fn k_longest(&self) -> usize {
        longest(self.attend.k_segments(), self.tk)
    }

    /// Number of segment pairs.
    fn segments(&self) -> usize {
        match self.attend.q {
            Segments::Uniform { len } => self.tq / len.max(1),
            Segments::Ragged { max_segments, .. } => max_segments,
        }
    }

    /// The defines of all sources of these kernels.
    fn defines(&self) -> Vec<(String, String)> {
        let mask = match self.attend.mask {
            LinearMask::Full => 0,
            LinearMask::Causal => 1,
            LinearMask::Strict => 2,
        };
        let ragged = |segments: Segments| is_ragged(segments) as usize;
        let defines = [
            ("MASK", mask),
            ("Q_RAGGED", ragged(self.attend.q)),
            ("K_RAGGED", ragged(self.attend.k_segments())),
        ];
        numbers(&defines)
    }
}

fn numbers(defines: &[(&str, usize)]) -> Vec<(String, String)> {
    defines.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect()
}

fn is_ragged(segments: Segments) -> bool {
    matches!(segments, Segments::Ragged { .. })
}

fn longest(segments: Segments, tokens: usize) -> usize {
    match segments {
        Segments::Uniform { len } => len,
        Segments::Ragged { max_len, .. } => max_len.min(tokens),
    }
}

/// A launch of one of these kernels.
struct Step {
    source: Source,
    entry: &'static str,
    /// Blocks along x and y.
    grid: [usize; 2],
    threads: usize,
    shared_bytes: usize,
    args: Vec<Arg>,
}

/// A launch with its shapes and the addresses of its tensors; before the arena exists, their offsets.
struct At<'a> {
    problem: Problem,
    launch: &'a Launch,
    arena: u64,
    /// Every frequency follows the single axis of positions.
    axes: Vec<u8>,
}

impl At<'_> {
    fn pointer(&self, view: Option<&View>) -> Arg {
        Arg::Ptr(view.map_or(0, |view| self.arena + view.offset as u64))
    }

    /// Starts and lengths of queries and of keys; null if segments are uniform.
    fn bounds(&self) -> [[Arg; 2]; 2] {
        let attend = &self.problem.attend;
        let [q, k] = attend.bounds();
        let of = |segments: Segments, at: usize| {
            [at, at + 1].map(|i| self.pointer(self.launch.ins.get(i).filter(|_| is_ragged(segments))))
        };
        [of(attend.q, q), of(attend.k_segments(), k)]
    }

    /// The tensor that the gradient of queries is accumulated onto.
    fn base(&self) -> Option<&View> {
        let p = &self.problem;
        (p.accumulate != Accumulate::Nothing).then(|| &self.launch.ins[p.attend.inputs() + 1])
    }

    /// Whether a sum is accumulated onto a base: only the gradient of queries, output 0 of input 0, is.
    fn accumulate(&self, sum: &WeightedSum) -> Accumulate {
        if sum.out == 0 { self.problem.accumulate } else { Accumulate::Nothing }
    }

    /// The rotation of queries as they are read.
    fn rotation(&self) -> Option<Rotation<'_>> {
        let attend = &self.problem.attend;
        let positions = attend.positions();
        attend.rotary.freq().map(|freq| Rotation {
            freq,
            axis_of_freq: &self.axes,
            pairs: Pairs::Interleaved,
            positions: &self.launch.ins[positions],
            table: attend.rotary.has_table().then(|| &self.launch.ins[positions + 1]),
        })
    }

    /// A kernel's source after its defines; for rotated queries with the rotation, for threads that hold `vec` pairs and read
    /// `pair` of their elements at once.
    fn code(
        &self,
        body: &str,
        vec: usize,
        pair: usize,
        defines: &mut Vec<(String, String)>,
    ) -> Cow<'static, str> {
        let Some(rotation) = self.rotation() else { return format!("{PRELUDE}\n{body}").into() };
        defines.extend(rotation.defines(vec, pair).map(|(name, value)| (name.into(), value)));
        format!("{PRELUDE}\n{}\n{}\n{body}", rotation.constants(), include_str!("../norms/rotation.cuh"))
            .into()
    }

    /// The last arguments of kernels that rotate: positions, table, number of table rows.
    fn rotation_args(&self) -> Vec<Arg> {
        let Some(rotation) = self.rotation() else { return vec![] };
        let rows = rotation.table.map_or(0, |table| table.dims[0]);
        vec![self.pointer(Some(rotation.positions)), self.pointer(rotation.table), count(rows)]
    }

    /// Clears the rows of every output outside every segment.
    fn clears(&self) -> Vec<Step> {
        let p = &self.problem;
        let [q, k] = self.bounds();
        let of = |sum: WeightedSum| {
            let view = self.launch.outs[sum.out].as_ref()?;
            let by_keys = sum.owner == Owner::Keys;
            let (segments, bounds) = if by_keys { (p.attend.k_segments(), k) } else { (p.attend.q, q) };
            let tokens = view.dims[0];
            let mut args = vec![self.pointer(Some(view)), bounds[0], bounds[1]];
            args.extend(strides(Some(view)));
            let counts = [tokens, longest(segments, tokens), p.segments(), view.dims[1], view.dims[2]];
            args.extend(counts.map(count));
            let step = Step {
                source: clear_source(view.dtype),
                entry: "clear_outside",
                grid: [tokens.div_ceil(64), 1],
                threads: 256,
                shared_bytes: 0,
                args,
            };
            is_ragged(segments).then_some(step)
        };
        sums(&p.attend, p.is_grad).into_iter().filter_map(of).collect()
    }
}

fn clear_source(dtype: DType) -> Source {
    Source {
        name: "linear_attention/clear.cu",
        code: Cow::Borrowed(concat!(include_str!("../prelude.cuh"), include_str!("clear.cu"))),
        defines: vec![("T_X".into(), super::stage::c_type(dtype).into())],
    }
}

/// Strides of tokens and heads.
fn strides(view: Option<&View>) -> [Arg; 2] {
    view.map_or([Arg::I64(0); 2], |view| [0, 1].map(|axis| Arg::I64(view.strides[axis] as i64)))
}

/// A count that `limits` keeps below 2^31.
fn count(n: usize) -> Arg {
    Arg::I32(n as i32)
}

/// Whether a bf16 tensor can be accessed by a head's row in 16-byte pieces.
fn in_pieces(view: &View) -> bool {
    let aligned = view.offset.is_multiple_of(16) && view.strides[..2].iter().all(|s| s.is_multiple_of(8));
    view.dtype == DType::BF16 && aligned && view.dims[2].is_multiple_of(8)
}

/// Workspace of the only form that needs any; the form that runs depends on strides, which are not known yet.
fn workspace(shapes: &Shapes<'_>) -> usize {
    let of = LinearAttend::of(&shapes.node.op).expect("the rows are for linear attention");
    let tensors = of.0.tensors();
    symmetric::workspace(&Problem::new(of, shapes.ins[0], shapes.ins[tensors - 2], shapes.ins[tensors - 1]))
}

fn steps(launch: &Launch, facts: &Facts, arena: u64) -> Vec<Step> {
    let problem = Problem::of(launch);
    let at = At { axes: vec![0; problem.inner / 2], problem, launch, arena };
    let mut steps = at.clears();
    if symmetric::serves(&at) {
        steps.extend(symmetric::steps(&at, facts));
        return steps;
    }
    for sum in sums(&at.problem.attend, at.problem.is_grad) {
        let Some(out) = &launch.outs[sum.out] else { continue };
        let is_plain = at.problem.attend.rotary == Rotary::None && at.accumulate(&sum) == Accumulate::Nothing;
        steps.push(if is_plain && sum::serves(&at, &sum, out) {
            sum::step(&at, &sum, out)
        } else {
            plain::step(&at, &sum, out)
        });
    }
    steps
}

fn sources(launch: &Launch, facts: &Facts) -> Vec<Source> {
    steps(launch, facts, 0).into_iter().map(|step| step.source).collect()
}

fn prepare(launch: &Launch, p: &Prepare<'_>) -> Result<Box<dyn Work>, CudaError> {
    let most = launch.ins.iter().flat_map(|view| &view.dims).max().copied().unwrap_or(0);
    if i32::try_from(most).is_err() {
        return Err(CudaError::new(format!("an extent of {most} is more than linear attention counts")));
    }
    let start = View { offset: 0, dtype: DType::F32, dims: vec![], strides: vec![] };
    let work = |step: Step| {
        let [x, y] = step.grid;
        if i32::try_from(x).is_err() || y > 65535 {
            return Err(CudaError::new(format!("{x} x {y} blocks are more than a launch may have")));
        }
        let function = p.function(&step.source, step.entry)?;
        let (threads, shared) = (step.threads as u32, step.shared_bytes as u32);
        Ok(kernel_launch(function, [x as u32, y as u32, 1], threads, shared, step.args))
    };
    let works: Result<Vec<_>, CudaError> = steps(launch, p.facts(), p.address(&start))
        .into_iter()
        .filter(|step| step.grid[0] > 0)
        .map(work)
        .collect();
    Ok(sequence(works?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use flatout_ir::ops::linear_attention::Keys;

    /// The entry points that a launch of Vision-BDH's shapes runs, in order, with some outputs absent.
    fn entries(dtype: DType, len: usize, is_grad: bool, wanted: &[bool]) -> Vec<&'static str> {
        let q = Segments::Uniform { len };
        let attend =
            LinearAttend { scale: 1.0, mask: LinearMask::Strict, q, k: Keys::Queries, rotary: Rotary::None };
        let mut end = 0;
        let mut place = |heads: usize, size: usize| {
            let ty = TensorType::new(dtype, [4 * len, heads, size]);
            let view = View::dense(end, &ty);
            end = (end + ty.bytes()).next_multiple_of(256);
            view
        };
        let mut ins = vec![place(6, 1024), place(1, 192)];
        ins.extend(is_grad.then(|| place(6, 192)));
        let outs = if is_grad { vec![place(6, 1024), place(1, 192)] } else { vec![place(6, 192)] };
        let outs = outs.into_iter().zip(wanted).map(|(view, wanted)| wanted.then_some(view)).collect();
        let workspace = is_grad.then(|| place(6, 192));
        let op = if is_grad { attend.grad() } else { attend.op() };
        let (kernel, path) = ("cuda.linear_attention", String::new());
        let launch = Launch {
            kernel,
            op,
            ins,
            outs,
            workspace,
            path,
            key: 0,
            flops: 0,
            queue: flatout_ir::Queue::Compute,
            joins: None,
        };
        steps(&launch, &Facts::on_paper("sm_90a"), 0).into_iter().map(|step| step.entry).collect()
    }

    /// A launched kernel always writes its output, so none may be launched for an absent one.
    #[test]
    fn only_requested_outputs_are_launched() {
        let none: [&str; 0] = [];
        for (dtype, len, forward, dr, dv) in [
            (
                DType::BF16,
                65,
                "symmetric_forward",
                &["symmetric_backward"][..],
                &["symmetric_backward", "symmetric_dv"][..],
            ),
            (DType::BF16, 650, "weighted_sum", &["weighted_sum"], &["weighted_sum"]),
            (DType::F32, 65, "plain_sum", &["plain_sum"], &["plain_sum"]),
        ] {
            assert_eq!(entries(dtype, len, false, &[true]), [forward]);
            assert_eq!(entries(dtype, len, false, &[false]), none);
            assert_eq!(entries(dtype, len, true, &[true, false]), dr);
            assert_eq!(entries(dtype, len, true, &[false, true]), dv);
            assert_eq!(entries(dtype, len, true, &[false, false]), none);
        }
    }
}
