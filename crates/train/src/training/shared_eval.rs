//! Evaluation on several ranks: each runs `eval` on its share of the batches, and every rank counts the results of all in order.

use flatout_ir::{Plan, Role};
use flatout_runtime::Session;
use flatout_waits::{self as waits, Unit};
use serde::{Deserialize, Serialize};

use crate::Failure;
use crate::ranks::{Ranks, message};
use crate::run::signal;
use crate::tasks::batch::{Draw, EvalSet};
use crate::training::evaluate::{EvalResults, Evaluator, Sums, evaluate};

/// Runs `eval` on a set in batches of a capacity. Rank r evaluates the batches b with b mod ranks = r. Every rank sums batch by
/// batch in f64, so that the bits do not depend on the number of ranks. A reason to stop on any rank ends the evaluation on all.
/// Where layers gather what they read, all ranks run the plan equally often.
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
            let stop_reason = stop().and_then(signal::number_of);
            let message = RankMessage { stop_reason, part: results.as_ref().map(BatchResults::of) };
            let all: Vec<RankMessage> = message::read_all(&ranks.gather_bytes(&message::write(&message))?)?;
            if let Some(reason) =
                all.iter().find_map(|message| message.stop_reason.and_then(signal::of_number))
            {
                return Ok(Err(reason));
            }
            for part in all.into_iter().filter_map(|message| message.part) {
                let results = part.results();
                sums.add(&results);
                see(&results);
                wait.add(1);
            }
        }
        Ok(Ok(sums))
    })
}

/// Runs `eval` on a rank that has no batch while others do, if the plan exchanges. It runs on stale inputs, and its results are
/// ignored.
pub fn run_for_others(session: &mut Session) -> Result<(), Failure> {
    let exchanges = session.plans().plan(Role::Eval).is_some_and(Plan::has_exchanges);
    if exchanges {
        session.run(Role::Eval)?;
    }
    Ok(())
}

/// Runs a closure that runs `eval`, with the averaged weights in place. Where ranks hold shards of the averages, these are
/// gathered to where `eval` reads weights, and the weights are restored afterwards. Every rank calls this.
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

/// A rank's message after a batch.
#[derive(Serialize, Deserialize)]
struct RankMessage {
    /// The number of its reason to stop, if it has one.
    stop_reason: Option<usize>,
    part: Option<BatchResults>,
}

/// The results of a batch. Floats are sent as bits, so that non-finite values arrive unchanged.
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
