//! Verification cases for attention: masks, heads, sizes, unaligned lengths and all patterns of segments.
//!
//! Both directions; everything outside the segments is NaN.

use std::ops::Range;

use flatout_ir::Op;
use flatout_ir::ops::attention::{Mask, Segments};
use flatout_ir::ops::cap::Cap;
use flatout_ir::types::{DType, TensorType};

use super::cases::{Input, Table, tensor, x};
use super::{Case, Data};

const F32: DType = DType::F32;
const BF16: DType = DType::BF16;

/// f32 throughout, in either direction; exponentials contribute their last bits.
pub(super) const F32_BOUND: f64 = 2e-5;
/// A result rounded to bf16, from weights that are.
const BF16_BOUND: f64 = 3e-3;
/// Gradients also start from an o that was rounded.
const BF16_GRADIENT_BOUND: f64 = 6e-3;
/// With two or three keys, errors hardly average out, and dq is a difference of nearly equal terms.
const BF16_FEW_KEYS_BOUND: f64 = 2.5e-2;

#[derive(Clone, Debug)]
pub(super) enum SideSegments {
    /// Segments of equal length.
    Even { count: usize, len: usize },
    /// (start, length) of each segment, on an axis of `tokens` tokens; none is longer than `longest`.
    Ragged { tokens: usize, longest: usize, bounds: Vec<(i32, i32)> },
}

pub(super) fn even(count: usize, len: usize) -> SideSegments {
    SideSegments::Even { count, len }
}

pub(super) fn ragged(tokens: usize, bounds: &[(i32, i32)]) -> SideSegments {
    let longest = bounds.iter().map(|(_, len)| *len).max().unwrap_or(0).max(1) as usize;
    SideSegments::Ragged { tokens, longest, bounds: bounds.to_vec() }
}

impl SideSegments {
    pub(super) fn tokens(&self) -> usize {
        match self {
            SideSegments::Even { count, len } => count * len,
            SideSegments::Ragged { tokens, .. } => *tokens,
        }
    }

    pub(super) fn segments(&self) -> Segments {
        match self {
            SideSegments::Even { len, .. } => Segments::Uniform { len: *len },
            SideSegments::Ragged { longest, bounds, .. } => {
                Segments::Ragged { max_segments: bounds.len(), max_len: *longest }
            }
        }
    }

    /// The rows of each segment, in order; empty ones at 0.
    pub(super) fn rows(&self) -> Vec<Range<usize>> {
        match self {
            SideSegments::Even { count, len } => (0..*count).map(|s| s * len..(s + 1) * len).collect(),
            SideSegments::Ragged { bounds, .. } => bounds
                .iter()
                .map(|&(start, len)| if len == 0 { 0..0 } else { start as usize..(start + len) as usize })
                .collect(),
        }
    }

    /// The maximum length of a segment.
    fn longest(&self) -> usize {
        self.rows().iter().map(|rows| rows.len()).max().unwrap_or(0)
    }

    /// Rows outside every segment.
    fn idle(&self) -> Vec<Range<usize>> {
        let rows = self.rows();
        let is_idle = |row: usize| !rows.iter().any(|r| r.contains(&row));
        (0..self.tokens()).filter(|row| is_idle(*row)).map(|row| row..row + 1).collect()
    }

    fn bounds(&self) -> Vec<Input> {
        let SideSegments::Ragged { bounds, .. } = self else { return vec![] };
        let values = |of: fn(&(i32, i32)) -> i32| Data::Values(bounds.iter().map(|b| of(b) as f64).collect());
        [values(|b| b.0), values(|b| b.1)].map(|data| tensor(DType::I32, &[bounds.len()], data)).into()
    }
}

