//! Runs one case once, in a separate poisoned arena.

use std::ops::Range;

use flatout_ir::block8::e4m4_from_f32;
use flatout_ir::fp8::{e4m3_from_f32, e5m2_from_f32};
use flatout_ir::graph::{Class, Graph, Init, Node, Slot};
use flatout_ir::oracle::{self, Values};
use flatout_ir::plan::{PlacedSlot, Plan};
use flatout_ir::random::{normal, philox};
use flatout_ir::target::{KernelRow, Layout, Shapes};
use flatout_ir::types::{DType, TensorType, bf16_from_f32, contiguous_strides};
use flatout_ir::{Launch, Mesh, Op, PlanSet, Queue, Role, Value, View};

use super::{Case, CaseDevice, Data, collective};
use crate::{RuntimeError, Session, cuda};

/// How a case is laid out and run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum TrialLayout {
    Dense {
        threads: usize,
    },
    /// Gaps between rows; if the kernel supports any strides, also reversed axes and gaps between elements.
    Strided,
    /// Gaps of multiples of 16 bytes between rows, as the parts of a fused buffer have.
    Spaced,
    InPlace {
        input: usize,
        output: usize,
    },
    Without {
        output: usize,
    },
}

/// The outputs' bytes in row-major order, `None` for one left out.
pub(super) type Outputs = Vec<Option<Vec<u8>>>;

/// A case with its kernel, as a graph of one operation, and its inputs' values, each exactly representable in its type.
pub(super) struct Trial<'a> {
    case: &'a Case,
    row: KernelRow,
    graph: Graph,
    values: Vec<Vec<f64>>,
}

/// A launch in a session, and which bytes around it may change.
pub(super) struct Opened {
    session: Session,
    form: TrialLayout,
    outs: Vec<Option<View>>,
    may_change: Vec<bool>,
    scratch: Range<usize>,
}

/// Fills bytes that may not be read or written: NaN in the float types, -1 in i32.
const POISON: u8 = 0xFF;
/// The seed of random numbers.
const KEY: u64 = 0x1234_5678_9abc_def0;

impl<'a> Trial<'a> {
    pub(super) fn new(case: &'a Case, row: KernelRow) -> Self {
        let (graph, reads) = inputs(case);
        let round = |i: usize, made: Vec<f64>| {
            let ty = &case.ins[i].0;
            assert_eq!(made.len(), ty.elements(), "{}: input {i}", case.name);
            made.into_iter().map(|x| ty.dtype.round(x)).collect()
        };
        let mut values: Vec<Vec<f64>> = vec![vec![]; case.ins.len()];
        for (i, (ty, data)) in case.ins.iter().enumerate() {
            if let Some(made) = plain(i, ty, data) {
                values[i] = round(i, made);
            }
        }
        for (i, (_, data)) in case.ins.iter().enumerate() {
            if let Data::Same(other) = data {
                values[i] = values[*other].clone();
            }
        }
        for (input, rows) in &case.idle {
            let width = case.ins[*input].0.elements() / case.ins[*input].0.dims[0].max(1);
            // Outputs of the oracle are filled below.
            if !values[*input].is_empty() {
                values[*input][rows.start * width..rows.end * width].fill(0.0);
            }
        }
        for (i, (_, data)) in case.ins.iter().enumerate() {
            if let Data::Of { op, ins, out } = data {
                let mut other = graph.clone();
                let node = other.push(op.clone(), ins.iter().map(|&i| reads[i]).collect(), "");
                other.results.push(("x".into(), node.out(*out as u8)));
                let made = oracle::run(&other, &named(&values)).results.remove("x");
                values[i] = round(i, made.expect("it is a result"));
            }
        }
        Trial { case, row, graph: with_operation(graph, reads, case), values }
    }

    /// A trial without values, only for its launch.
    pub(super) fn unfilled(case: &'a Case, row: KernelRow) -> Self {
        let (graph, reads) = inputs(case);
        Trial { case, row, graph: with_operation(graph, reads, case), values: vec![] }
    }

