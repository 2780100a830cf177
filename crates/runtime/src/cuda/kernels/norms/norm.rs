//! RMS norm and layer norm and their gradients: rows in registers, statistics in f32; the kernel is `norm.cu`.

use flatout_ir::ops::norm::{NormSpec, NormWeight, again_at};
use flatout_ir::target::{KernelRow, Layout, Shapes};
use flatout_ir::types::{DType, TensorType};
use flatout_ir::{Launch, OpKind, View};

use crate::cuda::context::{CudaError, Facts, Kernel};
use crate::cuda::kernels::address::{Walk, row_width};
use crate::cuda::kernels::ahead::{AHEAD, FEW_ROWS};
use crate::cuda::kernels::elementwise::quantize::Codes;
use crate::cuda::kernels::reductions::partial_sums::partial_sums;
use crate::cuda::kernels::stage::{Draft, Stage, Stages, Value, at, at_or_nothing, blocks, count32, staged};
use crate::rows::{FLOATS, kernel_row};

pub const KERNELS: &[Kernel] = &[
    staged!(kernel_row("cuda.rms_norm", OpKind::RmsNorm, FLOATS, Layout::Rows), |l, _| plain(l)),
    staged!(
        KernelRow {
            workspace,
            ..kernel_row("cuda.rms_norm_grad", OpKind::RmsNormGrad, FLOATS, Layout::Rows)
        },
        plain_grad
    ),
];

/// Maximum number of partial rows of dw, of db and of the sum of dx: one per block, which limits the number of blocks.
pub(crate) const MOST_PARTIAL: usize = 1024;
/// Elements of a row per thread. Forward: x. Backward: h, dy, dh in their types, gains and sums of dw in f32; more would spill.
pub(crate) const FORWARD_ELEMENTS: usize = 32;
const BACKWARD_ELEMENTS: usize = 24;
const BACKWARD_ELEMENTS_LEAST: usize = 16;

/// Elements per thread of a bf16 row without a remainder, equal forward and backward, so that a norm recomputed by its gradient
/// has the same bits. With at most one sum, a row of 1024 stays in a warp: on an H200 the gradient of 16384 rows took 36.4 us,
/// and 43.9 with two warps per row. Forward, 24 elements are as fast as 32: 66.8 and 67.0 us for 16384 rows of 2048.
fn bf16_elements(d: usize, spec: NormSpec, sums_rows: bool) -> usize {
    let has_few_sums = !spec.center && !spec.bias && !sums_rows;
    if has_few_sums && d <= 32 * FORWARD_ELEMENTS { FORWARD_ELEMENTS } else { BACKWARD_ELEMENTS }
}

/// Minimum elements per thread if a row takes part of a warp: with fewer, too few bytes are in flight.
const SHARED_WARP_ELEMENTS: usize = 8;
/// Resident threads per multiprocessor for a gradient, by the elements of a row per thread, which keeps `kept` registers plus
/// some forty for everything else. With three sums of 12 elements a small spill pays: 65792 rows of 384 took 53.5 us on an H200
/// with 640 threads, 57.0 with 512.
fn resident_threads(elements: usize, kept: usize) -> usize {
    match (elements, 40 + kept) {
        (..=12, ..=106) => 640,
        (..=BACKWARD_ELEMENTS_LEAST, ..=128) => 512,
        (_, ..=168) => 384,
        _ => 256,
    }
}

/// Rows whose codes a block buffers before it writes them along columns. A quantised [65536, 768] bf16 norm took 109 us on an
/// H200 with 32, where separate norm and quantisation take 154, and 173 with 16, which write half a sector per column; its
/// gradient 141 instead of 152.
const QUANTIZED_TILE: usize = 32;
/// Rows of a quantised norm processed at once, one warp each: 122 us with 4, 112 with 8, 109 with 16.
const QUANTIZED_ROWS: usize = 16;

fn workspace(shapes: &Shapes<'_>) -> usize {
    let sums = shapes.outs.len() - 1 - again_at(&shapes.node.op).iter().count();
    partial_bytes(sums, shapes.ins[0])
}

/// Workspace for vectors that are summed over the rows of a tensor.
pub(crate) fn partial_bytes(sums: usize, x: &TensorType) -> usize {
    sums * x.rows().min(MOST_PARTIAL) * x.last() * 4
}

