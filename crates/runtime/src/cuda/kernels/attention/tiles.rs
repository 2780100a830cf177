//! The list of tiles of ragged segments, built on the device before the kernels that walk them.
//!
//! The same launch clears output rows outside every segment. Uniform segments need neither: their tiles are computed, and they
//! cover every row.

use std::borrow::Cow;

use flatout_ir::ops::attention::Mask;

use super::Problem;
use super::call::{Call, defines, is_ragged};
use super::scratch::{ALIGN, Scratch};
use crate::cuda::argument::{Block, launch_blocks};
use crate::cuda::context::{Arg, CudaError, Prepare, Source, Work};

const THREADS: u32 = 1024;
/// Tokens per block that looks for rows outside every segment.
const SPAN: usize = 256;
/// Bytes of an entry: segment and first row.
const TILE_BYTES: usize = 8;

/// Maximum number of sections: a list has 256 classes, of which every section takes some.
const MOST_SECTIONS: usize = 15;

/// Heights of the tiles that a family cuts queries and keys into; `None` for a side that it does not tile.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Heights {
    pub q: Option<usize>,
    pub k: Option<usize>,
}

/// Number of tiles of `height` rows: exact if segments are uniform, an upper bound if they are ragged.
pub(super) fn count(tokens: usize, longest: usize, segments: usize, ragged: bool, height: usize) -> usize {
    if ragged { tokens / height + segments } else { segments * longest.div_ceil(height) }
}

pub(super) fn q_count(p: &Problem, height: usize) -> usize {
    count(p.tq, p.q_longest(), p.segments(), is_ragged(p.q), height)
}

pub(super) fn k_count(p: &Problem, height: usize) -> usize {
    count(p.tk, p.k_longest(), p.segments(), is_ragged(p.k), height)
}

fn is_any_ragged(p: &Problem) -> bool {
    is_ragged(p.q) || is_ragged(p.k)
}

/// Rows of the other side per section: their two tensors, with `heads` heads, take a quarter of the L2 cache, so tiles of a
/// section are scheduled one after another.
fn section(p: &Problem, rows: usize, heads: usize, l2_bytes: usize) -> usize {
    let fit = l2_bytes / 4 / (2 * heads * p.size * p.dtype.bytes());
    fit.max(rows.div_ceil(MOST_SECTIONS)).max(1)
}

/// Bytes of the lists.
pub(super) fn workspace(p: &Problem, heights: Heights) -> usize {
    let list = |count: usize| (TILE_BYTES * count).next_multiple_of(ALIGN);
    let q = heights.q.filter(|_| is_ragged(p.q)).map_or(0, |h| list(q_count(p, h)));
    let k = heights.k.filter(|_| is_ragged(p.k)).map_or(0, |h| list(k_count(p, h)));
    q + k
}

/// The source for `prepare` and `even_segments`; empty if no segments are read on the device.
pub(super) fn sources(p: &Problem) -> Vec<Source> {
    if is_any_ragged(p) || p.mask == Mask::TwoIntervals { vec![source(p)] } else { vec![] }
}

fn source(p: &Problem) -> Source {
    let mut defines = defines(p);
    defines.push(("GRAD".into(), (p.grad as u32).to_string()));
    let code = concat!(include_str!("../prelude.cuh"), include_str!("call.cuh"), include_str!("tiles.cu"));
    Source { name: "attention/tiles.cu", code: Cow::Borrowed(code), defines }
}

/// Fills the call's tile lists and counts. The returned work lists the tiles and clears rows outside the segments, and must run
/// before the kernels. `None` if segments are uniform.
pub(super) fn prepare(
    p: &Problem,
    call: &mut Call,
    heights: Heights,
    scratch: &mut Scratch,
    at: &Prepare<'_>,
) -> Result<Option<Box<dyn Work>>, CudaError> {
    let int = |x: usize| i32::try_from(x).map_err(|_| CudaError::new(format!("{x} tiles are too many")));
    call.q_tile_count = int(heights.q.map_or(0, |h| q_count(p, h)))?;
    call.k_tile_count = int(heights.k.map_or(0, |h| k_count(p, h)))?;
    if !is_any_ragged(p) {
        return Ok(None);
    }
    if let Some(height) = heights.q.filter(|_| is_ragged(p.q)) {
        call.q_tiles = scratch.take(TILE_BYTES * q_count(p, height))?;
    }
    if let Some(height) = heights.k.filter(|_| is_ragged(p.k)) {
        call.k_tiles = scratch.take(TILE_BYTES * k_count(p, height))?;
    }
    let spans = |is_cleared: bool, tokens: usize| if is_cleared { tokens.div_ceil(SPAN) } else { 0 };
    let q_spans = spans(is_ragged(p.q), p.tq);
    let k_spans = spans(is_ragged(p.k) && p.grad, p.tk);
    let (element, l2_bytes) = (p.dtype.bytes(), at.facts().l2_bytes as usize);
    let height = |height: Option<usize>| Arg::I32(height.unwrap_or(1) as i32);
    let rest = [
        height(heights.q),
        height(heights.k),
        Arg::I32(int(section(p, p.tk, p.kv_heads, l2_bytes))?),
        Arg::I32(int(section(p, p.tq, p.heads, l2_bytes))?),
        Arg::I32(q_spans as i32),
        Arg::I32((p.size * element) as i32),
        Arg::I32(element as i32),
    ];
    let args = [call.block()].into_iter().chain(rest.map(Block::from)).collect();
    let function = at.function(&source(p), "attention_tiles")?;
    launch_blocks(function, [2 + q_spans + k_spans, 1, 1], THREADS, 0, args).map(Some)
}

