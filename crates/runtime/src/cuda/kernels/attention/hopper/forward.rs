//! The forward pass on Hopper: selects the configuration of `forward.cu` for a problem, and launches it.

use std::borrow::Cow;

use flatout_ir::Launch;
use flatout_ir::ops::attention::{Mask, Segments};

use super::{PANEL, is_hopper, is_written, rows_map};
use crate::cuda::argument::{Block, launch_blocks};
use crate::cuda::context::{Arg, CudaError, Facts, Prepare, Source, Stream, Work, sequence};
use crate::cuda::driver::Driver;
use crate::cuda::kernels::attention::Problem;
use crate::cuda::kernels::attention::call::{self, Call};
use crate::cuda::kernels::attention::scratch::{ALIGN, Scratch};
use crate::cuda::kernels::attention::tiles::{self, Heights};

/// The configuration that forward.cu is compiled with; its header explains the fields.
#[derive(Clone, Copy, Debug, PartialEq)]
struct ForwardConfig {
    groups: usize,
    pack: usize,
    walk: usize,
    narrow: usize,
    stages: usize,
    blocks: usize,
    overlap: bool,
    pingpong: bool,
}

/// Bytes for barriers and tasks, after the tiles in shared memory.
const MESSAGE_BYTES: usize = 1024;
impl ForwardConfig {
    /// Several warpgroups with overlapped products: for rows that attend to many keys.
    const fn large(groups: usize, walk: usize, narrow: usize) -> Self {
        ForwardConfig { groups, pack: 1, walk, narrow, stages: 2, blocks: 1, overlap: true, pingpong: true }
    }

    /// One warpgroup per block, many blocks per multiprocessor.
    const fn small(walk: usize, blocks: usize) -> Self {
        ForwardConfig {
            groups: 1,
            pack: 1,
            walk,
            narrow: 0,
            stages: 2,
            blocks,
            overlap: false,
            pingpong: false,
        }
    }

    /// Chosen by times on an H200. If packed segments must give the bits of separate ones (`equal_bits`), lengths are ignored.
    fn of(p: &Problem, equal_bits: bool) -> Self {
        let (is_short, group) = (!equal_bits && meets_few_keys(p), p.heads / p.kv_heads);
        let form = match p.size {
            ..=64 if is_short => match (best_filled(p, &[64, 96]), p.mask) {
                // The intervals of a row need the registers of a fourth block.
                (64, Mask::Full | Mask::Causal) => ForwardConfig::small(64, 4),
                (walk, _) => ForwardConfig::small(walk, 3),
            },
            ..=64 => ForwardConfig::large(3, 128, 0),
            65..=128 if is_short => ForwardConfig::large(3, 80, 0),
            65..=128 => ForwardConfig::large(2, 128, 64),
            129..=192 => ForwardConfig::large(2, 80, 0),
            _ => ForwardConfig::large(2, 64, 0),
        };
        let rows = form.rows();
        // Packing heads side by side must not waste many of the remaining rows.
        let is_packed = group <= rows && (rows % group) * 8 <= rows;
        ForwardConfig { pack: if is_packed { group } else { 1 }, ..form }
    }

    /// Rows per tile: queries times heads side by side.
    fn rows(&self) -> usize {
        64 * self.groups
    }

    fn own(&self) -> usize {
        self.rows() / self.pack
    }

    fn shared_bytes(&self, size: usize) -> usize {
        let row = 2 * size.next_multiple_of(PANEL);
        (self.rows() + 2 * self.stages * self.walk) * row + MESSAGE_BYTES
    }

    /// Registers per thread of the producer and of the consumers. If several blocks share a multiprocessor, registers are split
    /// evenly and the producer is a single warp.
    fn registers(&self) -> Option<[usize; 2]> {
        match (self.groups, self.blocks) {
            (2, 1) => Some([40, 232]),
            (3, 1) => Some([32, 160]),
            _ => None,
        }
    }

    fn producer_threads(&self) -> usize {
        if self.registers().is_some() { 128 } else { 32 }
    }

    fn threads(&self) -> usize {
        128 * self.groups + self.producer_threads()
    }
}

/// Whether rows attend to so few keys that small blocks are faster, or walks often end in a mostly empty tile.
fn meets_few_keys(p: &Problem) -> bool {
    let typical = match p.k {
        Segments::Uniform { len } => len,
        // For a typical distribution of document lengths, the work-weighted mean length is 1.5 times the mean.
        Segments::Ragged { max_len, max_segments } => max_len.min(3 * p.tk / (2 * max_segments.max(1))),
    };
    match p.mask {
        Mask::Full | Mask::TwoIntervals => typical <= 288,
        Mask::Causal => typical <= 400,
        Mask::Window { back, ahead } => typical.min(back.saturating_add(ahead)) <= 200,
    }
}

