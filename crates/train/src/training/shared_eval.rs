//! Evaluation by several ranks: each runs `eval` on some batches, and every rank counts the results of all in order.

use flatout_ir::{Plan, Role};
use flatout_runtime::Session;
use flatout_waits::{self as waits, Unit};
use serde::{Deserialize, Serialize};

use crate::Failure;
use crate::ranks::{Ranks, message};
use crate::run::signal;
use crate::tasks::batch::{Draw, EvalSet};
use crate::training::evaluate::{EvalResults, Evaluator, Sums, evaluate};

/// Runs `eval` on a set in batches of a capacity. Batch `b` is that of rank `b` modulo their number; sums are made batch by
/// batch in f64 on every rank, so that their bits do not depend on how many ranks there are. A reason to stop on any rank
/// ends it on all. Where layers gather what they read, all ranks run the plan equally often.
pub fn evaluate_among(
    ranks: &Ranks,
    session: &mut Session,
    (set, capacity, draw): (&dyn EvalSet, usize, Draw),
    step: u64,
    stop: &mut dyn FnMut() -> Option<&'static str>,
    see: &mut dyn FnMut(&EvalResults),
) -> Result<Result<Sums, &'static str>, Failure> {
    if !ranks.are_many() {
        return evaluate(session, set, capacity, draw, stop, &mut |_, results| see(results));
    }
    with_averages(ranks, session, |session| {
        let evaluator = Evaluator::new(session);
        let mut sums = Sums::default();
        let batches = set.batches(capacity);
        let wait = waits::begin("evaluating", Unit::Things("batches"), Some(batches as u64));
        for first in (0..batches).step_by(ranks.count()) {
            ranks.at(step, "evaluating", first);
            let own = first + ranks.rank();
            let results = match own < batches {
                true => Some(evaluator.run(session, set, own, capacity, draw)?.1),
                false => {
                    run_for_others(session)?;
                    None
                }
            };
            let asked = stop().and_then(signal::number_of);
            let told = Told { asked, part: results.as_ref().map(BatchResults::of) };
            let all: Vec<Told> = message::read_all(&ranks.gather_bytes(&message::write(&told))?)?;
            if let Some(reason) = all.iter().find_map(|told| told.asked.and_then(signal::of_number)) {
                return Ok(Err(reason));
            }
            for part in all.into_iter().filter_map(|told| told.part) {
                let results = part.results();
                sums.add(&results);
                see(&results);
                wait.add(1);
            }
        }
        Ok(Ok(sums))
    })
}

/// Runs `eval` where other ranks do and this one has no batch, if ranks exchange in it: on the inputs that are there, and nobody reads
/// the results.
pub fn run_for_others(session: &mut Session) -> Result<(), Failure> {
    let exchanges = session.plans().plan(Role::Eval).is_some_and(Plan::has_exchanges);
    if exchanges {
        session.run(Role::Eval)?;
    }
    Ok(())
}

/// Does something that runs `eval`. Averages that ranks have shares of are gathered to where `eval` reads weights, and the
/// weights brought back afterwards. Every rank calls this.
fn with_averages<T>(
    ranks: &Ranks,
    session: &mut Session,
    work: impl FnOnce(&mut Session) -> Result<T, Failure>,
) -> Result<T, Failure> {
    if session.plans().plan(Role::Average).is_none() {
        return work(session);
    }
    ranks.called("average");
    session.run(Role::Average)?;
    let done = work(session)?;
    ranks.called("derive");
    session.run(Role::Derive)?;
    Ok(done)
}

/// A rank's word between batches.
#[derive(Serialize, Deserialize)]
struct Told {
    /// The number of the reason to stop, where it has one.
    asked: Option<usize>,
    part: Option<BatchResults>,
}

/// The results of a batch. Floats are sent as their bits: some are not finite, and all arrive as they were.
#[derive(Serialize, Deserialize)]
struct BatchResults {
    loss: u32,
    weight: u32,
    class_logits: Vec<u32>,
    logp: Vec<u32>,
    best_logp: Vec<u32>,
    sums: Vec<(String, u32)>,
    labels: Vec<i32>,
    answers: Vec<Option<u32>>,
}

impl BatchResults {
    fn of(results: &EvalResults) -> BatchResults {
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect();
        BatchResults {
            loss: results.loss.to_bits(),
            weight: results.weight.to_bits(),
            class_logits: bits(&results.class_logits),
            logp: bits(&results.logp),
            best_logp: bits(&results.best_logp),
            sums: results.sums.iter().map(|(name, sum)| (name.clone(), sum.to_bits())).collect(),
            labels: results.labels.clone(),
            answers: results.answers.clone(),
        }
    }

    fn results(self) -> EvalResults {
        let floats = |bits: Vec<u32>| bits.into_iter().map(f32::from_bits).collect();
        EvalResults {
            class_logits: floats(self.class_logits),
            logp: floats(self.logp),
            best_logp: floats(self.best_logp),
            sums: self.sums.into_iter().map(|(name, sum)| (name, f32::from_bits(sum))).collect(),
            loss: f32::from_bits(self.loss),
            weight: f32::from_bits(self.weight),
            labels: self.labels,
            answers: self.answers,
        }
    }
}
