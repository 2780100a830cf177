//! One update in a session: micro-batches run `grad`, then `apply`. The training loop and every measurement use these functions,
//! so that what is measured is what trains.

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
    /// False where the loss or the norm is not finite; the weights are unchanged then.
    pub is_applied: bool,
    /// Present where preferences are learned.
    pub rewards: Option<RewardMetrics>,
    /// The reason why all ranks stop after this update, where one of several ranks was asked to stop.
    pub stop: Option<&'static str>,
}

/// Adds the gradients of a micro-batch. On a GPU the work is only enqueued.
pub fn accumulate(session: &mut Session, batch: &Batch, draw: Draw) -> Result<(), RuntimeError> {
    batch::write(session, batch, draw)?;
    session.run(batch.role)
}

/// Adds the sums of finished lanes to those of the lanes before them; `each` is the number of lanes per rank.
pub fn end_lanes(session: &mut Session, lanes: Range<usize>, each: usize) -> Result<(), RuntimeError> {
    let roles = lanes.flat_map(|lane| roles_after(lane, each));
    roles.into_iter().try_for_each(|role| session.run(role))
}

/// Sends the reason to stop to the other ranks with the next update; `None` says that there is none.
pub fn ask_to_stop(session: &mut Session, reason: Option<&str>) -> Result<(), RuntimeError> {
    let mut flags = [0.0; STOP_FLAGS.len()];
    reason.and_then(signal::number_of).into_iter().for_each(|number| flags[number] = 1.0);
    session.write_f32(&input_path(Role::Apply, STOP), &flags)
}

/// Applies the accumulated gradients with the learning rates of `Config::rates`, and requests the results without waiting for
/// them.
pub fn apply(session: &mut Session, rates: &[f32]) -> Result<Posted, RuntimeError> {
    session.write_f32(&input_path(Role::Apply, update::LR), rates)?;
    session.run(Role::Apply)?;
    post(session)
}

const ALWAYS: [&str; 3] = ["loss", "grad_norm", "is_finite"];

/// Requests the results of the update that was made last.
pub fn post(session: &mut Session) -> Result<Posted, RuntimeError> {
    let sums = sums(session.plans(), Role::Apply);
    let stops = stops(session.plans());
    let more = sums.iter().chain(&stops).map(String::as_str);
    let names: Vec<&str> = ALWAYS.into_iter().chain(more).collect();
    session.post(Role::Apply, &names)
}

/// Names of the results of `apply` that carry stop reasons; empty where there is one rank.
fn stops(plans: &PlanSet) -> Vec<String> {
    let has = |name: &String| plans.plan(Role::Apply).is_some_and(|plan| plan.result(name).is_some());
    STOP_FLAGS.iter().map(|flag| stop_path(flag)).filter(has).collect()
}

/// Names of a plan's results, besides the loss, that are sums over samples.
pub fn sums(plans: &PlanSet, role: Role) -> Vec<String> {
    let results = plans.plan(role).into_iter().flat_map(|plan| &plan.results);
    results.map(|(name, _)| name).filter(|name| name.starts_with(SUM)).cloned().collect()
}

/// The results of an update; waits for them if they are still in flight.
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
