//! Verifies packing: the bits of separate calls, and one captured graph for any segments.
//!
//! A packed call must give the bits of one call per segment, and one captured graph must serve any segments.

use std::ops::Range;

use flatout_ir::ops::attention::Mask;
use flatout_ir::types::DType;
use rayon::prelude::*;

use super::attention::{Problem, SideSegments, even, gaps, ragged};
use super::trial::{Trial, TrialLayout};
use super::{Case, CaseDevice, Data, KernelSelection, judge, kernel_of};
use crate::cuda::{self, AttentionKernel};

/// A property of packed attention, checked on one problem.
pub struct Promise {
    pub name: String,
    kind: PromiseKind,
}

enum PromiseKind {
    /// A packed problem gives the bits of its segments run separately.
    Separate(Problem, bool),
    /// One session runs these problems one after another.
    Replay(Vec<Problem>, bool),
}

pub fn promises() -> Vec<Promise> {
    let mut all = vec![];
    let directions = [("attention", false), ("attention_grad", true)];
    for (direction, grad) in directions {
        for problem in packed() {
            let Problem { what, mask, heads, kv_heads, size, dtype, .. } = &problem;
            let name = format!(
                "{direction} packed as one by one, {what}: {mask:?}, {heads} heads on {kv_heads} of {size}, {}",
                dtype.name()
            );
            all.push(Promise { name, kind: PromiseKind::Separate(problem, grad) });
        }
        for (mask, size) in [(Mask::Causal, 64), (Mask::Full, 128), (Mask::TwoIntervals, 64)] {
            let problems: Vec<Problem> = changing()
                .into_iter()
                .map(|side| Problem { size, ..Problem::new("replayed", mask, side, None) })
                .collect();
            let name = format!("{direction} replayed with other segments: {mask:?}, size {size}");
            all.push(Promise { name, kind: PromiseKind::Replay(problems, grad) });
        }
    }
    all
}

fn packed() -> Vec<Problem> {
    let window = Mask::Window { back: 20, ahead: 3 };
    let long = ragged(300, &[(1, 257), (0, 0), (258, 40)]);
    // Long enough that a kernel could use another layout for a separate segment than for many.
    let longer = ragged(1600, &[(0, 700), (700, 1), (705, 90), (800, 800)]);
    let over_caches = ragged(280, &[(0, 131), (140, 2), (150, 130)]);
    vec![
        Problem::new("with gaps", Mask::Causal, gaps(), None),
        Problem { heads: 6, kv_heads: 2, ..Problem::new("with gaps", Mask::Full, gaps(), None) },
        Problem { size: 128, ..Problem::new("with gaps", window, gaps(), None) },
        Problem::new("with gaps", Mask::TwoIntervals, gaps(), None),
        Problem { heads: 3, ..Problem::new("one long", Mask::Causal, long.clone(), None) },
        Problem { size: 256, ..Problem::new("one long", Mask::Causal, long.clone(), None) },
        Problem { size: 72, ..Problem::new("one long", Mask::Full, long, None) },
        Problem::new("two longer", Mask::Causal, longer.clone(), None),
        Problem::new("two longer", Mask::Full, longer.clone(), None),
        Problem { size: 128, ..Problem::new("two longer", Mask::Causal, longer, None) },
        Problem { heads: 8, ..Problem::new("one query each", Mask::Causal, even(3, 1), Some(over_caches)) },
        Problem { dtype: DType::F32, heads: 6, ..Problem::new("with gaps", Mask::Causal, gaps(), None) },
    ]
}

/// Segments within one capacity: eight in 150 tokens, none longer than 128.
fn changing() -> Vec<SideSegments> {
    let bounds: [&[(i32, i32)]; 6] = [
        &[(0, 20), (20, 1), (21, 57), (0, 0), (78, 12), (90, 60), (150, 0), (150, 0)],
        &[(0, 128)],
        &[],
        &[(0, 1), (1, 2), (3, 3), (6, 1), (7, 33), (40, 31), (71, 65), (136, 14)],
        &[(100, 50), (60, 33), (7, 0), (2, 40)],
        &[(22, 128)],
    ];
    let filled = |bounds: &[(i32, i32)]| {
        let mut bounds = bounds.to_vec();
        bounds.resize(8, (0, 0));
        SideSegments::Ragged { tokens: 150, longest: 128, bounds }
    };
    bounds.map(filled).into()
}

impl Promise {
    /// The kernel of each check with the worst error or what is wrong; equal bits have error 0.
    pub fn check(&self, place: CaseDevice<'_>) -> Vec<(String, Result<f64, String>)> {
        let (first, grad) = match &self.kind {
            PromiseKind::Separate(problem, grad) => (problem, *grad),
            PromiseKind::Replay(problems, grad) => (&problems[0], *grad),
        };
        let case = first.case(grad);
        let row = match kernel_of(&case, &place.target()) {
            Ok(row) => row,
            Err(why) => return vec![("none".into(), Err(why))],
        };
        let deterministic = matches!(self.kind, PromiseKind::Separate(..));
        let options = cuda::Options { deterministic, ..Default::default() };
        let mut selections =
            place.selections(&[Trial::unfilled(&case, row).launch(DENSE, 256, 1).0], options);
        // cuDNN has different engines for packed and equal sequences, and guarantees no equal bits between them.
        selections.retain(|selection| {
            !deterministic || *selection != KernelSelection::attention(AttentionKernel::Cudnn)
        });
        let named = |selection: KernelSelection, error| (selection.name(row.name), error);
        match &self.kind {
            PromiseKind::Separate(problem, grad) => selections
                .into_iter()
                .map(|selection| named(selection, separate(problem, *grad, place, selection)))
                .collect(),
            PromiseKind::Replay(problems, grad) => {
                let cases: Vec<Case> = problems.iter().map(|problem| problem.case(*grad)).collect();
                let with_oracle = |case| {
                    let trial = Trial::new(case, row);
                    let wanted = trial.oracle();
                    (trial, wanted)
                };
                let runs: Vec<_> = cases.par_iter().map(with_oracle).collect();
                selections
                    .into_iter()
                    .map(|selection| named(selection, replay(&runs, place, selection)))
                    .collect()
            }
        }
    }

