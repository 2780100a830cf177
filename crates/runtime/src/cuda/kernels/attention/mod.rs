//! Attention on the GPU: several kernel families, of which `choice` selects one per launch.
//!
//! cuDNN runs equal sequences in bf16 (`dense`) and packed ones (`packed`); a plain kernel of ours supports everything
//! (`flash`, the family `fma`); few queries over many keys have a dedicated kernel (`decode`). Our kernels take one argument
//! struct (`call`) and, if segments are ragged, a list of tiles built on the device (`tiles`).

mod call;
pub mod choice;
pub mod cudnn;
mod decode;
mod delta;
mod dense;
mod flash;
mod hopper;
mod mma;
mod packed;
mod scratch;
mod tiles;
mod timing;

use flatout_ir::ops::attention::{self, Mask, Segments};
use flatout_ir::ops::cap::Cap;
use flatout_ir::target::{KernelRow, Layout, Shapes};
use flatout_ir::types::DType;
use flatout_ir::{Launch, Op, OpKind};

pub use choice::refusal;

use crate::cuda::context::{Facts, Kernel, Prepare, Prepared, Source};
use crate::rows::{FLOATS, kernel_row};

const fn kernel(name: &'static str, op: OpKind, deterministic: bool) -> Kernel {
    let row = KernelRow { workspace, deterministic, ..kernel_row(name, op, FLOATS, Layout::Rows) };
    Kernel { row, sources, prepare }
}

/// cuDNN's backward pass is deterministic only if `Facts` require it; the rows describe the default.
pub const KERNELS: &[Kernel] = &[
    kernel("cuda.attention", OpKind::Attention, true),
    kernel("cuda.attention_grad", OpKind::AttentionGrad, false),
];

/// Maximum queries per segment in decoding.
const DECODE_QUERIES: usize = 16;

/// The shapes and options of an attention, in either direction.
#[derive(Clone, Copy, Debug)]
struct Problem {
    grad: bool,
    /// Whether the backward pass receives a gradient of lse.
    d_lse: bool,
    dtype: DType,
    tq: usize,
    tk: usize,
    heads: usize,
    kv_heads: usize,
    size: usize,
    scale: f32,
    /// Soft cap of the scores.
    cap: Cap,
    mask: Mask,
    q: Segments,
    k: Segments,
}

impl Problem {
    fn new(op: &Op, dtype: DType, q_dims: &[usize], k_dims: &[usize]) -> Self {
        let (grad, d_lse, scale, cap, mask, q, k) = match *op {
            Op::Attention { scale, cap, mask, q, k } => (false, false, scale, cap, mask, q, k),
            Op::AttentionGrad { scale, cap, mask, q, k, d_lse } => (true, d_lse, scale, cap, mask, q, k),
            _ => unreachable!("the rows are for attention"),
        };
        Problem {
            grad,
            d_lse,
            dtype,
            tq: q_dims[0],
            tk: k_dims[0],
            heads: q_dims[1],
            kv_heads: k_dims[1],
            size: q_dims[2],
            scale,
            cap,
            mask,
            q,
            k,
        }
    }

    fn of(launch: &Launch) -> Self {
        Problem::new(&launch.op, launch.ins[0].dtype, &launch.ins[0].dims, &launch.ins[1].dims)
    }

    /// Number of inputs of the forward operation.
    fn inputs(&self) -> usize {
        attention::inputs(self.mask, self.q, self.k)
    }

    fn q_longest(&self) -> usize {
        longest(self.q, self.tq)
    }

    fn k_longest(&self) -> usize {
        longest(self.k, self.tk)
    }

    fn is_ragged(&self) -> bool {
        call::is_ragged(self.q) || call::is_ragged(self.k)
    }

    /// Few queries over many keys, for which tiles of queries would be mostly empty.
    fn is_decode(&self) -> bool {
        self.q_longest() <= DECODE_QUERIES && self.k_longest() > self.q_longest()
    }

    /// Number of segment pairs.
    fn segments(&self) -> usize {
        match self.q {
            Segments::Uniform { len } => self.tq / len.max(1),
            Segments::Ragged { max_segments, .. } => max_segments,
        }
    }
}

fn longest(segments: Segments, tokens: usize) -> usize {
    match segments {
        Segments::Uniform { len } => len,
        Segments::Ragged { max_len, .. } => max_len.min(tokens),
    }
}

fn workspace(shapes: &Shapes<'_>) -> usize {
    let (q, k) = (shapes.ins[0], shapes.ins[1]);
    choice::workspace(&Problem::new(&shapes.node.op, q.dtype, &q.dims, &k.dims))
}

fn sources(launch: &Launch, facts: &Facts) -> Vec<Source> {
    choice::sources(&Problem::of(launch), launch, facts)
}

fn prepare(launch: &Launch, at: &Prepare<'_>) -> Prepared {
    choice::prepare(&Problem::of(launch), launch, at)
}
