//! Verifies attention at real sizes on sampled queries of sampled segments, forward and backward.
//!
//! A query depends only on the keys of its own segment, so the oracle needs just a few queries and these keys. In the backward
//! pass the incoming gradient is zero except in the sampled queries, one sample per segment.

use std::ops::Range;

use flatout_ir::ops::attention::{Mask, Segments};
use flatout_ir::ops::cap::Cap;
use flatout_ir::random::philox;
use flatout_ir::types::DType;
use flatout_ir::{Op, View};

use crate::verify::attention::tree_intervals;

use super::{BF16, Bench, Check, Fill, Noise, Sizes, WIDE, error, narrow, shape, type_of, wanted};

/// Bound for o: weights and the result are rounded to bf16.
const BOUND: f64 = 3e-3;
/// Bound for gradients: the incoming one and o are rounded too.
const GRADIENT_BOUND: f64 = 6e-3;

/// Queries per sample.
const QUERIES: usize = 16;
/// Number of segments sampled.
const SAMPLES: usize = 7;

/// Rows of queries and of keys of a segment.
pub(in crate::verify) type Pair = (Range<usize>, Range<usize>);

#[derive(Clone, Debug)]
pub(in crate::verify) struct Problem {
    pub what: String,
    pub mask: Mask,
    pub tokens: usize,
    pub keys: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub size: usize,
    pub segments: Vec<Pair>,
    pub q: Segments,
    pub k: Segments,
    /// Intervals of the queries, [tokens, 4]; empty with other masks.
    pub intervals: Vec<f64>,
}

/// Every problem for the sizes of a model, and some that the model does not have.
pub(super) fn checks(s: Sizes) -> Vec<Check> {
    let tokens = s.tokens;
    let model = |mask| equal(mask, tokens / s.context, s.context, s.heads, s.kv_heads, s.head);
    let wide =
        |heads, kv_heads, size, mask| packed("packed", tokens, s.segments, 512, heads, kv_heads, size, mask);
    let many = packed("packed short", tokens / 4, tokens / 12, 3, s.heads, s.kv_heads, s.head, Mask::Causal);
    // Segments long enough for kernels that sum over many keys differently than over few.
    let long = packed(
        "packed long",
        tokens,
        s.segments / 12 + 1,
        2 * s.context,
        s.heads,
        s.kv_heads,
        s.head,
        Mask::Causal,
    );
    let problems = [
        model(Mask::Causal),
        model(Mask::Full),
        model(Mask::Window { back: s.context / 3, ahead: 0 }),
        equal(Mask::Causal, tokens / s.context / 2, s.context, 16, 8, 2 * s.head),
        long,
        wide(s.heads, s.kv_heads, s.head, Mask::Causal),
        wide(s.heads, s.kv_heads, s.head, Mask::Full),
        wide(4, 1, 4 * s.head, Mask::Causal),
        many,
        decode(s.caches, 4 * s.context, 8, 1, 2 * s.head),
    ];
    problems.into_iter().flat_map(|problem| [forward(problem.clone()), backward(problem)]).collect()
}

pub(in crate::verify) fn equal(
    mask: Mask,
    count: usize,
    len: usize,
    heads: usize,
    kv_heads: usize,
    size: usize,
) -> Problem {
    let rows = |s: usize| s * len..(s + 1) * len;
    let segments = Segments::Uniform { len };
    Problem {
        what: format!("{count} sequences of {len}"),
        mask,
        tokens: count * len,
        keys: count * len,
        heads,
        kv_heads,
        size,
        segments: (0..count).map(|s| (rows(s), rows(s))).collect(),
        q: segments,
        k: segments,
        intervals: vec![],
    }
}

