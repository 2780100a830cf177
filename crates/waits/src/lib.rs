//! Progress of long work in this process: what is running now, and how much of it is done.
//!
//! Code that takes long registers its work with [`begin`] and counts with [`Wait::add`]; a command that draws on a terminal polls
//! [`newest`]. Neither knows the other, nothing is printed here, and no result depends on it. Registering costs one lock at the beginning,
//! one at the end, and an addition for every count.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

/// The unit that a wait counts in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Nothing is counted.
    Nothing,
    Bytes,
    /// Things of this name, such as `kernels`.
    Things(&'static str),
}

/// Registered work, which ends when this is dropped. Any thread may count.
#[derive(Debug)]
pub struct Wait(Arc<Work>);

#[derive(Debug)]
struct Work {
    what: String,
    unit: Unit,
    began: Instant,
    thread: ThreadId,
    done: AtomicU64,
    /// 0 if it is not known.
    total: u64,
}

/// The state of registered work at one moment.
#[derive(Clone, Debug, PartialEq)]
pub struct WaitSnapshot {
    pub what: String,
    pub unit: Unit,
    pub done: u64,
    pub total: Option<u64>,
    /// Time since it began.
    pub time: Duration,
}

/// All registered work, the oldest first.
static RUNNING: Mutex<Vec<Arc<Work>>> = Mutex::new(Vec::new());

fn running() -> MutexGuard<'static, Vec<Arc<Work>>> {
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Registers work under a name such as `reading weights`, with the total to count up to if it is known.
pub fn begin(what: impl Into<String>, unit: Unit, total: Option<u64>) -> Wait {
    let work = Arc::new(Work {
        what: what.into(),
        unit,
        began: Instant::now(),
        thread: thread::current().id(),
        done: AtomicU64::new(0),
        total: total.unwrap_or(0),
    });
    running().push(Arc::clone(&work));
    Wait(work)
}

/// The work that began last among all that has run for at least this long. Work within other work begins later and describes more
/// exactly what is going on.
pub fn newest(least: Duration) -> Option<WaitSnapshot> {
    newest_of(least, |_| true)
}

/// Like [`newest`], for the work that one thread has begun.
pub fn newest_by(thread: ThreadId, least: Duration) -> Option<WaitSnapshot> {
    newest_of(least, |work| work.thread == thread)
}

fn newest_of(least: Duration, is_included: impl Fn(&Work) -> bool) -> Option<WaitSnapshot> {
    let all = running();
    let long = all.iter().rev().find(|work| work.began.elapsed() >= least && is_included(work));
    long.map(|work| work.snapshot())
}

impl Wait {
    /// Counts more as done.
    pub fn add(&self, more: u64) {
        self.0.done.fetch_add(more, Ordering::Relaxed);
    }

    /// Sets how much is done.
    pub fn set(&self, done: u64) {
        self.0.done.store(done, Ordering::Relaxed);
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        running().retain(|work| !Arc::ptr_eq(work, &self.0));
    }
}

impl Work {
    fn snapshot(&self) -> WaitSnapshot {
        WaitSnapshot {
            what: self.what.clone(),
            unit: self.unit,
            done: self.done.load(Ordering::Relaxed),
            total: Some(self.total).filter(|total| *total > 0),
            time: self.began.elapsed(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_work_is_reported_until_it_ends() {
        assert_eq!(newest(Duration::ZERO), None);
        let outer = begin("outer", Unit::Bytes, Some(8));
        outer.add(3);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| outer.add(1));
            }
        });
        let seen = newest(Duration::ZERO).unwrap();
        assert_eq!((seen.what.as_str(), seen.done, seen.total), ("outer", 7, Some(8)));
        let inner = begin("inner", Unit::Nothing, None);
        assert_eq!(newest(Duration::ZERO).unwrap().what, "inner");
        let here = thread::current().id();
        let elsewhere = thread::spawn(move || newest_by(thread::current().id(), Duration::ZERO));
        assert_eq!(elsewhere.join().unwrap(), None);
        assert_eq!(newest_by(here, Duration::ZERO).unwrap().what, "inner");
        assert_eq!(newest(Duration::from_secs(3600)), None, "neither has run for that long");
        drop(inner);
        assert_eq!(newest(Duration::ZERO).unwrap().what, "outer");
        drop(outer);
        assert_eq!(newest(Duration::ZERO), None);
    }
}
