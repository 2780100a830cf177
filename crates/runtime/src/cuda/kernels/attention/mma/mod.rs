//! Our attention on `mma.sync`, for every GPU from sm_80, with any mask and segments.
//!
//! bf16, head sizes of 16 to 256 in steps of 8. Deterministic in both directions.

use std::borrow::Cow;

use flatout_ir::Launch;
use flatout_ir::ops::attention::{Mask, Segments};
use flatout_ir::types::DType;

use super::Problem;
use super::call::{self, Call};
use super::delta;
use super::scratch::Scratch;
use super::tiles::{self, Heights};
use crate::cuda::argument::launch_blocks;
use crate::cuda::context::{CudaError, Facts, Prepare, Source, Work, sequence};

/// The kernels, each compiled from a separate source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MmaKernel {
    Forward,
    Dq,
    Dkv,
}

impl MmaKernel {
    fn entry(self) -> &'static str {
        match self {
            MmaKernel::Forward => "mma_forward",
            MmaKernel::Dq => "mma_dq",
            MmaKernel::Dkv => "mma_dkv",
        }
    }
}

/// Classes of GPUs that differ in the shared memory of a block, which it may have to share with other blocks of a
/// multiprocessor (1 KiB more in total), and in how many registers the assembler uses for the same source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Chip {
    /// sm_86, sm_89 and sm_120.
    Consumer,
    /// sm_80.
    Ampere,
    Hopper,
    /// sm_100.
    Blackwell,
}

impl Chip {
    const ALL: [Chip; 4] = [Chip::Consumer, Chip::Ampere, Chip::Hopper, Chip::Blackwell];

    fn shared_bytes(self) -> usize {
        match self {
            Chip::Consumer => 99 << 10,
            Chip::Ampere => 163 << 10,
            Chip::Hopper | Chip::Blackwell => 227 << 10,
        }
    }

    /// The largest class that fits the device's shared memory. `None` for older GPUs.
    fn of(facts: &Facts) -> Option<Chip> {
        let largest = if facts.major >= 10 { Chip::Blackwell } else { Chip::Hopper };
        let fits = |chip: &Chip| facts.shared_bytes as usize >= chip.shared_bytes();
        [largest, Chip::Ampere, Chip::Consumer].into_iter().find(fits).filter(|_| facts.major >= 8)
    }
}

/// The layout of a block: defines with the same meaning in the sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Geometry {
    warps: usize,
    /// 16-row tiles of the owned side per warp (MS). With two, every fragment of the walked side is used twice.
    tiles: usize,
    /// Rows of the walked side per step.
    walk: usize,
    /// Whether the owned side's fragments stay in registers.
    kept: bool,
    /// Thread blocks per multiprocessor, for the launch bounds.
    blocks: usize,
    /// Warps that share the same owned rows, each with a part of the columns of the sums.
    split: usize,
}

impl Geometry {
    const fn new(warps: usize, tiles: usize, walk: usize, kept: bool, blocks: usize) -> Self {
        Geometry { warps, tiles, walk, kept, blocks, split: 1 }
    }

    /// As `self`, with pairs of warps that share rows.
    const fn split(self) -> Self {
        Geometry { split: 2, ..self }
    }

