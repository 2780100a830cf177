//! Checkpoints written beside the training, by a thread of its own.
//!
//! One is written at a time. Who wants to save while one is being written waits for it first, so that every checkpoint
//! the config asks for is made and one copy of the state is the most that is ever held.

use std::io;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Instant;

use crate::run::checkpoint::{Retention, Saved};
use crate::run::state::Snapshot;

/// How a save ended.
#[derive(Debug)]
pub struct Written {
    pub step: u64,
    pub seconds: f64,
    pub kept: Retention,
    pub result: io::Result<Saved>,
}

pub struct Writer {
    /// Dropped first, which ends the thread.
    jobs: Option<Sender<(Snapshot, Retention)>>,
    results: Receiver<Written>,
    is_busy: bool,
    thread: Option<JoinHandle<()>>,
}

impl Writer {
    /// For the folder of a run's checkpoints.
    pub fn new(checkpoints: PathBuf) -> io::Result<Writer> {
        let (jobs, taken) = channel::<(Snapshot, Retention)>();
        let (report, results) = channel();
        let work = move || {
            for (snapshot, kept) in taken {
                let (step, began) = (snapshot.state.step, Instant::now());
                // The copy is gone when this returns, so the next one finds its memory free.
                let result = snapshot.save(&checkpoints, &kept);
                let seconds = began.elapsed().as_secs_f64();
                let written = Written { step, seconds, kept, result };
                if report.send(written).is_err() {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("checkpoints".into()).spawn(work)?;
        Ok(Writer { jobs: Some(jobs), results, is_busy: false, thread: Some(thread) })
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

    /// Waits for the save that is under way, if one is.
    pub fn wait(&mut self) -> Option<Written> {
        if !self.is_busy {
            return None;
        }
        self.is_busy = false;
        Some(self.results.recv().expect("the thread lives as long as its writer"))
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
