//! The row sums of do * o, less the gradient of lse, that bf16 backward kernels take.

use std::borrow::Cow;

use flatout_ir::Launch;

use super::Problem;
use super::call::{self, Call};
use super::scratch::ALIGN;
use crate::cuda::argument::launch_blocks;
use crate::cuda::context::{Prepare, Prepared, Source};

/// Tokens a block takes, 8 threads each.
const TOKENS: usize = 32;

/// Scratch of `Call::delta`.
pub(super) fn bytes(p: &Problem) -> usize {
    (4 * p.tq * p.heads).next_multiple_of(ALIGN)
}

pub(super) fn source(p: &Problem) -> Source {
    let size = ("SIZE".to_string(), p.size.to_string());
    let code = concat!(include_str!("../prelude.cuh"), include_str!("call.cuh"), include_str!("delta.cu"));
    Source {
        name: "attention/delta.cu",
        code: Cow::Borrowed(code),
        defines: [size].into_iter().chain(call::defines(p)).collect(),
    }
}

/// Fills `call.delta` from o, do and, where it is given, the gradient of lse; o's and do's rows begin at multiples of 16 bytes.
pub(super) fn prepare(p: &Problem, launch: &Launch, call: &Call, at: &Prepare<'_>) -> Prepared {
    let function = at.function(&source(p), "attention_delta")?;
    let grid = [p.tq.div_ceil(TOKENS), p.heads, 1];
    let args = [call.block()].into_iter().chain(call::d_lse(p, launch, at)).collect();
    launch_blocks(function, grid, 8 * TOKENS as u32, 0, args)
}
