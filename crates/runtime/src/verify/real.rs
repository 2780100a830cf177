//! Verifies kernels at the sizes of a real model, on samples of their outputs.
//!
//! Tiles, rows and heads of the output are compared with the oracle on just the inputs that they depend on.
//!
//! Small cases cannot reveal an index that overflows, a grid that is too small or a sum that misses its last block. If an
//! output depends on all rows (a weight's gradient), the incoming gradient is zero except in a few rows spread over the tensor,
//! so the oracle needs only those. Everything runs on either backend: the sampling is tested on the CPU at small sizes.

pub(super) mod attention;

use std::ops::Range;

use flatout_ir::block8::BLOCK;
use flatout_ir::graph::{Class, Graph, Init, Slot};
use flatout_ir::ops::cap::Cap;
use flatout_ir::ops::epilogue::Epilogue;
use flatout_ir::ops::gated::Act;
use flatout_ir::ops::norm::{NormSpec, NormWeight};
use flatout_ir::ops::product::Compute;
use flatout_ir::oracle::{self, Values};
use flatout_ir::plan::Plan;
use flatout_ir::target::{Shapes, Target};
use flatout_ir::types::{DType, TensorType};
use flatout_ir::{Launch, Mesh, Op, PlanSet, Role, View};

use super::trial::encode;
use super::{CaseDevice, KernelSelection};
use crate::cuda::session::noise::Noise;
use crate::{RuntimeError, Session, cuda};

const F32: DType = DType::F32;
const BF16: DType = DType::BF16;

/// Bound on the relative L2 error of a sample, for operations that round to bf16 internally, as in the small cases.
const BF16_BOUND: f64 = 1.5e-2;
/// Bound for an output that is rounded once, at the end, to bf16, whose last bit is 2^-8.
const BF16_ONCE_BOUND: f64 = 4e-3;
/// Bound for a product of bf16 accumulated in f32: tensor cores drop low bits of long sums.
const LONG_SUM_BOUND: f64 = 2e-3;
/// Bound for f32 throughout. TF32 would be off by 3e-4.
const F32_BOUND: f64 = 2e-5;

#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    tokens: usize,
    context: usize,
    width: usize,
    /// Columns of gate and up together.
    ffn: usize,
    heads: usize,
    kv_heads: usize,
    head: usize,
    words: usize,
    /// Rows that go through the output head at once.
    head_rows: usize,
    /// Parameters of one update.
    parameters: usize,
    /// Segments that the tokens are packed in.
    segments: usize,
    /// Caches decoded from at once, each of four contexts.
    caches: usize,
}

impl Sizes {
    /// `pretrain-226m` with 32 rows.
    pub const PRETRAIN_226M: Sizes = Sizes {
        tokens: 65536,
        context: 2048,
        width: 768,
        ffn: 4096,
        heads: 12,
        kv_heads: 4,
        head: 64,
        words: 32768,
        head_rows: 16384,
        parameters: 64 << 20,
        segments: 325,
        caches: 64,
    };
}