/// The tile width that the keys of uniform segments fill best, the widest among equals; the first if rows attend to different
/// keys.
fn best_filled(p: &Problem, widths: &[usize]) -> usize {
    match (p.k, p.mask) {
        (Segments::Uniform { len }, Mask::Full) => {
            let filled = widths.iter().rev().copied();
            filled.min_by_key(|walk| len.next_multiple_of(*walk)).unwrap_or(widths[0])
        }
        _ => widths[0],
    }
}

fn heights(form: &ForwardConfig) -> Heights {
    Heights { q: Some(form.own()), k: None }
}

fn is_served(p: &Problem) -> bool {
    !p.grad && is_written(p)
}

pub(in crate::cuda::kernels::attention) fn serves(p: &Problem, facts: &Facts) -> bool {
    is_served(p) && is_hopper(facts)
}

pub(in crate::cuda::kernels::attention) fn workspace(p: &Problem) -> usize {
    if !is_served(p) {
        return 0;
    }
    let [lists, equal_lists] =
        [false, true].map(|equal_bits| tiles::workspace(p, heights(&ForwardConfig::of(p, equal_bits))));
    lists.max(equal_lists) + ALIGN
}

/// Dynamic shared memory in bytes.
pub(in crate::cuda::kernels::attention) fn shared_bytes(p: &Problem, facts: &Facts, of: &Source) -> usize {
    if *of == source(p, facts) { ForwardConfig::of(p, facts.deterministic).shared_bytes(p.size) } else { 0 }
}

pub(in crate::cuda::kernels::attention) fn sources(p: &Problem, facts: &Facts) -> Vec<Source> {
    [source(p, facts)].into_iter().chain(tiles::sources(p)).collect()
}

fn source(p: &Problem, facts: &Facts) -> Source {
    let form = ForwardConfig::of(p, facts.deterministic);
    let numbers = [
        ("SIZE", p.size),
        ("GROUPS", form.groups),
        ("PACK", form.pack),
        ("WALK", form.walk),
        ("NARROW", form.narrow),
        ("STAGES", form.stages),
        ("BLOCKS", form.blocks),
        ("OVERLAP", form.overlap as usize),
        ("PINGPONG", form.pingpong as usize),
        ("PRODUCER", form.producer_threads()),
    ];
    let registers = form.registers().map(|[less, more]| [("LESS", less), ("MORE", more)]);
    let numbers = numbers.into_iter().chain(registers.into_iter().flatten());
    let numbers = numbers.map(|(name, value)| (name.to_string(), value.to_string()));
    let code = concat!(
        include_str!("../../prelude.cuh"),
        include_str!("../call.cuh"),
        include_str!("../../wgmma.cuh"),
        include_str!("forward.cu")
    );
    let defines = numbers.chain(call::defines(p)).collect();
    Source { name: "attention/hopper/forward.cu", code: Cow::Borrowed(code), defines }
}

pub(in crate::cuda::kernels::attention) fn prepare(
    p: &Problem,
    launch: &Launch,
    at: &Prepare<'_>,
) -> Result<Box<dyn Work>, CudaError> {
    let form = ForwardConfig::of(p, at.facts().deterministic);
    let mut scratch = Scratch::of(launch, at);
    let mut call = Call::of(p, launch, at);
    let mut works: Vec<Box<dyn Work>> = vec![];
    works.extend(tiles::prepare(p, &mut call, heights(&form), &mut scratch, at)?);

    let heads = p.heads / form.pack;
    let total = call.q_tile_count as usize * heads;
    let total_arg =
        i32::try_from(total).map_err(|_| CudaError::new(format!("{total} tiles of queries are too many")))?;
    let grid = total.min(form.blocks * at.facts().sms as usize);
    if total > grid {
        call.scratch = scratch.take(4)?;
        works.push(Box::new(NoneTaken { driver: at.driver(), count: call.scratch }));
    }
    let args = vec![
        call.block(),
        rows_map(p, false, call.q, [form.own(), form.pack], at)?,
        rows_map(p, true, call.k, [form.walk, 1], at)?,
        rows_map(p, true, call.v, [form.walk, 1], at)?,
        Block::from(Arg::I32(total_arg)),
        Block::from(Arg::I32(section(p, heads, at.facts()) as i32)),
    ];
    let function = at.function(&source(p, at.facts()), "wgmma_forward")?;
    let (threads, shared) = (form.threads() as u32, form.shared_bytes(p.size) as u32);
    works.push(launch_blocks(function, [grid, 1, 1], threads, shared, args)?);
    Ok(sequence(works))
}

/// Number of (segment, head) pairs whose tiles are scheduled together, longest first: with a causal mask, as many as have their
/// keys and values in half of L2; otherwise all tiles are equally long, and those of one pair follow each other.
fn section(p: &Problem, heads: usize, facts: &Facts) -> usize {
    if p.mask != Mask::Causal {
        return 1;
    }
    let pair_bytes = 4 * p.k_longest() * p.size;
    let pairs = (facts.l2_bytes as usize / 2 / pair_bytes).max(1) * heads.div_ceil(p.kv_heads);
    pairs.min(p.segments() * heads).max(1)
}