/// A problem, with a label that distinguishes it from others of its shapes.
#[derive(Clone, Debug)]
pub(super) struct Problem {
    pub what: &'static str,
    pub mask: Mask,
    pub q: SideSegments,
    /// `None` if queries and keys have the same segments, from the same tensors.
    pub k: Option<SideSegments>,
    pub heads: usize,
    pub kv_heads: usize,
    pub size: usize,
    pub dtype: DType,
    /// Checks every form.
    pub thorough: bool,
    /// Whether lse has a gradient too.
    pub d_lse: bool,
    pub cap: Cap,
    /// Whether the two intervals are those of trees: a prompt and two answers, each of which attends to the prompt and itself.
    pub is_tree: bool,
}

impl Problem {
    /// Two query heads on one key head of size 64, in bf16.
    pub(super) fn new(what: &'static str, mask: Mask, q: SideSegments, k: Option<SideSegments>) -> Self {
        let (thorough, d_lse, is_tree, cap) = (false, false, false, Cap::NONE);
        Problem {
            what,
            mask,
            q,
            k,
            heads: 2,
            kv_heads: 1,
            size: 64,
            dtype: BF16,
            thorough,
            d_lse,
            is_tree,
            cap,
        }
    }

    pub(super) fn keys(&self) -> &SideSegments {
        self.k.as_ref().unwrap_or(&self.q)
    }

    fn scale(&self) -> f32 {
        (self.size as f32).sqrt().recip()
    }

    pub(super) fn op(&self, grad: bool) -> Op {
        let (scale, mask, q, k) = (self.scale(), self.mask, self.q.segments(), self.keys().segments());
        let (d_lse, cap) = (self.d_lse, self.cap);
        if grad {
            Op::AttentionGrad { scale, cap, mask, q, k, d_lse }
        } else {
            Op::Attention { scale, cap, mask, q, k }
        }
    }

    /// The forward operation's inputs.
    fn inputs(&self) -> Vec<Input> {
        let (tq, tk) = (self.q.tokens(), self.keys().tokens());
        let keys = || x(self.dtype, &[tk, self.kv_heads, self.size]);
        let mut ins = vec![x(self.dtype, &[tq, self.heads, self.size]), keys(), keys()];
        let of_q = self.q.bounds();
        let of_k = match &self.k {
            Some(k) => k.bounds(),
            None => of_q.iter().enumerate().map(|(i, (ty, _))| (ty.clone(), Data::Same(3 + i))).collect(),
        };
        ins.extend(of_q.into_iter().chain(of_k));
        if self.mask == Mask::TwoIntervals {
            ins.push(tensor(DType::I32, &[tq, 4], Data::Values(self.intervals())));
        }
        ins
    }

    /// An interval at the beginning of the segment's keys and one around the query's own; some overlap, some are empty, some
    /// extend past the segment. Rows outside every segment would attend to everything.
    fn intervals(&self) -> Vec<f64> {
        if self.is_tree {
            return tree_intervals(self.q.tokens(), &self.q.rows());
        }
        let mut edges = [0, self.keys().tokens() as i64].repeat(2 * self.q.tokens());
        for (q, k) in self.q.rows().into_iter().zip(self.keys().rows()) {
            for (i, row) in q.clone().enumerate() {
                let (i, first) = (i as i64, k.start as i64);
                let stand = i + k.end as i64 - q.len() as i64;
                let own = [first + i % 7 - 2, first + i % 11, stand - 9, stand + i % 3 * 40 - 3];
                edges[4 * row..4 * row + 4].copy_from_slice(&own);
            }
        }
        edges.into_iter().map(|edge| edge as f64).collect()
    }

