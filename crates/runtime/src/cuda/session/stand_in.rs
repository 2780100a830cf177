//! Simulates exchanges between ranks with a kernel, to measure the schedule of several ranks on one GPU: it occupies as many
//! multiprocessors as NCCL, takes the predicted time and moves the predicted bytes.

use std::borrow::Cow;
use std::time::Duration;

use flatout_ir::{Launch, Op, View};

use crate::cuda::context::{Arg, Prepare, Prepared, Source, launch as kernel, sequence};

/// The time of each exchange; `None` skips it.
pub type Times<'a> = dyn Fn(&Launch) -> Option<Duration> + 'a;

const BLOCKS: u32 = 16;
const THREADS: u32 = 512;
/// Bytes per load and store of a thread.
const WORD: usize = 16;

pub fn source() -> Source {
    Source { name: "stand_in.cu", code: Cow::Borrowed(include_str!("stand_in.cu")), defines: vec![] }
}

pub fn prepare(launch: &Launch, time: Option<Duration>, p: &Prepare<'_>) -> Prepared {
    let (Some(time), Some(ways)) = (time, launch.op.ways()) else { return Ok(sequence(vec![])) };
    let Some(to) = &launch.outs[0] else { return Ok(sequence(vec![])) };
    let from = &launch.ins[0];
    let words = |view: &View| view.span_bytes() / WORD;
    let (whole, passes) = match launch.op {
        Op::AllGather { .. } => (to.span_bytes(), 1),
        Op::AllReduce { .. } => (from.span_bytes(), 2),
        _ => (from.span_bytes(), 1),
    };
    let moved = passes * whole / ways * (ways - 1) / WORD;
    let args = vec![
        Arg::Ptr(p.address(to)),
        Arg::Ptr(p.address(from)),
        Arg::I32(words(to) as i32),
        Arg::I32(words(from).max(1) as i32),
        Arg::I64(moved as i64),
        Arg::I64(time.as_nanos() as i64),
    ];
    Ok(kernel(p.function(&source(), "stand_in")?, [BLOCKS, 1, 1], THREADS, 0, args))
}
