//! Masks and segments of a launch, reduced to the key intervals that each query attends to.
//!
//! Every mask is reduced to at most two key intervals per query, so the kernels have a single case. A tile of keys needs no
//! masking if all queries of a block attend to all of it, and is skipped if none attends to any.

use std::ops::Range;

use flatout_ir::ops::attention::{Mask, Segments};

use crate::cpu::tensor::Tensor;

/// Rows of one block: (query, head) pairs that share a key head, in lanes.
pub(super) const LANES: usize = 32;

/// Query rows and the key rows they attend to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::cpu) struct Segment {
    pub q: Range<usize>,
    pub k: Range<usize>,
}

/// The segments of a launch's token axes, and the rows outside every segment.
pub(in crate::cpu) struct Cut {
    pub segments: Vec<Segment>,
    pub idle_q: Vec<Range<usize>>,
    pub idle_k: Vec<Range<usize>>,
}

impl Cut {
    /// A ragged side takes its starts and lengths from inputs. Query segments may not overlap, since each row has one result;
    /// key segments may if `may_share_keys`: their gradients would otherwise be sums over segments.
    pub fn new(
        (q, q_bounds): (Segments, Option<[Vec<i32>; 2]>),
        (k, k_bounds): (Segments, Option<[Vec<i32>; 2]>),
        (tq, tk): (usize, usize),
        may_share_keys: bool,
    ) -> Result<Cut, String> {
        let q_rows = ranges("query", q, q_bounds, tq)?;
        let k_rows = ranges("key", k, k_bounds, tk)?;
        let idle_q = idle(&q_rows, tq).map_err(|row| shared("query", row))?;
        let idle_k = match idle(&k_rows, tk) {
            Err(row) if !may_share_keys => return Err(shared("key", row)),
            found => found.unwrap_or_default(),
        };
        let segments = q_rows.into_iter().zip(k_rows).map(|(q, k)| Segment { q, k }).collect();
        Ok(Cut { segments, idle_q, idle_k })
    }
}

fn shared(what: &str, row: usize) -> String {
    format!("{what} row {row} lies in two segments; let segments not overlap")
}

fn ranges(
    what: &str,
    segments: Segments,
    bounds: Option<[Vec<i32>; 2]>,
    tokens: usize,
) -> Result<Vec<Range<usize>>, String> {
    let max_len = match segments {
        Segments::Uniform { len } => {
            return Ok((0..tokens / len).map(|s| s * len..(s + 1) * len).collect());
        }
        Segments::Ragged { max_len, .. } => max_len,
    };
    let [starts, lengths] = bounds.expect("ragged segments come with their bounds");
    let one = |(s, (&start, &len)): (usize, (&i32, &i32))| {
        if len == 0 {
            return Ok(0..0);
        }
        let (start, len) = (start as i64, len as i64);
        if start < 0 || len < 0 || start + len > tokens as i64 || len > max_len as i64 {
            return Err(format!(
                "{what} segment {s} starts at row {start} and is {len} long; \
                 there are {tokens} rows and a segment holds at most {max_len}"
            ));
        }
        Ok(start as usize..(start + len) as usize)
    };
    starts.iter().zip(&lengths).enumerate().map(one).collect()
}

/// The rows outside every range, or an error with a row in two ranges.
fn idle(ranges: &[Range<usize>], tokens: usize) -> Result<Vec<Range<usize>>, usize> {
    let mut sorted: Vec<&Range<usize>> = ranges.iter().filter(|r| !r.is_empty()).collect();
    sorted.sort_by_key(|r| r.start);
    let (mut idle, mut at) = (vec![], 0);
    for range in sorted {
        if range.start < at {
            return Err(range.start);
        }
        if range.start > at {
            idle.push(at..range.start);
        }
        at = range.end;
    }
    if at < tokens {
        idle.push(at..tokens);
    }
    Ok(idle)
}

/// Whether a block attends to a tile of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sees {
    Nothing,
    Some,
    All,
}