    pub(super) fn case(&self, grad: bool) -> Case {
        let mut ins = self.inputs();
        let forward = ins.len();
        let mut of_q = vec![0];
        if grad {
            let q = ins[0].0.clone();
            let of = |out| Data::Of { op: self.op(false), ins: (0..forward).collect(), out };
            let lse = TensorType::new(F32, [q.dims[0], q.dims[1]]);
            ins.extend([(q.clone(), of(0)), (lse.clone(), of(1)), (q, Data::Normal(1.0))]);
            ins.extend(self.d_lse.then_some((lse, Data::Normal(1.0))));
            of_q.extend(forward..ins.len());
        }
        let rows_of_q =
            self.q.idle().into_iter().flat_map(|rows| of_q.iter().map(move |i| (*i, rows.clone())));
        let rows_of_k = self.keys().idle().into_iter().flat_map(|rows| [1, 2].map(|i| (i, rows.clone())));
        let op = self.op(grad);
        let bound = match (self.dtype, grad) {
            (BF16, false) => BF16_BOUND,
            (BF16, true) if self.keys().longest() < 4 => BF16_FEW_KEYS_BOUND,
            (BF16, true) => BF16_GRADIENT_BOUND,
            _ => F32_BOUND,
        };
        let Problem { what, mask, heads, kv_heads, size, .. } = self;
        let side = |side: &SideSegments| match side {
            SideSegments::Even { count, len } => format!("{count} of {len}"),
            SideSegments::Ragged { tokens, bounds, .. } => format!("{} in {tokens}", bounds.len()),
        };
        let (q, k) = (side(&self.q), side(self.keys()));
        let name = format!(
            "{} {what}: {mask:?}, {q} on {k}, {heads} heads on {kv_heads} of {size}, {}",
            op.name(),
            self.dtype.name()
        );
        Case {
            floor: 0.01,
            idle: rows_of_q.chain(rows_of_k).collect(),
            brief: !self.thorough,
            ..Case::new(name, op, ins, bound)
        }
    }
}

/// Intervals of the queries of trees, [tokens, 4]: a third of each tree is a prompt, and its two answers have about equal
/// length. Rows outside every tree attend to nothing.
pub(super) fn tree_intervals(tokens: usize, trees: &[Range<usize>]) -> Vec<f64> {
    let mut edges = vec![0.0; 4 * tokens];
    for tree in trees {
        let prompt = tree.start + tree.len() / 3;
        let second = prompt + (tree.end - prompt) / 2;
        for row in tree.clone() {
            let seen = match row {
                _ if row < prompt => [tree.start, row + 1, 0, 0],
                _ => [tree.start, prompt, if row < second { prompt } else { second }, row + 1],
            };
            edges[4 * row..4 * row + 4].copy_from_slice(&seen.map(|edge| edge as f64));
        }
    }
    edges
}

fn window(back: usize, ahead: usize) -> Mask {
    Mask::Window { back, ahead }
}

/// Empty segments at the beginning, in the middle and at the end, with arbitrary starts; one of a single token; gaps between
/// the others, before the first and after the last.
pub(super) fn gaps() -> SideSegments {
    ragged(150, &[(-7, 0), (3, 33), (40, 1), (99, 0), (45, 63), (110, 2), (113, 32), (160, 0)])
}

/// Three segments without gaps.
fn full() -> SideSegments {
    ragged(162, &[(0, 65), (65, 33), (98, 64)])
}

/// The first keys of caches with capacity for `capacity` tokens each, filled to these lengths.
fn caches(capacity: usize, lengths: &[i32]) -> SideSegments {
    let bounds: Vec<(i32, i32)> =
        lengths.iter().enumerate().map(|(s, len)| ((s * capacity) as i32, *len)).collect();
    ragged(capacity * lengths.len(), &bounds)
}

pub(super) fn problems() -> Vec<Problem> {
    let mut all = vec![];
    masks(&mut all);
    sizes(&mut all);
    groups(&mut all);
    lengths(&mut all);
    whole(&mut all);
    long(&mut all);
    trees(&mut all);
    patterns(&mut all);
    few_queries(&mut all);
    gradients_of_lse(&mut all);
    capped(&mut all);
    all
}

pub(super) fn cases(table: &mut Table) {
    for problem in problems() {
        if !problem.d_lse {
            table.push(problem.case(false));
        }
        table.push(problem.case(true));
    }
}

