//! Our attention on mma.sync, for every GPU from sm_80 on: bf16, heads of 16 to 256 in steps of 8, any mask and
//! segments. Deterministic in both directions.

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

/// The kernels, each compiled alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Forward,
    Dq,
    Dkv,
}

impl Part {
    fn entry(self) -> &'static str {
        match self {
            Part::Forward => "mma_forward",
            Part::Dq => "mma_dq",
            Part::Dkv => "mma_dkv",
        }
    }
}

/// Shared memory of a multiprocessor, which is what blocks a block has to share with: 100 KiB on sm_86, sm_89 and sm_120
/// (99 a block), 164 on sm_80, 228 on sm_90 and sm_100.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Room {
    Small,
    Middle,
    Large,
}

impl Room {
    /// The least a GPU of the kind gives to a block.
    fn bytes(self) -> u32 {
        match self {
            Room::Small => 99 << 10,
            Room::Middle => 163 << 10,
            Room::Large => 227 << 10,
        }
    }

    fn of(facts: &Facts) -> Option<Room> {
        let kinds = [Room::Large, Room::Middle, Room::Small];
        kinds.into_iter().find(|room| facts.shared_bytes >= room.bytes())
    }
}

/// How a block is laid out: the defines of the same meaning in the sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Geometry {
    warps: usize,
    /// 16-row tiles of the owned side a warp holds (MS). With two, every fragment of the walked side serves twice.
    tiles: usize,
    /// Rows of the walked side a step.
    walk: usize,
    /// Whether the owned side's fragments stay in registers.
    kept: bool,
    /// Blocks a multiprocessor that registers are dealt for.
    blocks: usize,
    /// Warps that share the same owned rows, each with its part of the columns of the sums.
    split: usize,
}

impl Geometry {
    const fn new(warps: usize, tiles: usize, walk: usize, kept: bool, blocks: usize) -> Self {
        Geometry { warps, tiles, walk, kept, blocks, split: 1 }
    }

    /// Pairs of warps with the same rows.
    const fn split(self) -> Self {
        Geometry { split: 2, ..self }
    }

    /// Chosen by times on an H200; what has less shared memory, by blocks a multiprocessor and what fits.
    /// Where rows meet few keys, smaller blocks hide each other's beginnings and ends.
    fn of(part: Part, size: usize, room: Room, is_short: bool) -> Self {
        let g = Geometry::new;
        match (part, size, room) {
            (Part::Forward, ..=64, _) if is_short => g(4, 1, 32, true, 4),
            (Part::Forward, ..=64, _) => g(4, 2, 64, true, 2),
            (Part::Forward, ..=128, Room::Small) => g(4, 1, 32, true, 2),
            (Part::Forward, ..=128, _) => g(4, 2, 32, false, 2),
            (Part::Forward, _, Room::Small) => g(8, 1, 16, true, 1),
            (Part::Forward, _, Room::Middle) => g(8, 1, 32, false, 1),
            (Part::Forward, _, Room::Large) => g(4, 1, 32, false, 2),

            (Part::Dq, ..=64, Room::Small) if is_short => g(4, 1, 32, true, 3),
            (Part::Dq, ..=64, _) if is_short => g(4, 1, 32, false, 4),
            (Part::Dq, ..=64, _) => g(4, 2, 32, true, 2),
            (Part::Dq, ..=128, Room::Small) => g(4, 1, 16, true, 2),
            (Part::Dq, ..=128, _) => g(4, 1, 32, true, 2),
            (Part::Dq, _, Room::Small) => g(4, 1, 16, false, 1),
            (Part::Dq, _, Room::Middle) => g(6, 1, 16, false, 1),
            (Part::Dq, _, Room::Large) => g(4, 1, 16, false, 2),

            (Part::Dkv, ..=64, Room::Small) => g(4, 1, 32, false, 2),
            (Part::Dkv, ..=64, _) if is_short => g(2, 2, 32, false, 4),
            (Part::Dkv, ..=64, _) => g(4, 2, 32, false, 2),
            (Part::Dkv, ..=128, Room::Small) => g(8, 1, 16, false, 1),
            (Part::Dkv, ..=128, _) => g(4, 2, 32, false, 2).split(),
            (Part::Dkv, _, Room::Small) => g(6, 1, 16, false, 1).split(),
            (Part::Dkv, _, Room::Middle) => g(8, 1, 32, false, 1).split(),
            (Part::Dkv, _, Room::Large) => g(4, 1, 32, false, 2).split(),
        }
    }

