//! Checkpoints written beside the training, by a thread of its own on every rank.
//!
//! One is written at a time. Who wants to save while one is being written waits for it first, so that every checkpoint
//! the config asks for is made and one copy of the state is the most that is ever held.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::run::checkpoint::{self, Retention, Together};
use crate::run::state::Snapshot;

/// How often who waits for a save is told how far it is.
const TELL_EVERY: Duration = Duration::from_secs(1);

/// How a save ended.
#[derive(Debug)]
pub struct Written {
    pub step: u64,
    pub seconds: f64,
    pub kept: Retention,
    pub result: checkpoint::Written,
}

pub struct Writer {
    /// Dropped first, which ends the thread.
    jobs: Option<Sender<(Snapshot, Retention)>>,
    results: Receiver<Written>,
    is_busy: bool,
    /// Operations on the file system so far.
    done: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Writer {
    /// For the folder of a run's checkpoints, which several ranks write together.
    pub fn new(checkpoints: PathBuf, together: Option<Together>) -> io::Result<Writer> {
        let done = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&done);
        let (jobs, taken) = channel::<(Snapshot, Retention)>();
        let (report, results) = channel();
        let work = move || {
            for (snapshot, kept) in taken {
                let (step, began) = (snapshot.state.step, Instant::now());
                // The copy is gone when this returns, so the next one finds its memory free.
                let watch: checkpoint::Watch = &mut |_| {
                    count.fetch_add(1, Ordering::Relaxed);
                    Ok(())
                };
                let result = snapshot.save(&checkpoints, &kept, together.as_ref(), watch);
                let seconds = began.elapsed().as_secs_f64();
                let written = Written { step, seconds, kept, result };
                if report.send(written).is_err() {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("checkpoints".into()).spawn(work)?;
        Ok(Writer { jobs: Some(jobs), results, is_busy: false, done, thread: Some(thread) })
    }

    /// Begins a save. Panics where one is under way: `wait` comes first.
    pub fn begin(&mut self, snapshot: Snapshot, kept: Retention) {
        assert!(!self.is_busy, "one checkpoint is written at a time");
        self.is_busy = true;
        let jobs = self.jobs.as_ref().expect("open until it is dropped");
        jobs.send((snapshot, kept)).expect("the thread lives as long as its writer");
    }

    /// The save that has ended, if one has.
    pub fn finished(&mut self) -> Option<Written> {
        let written = if self.is_busy { self.results.try_recv().ok()? } else { return None };
        self.is_busy = false;
        Some(written)
    }

    /// Waits for the save that is under way, if one is, and tells meanwhile that it goes on, by a count that grows: with what is
    /// done, and with time, because a flush says nothing of its progress.
    pub fn wait(&mut self, tell: impl Fn(u64)) -> Option<Written> {
        if !self.is_busy {
            return None;
        }
        self.is_busy = false;
        let mut ticks = 0;
        loop {
            match self.results.recv_timeout(TELL_EVERY) {
                Ok(written) => return Some(written),
                Err(RecvTimeoutError::Timeout) => {
                    ticks += 1;
                    tell(self.done.load(Ordering::Relaxed) + ticks);
                }
                Err(RecvTimeoutError::Disconnected) => {
                    unreachable!("the thread lives as long as its writer")
                }
            }
        }
    }
}

/// Lets a save that is under way come to its end: a run that fails still leaves what it had begun to save.
impl Drop for Writer {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
