//! The output head's product fused with the cross entropy: logits exist for one chunk of rows at a time, in the workspace.
//!
//! cuBLASLt computes the logits of a chunk in the type of x, one kernel turns its rows into losses and, in place, into d logits
//! = c (softmax - onehot), with c the row's weight (or minus d logp, if given); two more products give dx and add to dw. Chunks
//! are processed in order, so dw is summed in a fixed order. Where the logits are an output, all exist and the gradient may read them.

use std::borrow::Cow;

use flatout_ir::ops::cap::Cap;
use flatout_ir::ops::product::Compute;
use flatout_ir::target::{KernelRow, Layout, Shapes};
use flatout_ir::types::DType;
use flatout_ir::{Launch, Op, OpKind, View};

use super::lt::{Fusion, Matrices, Multiply};
use super::product::library_workspace;
use crate::cuda::context::{
    Arg, CudaError, Facts, Kernel, Prepare, Source, Work, launch as kernel_launch, sequence,
};
use crate::rows::{FLOATS, kernel_row};

const fn kernel(name: &'static str, op: OpKind) -> Kernel {
    let row = KernelRow { workspace, ..kernel_row(name, op, FLOATS, Layout::Rows) };
    Kernel { row, sources, prepare }
}

pub const KERNELS: &[Kernel] = &[
    kernel("cuda.head_loss", OpKind::HeadLoss),
    kernel("cuda.head_loss_grad", OpKind::HeadLossGrad),
    kernel("cuda.head_loss_train", OpKind::HeadLossTrain),
];

/// Approximate maximum bytes of a chunk's logits.
const CHUNK_BYTES: usize = 512 << 20;
/// Maximum rows of a chunk. dw is read and written once per chunk: with twice the rows a step of 65,536 tokens of width 768
/// into 32,768 would move 1.6 GB less, 0.4 ms of 245, and take 256 MiB more.
const MOST_ROWS: usize = 4096;
/// Minimum rows of a chunk, for arbitrarily large vocabularies.
const LEAST_ROWS: usize = 128;
const ALIGN: usize = 256;

/// How the rows are divided, and the layout of the workspace: cuBLASLt's part, the logits, the rows' losses.
#[derive(Debug, PartialEq)]
struct Sizes {
    /// Rows per chunk.
    rows: usize,
    /// Row stride of the logits, in elements.
    pitch: usize,
    library_bytes: usize,
    logits_bytes: usize,
    losses_bytes: usize,
}

impl Sizes {
    fn new(rows: usize, vocabulary: usize, width: usize, dtype: DType) -> Self {
        let pitch = vocabulary.next_multiple_of(128 / dtype.bytes());
        let most = (CHUNK_BYTES / (pitch * dtype.bytes()).max(1)).clamp(LEAST_ROWS, MOST_ROWS);
        // Chunks of equal size: a short last one would be less efficient.
        let chunks = rows.div_ceil(most).max(1);
        let chunk = rows.div_ceil(chunks).next_multiple_of(LEAST_ROWS).min(rows);
        Sizes {
            rows: chunk,
            pitch,
            library_bytes: library_workspace(vocabulary * width.max(chunk)),
            logits_bytes: (chunk * pitch * dtype.bytes()).next_multiple_of(ALIGN),
            losses_bytes: (rows * 4).next_multiple_of(ALIGN),
        }
    }

    fn bytes(&self) -> usize {
        self.library_bytes + self.logits_bytes + self.losses_bytes
    }
}

fn workspace(shapes: &Shapes<'_>) -> usize {
    let (x, w) = (shapes.ins[0], shapes.ins[1]);
    Sizes::new(x.dims[0], w.dims[0], x.dims[1], x.dtype).bytes()
}

/// A launch of any of the three operations.
struct Head<'a> {
    x: &'a View,
    w: &'a View,
    target: &'a View,
    /// The weight of each row, or its d logp.
    factor: &'a View,
    /// The sign that turns a factor into the c of d logits.
    sign: f32,
    known_lse: Option<&'a View>,
    /// The logits of the forward pass, if given.
    known_logits: Option<&'a View>,
    base: Option<&'a View>,
    compute: Compute,
    /// Soft cap of logits, if any.
    cap: Option<f32>,
    sum: Option<&'a View>,
    logp: Option<&'a View>,
    lse: Option<&'a View>,
    best: Option<&'a View>,
    logits: Option<&'a View>,
    dx: Option<&'a View>,
    dw: Option<&'a View>,
}