/// Lays an operation out, runs it and returns the worst error of its samples.
type Samples = dyn Fn(Bench<'_>) -> Result<f64, String>;
type LayOut = dyn Fn(Bench<'_>) -> Result<Vec<Launch>, String>;

/// A check with its bound.
pub struct Check {
    pub name: String,
    pub bound: f64,
    op: Op,
    dtype: DType,
    /// Lays out the check's launches, if several kernels may serve them.
    lay: Option<Box<LayOut>>,
    run: Box<Samples>,
}

impl Check {
    /// The launches of the check, if several kernels may serve them, for compiling ahead.
    pub fn launches(&self, place: CaseDevice<'_>) -> Vec<Launch> {
        let laid = self.lay.as_ref().map(|lay| lay(Bench::new(place, KernelSelection::default())));
        laid.and_then(Result::ok).unwrap_or_default()
    }

    /// Runs every kernel that serves it; returns each with the worst error or what is wrong.
    pub fn run(&self, place: CaseDevice<'_>) -> Vec<(String, Result<f64, String>)> {
        let row = place.target().kernel(self.op.kind(), self.dtype).map_or("none", |row| row.name);
        let selections = match self.lay.as_ref().map(|lay| lay(Bench::new(place, KernelSelection::default())))
        {
            None => vec![KernelSelection::default()],
            Some(Ok(launches)) => place.selections(&launches, cuda::Options::default()),
            Some(Err(why)) => return vec![(row.into(), Err(why))],
        };
        let checked = |selection: KernelSelection| match (self.run)(Bench::new(place, selection)) {
            // NaN is within no bound.
            Ok(error) if error <= self.bound => Ok(error),
            Ok(error) => Err(format!("off by {error:.2e}, more than {:.0e}", self.bound)),
            Err(why) => Err(why),
        };
        selections.into_iter().map(|selection| (selection.name(row), checked(selection))).collect()
    }
}

/// The contents of a tensor before the operation runs.
#[derive(Clone)]
pub(super) enum Fill {
    Noise(Noise),
    /// Zeros except for these rows of the first axis.
    Rows(Noise, Vec<usize>),
    Values(Vec<f64>),
}

pub(super) const WIDE: Fill = Fill::Noise(Noise::WIDE);

/// Tensors and launches, as they are laid out in an arena.
pub(super) struct Bench<'a> {
    place: CaseDevice<'a>,
    selection: KernelSelection,
    target: Target,
    end: usize,
    pub(super) launches: Vec<Launch>,
    fills: Vec<(View, Fill)>,
}

impl<'a> Bench<'a> {
    pub(super) fn new(place: CaseDevice<'a>, selection: KernelSelection) -> Self {
        Bench { place, selection, target: place.target(), end: 0, launches: vec![], fills: vec![] }
    }

    fn lay(&mut self, ty: &TensorType) -> View {
        let view = View::dense(self.end, ty);
        self.end = (self.end + view.span_bytes()).next_multiple_of(self.target.align);
        view
    }

    pub(super) fn input(&mut self, dtype: DType, dims: &[usize], fill: Fill) -> View {
        let view = self.lay(&TensorType::new(dtype, dims));
        self.fills.push((view.clone(), fill));
        view
    }

    /// Adds a launch; returns the views of its outputs.
    pub(super) fn launch(&mut self, op: Op, ins: &[View]) -> Result<Vec<View>, String> {
        let types: Vec<TensorType> = ins.iter().map(type_of).collect();
        let (graph, _) = graph(&op, &types);
        let node = graph.nodes.last().expect("the operation");
        let row = *self
            .target
            .kernel(op.kind(), types[0].dtype)
            .ok_or_else(|| format!("no kernel runs {} in {}", op.name(), types[0].dtype.name()))?;
        let outs: Vec<View> = node.outs.iter().map(|ty| self.lay(ty)).collect();
        let scratch = (row.workspace)(&Shapes::of(&graph, node, self.target.cores)).div_ceil(4);
        let workspace = (scratch > 0).then(|| self.lay(&TensorType::new(F32, [scratch])));
        self.launches.push(Launch {
            kernel: row.name,
            path: op.name().into(),
            op,
            ins: ins.to_vec(),
            outs: outs.iter().cloned().map(Some).collect(),
            workspace,
            key: 0,
            flops: 0,
            queue: flatout_ir::Queue::Compute,
            joins: None,
        });
        Ok(outs)
    }

    /// Checks that every launch is valid for its kernel.
    #[cfg(test)]
    pub(super) fn check(&self) -> Result<(), String> {
        self.launches.iter().try_for_each(|launch| {
            let row =
                self.target.kernels.iter().find(|row| row.name == launch.kernel).expect("taken from here");
            crate::launch::check(launch, row, self.end, self.target.cores)
        })
    }

    /// Fills every tensor and runs the launches.
    fn run(self) -> Result<FinishedRun, String> {
        let mut session = self.open()?;
        session.run(Role::Eval).map_err(message)?;
        Ok(FinishedRun { session })
    }

    /// A session with one plan of the launches in order, and every tensor filled.
    pub(super) fn open(self) -> Result<Session, String> {
        let plans = PlanSet {
            arena_bytes: self.end,
            persistent_bytes: self.end,
            transient_bytes: 0,
            buffers: vec![],
            slots: vec![],
            inputs: 0..0,
            landings: vec![],
            plans: vec![Plan { role: Role::Eval, launches: self.launches, results: vec![] }],
            mesh: Mesh::ONE,
            sharded: vec![],
            done: vec![],
        };
        let session = match self.place {
            CaseDevice::Cpu => Session::new(plans, self.target.cores),
            CaseDevice::Cuda(device) => {
                let options = cuda::Options { autotune: cuda::Autotune::Quick, ..Default::default() };
                Session::cuda(plans, device, self.selection.options(options))
            }
        };
        let mut session = session.map_err(message)?;
        for (i, (view, fill)) in self.fills.iter().enumerate() {
            let seed = 100 * i as u32;
            match fill {
                Fill::Noise(noise) => session.fill_noise(view, seed, *noise).map_err(message)?,
                Fill::Rows(noise, rows) => {
                    session.fill_noise(view, 0, Noise::ZERO).map_err(message)?;
                    for row in rows {
                        let part = narrow(view, 0, *row..row + 1);
                        session.fill_noise(&part, seed + *row as u32, *noise).map_err(message)?;
                    }
                }
                Fill::Values(values) => {
                    session.write_view(view, &encode(view.dtype, values)).map_err(message)?;
                }
            }
        }
        Ok(session)
    }
}

pub(super) fn message(why: RuntimeError) -> String {
    why.to_string()
}

fn type_of(view: &View) -> TensorType {
    TensorType::new(view.dtype, view.dims.clone())
}

/// An operation on inputs named by their index, with every output as a result.
fn graph(op: &Op, types: &[TensorType]) -> (Graph, usize) {
    let mut graph = Graph::default();
    let ins = types.iter().enumerate().map(|(i, ty)| {
        let slot =
            Slot { path: i.to_string(), ty: ty.clone(), class: Class::Input, init: Init::Zeros, part: None };
        let slot = graph.add_slot(slot);
        graph.add(Op::Read { slot }, vec![], "")
    });
    let ins = ins.collect();
    let node = graph.push(op.clone(), ins, "");
    let outs = graph.node(node).outs.len();
    for out in 0..outs {
        graph.results.push((out.to_string(), node.out(out as u8)));
    }
    (graph, outs)
}

/// A range of one axis.
fn narrow(view: &View, axis: usize, range: Range<usize>) -> View {
    let mut part = view.clone();
    part.offset += range.start * view.strides[axis] * view.dtype.bytes();
    part.dims[axis] = range.len();
    part
}

/// A finished run, to be sampled.
struct FinishedRun {
    session: Session,
}

impl FinishedRun {
    fn read(&self, view: &View) -> Result<Vec<f64>, String> {
        let bytes = self.session.read_view(view).map_err(message)?;
        Ok(crate::session::as_f32(view.dtype, &bytes).into_iter().map(f64::from).collect())
    }

    /// Rows of the first axis as one tensor.
    fn rows(&self, view: &View, rows: &[usize]) -> Result<Tensor, String> {
        let mut ty = type_of(view);
        ty.dims[0] = rows.len();
        let values = rows.iter().map(|row| self.read(&narrow(view, 0, *row..row + 1)));
        Ok((ty, values.collect::<Result<Vec<_>, _>>()?.concat()))
    }

    fn part(&self, view: &View) -> Result<Tensor, String> {
        Ok((type_of(view), self.read(view)?))
    }
}

type Tensor = (TensorType, Vec<f64>);

/// The oracle's results on sampled inputs.
fn wanted(op: &Op, ins: &[Tensor]) -> Vec<Vec<f64>> {
    let types: Vec<TensorType> = ins.iter().map(|(ty, _)| ty.clone()).collect();
    let (graph, outs) = graph(op, &types);
    let values: Values = ins.iter().enumerate().map(|(i, (_, v))| (i.to_string(), v.clone())).collect();
    let mut results = oracle::run(&graph, &values).results;
    (0..outs).map(|out| results.remove(&out.to_string()).expect("a result an output")).collect()
}

/// The relative L2 error; infinite if any element is not finite, or a tensor that must be zero is not.
fn error(got: &[f64], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len(), "a sample and its reference");
    let (mut off, mut size) = (0.0, 0.0);
    for (got, want) in got.iter().zip(want) {
        off += (got - want) * (got - want);
        size += want * want;
    }
    match (off, size) {
        (0.0, _) => 0.0,
        (_, 0.0) => f64::INFINITY,
        _ if off.is_finite() => (off / size).sqrt(),
        _ => f64::INFINITY,
    }
}

