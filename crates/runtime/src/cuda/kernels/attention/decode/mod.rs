//! Attention for few queries per segment over many keys, as in decoding with a cache.
//!
//! Such calls are memory-bound: keys are split over thread blocks (split-K), and partial results are merged by lse.
//! Deterministic in both directions. `flatout doctor --speed attention` compares shapes like these with a copy:
//!
//! | H200, one query a sequence, read and written counted, in graphs; a copy runs at 4.16 TB/s | forward | backward |
//! |---|---|---|
//! | 64 sequences of 8192 keys, 32 heads on 8 of 128 | 510 us, 4.21 TB/s | |
//! | 64 of 4096, 12 on 4 of 64 | 70 us, 3.83 TB/s | 167 us, 3.21 TB/s |
//! | 64 of 4096, 4 on 1 of 256 | 70 us, 3.86 TB/s | |
//! | 512 of 500, 32 on 8 of 128 | 254 us, 4.14 TB/s | |
//! | 1 of 32768, 32 on 8 of 128 | 40 us, 3.34 TB/s | |
//! | 16 of 4096, 32 on 8 of 128 | | 168 us, 3.19 TB/s |
//! | 256 of 257, 12 on 12 of 64 | | 126 us, 3.20 TB/s |

use std::borrow::Cow;

use flatout_ir::Launch;
use flatout_ir::types::DType;

use super::Problem;
use super::call::{self, Call, is_ragged};
use super::scratch::{ALIGN, Scratch};
use super::tiles::{self, Heights};
use crate::cuda::argument::{Block, launch_blocks};
use crate::cuda::context::{CudaError, Facts, Prepare, Source, Work, sequence};

const THREADS: u32 = 128;
const MERGERS: u32 = 256;
/// With more queries, tiles of the kernels that tile queries are well filled.
const MOST_QUERIES: usize = 8;
/// (query, head) pairs of a key head that fit in one set of 8 columns of a product.
const COLUMNS: usize = 8;
/// Largest head size at which two sets of columns fit in registers.
const MOST_SIZE_OF_TWO: usize = 128;
/// The limit of a grid along its second and third axis.
const MOST_IN_GRID: usize = 65535;
/// Maximum planes of a grid that clear rows outside every segment.
const MOST_CLEARING: usize = 1024;
/// Rows that a block checks at a time.
const CLEARED: usize = 32;

/// Number of (query, head) pairs that read a key head.
fn rows(p: &Problem) -> usize {
    p.heads / p.kv_heads * p.q_longest()
}

/// Sets of columns per block.
fn sets(p: &Problem) -> usize {
    if rows(p) > COLUMNS && p.size <= MOST_SIZE_OF_TWO { 2 } else { 1 }
}

/// Tiles of rows: blocks that read the same keys.
fn row_tiles(p: &Problem) -> usize {
    rows(p).div_ceil(COLUMNS * sets(p))
}

/// Thread blocks if every segment were one split.
fn units(p: &Problem) -> usize {
    p.segments() * p.kv_heads * row_tiles(p)
}

/// Minimum keys per split: few enough to spread one sequence over a GPU, many enough that partial results are a small share of
/// the traffic. A multiple of the keys that the warps of a block take per step.
const LEAST_KEYS: usize = 128;
const STEP_KEYS: usize = 64;
/// With this many blocks, splits are not made any shorter.
const ENOUGH_BLOCKS: usize = 4096;
/// Fixed cost of a block, in keys.
const BLOCK_COST: usize = 64;
/// Split length under `deterministic`, independent of batch and GPU: a sequence has the same bits alone and in a batch.
const EQUAL_KEYS: usize = 512;

/// Maximum keys per split. The backward pass writes as much as it reads, and shorter blocks mix both better.
fn most_keys(p: &Problem) -> usize {
    if p.grad { 512 } else { 1024 }
}

fn least_keys(p: &Problem) -> usize {
    let share = (units(p) * p.k_longest()).div_ceil(ENOUGH_BLOCKS);
    share.next_multiple_of(STEP_KEYS).clamp(LEAST_KEYS, most_keys(p))
}

/// The split length at which all waves of `concurrent` blocks finish soonest.
fn best_keys(p: &Problem, concurrent: usize) -> usize {
    let cost = |keys: &usize| {
        let count = p.k_longest().div_ceil(*keys).max(1);
        let rounds = (units(p) * count).div_ceil(concurrent.max(1));
        let merge = if count > 1 { BLOCK_COST } else { 0 };
        (rounds * (p.k_longest().min(*keys) + BLOCK_COST) + merge, std::cmp::Reverse(*keys))
    };
    let choices = (least_keys(p)..=most_keys(p)).step_by(STEP_KEYS);
    choices.min_by_key(cost).expect("the least is at most the most")
}

