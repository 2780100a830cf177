//! Products on Hopper's wgmma and TMA (sm_90a), with plain or gated activations and their gradients as epilogues: `product.cu`.
//!
//! A plain product with few tiles and a long inner extent, such as a weight's gradient, may be split along that extent, so that
//! its parts fill the device; `parts.cu` adds them.

use std::borrow::Cow;

use flatout_ir::ops::gated::Act;
use flatout_ir::types::DType;

use super::choice::too_large;
use super::lt::Matrices;
use crate::cuda::argument::{Block, launch_blocks};
use crate::cuda::context::{Arg, CudaError, Facts, Prepare, Prepared, Source, launch, sequence};
use crate::cuda::kernels::elementwise::gated;
use crate::cuda::kernels::stage::c_type;
use crate::cuda::tensor_map::{Swizzle, Tensor};

/// The source of a product, with the headers it includes and further ones.
macro_rules! product_source {
    ($($file:literal)?) => {
        concat!(
            include_str!("../../prelude.cuh"),
            include_str!("../../matrices.cuh"),
            include_str!("../../wgmma.cuh"),
            include_str!("../../wgmma_fp8.cuh"),
            $(include_str!($file),)?
            include_str!("../../elementwise/activation.cuh"),
            include_str!("product.cu")
        )
    };
}

/// A configuration that product.cu is compiled with; its header explains the fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProductConfig {
    /// Name under which times are stored; contains no spaces.
    pub name: &'static str,
    pingpong: bool,
    /// Blocks of 64 rows per warpgroup.
    mi: usize,
    tn: usize,
    stages: usize,
    cluster: usize,
    /// Stages that the second of the warpgroups that share a tile begins after the first; with promotion only.
    stagger: usize,
    /// Whether K is split into parts, as many as `Call::parts` finds.
    is_split: bool,
}

/// Both warpgroups share a tile of 128 by 256: loads the fewest bytes, for products with a comparatively short epilogue.
const SHARED: ProductConfig = ProductConfig {
    name: "wgmma-128x256",
    pingpong: false,
    mi: 1,
    tn: 256,
    stages: 4,
    cluster: 2,
    stagger: 0,
    is_split: false,
};
/// A tile of 128 by 128 per warpgroup, in turns, so that epilogues overlap the other's products.
const TURNS: ProductConfig = ProductConfig {
    name: "wgmma-128x128-pair",
    pingpong: true,
    mi: 2,
    tn: 128,
    stages: 4,
    cluster: 2,
    stagger: 0,
    is_split: false,
};
/// As TURNS, without sharing b with another block: less waiting if epilogues are long.
const APART: ProductConfig = ProductConfig { name: "wgmma-128x128", cluster: 1, ..TURNS };

/// As SHARED, with K split.
const SPLIT: ProductConfig = ProductConfig { name: "wgmma-128x256-split", is_split: true, ..SHARED };
/// As SHARED, for 8-bit operands: one warpgroup's epilogue overlaps products of the other.
const STAGGERED: ProductConfig = ProductConfig { name: "wgmma-128x256-staggered", stagger: 2, ..SHARED };
/// A tile of 256 by 128 that shares nothing with another block.
const TALL: ProductConfig = ProductConfig { name: "wgmma-256x128", mi: 2, tn: 128, cluster: 1, ..SHARED };

const GROUPS: usize = 2;
const THREADS: u32 = 384;
/// A panel of 64 rows of 128 bytes: 64 elements in bf16.
const PANEL: usize = 64;
const ROW_BYTES: usize = 128;
const PANEL_BYTES: usize = 8192;
/// Barriers, after the panels in shared memory, followed by the sums of a warpgroup's columns.
const BARRIER_BYTES: usize = 1024;
const SUM_BYTES: usize = 2 * 4 * PANEL * 4;
/// Rows of tiles, in clusters, that are processed together.
const BAND: usize = 8;