/// A few offsets into `count` with `width` elements after each: the ends, around the middle, and unaligned to any block.
fn places(count: usize, width: usize) -> Vec<usize> {
    let last = count - width;
    let mut places: Vec<usize> = [0, 1, 131, count / 3 + 7, count / 2, last - last / 5, last]
        .into_iter()
        .map(|p| p.min(last))
        .collect();
    places.dedup();
    places
}

pub fn checks(sizes: Sizes) -> Vec<Check> {
    let mut all = products(sizes);
    all.extend(attention::checks(sizes));
    all.extend(norms(sizes));
    all.extend(gated(sizes));
    all.push(head_loss(sizes));
    all.extend([(F32, false), (F32, true), (BF16, true)].map(|(moments, copy)| update(sizes, moments, copy)));
    all.push(update_of_blocks(sizes));
    all
}

fn shape(dtype: DType, dims: &[usize]) -> String {
    TensorType::new(dtype, dims).to_string()
}

fn products(s: Sizes) -> Vec<Check> {
    let (t, d, f) = (s.tokens, s.width, s.ffn);
    // m, n, k as in a decoder's projection forward, for the gradient of its input, and of its weight.
    let forms = [
        ("forward", [t, f, d], false, true, BF16, BF16, false),
        ("to the input", [t, d, f], false, false, BF16, BF16, false),
        ("to the weight, added", [f, d, t], true, false, BF16, F32, true),
        ("forward", [t / 8, f, d], false, true, F32, F32, false),
    ];
    forms
        .into_iter()
        .map(|(what, mnk, ta, tb, dtype, out, base)| product(what, mnk, ta, tb, dtype, out, base))
        .collect()
}

