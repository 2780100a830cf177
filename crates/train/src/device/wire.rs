//! Ranks on GPUs: the GPU of each, their NCCL connection, and their sessions.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use flatout_ir::{Plan, PlanSet};
use flatout_runtime::cuda::nccl::{Communicators, nccl};
use flatout_runtime::cuda::session::{Options, compile_ahead};
use flatout_runtime::{RuntimeError, Session, cuda};

use crate::Failure;
use crate::UserError;
use crate::ranks::Ranks;
use crate::refuse;

/// The longest time that connecting the ranks may take.
const PATIENCE: Duration = Duration::from_secs(180);

/// The GPU of a rank of a host, among those visible to it.
pub fn gpu_of(local_rank: usize, visible: usize, shares: bool) -> Result<usize, UserError> {
    match visible {
        // A launcher may show each rank only its own GPU.
        0 | 1 => Ok(0),
        _ if shares => Ok(local_rank % visible),
        _ if local_rank < visible => Ok(local_rank),
        _ => refuse!(
            "rank {local_rank} of this host has no GPU of its own: {visible} are visible; give --gpus {visible} or fewer, or \
             --share-gpu to test with more ranks than GPUs"
        ),
    }
}

/// Refuses to begin without NCCL, with the command that installs it.
pub fn check() -> Result<(), UserError> {
    nccl().map(drop).map_err(|why| UserError(format!("ranks on GPUs exchange through NCCL: {why}")))
}

/// Refuses `wire_window=on` before any work if this NCCL has no windows.
pub fn check_windows() -> Result<(), UserError> {
    nccl()
        .and_then(|nccl| nccl.windows())
        .map(drop)
        .map_err(|why| UserError(format!("`wire_window=on` cannot run: {why}")))
}

/// A session as one of several ranks, or alone. One rank of each host compiles the kernels, and the others load them.
pub fn session(
    plans: PlanSet,
    device: &cuda::Device,
    options: Options,
    ranks: &Ranks,
) -> Result<Session, Failure> {
    let communicators = connect(&plans, device, options.window, ranks)?;
    if ranks.are_many() {
        ranks.once_a_host(|| Ok(compile_ahead(&plans, device, options)?))?;
    }
    if communicators.is_none() || !ranks.are_many() {
        return Ok(Session::cuda_among(plans, device, options, communicators, &|| Ok(()))?);
    }
    let refused = RefCell::new(None);
    // Up to here a failing rank sends its failure in place of its next call; from here on others wait for it inside NCCL.
    let meet = || {
        ranks.waits_inside(false);
        let met = ranks.meet();
        met.map_err(|failure| {
            let why = RuntimeError::Wire(failure.to_string());
            *refused.borrow_mut() = Some(failure);
            why
        })?;
        ranks.waits_inside(true);
        Ok(())
    };
    let session = Session::cuda_among(plans, device, options, communicators, &meet);
    if let Some(failure) = refused.take() {
        return Err(failure);
    }
    // NCCL reports a refused window before the next meeting.
    if matches!(session, Err(RuntimeError::Wire(_))) {
        ranks.waits_inside(false);
    }
    let session = session?;
    ranks.waits_inside(false);
    Ok(session)
}

/// Connects the ranks if their plans exchange: one communicator along every axis with more than one rank.
fn connect(
    plans: &PlanSet,
    device: &cuda::Device,
    window: bool,
    ranks: &Ranks,
) -> Result<Option<Arc<Communicators>>, Failure> {
    if !plans.plans.iter().any(Plan::has_exchanges) {
        return Ok(None);
    }
    check()?;
    if window {
        check_windows()?;
    }
    let failed = |why: cuda::CudaError| Failure::Environment(why.to_string());
    let id = if ranks.is_first() { nccl().and_then(|nccl| nccl.new_id()).map_err(failed)? } else { vec![] };
    // If a rank lacks NCCL, every rank learns which one.
    let id = ranks.of_first(id)?;
    let connect =
        || Communicators::connect(device, plans.mesh, ranks.rank(), &id, window, PATIENCE).map_err(failed);
    let mut communicators = ranks.at_once(connect)?;
    if let Some(alarm) = ranks.alarm() {
        communicators.watch(move |why| alarm.fail(why)).map_err(failed)?;
    }
    Ok(Some(Arc::new(communicators)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_has_the_gpu_of_its_number_or_the_only_one_it_sees() {
        assert_eq!([0, 1, 2, 3].map(|rank| gpu_of(rank, 4, false)), [0, 1, 2, 3].map(Ok));
        assert_eq!([0, 3].map(|rank| gpu_of(rank, 1, false)), [0, 0].map(Ok));
        assert_eq!([0, 1, 2, 3].map(|rank| gpu_of(rank, 2, true)), [0, 1, 0, 1].map(Ok));
        let refused = gpu_of(2, 2, false).unwrap_err().0;
        assert!(refused.starts_with("rank 2 of this host has no GPU of its own: 2 are visible"), "{refused}");
    }
}