/// The most parts that K is split into, and the least blocks of K of a part.
const MOST_PARTS: usize = 8;
const LEAST_BLOCKS: usize = 8;
/// bf16 multiply-adds that an H200 computes in the time in which it moves a byte.
const PER_BYTE: f64 = 90.0;
/// A split must be expected to take at most this share of the time.
const WORTH_SPLITTING: f64 = 0.95;

/// The epilogue applied to the product before it is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Epilogue {
    Plain,
    /// Also stores the product itself if `keep`.
    Gated {
        act: Act,
        keep: bool,
    },
    /// Also stores the activation's value if `keep`.
    GatedGrad {
        act: Act,
        keep: bool,
    },
    /// As `Gated` of 8-bit operands, with the activation's value in E4M3.
    GatedCodes {
        act: Act,
        keep: bool,
    },
    /// Adds a bias of this type, if any, and also stores the activation's input if `keep`.
    Activated {
        act: Act,
        keep: bool,
        bias: Option<DType>,
    },
    /// Also stores the activation's value if `keep`, and the sums over blocks of 64 rows if `sum`.
    ActivatedGrad {
        act: Act,
        keep: bool,
        sum: bool,
    },
}

/// The element types of a plain product, and whether a base of the result's type is added. Other products are in bf16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Types {
    pub a: DType,
    pub b: DType,
    pub out: DType,
    pub has_base: bool,
}

impl Types {
    pub const BF16: Types = Types { a: DType::BF16, b: DType::BF16, out: DType::BF16, has_base: false };

    /// Both operands have 8 bits, and a scale.
    fn is_fp8(self) -> bool {
        self.a.is_fp8() && self.b.is_fp8()
    }

    fn is_served(self) -> bool {
        let is_bf16 = self.a == DType::BF16 && self.b == DType::BF16;
        (is_bf16 || self.is_fp8()) && matches!(self.out, DType::BF16 | DType::F32)
    }
}

/// Rows per partial sum.
pub const SUMMED: usize = PANEL;

impl Epilogue {
    /// The configurations worth timing, with the default first.
    pub fn forms(self) -> &'static [ProductConfig] {
        match self {
            Epilogue::Plain => &[SHARED, TURNS, SPLIT],
            Epilogue::Gated { .. } | Epilogue::Activated { .. } => &[APART, TURNS],
            Epilogue::GatedCodes { .. } => &[STAGGERED, SHARED],
            Epilogue::GatedGrad { .. } | Epilogue::ActivatedGrad { .. } => &[TURNS, APART],
        }
    }

    /// Its number in product.cu, the activation, and whether the optional output is stored.
    fn numbers(self) -> [u8; 3] {
        match self {
            Epilogue::Plain => [0, 0, 0],
            Epilogue::Gated { act, keep } => [1, gated::code(act), keep as u8],
            Epilogue::GatedGrad { act, keep } => [2, gated::code(act), keep as u8],
            Epilogue::Activated { act, keep, .. } => [3, gated::code(act), keep as u8],
            Epilogue::ActivatedGrad { act, keep, .. } => [4, gated::code(act), keep as u8],
            Epilogue::GatedCodes { act, keep } => [5, gated::code(act), keep as u8],
        }
    }

    /// Whether b has two halves, each with half of a tile's columns.
    fn is_gated(self) -> bool {
        matches!(self, Epilogue::Gated { .. } | Epilogue::GatedCodes { .. })
    }

    fn bias(self) -> Option<DType> {
        if let Epilogue::Activated { bias, .. } = self { bias } else { None }
    }

    fn sums(self) -> bool {
        matches!(self, Epilogue::ActivatedGrad { sum: true, .. })
    }

    /// Panels of results and of inputs that a warpgroup has in shared memory.
    fn panels(self, form: &ProductConfig) -> usize {
        match self {
            _ if !form.pingpong => 2,
            Epilogue::ActivatedGrad { .. } => 4,
            _ => 6,
        }
    }
}

