//! Launches the kernel that computes delta = sum(do o) - dlse per row, an input of the bf16 backward kernels.

use std::borrow::Cow;

use flatout_ir::Launch;

use super::Problem;
use super::call::{self, Call};
use super::scratch::ALIGN;
use crate::cuda::argument::launch_blocks;
use crate::cuda::context::{Prepare, Prepared, Source};

/// Tokens per block, 8 threads each.
const TOKENS: usize = 32;

/// Bytes of scratch for `Call::delta`.
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

/// Fills `call.delta` from o, do and, if given, the gradient of lse. Rows of o and do must be 16-byte aligned.
pub(super) fn prepare(p: &Problem, launch: &Launch, call: &Call, at: &Prepare<'_>) -> Prepared {
    let function = at.function(&source(p), "attention_delta")?;
    let grid = [p.tq.div_ceil(TOKENS), p.heads, 1];
    let args = [call.block()].into_iter().chain(call::d_lse(p, launch, at)).collect();
    launch_blocks(function, grid, 8 * TOKENS as u32, 0, args)
}
