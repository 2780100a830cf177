//! A product as our kernels compute it: its operands, its epilogue, and the order of its tiles. `call.cuh` is their side of it.

use flatout_ir::ops::gated::Act;
use flatout_ir::types::DType;

use super::choice::too_large;
use super::lt::Matrices;
use crate::cuda::argument::Block;
use crate::cuda::context::CudaError;
use crate::cuda::kernels::elementwise::gated;
use crate::cuda::kernels::stage::c_type;

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

/// The element types of a product, and whether a base of the result's type is added. Those of an epilogue are bf16, but for
/// operands of `GatedCodes`.
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
    pub fn is_fp8(self) -> bool {
        self.a.is_fp8() && self.b.is_fp8()
    }

    pub fn is_served(self) -> bool {
        let is_bf16 = self.a == DType::BF16 && self.b == DType::BF16;
        (is_bf16 || self.is_fp8()) && matches!(self.out, DType::BF16 | DType::F32)
    }
}

/// Further tensors that a product reads, and its workspace.
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

/// Rows per partial sum.
pub const SUMMED: usize = 64;
/// Rows of tiles that are processed together.
const BAND: usize = 8;

impl Epilogue {
    /// One of each kind, and with and without sums.
    #[cfg(test)]
    pub const KINDS: [Epilogue; 7] = [
        Epilogue::Plain,
        Epilogue::GatedCodes { act: Act::Silu, keep: true },
        Epilogue::Gated { act: Act::Silu, keep: true },
        Epilogue::GatedGrad { act: Act::Silu, keep: true },
        Epilogue::Activated { act: Act::Gelu, keep: true, bias: None },
        Epilogue::ActivatedGrad { act: Act::Gelu, keep: true, sum: false },
        Epilogue::ActivatedGrad { act: Act::Gelu, keep: true, sum: true },
    ];

    /// Its number in call.cuh, the activation, and whether the optional output is stored.
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
    pub fn is_gated(self) -> bool {
        matches!(self, Epilogue::Gated { .. } | Epilogue::GatedCodes { .. })
    }

    pub fn sums(self) -> bool {
        matches!(self, Epilogue::ActivatedGrad { sum: true, .. })
    }

    fn bias(self) -> Option<DType> {
        if let Epilogue::Activated { bias, .. } = self { bias } else { None }
    }

    /// The defines that call.cuh reads, for whether a is contiguous along M, and b along N.
    pub fn defines(self, [a_mn, b_mn]: [bool; 2]) -> Vec<(String, String)> {
        let [number, act, keep] = self.numbers();
        let numbers = [
            ("A_MN", a_mn as u8),
            ("B_MN", b_mn as u8),
            ("EPILOGUE", number),
            ("ACT", act),
            ("KEEP", keep),
            ("HAS_BIAS", self.bias().is_some() as u8),
            ("SUM", self.sums() as u8),
        ];
        let bias = ("T_BIAS".to_string(), c_type(self.bias().unwrap_or(DType::BF16)).to_string());
        numbers.into_iter().map(|(name, value)| (name.into(), value.to_string())).chain([bias]).collect()
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
    /// The outputs that are stored, as call.cuh numbers them.
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
    /// A product without an epilogue.
    pub fn plain(count: usize, a: Matrices, b: Matrices, d: Matrices) -> Call {
        Call {
            count,
            a,
            b,
            b2: None,
            outs: [Some(d), None, None],
            sides: [None; 2],
            bias: 0,
            partial: 0,
            epilogue: Epilogue::Plain,
            extras: Extras::default(),
        }
    }

    fn operands(&self) -> impl Iterator<Item = &Matrices> {
        let sides = self.sides.iter().flatten().chain(&self.extras.base);
        [&self.a, &self.b].into_iter().chain(&self.b2).chain(self.outs.iter().flatten()).chain(sides)
    }

    /// M, N, K.
    pub fn extents(&self) -> [usize; 3] {
        let (a, b) = (&self.a, &self.b);
        let [m, k] = if a.is_transposed { [a.columns, a.rows] } else { [a.rows, a.columns] };
        [m, if b.is_transposed { b.rows } else { b.columns }, k]
    }

    /// Whether types agree and all rows are 16-byte aligned, as TMA and cp.async copy them.
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
        let mut results =
            self.outs.iter().flatten().chain(self.sides.iter().flatten()).chain(&self.extras.base);
        self.extents().iter().all(|n| *n > 0)
            && is_typed
            && is_scaled
            && (is_along_k || !types.is_fp8())
            && self.operands().all(is_movable)
            && self.is_in_pairs()
            && results.all(|m| !m.is_transposed)
            && self.operands().all(|m| m.rows.max(m.columns) <= i32::MAX as usize)
    }

    pub fn types(&self) -> Types {
        let out = self.outs[0].map_or(DType::BF16, |out| out.dtype);
        match self.epilogue {
            Epilogue::Plain => {
                Types { a: self.a.dtype, b: self.b.dtype, out, has_base: self.extras.base.is_some() }
            }
            Epilogue::GatedCodes { .. } => Types { a: self.a.dtype, b: self.b.dtype, ..Types::BF16 },
            _ => Types::BF16,
        }
    }

    /// Whether the bias can be read in pairs.
    fn is_in_pairs(&self) -> bool {
        let [_, n, _] = self.extents();
        let bytes = self.epilogue.bias().map_or(1, |dtype| 2 * dtype.bytes() as u64);
        bytes == 1 || n.is_multiple_of(2) && self.bias.is_multiple_of(bytes)
    }

    /// Whether a is contiguous along M, and b along N.
    pub fn layout(&self) -> [bool; 2] {
        [self.a.is_transposed, !self.b.is_transposed]
    }

    /// Tiles of d over all matrices, for tiles of `rows` by `columns` elements.
    pub fn tiles(&self, [rows, columns]: [usize; 2]) -> usize {
        let [m, n, _] = self.extents();
        m.div_ceil(rows) * n.div_ceil(columns) * self.count
    }

    /// `Shape` of call.cuh, for tiles of `rows` by `columns` elements and blocks of `inner` of K, which is split into parts.
    pub fn shape(&self, tile: [usize; 2], inner: usize, parts: usize) -> Result<Block, CudaError> {
        let [m, n, k] = self.extents();
        let number =
            |n: usize| u32::try_from(n).ok().filter(|n| *n < 1 << 30).ok_or_else(|| too_large("tiles", n));
        let total = self.tiles(tile) * parts;
        let [rows, columns] = [m.div_ceil(tile[0]), n.div_ceil(tile[1])];
        let blocks = k.div_ceil(inner).div_ceil(parts);
        let shape = [blocks, rows, columns, BAND.min(rows), total, m, n, k];
        Ok(Block::of_ints(&shape.into_iter().map(number).collect::<Result<Vec<u32>, CudaError>>()?))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub fn matrices(rows: usize, columns: usize, pitch: usize, is_transposed: bool) -> Matrices {
        Matrices { at: 4096, dtype: DType::BF16, rows, columns, pitch, step: 0, is_transposed }
    }

    /// [300, 72] times [72, 136].
    pub fn call() -> Call {
        Call::plain(
            1,
            matrices(300, 72, 72, false),
            matrices(136, 72, 80, true),
            matrices(300, 136, 136, false),
        )
    }

    #[test]
    fn operands_without_aligned_rows_are_not_served() {
        assert!(call().is_served());
        assert_eq!(call().extents(), [300, 136, 72]);
        assert_eq!(call().layout(), [false, false]);
        assert_eq!(call().tiles([128, 128]), 6);
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
}