/// Dynamic shared memory of a source's kernel; 0 for a source of another file.
pub fn shared_bytes(source: &Source) -> usize {
    let is_of = |epilogue: Epilogue, form: &ProductConfig| {
        let of_form = form.source([false, false], epilogue).defines;
        let names = ["PINGPONG", "MI", "TN", "STAGES", "CLUSTER", "EPILOGUE", "SUM"];
        let is_same = |name: &str| {
            let value = |defines: &[(String, String)]| {
                defines.iter().find(|(n, _)| n == name).map(|(_, value)| value.clone())
            };
            value(&of_form) == value(&source.defines)
        };
        source.name == NAME && names.into_iter().all(is_same)
    };
    all_forms()
        .find(|(epilogue, form)| is_of(*epilogue, form))
        .map_or(0, |(epilogue, form)| form.shared_bytes(epilogue))
}

/// Every configuration with an epilogue that it is compiled for, of those that differ in shared memory.
fn all_forms() -> impl Iterator<Item = (Epilogue, &'static ProductConfig)> {
    let of = |epilogue: Epilogue| epilogue.forms().iter().map(move |form| (epilogue, form));
    EPILOGUES.into_iter().flat_map(of).chain(FP8_FORMS.iter().map(|form| (Epilogue::Plain, form)))
}

const NAME: &str = "products/hopper/product.cu";
/// The configurations worth timing for plain products of 8-bit operands, with the default first.
const FP8_FORMS: &[ProductConfig] = &[STAGGERED, TALL, SPLIT];
/// One of each kind that differs in shared memory.
const EPILOGUES: [Epilogue; 7] = [
    Epilogue::Plain,
    Epilogue::GatedCodes { act: Act::Silu, keep: true },
    Epilogue::Gated { act: Act::Silu, keep: true },
    Epilogue::GatedGrad { act: Act::Silu, keep: true },
    Epilogue::Activated { act: Act::Gelu, keep: true, bias: None },
    Epilogue::ActivatedGrad { act: Act::Gelu, keep: true, sum: false },
    Epilogue::ActivatedGrad { act: Act::Gelu, keep: true, sum: true },
];

impl ProductConfig {
    fn rows(&self) -> usize {
        PANEL * self.mi * if self.pingpong { 1 } else { GROUPS }
    }

    fn shared_bytes(&self, epilogue: Epilogue) -> usize {
        let stage = (self.rows() + self.tn) * 2 * PANEL;
        let sums = if epilogue.sums() { GROUPS * SUM_BYTES } else { 0 };
        self.stages * stage + GROUPS * epilogue.panels(self) * PANEL_BYTES + BARRIER_BYTES + sums
    }

    /// Compiled for whether a is contiguous along M, and b along N.
    pub fn source(&self, layout: [bool; 2], epilogue: Epilogue) -> Source {
        self.source_in(Types::BF16, layout, epilogue)
    }

    fn source_in(&self, types: Types, [a_mn, b_mn]: [bool; 2], epilogue: Epilogue) -> Source {
        let [number, act, keep] = epilogue.numbers();
        // The parts of a split product are in f32, and the kernel that adds them adds the base.
        let types = match self.is_split {
            true => Types { out: DType::F32, has_base: false, ..types },
            false => types,
        };
        let defines = [
            ("PINGPONG", self.pingpong as usize),
            ("MI", self.mi),
            ("TN", self.tn),
            ("STAGES", self.stages),
            ("CLUSTER", self.cluster),
            ("A_MN", a_mn as usize),
            ("B_MN", b_mn as usize),
            ("EPILOGUE", number as usize),
            ("ACT", act as usize),
            ("KEEP", keep as usize),
            ("HAS_BIAS", epilogue.bias().is_some() as usize),
            ("SUM", epilogue.sums() as usize),
            ("FP8", types.is_fp8() as usize),
            // Tensor cores keep too few bits of a sum of 8-bit products.
            ("PROMOTE", types.is_fp8() as usize),
            ("F32_OUT", (types.out == DType::F32) as usize),
            ("HAS_BASE", types.has_base as usize),
            ("SPLIT", self.is_split as usize),
            ("STAGGER", self.stagger),
            // Codes are in E4M3.
            ("TO", 4),
        ];
        let bias = epilogue.bias().unwrap_or(DType::BF16);
        let named = [("T_BIAS", bias), ("T_A", types.a), ("T_B", types.b), ("T_OUT", types.out)];
        let code = match epilogue {
            Epilogue::GatedCodes { .. } => product_source!("../../elementwise/codes.cuh"),
            _ => product_source!(),
        };
        Source {
            name: NAME,
            code: Cow::Borrowed(code),
            defines: defines
                .map(|(name, value)| (name.into(), value.to_string()))
                .into_iter()
                .chain(named.map(|(name, dtype)| (name.into(), c_type(dtype).into())))
                .collect(),
        }
    }
}