/// Every mask with every pair of sides, in both types; bf16 in every form.
fn masks(all: &mut Vec<Problem>) {
    let out_of_order = || ragged(130, &[(60, 66), (0, 0), (5, 1), (10, 40), (-1, 0), (55, 4)]);
    let keys = || ragged(140, &[(0, 70), (75, 5), (71, 1), (90, 50), (0, 0), (0, 0)]);
    for mask in [Mask::Full, Mask::Causal, window(9, 0), window(5, 7), Mask::TwoIntervals] {
        let sides = [
            ("equal", even(2, 65), None),
            ("of two lengths", even(3, 20), Some(even(3, 97))),
            ("with gaps", gaps(), None),
            ("of two cuts", out_of_order(), Some(keys())),
            ("ragged keys", even(4, 30), Some(caches(70, &[30, 70, 0, 1]))),
            ("ragged queries", out_of_order(), Some(even(6, 40))),
        ];
        for (i, (what, q, k)) in sides.into_iter().enumerate() {
            let problem = Problem::new(what, mask, q, k);
            let is_usual = i == 0 || i == 2;
            all.push(Problem { thorough: is_usual && mask != window(9, 0), ..problem.clone() });
            if is_usual {
                all.push(Problem { dtype: F32, size: 12, thorough: true, ..problem });
            }
        }
    }
}

/// Scores beyond a cap, in both types; heads of 256 are those of Gemma-2.
fn capped(all: &mut Vec<Problem>) {
    let cap = Cap(Some(0.6));
    for mask in [Mask::Causal, window(9, 0), Mask::TwoIntervals] {
        for (what, q) in [("capped", even(2, 65)), ("capped, with gaps", gaps())] {
            let problem = Problem { cap, ..Problem::new(what, mask, q, None) };
            all.push(Problem { size: 256, ..problem.clone() });
            all.push(Problem { dtype: F32, size: 12, ..problem.clone() });
            all.push(problem);
        }
    }
    let step =
        Problem::new("capped, few queries", Mask::Causal, even(4, 1), Some(caches(70, &[30, 70, 5, 1])));
    all.push(Problem { cap, ..step });
}

fn sizes(all: &mut Vec<Problem>) {
    for size in [16, 24, 40, 72, 80, 96, 128, 192, 256] {
        for (what, mask, q) in [
            ("equal", Mask::Causal, even(2, 63)),
            ("equal", Mask::Full, even(1, 65)),
            ("without gaps", window(40, 0), full()),
            ("with gaps", Mask::Causal, gaps()),
        ] {
            all.push(Problem { size, ..Problem::new(what, mask, q, None) });
        }
    }
    for size in [1, 7, 64, 256] {
        let problem = Problem::new("with gaps", Mask::Causal, gaps(), None);
        all.push(Problem { size, dtype: F32, ..problem });
    }
    // Gemma-3: four heads of 256 on one, one-sided and two-sided windows, several packed texts.
    for (mask, dtype) in
        [(window(20, 0), BF16), (window(10, 10), BF16), (Mask::Full, BF16), (window(20, 0), F32)]
    {
        for (what, q) in [("equal", even(2, 63)), ("with gaps", gaps())] {
            all.push(Problem {
                heads: 4,
                kv_heads: 1,
                size: 256,
                dtype,
                ..Problem::new(what, mask, q, None)
            });
        }
    }
    // With an odd size, rows are unaligned.
    all.push(Problem { size: 21, ..Problem::new("equal", Mask::Causal, even(2, 34), None) });
}

/// Grouped heads.
fn groups(all: &mut Vec<Problem>) {
    for (heads, kv_heads) in [(3, 3), (4, 2), (6, 2), (8, 2), (8, 1)] {
        for (what, mask, q) in [("equal", Mask::Causal, even(2, 33)), ("with gaps", Mask::Full, gaps())] {
            all.push(Problem { heads, kv_heads, ..Problem::new(what, mask, q, None) });
        }
    }
}

