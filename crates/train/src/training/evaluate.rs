//! Evaluation: runs the plan `eval` over a set that is read once and in order.

use std::collections::BTreeMap;

use flatout_ir::Role;
use flatout_ir::passes::differentiate::SUM;
use flatout_models::objectives::next_token::{BEST_LOGP, LOGP};
use flatout_runtime::Session;

use crate::Failure;
use crate::metrics::{AnswerTally, Metrics, RewardMetrics, Tally, TextMetrics};
use crate::tasks::batch::{self, Batch, Draw, EvalSet, Inputs};
use crate::training::update;
use flatout_waits::{self as waits, Unit};

/// The result of `eval` that holds the class logits, where a model has classes.
const CLASS_LOGITS: &str = "class_logits";

/// Sums over an evaluation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sums {
    pub loss: f64,
    pub weight: f64,
}

impl Sums {
    pub fn add(&mut self, results: &EvalResults) {
        self.loss += results.loss as f64;
        self.weight += results.weight as f64;
    }

    pub fn mean(&self) -> f64 {
        self.loss / self.weight
    }
}

/// Results of an evaluated batch besides its loss; empty where the plan has none.
#[derive(Clone, Debug, Default)]
pub struct EvalResults {
    /// Logits of every sample.
    pub class_logits: Vec<f32>,
    /// Log-probability of every target token that is read, and the largest log-probability at its position.
    pub logp: Vec<f32>,
    pub best_logp: Vec<f32>,
    /// Sums over samples besides the loss, by name; `weight` is the sum of weights that they and the loss belong to.
    pub sums: Vec<(String, f32)>,
    pub loss: f32,
    pub weight: f32,
    /// The class of every sample, and the example of every token that is read, as in the batch.
    pub labels: Vec<i32>,
    pub answers: Vec<Option<u32>>,
}

/// Runs `eval` on a set in batches of `capacity` samples and passes each batch's results to `see`. `before_each` may end the
/// evaluation between two batches with a reason, which is returned.
pub fn evaluate<Reason>(
    session: &mut Session,
    set: &dyn EvalSet,
    capacity: usize,
    draw: Draw,
    before_each: &mut dyn FnMut() -> Option<Reason>,
    see: &mut dyn FnMut(Batch, &EvalResults),
) -> Result<Result<Sums, Reason>, Failure> {
    let evaluator = Evaluator::new(session);
    let mut sums = Sums::default();
    let wait = waits::begin("evaluating", Unit::Things("batches"), Some(set.batches(capacity) as u64));
    for number in 0..set.batches(capacity) {
        if let Some(reason) = before_each() {
            return Ok(Err(reason));
        }
        let (batch, results) = evaluator.run(session, set, number, capacity, draw)?;
        sums.add(&results);
        see(batch, &results);
        wait.add(1);
    }
    Ok(Ok(sums))
}

/// Runs `eval` one batch at a time.
pub struct Evaluator {
    inputs: Inputs,
    /// Whether the plan has class logits, log-probabilities and largest log-probabilities.
    has: [bool; 3],
    sums: Vec<String>,
}

impl Evaluator {
    pub fn new(session: &Session) -> Evaluator {
        let plans = session.plans();
        let has = |name: &str| plans.plan(Role::Eval).is_some_and(|plan| plan.result(name).is_some());
        Evaluator {
            inputs: Inputs::of(plans, Role::Eval),
            has: [CLASS_LOGITS, LOGP, BEST_LOGP].map(has),
            sums: update::sums(plans, Role::Eval),
        }
    }

    pub fn run(
        &self,
        session: &mut Session,
        set: &dyn EvalSet,
        number: usize,
        capacity: usize,
        draw: Draw,
    ) -> Result<(Batch, EvalResults), Failure> {
        let batch = set.batch(number, capacity, &self.inputs)?;
        batch::write(session, &batch, draw)?;
        session.run(Role::Eval)?;
        let result = |number: usize, name: &str| match self.has[number] {
            true => session.result(Role::Eval, name),
            false => Ok(vec![]),
        };
        let of_names = self
            .sums
            .iter()
            .map(|name| Ok((name[SUM.len()..].to_string(), session.result(Role::Eval, name)?[0])));
        let results = EvalResults {
            class_logits: result(0, CLASS_LOGITS)?,
            logp: result(1, LOGP)?,
            best_logp: result(2, BEST_LOGP)?,
            sums: of_names.collect::<Result<_, Failure>>()?,
            loss: session.result(Role::Eval, "loss")?[0],
            weight: session.result(Role::Eval, "weight")?[0],
            labels: batch.i32s("labels").to_vec(),
            answers: batch.answers.clone(),
        };
        Ok((batch, results))
    }
}

/// Evaluates the whole set, without a stop.
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

/// Running counts from which the metrics of an evaluation are computed.
pub struct Counted {
    classes: Option<Tally>,
    answers: AnswerTally,
    /// Sums by name, and their total weight.
    sums: BTreeMap<String, f64>,
    weight: f64,
    loss: f64,
    bytes_per_token: Option<f64>,
}

impl Counted {
    /// For a model of `classes`, or for one that predicts tokens of this mean number of bytes of text.
    pub fn new(classes: Option<usize>, bytes_per_token: Option<f64>) -> Counted {
        let (answers, sums) = (AnswerTally::default(), BTreeMap::new());
        Counted { classes: classes.map(Tally::new), answers, sums, weight: 0.0, loss: 0.0, bytes_per_token }
    }

    pub fn see(&mut self, results: &EvalResults) {
        if let Some(tally) = self.classes.as_mut().filter(|_| !results.class_logits.is_empty()) {
            tally.see_all(&results.class_logits, &results.labels);
        }
        self.answers.see(&results.answers, &results.logp, &results.best_logp);
        for (name, sum) in &results.sums {
            *self.sums.entry(name.clone()).or_default() += *sum as f64;
        }
        self.weight += results.weight as f64;
        self.loss += results.loss as f64;
    }

    /// `None` if the loss is the only metric.
    pub fn metrics(&self) -> Option<Metrics> {
        match &self.classes {
            Some(tally) => Some(Metrics::Classes(tally.metrics())),
            None => {
                let mean = |name: &str| self.sums.get(name).map(|sum| sum / self.weight);
                let rewards = RewardMetrics::of(mean).map(Metrics::Rewards);
                let text =
                    || Some(Metrics::Text(TextMetrics::of(self.loss / self.weight, self.bytes_per_token?)));
                rewards.or_else(|| self.answers.metrics().map(Metrics::Answers)).or_else(text)
            }
        }
    }
}