/// What a plain product reads beside its operands.
#[derive(Clone, Copy, Debug, Default)]
pub struct Extras {
    /// Addresses of the f32 scales of 8-bit operands a and b.
    pub scales: Option<[u64; 2]>,
    /// Has the result's shape and type, and may be the same memory.
    pub base: Option<Matrices>,
    /// Addresses of the scale and of the largest magnitude of codes.
    pub codes: [u64; 2],
    /// Address and bytes of the workspace, which holds the parts of a split product.
    pub workspace: (u64, usize),
}

/// A product: d [M, N] = a [M, K] b [K, N], `count` times, with an epilogue.
#[derive(Clone, Debug)]
pub struct Call {
    pub count: usize,
    pub a: Matrices,
    pub b: Matrices,
    /// With `Gated`, b is the gate's half and this is up's.
    pub b2: Option<Matrices>,
    /// The outputs that are stored, as product.cu numbers them.
    pub outs: [Option<Matrices>; 3],
    /// The epilogue's inputs: gate and up, or the activation's input.
    pub sides: [Option<Matrices>; 2],
    /// Addresses of the bias and of the partial sums, if the epilogue has them.
    pub bias: u64,
    pub partial: u64,
    pub epilogue: Epilogue,
    pub extras: Extras,
}

impl Call {
    fn operands(&self) -> impl Iterator<Item = &Matrices> {
        let sides = self.sides.iter().flatten().chain(&self.extras.base);
        [&self.a, &self.b].into_iter().chain(&self.b2).chain(self.outs.iter().flatten()).chain(sides)
    }

    /// M, N, K.
    fn extents(&self) -> [usize; 3] {
        let (a, b) = (&self.a, &self.b);
        let [m, k] = if a.is_transposed { [a.columns, a.rows] } else { [a.rows, a.columns] };
        [m, if b.is_transposed { b.rows } else { b.columns }, k]
    }

    /// Whether TMA supports all operands.
    pub fn is_served(&self) -> bool {
        let types = self.types();
        let is_movable = |m: &Matrices| {
            let is_even = |n: usize| (n * m.dtype.bytes()).is_multiple_of(16);
            let is_even = is_even(m.pitch) && (self.count == 1 || is_even(m.step));
            is_even && m.alignment(self.count) >= 16 && m.pitch >= m.columns
        };
        let is_typed = match self.epilogue {
            Epilogue::Plain => {
                types.is_served() && self.extras.base.is_none_or(|base| base.dtype == types.out)
            }
            Epilogue::GatedCodes { .. } => {
                let [kept @ .., codes] = &self.outs;
                let are_codes = codes.is_some_and(|codes| codes.dtype == DType::E4M3);
                types.is_fp8() && are_codes && kept.iter().flatten().all(|m| m.dtype == DType::BF16)
            }
            _ => self.operands().all(|m| m.dtype == DType::BF16),
        };
        // Products of 8 bits have no transposed form.
        let is_along_k = self.layout() == [false, false];
        let is_scaled = types.is_fp8() == self.extras.scales.is_some();
        let is_result = |m: &Matrices| !m.is_transposed;
        self.extents().iter().all(|n| *n > 0)
            && is_typed
            && is_scaled
            && (is_along_k || !types.is_fp8())
            && self.operands().all(is_movable)
            && self.is_in_pairs()
            && self
                .outs
                .iter()
                .flatten()
                .chain(self.sides.iter().flatten())
                .chain(&self.extras.base)
                .all(is_result)
            && self.operands().all(|m| m.rows.max(m.columns) <= i32::MAX as usize)
    }

