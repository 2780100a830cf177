//! A run that is asked to stop before its first step: there is nothing to save, so it leaves at once with code 3,
//! whatever is being compiled or read. Of several ranks all leave, whichever is asked.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use flatout_train::Failure;
use flatout_train::UserError;
use flatout_train::run::signal::{self, StopFlag};
use flatout_train::run::{Entered, Run, is_run};
use flatout_world::Stopper;

use crate::screen::Screen;

/// How long a rank waits for the hub to tell everyone, itself too, that they leave.
const TELLING: Duration = Duration::from_secs(5);

/// The run that is starting.
pub struct Starting(Arc<State>);

struct State {
    /// Once it has a directory, on the rank that writes it.
    run: Mutex<Option<Arc<Run>>>,
    /// Once this process joins other ranks, or is left before it does.
    others: OnceLock<Option<Stopper>>,
    is_quiet: AtomicBool,
    /// It makes no run, but measures.
    measures: AtomicBool,
    screen: Screen,
}

impl State {
    /// Ends the process, and what was only begun of its run.
    fn leave(&self, reason: &str) -> ! {
        let run: Option<Arc<Run>> = self.run.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let left = left(run.as_deref());
        if !self.is_quiet.load(Ordering::SeqCst) {
            self.screen.note(match self.measures.load(Ordering::SeqCst) {
                true => format!("{reason}: nothing more is measured"),
                false => format!("{reason} before the first step: {left}"),
            });
        }
        signal::leave(3)
    }
}

/// Takes over signals and the clock. To be called before anything that takes time.
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
            std::thread::sleep(TELLING);
        }
        state.leave(reason)
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
        let mut known = self.0.run.lock().unwrap_or_else(PoisonError::into_inner);
        let (run, is_fresh) = match make()? {
            Entered::Fresh(run) => (Arc::new(run), true),
            Entered::Existing(run) => (Arc::new(run), false),
        };
        *known = Some(Arc::clone(&run));
        Ok((run, is_fresh))
    }

    /// Lets go of a run that has ended, so that it is free for whoever reads it.
    pub fn leave(&self) {
        *self.0.run.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// There is no run to save.
    pub fn measures(&self) {
        self.0.measures.store(true, Ordering::SeqCst);
    }

    /// Of several ranks the first alone speaks.
    pub fn is_rank(&self, rank: usize) {
        self.0.is_quiet.store(rank > 0, Ordering::SeqCst);
    }

    /// Takes the handle by which a reason to stop is told to the other ranks, so that all leave together. Does not return where
    /// the process is being left already: nobody has heard of it yet.
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

    /// Ends the process because another rank was asked to stop.
    pub fn leave_with_others(&self) -> impl Fn(&str) + Send + Sync + 'static {
        let state = Arc::clone(&self.0);
        move |reason| state.leave(reason)
    }
}

/// Describes what is left of the run. A run that never began is removed.
fn left(run: Option<&Run>) -> String {
    let Some(run) = run else { return "nothing to save".into() };
    run.discard();
    match is_run(run.dir()) {
        true => format!("nothing to save; continue with: {}", run.resume_command()),
        false => "nothing to save, and nothing is left of the run".into(),
    }
}
