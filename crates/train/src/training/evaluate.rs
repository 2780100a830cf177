//! Evaluation: the plan `eval` over a set that is read once and in order.

use flatout_ir::Role;
use flatout_runtime::Session;

use crate::Failure;
use crate::metrics::Tally;
use crate::tasks::batch::{self, Batch, Draw, EvalSet, Inputs};

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

/// Runs `eval` on a set in batches of `capacity` samples. `see` is shown each batch with its logits of classes, which are
/// empty where there are none. `before_each` may end it between two batches with a reason, which is given back then.
pub fn evaluate<Reason>(
    session: &mut Session,
    set: &dyn EvalSet,
    capacity: usize,
    draw: Draw,
    before_each: &mut dyn FnMut() -> Option<Reason>,
    see: &mut dyn FnMut(Batch, &[f32]),
) -> Result<Result<Sums, Reason>, Failure> {
    let inputs = Inputs::of(session.plans(), Role::Eval);
    let has_classes =
        session.plans().plan(Role::Eval).is_some_and(|plan| plan.result(CLASS_LOGITS).is_some());
    let mut sums = Sums::default();
    for number in 0..set.batches(capacity) {
        if let Some(reason) = before_each() {
            return Ok(Err(reason));
        }
        let batch = set.batch(number, capacity, &inputs)?;
        batch::write(session, &batch, draw)?;
        session.run(Role::Eval)?;
        sums.loss += session.result(Role::Eval, "loss")?[0] as f64;
        sums.weight += session.result(Role::Eval, "weight")?[0] as f64;
        let logits = if has_classes { session.result(Role::Eval, CLASS_LOGITS)? } else { vec![] };
        see(batch, &logits);
    }
    Ok(Ok(sums))
}

/// The same to its end.
pub fn evaluate_all(
    session: &mut Session,
    set: &dyn EvalSet,
    capacity: usize,
    see: &mut dyn FnMut(Batch, &[f32]),
) -> Result<Sums, Failure> {
    let never = &mut || None::<std::convert::Infallible>;
    let Ok(sums) = evaluate(session, set, capacity, Draw::default(), never, see)?;
    Ok(sums)
}

/// Counts the classes that a batch's logits say against its labels.
pub fn count(tally: &mut Tally, batch: &Batch, logits: &[f32]) {
    if !logits.is_empty() {
        tally.see_all(logits, batch.i32s("labels"));
    }
}