/// The key intervals [low, high) of each lane of a block, relative to the segment's first key.
pub(super) struct Visible {
    low: [[i32; LANES]; 2],
    high: [[i32; LANES]; 2],
    /// The range that covers the keys of all lanes.
    pub range: Range<usize>,
}

impl Visible {
    /// Lane l is row `first + l` of the segment's (query, head) pairs, with `group` heads per query; lanes from `count` on are
    /// copies of the last, so that they never make a tile partial.
    pub fn new(
        mask: Mask,
        intervals: Option<&Tensor<'_>>,
        segment: &Segment,
        group: usize,
        first: usize,
        count: usize,
    ) -> Self {
        let (lq, lk) = (segment.q.len() as i64, segment.k.len() as i64);
        let mut visible = Visible { low: [[0; LANES]; 2], high: [[0; LANES]; 2], range: 0..0 };
        let (mut from, mut to) = (lk, 0);
        for lane in 0..LANES {
            let query = (first + lane.min(count - 1)) / group;
            let stand = query as i64 + lk - lq;
            let seen = match mask {
                Mask::Full => [(0, lk), (0, 0)],
                Mask::Causal => [(0, stand + 1), (0, 0)],
                Mask::Window { back, ahead } => {
                    let reach = |n: usize| n.min(segment.q.len() + segment.k.len()) as i64;
                    [(stand - reach(back), stand + reach(ahead) + 1), (0, 0)]
                }
                Mask::TwoIntervals => {
                    let tensor = intervals.expect("two intervals come with their tensor");
                    let edge = |i: usize| {
                        let at = (segment.q.start + query) * tensor.strides[0] + i * tensor.strides[1];
                        // SAFETY: row and column lie inside [Tq, 4], which nothing writes during the launch.
                        let row = unsafe { *tensor.at(at).cast::<i32>() };
                        row as i64 - segment.k.start as i64
                    };
                    [(edge(0), edge(1)), (edge(2), edge(3))]
                }
            };
            for (i, (low, high)) in seen.into_iter().enumerate() {
                let (low, high) = (low.clamp(0, lk), high.clamp(0, lk));
                let high = high.max(low);
                visible.low[i][lane] = low as i32;
                visible.high[i][lane] = high as i32;
                if low < high {
                    (from, to) = (from.min(low), to.max(high));
                }
            }
        }
        visible.range = if from < to { from as usize..to as usize } else { 0..0 };
        visible
    }

    /// Whether the block attends to all, some or none of the keys `keys`.
    pub fn sees(&self, keys: &Range<usize>) -> Sees {
        let (start, end) = (keys.start as i32, keys.end as i32);
        let mut sees_all = true;
        let mut sees_any = false;
        for lane in 0..LANES {
            let interval = |i: usize| (self.low[i][lane], self.high[i][lane]);
            let (one, two) = (interval(0), interval(1));
            let covers = |(low, high): (i32, i32)| low <= start && end <= high;
            let meets = |(low, high): (i32, i32)| low < high && low < end && start < high;
            sees_all &= covers(one) | covers(two);
            sees_any |= meets(one) | meets(two);
        }
        match (sees_all, sees_any) {
            (true, _) => Sees::All,
            (false, true) => Sees::Some,
            (false, false) => Sees::Nothing,
        }
    }

    /// Sets masked scores to -inf in scores [keys, LANES].
    #[inline(always)]
    pub fn mask_scores(&self, keys: &Range<usize>, scores: &mut [f32]) {
        for (key, scores) in keys.clone().zip(scores.as_chunks_mut::<LANES>().0) {
            let key = key as i32;
            for (lane, score) in scores.iter_mut().enumerate() {
                let one = (self.low[0][lane] <= key) & (key < self.high[0][lane]);
                let two = (self.low[1][lane] <= key) & (key < self.high[1][lane]);
                *score = if one | two { *score } else { f32::NEG_INFINITY };
            }
        }
    }
}