pub(crate) fn weight_code(weight: NormWeight) -> u8 {
    match weight {
        NormWeight::None => 0,
        NormWeight::Plain => 1,
        NormWeight::OnePlus => 2,
    }
}

/// Source code for how threads share a row.
pub(crate) const ROWS_SOURCE: &str = include_str!("norm_rows.cuh");

/// How a block covers rows.
pub(crate) struct Cover {
    /// Elements per vector, vectors per thread and threads per row. The bits of sums over a row depend on these three.
    vec: usize,
    vecs: usize,
    lanes: usize,
    /// Rows processed at once.
    pub rows: usize,
}

impl Cover {
    pub fn new(views: &[&View], elements: usize) -> Result<Cover, CudaError> {
        let d = views[0].dims.last().copied().unwrap_or(1);
        let vec = row_width(views, d);
        let vecs = |lanes: usize| d.div_ceil(lanes * vec);
        let fits = |lanes: &usize| vecs(*lanes) * vec <= elements;
        let lanes = [32, 64, 128, 256, 512, 1024].into_iter().find(fits).ok_or_else(|| {
            CudaError::new(format!(
                "a row of {d} elements is wider than the {} a block holds",
                elements * 1024
            ))
        })?;
        Ok(Cover { vec, vecs: vecs(lanes), lanes, rows: if lanes == 32 { 4 } else { 1 } })
    }

    /// As `new`, with no idle thread: a warp, or a power-of-two part of one if that leaves enough elements per thread; for
    /// wider rows the fewest warps. Vectors are 8 bytes or more. On an H200 the gradient of 65792 rows of 384 took 54 us with
    /// 32 lanes of three vectors of 4, and 66 if half of the lanes had a second vector of 8; 199680 rows of 192, 16 lanes each,
    /// 56 us instead of 123.
    pub fn even(views: &[&View], elements: usize) -> Option<Cover> {
        let d = views[0].dims.last().copied().unwrap_or(1);
        let widest = row_width(views, d);
        let narrowest = views.iter().map(|v| 8 / v.dtype.bytes()).max().unwrap_or(1);
        let vec = |lanes: usize| {
            let fits = |vec: &usize| *vec <= widest && *vec >= narrowest && d.is_multiple_of(lanes * vec);
            (d.is_multiple_of(lanes) && d / lanes <= elements)
                .then(|| [8, 4, 2].into_iter().find(fits))
                .flatten()
        };
        let in_a_warp = [32, 16, 8, 4].into_iter().filter(|lanes| d / lanes >= SHARED_WARP_ELEMENTS);
        let in_a_block = (2..=32).map(|warps| 32 * warps);
        let (lanes, vec) = in_a_warp.chain(in_a_block).find_map(|lanes| Some((lanes, vec(lanes)?)))?;
        Some(Cover { vec, vecs: d / lanes / vec, lanes, rows: if lanes > 32 { 1 } else { 128 / lanes } })
    }

    /// The cover of a norm without quantisation.
    fn of_norm(views: &[&View], spec: NormSpec) -> Result<Cover, CudaError> {
        let d = views[0].dims.last().copied().unwrap_or(1);
        let most = match views[0].dtype {
            DType::BF16 => bf16_elements(d, spec, false),
            _ => FORWARD_ELEMENTS,
        };
        Cover::even(views, most).map_or_else(|| Cover::new(views, FORWARD_ELEMENTS), Ok)
    }

    fn has_bits_of(&self, other: &Cover) -> bool {
        (self.vec, self.vecs, self.lanes) == (other.vec, other.vecs, other.lanes)
    }

    fn elements(&self) -> usize {
        self.vecs * self.vec
    }

    pub fn threads(&self) -> usize {
        self.lanes * self.rows
    }

    pub fn draft(&self, name: &'static str, d: usize) -> Draft {
        Draft::new(name)
            .define("D", d)
            .define("VEC", self.vec)
            .define("VECS", self.vecs)
            .define("LANES", self.lanes)
            .define("ROWS", self.rows)
    }
}

/// The stages of a norm operation.
fn plain(launch: &Launch) -> Stages {
    let (spec, residual) = NormSpec::of(&launch.op).expect("the row is for rms_norm");
    let outs = [launch.outs[0].as_ref(), launch.outs.get(1).and_then(Option::as_ref)];
    forward(spec, residual, &launch.ins, outs, None)
}

