//! Writes checkpoints in the background, on a thread of its own on every rank.
//!
//! One checkpoint is written at a time. A save that is requested meanwhile waits first, so that every checkpoint the config asks
//! for is made and at most one copy of the state is held.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::run::checkpoint::{self, Retention, Together};
use crate::run::state::Snapshot;

/// Interval at which a waiting caller is told of progress.
const PROGRESS_EVERY: Duration = Duration::from_secs(1);

/// The outcome of a save.
#[derive(Debug)]
pub struct SaveOutcome {
    pub step: u64,
    pub seconds: f64,
    pub kept: Retention,
    pub result: checkpoint::SaveResult,
}

pub struct Writer {
    /// Dropped first, which ends the thread.
    jobs: Option<Sender<(Snapshot, Retention)>>,
    results: Receiver<SaveOutcome>,
    is_busy: bool,
    /// File system operations so far.
    done: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Writer {
    /// `checkpoints` is the folder of a run's checkpoints; `together` is present where several ranks write it.
    pub fn new(checkpoints: PathBuf, together: Option<Together>) -> io::Result<Writer> {
        let done = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&done);
        let (jobs, taken) = channel::<(Snapshot, Retention)>();
        let (report, results) = channel();
        let work = move || {
            for (snapshot, kept) in taken {
                let (step, began) = (snapshot.state.step, Instant::now());
                // The copy is dropped when this returns, so that the next one finds its memory free.
                let watch: checkpoint::Watch = &mut |_| {
                    count.fetch_add(1, Ordering::Relaxed);
                    Ok(())
                };
                let result = snapshot.save(&checkpoints, &kept, together.as_ref(), watch);
                let seconds = began.elapsed().as_secs_f64();
                let written = SaveOutcome { step, seconds, kept, result };
                if report.send(written).is_err() {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("checkpoints".into()).spawn(work)?;
        Ok(Writer { jobs: Some(jobs), results, is_busy: false, done, thread: Some(thread) })
    }

    /// Begins a save. Panics if one is under way: call `wait` first.
    pub fn begin(&mut self, snapshot: Snapshot, kept: Retention) {
        assert!(!self.is_busy, "one checkpoint is written at a time");
        self.is_busy = true;
        let jobs = self.jobs.as_ref().expect("open until it is dropped");
        jobs.send((snapshot, kept)).expect("the thread lives as long as its writer");
    }

    /// The outcome of the save that has ended, if one has.
    pub fn finished(&mut self) -> Option<SaveOutcome> {
        let written = if self.is_busy { self.results.try_recv().ok()? } else { return None };
        self.is_busy = false;
        Some(written)
    }

    /// Waits for the save that is under way, if one is. Meanwhile passes `progress` a count that grows with completed operations
    /// and with time, because a flush reports no progress.
    pub fn wait(&mut self, progress: impl Fn(u64)) -> Option<SaveOutcome> {
        if !self.is_busy {
            return None;
        }
        self.is_busy = false;
        let mut ticks = 0;
        loop {
            match self.results.recv_timeout(PROGRESS_EVERY) {
                Ok(written) => return Some(written),
                Err(RecvTimeoutError::Timeout) => {
                    ticks += 1;
                    progress(self.done.load(Ordering::Relaxed) + ticks);
                }
                Err(RecvTimeoutError::Disconnected) => {
                    unreachable!("the thread lives as long as its writer")
                }
            }
        }
    }
}

/// Waits for the save under way: a run that fails still leaves the checkpoint it had begun.
impl Drop for Writer {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