    pub(super) fn case(&self) -> &'a Case {
        self.case
    }

    pub(super) fn row(&self) -> KernelRow {
        self.row
    }

    pub(super) fn values(&self, i: usize) -> &[f64] {
        &self.values[i]
    }

    /// An input as the kernel receives it: NaN in idle rows, which are zeros for the oracle.
    fn given(&self, i: usize) -> Vec<f64> {
        let ty = &self.case.ins[i].0;
        let width = ty.elements() / ty.dims.first().copied().unwrap_or(1).max(1);
        let mut values = self.values[i].clone();
        for (_, rows) in self.case.idle.iter().filter(|(input, _)| *input == i) {
            values[rows.start * width..rows.end * width].fill(f64::NAN);
        }
        values
    }

    /// The values of an input that depends on no other.
    pub(super) fn plain(&self, i: usize) -> Option<Vec<f64>> {
        let (ty, data) = &self.case.ins[i];
        plain(i, ty, data)
    }

    fn node(&self) -> &Node {
        self.graph.nodes.last().expect("the case's operation")
    }

    pub(super) fn outs(&self) -> &[TensorType] {
        &self.node().outs
    }

    pub(super) fn oracle(&self) -> Vec<Vec<f64>> {
        let mut results = oracle::run(&self.graph, &named(&self.values)).results;
        let count = self.graph.results.len();
        (0..count).map(|o| results.remove(&o.to_string()).expect("a result an output")).collect()
    }

    /// Runs a form on a backend. The options apply to a GPU.
    pub(super) fn run(
        &self,
        form: TrialLayout,
        place: CaseDevice<'_>,
        options: cuda::Options,
    ) -> Result<Outputs, String> {
        self.run_in(&mut self.open(form, place, options)?)
    }

    /// A session that holds one launch of a form, to be run any number of times.
    pub(super) fn open(
        &self,
        form: TrialLayout,
        place: CaseDevice<'_>,
        options: cuda::Options,
    ) -> Result<Opened, String> {
        let threads = match (form, place) {
            (_, CaseDevice::Cuda(_)) => 1,
            (TrialLayout::Dense { threads }, CaseDevice::Cpu) => threads,
            (_, CaseDevice::Cpu) => 2,
        };
        let align = if matches!(place, CaseDevice::Cpu) { 64 } else { 256 };
        let (launch, arena_bytes) = self.launch(form, align, threads);
        let outs = launch.outs.clone();
        let mut may_change = vec![false; arena_bytes];
        for view in outs.iter().flatten() {
            elements(view).for_each(|at| may_change[at..at + view.dtype.bytes()].fill(true));
        }
        // The workspace lies last and may hold anything; bytes after it may not change.
        let scratch = launch.workspace.as_ref().map_or(arena_bytes..arena_bytes, |view| {
            view.offset..(view.offset + view.span_bytes()).next_multiple_of(4)
        });
        let plans = self.plans(launch, arena_bytes);
        let session = match place {
            CaseDevice::Cpu => Session::new(plans, threads),
            // A single rank exchanges with itself through NCCL, if available.
            CaseDevice::Cuda(device) => {
                let others =
                    if self.case.op.kind().is_collective() { collective::alone(device) } else { None };
                Session::cuda_among(plans, device, options, others, &|| Ok(()))
            }
        };
        let session = session.map_err(|why| format!("{form:?}: {why}"))?;
        Ok(Opened { session, form, outs, may_change, scratch })
    }

    /// Poisons everything, writes the inputs, runs, and checks every byte that may not change.
    pub(super) fn run_in(&self, opened: &mut Opened) -> Result<Outputs, String> {
        let Opened { session, form, outs, may_change, scratch } = opened;
        let (form, arena_bytes) = (*form, may_change.len());
        let fail = |why: RuntimeError| format!("{form:?}: {why}");
        session.fill(POISON).map_err(fail)?;
        for (i, (ty, _)) in self.case.ins.iter().enumerate() {
            session.write_slot(&i.to_string(), &encode(ty.dtype, &self.given(i))).map_err(fail)?;
        }
        let around = |session: &Session| {
            let mut bytes = session.read_view(&plain_bytes(0..scratch.start))?;
            bytes.resize(scratch.end, 0);
            bytes.extend(session.read_view(&plain_bytes(scratch.end..arena_bytes))?);
            Ok(bytes)
        };
        let before = around(session).map_err(fail)?;
        session.run(Role::Eval).map_err(fail)?;
        let after = around(session).map_err(fail)?;
        if let Some(at) = (0..arena_bytes).find(|&at| before[at] != after[at] && !may_change[at]) {
            return Err(format!("{form:?}: byte {at} lies outside the outputs and was written"));
        }
        let bytes =
            |view: &View| elements(view).flat_map(|at| after[at..at + view.dtype.bytes()].to_vec()).collect();
        Ok(outs.iter().map(|view| view.as_ref().map(bytes)).collect())
    }

    /// A plan of one launch whose inputs are slots named by their index.
    pub(super) fn plans(&self, launch: Launch, arena_bytes: usize) -> PlanSet {
        let slots = launch.ins.iter().enumerate().map(|(i, view)| PlacedSlot {
            path: i.to_string(),
            ty: self.case.ins[i].0.clone(),
            class: Class::Input,
            init: Init::Zeros,
            is_whole: false,
            view: view.clone(),
        });
        PlanSet {
            arena_bytes,
            persistent_bytes: arena_bytes,
            transient_bytes: 0,
            buffers: vec![],
            slots: slots.collect(),
            inputs: 0..0,
            landings: vec![],
            plans: vec![Plan { role: Role::Eval, launches: vec![launch], results: vec![] }],
            mesh: Mesh::ONE,
            sharded: vec![],
            done: vec![],
        }
    }

    /// The forms in which a kernel is checked, in addition to dense rows on one thread.
    pub(super) fn forms(&self) -> Vec<TrialLayout> {
        let outs = self.outs();
        let fits = |&(input, output): &(usize, usize)| {
            let ins = &self.case.ins;
            input < ins.len() && output < outs.len() && ins[input].0 == outs[output]
        };
        let in_place = self.case.op.in_place().into_iter().filter(fits);
        let in_place = in_place.map(|(input, output)| TrialLayout::InPlace { input, output });
        // Some kernels rely on their first output being requested.
        let always = matches!(self.case.op, Op::ActivatedProductGrad { .. }) as usize;
        let without = (always..outs.len()).map(|output| TrialLayout::Without { output });
        in_place.chain(without).collect()
    }

    /// The launch with every tensor placed, separated by poison, and the bytes that they take.
    pub(super) fn launch(&self, form: TrialLayout, align: usize, threads: usize) -> (Launch, usize) {
        let mut end = align;
        let mut place = |mut view: View| {
            view.offset = end;
            end = (end + view.span_bytes()).next_multiple_of(align) + align;
            view
        };
        let lay = |ty: &TensorType, layout: Layout| match form {
            TrialLayout::Strided => strided(ty, layout),
            TrialLayout::Spaced => spaced(ty),
            _ => View::dense(0, ty),
        };
        let mut ins: Vec<View> = vec![];
        for (ty, data) in &self.case.ins {
            ins.push(match data {
                Data::Same(other) => ins[*other].clone(),
                _ => place(lay(ty, self.row.ins)),
            });
        }
        let mut output = |(o, ty): (usize, &TensorType)| match form {
            TrialLayout::Without { output } if output == o => None,
            TrialLayout::InPlace { input, output } if output == o => Some(ins[input].clone()),
            _ => Some(place(lay(ty, self.row.outs))),
        };
        let outs: Vec<Option<View>> = self.outs().iter().enumerate().map(&mut output).collect();
        let scratch = (self.row.workspace)(&Shapes::of(&self.graph, self.node(), threads));
        let scratch = TensorType::new(DType::F32, [scratch.div_ceil(4)]);
        let workspace = (scratch.elements() > 0).then(|| place(View::dense(0, &scratch)));
        let launch = Launch {
            kernel: self.row.name,
            op: self.case.op.clone(),
            ins,
            outs,
            workspace,
            path: self.case.name.clone(),
            key: KEY,
            flops: self.case.op.flops(self.node(), &self.graph),
            queue: Queue::of(&self.case.op),
            joins: None,
        };
        (launch, end)
    }
}