fn product(
    what: &str,
    [m, n, k]: [usize; 3],
    ta: bool,
    tb: bool,
    dtype: DType,
    out: DType,
    base: bool,
) -> Check {
    let op = Op::Product { ta, tb, out, base, compute: Compute::Full, epilogue: Epilogue::None };
    let bound = match (dtype, out) {
        (BF16, BF16) => BF16_ONCE_BOUND,
        (BF16, _) => LONG_SUM_BOUND,
        _ => F32_BOUND,
    };
    let name = format!("real product {what} {m}x{n}x{k} {} to {}", dtype.name(), out.name());
    let (a_dims, b_dims) = (if ta { [k, m] } else { [m, k] }, if tb { [n, k] } else { [k, n] });
    let this = op.clone();
    let run = move |mut bench: Bench<'_>| {
        let a = bench.input(dtype, &a_dims, WIDE);
        let b = bench.input(dtype, &b_dims, WIDE);
        let base = base.then(|| bench.input(out, &[m, n], WIDE));
        let ins: Vec<View> = [a.clone(), b.clone()].into_iter().chain(base.clone()).collect();
        let d = bench.launch(this.clone(), &ins)?.remove(0);
        let ran = bench.run()?;
        let (rows, columns) = (16.min(m), 16.min(n));
        let mut worst: f64 = 0.0;
        let (at_m, at_n) = (places(m, rows), places(n, columns));
        for i in 0..at_m.len().max(at_n.len()) {
            // Different columns for each row, so that the corners are included.
            let (r, c) = (at_m[i % at_m.len()], at_n[at_n.len() - 1 - i % at_n.len()]);
            let (r, c) = (r..r + rows, c..c + columns);
            let tile = |view: &View| narrow(&narrow(view, 0, r.clone()), 1, c.clone());
            let mut parts = vec![
                ran.part(&narrow(&a, ta as usize, r.clone()))?,
                ran.part(&narrow(&b, !tb as usize, c.clone()))?,
            ];
            if let Some(base) = &base {
                parts.push(ran.part(&tile(base))?);
            }
            worst = worst.max(error(&ran.read(&tile(&d))?, &wanted(&this, &parts)[0]));
        }
        Ok(worst)
    };
    Check { name, bound, op, dtype, lay: None, run: Box::new(run) }
}

