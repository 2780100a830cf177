//! The Python process, made ready for work: threads, environment variables, forks and launchers.

use std::sync::OnceLock;

use flatout_train::device::{self, kernels};
use flatout_train::{Failure, UserError};
use flatout_world::{Flags, Start};

/// Starts the threads that everything shares, once in a process, and refuses what would change numbers in silence.
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
    // An interpreter has threads of its own, so that what is set can mostly not be cleared, and is refused.
    kernels::clear_environment().map_err(|sentence| Failure::User(UserError(sentence)))?;
    device::start_threads()
}

/// Refuses to be one of several ranks: each process of a launcher would train the whole run.
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
