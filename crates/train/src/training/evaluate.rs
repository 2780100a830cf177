//! Evaluation: the plan `eval` over a set that is read once and in order.

use std::collections::BTreeMap;

use flatout_ir::Role;
use flatout_ir::passes::differentiate::SUM;
use flatout_models::objectives::next_token::{BEST_LOGP, LOGP};
use flatout_runtime::Session;

use crate::Failure;
use crate::metrics::{AnswerTally, Metrics, RewardMetrics, Tally};
use crate::tasks::batch::{self, Batch, Draw, EvalSet, Inputs};
use crate::training::update;

/// The result of `eval` that holds the logits of classes, where a model has classes.
const CLASS_LOGITS: &str = "class_logits";

/// Sums over an evaluation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sums {
    pub loss: f64,
    pub weight: f64,
}

impl Sums {
    pub fn mean(&self) -> f64 {
        self.loss / self.weight
    }
}

/// The results of an evaluated batch beside its loss; empty where the plan has none.
#[derive(Clone, Debug, Default)]
pub struct EvalResults {
    /// Of every sample.
    pub class_logits: Vec<f32>,
    /// Of every token that is read: its log-probability, and the largest there is.
    pub logp: Vec<f32>,
    pub best_logp: Vec<f32>,
    /// Sums over samples beside the loss, by name, and the weight that they and the loss are of.
    pub sums: Vec<(String, f32)>,
    pub weight: f32,
}

/// Runs `eval` on a set in batches of `capacity` samples. `see` is shown each batch with its results. `before_each` may end it between two batches with a reason, which is given back then.
pub fn evaluate<Reason>(
    session: &mut Session,
    set: &dyn EvalSet,
    capacity: usize,
    draw: Draw,
    before_each: &mut dyn FnMut() -> Option<Reason>,
    see: &mut dyn FnMut(Batch, &EvalResults),
) -> Result<Result<Sums, Reason>, Failure> {
    let inputs = Inputs::of(session.plans(), Role::Eval);
    let has = |name: &str| session.plans().plan(Role::Eval).is_some_and(|plan| plan.result(name).is_some());
    let has = [CLASS_LOGITS, LOGP, BEST_LOGP].map(has);
    let named = update::sums(session.plans(), Role::Eval);
    let mut sums = Sums::default();
    for number in 0..set.batches(capacity) {
        if let Some(reason) = before_each() {
            return Ok(Err(reason));
        }
        let batch = set.batch(number, capacity, &inputs)?;
        batch::write(session, &batch, draw)?;
        session.run(Role::Eval)?;
        sums.loss += session.result(Role::Eval, "loss")?[0] as f64;
        let weight = session.result(Role::Eval, "weight")?[0];
        sums.weight += weight as f64;
        let result = |number: usize, name: &str| match has[number] {
            true => session.result(Role::Eval, name),
            false => Ok(vec![]),
        };
        let of_names = named
            .iter()
            .map(|name| Ok((name[SUM.len()..].to_string(), session.result(Role::Eval, name)?[0])));
        let results = EvalResults {
            class_logits: result(0, CLASS_LOGITS)?,
            logp: result(1, LOGP)?,
            best_logp: result(2, BEST_LOGP)?,
            sums: of_names.collect::<Result<_, Failure>>()?,
            weight,
        };
        see(batch, &results);
    }
    Ok(Ok(sums))
}

/// The same to its end.
pub fn evaluate_all(
    session: &mut Session,
    set: &dyn EvalSet,
    capacity: usize,
    see: &mut dyn FnMut(Batch, &EvalResults),
) -> Result<Sums, Failure> {
    let never = &mut || None::<std::convert::Infallible>;
    let Ok(sums) = evaluate(session, set, capacity, Draw::default(), never, see)?;
    Ok(sums)
}

/// Counts on the way to the metrics of an evaluation.
pub struct Counted {
    classes: Option<Tally>,
    answers: AnswerTally,
    /// Sums by name, and the weight that they are of.
    sums: BTreeMap<String, f64>,
    weight: f64,
}

impl Counted {
    /// Of a model of classes, or of one that predicts tokens.
    pub fn new(classes: Option<usize>) -> Counted {
        let (answers, sums) = (AnswerTally::default(), BTreeMap::new());
        Counted { classes: classes.map(Tally::new), answers, sums, weight: 0.0 }
    }

    pub fn see(&mut self, batch: &Batch, results: &EvalResults) {
        if let Some(tally) = self.classes.as_mut().filter(|_| !results.class_logits.is_empty()) {
            tally.see_all(&results.class_logits, batch.i32s("labels"));
        }
        self.answers.see(&batch.answers, &results.logp, &results.best_logp);
        for (name, sum) in &results.sums {
            *self.sums.entry(name.clone()).or_default() += *sum as f64;
        }
        self.weight += results.weight as f64;
    }

    /// `None` where there is nothing but a loss.
    pub fn metrics(&self) -> Option<Metrics> {
        match &self.classes {
            Some(tally) => Some(Metrics::Classes(tally.metrics())),
            None => {
                let mean = |name: &str| self.sums.get(name).map(|sum| sum / self.weight);
                let rewards = RewardMetrics::of(mean).map(Metrics::Rewards);
                rewards.or_else(|| self.answers.metrics().map(Metrics::Answers))
            }
        }
    }
}