    /// Chosen by times on an H200; for the other classes by blocks per multiprocessor and by what fits. If rows attend to few
    /// keys, small blocks hide each other's prologues and epilogues.
    fn of(part: MmaKernel, size: usize, mask: Mask, chip: Chip, is_short: bool) -> Self {
        use Chip::{Ampere, Blackwell, Consumer};
        let g = Geometry::new;
        match (part, size, chip) {
            (MmaKernel::Forward, ..=64, _) if is_short => g(4, 1, 32, true, 4),
            (MmaKernel::Forward, ..=64, _) => g(4, 2, 64, true, 2),
            (MmaKernel::Forward, ..=128, Consumer) => g(4, 1, 32, true, 2),
            (MmaKernel::Forward, ..=128, _) => g(4, 2, 32, false, 2),
            (MmaKernel::Forward, _, Consumer) => g(8, 1, 16, true, 1),
            (MmaKernel::Forward, _, Ampere) => g(8, 1, 32, false, 1),
            (MmaKernel::Forward, _, _) => g(4, 1, 32, false, 2),

            (MmaKernel::Dq, ..=64, Consumer) => g(4, 1, 32, true, 3),
            (MmaKernel::Dq, ..=64, Blackwell) if is_short => g(4, 1, 32, false, 3),
            (MmaKernel::Dq, ..=64, Blackwell) => g(4, 2, 32, false, 2),
            (MmaKernel::Dq, ..=64, _) if is_short => g(4, 1, 32, false, 4),
            (MmaKernel::Dq, ..=64, _) => g(4, 2, 32, true, 2),
            (MmaKernel::Dq, ..=128, Consumer) => g(4, 1, 16, true, 2),
            (MmaKernel::Dq, ..=128, _) => g(4, 1, 32, true, 2),
            (MmaKernel::Dq, _, Consumer) => g(4, 1, 16, false, 1),
            (MmaKernel::Dq, _, Ampere) => g(6, 1, 16, false, 1),
            (MmaKernel::Dq, _, _) => g(4, 1, 16, false, 2),

            (MmaKernel::Dkv, ..=64, Consumer) => g(4, 1, 32, false, 2),
            (MmaKernel::Dkv, ..=64, _) if mask == Mask::TwoIntervals => g(4, 1, 32, false, 3),
            (MmaKernel::Dkv, ..=64, _) if is_short && mask == Mask::Full => g(2, 2, 32, false, 4),
            (MmaKernel::Dkv, ..=64, _) => g(4, 2, 32, false, 2),
            (MmaKernel::Dkv, ..=128, Consumer) => g(8, 1, 16, false, 1),
            (MmaKernel::Dkv, ..=128, _) => g(4, 2, 32, false, 2).split(),
            (MmaKernel::Dkv, _, Consumer) => g(6, 1, 16, false, 1).split(),
            (MmaKernel::Dkv, _, Ampere) => g(8, 1, 32, false, 1).split(),
            (MmaKernel::Dkv, _, _) => g(4, 1, 32, false, 2).split(),
        }
    }

    fn threads(&self) -> u32 {
        32 * self.warps as u32
    }

    /// Rows of the tile that a block owns.
    fn own(&self) -> usize {
        16 * self.tiles * self.warps / self.split
    }

    /// Columns of a tile in shared memory: a multiple of 16 for each of the warps that share them.
    fn dim(&self, size: usize) -> usize {
        size.next_multiple_of(16 * self.split)
    }

    /// Dynamic shared memory: two pipeline stages of the walked side's two tensors, and the owned side's one or two.
    fn shared_bytes(&self, part: MmaKernel, size: usize) -> usize {
        let row = 2 * (self.dim(size) + 8);
        let stage = 2 * self.walk * row;
        let owned = if part == MmaKernel::Forward { self.own() * row } else { 2 * self.own() * row };
        let exchange = if self.split == 2 { 2 * self.own() * (2 * self.walk + 16) } else { 0 };
        // Fragments kept in registers free their shared memory for the second stage.
        let rows = if self.kept { stage + stage.max(owned) } else { 2 * stage + owned };
        rows + exchange
    }
}

/// Number of keys per row below which blocks are small.
const FEW_KEYS: usize = 320;

/// Whether rows attend to few keys. Intervals count as few: their coverage is unknown, and their bookkeeping needs the
/// registers.
fn is_short(p: &Problem) -> bool {
    let typical = match p.k {
        Segments::Uniform { len } => len,
        // For a typical distribution of document lengths, the work-weighted mean length is 1.5 times the mean.
        Segments::Ragged { max_len, max_segments } => max_len.min(3 * p.tk / (2 * max_segments.max(1))),
    };
    match p.mask {
        Mask::Full => typical <= FEW_KEYS,
        Mask::Causal => typical / 2 <= FEW_KEYS,
        Mask::Window { back, ahead } => typical.min(back.saturating_add(ahead)) <= FEW_KEYS,
        Mask::TwoIntervals => true,
    }
}

