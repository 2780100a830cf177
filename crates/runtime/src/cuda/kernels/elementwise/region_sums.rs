//! Regions that also sum values over their rows: the generated kernel iterates down columns.
//!
//! A block takes a slab of columns, N per thread, over a piece of the rows: LANES threads lie along a row and STRIPES rows are
//! processed at once, with UNROLL iterations loaded before anything is computed. A thread keeps the sums of its columns in
//! registers, the stripes are added through shared memory, and piece i of a sum goes to partial[i, columns], which
//! `partial_sums` adds up. The order of additions depends on shapes alone: deterministic. Moves each tensor once, and the
//! pieces out and in.

use std::fmt::Write;

use flatout_ir::target::Shapes;
use flatout_ir::{Graph, Launch, Op, View, region};

use super::map::{THREADS, Tensors, body_text, c_tensors, loads, stores, vector};
use crate::cuda::kernels::address::{Walk, index_type};
use crate::cuda::kernels::reductions::partial_sums::partial_sums;
use crate::cuda::kernels::stage::{Draft, Stage, Stages, Value, at, blocks, count32};

/// Minimum rows of a piece, and the number of blocks that fills a device many times over, so that the tail is short. GELU and
/// its derivative over [65792, 3072] bf16 took 402 us on an H200 with the sum (430 with 1024 blocks), 396 without it, and the
/// sum as a separate launch 103 more.
const PIECE: usize = 64;
const ENOUGH_BLOCKS: usize = 8192;

/// Rows whose vectors a thread loads before it computes. More than in a plain region, because the end of a block, where nothing
/// is in flight, costs more. The same case took 408 us with two.
fn unroll(inputs: usize) -> usize {
    if inputs <= 2 { 4 } else { 2 }
}

/// Number of pieces that the rows are cut into.
fn pieces(rows: usize, columns: usize) -> usize {
    rows.div_ceil(PIECE).min(ENOUGH_BLOCKS.div_ceil(columns.div_ceil(THREADS).max(1))).max(1)
}

pub(super) fn workspace(shapes: &Shapes<'_>) -> usize {
    let Op::Region { body } = &shapes.node.op else { return 0 };
    region::sums(body)
        .map(|o| {
            let of = body.ty(region::value(body, o));
            pieces(of.dims[0], of.dims[1]) * of.dims[1] * 4
        })
        .sum()
}

/// Threads along a row of `vectors` vectors: none is idle if that leaves accesses of at least 128 bytes.
fn lanes(vectors: usize) -> usize {
    let dividing = 1 << vectors.trailing_zeros().min(5);
    if dividing >= 8 { dividing } else { vectors.next_power_of_two().min(32) }
}

/// The stages of a region with at least one requested output that is a sum.
pub(super) fn stages(launch: &Launch, body: &Graph) -> Stages {
    let tensors = Tensors::new(launch, body);
    let (rows, columns) = (launch.ins[0].dims[0], launch.ins[0].dims[1]);
    if columns == 0 {
        return Ok(vec![]);
    }
    let (n, index) = (vector(&tensors.views(), Some(columns)), index_type(rows * columns));
    let (lanes, unroll) = (lanes(columns / n), unroll(launch.ins.len()));
    let pieces = pieces(rows, columns);
    let mut draft = Draft::new("region_sums")
        .define("N", n)
        .define("UNROLL", unroll)
        .define("INDEX", index)
        .define("COLUMNS", columns)
        .define("LANES", lanes)
        .define("STRIPES", THREADS / lanes);
    for (name, view) in tensors.named() {
        draft = draft.text(&Walk::of(view).function(&format!("at_{name}"), index));
    }
    let code = format!("{}{}", body_text(body, launch), kernel_text(launch, &tensors, n));
    let scratch = launch.workspace.as_ref().map_or(0, |view| view.offset);
    let length = rows.div_ceil(pieces);
    let mut args: Vec<Value> = tensors.views().into_iter().map(at).collect();
    args.extend([Value::At(scratch), count32("rows", rows)?, count32("rows of a piece", length)?]);
    let grid = [blocks(columns / n, lanes)?, pieces as u32];
    let mut stages =
        vec![Stage { source: draft.source(&code), entry: "region_sums", grid, block: THREADS as u32, args }];
    let to: Vec<&View> = tensors.sums.iter().map(|(_, to)| *to).collect();
    stages.extend(partial_sums(scratch, pieces, columns, &to)?);
    Ok(stages)
}

fn kernel_text(launch: &Launch, tensors: &Tensors<'_>, n: usize) -> String {
    let parameters: String =
        c_tensors(launch, tensors).into_iter().map(|(ty, name)| format!("{ty} {name}, ")).collect();
    let mut text = format!(
        "extern \"C\" __global__ void __launch_bounds__({THREADS}) region_sums({parameters}float* partial, int rows, int length) {{
    int lane = threadIdx.x % LANES, stripe = threadIdx.x / LANES;
    int column = (blockIdx.x * LANES + lane) * N;
    int from = blockIdx.y * length, to = from + length < rows ? from + length : rows;
"
    );
    for (o, _) in &tensors.sums {
        _ = writeln!(text, "    float s{o}[N] = {{}};");
    }
    text.push_str(
        "    if (column < COLUMNS) for (int row = from + stripe; row < to; row += UNROLL * STRIPES) {\n",
    );
    let each = "#pragma unroll\n    for (int u = 0; u < UNROLL; u++) {\n        \
                if (row + u * STRIPES >= to) continue;\n        \
                INDEX e = (INDEX)(row + u * STRIPES) * COLUMNS + column;\n";
    text.push_str(&loads(launch, n, each));
    text.push_str(&stores(launch, tensors, n, each));
    text.push_str("    }\n    }\n");
    for (sum, (o, _)) in tensors.sums.iter().enumerate() {
        let barrier = if sum == 0 { "__shared__ float all[STRIPES][LANES * N];" } else { "__syncthreads();" };
        _ = write!(
            text,
            "    {barrier}
#pragma unroll
    for (int k = 0; k < N; k++) all[stripe][lane * N + k] = s{o}[k];
    __syncthreads();
    for (int c = threadIdx.x; c < LANES * N; c += {THREADS}) {{
        int to_column = blockIdx.x * LANES * N + c;
        if (to_column >= COLUMNS) break;
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < STRIPES; i++) sum += all[i][c];
        partial[((i64){sum} * gridDim.y + blockIdx.y) * COLUMNS + to_column] = sum;
    }}
"
        );
    }
    text + "}\n"
}
