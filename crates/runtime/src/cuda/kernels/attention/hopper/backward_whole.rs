//! The backward pass on Hopper for sequences that fit in a block: dq, dk and dv in one kernel, without workspace.

use std::borrow::Cow;

use flatout_ir::Launch;
use flatout_ir::ops::attention::Mask;

use super::{PANEL, rows_map};
use crate::cuda::argument::launch_blocks;
use crate::cuda::context::{CudaError, Facts, Prepare, Source, Work};
use crate::cuda::kernels::attention::Problem;
use crate::cuda::kernels::attention::call::{self, Call};

/// Rows of a tile, and of the narrow tile after the last.
const ROWS: usize = 64;
const NARROW: usize = 16;
/// Most rows that the narrow tile takes: as keys they are the columns of a product, which has at least 8.
const MOST_LAST: usize = 8;
const MOST_TILES: usize = 4;
/// Rows from which on it is faster than the kernels by tiles: 12 heads of 64, 512 x 65 0.281 ms instead of 0.425, 512 x 128
/// 0.307 instead of 0.407, 256 x 145 0.254 instead of 0.382, 256 x 197 0.327 instead of 0.652.
const SHORTEST: usize = 65;
const THREADS: u32 = 512;

/// How a sequence is divided: tiles of 64, and optionally up to 8 rows after them.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Cut {
    tiles: usize,
    has_last: bool,
}

impl Cut {
    fn of(rows: usize) -> Cut {
        let has_last = rows > ROWS && (1..=MOST_LAST).contains(&(rows % ROWS));
        Cut { tiles: if has_last { rows / ROWS } else { rows.div_ceil(ROWS) }, has_last }
    }

    /// Registers per thread that owns keys, that accumulates dq (32 per tile), and of the producer's warpgroup.
    fn registers(self) -> [usize; 3] {
        if self.tiles < MOST_TILES { [168, 136, 40] } else { [160, 160, 32] }
    }

    /// Matches AT_BARRIERS in the source, plus the barriers.
    fn shared_bytes(self) -> usize {
        let rows = ROWS * self.tiles + if self.has_last { NARROW } else { 0 };
        let slot = 2 * PANEL * rows;
        let exchanged = 4 * 2 * PANEL * ROWS + 3 * (self.tiles + 1) * 1024;
        5 * slot + exchanged + 2 * 4 * rows + 8 * (5 * (self.tiles + 1) + 9)
    }
}

/// Whether the kernel supports the problem.
fn is_written(p: &Problem) -> bool {
    !p.is_ragged()
        && p.mask == Mask::Full
        && p.heads == p.kv_heads
        && p.size <= PANEL
        && p.q_longest() == p.k_longest()
        && p.q_longest() <= ROWS * MOST_TILES + MOST_LAST
}

/// Whether it handles the problem, one that `backward` serves. `deterministic` requires equal bits for packed and separate
/// sequences, and packed ones are processed by tiles.
pub(super) fn takes(p: &Problem, facts: &Facts) -> bool {
    is_written(p) && p.q_longest() >= SHORTEST && !facts.deterministic
}

pub(super) fn source(p: &Problem) -> Source {
    let cut = Cut::of(p.q_longest());
    let [registers, of_dq, of_feeders] = cut.registers();
    let own = [
        ("SIZE", p.size),
        ("GROUPS", 2),
        ("HEADS", 1),
        ("TILES", cut.tiles),
        ("LAST", cut.has_last as usize),
        ("REGISTERS", registers),
        ("DQ_REGISTERS", of_dq),
        ("FEEDER_REGISTERS", of_feeders),
    ];
    let defines = own.map(|(name, value)| (name.into(), value.to_string()));
    Source {
        name: "attention/hopper/backward_whole.cu",
        code: Cow::Borrowed(backward_source!("backward_whole.cu")),
        defines: defines.into_iter().chain(call::defines(p)).collect(),
    }
}

pub(super) fn shared_bytes(p: &Problem) -> usize {
    Cut::of(p.q_longest()).shared_bytes()
}

pub(super) fn prepare(p: &Problem, launch: &Launch, at: &Prepare<'_>) -> Result<Box<dyn Work>, CudaError> {
    let call = Call::of(p, launch, at);
    let work = p.segments() * p.heads;
    if i32::try_from(work + at.facts().sms as usize).is_err() {
        return Err(CudaError::new(format!("{work} heads of sequences are too many")));
    }
    let mut args = vec![call.block()];
    for (of_keys, rows) in
        [(false, call.q), (false, call.d_o), (false, call.o), (true, call.k), (true, call.v)]
    {
        args.push(rows_map(p, of_keys, rows, [NARROW, 1], at)?);
    }
    args.extend(call::d_lse(p, launch, at));
    let function = at.function(&source(p), "wgmma_whole")?;
    let grid = [work.min(at.facts().sms as usize), 1, 1];
    launch_blocks(function, grid, THREADS, shared_bytes(p) as u32, args)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_few_rows_after_the_last_tile_get_a_narrow_tile() {
        let cuts = [1, 64, 65, 72, 73, 128, 197, 201, 256, 257, 264].map(|rows| {
            let cut = Cut::of(rows);
            assert!(rows <= ROWS * cut.tiles + if cut.has_last { MOST_LAST } else { 0 }, "{rows}: {cut:?}");
            (cut.tiles, cut.has_last)
        });
        let expected = [
            (1, false),
            (1, false),
            (1, true),
            (1, true),
            (2, false),
            (2, false),
            (3, true),
            (4, false),
            (4, false),
            (4, true),
            (4, true),
        ];
        assert_eq!(cuts, expected);
    }

    /// 227 KiB per block; 65,536 registers over its threads.
    #[test]
    fn every_sequence_fits_in_a_block() {
        for rows in 1..=ROWS * MOST_TILES + MOST_LAST {
            let cut = Cut::of(rows);
            let (bytes, [own, of_dq, of_feeders]) = (cut.shared_bytes(), cut.registers());
            assert!(cut.tiles <= MOST_TILES && bytes <= 227 << 10, "{cut:?} takes {bytes}");
            assert!(128 * (2 * own + of_dq + of_feeders) <= 65536, "{cut:?}");
        }
    }
}