    /// Whether the bias can be read in pairs.
    fn is_in_pairs(&self) -> bool {
        let [_, n, _] = self.extents();
        let bytes = self.epilogue.bias().map_or(1, |dtype| 2 * dtype.bytes() as u64);
        bytes == 1 || n.is_multiple_of(2) && self.bias.is_multiple_of(bytes)
    }

    fn layout(&self) -> [bool; 2] {
        [self.a.is_transposed, !self.b.is_transposed]
    }

    fn types(&self) -> Types {
        let out = self.outs[0].map_or(DType::BF16, |out| out.dtype);
        match self.epilogue {
            Epilogue::Plain => {
                Types { a: self.a.dtype, b: self.b.dtype, out, has_base: self.extras.base.is_some() }
            }
            Epilogue::GatedCodes { .. } => Types { a: self.a.dtype, b: self.b.dtype, ..Types::BF16 },
            _ => Types::BF16,
        }
    }

    /// The configurations worth timing on a device, with the default first.
    pub fn forms(&self, facts: &Facts) -> Vec<&'static ProductConfig> {
        let forms = match self.epilogue {
            Epilogue::Plain if self.types().is_fp8() => FP8_FORMS,
            epilogue => epilogue.forms(),
        };
        let is_useful = |form: &&ProductConfig| !form.is_split || self.parts(form, facts.sms) > 1;
        let mut forms: Vec<_> = forms.iter().filter(is_useful).collect();
        forms.sort_by_key(|form| !form.is_split);
        forms
    }

    pub fn source(&self, form: &ProductConfig) -> Source {
        form.source_in(self.types(), self.layout(), self.epilogue)
    }

    /// The sources of everything that a product may run on.
    pub fn sources(&self, facts: &Facts) -> Vec<Source> {
        let forms = self.forms(facts);
        let sum = forms.iter().filter(|form| form.is_split).map(|form| self.sum_source(form, facts.sms));
        forms.iter().map(|form| self.source(form)).chain(sum).collect()
    }

    /// Rows of tiles in clusters, and columns.
    fn tiles(&self, form: &ProductConfig) -> [usize; 2] {
        let [m, n, _] = self.extents();
        let width = if self.epilogue.is_gated() { form.tn / 2 } else { form.tn };
        [m.div_ceil(form.rows() * form.cluster), n.div_ceil(width)]
    }

    /// Elements of K that one stage holds.
    fn depth(&self) -> usize {
        ROW_BYTES / self.a.dtype.bytes()
    }

    /// The parts that K is split into: the number that fills the device best, if that saves more time than writing and reading
    /// the parts takes; otherwise 1.
    fn parts(&self, form: &ProductConfig, sms: u32) -> usize {
        let [m, n, k] = self.extents();
        let fits = |parts: usize| {
            let is_deep = k.div_ceil(self.depth()) >= parts * LEAST_BLOCKS;
            is_deep && parts * m * n * DType::F32.bytes() <= self.extras.workspace.1
        };
        let types = self.types();
        let is_plain = self.epilogue == Epilogue::Plain && self.count == 1;
        if !is_plain || !types.is_served() || types.out != DType::F32 || !n.is_multiple_of(4) {
            return 1;
        }
        let slots = (sms as usize / form.cluster).max(1);
        let tiles: usize = self.tiles(form).iter().product();
        // In multiply-adds of the whole device.
        let round = (slots * form.cluster * form.rows() * form.tn * k) as f64;
        let moved =
            (m * n * 2 * DType::F32.bytes()) as f64 * if types.is_fp8() { 2.0 } else { 1.0 } * PER_BYTE;
        let cost = |parts: usize| {
            let rounds = (tiles * parts).div_ceil(slots) as f64 / parts as f64;
            rounds * round + if parts > 1 { parts as f64 * moved } else { 0.0 }
        };
        let best = (2..=MOST_PARTS).filter(|parts| fits(*parts)).min_by(|a, b| cost(*a).total_cmp(&cost(*b)));
        best.filter(|parts| cost(*parts) < WORTH_SPLITTING * cost(1)).unwrap_or(1)
    }

    /// The kernel that adds the parts.
    fn sum_source(&self, form: &ProductConfig, sms: u32) -> Source {
        let defines = [
            ("PARTS", self.parts(form, sms).to_string()),
            ("HAS_BASE", (self.extras.base.is_some() as usize).to_string()),
        ];
        let code = concat!(include_str!("../../prelude.cuh"), include_str!("parts.cu"));
        let defines = defines.map(|(name, value)| (name.into(), value)).to_vec();
        Source { name: "products/hopper/parts.cu", code: Cow::Borrowed(code), defines }
    }

    /// The product with its parts in the workspace, then their sum.
    fn prepare_split(&self, form: &ProductConfig, p: &Prepare<'_>) -> Prepared {
        let [m, n, _] = self.extents();
        let Some(out) = self.outs[0] else { return Ok(sequence(vec![])) };
        let sms = p.facts().sms;
        let (dtype, at) = (DType::F32, self.extras.workspace.0);
        let parts = Matrices { at, dtype, rows: m, columns: n, pitch: n, step: m * n, is_transposed: false };
        let count = self.parts(form, sms);
        let extras = Extras { base: None, ..self.extras };
        let product =
            Call { outs: [Some(parts), None, None], extras, ..self.clone() }.launch(form, count, p)?;
        let base = self.extras.base.unwrap_or(out);
        let mut args: Vec<Arg> = [at, base.at, out.at].map(Arg::Ptr).into();
        args.extend([m, n].map(|x| Arg::I32(x as i32)));
        args.extend([base.pitch, out.pitch].map(|x| Arg::I64(x as i64)));
        let blocks = (m * n).div_ceil(4 * 256) as u32;
        let sum = p.function(&self.sum_source(form, sms), "add_parts")?;
        Ok(sequence(vec![product, launch(sum, [blocks, 1, 1], 256, 0, args)]))
    }

    pub fn prepare(&self, form: &ProductConfig, p: &Prepare<'_>) -> Prepared {
        if form.is_split { self.prepare_split(form, p) } else { self.launch(form, 1, p) }
    }

    fn launch(&self, form: &ProductConfig, parts: usize, p: &Prepare<'_>) -> Prepared {
        let [m, n, k] = self.extents();
        let is_gated = self.epilogue.is_gated();
        let [rows, columns] = self.tiles(form);
        let total = rows * columns * self.count * parts;
        let number =
            |n: usize| u32::try_from(n).ok().filter(|n| *n < 1 << 30).ok_or_else(|| too_large("tiles", n));
        let blocks = k.div_ceil(self.depth()).div_ceil(parts);
        let shape = [blocks, rows, columns, BAND.min(rows), total, m, n];
        let shape = shape.into_iter().map(number).collect::<Result<Vec<u32>, CudaError>>()?;
        let [a_mn, b_mn] = self.layout();
        let map = |m: &Matrices, box_rows: usize| map(m, self.count, box_rows, p);
        let a = map(&self.a, if a_mn { PANEL } else { form.rows() })?;
        let b_rows = match (b_mn, is_gated) {
            (true, _) => PANEL,
            (false, true) => form.tn / 2,
            (false, false) => form.tn / form.cluster,
        };
        let b = map(&self.b, b_rows)?;
        let b2 = self.b2.as_ref().map_or_else(|| Ok(b.clone()), |b2| map(b2, b_rows))?;
        // An absent matrix is not accessed: any map stands in for it.
        let panel = |m: Option<&Matrices>| {
            m.map_or_else(|| Ok(a.clone()), |m| self::map(m, self.count * parts, PANEL, p))
        };
        let mut args = vec![Block::of_ints(&shape), a.clone(), b, b2];
        for m in self.outs.iter().map(Option::as_ref) {
            args.push(panel(m)?);
        }
        for m in self.sides.iter().map(Option::as_ref) {
            args.push(panel(m)?);
        }
        args.extend([self.bias, self.partial].map(|at| Block::from(Arg::Ptr(at))));
        if self.types().is_fp8() || self.extras.base.is_some() {
            let [a_scale, b_scale] = self.extras.scales.unwrap_or_default();
            let base = self.extras.base.map_or([0; 3], |base| [base.at, base.pitch as u64, base.step as u64]);
            let [scale, amax] = self.extras.codes;
            args.push(Block::of_words(&[a_scale, b_scale, base[0], base[1], base[2], scale, amax]));
        }
        let clusters = (p.facts().sms as usize / form.cluster).min(total);
        let function = p.function(&self.source(form), "product")?;
        let shared = form.shared_bytes(self.epilogue) as u32;
        launch_blocks(function, [clusters * form.cluster, 1, 1], THREADS, shared, args)
    }
}

