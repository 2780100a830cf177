//! Products on Hopper's wgmma and TMA (sm_90a), with plain or gated activations and their gradients as epilogues: `product.cu`.
//!
//! A plain product with few tiles and a long inner extent, such as a weight's gradient, may be split along that extent, so that
//! its parts fill the device; `parts.cu` adds them.

use std::borrow::Cow;

use flatout_ir::types::DType;

use super::call::{Call, Epilogue, Extras, Types};
use super::lt::Matrices;
use crate::cuda::argument::{Block, launch_blocks};
use crate::cuda::context::{Arg, CudaError, Facts, Prepare, Prepared, Source, launch, sequence};
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
            include_str!("../call.cuh"),
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
    /// Whether K is split into parts, as many as `parts` finds.
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
/// The most parts that K is split into, and the least blocks of K of a part.
const MOST_PARTS: usize = 8;
const LEAST_BLOCKS: usize = 8;
/// bf16 multiply-adds that an H200 computes in the time in which it moves a byte.
const PER_BYTE: f64 = 90.0;
/// A split must be expected to take at most this share of the time.
const WORTH_SPLITTING: f64 = 0.95;

const NAME: &str = "products/hopper/product.cu";

/// The configurations worth timing for a product on a device, with the default first.
pub fn forms(call: &Call, facts: &Facts) -> Vec<ProductConfig> {
    let forms: &[ProductConfig] = match call.epilogue {
        Epilogue::Plain if call.types().is_fp8() => &[STAGGERED, TALL, SPLIT],
        Epilogue::Plain => &[SHARED, TURNS, SPLIT],
        Epilogue::Gated { .. } | Epilogue::Activated { .. } => &[APART, TURNS],
        Epilogue::GatedCodes { .. } => &[STAGGERED, SHARED],
        Epilogue::GatedGrad { .. } | Epilogue::ActivatedGrad { .. } => &[TURNS, APART],
    };
    let is_useful = |form: &ProductConfig| !form.is_split || form.parts(call, facts.sms) > 1;
    let mut forms: Vec<ProductConfig> = forms.iter().copied().filter(is_useful).collect();
    forms.sort_by_key(|form| !form.is_split);
    forms
}

/// Dynamic shared memory of a source's kernel; `None` for a source of another file.
pub fn shared_bytes(source: &Source) -> Option<usize> {
    let number = |name: &str| source.number(name).filter(|_| source.name == NAME);
    let (pingpong, mi, tn) = (number("PINGPONG")? == 1, number("MI")?, number("TN")?);
    let form = ProductConfig { pingpong, mi, tn, ..SHARED };
    let stage = (form.rows() + form.tn) * ROW_BYTES;
    // Panels of results and of inputs that a warpgroup has in shared memory.
    let panels = match number("EPILOGUE")? {
        _ if !form.pingpong => 2,
        4 => 4,
        _ => 6,
    };
    let sums = if number("SUM")? == 1 { GROUPS * SUM_BYTES } else { 0 };
    Some(number("STAGES")? * stage + GROUPS * panels * PANEL_BYTES + BARRIER_BYTES + sums)
}

/// Elements of K that one stage holds.
fn depth(call: &Call) -> usize {
    ROW_BYTES / call.a.dtype.bytes()
}

impl ProductConfig {
    fn rows(&self) -> usize {
        PANEL * self.mi * if self.pingpong { 1 } else { GROUPS }
    }

    /// Rows and columns of the tiles of a cluster, whose blocks take adjacent rows of tiles.
    fn tile(&self, call: &Call) -> [usize; 2] {
        [self.rows() * self.cluster, if call.epilogue.is_gated() { self.tn / 2 } else { self.tn }]
    }

    /// The sources of everything that a product runs on.
    pub fn sources(&self, call: &Call, facts: &Facts) -> Vec<Source> {
        let sum = self.is_split.then(|| self.sum_source(call, facts.sms));
        [self.source(call)].into_iter().chain(sum).collect()
    }

