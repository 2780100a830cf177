//! Quantisation to 8-bit types, row-major and transposed; the kernel is `quantize.cu`.

use flatout_ir::ops::quantize::{FORWARD, Source as Of};
use flatout_ir::target::{KernelRow, Layout, Shapes};
use flatout_ir::types::DType;
use flatout_ir::{Launch, Op, OpKind, View};

use super::gated;
use crate::cuda::context::{Facts, Kernel, Source};
use crate::cuda::kernels::norms::norm;
use crate::cuda::kernels::stage::{Draft, Stage, Stages, Value, at, at_or_nothing, blocks, count32, staged};
use crate::rows::{FLOATS, kernel_row};

pub const KERNELS: &[Kernel] = &[staged!(
    KernelRow { workspace, ..kernel_row("cuda.quantize", OpKind::Quantize, FLOATS, Layout::Rows) },
    stages
)];

/// Source code shared by every kernel that writes 8-bit codes.
pub(crate) const CODES: &str = include_str!("codes.cuh");

/// The codes of a tensor, row-major and transposed, with its scale and largest magnitude.
pub(crate) struct Codes<'a> {
    pub to: DType,
    pub q: Option<&'a View>,
    pub t: Option<&'a View>,
    pub scale: &'a View,
    /// The view that collects the largest magnitude.
    pub amax: Option<&'a View>,
    /// The largest magnitude so far, before this launch.
    before: &'a View,
}

impl<'a> Codes<'a> {
    /// For a launch with a given scale.
    fn of(launch: &'a Launch, to: DType, scaling: &'a [View]) -> Codes<'a> {
        let [q, t, amax] = [0, 1, 2].map(|i| launch.outs[i].as_ref());
        Codes { to, q, t, scale: &scaling[0], amax, before: &scaling[1] }
    }

    /// The codes along columns of a value whose largest magnitude is known.
    fn along_columns(t: &'a View, scale: &'a View) -> Codes<'a> {
        Codes { to: FORWARD, q: None, t: Some(t), scale, amax: None, before: scale }
    }

    pub fn is_wanted(&self) -> bool {
        self.q.is_some() || self.t.is_some() || self.amax.is_some()
    }

    pub fn draft(&self, draft: Draft) -> Draft {
        draft
            .define("TO", code(self.to))
            .flag("HAS_Q", self.q.is_some())
            .flag("HAS_T", self.t.is_some())
            .flag("HAS_THIRD", self.amax.is_some())
            .define("VEC_T", self.column_access())
            .text(CODES)
    }

    /// Codes of a column that are stored at once.
    pub fn column_access(&self) -> usize {
        if self.t.is_some_and(|t| takes(t, 16)) { 16 } else { 1 }
    }

    /// The arguments for codes along columns alone.
    pub fn args_along_columns(&self) -> [Value; 3] {
        let pitch = self.t.map_or(0, |view| view.strides[0] as i64);
        [at_or_nothing(self.t), at(self.scale), Value::I64(pitch)]
    }

    /// Copies the largest magnitude so far into `amax`, unless they are the same memory.
    pub fn start(&self, source: &Source) -> Option<Stage> {
        let to = self.amax.filter(|amax| amax.offset != self.before.offset)?;
        let args = vec![at(self.before), at(to)];
        Some(Stage { source: source.clone(), entry: "start", grid: [1, 1], block: 1, args })
    }

    pub fn args(&self) -> Vec<Value> {
        let pitch = |view: Option<&View>| Value::I64(view.map_or(0, |view| view.strides[0] as i64));
        let tensors = [self.q, self.t, Some(self.scale), self.amax].map(at_or_nothing);
        tensors.into_iter().chain([pitch(self.q), pitch(self.t)]).collect()
    }
}

/// A source whose entry point `start` initialises a largest magnitude.
pub(crate) fn start_source() -> Source {
    Draft::new("codes.cuh").define("TO", code(FORWARD)).source(CODES)
}

fn code(to: DType) -> u8 {
    if to == DType::E4M3 { 4 } else { 5 }
}

/// Columns per block.
const COLUMNS: usize = 64;

/// Threads per block, four rows of eight columns each. 65536 x 2048 of bf16 took 277 us on an H200 from a tensor of twice the
/// width (3.9 TB/s; a copy reaches 4.2), and 215 as an activation. A gradient, whose threads hold twice as much, took 398 with
/// 256 threads and 360 with 128.
fn threads(of: Of) -> usize {
    if matches!(of, Of::GatedGrad { .. }) { 128 } else { 256 }
}

/// Holds the largest magnitude until the scale is known; for a norm's gradient, the partial sums.
fn workspace(shapes: &Shapes<'_>) -> usize {
    match shapes.node.op {
        Op::Quantize { of: Of::NormGrad { again, .. }, .. } => {
            norm::partial_bytes(shapes.outs.len() - 4 - again as usize, shapes.ins[0])
        }
        Op::Quantize { current: true, .. } => 256,
        _ => 0,
    }
}

