//! Elementwise functions and fused regions: a kernel is generated for each body and its strides.
//!
//! A thread takes N neighbouring elements of every tensor, in 16-byte accesses where strides and alignment allow; a tensor that
//! is broadcast along the last axis is read once, one with gaps element by element. Loads of `UNROLL` vectors are in flight
//! before anything is computed. Every value is rounded to its node's type and operations of different nodes are never
//! contracted, so a region gives the same bits as its nodes run separately. Moves each tensor once. Regions that also sum over
//! rows are handled by `region_sums`, in a different order.

use std::fmt::Write;

use flatout_ir::ops::elementwise::{Elementwise as E, GELU_CUBIC, GELU_INNER};
use flatout_ir::ops::normal;
use flatout_ir::target::{KernelRow, Layout};
use flatout_ir::types::DType;
use flatout_ir::{Graph, Launch, Op, OpKind, View, fp8, region};

use super::region_sums;
use crate::cuda::context::{CudaError, Kernel};
use crate::cuda::kernels::address::{Walk, index_type, most, widths};
use crate::cuda::kernels::stage::{self, Draft, Stage, Stages, Value, at, blocks, c_type, staged};
use crate::launch::body_of;
use crate::rows::{EVERY_TYPE, kernel_row};

pub const KERNELS: &[Kernel] = &[kernel("cuda.map", OpKind::Map), kernel("cuda.region", OpKind::Region)];

const fn kernel(name: &'static str, op: OpKind) -> Kernel {
    staged!(row(name, op), |l, _| stages(l))
}

pub(super) const fn row(name: &'static str, op: OpKind) -> KernelRow {
    KernelRow { workspace: region_sums::workspace, ..kernel_row(name, op, EVERY_TYPE, Layout::Any) }
}

/// How a thread accesses its elements of one tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Access {
    /// Contiguous.
    Vector,
    /// A single element, the same for all.
    Same,
    Apart,
}

fn access(view: &View, n: usize) -> Access {
    let walk = Walk::of(view);
    let (extent, step) = walk.last();
    match step {
        _ if walk.takes(n, view.dtype, view.offset) => Access::Vector,
        0 if extent.is_multiple_of(n) => Access::Same,
        _ => Access::Apart,
    }
}

/// Elements per thread: as many as every tensor without gaps allows as vector accesses, within rows of `columns` if given.
pub(super) fn vector(views: &[&View], columns: Option<usize>) -> usize {
    let fits = |n: &usize| {
        let fits = |v: &&View| access(v, *n) != Access::Apart || Walk::of(v).last().1 > 1;
        columns.is_none_or(|columns| columns.is_multiple_of(*n))
            && views.iter().all(fits)
            && views.iter().any(|v| access(v, *n) == Access::Vector)
    };
    widths(most(views)).find(fits).unwrap_or(1)
}

/// The tensors that a kernel accesses: inputs, requested outputs that are stored, and those that are sums.
pub(super) struct Tensors<'a> {
    ins: &'a [View],
    stored: Vec<(usize, &'a View)>,
    pub sums: Vec<(usize, &'a View)>,
}

impl<'a> Tensors<'a> {
    pub fn new(launch: &'a Launch, body: &Graph) -> Self {
        let outs = launch.outs.iter().enumerate().filter_map(|(o, v)| Some((o, v.as_ref()?)));
        let (sums, stored) = outs.partition(|(o, _)| region::summed(body, *o).is_some());
        Tensors { ins: &launch.ins, stored, sums }
    }

    /// Inputs and stored outputs.
    pub fn views(&self) -> Vec<&'a View> {
        self.ins.iter().chain(self.stored.iter().map(|(_, view)| *view)).collect()
    }

    /// As `views`, with their names in the source.
    pub fn named(&self) -> impl Iterator<Item = (String, &'a View)> {
        let ins = self.ins.iter().enumerate().map(|(i, view)| (format!("x{i}"), view));
        ins.chain(self.stored.iter().map(|(o, view)| (format!("y{o}"), *view)))
    }
}

fn stages(launch: &Launch) -> Stages {
    let body = body_of(launch);
    if !Tensors::new(launch, &body).sums.is_empty() {
        return region_sums::stages(launch, &body);
    }
    let Some(pass) = Pass::new(launch, &body)? else { return Ok(vec![]) };
    let mut draft = Draft::new("elementwise");
    for (name, value) in &pass.constants {
        draft = draft.define(name, value);
    }
    let parameters: Vec<String> = pass.tensors.iter().map(|(ty, name)| format!("{ty} {name}")).collect();
    let names: Vec<&str> = pass.tensors.iter().map(|(_, name)| name.as_str()).collect();
    let kernel = format!(
        "extern \"C\" __global__ void __launch_bounds__({THREADS}) elementwise({}, INDEX count) {{\n    \
         run({}, count, blockIdx.x);\n}}\n",
        parameters.join(", "),
        names.join(", ")
    );
    let (source, grid) = (draft.source(&format!("{}{kernel}", pass.text)), [pass.blocks, 1]);
    let args = pass.args.into_iter().chain([pass.count]).collect();
    Ok(vec![Stage { source, entry: "elementwise", grid, block: THREADS as u32, args }])
}