/// One slot and one value per input.
fn inputs(case: &Case) -> (Graph, Vec<Value>) {
    let mut graph = Graph::default();
    let mut reads = vec![];
    for (i, (ty, _)) in case.ins.iter().enumerate() {
        let (path, ty) = (i.to_string(), ty.clone());
        let slot = graph.add_slot(Slot { path, ty, class: Class::Input, init: Init::Zeros, part: None });
        reads.push(graph.add(Op::Read { slot }, vec![], ""));
    }
    (graph, reads)
}

/// Adds the case's operation on its inputs, with every output as a result.
fn with_operation(mut graph: Graph, reads: Vec<Value>, case: &Case) -> Graph {
    let node = graph.push_keyed(case.op.clone(), reads, "case", KEY);
    for out in 0..graph.node(node).outs.len() {
        graph.results.push((out.to_string(), node.out(out as u8)));
    }
    graph
}

/// The values of an input that depends on no other.
fn plain(i: usize, ty: &TensorType, data: &Data) -> Option<Vec<f64>> {
    let n = ty.elements();
    let draw = |e: usize| philox([e as u32, i as u32, 7, 11], [3, 5])[0] as f64 / 4_294_967_296.0;
    Some(match data {
        Data::Normal(deviation) => {
            (0..n).map(|e| deviation * normal(17, i as u64, e as u64) as f64).collect()
        }
        Data::Between(low, high) if ty.dtype == DType::I32 => {
            (0..n).map(|e| (low + draw(e) * (high - low + 1.0)).floor()).collect()
        }
        Data::Between(low, high) => (0..n).map(|e| low + draw(e) * (high - low)).collect(),
        Data::Values(values) => values.clone(),
        Data::Of { .. } | Data::Same(_) => return None,
    })
}