/// Fills equal segments that cover the tokens, and intervals, so that attention can be timed before a run has any.
pub(super) fn even_segments(p: &Problem, call: &Call, at: &Prepare<'_>) -> Result<Box<dyn Work>, CudaError> {
    let function = at.function(&source(p), "even_segments")?;
    let threads = p.tq.max(p.segments());
    launch_blocks(function, [threads.div_ceil(THREADS as usize), 1, 1], THREADS, 0, vec![call.block()])
}

#[cfg(test)]
mod tests {
    use super::*;
    use flatout_ir::ops::attention::Segments;
    use flatout_ir::ops::cap::Cap;
    use flatout_ir::types::DType;

    fn problem(segments: Segments) -> Problem {
        Problem {
            grad: true,
            d_lse: false,
            dtype: DType::BF16,
            tq: 400,
            tk: 400,
            heads: 4,
            kv_heads: 2,
            size: 64,
            scale: 1.0,
            cap: Cap::NONE,
            mask: Mask::Causal,
            q: segments,
            k: segments,
        }
    }

    /// The tiles that `list_tiles` lists, in any order: (segment, first row).
    fn listed(starts: &[i32], lens: &[i32], tokens: i32, longest: i32, height: i32) -> Vec<(usize, i32)> {
        let mut tiles = vec![];
        for (s, (start, len)) in starts.iter().zip(lens).enumerate() {
            let first = (*start).max(0);
            let end = (first.min(tokens) + (*len).min(longest).max(0)).min(tokens);
            tiles.extend((first..end).step_by(height as usize).map(|row| (s, row)));
        }
        tiles
    }

    /// Covers empty segments, segments of one row, a length above the longest, a negative start and ends past the last token.
    #[test]
    fn a_list_covers_every_row_once_within_its_capacity() {
        let starts = [0, 7, 7, 8, 100, -5, 300, 2_000_000_000];
        let lens = [7, 0, 1, 90, 5000, -3, 5, 2_000_000_000];
        let (tokens, longest) = (303, 150);
        for height in [16, 32, 64, 128] {
            let tiles = listed(&starts, &lens, tokens, longest, height);
            assert!(tiles.len() <= count(303, 150, starts.len(), true, height as usize), "{tiles:?}");
            let mut rows = vec![0; tokens as usize];
            for (s, first) in tiles {
                let end = (starts[s] + lens[s].min(longest)).min(tokens);
                (first..end.min(first + height)).for_each(|row| rows[row as usize] += 1);
            }
            let covered = |row: &usize| *row < 98 || (100..250).contains(row) || *row >= 300;
            assert!((0..303).all(|row| rows[row] == covered(&row) as i32), "{rows:?}");
        }
    }

    #[test]
    fn capacity_holds_any_segments_that_do_not_overlap() {
        for (tokens, height) in [(1000_usize, 64), (64, 64), (5, 128), (4096, 128)] {
            for segments in [1, 3, 64, 1000] {
                // The worst case: as many single-row tiles as possible, and the rest in one segment.
                let short = (segments - 1).min(tokens);
                let tiles = short + (tokens - short).div_ceil(height);
                let bound = count(tokens, tokens, segments, true, height);
                assert!(tiles <= bound, "{tokens} tokens in {segments} by {height}: {tiles} over {bound}");
            }
        }
        assert_eq!(count(1024, 256, 4, false, 96), 12);
    }

    /// Every section has classes for heavy and for light tiles among the 256.
    #[test]
    fn sections_are_few_and_fit_in_the_cache() {
        let p = problem(Segments::Ragged { max_segments: 4, max_len: 300 });
        assert_eq!(section(&p, 400, 4, 50 << 20), (50 << 20) / 4 / (2 * 4 * 64 * 2));
        for rows in [1_usize, 14, 15, 16, 1000, 1 << 20] {
            let sections = rows.div_ceil(section(&p, rows, 4, 4096));
            assert!((1..=MOST_SECTIONS).contains(&sections), "{rows} rows in {sections}");
        }
    }

    #[test]
    fn uniform_segments_need_no_list() {
        let p = problem(Segments::Uniform { len: 100 });
        let heights = Heights { q: Some(64), k: Some(128) };
        assert_eq!((workspace(&p, heights), sources(&p).len()), (0, 0));
        let ragged = Segments::Ragged { max_segments: 4, max_len: 300 };
        let packed = Problem { q: ragged, k: ragged, ..p };
        assert_eq!((q_count(&packed, 64), k_count(&packed, 128)), (10, 7));
        assert_eq!((workspace(&packed, heights), sources(&packed).len()), (2 * ALIGN, 1));
        assert_eq!(workspace(&packed, Heights { k: None, ..heights }), ALIGN);
    }
}
