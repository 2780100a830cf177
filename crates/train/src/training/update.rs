//! One update on a session: micro-batches into `grad`, then `apply`. The loop and every measurement take it from here, so
//! that what is measured is what trains.

use flatout_ir::passes::differentiate::SUM;
use flatout_ir::passes::{input_path, update};
use flatout_ir::{PlanSet, Role};
use flatout_runtime::{Posted, RuntimeError, Session};

use crate::metrics::RewardMetrics;
use crate::tasks::batch::{self, Batch, Draw};

/// What an update gives.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Results {
    pub loss: f32,
    pub grad_norm: f32,
    /// False where the loss or the norm is not finite: the weights are what they were.
    pub is_applied: bool,
    /// Where answers are compared.
    pub rewards: Option<RewardMetrics>,
}

/// Adds the gradients of a micro-batch. On a GPU the work is only enqueued.
pub fn accumulate(session: &mut Session, batch: &Batch, draw: Draw) -> Result<(), RuntimeError> {
    batch::write(session, batch, draw)?;
    session.run(batch.role)
}

/// Makes the update of what was accumulated by the learning rates of `Config::rates`, and asks for its results without
/// waiting for them.
pub fn apply(session: &mut Session, rates: &[f32]) -> Result<Posted, RuntimeError> {
    session.write_f32(&input_path(Role::Apply, update::LR), rates)?;
    session.run(Role::Apply)?;
    post(session)
}

const ALWAYS: [&str; 3] = ["loss", "grad_norm", "is_finite"];

/// Asks for the results of the update that was made last.
pub fn post(session: &mut Session) -> Result<Posted, RuntimeError> {
    let sums = sums(session.plans(), Role::Apply);
    let names: Vec<&str> = ALWAYS.into_iter().chain(sums.iter().map(String::as_str)).collect();
    session.post(Role::Apply, &names)
}

/// The names of a plan's results that are sums over samples beside the loss.
pub fn sums(plans: &PlanSet, role: Role) -> Vec<String> {
    let results = plans.plan(role).into_iter().flat_map(|plan| &plan.results);
    results.map(|(name, _)| name).filter(|name| name.starts_with(SUM)).cloned().collect()
}

/// The results of an update, waiting for them where they are still on their way.
pub fn collect(session: &mut Session, posted: Posted) -> Result<Results, RuntimeError> {
    let values = session.collect(posted)?;
    let sums = sums(session.plans(), Role::Apply);
    let mean = |name: &str| {
        let at = sums.iter().position(|own| own[SUM.len()..] == *name)?;
        Some(values[ALWAYS.len() + at] as f64)
    };
    Ok(Results {
        loss: values[0],
        grad_norm: values[1],
        is_applied: values[2] != 0.0,
        rewards: RewardMetrics::of(mean),
    })
}