/// How a problem is divided: `Splits` of fragments.cuh.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Splits {
    keys: usize,
    count: usize,
    tiles: usize,
}

impl Splits {
    fn of(p: &Problem, keys: usize) -> Splits {
        Splits { keys, count: p.k_longest().div_ceil(keys).max(1), tiles: row_tiles(p) }
    }

    /// Bytes of the partial results: o or dq of every row and split in f32, and lse in the forward pass.
    fn bytes(&self, p: &Problem) -> usize {
        let kept = rows(p).min(COLUMNS * sets(p));
        let numbers = if p.grad { p.size } else { p.size + 1 };
        if self.count > 1 { (4 * units(p) * self.count * kept * numbers).next_multiple_of(ALIGN) } else { 0 }
    }

    fn block(&self) -> Block {
        Block::of_ints(&[self.keys, self.count, self.tiles].map(|x| x as u32))
    }
}

/// Planes of the grid that clear rows of o outside every segment of queries.
fn clearing(p: &Problem) -> usize {
    if !p.grad && is_ragged(p.q) { p.tq.div_ceil(CLEARED).min(MOST_CLEARING) } else { 0 }
}

pub(super) fn serves(p: &Problem, _: &Facts) -> bool {
    // The backward pass needs all rows of a key head in one block, which sums dk and dv over them.
    let is_whole = !p.grad || row_tiles(p) == 1;
    p.dtype == DType::BF16
        && p.size.is_multiple_of(8)
        && (16..=256).contains(&p.size)
        && p.q_longest() <= MOST_QUERIES
        && is_whole
        && p.segments() + MOST_CLEARING <= MOST_IN_GRID
        && p.k_longest().div_ceil(LEAST_KEYS) * row_tiles(p) <= MOST_IN_GRID
}

pub(super) fn workspace(p: &Problem) -> usize {
    // This family serves the same problems on every GPU.
    if !serves(p, &Facts::on_paper("sm_80")) {
        return 0;
    }
    [least_keys(p), EQUAL_KEYS].map(|keys| Splits::of(p, keys).bytes(p)).into_iter().max().unwrap_or(0)
}

fn source(p: &Problem) -> Source {
    let code = if p.grad {
        concat!(
            include_str!("../../prelude.cuh"),
            include_str!("../call.cuh"),
            include_str!("fragments.cuh"),
            include_str!("backward.cu")
        )
    } else {
        concat!(
            include_str!("../../prelude.cuh"),
            include_str!("../../ahead.cuh"),
            include_str!("../call.cuh"),
            include_str!("fragments.cuh"),
            include_str!("forward.cu")
        )
    };
    // Small heads need two steps' loads in flight.
    let reps = if p.size <= 32 { 2 } else { 1 };
    let own = [("SIZE", p.size), ("GROUP", p.heads / p.kv_heads), ("NQ", sets(p)), ("REP", reps)];
    let own = own.map(|(name, value)| (name.to_string(), value.to_string()));
    let name = if p.grad { "attention/decode/backward.cu" } else { "attention/decode/forward.cu" };
    Source { name, code: Cow::Borrowed(code), defines: own.into_iter().chain(call::defines(p)).collect() }
}

pub(super) fn sources(p: &Problem, _: &Facts) -> Vec<Source> {
    [source(p)].into_iter().chain(tiles::sources(p)).collect()
}