/// Lengths that are not multiples of any tile, for queries and keys together and separately.
fn lengths(all: &mut Vec<Problem>) {
    for len in [1, 2, 3, 33, 63, 65, 127, 130, 257] {
        for mask in [Mask::Causal, Mask::Full] {
            all.push(Problem::new("one", mask, even(1, len), None));
        }
    }
    for (lq, lk) in [(33, 130), (130, 33), (127, 128), (2, 257), (257, 2), (64, 257)] {
        for mask in [Mask::Causal, window(20, 30)] {
            all.push(Problem::new("of two lengths", mask, even(1, lq), Some(even(1, lk))));
        }
    }
}

/// Sequences of images, which fit in a block, with one key head per query head: every number of tiles, with and without a few
/// rows after the last, and gradients of lse.
fn whole(all: &mut Vec<Problem>) {
    for (len, size) in
        [(65, 64), (100, 16), (130, 64), (190, 56), (197, 64), (256, 64), (257, 64), (257, 40), (264, 64)]
    {
        let d_lse = len == 264;
        let problem = Problem::new("whole", Mask::Full, even(2, len), None);
        all.push(Problem { heads: 3, kv_heads: 3, size, d_lse, ..problem });
    }
}

/// Over a thousand keys, from which on dq may be summed in device memory: every mask, equal and ragged, unaligned lengths. Few
/// queries, to limit the oracle's time.
fn long(all: &mut Vec<Problem>) {
    let cuts = || ragged(290, &[(200, 77), (0, 0), (3, 131), (140, 9), (281, 1), (290, 0)]);
    let keys = || ragged(1300, &[(200, 64), (0, 200), (270, 1024), (1295, 3), (0, 0), (1298, 2)]);
    for (what, mask, q, k, heads, size) in [
        ("long", Mask::Causal, even(1, 1030), None, [1, 1], 64),
        ("long keys", Mask::Full, even(1, 130), Some(even(1, 1088)), [2, 2], 24),
        ("long keys", window(300, 40), even(1, 100), Some(even(1, 1025)), [2, 1], 40),
        ("long keys", Mask::TwoIntervals, even(1, 130), Some(even(1, 1027)), [1, 1], 64),
        ("long keys, lse", Mask::Causal, even(2, 70), Some(even(2, 1100)), [3, 1], 64),
        ("long of two cuts", Mask::Causal, cuts(), Some(keys()), [2, 1], 64),
        ("long of two cuts", window(90, 3), cuts(), Some(keys()), [1, 1], 16),
        ("long of two cuts", Mask::TwoIntervals, cuts(), Some(keys()), [1, 1], 56),
        ("long, ragged queries", Mask::Full, cuts(), Some(even(6, 1024)), [1, 1], 64),
    ] {
        let [heads, kv_heads] = heads;
        let d_lse = what == "long keys, lse";
        all.push(Problem { heads, kv_heads, size, d_lse, ..Problem::new(what, mask, q, k) });
    }
    let tree = Problem::new("long tree", Mask::TwoIntervals, ragged(1200, &[(10, 1100)]), None);
    all.push(Problem { is_tree: true, ..tree });
}

/// A prompt and two answers: tiles that all, some or none of the queries attend to, at every offset within a tile.
fn trees(all: &mut Vec<Problem>) {
    let two = || ragged(700, &[(3, 420), (430, 0), (424, 260), (690, 1)]);
    for (heads, kv_heads, size) in [(4, 2, 128), (3, 3, 128), (2, 1, 64), (3, 1, 64), (2, 2, 64), (2, 1, 256)]
    {
        let problem = Problem::new("trees", Mask::TwoIntervals, two(), None);
        all.push(Problem { heads, kv_heads, size, is_tree: true, ..problem });
    }
    let problem = Problem::new("one tree", Mask::TwoIntervals, even(1, 320), None);
    all.push(Problem { size: 128, is_tree: true, ..problem });
}