impl<'a> Head<'a> {
    fn of(launch: &'a Launch) -> Self {
        let ins = &launch.ins;
        let out = |i: usize| launch.outs[i].as_ref();
        let head = Head {
            x: &ins[0],
            w: &ins[1],
            target: &ins[2],
            factor: &ins[3],
            sign: 1.0,
            known_lse: None,
            known_logits: None,
            base: None,
            compute: launch.op.compute().unwrap_or(Compute::Full),
            cap: None,
            sum: None,
            logp: None,
            lse: None,
            best: None,
            logits: None,
            dx: None,
            dw: None,
        };
        match launch.op {
            Op::HeadLoss { cap: Cap(cap), .. } => {
                Head { cap, sum: out(0), logp: out(1), lse: out(2), best: out(3), logits: out(4), ..head }
            }
            Op::HeadLossGrad { base, kept, cap: Cap(cap), .. } => Head {
                cap,
                factor: &ins[4],
                sign: -1.0,
                known_lse: Some(&ins[3]),
                known_logits: kept.then(|| &ins[5]),
                base: base.then(|| &ins[5 + kept as usize]),
                dx: out(0),
                dw: out(1),
                ..head
            },
            Op::HeadLossTrain { base, cap: Cap(cap), .. } => Head {
                cap,
                base: base.then(|| &ins[4]),
                sum: out(0),
                logp: out(1),
                lse: out(2),
                dx: out(3),
                dw: out(4),
                ..head
            },
            _ => unreachable!("the rows are for head and loss"),
        }
    }

    fn sizes(&self) -> Sizes {
        Sizes::new(self.x.dims[0], self.w.dims[0], self.x.dims[1], self.x.dtype)
    }

    fn wants_gradient(&self) -> bool {
        self.dx.is_some() || self.dw.is_some()
    }

    /// Threads per row, and 16-byte accesses that each keeps in registers; 0 if the row is too long for that.
    fn shape(&self) -> (u32, u32) {
        let packs = (self.w.dims[0] * self.x.dtype.bytes()).div_ceil(16);
        let threads = packs.div_ceil(8).next_multiple_of(32).clamp(128, 1024);
        let vectors = packs.div_ceil(threads);
        (threads as u32, if vectors <= 8 { vectors as u32 } else { 0 })
    }

    fn source(&self) -> Source {
        let (threads, vectors) = self.shape();
        let flag = |is_set: bool| (is_set as u32).to_string();
        let defines = [
            ("T_X", if self.x.dtype == DType::BF16 { "bf16" } else { "float" }.to_string()),
            ("THREADS", threads.to_string()),
            ("VECTORS", vectors.to_string()),
            ("GRAD", flag(self.wants_gradient())),
            ("KNOWN", flag(self.known_lse.is_some())),
        ];
        let cap = self.cap.map(|cap| ("CAP", format!("{cap:?}f")));
        Source {
            name: "head_loss.cu",
            code: Cow::Borrowed(concat!(include_str!("../prelude.cuh"), include_str!("head_loss.cu"))),
            defines: defines.into_iter().chain(cap).map(|(name, value)| (name.into(), value)).collect(),
        }
    }
}

fn sources(launch: &Launch, _: &Facts) -> Vec<Source> {
    vec![Head::of(launch).source()]
}

/// `count` rows of a view from row `first`.
fn rows(view: &View, first: usize, count: usize, p: &Prepare<'_>) -> Result<Matrices, CudaError> {
    let columns = view.dims[1];
    let pitch = if view.dims[0] == 1 { columns } else { view.strides[0] };
    if pitch < columns {
        return Err(CudaError::new(format!("rows of {columns} elements lie {pitch} apart and overlap")));
    }
    let at = p.address(view) + (first * pitch * view.dtype.bytes()) as u64;
    Ok(Matrices { at, dtype: view.dtype, rows: count, columns, pitch, step: 0, is_transposed: false })
}

/// Whether every row begins at a multiple of the 16 bytes that the kernel reads at a time.
fn is_in_packs(m: &Matrices) -> bool {
    m.at.is_multiple_of(16) && (m.pitch * m.dtype.bytes()).is_multiple_of(16)
}

fn transposed(m: Matrices) -> Matrices {
    Matrices { is_transposed: true, ..m }
}