fn plain_grad(launch: &Launch, facts: &Facts) -> Stages {
    let (spec, add) = NormSpec::of(&launch.op).expect("the row is for rms_norm_grad");
    let mut outs = launch.outs.clone();
    let y = again_at(&launch.op).and_then(|at| outs.remove(at));
    let bias = spec.bias.then(|| &launch.ins[launch.ins.len() - 1]);
    let extra = y.as_ref().map_or(ExtraOutput::Nothing, |y| ExtraOutput::Norm { y, bias });
    backward(spec, add, &launch.ins, &outs, launch.workspace.as_ref(), facts, extra)
}

/// An additional output of a norm's gradient, besides dx and the sums.
pub(crate) enum ExtraOutput<'a> {
    Nothing,
    /// 8-bit codes of dx, and those of the norm itself along columns.
    Codes {
        of_gradient: Codes<'a>,
        of_norm: Option<Codes<'a>>,
    },
    /// The norm itself, recomputed.
    Norm {
        y: &'a View,
        bias: Option<&'a View>,
    },
}

/// (x, residual?, w?, bias?) to y and h, optionally with the codes of y.
pub(crate) fn forward(
    spec: NormSpec,
    residual: bool,
    ins: &[View],
    [y, h]: [Option<&View>; 2],
    codes: Option<Codes<'_>>,
) -> Stages {
    let x = &ins[0];
    let other = residual.then(|| &ins[1]);
    let w = spec.weight.is_some().then(|| &ins[1 + residual as usize]);
    let bias = spec.bias.then(|| &ins[ins.len() - 1]);
    let has_y = y.is_some() || codes.as_ref().is_some_and(Codes::is_wanted);
    if codes.is_none() && (x.elements() == 0 || (!has_y && h.is_none())) {
        return Ok(vec![]);
    }
    let d = x.dims[x.dims.len() - 1];
    let q = codes.as_ref().and_then(|codes| codes.q);
    let views: Vec<&View> = [Some(x), other, w, bias, y, h, q].into_iter().flatten().collect();
    let mut cover = match codes {
        None => Cover::of_norm(&views, spec)?,
        Some(_) => Cover::new(&views, FORWARD_ELEMENTS)?,
    };
    if codes.is_some() && cover.lanes == 32 {
        cover.rows = QUANTIZED_ROWS;
    }
    let tile = if codes.is_some() { QUANTIZED_TILE } else { cover.rows };
    let rows = x.elements().checked_div(d).unwrap_or(0);
    let is_few = codes.is_none() && rows <= FEW_ROWS;
    let mut draft = cover
        .draft("norm.cu", d)
        .text(if is_few { AHEAD } else { "" })
        .flag("FEW", is_few)
        .define("TILE", tile)
        .dtype("T_X", x.dtype)
        .dtype("T_W", w.map_or(DType::F32, |w| w.dtype))
        .dtype("T_B", bias.map_or(DType::F32, |b| b.dtype))
        .define("WEIGHT", weight_code(spec.weight))
        .flag("CENTER", spec.center)
        .flag("BIAS", spec.bias)
        .flag("GRAD", false)
        .flag("RESIDUAL", residual)
        .flag("HAS_Y", has_y)
        .flag("HAS_H", h.is_some())
        .flag("QUANTIZE", codes.is_some());
    for (name, view) in [("row_x", Some(x)), ("row_residual", other), ("row_y", y), ("row_h", h)] {
        draft = draft.text(&view.map_or(String::new(), |v| Walk::rows(v).function(name, "u32")));
    }
    if let Some(codes) = &codes {
        draft = codes.draft(draft).flag("QUANTIZE_AGAIN", false);
    }
    let source = draft.source(&[ROWS_SOURCE, include_str!("norm.cu")].join("\n"));
    let mut stages: Vec<Stage> = codes.iter().filter_map(|codes| codes.start(&source)).collect();
    if rows > 0 && (has_y || h.is_some()) {
        let mut args = vec![
            at(x),
            at_or_nothing(other),
            at_or_nothing(w),
            at_or_nothing(bias),
            at_or_nothing(y),
            at_or_nothing(h),
            count32("rows", rows)?,
            Value::F32(spec.eps),
        ];
        args.extend(codes.iter().flat_map(Codes::args));
        args.extend(is_few.then_some(Value::NextWeight));
        let grid = [blocks(rows, tile)?, 1];
        stages.push(Stage { source, entry: "rms_norm", grid, block: cover.threads() as u32, args });
    }
    Ok(stages)
}