/// Segments of 1 to `longest` tokens, contiguous; some tokens after them are in no segment.
#[allow(clippy::too_many_arguments, reason = "a table of problems with these columns")]
pub(in crate::verify) fn packed(
    what: &str,
    tokens: usize,
    count: usize,
    longest: usize,
    heads: usize,
    kv_heads: usize,
    size: usize,
    mask: Mask,
) -> Problem {
    let lengths = lengths(tokens, count, longest);
    let mut at = 0;
    let rows: Vec<Range<usize>> = lengths
        .iter()
        .map(|len| {
            at += len;
            at - len..at
        })
        .collect();
    let segments = Segments::Ragged { max_segments: count, max_len: longest };
    Problem {
        what: format!("{what}, {at} tokens in {count} segments"),
        mask,
        tokens,
        keys: tokens,
        heads,
        kv_heads,
        size,
        segments: rows.into_iter().map(|rows| (rows.clone(), rows)).collect(),
        q: segments,
        k: segments,
        intervals: vec![],
    }
}

/// Trees of `len` tokens, as preference pairs have them.
pub(in crate::verify) fn trees(
    count: usize,
    len: usize,
    heads: usize,
    kv_heads: usize,
    size: usize,
) -> Problem {
    let equal = equal(Mask::TwoIntervals, count, len, heads, kv_heads, size);
    let rows: Vec<Range<usize>> = equal.segments.iter().map(|(q, _)| q.clone()).collect();
    let ragged = Segments::Ragged { max_segments: count, max_len: len };
    let intervals = tree_intervals(equal.tokens, &rows);
    Problem { what: format!("{count} trees of {len}"), q: ragged, k: ragged, intervals, ..equal }
}

/// `count` fixed lengths from 1 to `longest` that together fit in the tokens; their mean is 0.39 of the longest, 200 of 512.
fn lengths(tokens: usize, count: usize, longest: usize) -> Vec<usize> {
    let mut left = tokens;
    let mut length = |i: usize| {
        let even = philox([i as u32, 0, 0, 0], [325, 512])[0] as f64 / 4_294_967_296.0;
        let drawn = 1 + (even.powf(1.55) * longest as f64) as usize;
        // Leaves a token for each of the remaining segments.
        let len = drawn.min(left.saturating_sub(count - 1 - i));
        left -= len;
        len
    };
    (0..count).map(&mut length).collect()
}

/// One query over each of several caches, filled to any length.
pub(in crate::verify) fn decode(
    count: usize,
    capacity: usize,
    heads: usize,
    kv_heads: usize,
    size: usize,
) -> Problem {
    let filled = |s: usize| 1 + philox([s as u32, 1, 0, 0], [7, 7])[0] as usize % capacity;
    let keys = |s: usize| s * capacity..s * capacity + if s == 0 { capacity } else { filled(s) };
    Problem {
        what: format!("one query over {count} caches of up to {capacity}"),
        mask: Mask::Causal,
        tokens: count,
        keys: count * capacity,
        heads,
        kv_heads,
        size,
        segments: (0..count).map(|s| (s..s + 1, keys(s))).collect(),
        q: Segments::Uniform { len: 1 },
        k: Segments::Ragged { max_segments: count, max_len: capacity },
        intervals: vec![],
    }
}

/// Queries of a segment, the keys that the oracle needs for them, and the key head.
#[derive(Clone, Debug)]
struct Sample {
    queries: Range<usize>,
    keys: Range<usize>,
    /// Keys of the segment that none of the queries attends to.
    unseen: Range<usize>,
    head: usize,
}

impl Problem {
    fn scale(&self) -> f32 {
        (self.size as f32).powf(-0.5)
    }

    pub(in crate::verify) fn op(&self, grad: bool, q: Segments, k: Segments) -> Op {
        let (scale, mask) = (self.scale(), self.mask);
        if grad {
            Op::AttentionGrad { scale, cap: Cap::NONE, mask, q, k, d_lse: false }
        } else {
            Op::Attention { scale, cap: Cap::NONE, mask, q, k }
        }
    }

    /// The operation on the inputs of a sample.
    fn sampled_op(&self, grad: bool, sample: &Sample) -> Op {
        let (q, k) = (sample.queries.len(), sample.keys.len());
        self.op(grad, Segments::Uniform { len: q }, Segments::Uniform { len: k })
    }

