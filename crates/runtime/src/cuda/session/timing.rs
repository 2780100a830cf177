//! Times single launches on the device, by events between the launches of an uncaptured pass.
//!
//! Two effects would distort these times. First, a host that enqueues more slowly than the device computes leaves the device
//! idle between launches, and the idle time would count. So a batch of launches is enqueued behind a kernel that spins
//! meanwhile; if the spin ended before the last of them was enqueued, the batch is discarded and the next spin is longer.
//! Second, an event costs the stream a microsecond or two, which is most of a short launch. So the time between two events with
//! nothing between them is subtracted, and a short launch runs several times between its events. Only launches whose outputs
//! overlap none of their inputs are repeated, so that a pass leaves the arena as a single run would.
//!
//! Exchanges between ranks are timed separately, in the same number of rounds on every rank, because repetitions of other
//! launches are chosen by each rank alone. Exchanges follow each other directly, so that only the first waits for late ranks,
//! and the first round is discarded.

use std::time::Duration;

use super::spin::spin;
use crate::cuda::context::{CudaError, Function, Stream, Work};
use crate::cuda::driver::{Driver, Event};

/// A launch shorter than this runs several times between two events.
const SHORT_SECONDS: f64 = 20e-6;
const REPEATS: usize = 10;
/// Launches enqueued behind one spin. The driver queues about a thousand kernels and events before it blocks the host, and a
/// launch may be several kernels.
pub const BEHIND_SPIN: usize = 128;
/// Enqueuing takes a few microseconds per launch.
const FIRST_SPIN: Duration = Duration::from_millis(1);
const LONGEST_SPIN: Duration = Duration::from_millis(128);
/// Number of empty event pairs that are timed.
const EMPTY_PAIRS: usize = 32;

/// Number of runs of a launch between its events, from the time of a single run.
pub fn repeats(seconds: f64, is_repeatable: bool) -> usize {
    if is_repeatable && seconds < SHORT_SECONDS { REPEATS } else { 1 }
}

/// Times launches on one stream.
pub struct Timer {
    function: Function,
    stream: Stream,
    /// One more than the launches behind a spin.
    marks: Vec<Event>,
    spin: Duration,
    /// Time between two events with nothing between them.
    empty_seconds: f64,
}

impl Timer {
    /// `function` is the entry point of `spin.cu`.
    pub fn new(driver: &'static Driver, function: Function, stream: Stream) -> Result<Timer, CudaError> {
        let marks = (0..=BEHIND_SPIN).map(|_| Event::new(driver)).collect::<Result<_, _>>()?;
        let mut timer = Timer { function, stream, marks, spin: FIRST_SPIN, empty_seconds: 0.0 };
        let nothing: Vec<(&dyn Work, usize)> = vec![(&EmptyWork, 1); EMPTY_PAIRS];
        let mut pairs = vec![];
        // The first spin also loads the kernel.
        for _ in 0..3 {
            pairs = timer.seconds(&nothing).map_err(|(_, why)| why)?.unwrap_or(pairs);
        }
        pairs.sort_by(f64::total_cmp);
        timer.empty_seconds = pairs.get(EMPTY_PAIRS / 2).copied().unwrap_or(0.0);
        Ok(timer)
    }

    /// Runs each work the given number of times and waits. Returns the seconds of a single run of each, or `None` if the host
    /// was late and the times are invalid. An error comes with the index of its work.
    pub fn seconds(&mut self, works: &[(&dyn Work, usize)]) -> Result<Option<Vec<f64>>, (usize, CudaError)> {
        assert!(works.len() < self.marks.len(), "more launches than events");
        let (stream, marks) = (self.stream, &self.marks);
        let first = |why| (0, why);
        spin(&self.function, self.spin, stream).map_err(first)?;
        marks[0].record(stream).map_err(first)?;
        for (i, (work, repeats)) in works.iter().enumerate() {
            (0..*repeats)
                .try_for_each(|_| work.enqueue(stream))
                .and_then(|()| marks[i + 1].record(stream))
                .map_err(|why| (i, why))?;
        }
        let is_late = marks[0].is_reached().map_err(first)?;
        let mut seconds = Vec::with_capacity(works.len());
        for (i, (_, repeats)) in works.iter().enumerate() {
            let between = marks[i].elapsed_ms(&marks[i + 1]).map_err(|why| (i, why))? / 1e3;
            seconds.push((between - self.empty_seconds).max(0.0) / *repeats as f64);
        }
        if is_late {
            self.spin = (2 * self.spin).min(LONGEST_SPIN);
            return Ok(None);
        }
        Ok(Some(seconds))
    }
}

/// Runs exchanges one after the other for a number of rounds and waits. Returns the seconds of each, by round. An error comes
/// with the index of its exchange.
pub fn exchanges(
    driver: &'static Driver,
    timer: &Timer,
    works: &[&dyn Work],
    rounds: usize,
) -> Result<Vec<Vec<f64>>, (usize, CudaError)> {
    let (stream, first) = (timer.stream, |why| (0, why));
    let marks = (0..=rounds * works.len()).map(|_| Event::new(driver)).collect::<Result<Vec<_>, _>>();
    let marks = marks.map_err(first)?;
    spin(&timer.function, FIRST_SPIN, stream).map_err(first)?;
    marks[0].record(stream).map_err(first)?;
    for (mark, (i, work)) in marks[1..].iter().zip(works.iter().enumerate().cycle()) {
        work.enqueue(stream).and_then(|()| mark.record(stream)).map_err(|why| (i, why))?;
    }
    let mut seconds = Vec::with_capacity(rounds * works.len());
    for (at, pair) in marks.windows(2).enumerate() {
        let between = pair[0].elapsed_ms(&pair[1]).map_err(|why| (at % works.len(), why))? / 1e3;
        seconds.push((between - timer.empty_seconds).max(0.0));
    }
    Ok(seconds.chunks(works.len()).map(<[f64]>::to_vec).collect())
}

struct EmptyWork;

impl Work for EmptyWork {
    fn enqueue(&self, _: Stream) -> Result<(), CudaError> {
        Ok(())
    }
}

/// Splits launches, given the repetitions of each, into batches that fit behind one spin.
pub fn batches(repeats: &[usize]) -> Vec<std::ops::Range<usize>> {
    let (mut ranges, mut begin, mut count) = (vec![], 0, 0);
    for (i, repeats) in repeats.iter().enumerate() {
        if count + repeats > BEHIND_SPIN && i > begin {
            ranges.push(begin..i);
            (begin, count) = (i, 0);
        }
        count += repeats;
    }
    if begin < repeats.len() {
        ranges.push(begin..repeats.len());
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_hold_every_launch_once_within_the_limit() {
        assert!(batches(&[]).is_empty());
        let plain = vec![1; 300];
        assert_eq!(batches(&plain), [0..128, 128..256, 256..300]);
        let mixed: Vec<usize> = (0..500).map(|i| if i % 3 == 0 { REPEATS } else { 1 }).collect();
        let cut = batches(&mixed);
        assert_eq!(cut.iter().cloned().flatten().collect::<Vec<_>>(), (0..500).collect::<Vec<_>>());
        assert!(cut.iter().all(|range| mixed[range.clone()].iter().sum::<usize>() <= BEHIND_SPIN));
    }

    #[test]
    fn only_short_repeatable_launches_are_repeated() {
        assert_eq!([repeats(5e-6, true), repeats(5e-6, false), repeats(5e-5, true)], [REPEATS, 1, 1]);
    }
}