    /// Bound on the error of each output; 0 if bits must be equal.
    pub fn bound(&self) -> f64 {
        match &self.kind {
            PromiseKind::Separate(..) => 0.0,
            PromiseKind::Replay(problems, grad) => problems[0].case(*grad).bound,
        }
    }

    /// The cases of the problems, for compiling ahead.
    pub fn cases(&self) -> Vec<Case> {
        match &self.kind {
            PromiseKind::Separate(problem, grad) => {
                let trial_of = |part: &SegmentProblem| part.problem.case(*grad);
                parts(problem).iter().map(trial_of).chain([problem.case(*grad)]).collect()
            }
            PromiseKind::Replay(problems, grad) => vec![problems[0].case(*grad)],
        }
    }
}

const DENSE: TrialLayout = TrialLayout::Dense { threads: 2 };

fn equal_bits(selection: KernelSelection) -> cuda::Options {
    selection.options(cuda::Options { deterministic: true, ..Default::default() })
}

struct SegmentProblem {
    problem: Problem,
    q: Range<usize>,
    k: Range<usize>,
}

fn parts(of: &Problem) -> Vec<SegmentProblem> {
    let pairs = of.q.rows().into_iter().zip(of.keys().rows());
    let has_both = |(q, k): &(Range<usize>, Range<usize>)| !q.is_empty() && !k.is_empty();
    let part = |(q, k): (Range<usize>, Range<usize>)| {
        let (one_q, one_k) = (even(1, q.len()), even(1, k.len()));
        SegmentProblem { problem: Problem { q: one_q, k: Some(one_k), ..of.clone() }, q, k }
    };
    pairs.filter(has_both).map(part).collect()
}

fn separate(
    problem: &Problem,
    grad: bool,
    place: CaseDevice<'_>,
    selection: KernelSelection,
) -> Result<f64, String> {
    let mut case = problem.case(grad);
    // Bits are compared with bits, so o and lse may be arbitrary: the oracle is not needed.
    for (ty, data) in &mut case.ins {
        if let Data::Of { .. } = data {
            *data = if ty.dtype == DType::F32 && ty.rank() == 2 {
                Data::Between(4.0, 5.0)
            } else {
                Data::Normal(0.1)
            };
        }
    }
    let row = kernel_of(&case, &place.target())?;
    let whole = Trial::new(&case, row);
    let together = whole.run(DENSE, place, equal_bits(selection))?;
    for part in parts(problem) {
        let mut alone = part.problem.case(grad);
        // Maps the part's inputs to those of the whole, which also has segment bounds.
        let bounds = case.ins.len() - alone.ins.len();
        for (i, (ty, data)) in alone.ins.iter_mut().enumerate() {
            let from = if i < 3 { i } else { i + bounds };
            let rows = if i == 1 || i == 2 { &part.k } else { &part.q };
            let width = ty.elements() / ty.dims[0];
            let mut values = whole.values(from)[rows.start * width..rows.end * width].to_vec();
            if ty.dtype == DType::I32 {
                // Intervals count keys of the whole tensor.
                values.iter_mut().for_each(|edge| *edge -= part.k.start as f64);
            }
            *data = Data::Values(values);
        }
        let alone_row = kernel_of(&alone, &place.target())?;
        let alone = Trial::new(&alone, alone_row);
        // The decoding kernel does not support a segment with as many queries as keys.
        if !selection.takes(&alone, DENSE, place, equal_bits(selection)) {
            continue;
        }
        let got = alone.run(DENSE, place, equal_bits(selection))?;
        for (o, (got, all)) in got.iter().zip(&together).enumerate() {
            let (got, all) = (got.as_ref().expect("every output"), all.as_ref().expect("every output"));
            let rows = if grad && o > 0 { &part.k } else { &part.q };
            let width = got.len() / rows.len();
            if *got != all[rows.start * width..rows.end * width] {
                let (q, k) = (part.q.len(), part.k.len());
                return Err(format!("output {o}: {q} queries on {k} keys have other bits alone"));
            }
        }
    }
    Ok(0.0)
}

/// One session runs trials one after another, each paired with the oracle's results.
fn replay(
    runs: &[(Trial<'_>, Vec<Vec<f64>>)],
    place: CaseDevice<'_>,
    selection: KernelSelection,
) -> Result<f64, String> {
    let mut opened = runs[0].0.open(DENSE, place, selection.options(cuda::Options::default()))?;
    let mut worst: f64 = 0.0;
    for (i, (trial, wanted)) in runs.iter().enumerate() {
        let got = trial.run_in(&mut opened)?;
        let error = judge(trial.case(), trial.outs(), &got, wanted);
        worst = worst.max(error.map_err(|why| format!("run {i}: {why}"))?);
    }
    Ok(worst)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_attention_keeps_its_promises_on_the_cpu() {
        let failed: Vec<String> = promises()
            .iter()
            .flat_map(|promise| {
                promise.check(CaseDevice::Cpu).into_iter().map(|(_, error)| (&promise.name, error))
            })
            .filter_map(|(name, error)| error.err().map(|why| format!("{name}: {why}")))
            .collect();
        assert!(failed.is_empty(), "{} promises are broken:\n{}", failed.len(), failed.join("\n"));
    }
}
