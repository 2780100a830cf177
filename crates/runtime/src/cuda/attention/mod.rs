//! Attention on the GPU: cuDNN for equal sequences in bf16 (`dense`), a kernel of ours for everything else (`flash`).

pub mod cudnn;
mod dense;
mod flash;

use flatout_ir::ops::attention::{self, Mask, Segments};
use flatout_ir::target::{KernelRow, Layout, Shapes};
use flatout_ir::types::DType;
use flatout_ir::{Launch, Op, OpKind};

use super::context::{CudaError, Facts, Kernel, Prepare, Source, Work};

const fn kernel(name: &'static str, op: OpKind, deterministic: bool) -> Kernel {
    let row = KernelRow {
        name,
        op,
        dtypes: &[DType::F32, DType::BF16],
        ins: Layout::Rows,
        outs: Layout::Rows,
        in_place: &[],
        workspace,
        deterministic,
    };
    Kernel { row, sources, prepare }
}

/// cuDNN's backward pass is deterministic only where `Facts` ask for that: the row says what holds without.
pub const KERNELS: &[Kernel] = &[
    kernel("cuda.attention", OpKind::Attention, true),
    kernel("cuda.attention_grad", OpKind::AttentionGrad, false),
];

/// The shapes of either direction.
#[derive(Clone, Copy, Debug)]
struct Problem {
    grad: bool,
    dtype: DType,
    tq: usize,
    tk: usize,
    heads: usize,
    kv_heads: usize,
    size: usize,
    scale: f32,
    mask: Mask,
    q: Segments,
    k: Segments,
}

impl Problem {
    fn new(op: &Op, dtype: DType, q_dims: &[usize], k_dims: &[usize]) -> Self {
        let (grad, scale, mask, q, k) = match *op {
            Op::Attention { scale, mask, q, k } => (false, scale, mask, q, k),
            Op::AttentionGrad { scale, mask, q, k } => (true, scale, mask, q, k),
            _ => unreachable!("the rows are for attention"),
        };
        Problem {
            grad,
            dtype,
            tq: q_dims[0],
            tk: k_dims[0],
            heads: q_dims[1],
            kv_heads: k_dims[1],
            size: q_dims[2],
            scale,
            mask,
            q,
            k,
        }
    }

    fn of(launch: &Launch) -> Self {
        Problem::new(&launch.op, launch.ins[0].dtype, &launch.ins[0].dims, &launch.ins[1].dims)
    }

    /// The inputs of the forward operation.
    fn inputs(&self) -> usize {
        attention::inputs(self.mask, self.q, self.k)
    }

    fn q_longest(&self) -> usize {
        longest(self.q, self.tq)
    }

    fn k_longest(&self) -> usize {
        longest(self.k, self.tk)
    }

    /// Pairs of segments.
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

/// What either form needs: which one runs depends on the library and on addresses, which are not known yet.
fn workspace(shapes: &Shapes<'_>) -> usize {
    let (q, k) = (shapes.ins[0], shapes.ins[1]);
    let problem = Problem::new(&shapes.node.op, q.dtype, &q.dims, &k.dims);
    let flash = flash::workspace(&problem);
    if dense::serves(&problem) { flash.max(dense::workspace(&problem)) } else { flash }
}

fn sources(launch: &Launch, facts: &Facts) -> Vec<Source> {
    let problem = Problem::of(launch);
    let mut sources = vec![flash::source(&problem)];
    if dense::accepts(&problem, launch, facts) {
        sources.push(dense::source());
    }
    sources
}

/// `cudnnStatus_t` of the kind CUDNN_STATUS_NOT_SUPPORTED.
fn is_unsupported(error: &CudaError) -> bool {
    error.code == 0 || (3000..4000).contains(&error.code)
}

/// Where cuDNN has no engine for the shape on this GPU, ours runs, and the run says so.
fn prepare(launch: &Launch, p: &Prepare<'_>) -> Result<Box<dyn Work>, CudaError> {
    let problem = Problem::of(launch);
    if dense::accepts(&problem, launch, p.facts()) {
        let prepare = if problem.grad { dense::prepare_backward } else { dense::prepare_forward };
        match prepare(&problem, launch, p) {
            Err(error) if is_unsupported(&error) => {
                p.note(format!("{} runs on our own kernel: cuDNN refused it, {error}", launch.op.name()));
            }
            prepared => return prepared,
        }
    } else if dense::serves(&problem) {
        let why =
            if p.facts().cudnn.is_none() { "cuDNN is missing" } else { "cuDNN does not take these tensors" };
        p.note(format!("{} runs on our own kernel: {why}", launch.op.name()));
    } else if let Some(why) = dense::unserved(&problem) {
        p.note(format!("{} runs on our own kernel: {why}", launch.op.name()));
    }
    flash::prepare(&problem, launch, p)
}
