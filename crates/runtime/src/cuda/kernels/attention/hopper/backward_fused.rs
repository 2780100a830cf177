//! The backward pass on Hopper for long sequences and small heads: dq, dk and dv in one walk.
//!
//! dq is accumulated in device memory with atomic adds. Three launches: row statistics and cleared sums, the walk, rounding.

use std::borrow::Cow;

use flatout_ir::Launch;
use flatout_ir::ops::attention::Mask;

use super::PANEL;
use super::backward::{self, PANEL_BYTES, ROWS};
use crate::cuda::argument::{Block, launch_blocks};
use crate::cuda::context::{Arg, CudaError, Facts, Prepare, Source, Work, sequence};
use crate::cuda::kernels::attention::Problem;
use crate::cuda::kernels::attention::call::{self, Call};
use crate::cuda::kernels::attention::scratch::{ALIGN, Scratch};
use crate::cuda::kernels::attention::tiles::{self, Heights};

/// Keys per block.
const OWN: usize = 128;
/// Minimum number of keys; for fewer it was not compared with the deterministic kernels.
const LONG: usize = 1024;
const STAGES: usize = 4;
const OWN_STAGES: usize = 2;
const DS_STAGES: usize = 3;
const THREADS: u32 = 512;
/// Registers per thread that owns keys, that sums dq, and of the producer.
const REGISTERS: [usize; 3] = [192, 80, 48];

/// Whether it handles the problem, one that `backward` serves, if all gradients are requested.
pub(super) fn takes(p: &Problem, facts: &Facts) -> bool {
    is_long(p) && !facts.deterministic
}

fn is_long(p: &Problem) -> bool {
    p.size <= PANEL && p.k_longest() >= LONG
}

fn heights() -> Heights {
    Heights { q: Some(ROWS), k: Some(OWN) }
}

fn sums_bytes(p: &Problem) -> usize {
    (4 * p.tq * p.heads * p.size.next_multiple_of(16)).next_multiple_of(ALIGN)
}

/// 0 if it does not handle the problem.
pub(super) fn workspace(p: &Problem) -> usize {
    if is_long(p) {
        backward::statistics_bytes(p) + sums_bytes(p) + tiles::workspace(p, heights())
    } else {
        0
    }
}

pub(super) fn source(p: &Problem) -> Source {
    let [registers, of_dq, of_feeders] = REGISTERS;
    let own = [
        ("SIZE", p.size),
        ("GROUPS", 2),
        ("HEADS", 1),
        ("SUMMED", 1),
        ("STAGES", STAGES),
        ("OWN_STAGES", OWN_STAGES),
        ("DS_STAGES", DS_STAGES),
        ("REGISTERS", registers),
        ("DQ_REGISTERS", of_dq),
        ("FEEDER_REGISTERS", of_feeders),
    ];
    let defines = own.map(|(name, value)| (name.into(), value.to_string()));
    Source {
        name: "attention/hopper/backward_fused.cu",
        code: Cow::Borrowed(backward_source!("sums.cuh", "../../matrices.cuh", "backward_fused.cu")),
        defines: defines.into_iter().chain(call::defines(p)).collect(),
    }
}

pub(super) fn sources(p: &Problem) -> [Source; 2] {
    [backward::rows_source(p, true), source(p)]
}

/// Matches AT_BARRIERS in the source, plus the barriers.
pub(super) fn shared_bytes(p: &Problem) -> usize {
    let seen = if p.mask == Mask::TwoIntervals { 16 * ROWS } else { 0 };
    let walked = 2 * PANEL_BYTES + 2 * 4 * ROWS + seen + 16;
    let own = 2 * (OWN / ROWS) * PANEL_BYTES + 32;
    let slopes = OWN / ROWS * PANEL_BYTES;
    let sums = 2 * 4 * ROWS * p.size.next_multiple_of(16);
    let barriers = 8 * (2 * STAGES + 2 * OWN_STAGES + 3 * DS_STAGES);
    STAGES * walked + OWN_STAGES * own + DS_STAGES * slopes + sums + barriers
}

pub(super) fn prepare(p: &Problem, launch: &Launch, at: &Prepare<'_>) -> Result<Box<dyn Work>, CudaError> {
    let facts = at.facts();
    let mut call = Call::of(p, launch, at);
    let mut scratch = Scratch::of(launch, at);
    call.delta = scratch.take(backward::statistics_bytes(p))?;
    call.scratch = scratch.take(sums_bytes(p))?;
    let mut works: Vec<Box<dyn Work>> = vec![];
    works.extend(tiles::prepare(p, &mut call, heights(), &mut scratch, at)?);

    let [rows, walk] = sources(p);
    works.push(backward::measure(p, launch, &call, &rows, at)?);

    let work = call.k_tile_count as usize * p.kv_heads;
    if i32::try_from(work).is_err() {
        return Err(CudaError::new(format!("{work} tiles are too many")));
    }
    let mut args = vec![call.block()];
    args.extend(backward::walked_maps(p, &call, at)?);
    args.push(Block::from(Arg::I32(backward::section(p, true, 1, facts))));
    let grid = [work.min(facts.sms as usize), 1, 1];
    works.push(launch_blocks(
        at.function(&walk, "wgmma_fused")?,
        grid,
        THREADS,
        shared_bytes(p) as u32,
        args,
    )?);

    let grid = [call.q_tile_count as usize, p.heads, 1];
    works.push(launch_blocks(at.function(&rows, "wgmma_round")?, grid, 256, 0, vec![call.block()])?);
    Ok(sequence(works))
}

#[cfg(test)]
mod tests {
    use super::*;
    use flatout_ir::ops::attention::Segments;
    use flatout_ir::ops::cap::Cap;
    use flatout_ir::types::DType;

    /// 227 KiB per block; 65,536 registers over its threads.
    #[test]
    fn every_form_fits_in_a_multiprocessor() {
        let uniform = Segments::Uniform { len: 2048 };
        for mask in [Mask::Causal, Mask::TwoIntervals] {
            let p = Problem {
                grad: true,
                d_lse: false,
                dtype: DType::BF16,
                tq: 8192,
                tk: 8192,
                heads: 12,
                kv_heads: 4,
                size: PANEL,
                scale: 1.0,
                cap: Cap::NONE,
                mask,
                q: uniform,
                k: uniform,
            };
            assert!(shared_bytes(&p) <= 227 << 10, "{mask:?} takes {}", shared_bytes(&p));
        }
        let [own, of_dq, of_feeders] = REGISTERS;
        assert_eq!(128 * (2 * own + of_dq + of_feeders), 65536);
    }
}