    fn threads(&self) -> u32 {
        32 * self.warps as u32
    }

    /// Rows of the tile a block owns.
    fn own(&self) -> usize {
        16 * self.tiles * self.warps / self.split
    }

    /// Columns of a tile in shared memory: whole steps of 16, for each of the warps that share them.
    fn dim(&self, size: usize) -> usize {
        size.next_multiple_of(16 * self.split)
    }

    /// Dynamic shared memory: two stages of the walked side's two tensors, the owned side's one or two.
    fn shared_bytes(&self, part: Part, size: usize) -> usize {
        let row = 2 * (self.dim(size) + 8);
        let stage = 2 * self.walk * row;
        let owned = if part == Part::Forward { self.own() * row } else { 2 * self.own() * row };
        let exchange = if self.split == 2 { 2 * self.own() * (2 * self.walk + 16) } else { 0 };
        // Fragments that stay in registers leave their place to the second stage.
        let rows = if self.kept { stage + stage.max(owned) } else { 2 * stage + owned };
        rows + exchange
    }
}

/// Keys a row meets, about, below which blocks are small.
const FEW_KEYS: usize = 320;

/// Whether rows meet few keys. Intervals count as such: what they cover is not known, and their bookkeeping wants the
/// registers.
fn is_short(p: &Problem) -> bool {
    let typical = match p.k {
        Segments::Uniform { len } => len,
        // Lengths as people's documents have them: half as many again, weighted by work, as the mean.
        Segments::Ragged { max_len, max_segments } => max_len.min(3 * p.tk / (2 * max_segments.max(1))),
    };
    match p.mask {
        Mask::Full => typical <= FEW_KEYS,
        Mask::Causal => typical / 2 <= FEW_KEYS,
        Mask::Window { back, ahead } => typical.min(back.saturating_add(ahead)) <= FEW_KEYS,
        Mask::TwoIntervals => true,
    }
}

/// What a geometry follows from beside the problem.
#[derive(Clone, Copy)]
struct Given {
    room: Room,
    /// Whether a segment must have the same bits in any company, and so the same geometry whatever the lengths.
    equal_bits: bool,
}

impl Given {
    fn of(facts: &Facts) -> Option<Given> {
        Some(Given { room: Room::of(facts)?, equal_bits: facts.deterministic })
    }
}

fn geometry(p: &Problem, part: Part, given: Given) -> Geometry {
    Geometry::of(part, p.size, given.room, given.equal_bits || is_short(p))
}

fn heights(p: &Problem, given: Given) -> Heights {
    let own = |part: Part| geometry(p, part, given).own();
    match p.grad {
        false => Heights { q: Some(own(Part::Forward)), k: None },
        true => Heights { q: Some(own(Part::Dq)), k: Some(own(Part::Dkv)) },
    }
}

fn is_served(p: &Problem) -> bool {
    // The running maximum is of unscaled scores, which needs a scale that keeps their order.
    p.dtype == DType::BF16 && (16..=256).contains(&p.size) && p.size.is_multiple_of(8) && p.scale > 0.0
}

pub(super) fn serves(p: &Problem, facts: &Facts) -> bool {
    is_served(p) && facts.major >= 8 && Room::of(facts).is_some()
}

/// The largest of what the kinds of GPUs need.
pub(super) fn workspace(p: &Problem) -> usize {
    if !is_served(p) {
        return 0;
    }
    let kinds = [Room::Small, Room::Middle, Room::Large].into_iter();
    let kinds = kinds.flat_map(|room| [false, true].map(|equal_bits| Given { room, equal_bits }));
    let lists = kinds.map(|given| tiles::workspace(p, heights(p, given)));
    lists.max().unwrap_or(0) + if p.grad { delta::bytes(p) } else { 0 }
}

fn parts(p: &Problem) -> &'static [Part] {
    if p.grad { &[Part::Dq, Part::Dkv] } else { &[Part::Forward] }
}

/// Dynamic shared memory, the most of its kernels.
pub(super) fn shared_bytes(p: &Problem, facts: &Facts) -> usize {
    let of = |given| parts(p).iter().map(move |&part| geometry(p, part, given).shared_bytes(part, p.size));
    Given::of(facts).into_iter().flat_map(of).max().unwrap_or(0)
}

pub(super) fn sources(p: &Problem, facts: &Facts) -> Vec<Source> {
    let Some(given) = Given::of(facts) else { return vec![] };
    let kernels = parts(p).iter().map(|&part| source(p, part, given));
    kernels.chain(p.grad.then(|| delta::source(p))).chain(tiles::sources(p)).collect()
}