    fn source(&self, call: &Call) -> Source {
        // The parts of a split product are in f32, and the kernel that adds them adds the base.
        let types = match self.is_split {
            true => Types { out: DType::F32, has_base: false, ..call.types() },
            false => call.types(),
        };
        let numbers = [
            ("PINGPONG", self.pingpong as usize),
            ("MI", self.mi),
            ("TN", self.tn),
            ("STAGES", self.stages),
            ("CLUSTER", self.cluster),
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
        let numbers = numbers.into_iter().map(|(name, value)| (name.into(), value.to_string()));
        let named = [("T_A", types.a), ("T_B", types.b), ("T_OUT", types.out)];
        let named = named.into_iter().map(|(name, dtype)| (name.into(), c_type(dtype).into()));
        let code = match call.epilogue {
            Epilogue::GatedCodes { .. } => product_source!("../../elementwise/codes.cuh"),
            _ => product_source!(),
        };
        let of_call = call.epilogue.defines(call.layout());
        Source {
            name: NAME,
            code: Cow::Borrowed(code),
            defines: numbers.chain(named).chain(of_call).collect(),
        }
    }

    /// The parts that K is split into: the number that fills the device best, if that saves more time than writing and reading
    /// the parts takes; otherwise 1.
    fn parts(&self, call: &Call, sms: u32) -> usize {
        let [m, n, k] = call.extents();
        let fits = |parts: usize| {
            let is_deep = k.div_ceil(depth(call)) >= parts * LEAST_BLOCKS;
            is_deep && parts * m * n * DType::F32.bytes() <= call.extras.workspace.1
        };
        let types = call.types();
        let is_plain = call.epilogue == Epilogue::Plain && call.count == 1;
        if !is_plain || !types.is_served() || types.out != DType::F32 || !n.is_multiple_of(4) {
            return 1;
        }
        let slots = (sms as usize / self.cluster).max(1);
        let tiles = call.tiles(self.tile(call));
        // In multiply-adds of the whole device.
        let round = (slots * self.cluster * self.rows() * self.tn * k) as f64;
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
    fn sum_source(&self, call: &Call, sms: u32) -> Source {
        let defines = [
            ("PARTS", self.parts(call, sms).to_string()),
            ("HAS_BASE", (call.extras.base.is_some() as usize).to_string()),
        ];
        let code = concat!(include_str!("../../prelude.cuh"), include_str!("parts.cu"));
        let defines = defines.map(|(name, value)| (name.into(), value)).to_vec();
        Source { name: "products/hopper/parts.cu", code: Cow::Borrowed(code), defines }
    }

    pub fn prepare(&self, call: &Call, p: &Prepare<'_>) -> Prepared {
        if self.is_split { self.prepare_split(call, p) } else { self.launch(call, 1, p) }
    }

    /// The product with its parts in the workspace, then their sum.
    fn prepare_split(&self, call: &Call, p: &Prepare<'_>) -> Prepared {
        let [m, n, _] = call.extents();
        let Some(out) = call.outs[0] else { return Ok(sequence(vec![])) };
        let sms = p.facts().sms;
        let (dtype, at) = (DType::F32, call.extras.workspace.0);
        let parts = Matrices { at, dtype, rows: m, columns: n, pitch: n, step: m * n, is_transposed: false };
        let extras = Extras { base: None, ..call.extras };
        let of_parts = Call { outs: [Some(parts), None, None], extras, ..call.clone() };
        let product = self.launch(&of_parts, self.parts(call, sms), p)?;
        let base = call.extras.base.unwrap_or(out);
        let mut args: Vec<Arg> = [at, base.at, out.at].map(Arg::Ptr).into();
        args.extend([m, n].map(|x| Arg::I32(x as i32)));
        args.extend([base.pitch, out.pitch].map(|x| Arg::I64(x as i64)));
        let blocks = (m * n).div_ceil(4 * 256) as u32;
        let sum = p.function(&self.sum_source(call, sms), "add_parts")?;
        Ok(sequence(vec![product, launch(sum, [blocks, 1, 1], 256, 0, args)]))
    }

    fn launch(&self, call: &Call, parts: usize, p: &Prepare<'_>) -> Prepared {
        let tile = self.tile(call);
        let [a_mn, b_mn] = call.layout();
        let map = |m: &Matrices, box_rows: usize| map(m, call.count, box_rows, p);
        let a = map(&call.a, if a_mn { PANEL } else { self.rows() })?;
        let b_rows = match (b_mn, call.epilogue.is_gated()) {
            (true, _) => PANEL,
            (false, true) => self.tn / 2,
            (false, false) => self.tn / self.cluster,
        };
        let b = map(&call.b, b_rows)?;
        let b2 = call.b2.as_ref().map_or_else(|| Ok(b.clone()), |b2| map(b2, b_rows))?;
        // An absent matrix is not accessed: any map stands in for it.
        let panel = |m: Option<&Matrices>| {
            m.map_or_else(|| Ok(a.clone()), |m| self::map(m, call.count * parts, PANEL, p))
        };
        let mut args = vec![call.shape(tile, depth(call), parts)?, a.clone(), b, b2];
        for m in call.outs.iter().chain(&call.sides).map(Option::as_ref) {
            args.push(panel(m)?);
        }
        args.extend([call.bias, call.partial].map(|at| Block::from(Arg::Ptr(at))));
        if call.types().is_fp8() || call.extras.base.is_some() {
            let [a_scale, b_scale] = call.extras.scales.unwrap_or_default();
            let base = call.extras.base.map_or([0; 3], |base| [base.at, base.pitch as u64, base.step as u64]);
            let [scale, amax] = call.extras.codes;
            args.push(Block::of_words(&[a_scale, b_scale, base[0], base[1], base[2], scale, amax]));
        }
        let clusters = (p.facts().sms as usize / self.cluster).min(call.tiles(tile) * parts);
        let source = self.source(call);
        let shared = shared_bytes(&source).expect("a source of this file") as u32;
        let function = p.function(&source, "product")?;
        launch_blocks(function, [clusters * self.cluster, 1, 1], THREADS, shared, args)
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
    use crate::cuda::kernels::products::call::tests::call;

    #[test]
    fn every_form_fits_in_shared_memory() {
        let facts = Facts::on_paper("sm_90a");
        for epilogue in Epilogue::KINDS {
            let of_plain: &[ProductConfig] =
                if epilogue == Epilogue::Plain { &[STAGGERED, TALL, SPLIT] } else { &[] };
            for form in forms(&Call { epilogue, ..call() }, &facts).iter().chain(of_plain) {
                let bytes = shared_bytes(&form.source(&Call { epilogue, ..call() }));
                assert!(bytes.is_some_and(|bytes| bytes <= 227 << 10), "{epilogue:?} {form:?}");
                assert!(!form.name.contains(' '));
            }
        }
    }
}