/// Patterns of segments: all tokens in one; one long among empty ones; all of one token; many of one to three; none at all.
fn patterns(all: &mut Vec<Problem>) {
    let mut alone = vec![(0, 0); 64];
    alone[37] = (1, 255);
    let ones: Vec<(i32, i32)> = (0..130).map(|i| (i, 1)).collect();
    let mut short = vec![];
    let mut at = 0;
    for i in 0..130 {
        let len = [1, 3, 2, 0, 2, 1, 3][i % 7];
        short.push((at, len));
        at += len + (i % 5 == 0) as i32;
    }
    let tokens = at as usize + 3;
    for mask in [Mask::Causal, Mask::Full] {
        for (what, side) in [
            ("all in one", ragged(257, &[(0, 257)])),
            ("one long among empty ones", ragged(260, &alone)),
            ("all of one token", ragged(130, &ones)),
            ("many short ones", ragged(tokens, &short)),
            ("none", ragged(70, &[(0, 0), (70, 0), (5, 0)])),
        ] {
            all.push(Problem::new(what, mask, side, None));
        }
    }
}

/// One or a few queries over many keys: decoding, and attending to a sequence once. Caches are filled to any length.
fn few_queries(all: &mut Vec<Problem>) {
    let filled = || caches(130, &[130, 1, 0, 77]);
    for (heads, kv_heads, size) in [(8, 1, 64), (4, 4, 128), (4, 1, 256)] {
        for (what, mask, q, k) in [
            ("one query", Mask::Full, even(2, 1), even(2, 257)),
            ("one query", Mask::Causal, even(4, 1), filled()),
            ("two queries", Mask::Causal, even(4, 2), filled()),
            ("one query", window(50, 0), even(4, 1), filled()),
            ("some queries", Mask::Causal, ragged(9, &[(0, 1), (1, 1), (3, 0), (3, 5)]), filled()),
        ] {
            all.push(Problem { heads, kv_heads, size, ..Problem::new(what, mask, q, Some(k)) });
        }
    }
    // Most rows of queries lie in no segment.
    for mask in [Mask::Causal, window(50, 0)] {
        let q = ragged(150, &[(149, 1), (31, 2), (0, 0), (64, 5)]);
        all.push(Problem {
            heads: 8,
            kv_heads: 2,
            ..Problem::new("few of many rows", mask, q, Some(filled()))
        });
    }
    // More query heads per key head than one, and than two, sets of columns of a product hold; odd sizes.
    for (heads, kv_heads, size, mask) in [
        (12, 1, 128, Mask::Causal),
        (24, 1, 64, window(5, 60)),
        (12, 1, 192, Mask::TwoIntervals),
        (3, 3, 72, Mask::TwoIntervals),
        (4, 2, 24, window(20, 0)),
    ] {
        let q = ragged(9, &[(0, 1), (1, 1), (3, 0), (3, 5)]);
        all.push(Problem { heads, kv_heads, size, ..Problem::new("some queries", mask, q, Some(filled())) });
    }
    // Attending to images: one, several, or none of the images, whose keys exist nevertheless.
    for dtype in [BF16, F32] {
        let looks = ragged(14, &[(0, 1), (2, 8), (10, 0), (10, 3)]);
        let problem = Problem::new("looks at images", Mask::Full, looks, Some(even(4, 257)));
        all.push(Problem { heads: 6, kv_heads: 6, dtype, ..problem });
    }
}

