//! Prepares the Python process: threads, environment variables, forks and launchers.

use std::sync::OnceLock;

use flatout_train::device::{self, kernels};
use flatout_train::{Failure, UserError};
use flatout_world::{Flags, Start};

/// Starts the shared threads, once per process, and refuses environment variables that would silently change numbers.
pub fn prepare() -> Result<(), Failure> {
    static STARTED: OnceLock<(u32, Result<(), Failure>)> = OnceLock::new();
    let here = std::process::id();
    let (process, started) = STARTED.get_or_init(|| (here, start()));
    if *process != here {
        return Err(Failure::User(UserError(
            "this process was forked from one that had used flatout, and its threads are not here: begin processes with \
             multiprocessing's `spawn`, or use flatout in one of them alone"
                .into(),
        )));
    }
    started.clone()
}

fn start() -> Result<(), Failure> {
    // The interpreter may have other threads, so variables usually cannot be cleared, and are refused.
    kernels::clear_environment().map_err(|sentence| Failure::User(UserError(sentence)))?;
    device::start_threads()
}

/// Refuses to run as one of several ranks, because each process of a launcher would train the whole run.
pub fn check_alone() -> Result<(), Failure> {
    let env = |name: &str| std::env::var(name).ok();
    match flatout_world::place(&Flags::default(), &env, std::os::unix::process::parent_id()) {
        Ok(Start::Rank(place)) if place.ranks > 1 => Err(Failure::User(UserError(format!(
            "a launcher started this process as one of {} ranks, and Python trains in one process: let it start `flatout train`",
            place.ranks
        )))),
        _ => Ok(()),
    }
}