/// Resets the counter of tasks taken beyond each block's first.
struct NoneTaken {
    driver: &'static Driver,
    count: u64,
}

impl Work for NoneTaken {
    fn enqueue(&self, stream: Stream) -> Result<(), CudaError> {
        // SAFETY: four bytes of the launch's workspace in the arena, which outlives the work on the stream.
        unsafe { self.driver.memset(self.count, 0, 4, stream) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flatout_ir::ops::cap::Cap;
    use flatout_ir::types::DType;

    /// Shared memory limit of a block.
    const MOST_SHARED: usize = 227 << 10;

    fn problem(size: usize, len: usize, heads: [usize; 2], mask: Mask) -> Problem {
        let uniform = Segments::Uniform { len };
        let [heads, kv_heads] = heads;
        Problem {
            grad: false,
            d_lse: false,
            dtype: DType::BF16,
            tq: 8 * len,
            tk: 8 * len,
            heads,
            kv_heads,
            size,
            scale: 0.125,
            cap: Cap::NONE,
            mask,
            q: uniform,
            k: uniform,
        }
    }

    /// Configurations for all relevant combinations of head size, length, mask and group.
    fn forms() -> Vec<(Problem, ForwardConfig)> {
        let mut forms = vec![];
        for size in (16..=256).step_by(8) {
            for len in [1, 64, 257, 512, 2048] {
                for heads in [[1, 1], [12, 4], [16, 8], [14, 2], [64, 1], [130, 1]] {
                    for mask in
                        [Mask::Full, Mask::Causal, Mask::Window { back: 100, ahead: 3 }, Mask::TwoIntervals]
                    {
                        let p = problem(size, len, heads, mask);
                        forms.extend([false, true].map(|equal_bits| (p, ForwardConfig::of(&p, equal_bits))));
                    }
                }
            }
        }
        forms
    }

    #[test]
    fn every_form_fits_in_shared_memory_and_registers() {
        for (p, form) in forms() {
            let bytes = form.shared_bytes(p.size);
            assert!(bytes <= MOST_SHARED, "{p:?} takes {bytes} in {form:?}");
            // A multiprocessor has 228 KiB, and each block costs 1 KiB of it in addition.
            assert!(form.blocks * (bytes + 1024) <= 228 << 10, "{p:?} in {form:?}: {bytes}");
            if let Some([less, more]) = form.registers() {
                let even = (65536 / form.threads() / form.blocks) / 8 * 8;
                assert!(128 * (less + form.groups * more) <= even * form.threads(), "{form:?}");
            }
        }
    }

    #[test]
    fn every_form_keeps_the_kernels_conditions() {
        for (p, form) in forms() {
            assert!(form.walk.is_multiple_of(16) && form.narrow.is_multiple_of(16), "{form:?}");
            assert!(form.narrow < form.walk && form.walk <= 256, "{form:?}");
            let group = p.heads / p.kv_heads;
            assert!(form.pack == 1 || form.pack == group, "{form:?}");
            assert!(form.own() >= 1 && form.own() * form.pack <= form.rows(), "{form:?}");
            assert!(!form.pingpong || (form.groups > 1 && form.overlap), "{form:?}");
        }
    }

    /// 257 keys take three tiles of 96 rather than five of 64; heads of a group lie side by side unless that wastes rows.
    #[test]
    fn tiles_waste_little() {
        let form = |len, heads, mask| ForwardConfig::of(&problem(64, len, heads, mask), false);
        assert_eq!(form(257, [12, 12], Mask::Full).walk, 96);
        assert_eq!(
            (form(2048, [12, 4], Mask::Causal).own(), form(2048, [12, 12], Mask::Causal).own()),
            (64, 192)
        );
        assert_eq!((form(2048, [14, 2], Mask::Causal).pack, form(64, [33, 1], Mask::Causal).pack), (7, 1));
    }

    #[test]
    fn a_packed_problem_has_the_form_of_its_segments_where_bits_must_be_equal() {
        for (p, _) in forms() {
            let ragged = Segments::Ragged { max_segments: 100, max_len: p.tq };
            let packed = Problem { q: ragged, k: ragged, ..p };
            assert_eq!(ForwardConfig::of(&packed, true), ForwardConfig::of(&p, true), "{p:?}");
        }
    }

    #[test]
    fn only_supported_problems_are_served() {
        let hopper = Facts::on_paper("sm_90a");
        let p = problem(64, 128, [4, 2], Mask::Causal);
        assert!(serves(&p, &hopper) && workspace(&p) == ALIGN);
        for bad in [
            Problem { size: 12, ..p },
            Problem { size: 264, ..p },
            Problem { dtype: DType::F32, ..p },
            Problem { scale: -1.0, ..p },
            Problem { grad: true, ..p },
            Problem { tk: 0, ..p },
        ] {
            assert!(!serves(&bad, &hopper) && workspace(&bad) == 0, "{bad:?}");
        }
        assert!(!serves(&p, &Facts::on_paper("sm_100")));
    }
}
