//! Our attention on mma.sync, for every GPU from sm_80 on: bf16, heads of 16 to 256 in steps of 8, any mask and
//! segments. Deterministic in both directions.

use std::borrow::Cow;

use flatout_ir::Launch;
use flatout_ir::types::DType;

use super::Problem;
use super::call::{self, Call};
use super::scratch::{ALIGN, Scratch};
use super::tiles::{self, Heights};
use crate::cuda::argument::launch_blocks;
use crate::cuda::context::{CudaError, Facts, Prepare, Source, Work, sequence};

/// What a block may have on sm_86, sm_89 and sm_120, in bytes; the others have 163 KiB and more.
const SMALL_SHARED: u32 = 99 << 10;

/// The kernels, each compiled alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Forward,
    Delta,
    Dq,
    Dkv,
}

impl Part {
    fn entry(self) -> &'static str {
        match self {
            Part::Forward => "mma_forward",
            Part::Delta => "mma_delta",
            Part::Dq => "mma_dq",
            Part::Dkv => "mma_dkv",
        }
    }
}

/// How a block is laid out: the defines of the same names in the sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Geometry {
    warps: usize,
    /// 16-row tiles of the owned side a warp holds. With two, every fragment read of the walked side is used twice.
    tiles: usize,
    /// Rows of the walked side a step.
    walk: usize,
    /// Whether the owned side's fragments stay in registers.
    kept: bool,
    /// Blocks a multiprocessor that registers are dealt for.
    blocks: usize,
    /// Steps of the walked side in shared memory.
    stages: usize,
    /// Warps that share the same owned rows, each with its part of the columns of the sums.
    split: usize,
}

impl Geometry {
    const fn new(warps: usize, tiles: usize, walk: usize, kept: bool, blocks: usize) -> Self {
        Geometry { warps, tiles, walk, kept, blocks, stages: 2, split: 1 }
    }

    /// Two warps share their rows, so there are half as many rows.
    const fn split(self) -> Self {
        Geometry { split: 2, ..self }
    }

    const fn single(self) -> Self {
        Geometry { stages: 1, ..self }
    }