/// Samples rows of outputs with as many rows as the inputs; takes other outputs whole.
fn by_rows(
    name: String,
    op: Op,
    dtype: DType,
    bound: f64,
    ins: Vec<(DType, Vec<usize>, Fill)>,
    rows: Vec<usize>,
) -> Check {
    let this = op.clone();
    let run = move |mut bench: Bench<'_>| {
        let count = ins[0].1[0];
        let lay = |(dtype, dims, fill): &(DType, Vec<usize>, Fill)| bench.input(*dtype, dims, fill.clone());
        let views: Vec<View> = ins.iter().map(lay).collect();
        let outs = bench.launch(this.clone(), &views)?;
        let ran = bench.run()?;
        let sample = |view: &View| if view.dims[0] == count { ran.rows(view, &rows) } else { ran.part(view) };
        let parts = views.iter().map(sample).collect::<Result<Vec<_>, _>>()?;
        let mut worst: f64 = 0.0;
        for (out, want) in outs.iter().zip(wanted(&this, &parts)) {
            worst = worst.max(error(&sample(out)?.1, &want));
        }
        Ok(worst)
    };
    Check { name, bound, op, dtype, lay: None, run: Box::new(run) }
}

fn norms(s: Sizes) -> Vec<Check> {
    let (dims, eps, weight) = (vec![s.tokens, s.width], 1e-6, NormWeight::Plain);
    let rows = places(s.tokens, 1);
    let x = || (BF16, dims.clone(), WIDE);
    let w = || (F32, vec![s.width], WIDE);
    let d = || (BF16, dims.clone(), Fill::Rows(Noise::WIDE, rows.clone()));
    let of = shape(BF16, &dims);
    let rms = NormSpec::rms(eps, weight);
    let layer = NormSpec { center: true, bias: true, ..rms };
    let check = |name: String, op: Op, ins| by_rows(name, op, BF16, BF16_BOUND, ins, rows.clone());
    vec![
        check(format!("real add+norm {of}"), rms.op(true), vec![x(), x(), w()]),
        check(format!("real add+norm back {of}"), rms.grad(true), vec![x(), w(), d(), x()]),
        check(format!("real add+layer norm {of}"), layer.op(true), vec![x(), x(), w(), w()]),
        check(format!("real add+layer norm back {of}"), layer.grad(true), vec![x(), w(), d(), x()]),
    ]
}

fn gated(s: Sizes) -> Vec<Check> {
    let dims = vec![s.tokens, s.ffn / 2];
    let (act, rows) = (Act::Silu, places(s.tokens, 1));
    let x = || (BF16, dims.clone(), WIDE);
    let of = shape(BF16, &dims);
    let check = |name: String, op: Op, ins| by_rows(name, op, BF16, BF16_BOUND, ins, rows.clone());
    vec![
        check(format!("real gated {of}"), Op::Gated { act, p: 0.0 }, vec![x(), x()]),
        check(
            format!("real gated back {of}"),
            Op::GatedGrad { act, again: true, p: 0.0 },
            vec![x(), x(), x()],
        ),
    ]
}

fn head_loss(s: Sizes) -> Check {
    let (rows, width, words) = (s.head_rows, s.width, s.words);
    // All other rows have weight 0, so the loss and the head's gradient depend on these alone.
    let sampled: Vec<usize> = places(rows, 1).into_iter().step_by(2).collect();
    let weights =
        (0..rows).map(|row| if sampled.contains(&row) { 1.0 + (row % 3) as f64 / 4.0 } else { 0.0 });
    let targets = (0..rows).map(|row| ((row * 7919 + 13) % words) as f64);
    let ins = vec![
        (BF16, vec![rows, width], WIDE),
        (BF16, vec![words, width], Fill::Noise(Noise::SMALL)),
        (DType::I32, vec![rows], Fill::Values(targets.collect())),
        (F32, vec![rows], Fill::Values(weights.collect())),
        (F32, vec![words, width], Fill::Noise(Noise::SMALL)),
    ];
    let name = format!("real head+loss {rows}x{width}, {words} words, bf16");
    by_rows(
        name,
        Op::HeadLossTrain { base: true, compute: Compute::Full, cap: Cap::NONE },
        BF16,
        BF16_BOUND,
        ins,
        sampled,
    )
}

/// Learning rate, gradient scale, number of updates so far, whether to update.
fn scalars() -> [(DType, Vec<usize>, Fill); 4] {
    [0.01, 0.5, 20.0, 1.0].map(|value| (F32, vec![1], Fill::Values(vec![value])))
}

/// The constants of an update: beta1, beta2, eps, decay, learning rate factor.
const UPDATE: (f32, f32, f32, f32, f32) = (0.9, 0.95, 1e-8, 0.1, 1.0);