pub(super) const THREADS: usize = 256;

/// One pass over the tensors of a region without sums: `run(tensors, count, block)` does the work of one block.
pub(super) struct Pass {
    /// The constants that the text refers to: N, UNROLL and INDEX.
    pub constants: [(&'static str, String); 3],
    pub text: String,
    /// Type and name of each tensor.
    pub tensors: Vec<(String, String)>,
    pub args: Vec<Value>,
    pub count: Value,
    pub blocks: u32,
}

impl Pass {
    /// `None` if there is nothing to compute.
    pub fn new(launch: &Launch, body: &Graph) -> Result<Option<Pass>, CudaError> {
        let tensors = Tensors::new(launch, body);
        let views = tensors.views();
        let count = views.first().map_or(0, |v| v.elements());
        if count == 0 || tensors.stored.is_empty() {
            return Ok(None);
        }
        let (n, index) = (vector(&views, None), index_type(count));
        let unroll = match launch.ins.len() {
            1 => 4,
            2 => 2,
            _ => 1,
        };
        let walks = tensors.named().map(|(name, view)| Walk::of(view).function(&format!("at_{name}"), index));
        let text = walks.chain([body_text(body, launch), run_text(launch, &tensors, n)]).collect();
        let constants = [("N", n.to_string()), ("UNROLL", unroll.to_string()), ("INDEX", index.to_string())];
        Ok(Some(Pass {
            constants,
            text,
            tensors: c_tensors(launch, &tensors),
            args: views.into_iter().map(at).collect(),
            count: stage::count(index, count),
            blocks: blocks(count, THREADS * unroll * n)?,
        }))
    }
}

/// The type of a value in registers.
fn register(dtype: DType) -> &'static str {
    if dtype == DType::I32 { "int" } else { "float" }
}

/// Generates `body(x0, .., y0, ..)`, which computes one element. The compiler removes nodes that no requested output needs.
pub(super) fn body_text(body: &Graph, launch: &Launch) -> String {
    let ins = launch.ins.iter().enumerate().map(|(i, v)| format!("{} x{i}", register(v.dtype)));
    let outs = launch.outs.iter().enumerate().filter_map(|(o, v)| Some((o, v.as_ref()?)));
    let outs = outs.map(|(o, v)| format!("{}& y{o}", register(v.dtype)));
    let parameters: Vec<String> = ins.chain(outs).collect();
    let mut text = format!("__device__ __forceinline__ void body({}) {{\n", parameters.join(", "));
    for (i, node) in body.nodes.iter().enumerate() {
        let dtype = node.outs[0].dtype;
        let value = match &node.op {
            Op::Read { slot } => format!("x{}", slot.0),
            Op::Map { f } => {
                let args: Vec<String> = node.ins.iter().map(|v| format!("v{}", v.node.0)).collect();
                map_text(*f, body.ty(node.ins[0]).dtype, dtype, &args)
            }
            // The kernel sums its value.
            Op::Reduce { .. } => continue,
            op => unreachable!("a region holds reads, maps and sums, not {}", op.name()),
        };
        _ = writeln!(text, "    {} v{i} = {value};", register(dtype));
    }
    for o in (0..body.results.len()).filter(|o| launch.outs[*o].is_some()) {
        _ = writeln!(text, "    y{o} = v{};", region::value(body, o).node.0);
    }
    text + "}\n"
}

/// One function, rounded to its type.
fn map_text(f: E, from: DType, to: DType, args: &[String]) -> String {
    let value = match (from, to) {
        (DType::I32, DType::I32) => return format!("whole({})", f64_text(f, args)),
        (_, DType::I32) => return format!("(int){}", args[0]),
        (DType::I32, _) => format!("(float){}", args[0]),
        _ => f32_text(f, args),
    };
    if to == DType::F32 { value } else { format!("rounded<{}>({value})", c_type(to)) }
}

/// An f32 constant given by its bits: no precision is lost, and infinities and NaNs need no special case.
fn f32_constant(x: f32) -> String {
    format!("__uint_as_float({:#x}u)", x.to_bits())
}

fn f64_constant(x: f64) -> String {
    format!("__longlong_as_double({:#x}ll)", x.to_bits())
}

fn f32_text(f: E, args: &[String]) -> String {
    let a = &args[0];
    let b = args.get(1).map_or("", String::as_str);
    let turns = format!("half_turns((double){a} * {})", f64_constant(std::f64::consts::FRAC_1_PI));
    match f {
        E::Neg => format!("-{a}"),
        E::Exp => format!("expf({a})"),
        E::Log => format!("logf({a})"),
        E::Sqrt => format!("sqrtf({a})"),
        E::Rsqrt => format!("rsqrtf({a})"),
        E::Recip => format!("1.0f / {a}"),
        E::Square => format!("__fmul_rn({a}, {a})"),
        E::Sin => format!("sinpif({turns})"),
        E::Cos => format!("cospif({turns})"),
        E::Tanh => format!("tanhf({a})"),
        E::Relu => format!("fmaxf({a}, 0.0f)"),
        E::Step => format!("{a} > 0.0f ? 1.0f : 0.0f"),
        E::Silu => format!("silu({a})"),
        E::SiluSlope => format!("silu_slope({a})"),
        E::Gelu => format!("gelu({a})"),
        E::GeluSlope => format!("gelu_slope({a})"),
        E::GeluExact => format!("gelu_exact({a})"),
        E::GeluExactSlope => format!("gelu_exact_slope({a})"),
        E::Finite => format!("is_finite({a})"),
        E::Fp8Scale(of) => format!("fp8_scale({a}, {}u)", fp8::top_exponent(of)),
        E::Cast(_) | E::StopGradient => a.clone(),
        E::Scale(by) => format!("__fmul_rn({a}, {})", f32_constant(by as f32)),
        E::Offset(by) => format!("__fadd_rn({a}, {})", f32_constant(by as f32)),
        E::Add => format!("__fadd_rn({a}, {b})"),
        E::Sub => format!("__fsub_rn({a}, {b})"),
        E::Mul => format!("__fmul_rn({a}, {b})"),
        E::Div => format!("{a} / {b}"),
        E::Max => format!("fmaxf({a}, {b})"),
        E::Min => format!("fminf({a}, {b})"),
        E::Less => format!("{a} < {b} ? 1.0f : 0.0f"),
        E::LessEqual => format!("{a} <= {b} ? 1.0f : 0.0f"),
        E::Equal => format!("{a} == {b} ? 1.0f : 0.0f"),
        E::Select => format!("{a} != 0.0f ? {b} : {}", args[2]),
    }
}

/// Integers are computed in f64, as defined: exact, and too rare to optimise.
fn f64_text(f: E, args: &[String]) -> String {
    let args: Vec<String> = args.iter().map(|a| format!("(double){a}")).collect();
    let a = &args[0];
    let b = args.get(1).map_or("", String::as_str);
    let inner = |x: &str| {
        let (inner, cubic) = (f64_constant(GELU_INNER), f64_constant(GELU_CUBIC));
        format!("tanh({inner} * ({x} + {cubic} * {x} * {x} * {x}))")
    };
    let turns = format!("({a} * {})", f64_constant(std::f64::consts::FRAC_1_PI));
    match f {
        E::Neg => format!("-{a}"),
        E::Exp => format!("exp({a})"),
        E::Log => format!("log({a})"),
        E::Sqrt => format!("sqrt({a})"),
        E::Rsqrt => format!("1.0 / sqrt({a})"),
        E::Recip => format!("1.0 / {a}"),
        E::Square => format!("{a} * {a}"),
        E::Sin => format!("sinpi{turns}"),
        E::Cos => format!("cospi{turns}"),
        E::Tanh => format!("tanh({a})"),
        E::Relu => format!("fmax({a}, 0.0)"),
        E::Step => format!("({a} > 0.0 ? 1.0 : 0.0)"),
        E::Silu => format!("{a} / (1.0 + exp(-{a}))"),
        E::SiluSlope => {
            let s = format!("(1.0 / (1.0 + exp(-{a})))");
            format!("{s} * (1.0 + {a} * (1.0 - {s}))")
        }
        E::Gelu => format!("0.5 * {a} * (1.0 + {})", inner(a)),
        E::GeluSlope => {
            let t = inner(a);
            let slope = format!(
                "{} * (1.0 + 3.0 * {} * {a} * {a})",
                f64_constant(GELU_INNER),
                f64_constant(GELU_CUBIC)
            );
            format!("0.5 * (1.0 + {t}) + 0.5 * {a} * (1.0 - {t} * {t}) * {slope}")
        }
        E::GeluExact => format!("{a} * normcdf({a})"),
        E::GeluExactSlope => {
            let density = format!("{} * exp(-0.5 * {a} * {a})", f64_constant(normal::density(0.0)));
            format!("normcdf({a}) + {a} * {density}")
        }
        // An i32 is always finite.
        E::Finite => "1.0".into(),
        E::Fp8Scale(of) => format!("(double)fp8_scale((float)({a}), {}u)", fp8::top_exponent(of)),
        E::Cast(_) | E::StopGradient => a.clone(),
        E::Scale(by) => format!("{a} * {}", f64_constant(by)),
        E::Offset(by) => format!("{a} + {}", f64_constant(by)),
        E::Add => format!("{a} + {b}"),
        E::Sub => format!("{a} - {b}"),
        E::Mul => format!("{a} * {b}"),
        E::Div => format!("{a} / {b}"),
        E::Max => format!("fmax({a}, {b})"),
        E::Min => format!("fmin({a}, {b})"),
        E::Less => format!("({a} < {b} ? 1.0 : 0.0)"),
        E::LessEqual => format!("({a} <= {b} ? 1.0 : 0.0)"),
        E::Equal => format!("({a} == {b} ? 1.0 : 0.0)"),
        E::Select => format!("({a} != 0.0 ? {b} : {})", args[2]),
    }
}

/// Type and name of each tensor that a kernel takes.
pub(super) fn c_tensors(launch: &Launch, tensors: &Tensors<'_>) -> Vec<(String, String)> {
    let ins =
        launch.ins.iter().enumerate().map(|(i, v)| (format!("const {}*", c_type(v.dtype)), format!("x{i}")));
    let outs = tensors.stored.iter().map(|(o, v)| (format!("{}*", c_type(v.dtype)), format!("y{o}")));
    ins.chain(outs).collect()
}

/// The code of a block around the body.
fn run_text(launch: &Launch, tensors: &Tensors<'_>, n: usize) -> String {
    let each = "#pragma unroll\n    for (int u = 0; u < UNROLL; u++) {\n        \
                INDEX e = first + (INDEX)u * 256 * N;\n        if (e >= count) continue;\n";
    let parameters = c_tensors(launch, tensors).into_iter().map(|(ty, name)| format!("{ty} {name}, "));
    format!(
        "__device__ __forceinline__ void run({}INDEX count, u32 block) {{\n    \
         INDEX first = ((INDEX)block * UNROLL * 256 + threadIdx.x) * N;\n{}{}    }}\n}}\n",
        parameters.collect::<String>(),
        loads(launch, n, each),
        stores(launch, tensors, n, each),
    )
}

/// Loads the vectors of all inputs: `each` opens a loop over them, with `e` the index of the first element.
pub(super) fn loads(launch: &Launch, n: usize, each: &str) -> String {
    let mut text = String::new();
    for (i, view) in launch.ins.iter().enumerate() {
        _ = writeln!(text, "    Pack<{}, N> p{i}[UNROLL];", c_type(view.dtype));
    }
    text.push_str(each);
    for (i, view) in launch.ins.iter().enumerate() {
        let load = match access(view, n) {
            Access::Vector => format!("p{i}[u].load(x{i} + at_x{i}(e))"),
            Access::Same => format!("p{i}[u].all(x{i}[at_x{i}(e)])"),
            Access::Apart => format!("for (int k = 0; k < N; k++) p{i}[u].x[k] = x{i}[at_x{i}(e + k)]"),
        };
        _ = writeln!(text, "        {load};");
    }
    text + "    }\n"
}

/// Computes every vector, stores it and adds it to the sums `s`; the loop is left open.
pub(super) fn stores(launch: &Launch, tensors: &Tensors<'_>, n: usize, each: &str) -> String {
    let mut text = each.to_string();
    let wanted = || launch.outs.iter().enumerate().filter_map(|(o, v)| Some((o, v.as_ref()?)));
    for (o, view) in wanted() {
        _ = writeln!(text, "        {} r{o}[N];", register(view.dtype));
    }
    let value = |(i, v): (usize, &View)| {
        if v.dtype == DType::I32 { format!("p{i}[u].x[k]") } else { format!("f32(p{i}[u].x[k])") }
    };
    let ins = launch.ins.iter().enumerate().map(value);
    let args: Vec<String> = ins.chain(wanted().map(|(o, _)| format!("r{o}[k]"))).collect();
    _ = writeln!(text, "#pragma unroll\n        for (int k = 0; k < N; k++) body({});", args.join(", "));
    for (o, view) in &tensors.stored {
        _ = writeln!(text, "        Pack<{}, N> q{o};\n        put(q{o}, r{o});", c_type(view.dtype));
        let store = match access(view, n) {
            Access::Vector => format!("q{o}.store(y{o} + at_y{o}(e))"),
            _ => format!("for (int k = 0; k < N; k++) y{o}[at_y{o}(e + k)] = q{o}.x[k]"),
        };
        _ = writeln!(text, "        {store};");
    }
    for (o, _) in &tensors.sums {
        _ = writeln!(text, "#pragma unroll\n        for (int k = 0; k < N; k++) s{o}[k] += r{o}[k];");
    }
    text
}