fn prepare(launch: &Launch, p: &Prepare<'_>) -> Result<Box<dyn Work>, CudaError> {
    let head = Head::of(launch);
    let sizes = head.sizes();
    let scratch = launch.workspace.as_ref().ok_or_else(|| CudaError::new("has no scratch for its logits"))?;
    let library = p.address(scratch);
    let logits_at = library + sizes.library_bytes as u64;
    let losses_at = logits_at + sizes.logits_bytes as u64;
    let function = p.function(&head.source(), "head_rows")?;
    let (threads, _) = head.shape();
    let (row_count, vocabulary) = (head.x.dims[0], head.w.dims[0]);
    let address = |view: Option<&View>| Arg::Ptr(view.map_or(0, |v| p.address(v)));
    let w = rows(head.w, 0, vocabulary, p)?;

    let mut works: Vec<Box<dyn Work>> = vec![];
    let (compute, workspace) = (head.compute, (library, sizes.library_bytes));
    let multiply = |a, b, c, d| {
        let (scales, fusion) = (None, Fusion::NONE);
        Multiply { count: 1, a, b, c, d, compute, scales, fusion, workspace }.prepare(p)
    };
    for first in (0..row_count).step_by(sizes.rows.max(1)) {
        let count = sizes.rows.min(row_count - first);
        let x = rows(head.x, first, count, p)?;
        let chunk = Matrices {
            at: logits_at,
            dtype: head.x.dtype,
            rows: count,
            columns: vocabulary,
            pitch: sizes.pitch,
            step: 0,
            is_transposed: false,
        };
        let known = head.known_logits.map(|known| rows(known, first, count, p)).transpose()?;
        let to = head.logits.map(|logits| rows(logits, first, count, p)).transpose()?;
        let from = known.or(to).filter(is_in_packs).unwrap_or(chunk);
        if known != Some(from) {
            works.push(multiply(x, transposed(w), None, from)?);
        }
        // The head's rows read a chunk, and what is kept is computed once more.
        if let Some(to) = to.filter(|to| *to != from) {
            works.push(multiply(x, transposed(w), None, to)?);
        }
        let losses = if head.sum.is_some() { losses_at } else { 0 };
        let args = vec![
            Arg::Ptr(from.at),
            Arg::I64(from.pitch as i64),
            Arg::Ptr(logits_at),
            Arg::I64(sizes.pitch as i64),
            Arg::I32(vocabulary as i32),
            Arg::I32(first as i32),
            Arg::F32(head.sign),
            Arg::Ptr(p.address(head.target)),
            Arg::Ptr(p.address(head.factor)),
            address(head.known_lse),
            address(head.logp),
            address(head.lse),
            address(head.best),
            Arg::Ptr(losses),
        ];
        works.push(kernel_launch(function.clone(), [count as u32, 1, 1], threads, 0, args));
        if let Some(dx) = head.dx {
            works.push(multiply(chunk, w, None, rows(dx, first, count, p)?)?);
        }
        if let Some(dw) = head.dw {
            let d = rows(dw, 0, vocabulary, p)?;
            let c = if first > 0 {
                Some(d)
            } else {
                head.base.map(|base| rows(base, 0, vocabulary, p)).transpose()?
            };
            works.push(multiply(transposed(chunk), x, c, d)?);
        }
    }
    if let Some(sum) = head.sum {
        let function = p.function(&head.source(), "head_sum")?;
        let args = vec![Arg::Ptr(losses_at), Arg::I32(row_count as i32), Arg::Ptr(p.address(sum))];
        works.push(kernel_launch(function, [1, 1, 1], 1024, 0, args));
    }
    Ok(sequence(works))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_equal_and_bounded() {
        let sizes = Sizes::new(65_536, 32_768, 768, DType::BF16);
        assert_eq!((sizes.rows, sizes.pitch, sizes.logits_bytes), (4096, 32_768, 256 << 20));
        let sizes = Sizes::new(10_000, 32_768, 768, DType::BF16);
        assert_eq!(sizes.rows, 3456);
        let sizes = Sizes::new(37, 61, 24, DType::F32);
        assert_eq!((sizes.rows, sizes.pitch), (37, 64));
        let sizes = Sizes::new(65_536, 151_936, 4096, DType::BF16);
        assert!(sizes.logits_bytes <= (CHUNK_BYTES + LEAST_ROWS * sizes.pitch * 2));
    }

    #[test]
    fn a_row_is_kept_in_registers_up_to_128_kilobytes() {
        let view = |dims: &[usize]| View::dense(0, &flatout_ir::types::TensorType::new(DType::BF16, dims));
        let shape = |vocabulary: usize| {
            let (x, w) = (view(&[4, 8]), view(&[vocabulary, 8]));
            let launch = Launch {
                kernel: "cuda.head_loss",
                op: Op::HeadLoss { compute: Compute::Full, cap: Cap::NONE },
                ins: vec![x.clone(), w, x.clone(), x],
                outs: vec![None; 5],
                workspace: None,
                path: String::new(),
                key: 0,
                flops: 0,
                queue: flatout_ir::Queue::Compute,
                joins: None,
            };
            Head::of(&launch).shape()
        };
        assert_eq!(shape(61), (128, 1));
        assert_eq!(shape(32_768), (512, 8));
        assert_eq!(shape(65_536), (1024, 8));
        assert_eq!(shape(65_544), (1024, 0));
    }
}
