//! Our attention kernel without tensor cores, the fallback for shapes and types that no other family serves.
//!
//! It supports f32, ragged segments, look-ahead windows, two intervals, odd head sizes and GPUs without cuDNN. Deterministic.

use std::borrow::Cow;

use flatout_ir::Launch;
use flatout_ir::types::DType;

use super::Problem;
use super::call::{self, Call};
use super::scratch::{ALIGN, Scratch};
use super::tiles::{self, Heights};
use crate::cuda::argument::{Block, launch_blocks};
use crate::cuda::context::{CudaError, Prepare, Source, Work, sequence};

const THREADS: u32 = 128;
/// The largest head size that the kernel's registers and shared memory are laid out for.
const MOST_SIZE: usize = 256;

/// Rows of the owned tile and of the tiles looped over, chosen to fit the 99 KiB of shared memory that every GPU from sm_80 on
/// has, with the accumulators in registers.
fn tile(p: &Problem) -> (usize, usize) {
    match (p.grad, p.size) {
        (false, ..=64) => (64, 64),
        (false, ..=128) => (64, 32),
        (false, _) => (32, 32),
        (true, ..=128) => (32, 32),
        (true, _) => (16, 16),
    }
}

/// Dynamic shared memory: tiles of owned rows and of rows looped over, and the weight matrices between them.
fn shared_bytes(p: &Problem, owned: usize, walked: usize, weights: usize) -> u32 {
    let (own, walk) = tile(p);
    let pitch = p.size.next_multiple_of(8) + 1;
    (4 * ((owned * own + walked * walk) * pitch + weights * own * (walk + 1))) as u32
}

/// Dynamic shared memory: the maximum over the kernels of a source.
pub(super) fn most_shared_bytes(p: &Problem, of: &Source) -> usize {
    match p.grad {
        _ if *of != source(p) => 0,
        true => shared_bytes(p, 2, 2, 2) as usize,
        false => shared_bytes(p, 1, 1, 1) as usize,
    }
}

/// Bytes of delta = sum(do o) - dlse per row, for the backward pass.
fn delta_bytes(p: &Problem) -> usize {
    (4 * p.tq * p.heads).next_multiple_of(ALIGN)
}

pub(super) fn workspace(p: &Problem) -> usize {
    tiles::workspace(p, heights(p)) + if p.grad { delta_bytes(p) } else { 0 }
}

/// Heights of the tiles; the forward pass only tiles queries.
fn heights(p: &Problem) -> Heights {
    let (own, _) = tile(p);
    Heights { q: Some(own), k: p.grad.then_some(own) }
}

pub(super) fn sources(p: &Problem) -> Vec<Source> {
    [source(p)].into_iter().chain(tiles::sources(p)).collect()
}

fn source(p: &Problem) -> Source {
    let (own, walk) = tile(p);
    let own_defines = [
        ("T_X", if p.dtype == DType::BF16 { "bf16" } else { "float" }.to_string()),
        ("SIZE", p.size.to_string()),
        ("GRAD", (p.grad as u32).to_string()),
        ("OWN", own.to_string()),
        ("WALK", walk.to_string()),
    ];
    let defines = call::defines(p);
    let code = concat!(include_str!("../prelude.cuh"), include_str!("call.cuh"), include_str!("flash.cu"));
    Source {
        name: "attention/flash.cu",
        code: Cow::Borrowed(code),
        defines: own_defines.map(|(name, value)| (name.into(), value)).into_iter().chain(defines).collect(),
    }
}

pub(super) fn prepare(p: &Problem, launch: &Launch, at: &Prepare<'_>) -> Result<Box<dyn Work>, CudaError> {
    if p.size > MOST_SIZE {
        let size = p.size;
        return Err(CudaError::new(format!(
            "a head size of {size} is more than the {MOST_SIZE} attention takes"
        )));
    }
    let mut scratch = Scratch::of(launch, at);
    let mut call = Call::of(p, launch, at);
    if p.grad {
        call.delta = scratch.take(delta_bytes(p))?;
    }
    let mut works: Vec<Box<dyn Work>> = vec![];
    works.extend(tiles::prepare(p, &mut call, heights(p), &mut scratch, at)?);
    let source = source(p);
    let mut push = |entry: &str, grid: [usize; 2], shared: u32, more: &[Block]| {
        let [x, y] = grid;
        let function = at.function(&source, entry)?;
        let args = [call.block()].into_iter().chain(more.iter().cloned()).collect();
        works.push(launch_blocks(function, [x, y, 1], THREADS, shared, args)?);
        Ok::<(), CudaError>(())
    };
    let (q_tiles, k_tiles) = (call.q_tile_count as usize, call.k_tile_count as usize);
    if !p.grad {
        push("flash_forward", [q_tiles, p.heads], shared_bytes(p, 1, 1, 1), &[])?;
    } else {
        push(
            "flash_delta",
            [(p.tq * p.heads).div_ceil(THREADS as usize / 32), 1],
            0,
            &call::d_lse(p, launch, at),
        )?;
        if call.dq.at != 0 {
            push("flash_dq", [q_tiles, p.heads], shared_bytes(p, 2, 2, 1), &[])?;
        }
        if call.dk.at != 0 || call.dv.at != 0 {
            push("flash_dkv", [k_tiles, p.kv_heads], shared_bytes(p, 2, 2, 2), &[])?;
        }
    }
    Ok(sequence(works))
}

#[cfg(test)]
mod tests {
    use super::*;
    use flatout_ir::ops::attention::{Mask, Segments};
    use flatout_ir::ops::cap::Cap;

    /// sm_86 and sm_89 have 99 KiB, of which 1 KiB is taken by the runtime and static shared memory.
    #[test]
    fn tiles_fit_in_the_smallest_shared_memory() {
        for size in 1..=MOST_SIZE {
            for grad in [false, true] {
                let p = Problem {
                    grad,
                    d_lse: false,
                    dtype: DType::F32,
                    tq: 8,
                    tk: 8,
                    heads: 1,
                    kv_heads: 1,
                    size,
                    scale: 1.0,
                    cap: Cap::NONE,
                    mask: Mask::Full,
                    q: Segments::Uniform { len: 8 },
                    k: Segments::Uniform { len: 8 },
                };
                let bytes = most_shared_bytes(&p, &source(&p));
                assert!(bytes <= 96 << 10, "{p:?} takes {bytes}");
            }
        }
    }
}