pub(super) fn prepare(p: &Problem, launch: &Launch, at: &Prepare<'_>) -> Result<Box<dyn Work>, CudaError> {
    let (entry, merge) =
        if p.grad { ("decode_backward", "decode_merge_dq") } else { ("decode_forward", "decode_merge") };
    let source = source(p);
    let function = at.function(&source, entry)?;
    let keys = if at.facts().deterministic {
        EQUAL_KEYS
    } else {
        best_keys(p, at.facts().sms as usize * function.blocks_per_sm(THREADS, 0)? as usize)
    };
    let splits = Splits::of(p, keys);

    let mut scratch = Scratch::of(launch, at);
    let mut call = Call::of(p, launch, at);
    // These kernels use no tile lists; this call only clears rows outside the segments, which the forward kernel does itself.
    let heights = Heights { q: None, k: None };
    let cleared = if p.grad { tiles::prepare(p, &mut call, heights, &mut scratch, at)? } else { None };
    call.scratch = scratch.take(splits.bytes(p))?;
    let mut works: Vec<Box<dyn Work>> = cleared.into_iter().collect();
    let of_merge = vec![call.block(), splits.block()];
    let mut args = of_merge.clone();
    if p.grad {
        args.extend(call::d_lse(p, launch, at));
    } else {
        args.extend(at.next_weight().args().map(Block::from));
    }
    let grid = [p.kv_heads, splits.count * splits.tiles, p.segments() + clearing(p)];
    works.push(launch_blocks(function, grid, THREADS, 0, args)?);
    if splits.count > 1 && (!p.grad || call.dq.at != 0) {
        let grid = [p.heads, p.q_longest(), p.segments()];
        works.push(launch_blocks(at.function(&source, merge)?, grid, MERGERS, 0, of_merge)?);
    }
    Ok(sequence(works))
}

#[cfg(test)]
mod tests {
    use super::*;
    use flatout_ir::ops::attention::{Mask, Segments};
    use flatout_ir::ops::cap::Cap;

    fn problem(segments: usize, queries: usize, keys: usize, heads: [usize; 2], size: usize) -> Problem {
        Problem {
            grad: false,
            d_lse: false,
            dtype: DType::BF16,
            tq: segments * queries,
            tk: segments * keys,
            heads: heads[0],
            kv_heads: heads[1],
            size,
            scale: 1.0,
            cap: Cap::NONE,
            mask: Mask::Causal,
            q: Segments::Ragged { max_segments: segments, max_len: queries },
            k: Segments::Ragged { max_segments: segments, max_len: keys },
        }
    }

    #[test]
    fn only_few_queries_in_bf16_are_served() {
        let facts = Facts::on_paper("sm_80");
        let step = problem(64, 1, 8192, [32, 8], 128);
        assert!(serves(&step, &facts));
        assert!(serves(&Problem { heads: 64, kv_heads: 1, ..step }, &facts), "rows in several tiles");
        assert!(serves(&Problem { grad: true, heads: 16, kv_heads: 1, ..step }, &facts));
        for bad in [
            Problem { dtype: DType::F32, ..step },
            Problem { size: 60, ..step },
            Problem { size: 264, ..step },
            problem(64, 9, 8192, [32, 8], 128),
            problem(70_000, 1, 64, [4, 4], 64),
            Problem { grad: true, heads: 64, kv_heads: 1, ..step },
            Problem { grad: true, heads: 16, kv_heads: 1, size: 256, ..step },
        ] {
            assert!(!serves(&bad, &facts), "{bad:?}");
            assert_eq!(workspace(&bad), 0);
        }
    }

    #[test]
    fn splits_cover_the_longest_segment_within_the_planned_scratch() {
        for (segments, keys) in [(1, 32768), (64, 8192), (512, 500), (1, 1), (3, 100_000), (8, 2048)] {
            for (heads, size) in [([32, 8], 128), ([12, 4], 64), ([4, 1], 256), ([16, 1], 16), ([64, 1], 64)]
            {
                let p = problem(segments, 1, keys, heads, size);
                for concurrent in [84, 396, 528, 1500] {
                    for of_split in [best_keys(&p, concurrent), EQUAL_KEYS] {
                        let splits = Splits::of(&p, of_split);
                        assert!(splits.keys * splits.count >= keys, "{splits:?} of {keys}");
                        assert!(splits.keys * (splits.count - 1) < keys, "{splits:?} of {keys}");
                        assert!(splits.bytes(&p) <= workspace(&p), "{splits:?} of {p:?}");
                    }
                }
                // A partial result takes 4 bytes per element and split, k and v together 4 bytes per element and key.
                let read = 4 * p.tk * p.kv_heads * size;
                assert!(workspace(&p) <= read * 2 * rows(&p) / LEAST_KEYS + (1 << 16), "{p:?}");
            }
        }
    }

    #[test]
    fn one_sequence_fills_a_gpu_and_short_ones_are_not_split() {
        let (conc, heads) = (396, [32, 8]);
        assert_eq!(best_keys(&problem(1, 1, 32768, heads, 128), conc), 704);
        assert_eq!(Splits::of(&problem(1, 1, 32768, heads, 128), 704).count * 8, 376);
        assert_eq!(best_keys(&problem(512, 1, 500, heads, 128), conc), 1024);
        assert_eq!(best_keys(&problem(64, 1, 8192, heads, 128), conc), 1024);
    }
}
