//! A stopwatch with named laps.

use std::time::Instant;

/// Seconds by name, in order of first appearance.
#[derive(Clone, Debug)]
pub struct Laps {
    clock: Instant,
    laps: Vec<(&'static str, f64)>,
}

impl Laps {
    pub fn begin() -> Laps {
        Laps { clock: Instant::now(), laps: vec![] }
    }

    /// Attributes the time since the last lap to `name`.
    pub fn lap(&mut self, name: &'static str) {
        let seconds = std::mem::replace(&mut self.clock, Instant::now()).elapsed().as_secs_f64();
        self.add(name, seconds);
    }

    /// Adds the laps of another stopwatch, which cover the time since the last lap.
    pub fn take(&mut self, others: &Laps) {
        others.laps.iter().for_each(|(name, seconds)| self.add(name, *seconds));
        self.clock = Instant::now();
    }

    pub fn iter(&self) -> impl Iterator<Item = (&'static str, f64)> {
        self.laps.iter().copied()
    }

    fn add(&mut self, name: &'static str, seconds: f64) {
        match self.laps.iter_mut().find(|(known, _)| *known == name) {
            Some((_, sum)) => *sum += seconds,
            None => self.laps.push((name, seconds)),
        }
    }
}
