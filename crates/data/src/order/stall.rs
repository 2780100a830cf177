//! The time a trainer waited for its loader, by cause, and the memory that a loader holds.

use std::ops::AddAssign;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use super::documents::Spent;

/// Time spent waiting for rows or images, by what the loader's thread did meanwhile. The parts sum to `total`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Waited {
    pub total: Duration,
    /// Reading bytes from files.
    pub reading: Duration,
    /// Turning text into tokens.
    pub tokenising: Duration,
    /// Decoding images and resizing them.
    pub decoding: Duration,
    /// Packing tokens into rows.
    pub packing: Duration,
    /// The loader's thread was not running: more threads than cores, or it had only just started.
    pub scheduling: Duration,
}

impl Waited {
    /// Divides a wait of `total` by cause, where the awaited row cost `spent` and `packing`. The part of the wait that exceeds
    /// this cost counts as scheduling.
    pub(crate) fn new(total: Duration, spent: Spent, packing: Duration) -> Self {
        let cost = spent.reading + spent.tokenising + spent.decoding + packing;
        let working = total.min(cost);
        let mut left = working;
        let mut share = |part: Duration| {
            if cost.is_zero() {
                return Duration::ZERO;
            }
            // Shares are rounded, so the last one may be a nanosecond more than is left.
            let part = working.mul_f64(part.as_secs_f64() / cost.as_secs_f64()).min(left);
            left -= part;
            part
        };
        let (reading, tokenising, decoding) =
            (share(spent.reading), share(spent.tokenising), share(spent.decoding));
        // Packing takes the remainder, so the parts sum to the total.
        let packing = left;
        let scheduling = total - working;
        Self { total, reading, tokenising, decoding, packing, scheduling }
    }

    /// The time waited since an earlier value `before`.
    pub fn since(self, before: Self) -> Self {
        Self {
            total: self.total - before.total,
            reading: self.reading - before.reading,
            tokenising: self.tokenising - before.tokenising,
            decoding: self.decoding - before.decoding,
            packing: self.packing - before.packing,
            scheduling: self.scheduling - before.scheduling,
        }
    }

    /// The largest part, in words; `None` where there was no wait.
    pub fn cause(&self) -> Option<&'static str> {
        let parts = [
            (self.reading, "reading"),
            (self.tokenising, "tokenising"),
            (self.decoding, "decoding"),
            (self.packing, "packing"),
            (self.scheduling, "busy cores"),
        ];
        parts
            .into_iter()
            .filter(|(part, _)| !part.is_zero())
            .max_by_key(|(part, _)| *part)
            .map(|(_, name)| name)
    }
}

impl AddAssign for Waited {
    fn add_assign(&mut self, other: Self) {
        self.total += other.total;
        self.reading += other.reading;
        self.tokenising += other.tokenising;
        self.decoding += other.decoding;
        self.packing += other.packing;
        self.scheduling += other.scheduling;
    }
}

/// Bytes of queued rows and of current documents, now and at the peak.
#[derive(Debug, Default)]
pub(crate) struct Gauge {
    now: AtomicUsize,
    peak: AtomicUsize,
}

impl Gauge {
    pub(crate) fn add(&self, bytes: usize) {
        let now = self.now.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak.fetch_max(now, Ordering::Relaxed);
    }

    pub(crate) fn remove(&self, bytes: usize) {
        self.now.fetch_sub(bytes, Ordering::Relaxed);
    }

    pub(crate) fn peak(&self) -> usize {
        self.peak.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(count: u64) -> Duration {
        Duration::from_millis(count)
    }

    #[test]
    fn a_wait_is_divided_as_its_row_was_made() {
        let spent = Spent { reading: ms(10), tokenising: ms(30), ..Spent::default() };
        let half = Waited::new(ms(25), spent, ms(10));
        assert_eq!(
            (half.reading, half.tokenising, half.packing, half.scheduling),
            (ms(5), ms(15), ms(5), ms(0))
        );
        assert_eq!(half.cause(), Some("tokenising"));
        let longer = Waited::new(ms(150), spent, ms(10));
        assert_eq!((longer.tokenising, longer.scheduling), (ms(30), ms(100)));
        assert_eq!(longer.cause(), Some("busy cores"));
        let free = Waited::new(ms(7), Spent::default(), ms(0));
        assert_eq!((free.scheduling, free.total), (ms(7), ms(7)));
        assert_eq!(Waited::default().cause(), None);
    }

    #[test]
    fn parts_sum_to_the_whole() {
        for nanos in [1, 3, 7, 1001, 333_333_333] {
            let spent = Spent {
                reading: Duration::from_nanos(333),
                tokenising: Duration::from_nanos(77_777),
                decoding: Duration::from_nanos(5_557),
            };
            let mut waited = Waited::new(Duration::from_nanos(nanos), spent, Duration::from_nanos(1));
            waited += Waited::new(Duration::from_nanos(5 * nanos), spent, Duration::from_nanos(9));
            let Waited { total, reading, tokenising, decoding, packing, scheduling } = waited;
            assert_eq!(reading + tokenising + decoding + packing + scheduling, total);
        }
    }

    #[test]
    fn a_gauge_remembers_its_peak() {
        let gauge = Gauge::default();
        gauge.add(10);
        gauge.add(5);
        gauge.remove(12);
        gauge.add(1);
        assert_eq!(gauge.peak(), 15);
    }
}
