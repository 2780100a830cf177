//! The reciprocal row norms 1 / ||w + s b a|| of DoRA, once per update; the kernel is `low_rank_norm.cu`.

use flatout_ir::target::Layout;
use flatout_ir::{Launch, Op, OpKind};

use crate::cuda::context::{CudaError, Kernel};
use crate::cuda::kernels::address::widths;
use crate::cuda::kernels::stage::{Draft, Stage, Stages, Value, at, blocks, count32, staged};
use crate::rows::{FLOATS, kernel_row};

pub const KERNELS: &[Kernel] = &[staged!(
    kernel_row("cuda.low_rank_norm", OpKind::LowRankNorm, FLOATS, Layout::Dense),
    |l, _| stages(l)
)];

/// Rows per block.
const ROWS: usize = 4;
/// The largest rank for which the b of a block fits in shared memory.
const RANK: usize = 1024;

fn stages(launch: &Launch) -> Stages {
    let Op::LowRankNorm { scale } = launch.op else { unreachable!("the row is for norms of sums") };
    let [w, a, b] = &launch.ins[..] else { unreachable!("a weight and its adapter") };
    let Some(out) = &launch.outs[0] else { return Ok(vec![]) };
    let (rows, columns, rank) = (w.dims[0], w.dims[1], a.dims[0]);
    if rows == 0 {
        return Ok(vec![]);
    }
    if rank > RANK {
        return Err(CudaError::new(format!(
            "an adapter of rank {rank}: norms are written for {RANK} at most"
        )));
    }
    let vec = widths(4).find(|vec| columns.is_multiple_of(*vec)).unwrap_or(1);
    let source = Draft::new("low_rank_norm.cu")
        .dtype("T_W", w.dtype)
        .define("ROWS", ROWS)
        .define("COLUMNS", columns)
        .define("RANK", rank)
        .define("VEC", vec)
        .source(include_str!("low_rank_norm.cu"));
    Ok(vec![Stage {
        source,
        entry: "low_rank_norm",
        grid: [blocks(rows, ROWS)?, 1],
        block: 256,
        args: vec![at(w), at(a), at(b), at(out), count32("rows", rows)?, Value::F32(scale as f32)],
    }])
}