macro_rules! with_headers {
    ($file:literal) => {
        concat!(
            include_str!("../../prelude.cuh"),
            include_str!("../call.cuh"),
            include_str!("mma.cuh"),
            include_str!($file)
        )
    };
}

fn source(p: &Problem, part: Part, given: Given) -> Source {
    let g = geometry(p, part, given);
    let (name, code) = match part {
        Part::Forward => ("attention/mma/forward.cu", with_headers!("forward.cu")),
        Part::Dq => ("attention/mma/dq.cu", with_headers!("dq.cu")),
        Part::Dkv => ("attention/mma/dkv.cu", with_headers!("dkv.cu")),
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
    let shared = at.facts().shared_bytes;
    let given = Given::of(at.facts());
    let given =
        given.ok_or_else(|| CudaError::new(format!("{shared} bytes of shared memory are too few")))?;
    let mut scratch = Scratch::of(launch, at);
    let mut call = Call::of(p, launch, at);
    if p.grad {
        call.delta = scratch.take(delta::bytes(p))?;
    }
    let mut works: Vec<Box<dyn Work>> = vec![];
    works.extend(tiles::prepare(p, &mut call, heights(p, given), &mut scratch, at)?);
    if p.grad {
        works.push(delta::prepare(p, launch, &call, at)?);
    }
    let (q_tiles, k_tiles) = (call.q_tile_count as usize, call.k_tile_count as usize);
    for &part in parts(p) {
        let (tiles, heads, is_wanted) = match part {
            Part::Forward => (q_tiles, p.heads, true),
            Part::Dq => (q_tiles, p.heads, call.dq.at != 0),
            Part::Dkv => (k_tiles, p.kv_heads, call.dk.at != 0 || call.dv.at != 0),
        };
        if is_wanted {
            let g = geometry(p, part, given);
            let function = at.function(&source(p, part, given), part.entry())?;
            let shared = g.shared_bytes(part, p.size) as u32;
            works.push(launch_blocks(function, [tiles, heads, 1], g.threads(), shared, vec![call.block()])?);
        }
    }
    Ok(sequence(works))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What `Told` of dkv.cu takes beside the dynamic memory: lse, delta and intervals of two stages.
    fn static_bytes(part: Part, g: &Geometry) -> usize {
        if part == Part::Dkv { 2 * g.walk * (4 + 4 + 16) } else { 0 }
    }

    #[test]
    fn every_head_size_fits_in_the_shared_memory_of_every_kind_of_gpu() {
        for size in (16..=256).step_by(8) {
            for room in [Room::Small, Room::Middle, Room::Large] {
                for (part, is_short) in
                    [Part::Forward, Part::Dq, Part::Dkv].map(|p| [(p, false), (p, true)]).concat()
                {
                    let g = Geometry::of(part, size, room, is_short);
                    let bytes = g.shared_bytes(part, size) + static_bytes(part, &g);
                    assert!(bytes <= room.bytes() as usize, "{part:?} of {size} takes {bytes} in {room:?}");
                    // A multiprocessor has 1 KiB more than a block may take, and a block costs 1 KiB itself.
                    let all = g.blocks * (bytes + 1024);
                    let sm = room.bytes() as usize + 1024;
                    let is_wide = size <= 64 || room == Room::Large;
                    assert!(
                        !is_wide || room == Room::Small || all <= sm,
                        "{part:?} of {size}: {} blocks",
                        g.blocks
                    );
                }
            }
        }
    }

    /// The sources' own conditions: whole pairs of warps, 16 walked rows for each of a pair's halves, columns in steps of 8.
    #[test]
    fn geometries_keep_the_kernels_conditions() {
        for size in (16..=256).step_by(8) {
            for room in [Room::Small, Room::Middle, Room::Large] {
                for (part, is_short) in
                    [Part::Forward, Part::Dq, Part::Dkv].map(|p| [(p, false), (p, true)]).concat()
                {
                    let g = Geometry::of(part, size, room, is_short);
                    assert!(g.warps.is_multiple_of(g.split) && g.walk.is_multiple_of(16), "{g:?}");
                    assert!(g.split == 1 || (part == Part::Dkv && !g.kept), "{g:?}");
                    assert!(g.dim(size) >= size && (g.dim(size) / g.split).is_multiple_of(16), "{g:?}");
                }
            }
        }
    }
}