/// Whether all rows of a matrix can be accessed `elements` at a time.
pub(crate) fn takes(view: &View, elements: usize) -> bool {
    let bytes = view.dtype.bytes();
    let access = (elements * bytes).min(16);
    let pitch = view.strides[0] * bytes;
    view.offset.is_multiple_of(access) && (view.dims[0] == 1 || pitch.is_multiple_of(access))
}

fn stages(launch: &Launch, facts: &Facts) -> Stages {
    let Op::Quantize { to, current, of } = launch.op else { unreachable!("the row is for quantize") };
    let (made_of, scaling) = launch.ins.split_at(of.inputs());
    match of {
        Of::Norm(spec, residual) => {
            let codes = Codes::of(launch, to, scaling);
            return norm::forward(
                spec,
                residual,
                made_of,
                [None, launch.outs.get(3).and_then(Option::as_ref)],
                Some(codes),
            );
        }
        Of::NormGrad { spec, add, again } => {
            let (tensors, scale) = made_of.split_at(of.tensors());
            let (outs, columns) = launch.outs[3..].split_at(launch.outs.len() - 3 - again as usize);
            let extra = norm::ExtraOutput::Codes {
                of_gradient: Codes::of(launch, to, scaling),
                of_norm: columns.iter().flatten().next().map(|t| Codes::along_columns(t, &scale[0])),
            };
            return norm::backward(spec, add, tensors, outs, launch.workspace.as_ref(), facts, extra);
        }
        Of::Given | Of::Gated(_) | Of::GatedGrad { .. } => {}
    }
    // The scale of codes that are made again follows the tensors.
    let (tensors, scale_again) = made_of.split_at(of.tensors());
    let x = &tensors[0];
    let [q, t, third, again] = [0, 1, 2, 3].map(|i| launch.outs.get(i).and_then(Option::as_ref));
    let (m, n) = (x.dims[0], x.dims[1]);
    if [q, t, third, again].iter().all(Option::is_none) {
        return Ok(vec![]);
    }
    let threads = threads(of);
    // The second half of q begins after the first, at any column.
    let has_halves = matches!(of, Of::GatedGrad { .. });
    let vector = |view: Option<&View>, elements: usize, is_cut: bool| {
        let takes = view.is_some_and(|view| takes(view, elements));
        if takes && (!is_cut || n.is_multiple_of(elements)) { elements } else { 1 }
    };
    let mut draft = Draft::new("quantize.cu")
        .define("TO", code(to))
        .dtype("T_X", x.dtype)
        .define("THREADS", threads)
        .define("COLUMNS", COLUMNS)
        .define("SOURCE", tensors.len() - 1)
        .flag("AGAIN", again.is_some())
        .flag("CURRENT", current)
        .flag("HAS_Q", q.is_some())
        .flag("HAS_T", t.is_some())
        .flag("HAS_THIRD", third.is_some())
        .define("VEC_X", if tensors.iter().all(|view| takes(view, 8)) { 8 } else { 1 })
        .define("VEC_Q", vector(q, 8, has_halves))
        .define("VEC_T", vector(t, 16, false))
        .define("VEC_AGAIN", vector(again, 16, false))
        .text(CODES);
    if let Some(act) = of.act() {
        draft = draft.define("ACT", gated::code(act)).text(gated::ACTIVATION);
    }
    let source = draft.source(include_str!("quantize.cu"));
    let rows = 4 * threads / (COLUMNS / 8);
    let tiles = blocks(m.div_ceil(rows) * n.div_ceil(COLUMNS), 1)?;
    let stage = |entry, grid: u32, block: usize, args| Stage {
        source: source.clone(),
        entry,
        grid: [grid, 1],
        block: block as u32,
        args,
    };
    let extents = [count32("rows", m)?, count32("columns", n)?];
    let pitch = |view: Option<&View>| Value::I64(view.map_or(0, |view| view.strides[0] as i64));

    let mut stages = vec![];
    // The largest magnitude starts at 0 in scratch, or at the value so far, which is copied unless it is in place already.
    let gathered = scaling.get(1).filter(|before| third.is_some_and(|out| out.offset != before.offset));
    let found = if current { launch.workspace.as_ref() } else { third };
    if let Some(found) = found.filter(|_| current || gathered.is_some()) {
        stages.push(stage("start", 1, 1, vec![at_or_nothing(gathered), at(found)]));
    }
    if tiles == 0 && !current {
        return Ok(stages);
    }
    if let (true, Some(found)) = (current && tiles > 0, found) {
        let args = [at(x), at(found)].into_iter().chain(extents).chain([pitch(Some(x))]).collect();
        stages.push(stage("largest", tiles, threads, args));
    }
    let given = if current { found } else { scaling.first() };
    let matrices = [Some(x), tensors.get(1), tensors.get(2), q, t, again];
    let args = matrices.into_iter().chain([given, scale_again.first(), third]).map(at_or_nothing);
    let args = args.chain(extents).chain(matrices.map(pitch)).collect();
    stages.push(stage("quantize", tiles.max(1), threads, args));
    Ok(stages)
}