/// (h, w?, dy, dh?) to dx, dw?, d bias? and optionally the sum over rows of dx. A recomputed norm has the same bits as before:
/// if threads shared its rows differently, it is a separate launch.
pub(crate) fn backward(
    spec: NormSpec,
    add: bool,
    ins: &[View],
    outs: &[Option<View>],
    workspace: Option<&View>,
    facts: &Facts,
    extra: ExtraOutput<'_>,
) -> Stages {
    let (codes, again, y, bias) = match extra {
        ExtraOutput::Nothing => (None, None, None, None),
        ExtraOutput::Codes { of_gradient, of_norm } => (Some(of_gradient), of_norm, None, None),
        ExtraOutput::Norm { y, bias } => (None, None, Some(y), bias),
    };
    let has_w = spec.weight.is_some();
    let h = &ins[0];
    let w = has_w.then(|| &ins[1]);
    let dy = &ins[1 + has_w as usize];
    let dh = add.then(|| &ins[2 + has_w as usize]);
    let dx = outs[0].as_ref();
    let dw = if has_w { outs[1].as_ref() } else { None };
    let db = if spec.bias { outs[1 + has_w as usize].as_ref() } else { None };
    let total = outs.get(1 + has_w as usize + spec.bias as usize).and_then(Option::as_ref);
    let has_dx = dx.is_some() || codes.as_ref().is_some_and(Codes::is_wanted);
    let norm_alone = |again: Option<Codes<'_>>| {
        let ins: Vec<View> = [Some(h), w, bias].into_iter().flatten().cloned().collect();
        forward(spec, false, &ins, [y, None], again)
    };
    if !has_dx && dw.is_none() && db.is_none() && total.is_none() {
        return norm_alone(again);
    }
    let q = codes.as_ref().and_then(|codes| codes.q);
    let views: Vec<&View> = [Some(h), w, Some(dy), dh, dx, q, y, bias].into_iter().flatten().collect();
    let is_narrow = [Some(h), Some(dy), dh].into_iter().flatten().all(|v| v.dtype == DType::BF16);
    let d = h.dims[h.dims.len() - 1];
    // bf16 takes half the registers, and rows without a remainder need none for the bounds.
    let most = if is_narrow { BACKWARD_ELEMENTS } else { BACKWARD_ELEMENTS_LEAST };
    // Counts the outputs of the operation whether or not they are requested, so that omitting one changes no bits.
    let sums_rows = outs.len() > 1 + has_w as usize + spec.bias as usize;
    let even = match codes {
        None if is_narrow => Cover::even(&views, bf16_elements(d, spec, sums_rows)),
        None => Cover::even(&views, most),
        Some(_) => Cover::new(&views, most).ok().filter(|cover| cover.elements() * cover.lanes == d),
    };
    let cover = match even {
        Some(cover) => cover,
        None => Cover::new(&views, BACKWARD_ELEMENTS_LEAST)?,
    };
    if y.is_some() {
        let of_norm: Vec<&View> = [Some(h), w, y, bias].into_iter().flatten().collect();
        // Element-wise reads need their registers for addresses.
        if cover.vec == 1 || !cover.has_bits_of(&Cover::of_norm(&of_norm, spec)?) {
            let mut stages = norm_alone(None)?;
            stages.extend(backward(spec, add, ins, outs, workspace, facts, ExtraOutput::Nothing)?);
            return Ok(stages);
        }
    }
    if again.is_some() {
        let of_norm: Vec<&View> = [Some(h), w].into_iter().flatten().collect();
        if !cover.has_bits_of(&Cover::new(&of_norm, FORWARD_ELEMENTS)?) {
            let mut stages = norm_alone(again)?;
            let of_gradient = codes.expect("a norm's codes are made beside its gradient's");
            let extra = ExtraOutput::Codes { of_gradient, of_norm: None };
            stages.extend(backward(spec, add, ins, outs, workspace, facts, extra)?);
            return Ok(stages);
        }
    }
    let rows = h.elements().checked_div(d).unwrap_or(0);
    let sums = [dw, db, total];
    let bytes: usize = [Some(h), Some(dy), dh].into_iter().flatten().map(|v| v.dtype.bytes()).sum();
    let words = bytes.div_ceil(2) + 2 * (has_w as usize + sums.iter().flatten().count());
    let threads = resident_threads(cover.elements(), cover.elements() * words / 2);
    // With this few threads the next row is prefetched: the gradient and three sums of 65792 rows of 768 took 102 us on an H200
    // and 120 without; more threads, which reread the gains, took 111, and 100 with two sums.
    let ahead = threads == 256 && codes.is_none();
    // Registers are allocated for groups of four warps.
    let resident = (threads / cover.threads().next_multiple_of(128)).max(1);
    let tile = if codes.is_some() { QUANTIZED_TILE } else { cover.rows };
    // Sums make long-running blocks worthwhile; without any, a block processes one tile.
    let grid = match codes.is_none() && sums.iter().all(Option::is_none) {
        true => rows.div_ceil(tile),
        false => rows.div_ceil(tile).min(facts.sms.max(1) as usize * resident).min(MOST_PARTIAL),
    };
    let mut draft = cover
        .draft("norm.cu", d)
        .define("TILE", tile)
        .define("BLOCKS", resident)
        .dtype("T_X", h.dtype)
        .dtype("T_W", w.map_or(DType::F32, |w| w.dtype))
        .dtype("T_DY", dy.dtype)
        .dtype("T_DH", dh.map_or(h.dtype, |dh| dh.dtype))
        .dtype("T_B", bias.map_or(DType::F32, |b| b.dtype))
        .define("WEIGHT", weight_code(spec.weight))
        .flag("CENTER", spec.center)
        .flag("BIAS", bias.is_some())
        .flag("GRAD", true)
        .flag("AGAIN", y.is_some())
        .flag("ADD", add)
        .flag("HAS_DX", has_dx || total.is_some())
        .flag("STORES_DX", dx.is_some())
        .flag("HAS_SUM", total.is_some())
        .flag("AHEAD", ahead)
        .flag("HAS_DW", dw.is_some())
        .flag("HAS_DB", db.is_some())
        .flag("QUANTIZE", codes.is_some());
    for (name, view) in
        [("row_h", Some(h)), ("row_dy", Some(dy)), ("row_dh", dh), ("row_dx", dx), ("row_y", y)]
    {
        draft = draft.text(&view.map_or(String::new(), |v| Walk::rows(v).function(name, "u32")));
    }
    if let Some(codes) = &codes {
        draft = codes.draft(draft).flag("QUANTIZE_AGAIN", again.is_some());
    }
    if let Some(again) = &again {
        // Two tiles, each with its padding; when they have been read, the sums of all threads.
        let parts = QUANTIZED_TILE / 16;
        let tiles = 2 * (QUANTIZED_TILE * d + (parts - 1) * (128 / parts));
        let bytes = tiles.max(4 * cover.threads() * cover.elements());
        draft = draft.define("VEC_AGAIN", again.column_access()).shared(bytes);
    }
    // The partial rows of the requested sums, one sum after another.
    let scratch = workspace.map_or(0, |view| view.offset);
    let partial = |i: usize| match sums[i] {
        Some(_) => Value::At(scratch + sums[..i].iter().flatten().count() * grid * d * 4),
        None => Value::Nothing,
    };
    let source = draft.source(&[ROWS_SOURCE, include_str!("norm.cu")].join("\n"));
    let mut stages: Vec<Stage> = codes.iter().filter_map(|codes| codes.start(&source)).collect();
    if grid > 0 {
        let mut args = vec![
            at(h),
            at_or_nothing(w),
            at(dy),
            at_or_nothing(dh),
            at_or_nothing(dx),
            at_or_nothing(bias),
            at_or_nothing(y),
            partial(0),
            partial(1),
            partial(2),
            count32("rows", rows)?,
            Value::F32(spec.eps),
        ];
        args.extend(codes.iter().flat_map(Codes::args));
        args.extend(again.iter().flat_map(Codes::args_along_columns));
        let (grid, block) = ([grid as u32, 1], cover.threads() as u32);
        stages.push(Stage { source, entry: "rms_norm_grad", grid, block, args });
    }
    let to: Vec<&View> = sums.into_iter().flatten().collect();
    stages.extend(partial_sums(scratch, grid, d, &to)?);
    Ok(stages)
}
