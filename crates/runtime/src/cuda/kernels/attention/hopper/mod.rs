//! Attention with Hopper's own instructions (sm_90a): wgmma products on tiles loaded by TMA.

/// A source of the backward pass, prefixed with the headers it includes.
macro_rules! backward_source {
    ($($file:literal),+) => {
        concat!(
            include_str!("../../prelude.cuh"),
            include_str!("../call.cuh"),
            include_str!("../../wgmma.cuh"),
            include_str!("backward.cuh"),
            $(include_str!($file)),+
        )
    };
}

pub(super) mod backward;
mod backward_fused;
mod backward_whole;
pub(super) mod forward;

use flatout_ir::types::DType;

use super::Problem;
use super::call::{Rows, is_ragged};
use crate::cuda::argument::Block;
use crate::cuda::context::{CudaError, Facts, Prepare};
use crate::cuda::tensor_map::{Swizzle, Tensor};

/// Elements per row of a TMA box: 128 bytes, the width of the swizzle.
const PANEL: usize = 64;

/// Whether the kernels support the problem, regardless of the GPU.
fn is_written(p: &Problem) -> bool {
    let has_rows = p.tq > 0 && p.tk > 0 && p.q_longest() > 0 && p.k_longest() > 0;
    p.dtype == DType::BF16
        && p.size.is_multiple_of(8)
        && (16..=256).contains(&p.size)
        && p.scale > 0.0
        && has_rows
}

fn is_hopper(facts: &Facts) -> bool {
    (facts.major, facts.minor) == (9, 0)
}

/// A tensor map of queries or keys [tokens, heads, size] with boxes of `tokens` rows of `heads` heads, 64 elements wide. If
/// segments are uniform, a box is zero-filled past the end of its segment.
fn rows_map(
    p: &Problem,
    of_keys: bool,
    rows: Rows,
    box_rows: [usize; 2],
    at: &Prepare<'_>,
) -> Result<Block, CudaError> {
    let (segments, tokens, heads, longest) = match of_keys {
        true => (p.k, p.tk, p.kv_heads, p.k_longest()),
        false => (p.q, p.tq, p.heads, p.q_longest()),
    };
    let [len, count] = if is_ragged(segments) { [tokens, 1] } else { [longest, p.segments()] };
    let (token, head) = (rows.token as u64, rows.head as u64);
    let [box_tokens, box_heads] = box_rows;
    at.tensor_map(&Tensor {
        at: rows.at,
        dtype: DType::BF16,
        dims: [p.size, heads, len, count].map(|n| n as u64).to_vec(),
        steps: vec![head, token, token * len as u64],
        box_dims: [PANEL, box_heads, box_tokens, 1].map(|n| n as u32).to_vec(),
        swizzle: Swizzle::Bytes128,
    })
}
