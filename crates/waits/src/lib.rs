//! Work that somebody may be waiting for: what goes on in this process right now, and how far it is.
//!
//! Code that takes long says so with [`begin`] and counts with [`Wait::add`]; a command that draws a terminal asks [`newest`] from time
//! to time. Neither knows the other, nothing is printed here, and no result depends on it. A wait that nobody looks at costs one
//! lock when it begins, one when it ends, and an addition for every count.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

/// The unit that a wait counts in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Nothing is counted: it takes as long as it takes.
    Nothing,
    Bytes,
    /// Things of this name, as `kernels`.
    Things(&'static str),
}

/// Work that goes on until this is dropped. Any thread may count.
#[derive(Debug)]
pub struct Wait(Arc<Work>);

#[derive(Debug)]
struct Work {
    what: String,
    unit: Unit,
    began: Instant,
    thread: ThreadId,
    done: AtomicU64,
    /// 0 where it is not known.
    total: u64,
}

/// A wait at one moment.
#[derive(Clone, Debug, PartialEq)]
pub struct WaitSnapshot {
    pub what: String,
    pub unit: Unit,
    pub done: u64,
    pub total: Option<u64>,
    /// Since it began.
    pub time: Duration,
}

/// Everything that goes on, the oldest first.
static GOING_ON: Mutex<Vec<Arc<Work>>> = Mutex::new(Vec::new());

fn going_on() -> MutexGuard<'static, Vec<Arc<Work>>> {
    GOING_ON.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Begins work, in words that stand before how far it is, as `reading weights`; with the whole of it where that is known.
pub fn begin(what: impl Into<String>, unit: Unit, total: Option<u64>) -> Wait {
    let work = Arc::new(Work {
        what: what.into(),
        unit,
        began: Instant::now(),
        thread: thread::current().id(),
        done: AtomicU64::new(0),
        total: total.unwrap_or(0),
    });
    going_on().push(Arc::clone(&work));
    Wait(work)
}

/// The work that began last of all that has gone on for this long: what is inside of other work is nearer to the matter.
pub fn newest(least: Duration) -> Option<WaitSnapshot> {
    newest_of(least, |_| true)
}

/// The same of the work that a thread has begun, and not of what others prepare beside it.
pub fn newest_by(thread: ThreadId, least: Duration) -> Option<WaitSnapshot> {
    newest_of(least, |work| work.thread == thread)
}

fn newest_of(least: Duration, wanted: impl Fn(&Work) -> bool) -> Option<WaitSnapshot> {
    let all = going_on();
    let long = all.iter().rev().find(|work| work.began.elapsed() >= least && wanted(work));
    long.map(|work| work.seen())
}

impl Wait {
    /// Counts more as done.
    pub fn add(&self, more: u64) {
        self.0.done.fetch_add(more, Ordering::Relaxed);
    }

    /// Says how much is done.
    pub fn set(&self, done: u64) {
        self.0.done.store(done, Ordering::Relaxed);
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        going_on().retain(|work| !Arc::ptr_eq(work, &self.0));
    }
}

impl Work {
    fn seen(&self) -> WaitSnapshot {
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
    fn the_newest_that_lasts_is_seen_until_it_ends() {
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
        assert_eq!(newest(Duration::from_secs(3600)), None, "neither has gone on for that long");
        drop(inner);
        assert_eq!(newest(Duration::ZERO).unwrap().what, "outer");
        drop(outer);
        assert_eq!(newest(Duration::ZERO), None);
    }
}
