//! Products on Hopper's wgmma and TMA (sm_90a), with plain or gated activations and their gradients as epilogues: `product.cu`.

use std::borrow::Cow;

use flatout_ir::ops::gated::Act;
use flatout_ir::types::DType;

use super::choice::too_large;
use super::lt::Matrices;
use crate::cuda::argument::{Block, launch_blocks};
use crate::cuda::context::{Arg, CudaError, Prepare, Prepared, Source};
use crate::cuda::kernels::elementwise::gated;
use crate::cuda::kernels::stage::c_type;
use crate::cuda::tensor_map::{Swizzle, Tensor};

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
}

/// Both warpgroups share a tile of 128 by 256: loads the fewest bytes, for products with a comparatively short epilogue.
const SHARED: ProductConfig =
    ProductConfig { name: "wgmma-128x256", pingpong: false, mi: 1, tn: 256, stages: 4, cluster: 2 };
/// A tile of 128 by 128 per warpgroup, in turns, so that epilogues overlap the other's products.
const TURNS: ProductConfig =
    ProductConfig { name: "wgmma-128x128-pair", pingpong: true, mi: 2, tn: 128, stages: 4, cluster: 2 };
/// As TURNS, without sharing b with another block: less waiting if epilogues are long.
const APART: ProductConfig = ProductConfig { name: "wgmma-128x128", cluster: 1, ..TURNS };

const GROUPS: usize = 2;
const THREADS: u32 = 384;
/// A panel of 64 rows of 64 elements.
const PANEL: usize = 64;
const PANEL_BYTES: usize = 8192;
/// Barriers, after the panels in shared memory, followed by the sums of a warpgroup's columns.
const BARRIER_BYTES: usize = 1024;
const SUM_BYTES: usize = 2 * 4 * PANEL * 4;
/// Rows of tiles, in clusters, that are processed together.
const BAND: usize = 8;

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

/// Rows per partial sum.
pub const SUMMED: usize = PANEL;

impl Epilogue {
    /// The configurations worth timing, with the default first.
    pub fn forms(self) -> &'static [ProductConfig] {
        match self {
            Epilogue::Plain => &[SHARED, TURNS],
            Epilogue::Gated { .. } | Epilogue::Activated { .. } => &[APART, TURNS],
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
        }
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
    let of = |epilogue: Epilogue| {
        epilogue.forms().iter().find(|form| is_of(epilogue, form)).map(|form| form.shared_bytes(epilogue))
    };
    EPILOGUES.into_iter().find_map(of).unwrap_or(0)
}

const NAME: &str = "products/hopper/product.cu";
/// One of each kind that differs in shared memory.
const EPILOGUES: [Epilogue; 6] = [
    Epilogue::Plain,
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
    pub fn source(&self, [a_mn, b_mn]: [bool; 2], epilogue: Epilogue) -> Source {
        let [number, act, keep] = epilogue.numbers();
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
        ];
        let bias = ("T_BIAS".to_string(), c_type(epilogue.bias().unwrap_or(DType::BF16)).to_string());
        let code = concat!(
            include_str!("../../prelude.cuh"),
            include_str!("../../matrices.cuh"),
            include_str!("../../wgmma.cuh"),
            include_str!("../../elementwise/activation.cuh"),
            include_str!("product.cu")
        );
        Source {
            name: NAME,
            code: Cow::Borrowed(code),
            defines: defines
                .map(|(name, value)| (name.into(), value.to_string()))
                .into_iter()
                .chain([bias])
                .collect(),
        }
    }
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
}

impl Call {
    fn operands(&self) -> impl Iterator<Item = &Matrices> {
        let sides = self.sides.iter().flatten();
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
        let is_movable = |m: &Matrices| {
            let is_even = m.pitch.is_multiple_of(8) && (self.count == 1 || m.step.is_multiple_of(8));
            m.dtype == DType::BF16 && is_even && m.alignment(self.count) >= 16 && m.pitch >= m.columns
        };
        let is_result = |m: &Matrices| !m.is_transposed;
        self.extents().iter().all(|n| *n > 0)
            && self.operands().all(is_movable)
            && self.is_in_pairs()
            && self.outs.iter().flatten().chain(self.sides.iter().flatten()).all(is_result)
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

    pub fn source(&self, form: &ProductConfig) -> Source {
        form.source(self.layout(), self.epilogue)
    }

    pub fn prepare(&self, form: &ProductConfig, p: &Prepare<'_>) -> Prepared {
        let [m, n, k] = self.extents();
        let is_gated = matches!(self.epilogue, Epilogue::Gated { .. });
        let width = if is_gated { form.tn / 2 } else { form.tn };
        let (rows, columns) = (m.div_ceil(form.rows() * form.cluster), n.div_ceil(width));
        let total = rows * columns * self.count;
        let number =
            |n: usize| u32::try_from(n).ok().filter(|n| *n < 1 << 30).ok_or_else(|| too_large("tiles", n));
        let shape = [k.div_ceil(PANEL), rows, columns, BAND.min(rows), total, m, n];
        let shape = shape.into_iter().map(number).collect::<Result<Vec<u32>, CudaError>>()?;
        let [a_mn, b_mn] = self.layout();
        let map = |m: &Matrices, box_rows: usize| self.map(m, box_rows, p);
        let a = map(&self.a, if a_mn { PANEL } else { form.rows() })?;
        let b_rows = match (b_mn, is_gated) {
            (true, _) => PANEL,
            (false, true) => form.tn / 2,
            (false, false) => form.tn / form.cluster,
        };
        let b = map(&self.b, b_rows)?;
        let b2 = self.b2.as_ref().map_or_else(|| Ok(b.clone()), |b2| map(b2, b_rows))?;
        // An absent matrix is not accessed: any map stands in for it.
        let panel = |m: Option<&Matrices>| m.map_or_else(|| Ok(a.clone()), |m| map(m, PANEL));
        let mut args = vec![Block::of_ints(&shape), a.clone(), b, b2];
        for m in self.outs.iter().map(Option::as_ref) {
            args.push(panel(m)?);
        }
        for m in self.sides.iter().map(Option::as_ref) {
            args.push(panel(m)?);
        }
        args.extend([self.bias, self.partial].map(|at| Block::from(Arg::Ptr(at))));
        let clusters = (p.facts().sms as usize / form.cluster).min(total);
        let function = p.function(&self.source(form), "product")?;
        let shared = form.shared_bytes(self.epilogue) as u32;
        launch_blocks(function, [clusters * form.cluster, 1, 1], THREADS, shared, args)
    }

    /// A tensor map with boxes of `box_rows` rows of 64 elements.
    fn map(&self, m: &Matrices, box_rows: usize, p: &Prepare<'_>) -> Result<Block, CudaError> {
        let step = if self.count > 1 { m.step } else { m.pitch * m.rows };
        p.tensor_map(&Tensor {
            at: m.at,
            dims: [m.columns, m.rows, self.count].map(|n| n as u64).to_vec(),
            steps: [m.pitch, step].map(|n| n as u64).to_vec(),
            box_dims: [PANEL, box_rows, 1].map(|n| n as u32).to_vec(),
            swizzle: Swizzle::Bytes128,
        })
    }
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
        for epilogue in EPILOGUES {
            for form in epilogue.forms() {
                let bytes = form.shared_bytes(epilogue);
                assert!(bytes <= 227 << 10, "{epilogue:?} {form:?}");
                assert_eq!(shared_bytes(&form.source([true, false], epilogue)), bytes);
                assert!(!form.name.contains(' '));
            }
        }
    }
}
