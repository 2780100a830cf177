//! The sum of terms that lie side by side, in the order of `collective::tree`; the kernel is `tree_sum.cu`.

use crate::cuda::context::{Arg, CudaError, Prepare, Source, Work, launch};
use crate::cuda::kernels::stage::{Draft, blocks};

/// Threads per block.
const BLOCK: usize = 256;
/// Enough blocks to fill any device; threads iterate with a grid stride.
const MOST_BLOCKS: u32 = 4096;
/// Elements per thread if every address allows it; distances between terms are multiples of it.
pub const TOGETHER: usize = 4;

/// A sum: the number of terms, whether a base is added last, and whether all addresses allow whole vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TreeSum {
    pub ways: usize,
    pub has_base: bool,
    pub is_aligned: bool,
}

/// The addresses of a sum.
#[derive(Clone, Copy, Debug)]
pub struct Places {
    pub terms: u64,
    /// Distance between terms in elements, a multiple of `TOGETHER`.
    pub stride: usize,
    pub base: Option<u64>,
    pub out: u64,
}

impl TreeSum {
    pub fn source(self) -> Source {
        let TreeSum { ways, has_base, .. } = self;
        Draft::new("tree_sum.cu")
            .define("WAYS", ways)
            .define("LEVELS", if ways.is_power_of_two() { ways.ilog2() } else { 0 })
            .define("VEC", self.vec())
            .flag("HAS_BASE", has_base)
            .source(include_str!("tree_sum.cu"))
    }

    fn vec(self) -> usize {
        if self.is_aligned { TOGETHER } else { 1 }
    }

    /// The launch over a number of elements.
    pub fn work(self, at: Places, elements: usize, p: &Prepare<'_>) -> Result<Box<dyn Work>, CudaError> {
        let function = p.function(&self.source(), "tree_sum")?;
        self.launch(function, at, elements)
    }

    /// As `work`, with the function already resolved.
    pub fn launch(
        self,
        function: crate::cuda::Function,
        at: Places,
        elements: usize,
    ) -> Result<Box<dyn Work>, CudaError> {
        let Places { terms, stride, base, out } = at;
        let grid = blocks(elements, BLOCK * self.vec())?.min(MOST_BLOCKS);
        let args = vec![
            Arg::Ptr(terms),
            Arg::Ptr(base.unwrap_or(0)),
            Arg::Ptr(out),
            Arg::I64(stride as i64),
            Arg::I64(elements as i64),
        ];
        Ok(launch(function, [grid, 1, 1], BLOCK as u32, 0, args))
    }
}
