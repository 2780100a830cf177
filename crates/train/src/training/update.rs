//! One update on a session: micro-batches into `grad`, then `apply`. The loop and every measurement take it from here, so
//! that what is measured is what trains.

use std::ops::Range;

use flatout_ir::passes::differentiate::SUM;
use flatout_ir::passes::lanes::roles_after;
use flatout_ir::passes::totals::{STOP, STOP_FLAGS, stop_path};
use flatout_ir::passes::{input_path, update};
use flatout_ir::{PlanSet, Role};
use flatout_runtime::{Posted, RuntimeError, Session};

use crate::metrics::RewardMetrics;
use crate::run::signal;
use crate::tasks::batch::{self, Batch, Draw};

/// The results of an update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Results {
    pub loss: f32,
    pub grad_norm: f32,
    /// False where the loss or the norm is not finite: the weights are what they were.
    pub is_applied: bool,
    /// Where answers are compared.
    pub rewards: Option<RewardMetrics>,
    /// Why all ranks stop after this update, where one of several was asked to.
    pub stop: Option<&'static str>,
}

/// Adds the gradients of a micro-batch. On a GPU the work is only enqueued.
pub fn accumulate(session: &mut Session, batch: &Batch, draw: Draw) -> Result<(), RuntimeError> {
    batch::write(session, batch, draw)?;
    session.run(batch.role)
}

/// Adds the sums of lanes that are done, of `each` that a rank has, to those of the lanes before them.
pub fn end_lanes(session: &mut Session, lanes: Range<usize>, each: usize) -> Result<(), RuntimeError> {
    let roles = lanes.flat_map(|lane| roles_after(lane, each));
    roles.into_iter().try_for_each(|role| session.run(role))
}

/// Tells the other ranks by the next update why this one is asked to stop, or that it is not.
pub fn ask_to_stop(session: &mut Session, reason: Option<&str>) -> Result<(), RuntimeError> {
    let mut flags = [0.0; STOP_FLAGS.len()];
    reason.and_then(signal::number_of).into_iter().for_each(|number| flags[number] = 1.0);
    session.write_f32(&input_path(Role::Apply, STOP), &flags)
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
    let stops = stops(session.plans());
    let more = sums.iter().chain(&stops).map(String::as_str);
    let names: Vec<&str> = ALWAYS.into_iter().chain(more).collect();
    session.post(Role::Apply, &names)
}

/// The results of `apply` that say why ranks were asked to stop; none where there is one rank.
fn stops(plans: &PlanSet) -> Vec<String> {
    let has = |name: &String| plans.plan(Role::Apply).is_some_and(|plan| plan.result(name).is_some());
    STOP_FLAGS.iter().map(|flag| stop_path(flag)).filter(has).collect()
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
        stop: values[ALWAYS.len() + sums.len()..]
            .iter()
            .position(|asked| *asked > 0.0)
            .and_then(signal::of_number),
    })
}
