//! Stopping a run before its first step: there is nothing to save, so the process ends at once with code 3, even in the middle of
//! compiling or reading. Of several ranks all end, whichever of them is asked to stop.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use flatout_train::Failure;
use flatout_train::UserError;
use flatout_train::run::signal::{self, StopFlag};
use flatout_train::run::{Entered, Run, is_run};
use flatout_world::Stopper;

use crate::screen::Screen;

/// How long a rank waits for the hub to tell every rank, this one too, to stop.
const HUB_TIMEOUT: Duration = Duration::from_secs(5);

/// The run that is starting.
pub struct Starting(Arc<State>);

struct State {
    /// The run, set once it has a directory, on the rank that writes it.
    run: Mutex<Option<Arc<Run>>>,
    /// Set once this process has joined other ranks, or to `None` when it stops before that.
    others: OnceLock<Option<Stopper>>,
    is_quiet: AtomicBool,
    /// The command measures and makes no run.
    measures: AtomicBool,
    screen: Screen,
}

impl State {
    /// Ends the process, and removes a run that has not begun.
    fn leave(&self, reason: &str) -> ! {
        let run: Option<Arc<Run>> = self.run.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let outcome = discard(run.as_deref());
        if !self.is_quiet.load(Ordering::SeqCst) {
            self.screen.note(match self.measures.load(Ordering::SeqCst) {
                true => format!("{reason}: measuring stops"),
                false => format!("{reason} before the first step: {outcome}"),
            });
        }
        signal::leave(3)
    }
}

/// Installs the handlers of signals and of --max-time. To be called before anything that takes time.
pub fn watch(max_time: Option<Duration>, screen: &Screen) -> Result<(StopFlag, Starting), Failure> {
    let cannot = |e| Failure::Environment(format!("signals cannot be handled: {e}"));
    let deadline = max_time.and_then(|time| Instant::now().checked_add(time));
    let stop = signal::install().map_err(cannot)?.with_deadline(deadline);
    let state = Arc::new(State {
        run: Mutex::new(None),
        others: OnceLock::new(),
        is_quiet: AtomicBool::new(false),
        measures: AtomicBool::new(false),
        screen: *screen,
    });
    let starting = Starting(Arc::clone(&state));
    let leave = move |reason: &'static str| {
        if state.others.get_or_init(|| None).as_ref().is_some_and(|others| others.stop(reason)) {
            std::thread::sleep(HUB_TIMEOUT);
        }
        state.leave(reason)
    };
    stop.watch_start(leave).map_err(cannot)?;
    Ok((stop, starting))
}

impl Starting {
    /// Enters the run that `make` creates or opens; the second value says whether it is new. The process does not stop meanwhile,
    /// because a directory that was made and is not recorded yet would stay behind.
    pub fn enter(
        &self,
        make: impl FnOnce() -> Result<Entered, UserError>,
    ) -> Result<(Arc<Run>, bool), Failure> {
        let mut known = self.0.run.lock().unwrap_or_else(PoisonError::into_inner);
        let (run, is_fresh) = match make()? {
            Entered::Fresh(run) => (Arc::new(run), true),
            Entered::Existing(run) => (Arc::new(run), false),
        };
        *known = Some(Arc::clone(&run));
        Ok((run, is_fresh))
    }

    /// Drops a run that has ended, so that its lock is released.
    pub fn leave(&self) {
        *self.0.run.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Declares that the command measures, so that there is no run to save.
    pub fn measures(&self) {
        self.0.measures.store(true, Ordering::SeqCst);
    }

    /// Sets the rank of this process: only rank 0 prints.
    pub fn set_rank(&self, rank: usize) {
        self.0.is_quiet.store(rank > 0, Ordering::SeqCst);
    }

    /// Receives the handle that sends a reason to stop to the other ranks, so that all stop together. If this process is already
    /// stopping, the other ranks have not been told, and this does not return.
    pub fn stop_others(&self) -> impl Fn(Stopper) + Send + Sync + 'static {
        let state = Arc::clone(&self.0);
        move |stopper| {
            if state.others.set(Some(stopper)).is_err() {
                loop {
                    std::thread::park();
                }
            }
        }
    }

    /// A function that ends the process because another rank was asked to stop.
    pub fn leave_with_others(&self) -> impl Fn(&str) + Send + Sync + 'static {
        let state = Arc::clone(&self.0);
        move |reason| state.leave(reason)
    }
}

/// Removes a run that never began, and describes what remains of it.
fn discard(run: Option<&Run>) -> String {
    let Some(run) = run else { return "nothing to save".into() };
    run.discard();
    match is_run(run.dir()) {
        true => format!("nothing to save; continue with: {}", run.resume_command()),
        false => "nothing to save, and the run's directory is removed".into(),
    }
}
