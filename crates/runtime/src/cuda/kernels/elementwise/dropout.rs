//! Counter-based dropout, with the bits of `flatout_ir::random`; the kernel is `dropout.cu`.

use flatout_ir::random::drop_below;
use flatout_ir::target::Layout;
use flatout_ir::{Launch, Op, OpKind, View};

use crate::cuda::context::Kernel;
use crate::cuda::kernels::address::{Walk, index_type, most, widths};
use crate::cuda::kernels::stage::{self, Draft, PHILOX, Stage, Stages, Value, at, blocks, staged};
use crate::rows::{FLOATS, kernel_row};

pub const KERNELS: &[Kernel] = &[staged!(
    // The generator and the rows are addressed by the first axis and one stride, so row layout suffices for all three.
    kernel_row("cuda.dropout", OpKind::Dropout, FLOATS, Layout::Rows),
    |l, _| stages(l)
)];

fn stages(launch: &Launch) -> Stages {
    let Op::Dropout { p } = launch.op else { unreachable!("the row is for dropout") };
    let Some(y) = &launch.outs[0] else { return Ok(vec![]) };
    let (x, rng, rows) = (&launch.ins[0], &launch.ins[1], &launch.ins[2]);
    let count = x.elements();
    if count == 0 {
        return Ok(vec![]);
    }
    let a_token = count / x.dims[0];
    let views = [x, y];
    let fits = |width: &usize| {
        let takes = |v: &&View| Walk::of(v).takes(*width, v.dtype, v.offset);
        a_token.is_multiple_of(*width) && views.iter().all(takes)
    };
    let vec = widths(most(&views)).find(fits).unwrap_or(1);
    let index = index_type(count);
    let source = Draft::new("dropout.cu")
        .define("VEC", vec)
        .define("WIDTH", format!("{a_token}u"))
        .define("INDEX", index)
        .dtype("T_X", x.dtype)
        .text(PHILOX)
        .text(&Walk::of(x).function("at_x", index))
        .text(&Walk::of(y).function("at_y", index))
        .text(&Walk::rows(rows).function("row_at", index))
        .source(include_str!("dropout.cu"));
    let mut args = vec![at(x), at(rng), at(rows), at(y), stage::count(index, count)];
    args.extend(drawing(p, launch.key));
    Ok(vec![Stage { source, entry: "dropout", grid: [blocks(count, 256 * vec)?, 1], block: 256, args }])
}

/// The dropout parameters: the two halves of the node's key, the bound below which an element is dropped, and the scale of the
/// rest.
pub(crate) fn drawing(p: f32, key: u64) -> [Value; 4] {
    let halves =
        [key as u32, (key >> 32) as u32, u32::from(drop_below(p))].map(|word| Value::I32(word as i32));
    let [low, high, below] = halves;
    [low, high, below, Value::F32((1.0 / (1.0 - p as f64)) as f32)]
}