    /// From the first segment to the last, with queries from the beginning of a segment to its end.
    fn samples(&self) -> Vec<Sample> {
        let last = self.segments.len() - 1;
        let mut places: Vec<usize> = (0..SAMPLES).map(|i| i * last / (SAMPLES - 1)).collect();
        places.dedup();
        let sample = |(i, segment): (usize, usize)| {
            let (q, k) = self.segments[segment].clone();
            let count = QUERIES.min(q.len());
            let behind = (q.len() - count) * ((i * 5) % SAMPLES) / (SAMPLES - 1);
            let queries = q.end - behind - count..q.end - behind;
            let looks_ahead = !matches!(self.mask, Mask::Causal | Mask::Window { ahead: 0, .. });
            let seen = if looks_ahead { k.end } else { k.end - behind };
            Sample { queries, keys: k.start..seen, unseen: seen..k.end, head: (i * 3) % self.kv_heads }
        };
        places.into_iter().enumerate().map(sample).collect()
    }

    pub(in crate::verify) fn lay(&self, bench: &mut Bench<'_>) -> Vec<View> {
        let keys = [self.keys, self.kv_heads, self.size];
        let mut ins = vec![bench.input(BF16, &[self.tokens, self.heads, self.size], WIDE)];
        ins.extend([(); 2].map(|()| bench.input(BF16, &keys, WIDE)));
        let mut bounds = |rows: fn(&Pair) -> &Range<usize>| {
            let values = |of: fn(&Range<usize>) -> usize| {
                Fill::Values(self.segments.iter().map(|pair| of(rows(pair)) as f64).collect())
            };
            [values(|r| r.start), values(|r| r.len())]
                .map(|fill| bench.input(DType::I32, &[self.segments.len()], fill))
        };
        if let Segments::Ragged { .. } = self.q {
            ins.extend(bounds(|pair| &pair.0));
        }
        match (self.q, self.k) {
            // Queries and keys have the same segments, from the same tensors.
            (Segments::Ragged { .. }, Segments::Ragged { .. }) => {
                ins.extend([ins[3].clone(), ins[4].clone()])
            }
            (_, Segments::Ragged { .. }) => ins.extend(bounds(|pair| &pair.1)),
            _ => {}
        }
        if self.mask == Mask::TwoIntervals {
            ins.push(bench.input(DType::I32, &[self.tokens, 4], Fill::Values(self.intervals.clone())));
        }
        ins
    }

    /// Forward, then backward with a gradient only in the sampled queries: returns the latter's inputs and outputs.
    fn lay_backward(&self, bench: &mut Bench<'_>) -> Result<(Vec<View>, Vec<View>), String> {
        let mut ins = self.lay(bench);
        let rows = self.samples().into_iter().flat_map(|sample| sample.queries).collect();
        let d = bench.input(BF16, &ins[0].dims.clone(), Fill::Rows(Noise::WIDE, rows));
        let saved = bench.launch(self.op(false, self.q, self.k), &ins)?;
        ins.extend(saved.into_iter().chain([d]));
        let outs = bench.launch(self.op(true, self.q, self.k), &ins)?;
        Ok((ins, outs))
    }

    fn queries(&self, view: &View, sample: &Sample) -> View {
        let group = self.heads / self.kv_heads;
        narrow(&narrow(view, 0, sample.queries.clone()), 1, sample.head * group..(sample.head + 1) * group)
    }

    fn keys(&self, view: &View, sample: &Sample, rows: &Range<usize>) -> View {
        narrow(&narrow(view, 0, rows.clone()), 1, sample.head..sample.head + 1)
    }

    fn name(&self, direction: &str) -> String {
        let (q, k) = ([self.tokens, self.heads, self.size], [self.keys, self.kv_heads, self.size]);
        let (mask, what) = (self.mask, &self.what);
        format!("real attention {direction} {mask:?}, {what}, {} on {}", shape(BF16, &q), shape(BF16, &k))
    }
}

