//! A run that is asked to stop before its first step: there is nothing to save, so it leaves at once with code 3,
//! whatever is being compiled or read.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use flatout_train::Failure;
use flatout_train::UserError;
use flatout_train::run::signal::{self, StopFlag};
use flatout_train::run::{Entered, Run, is_run};

use crate::screen::Screen;

/// The run that is starting, once it has a directory.
pub struct Starting(Arc<Mutex<Option<Arc<Run>>>>);

/// Takes over signals and the clock. To be called before anything that takes time.
pub fn watch(max_time: Option<Duration>, screen: &Screen) -> Result<(StopFlag, Starting), Failure> {
    let cannot = |e| Failure::Environment(format!("signals cannot be handled: {e}"));
    let deadline = max_time.and_then(|time| Instant::now().checked_add(time));
    let stop = signal::install().map_err(cannot)?.with_deadline(deadline);
    let run = Arc::new(Mutex::new(None));
    let (starting, screen) = (Starting(Arc::clone(&run)), *screen);
    let leave = move |reason| {
        let run: Option<Arc<Run>> = run.lock().unwrap_or_else(PoisonError::into_inner).clone();
        screen.note(format!("{reason} before the first step: {}", left(run.as_deref())));
        signal::leave(3)
    };
    stop.watch_start(leave).map_err(cannot)?;
    Ok((stop, starting))
}

impl Starting {
    /// Takes up the run that `make` begins or finds; the second is whether it is a new one. Nobody leaves meanwhile: a
    /// folder that was made and is not known yet would stay.
    pub fn enter(
        &self,
        make: impl FnOnce() -> Result<Entered, UserError>,
    ) -> Result<(Arc<Run>, bool), Failure> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (run, is_fresh) = match make()? {
            Entered::Fresh(run) => (Arc::new(run), true),
            Entered::Existing(run) => (Arc::new(run), false),
        };
        *known = Some(Arc::clone(&run));
        Ok((run, is_fresh))
    }

    /// Lets go of a run that has ended, so that it is free for whoever reads it.
    pub fn leave(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// What is left of the run, in words. One that never began is removed.
fn left(run: Option<&Run>) -> String {
    let Some(run) = run else { return "nothing to save".into() };
    run.discard();
    match is_run(run.dir()) {
        true => format!("nothing to save; continue with: {}", run.resume_command()),
        false => "nothing to save, and nothing is left of the run".into(),
    }
}