/// Gradients of lse in addition to those of o.
fn gradients_of_lse(all: &mut Vec<Problem>) {
    for (what, mask, q, k) in [
        ("equal, lse", Mask::Causal, even(2, 65), None),
        ("with gaps, lse", window(5, 7), gaps(), None),
        ("queries without keys, lse", Mask::Causal, even(2, 33), Some(even(2, 20))),
        ("one query, lse", Mask::Full, even(4, 1), Some(caches(130, &[130, 1, 0, 77]))),
    ] {
        let problem = Problem { d_lse: true, ..Problem::new(what, mask, q, k) };
        all.push(Problem { dtype: F32, size: 12, ..problem.clone() });
        all.push(problem);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::cuda::kernels::attention::choice::serving;
    use crate::cuda::{self, AttentionKernel, Facts};
    use crate::verify::check;
    use crate::verify::trial::{Trial, TrialLayout};

    /// Checks both directions on the CPU.
    fn agree(add: fn(&mut Vec<Problem>)) {
        let mut problems = vec![];
        add(&mut problems);
        let cases = problems.iter().flat_map(|problem| [problem.case(false), problem.case(true)]);
        let failed: Vec<String> =
            cases.filter_map(|case| check(&case).err().map(|why| format!("{}: {why}", case.name))).collect();
        assert!(failed.is_empty(), "{} cases fail:\n{}", failed.len(), failed.join("\n"));
    }

    #[test]
    fn every_mask_with_every_pair_of_sides() {
        agree(masks);
    }

    #[test]
    fn heads_of_every_size() {
        agree(sizes);
    }

    #[test]
    fn heads_that_share_keys() {
        agree(groups);
    }

    #[test]
    fn unaligned_lengths() {
        agree(lengths);
    }

    #[test]
    fn prompts_and_their_answers() {
        agree(|all| {
            trees(all);
            all.retain(|problem| [problem.heads, problem.kv_heads, problem.size] == [2, 1, 64]);
        });
    }

    #[test]
    fn every_pattern_of_segments() {
        agree(patterns);
    }

    #[test]
    fn few_queries_over_many_keys() {
        agree(few_queries);
    }

    #[test]
    fn gradients_of_lse_too() {
        agree(gradients_of_lse);
    }

    /// Every kernel has cases: tensor-core kernels serve those in bf16 with supported heads, dense and with gaps between rows.
    #[test]
    fn cases_are_served_by_the_kernels_they_are_for() {
        let facts = Facts { cudnn: Some(91900), ..Facts::on_paper("sm_90a") };
        let mut count = BTreeMap::new();
        for problem in problems() {
            for case in [problem.case(false), problem.case(true)] {
                let kernels = cuda::KERNELS.iter().copied().flatten();
                let row =
                    kernels.map(|kernel| kernel.row).find(|row| row.op == case.op.kind()).expect("a row");
                let trial = Trial::unfilled(&case, row);
                let of = |form: TrialLayout| serving(&trial.launch(form, 256, 1).0, &facts);
                let (dense, spaced) = (of(TrialLayout::Dense { threads: 1 }), of(TrialLayout::Spaced));
                // cuDNN only supports packed tensors without gaps.
                let gapless = |kernel: &&AttentionKernel| !spaced.contains(kernel);
                assert!(dense.iter().filter(gapless).all(|k| *k == AttentionKernel::Cudnn), "{}", case.name);
                assert!(of(TrialLayout::Strided).contains(&AttentionKernel::Fma), "{}", case.name);
                let is_for_units = problem.dtype == BF16 && problem.size % 8 == 0 && problem.size >= 16;
                assert_eq!(dense.contains(&AttentionKernel::Mma), is_for_units, "{}", case.name);
                for kernel in dense {
                    *count.entry((kernel.name(), case.op.name())).or_insert(0) += 1;
                }
            }
        }
        println!("{count:?}");
        for kernel in ["cudnn", "mma", "fma"] {
            for direction in ["attention", "attention_grad"] {
                assert!(count.get(&(kernel, direction)).is_some_and(|n| *n > 40), "{kernel} {direction}");
            }
        }
    }

    /// Elements outside the segments are NaN for the kernels, and all segments leave some.
    #[test]
    fn outside_is_poisoned() {
        let case = Problem::new("with gaps", Mask::Causal, gaps(), None).case(true);
        let rows = |input: usize| case.idle.iter().filter(|(i, _)| *i == input).count();
        // 150 tokens, of which segments cover 131: in q, k, v, o, lse and do.
        assert_eq!([0, 1, 2, 7, 8, 9].map(rows), [19; 6]);
    }
}