/// The relative L2 error. Elements below 0.01 count as that large: gradients of a token that attends only to itself cancel to
/// 0.
fn distance(got: &[f64], want: &[f64]) -> f64 {
    let off: f64 = got.iter().zip(want).map(|(got, want)| (got - want) * (got - want)).sum();
    let size: f64 = want.iter().map(|want| (want * want).max(1e-4)).sum();
    if off.is_finite() { (off / size).sqrt() } else { f64::INFINITY }
}

fn forward(problem: Problem) -> Check {
    let (name, op) = (problem.name("forward"), problem.op(false, problem.q, problem.k));
    let laid = problem.clone();
    let lay = move |mut bench: Bench<'_>| {
        let ins = laid.lay(&mut bench);
        bench.launch(laid.op(false, laid.q, laid.k), &ins)?;
        Ok(bench.launches)
    };
    let run = move |mut bench: Bench<'_>| {
        let ins = problem.lay(&mut bench);
        let outs = bench.launch(problem.op(false, problem.q, problem.k), &ins)?;
        let ran = bench.run()?;
        let mut worst: f64 = 0.0;
        for sample in problem.samples() {
            let keys = |view| problem.keys(view, &sample, &sample.keys);
            let parts = [problem.queries(&ins[0], &sample), keys(&ins[1]), keys(&ins[2])];
            let parts = parts.iter().map(|view| ran.part(view)).collect::<Result<Vec<_>, _>>()?;
            let want = wanted(&problem.sampled_op(false, &sample), &parts);
            for (out, want) in outs.iter().zip(&want) {
                worst = worst.max(distance(&ran.read(&problem.queries(out, &sample))?, want));
            }
        }
        Ok(worst)
    };
    Check { name, bound: BOUND, op, dtype: BF16, lay: Some(Box::new(lay)), run: Box::new(run) }
}

fn backward(problem: Problem) -> Check {
    let (name, op) = (problem.name("backward"), problem.op(true, problem.q, problem.k));
    let laid = problem.clone();
    let lay = move |mut bench: Bench<'_>| {
        laid.lay_backward(&mut bench)?;
        Ok(bench.launches)
    };
    let run = move |mut bench: Bench<'_>| {
        let samples = problem.samples();
        let (ins, outs) = problem.lay_backward(&mut bench)?;
        let [.., o, lse, d] = &ins[..] else { unreachable!("o, lse and do come last") };
        let ran = bench.run()?;
        let mut worst: f64 = 0.0;
        for sample in &samples {
            let queries = |view| problem.queries(view, sample);
            let keys = |view| problem.keys(view, sample, &sample.keys);
            let parts = [queries(&ins[0]), keys(&ins[1]), keys(&ins[2])];
            let mut parts = parts.iter().map(|view| ran.part(view)).collect::<Result<Vec<_>, _>>()?;
            let forward = wanted(&problem.sampled_op(false, sample), &parts);
            for (view, value) in [o, lse].into_iter().zip(forward) {
                parts.push((type_of(&queries(view)), value));
            }
            parts.push(ran.part(&queries(d))?);
            let want = wanted(&problem.sampled_op(true, sample), &parts);
            let places = [queries(&outs[0]), keys(&outs[1]), keys(&outs[2])];
            for (place, want) in places.iter().zip(&want) {
                worst = worst.max(distance(&ran.read(place)?, want));
            }
            for out in outs[1..].iter().filter(|_| !sample.unseen.is_empty()) {
                let rest = ran.read(&problem.keys(out, sample, &sample.unseen))?;
                worst = worst.max(error(&rest, &vec![0.0; rest.len()]));
            }
        }
        Ok(worst)
    };
    Check { name, bound: GRADIENT_BOUND, op, dtype: BF16, lay: Some(Box::new(lay)), run: Box::new(run) }
}