/// Inputs of a geometry besides the problem.
#[derive(Clone, Copy)]
struct Constraints {
    chip: Chip,
    /// Whether a segment must give the same bits in any batch, and so the same geometry whatever the lengths.
    equal_bits: bool,
}

impl Constraints {
    fn of(facts: &Facts) -> Option<Constraints> {
        Some(Constraints { chip: Chip::of(facts)?, equal_bits: facts.deterministic })
    }
}

fn geometry(p: &Problem, part: MmaKernel, constraints: Constraints) -> Geometry {
    Geometry::of(part, p.size, p.mask, constraints.chip, constraints.equal_bits || is_short(p))
}

fn heights(p: &Problem, constraints: Constraints) -> Heights {
    let own = |part: MmaKernel| geometry(p, part, constraints).own();
    match p.grad {
        false => Heights { q: Some(own(MmaKernel::Forward)), k: None },
        true => Heights { q: Some(own(MmaKernel::Dq)), k: Some(own(MmaKernel::Dkv)) },
    }
}

fn is_served(p: &Problem) -> bool {
    // The running maximum is of unscaled scores, which requires a scale that preserves their order.
    p.dtype == DType::BF16 && (16..=256).contains(&p.size) && p.size.is_multiple_of(8) && p.scale > 0.0
}

pub(super) fn serves(p: &Problem, facts: &Facts) -> bool {
    is_served(p) && Chip::of(facts).is_some()
}

/// The maximum over all classes of GPUs.
pub(super) fn workspace(p: &Problem) -> usize {
    if !is_served(p) {
        return 0;
    }
    let kinds = Chip::ALL.into_iter();
    let kinds = kinds.flat_map(|chip| [false, true].map(|equal_bits| Constraints { chip, equal_bits }));
    let lists = kinds.map(|constraints| tiles::workspace(p, heights(p, constraints)));
    lists.max().unwrap_or(0) + if p.grad { delta::bytes(p) } else { 0 }
}

fn parts(p: &Problem) -> &'static [MmaKernel] {
    if p.grad { &[MmaKernel::Dq, MmaKernel::Dkv] } else { &[MmaKernel::Forward] }
}

/// Dynamic shared memory of a source's kernel.
pub(super) fn shared_bytes(p: &Problem, facts: &Facts, of: &Source) -> usize {
    let Some(constraints) = Constraints::of(facts) else { return 0 };
    let is_its = |part: &&MmaKernel| source(p, **part, constraints) == *of;
    parts(p).iter().find(is_its).map_or(0, |&part| geometry(p, part, constraints).shared_bytes(part, p.size))
}

pub(super) fn sources(p: &Problem, facts: &Facts) -> Vec<Source> {
    let Some(constraints) = Constraints::of(facts) else { return vec![] };
    let kernels = parts(p).iter().map(|&part| source(p, part, constraints));
    kernels.chain(p.grad.then(|| delta::source(p))).chain(tiles::sources(p)).collect()
}

macro_rules! with_headers {
    ($file:literal) => {
        concat!(
            include_str!("../../prelude.cuh"),
            include_str!("../call.cuh"),
            include_str!("../../matrices.cuh"),
            include_str!("../../mma.cuh"),
            include_str!("mma.cuh"),
            include_str!($file)
        )
    };
}

fn source(p: &Problem, part: MmaKernel, constraints: Constraints) -> Source {
    let g = geometry(p, part, constraints);
    let (name, code) = match part {
        MmaKernel::Forward => ("attention/mma/forward.cu", with_headers!("forward.cu")),
        MmaKernel::Dq => ("attention/mma/dq.cu", with_headers!("dq.cu")),
        MmaKernel::Dkv => ("attention/mma/dkv.cu", with_headers!("dkv.cu")),
    };
    let own = [
        ("SIZE", p.size),
        ("DIM", g.dim(p.size)),
        ("WARPS", g.warps),
        ("MS", g.tiles),
        ("WALK", g.walk),
        ("KEPT", g.kept as usize),
        ("BLOCKS", g.blocks),
        ("SPLIT", g.split),
    ];
    let own = own.into_iter().map(|(name, value)| (name.into(), value.to_string()));
    Source { name, code: Cow::Borrowed(code), defines: own.chain(call::defines(p)).collect() }
}