/// A tensor map of `count` matrices with boxes of `box_rows` rows of 128 bytes.
fn map(m: &Matrices, count: usize, box_rows: usize, p: &Prepare<'_>) -> Result<Block, CudaError> {
    let step = if count > 1 { m.step } else { m.pitch * m.rows };
    p.tensor_map(&Tensor {
        at: m.at,
        dtype: m.dtype,
        dims: [m.columns, m.rows, count].map(|n| n as u64).to_vec(),
        steps: [m.pitch, step].map(|n| n as u64).to_vec(),
        box_dims: [ROW_BYTES / m.dtype.bytes(), box_rows, 1].map(|n| n as u32).to_vec(),
        swizzle: Swizzle::Bytes128,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matrices(rows: usize, columns: usize, pitch: usize, is_transposed: bool) -> Matrices {
        Matrices { at: 4096, dtype: DType::BF16, rows, columns, pitch, step: 0, is_transposed }
    }

    fn call() -> Call {
        Call {
            count: 1,
            a: matrices(300, 72, 72, false),
            b: matrices(136, 72, 80, true),
            b2: None,
            outs: [Some(matrices(300, 136, 136, false)), None, None],
            sides: [None; 2],
            bias: 0,
            partial: 0,
            epilogue: Epilogue::Plain,
            extras: Extras::default(),
        }
    }

    #[test]
    fn operands_that_tma_cannot_load_are_not_served() {
        assert!(call().is_served());
        assert_eq!(call().extents(), [300, 136, 72]);
        assert_eq!(call().layout(), [false, false]);
        let odd = |change: fn(&mut Call)| {
            let mut call = call();
            change(&mut call);
            call.is_served()
        };
        assert!(!odd(|call| call.a.pitch = 76));
        assert!(!odd(|call| call.b.at = 4104));
        assert!(!odd(|call| call.b.dtype = DType::F32));
        assert!(!odd(|call| call.outs[0] = Some(matrices(300, 136, 140, false))));
        assert!(!odd(|call| call.a.rows = 0));
    }

    #[test]
    fn every_form_fits_in_shared_memory() {
        for (epilogue, form) in all_forms() {
            let bytes = form.shared_bytes(epilogue);
            assert!(bytes <= 227 << 10, "{epilogue:?} {form:?}");
            assert_eq!(shared_bytes(&form.source([true, false], epilogue)), bytes);
            assert!(!form.name.contains(' '));
        }
    }
}