fn update(s: Sizes, moments: DType, copy: bool) -> Check {
    let dims = vec![s.parameters];
    let (beta1, beta2, eps, weight_decay, lr_scale) = UPDATE;
    let op = Op::AdamW { beta1, beta2, eps, weight_decay, lr_scale, copy, first: 0 };
    let mut ins: Vec<(DType, Vec<usize>, Fill)> =
        [F32, F32, moments].map(|dtype| (dtype, dims.clone(), WIDE)).into();
    ins.push((moments, dims.clone(), Fill::Noise(Noise::POSITIVE)));
    ins.extend(scalars());
    // Moments in bf16 are rounded stochastically: within a step of the nearest.
    let (with, bound) = match (moments, copy) {
        (BF16, _) => (", moments in bf16", 1.0 / 128.0),
        (_, true) => (" with bf16 copy", BF16_ONCE_BOUND),
        (_, false) => ("", F32_BOUND),
    };
    let name = format!("real adamw {}{with}", shape(F32, &dims));
    let spread = (0..64).map(|i| i * (s.parameters - 1) / 63).collect();
    by_rows(name, op, F32, bound, ins, spread)
}

/// 8-bit moments, in whole blocks: codes are within a step of the nearest.
fn update_of_blocks(s: Sizes) -> Check {
    let blocks = s.parameters / BLOCK;
    let dims = vec![blocks, BLOCK];
    let (beta1, beta2, eps, weight_decay, lr_scale) = UPDATE;
    let op = Op::AdamW8 { beta1, beta2, eps, weight_decay, lr_scale, copy: true, first: 0 };
    let of = |dtype: DType, dims: &[usize], noise: Noise| (dtype, dims.to_vec(), Fill::Noise(noise));
    let mut ins = vec![of(F32, &dims, Noise::WIDE), of(F32, &dims, Noise::WIDE)];
    ins.extend([DType::E4M3, DType::E4M4].map(|dtype| of(dtype, &dims, Noise::BYTES)));
    ins.extend([(); 2].map(|()| of(F32, &[blocks], Noise::POSITIVE)));
    ins.extend(scalars());
    let name = format!("real adamw8 {}", shape(F32, &dims));
    by_rows(name, op, F32, 0.125, ins, places(blocks, 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: Sizes = Sizes {
        tokens: 1000,
        context: 200,
        width: 48,
        ffn: 64,
        heads: 4,
        kv_heads: 2,
        head: 16,
        words: 300,
        head_rows: 150,
        parameters: 5000,
        segments: 9,
        caches: 3,
    };

    #[test]
    fn the_cpus_kernels_pass_at_small_sizes() {
        for check in checks(SMALL) {
            for (kernel, error) in check.run(CaseDevice::Cpu) {
                let error = error.unwrap_or_else(|why| panic!("{}: {why}", check.name));
                println!("{:60} {kernel:20} {error:.1e}", check.name);
            }
        }
    }

    /// Samples are specific to the operation: another operation on the same inputs is far outside the bound.
    #[test]
    fn a_wrong_kernel_is_noticed() {
        let wrong = |act: Act| {
            let mut bench = Bench::new(CaseDevice::Cpu, KernelSelection::default());
            let (a, b) = (bench.input(BF16, &[64, 32], WIDE), bench.input(BF16, &[64, 32], WIDE));
            let out = bench.launch(Op::Gated { act, p: 0.0 }, &[a.clone(), b.clone()]).unwrap().remove(0);
            let ran = bench.run().unwrap();
            let rows = places(64, 1);
            let parts = [ran.rows(&a, &rows).unwrap(), ran.rows(&b, &rows).unwrap()];
            error(
                &ran.rows(&out, &rows).unwrap().1,
                &wanted(&Op::Gated { act: Act::Silu, p: 0.0 }, &parts)[0],
            )
        };
        assert!(wrong(Act::Silu) < BF16_BOUND);
        assert!(wrong(Act::Gelu) > 4.0 * BF16_BOUND, "{}", wrong(Act::Gelu));
        assert_eq!(error(&[1.0], &[0.0]), f64::INFINITY);
        assert_eq!(error(&[f64::NAN], &[1.0]), f64::INFINITY);
    }
}