pub(super) fn prepare(p: &Problem, launch: &Launch, at: &Prepare<'_>) -> Result<Box<dyn Work>, CudaError> {
    let Some(constraints) = Constraints::of(at.facts()) else {
        return Err(CudaError::new("attention on mma.sync needs an sm_80 or later"));
    };
    let mut scratch = Scratch::of(launch, at);
    let mut call = Call::of(p, launch, at);
    if p.grad {
        call.delta = scratch.take(delta::bytes(p))?;
    }
    let mut works: Vec<Box<dyn Work>> = vec![];
    works.extend(tiles::prepare(p, &mut call, heights(p, constraints), &mut scratch, at)?);
    if p.grad {
        works.push(delta::prepare(p, launch, &call, at)?);
    }
    let (q_tiles, k_tiles) = (call.q_tile_count as usize, call.k_tile_count as usize);
    for &part in parts(p) {
        let (tiles, heads, is_wanted) = match part {
            MmaKernel::Forward => (q_tiles, p.heads, true),
            MmaKernel::Dq => (q_tiles, p.heads, call.dq.at != 0),
            MmaKernel::Dkv => (k_tiles, p.kv_heads, call.dk.at != 0 || call.dv.at != 0),
        };
        if is_wanted {
            let g = geometry(p, part, constraints);
            let function = at.function(&source(p, part, constraints), part.entry())?;
            let shared = g.shared_bytes(part, p.size) as u32;
            works.push(launch_blocks(function, [tiles, heads, 1], g.threads(), shared, vec![call.block()])?);
        }
    }
    Ok(sequence(works))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The static shared memory of `Told` in dkv.cu: lse, delta and intervals of two stages.
    fn static_bytes(part: MmaKernel, g: &Geometry) -> usize {
        if part == MmaKernel::Dkv { 2 * g.walk * (4 + 4 + 16) } else { 0 }
    }

    const MASKS: [Mask; 4] =
        [Mask::Full, Mask::Causal, Mask::Window { back: 9, ahead: 0 }, Mask::TwoIntervals];

    fn each(check: impl Fn(MmaKernel, usize, Chip, Geometry)) {
        for size in (16..=256).step_by(8) {
            for part in [MmaKernel::Forward, MmaKernel::Dq, MmaKernel::Dkv] {
                for chip in Chip::ALL {
                    for (mask, is_short) in MASKS.map(|mask| [(mask, false), (mask, true)]).concat() {
                        check(part, size, chip, Geometry::of(part, size, mask, chip, is_short));
                    }
                }
            }
        }
    }

    #[test]
    fn every_head_size_fits_in_the_shared_memory_of_every_chip() {
        each(|part, size, chip, g| {
            let bytes = g.shared_bytes(part, size) + static_bytes(part, &g);
            assert!(bytes <= chip.shared_bytes(), "{part:?} of {size} takes {bytes} on {chip:?}");
        });
    }

    /// On Hopper, where they were timed, as many blocks fit on a multiprocessor as the launch bounds assume. A block costs 1
    /// KiB of shared memory in addition.
    #[test]
    fn blocks_fit_side_by_side() {
        each(|part, size, chip, g| {
            let bytes = g.blocks * (g.shared_bytes(part, size) + static_bytes(part, &g) + 1024);
            assert!(chip != Chip::Hopper || bytes <= 228 << 10, "{part:?} of {size}: {bytes}");
            assert!(g.blocks * g.warps <= 16, "128 registers a thread are the fewest: {g:?}");
        });
    }

    /// The sources rely on whole pairs of warps, multiples of 16 walked rows, and columns in multiples of 16 for each warp of a
    /// pair.
    #[test]
    fn geometries_meet_the_sources_conditions() {
        each(|part, size, _, g| {
            assert!(g.warps.is_multiple_of(g.split) && g.walk.is_multiple_of(16), "{g:?}");
            assert!(g.split == 1 || (part == MmaKernel::Dkv && !g.kept), "{g:?}");
            assert!(g.dim(size) >= size && g.dim(size).is_multiple_of(16 * g.split), "{g:?}");
        });
    }
}