    fn of(part: Part, size: usize, shared_bytes: u32) -> Self {
        let is_small = shared_bytes < 160 << 10;
        let g = Geometry::new;
        match (part, size, is_small) {
            (Part::Forward, ..=64, _) => g(4, 2, 32, true, 2),
            (Part::Forward, ..=128, false) => g(4, 2, 32, false, 2),
            (Part::Forward, ..=128, true) => g(4, 1, 32, true, 2),
            (Part::Forward, _, false) => g(4, 1, 16, true, 2),
            (Part::Forward, _, true) => g(8, 1, 16, true, 1),
            (Part::Delta | Part::Dq, ..=64, _) => g(4, 2, 32, true, 2),
            (Part::Delta | Part::Dq, ..=128, false) => g(4, 1, 32, false, 2),
            (Part::Delta | Part::Dq, ..=128, true) => g(4, 1, 16, true, 2),
            (Part::Delta | Part::Dq, _, false) => g(4, 1, 32, false, 1),
            (Part::Delta | Part::Dq, _, true) => g(4, 1, 16, false, 1).single(),
            (Part::Dkv, ..=64, _) => g(4, 1, 64, true, 2),
            (Part::Dkv, ..=128, false) => g(4, 1, 32, false, 2),
            (Part::Dkv, ..=128, true) => g(8, 1, 16, false, 1),
            (Part::Dkv, _, false) => g(8, 1, 32, false, 1).split(),
            (Part::Dkv, _, true) => g(8, 1, 16, false, 1).single().split(),
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

    /// Dynamic shared memory.
    fn shared_bytes(&self, part: Part, size: usize) -> usize {
        let row = 2 * (self.dim(size) + 8);
        let step = 2 * self.walk * row;
        let owned = match part {
            Part::Forward => self.own() * row,
            Part::Dq | Part::Dkv => 2 * self.own() * row,
            Part::Delta => return 0,
        };
        let exchange = if self.split == 2 { 2 * self.own() * (2 * self.walk + 16) } else { 0 };
        // Fragments kept in registers leave the room of all stages but the first.
        let rows = if self.kept { step + owned.max((self.stages - 1) * step) } else { self.stages * step + owned };
        rows + exchange
    }
}

fn delta_bytes(p: &Problem) -> usize {
    (4 * p.tq * p.heads).next_multiple_of(ALIGN)
}

fn heights(p: &Problem, shared_bytes: u32) -> Heights {
    let own = |part: Part| Geometry::of(part, p.size, shared_bytes).own();
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
    is_served(p) && facts.major >= 8 && facts.shared_bytes >= SMALL_SHARED
}

/// The larger of what GPUs of either kind need.
pub(super) fn workspace(p: &Problem) -> usize {
    if !is_served(p) {
        return 0;
    }
    let lists = [SMALL_SHARED, u32::MAX].map(|shared| tiles::workspace(p, heights(p, shared)));
    lists.into_iter().max().unwrap_or(0) + if p.grad { delta_bytes(p) } else { 0 }
}

fn parts(p: &Problem) -> &'static [Part] {
    if p.grad { &[Part::Delta, Part::Dq, Part::Dkv] } else { &[Part::Forward] }
}

pub(super) fn sources(p: &Problem, facts: &Facts) -> Vec<Source> {
    let kernels = parts(p).iter().map(|&part| source(p, part, facts));
    kernels.chain(tiles::sources(p)).collect()
}

fn source(p: &Problem, part: Part, facts: &Facts) -> Source {
    let g = Geometry::of(part, p.size, facts.shared_bytes);
    let (name, code) = match part {
        Part::Forward => ("attention/mma/forward.cu", FORWARD),
        _ => ("attention/mma/backward.cu", BACKWARD),
    };
    let own = [
        ("PART", part as usize),
        ("SIZE", p.size),
        ("DIM", g.dim(p.size)),
        ("WARPS", g.warps),
        ("MS", g.tiles),
        ("WALK", g.walk),
        ("KEPT", g.kept as usize),
        ("BLOCKS", g.blocks),
        ("STAGES", g.stages),
        ("SPLIT", g.split),
    ];
    let own = own.into_iter().map(|(name, value)| (name.into(), value.to_string()));
    Source { name, code: Cow::Borrowed(code), defines: own.chain(call::defines(p)).collect() }
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

const FORWARD: &str = with_headers!("forward.cu");
const BACKWARD: &str = with_headers!("backward.cu");

pub(super) fn prepare(p: &Problem, launch: &Launch, at: &Prepare<'_>) -> Result<Box<dyn Work>, CudaError> {
    let facts = at.facts();
    let mut scratch = Scratch::of(launch, at);
    let mut call = Call::of(p, launch, at);
    if p.grad {
        call.delta = scratch.take(delta_bytes(p))?;
    }
    let mut works: Vec<Box<dyn Work>> = vec![];
    works.extend(tiles::prepare(p, &mut call, heights(p, facts.shared_bytes), &mut scratch, at)?);
    let (q_tiles, k_tiles) = (call.q_tile_count as usize, call.k_tile_count as usize);
    for &part in parts(p) {
        let (grid, is_wanted) = match part {
            Part::Forward => ([q_tiles, p.heads, 1], true),
            Part::Delta => ([p.tq.div_ceil(32), p.heads, 1], true),
            Part::Dq => ([q_tiles, p.heads, 1], call.dq.at != 0),
            Part::Dkv => ([k_tiles, p.kv_heads, 1], call.dk.at != 0 || call.dv.at != 0),
        };
        if !is_wanted {
            continue;
        }
        let g = Geometry::of(part, p.size, facts.shared_bytes);
        let function = at.function(&source(p, part, facts), part.entry())?;
        let threads = if part == Part::Delta { 256 } else { g.threads() };
        let shared = g.shared_bytes(part, p.size) as u32;
        works.push(launch_blocks(function, grid, threads, shared, vec![call.block()])?);
    }
    Ok(sequence(works))
}
