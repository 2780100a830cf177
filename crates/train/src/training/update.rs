//! One update on a session: micro-batches into `grad`, then `apply`. The loop and every measurement take it from here, so
//! that what is measured is what trains.

use flatout_ir::Role;
use flatout_ir::passes::{input_path, update};
use flatout_runtime::{Posted, RuntimeError, Session};

use crate::tasks::batch::{self, Batch, Draw};

/// What an update gives.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Results {
    pub loss: f32,
    pub grad_norm: f32,
    /// False where the loss or the norm is not finite: the weights are what they were.
    pub is_applied: bool,
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

/// Asks for the results of the update that was made last.
pub fn post(session: &mut Session) -> Result<Posted, RuntimeError> {
    session.post(Role::Apply, &["loss", "grad_norm", "is_finite"])
}

/// The results of an update, waiting for them where they are still on their way.
pub fn collect(session: &mut Session, posted: Posted) -> Result<Results, RuntimeError> {
    let values = session.collect(posted)?;
    Ok(Results { loss: values[0], grad_norm: values[1], is_applied: values[2] != 0.0 })
}