/// Values by slot; those not computed yet are left out.
fn named(values: &[Vec<f64>]) -> Values {
    let made = values.iter().enumerate().filter(|(_, v)| !v.is_empty());
    made.map(|(i, v)| (i.to_string(), v.clone())).collect()
}

/// A range of the arena as raw bytes; both ends are multiples of four.
fn plain_bytes(range: Range<usize>) -> View {
    View::dense(range.start, &TensorType::new(DType::I32, [range.len() / 4]))
}

/// A view with as many gaps as the layout allows.
fn strided(ty: &TensorType, layout: Layout) -> View {
    let mut view = View::dense(0, ty);
    let rank = ty.rank();
    match layout {
        Layout::Dense => {}
        Layout::Rows => {
            let mut step = ty.dims.last().copied().unwrap_or(1) + 3;
            for axis in (0..rank.saturating_sub(1)).rev() {
                view.strides[axis] = step;
                step = step * ty.dims[axis] + 5;
            }
        }
        Layout::Any => {
            let mut step = 2;
            for axis in 0..rank {
                view.strides[axis] = step;
                step = step * ty.dims[axis].max(1) + 1;
            }
        }
    }
    view
}

/// Rows with gaps that are multiples of 16 bytes, and larger gaps between those of the outer axes.
fn spaced(ty: &TensorType) -> View {
    let mut view = View::dense(0, ty);
    let unit = 16 / ty.dtype.bytes();
    let mut step = ty.dims.last().copied().unwrap_or(1).next_multiple_of(unit) + unit;
    for axis in (0..ty.rank().saturating_sub(1)).rev() {
        view.strides[axis] = step;
        step = step * ty.dims[axis] + 3 * unit;
    }
    view
}

/// The byte offsets of a view's elements, in row-major order.
fn elements(view: &View) -> impl Iterator<Item = usize> + '_ {
    let dense = contiguous_strides(&view.dims);
    (0..view.elements()).map(move |i| {
        let index = |axis: usize| i / dense[axis] % view.dims[axis];
        let offset: usize = (0..view.dims.len()).map(|axis| index(axis) * view.strides[axis]).sum();
        view.offset + offset * view.dtype.bytes()
    })
}

pub(super) fn encode(dtype: DType, values: &[f64]) -> Vec<u8> {
    match dtype {
        DType::F32 => values.iter().flat_map(|x| (*x as f32).to_le_bytes()).collect(),
        DType::I32 => values.iter().flat_map(|x| (*x as i32).to_le_bytes()).collect(),
        DType::BF16 => values.iter().flat_map(|x| bf16_from_f32(*x as f32).to_le_bytes()).collect(),
        DType::U8 => values.iter().map(|x| *x as u8).collect(),
        DType::E4M3 => values.iter().map(|x| e4m3_from_f32(*x as f32)).collect(),
        DType::E5M2 => values.iter().map(|x| e5m2_from_f32(*x as f32)).collect(),
        DType::E4M4 => values.iter().map(|x| e4m4_from_f32(*x as f32)).collect(),
        DType::F64 => unreachable!("no target offers f64"),
    }
}
