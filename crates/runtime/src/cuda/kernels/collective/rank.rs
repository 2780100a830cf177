//! The coordinate of this rank along an axis; the kernel is `rank.cu`.

use flatout_ir::{Launch, Op};

use crate::cuda::context::{Arg, Prepare, Prepared, Source, launch as kernel, sequence};
use crate::cuda::kernels::stage::Draft;

pub fn source() -> Source {
    Draft::new("rank.cu").source(include_str!("rank.cu"))
}

pub fn prepare(launch: &Launch, p: &Prepare<'_>) -> Prepared {
    let Op::Rank { axis } = launch.op else { unreachable!("the row is for ranks") };
    let Some(out) = &launch.outs[0] else { return Ok(sequence(vec![])) };
    let args = vec![Arg::Ptr(p.address(out)), Arg::I32(p.coordinate(axis) as i32)];
    Ok(kernel(p.function(&source(), "rank")?, [1, 1, 1], 1, 0, args))
}
