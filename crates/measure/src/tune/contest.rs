//! A race for the fastest: contestants are visited in rounds, interleaved with the incumbent, and are eliminated when they cannot
//! win.
//!
//! Times are compared as in `ablate`: the ratio of a visit's time to the incumbent's at that moment, its median over rounds, and
//! an interval around it (`statistics`). After every round, contestants whose interval lies above the leader's are eliminated,
//! and of the slower half those that were never near the leader; after two visits, because one may have been disturbed, unless
//! the difference is very large. The race ends when no contestant can be better by [`MATTERS`], after the last round, or when
//! time is up. The incumbent stays unless a contestant is faster beyond noise.

use std::time::Duration;

use crate::statistics::{Estimate, Noise, estimate, median, nearest, noise};
use flatout_train::Failure;

/// A smaller improvement is not worth another round.
const MATTERS: f64 = 0.01;
/// Of the slower half, contestants that were slower than the leader by this in every round are eliminated; by two standard
/// deviations, where those are more.
const HALVED: f64 = 0.03;
/// The same after a single visit: more than a process that takes half the machine can cause.
const HALVED_AT_ONCE: f64 = 0.7;
/// Contestants between two visits of the incumbent: more while most will be eliminated, one when few are left and small
/// differences must be resolved.
const BETWEEN: [usize; 2] = [3, 1];
const FEW: usize = 4;

#[derive(Clone, Copy, Debug)]
pub struct Rules {
    pub least_rounds: usize,
    pub most_rounds: usize,
    /// No visit begins that might end later than this on [`Clock::elapsed`].
    pub until: Duration,
}

/// Makes visits and measures elapsed time. Contestant 0 is the incumbent.
pub struct Clock<'a> {
    /// Visits a contestant and returns the milliseconds of an update. An error of the incumbent ends the contest.
    pub visit: &'a mut dyn FnMut(usize) -> Result<f64, Failure>,
    pub elapsed: &'a mut dyn FnMut() -> Duration,
}

/// The result of a contestant.
#[derive(Clone, Debug, Default)]
pub struct Standing {
    /// The median of its visits.
    pub step_ms: Option<f64>,
    /// Its time over the incumbent's.
    pub over: Option<Estimate>,
    /// The smallest ratio of any round.
    least: f64,
    pub failed: Option<String>,
}

#[derive(Debug)]
pub struct Outcome {
    /// By contestant; the incumbent is first.
    pub standings: Vec<Standing>,
    /// Contestants that were not eliminated, without the incumbent.
    pub alive: Vec<usize>,
    /// Whether the race was decided before time was up.
    pub is_decided: bool,
    /// Noise, from comparing the incumbent with itself.
    noise: Noise,
}

impl Outcome {
    /// Standard deviation of one ratio where nothing differs, once there are visits to estimate it.
    pub fn deviation(&self) -> Option<f64> {
        Some(self.noise.deviation).filter(|deviation| deviation.is_finite())
    }

    /// Contestants that are faster than the incumbent beyond noise, the fastest first.
    pub fn faster(&self) -> Vec<(usize, Estimate)> {
        let of = |&i: &usize| self.standings[i].over.map(|over| (i, over));
        let mut all: Vec<_> = self.alive.iter().filter_map(of).collect();
        all.retain(|(_, over)| over.ratio < 1.0 && !over.is_noise());
        all.sort_by(|(_, a), (_, b)| a.ratio.total_cmp(&b.ratio));
        all
    }
}

/// Races contestants 1 to `count` - 1, the most promising first, against the incumbent.
pub fn contest(count: usize, rules: Rules, clock: Clock<'_>) -> Result<Outcome, Failure> {
    let failed = vec![None; count];
    let mut race = Race { clock, visits: vec![], failed, took: vec![None; count], until: rules.until };
    let mut alive: Vec<usize> = (1..count).collect();
    let mut is_decided = alive.is_empty();
    race.incumbent()?;
    for round in 1..=rules.most_rounds {
        let mut order = alive.clone();
        if round.is_multiple_of(2) {
            order.reverse();
        }
        let in_time = race.round(&order)?;
        alive.retain(|&i| race.failed[i].is_none());
        let standings = race.standings();
        eliminate(&mut alive, &standings, race.noise());
        is_decided = alive.is_empty() || (round >= rules.least_rounds && is_settled(&alive, &standings));
        if is_decided || !in_time {
            break;
        }
        is_decided = round == rules.most_rounds;
    }
    let (standings, noise) = (race.standings(), race.noise());
    alive.retain(|&i| standings[i].over.is_some());
    Ok(Outcome { standings, alive, is_decided, noise })
}

struct Race<'a> {
    clock: Clock<'a>,
    /// The contestant visited and how long an update took, in order.
    visits: Vec<(usize, f64)>,
    failed: Vec<Option<String>>,
    /// Duration of the last visit of each: a first one may have had to fill caches that later ones hit.
    took: Vec<Option<Duration>>,
    until: Duration,
}

impl Race<'_> {
    /// Makes a round of visits. False where time was up before its end.
    fn round(&mut self, order: &[usize]) -> Result<bool, Failure> {
        for group in order.chunks(BETWEEN[(order.len() <= FEW) as usize]) {
            for &i in group {
                // The incumbent's visit after it must fit too.
                if (self.clock.elapsed)() + self.may_take(i) + self.may_take(0) > self.until {
                    return Ok(false);
                }
                if let Err(why) = self.visited(i) {
                    self.failed[i] = Some(why.to_string());
                }
            }
            self.incumbent()?;
        }
        Ok(true)
    }

    fn incumbent(&mut self) -> Result<(), Failure> {
        let failed = self.failed.iter().flatten().last();
        let explained =
            failed.map(|why| format!("the incumbent ran before and fails after another failure ({why})"));
        self.visited(0).map_err(|why| match explained {
            Some(explained) => Failure::Environment(format!("{explained}: {why}")),
            None => why,
        })
    }

    fn visited(&mut self, i: usize) -> Result<(), Failure> {
        let began = (self.clock.elapsed)();
        let ms = (self.clock.visit)(i);
        self.took[i] = Some((self.clock.elapsed)().saturating_sub(began));
        self.visits.push((i, ms?));
        Ok(())
    }

    /// The expected duration of the next visit: that of the last, or of the longest of others.
    fn may_take(&self, i: usize) -> Duration {
        self.took[i].or(self.took.iter().flatten().max().copied()).unwrap_or_default()
    }

    fn noise(&self) -> Noise {
        noise(&[self.of(0)])
    }

    fn of(&self, contestant: usize) -> Vec<f64> {
        self.visits.iter().filter(|(i, _)| *i == contestant).map(|(_, ms)| *ms).collect()
    }

    fn standings(&self) -> Vec<Standing> {
        let noise = self.noise();
        let standing = |i: usize| {
            let times = self.of(i);
            let ratios: Vec<f64> = (0..self.visits.len()).filter_map(|at| self.ratio(i, at)).collect();
            Standing {
                step_ms: (!times.is_empty()).then(|| median(&times)),
                over: (i > 0 && !ratios.is_empty()).then(|| estimate(&ratios, noise)),
                least: ratios.iter().copied().fold(f64::INFINITY, f64::min),
                failed: self.failed[i].clone(),
            }
        };
        (0..self.failed.len()).map(standing).collect()
    }

    /// The ratio of visit `at` to the incumbent's time at that moment, where it is a visit of contestant `i`.
    fn ratio(&self, i: usize, at: usize) -> Option<f64> {
        let (contestant, ms) = self.visits[at];
        let incumbent = |(contestant, ms): &(usize, f64)| (*contestant == 0).then_some(*ms);
        let before = self.visits[..at].iter().rev().filter_map(incumbent);
        let after = self.visits[at + 1..].iter().filter_map(incumbent);
        (contestant == i).then(|| nearest(before, after)).flatten().map(|base| ms / base)
    }
}

/// The fastest of those alive and the incumbent, which is 1 by definition.
fn leader(alive: &[usize], standings: &[Standing]) -> Estimate {
    let incumbent = Estimate { ratio: 1.0, low: 1.0, high: 1.0, rounds: 0 };
    let all = alive.iter().filter_map(|&i| standings[i].over).chain([incumbent]);
    all.min_by(|a, b| a.ratio.total_cmp(&b.ratio)).expect("the incumbent is one")
}

/// Removes contestants that cannot win, or are not worth more visits.
fn eliminate(alive: &mut Vec<usize>, standings: &[Standing], noise: Noise) {
    let leader = leader(alive, standings);
    let mut least: Vec<f64> = alive.iter().map(|&i| standings[i].least).collect();
    least.sort_by(f64::total_cmp);
    let half = least.get(least.len() / 2).copied().unwrap_or(f64::INFINITY);
    let is_hopeless = |standing: &Standing, over: &Estimate| {
        let few = over.rounds < 2;
        let by = if few { HALVED_AT_ONCE } else { HALVED }.max(2.0 * noise.deviation);
        let is_apart = over.rounds >= 2 && over.low > leader.high;
        is_apart || (standing.least >= half && standing.least > leader.ratio * (1.0 + by))
    };
    alive.retain(|&i| !standings[i].over.as_ref().is_some_and(|over| is_hopeless(&standings[i], over)));
}

/// Whether no contestant can be better than the leader by [`MATTERS`], and the leader differs from the incumbent beyond noise or
/// by less than that.
fn is_settled(alive: &[usize], standings: &[Standing]) -> bool {
    let best = leader(alive, standings);
    let cannot_win = |over: &Estimate| *over == best || over.low >= best.ratio * (1.0 - MATTERS);
    let others = alive.iter().all(|&i| standings[i].over.as_ref().is_some_and(cannot_win));
    others && (!best.is_noise() || best.ratio > 1.0 - MATTERS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use flatout_ir::random::normal;

    const RULES: Rules = Rules { least_rounds: 3, most_rounds: 12, until: Duration::MAX };

    /// Visits of contestants with these times, with noise of 1% and a drift of a fifth over twenty visits.
    fn raced(seed: u64, times: &[f64], rules: Rules, seconds_a_visit: u64) -> (Outcome, Vec<usize>) {
        let mut order = vec![];
        let seconds = std::cell::Cell::new(0);
        let mut visit = |i: usize| {
            let at = order.len() as u64;
            order.push(i);
            seconds.set(seconds.get() + seconds_a_visit);
            let drift = 1.0 + 0.1 * (at as f64 / 6.0).sin();
            match times[i] {
                t if t.is_nan() => Err(Failure::Environment("it broke".into())),
                t => Ok(t * drift * (0.01 * normal(seed, 1, at) as f64).exp()),
            }
        };
        let mut elapsed = || Duration::from_secs(seconds.get());
        let clock = Clock { visit: &mut visit, elapsed: &mut elapsed };
        (contest(times.len(), rules, clock).expect("an outcome"), order)
    }

    #[test]
    fn the_fastest_wins_and_the_slow_are_visited_once_or_twice() {
        let times = [30.0, 27.0, 29.9, 40.0, 60.0, 90.0, 30.2];
        let (mut right, mut visits, mut wasted) = (0, 0, 0);
        for seed in 0..100 {
            let (outcome, order) = raced(seed, &times, RULES, 0);
            right += (outcome.faster().first().map(|(i, _)| *i) == Some(1)) as usize;
            visits += order.len();
            let visits_of = |i: usize| order.iter().filter(|j| **j == i).count();
            wasted += visits_of(3).saturating_sub(2) + visits_of(4) - 1 + visits_of(5) - 1;
        }
        println!(
            "{right} of 100 right, {} visits each, {wasted} of 300 slow ones visited once more",
            visits / 100
        );
        assert!(right >= 98 && visits <= 4000 && wasted <= 3, "{right} {visits} {wasted}");
    }

    #[test]
    fn no_contestant_wins_among_equals() {
        let wins = (0..100).filter(|seed| !raced(*seed, &[30.0; 5], RULES, 0).0.faster().is_empty()).count();
        println!("{wins} of 100");
        assert!(wins <= 3, "{wins}");
    }

    #[test]
    fn a_failing_contestant_is_eliminated_with_its_reason() {
        let (outcome, order) = raced(1, &[30.0, f64::NAN, 20.0], RULES, 0);
        assert_eq!(outcome.standings[1].failed.as_deref(), Some("it broke"));
        assert_eq!((outcome.faster()[0].0, order.iter().filter(|i| **i == 1).count()), (2, 1));
    }

    #[test]
    fn time_limits_hold_and_the_most_promising_are_measured_first() {
        let until = Duration::from_secs(7);
        let (outcome, order) = raced(1, &[30.0, 20.0, 31.0, 30.0, 30.0, 30.0], Rules { until, ..RULES }, 1);
        assert_eq!(order, [0, 1, 2, 3, 0, 4]);
        assert!(!outcome.is_decided && outcome.standings[5].over.is_none());
        assert_eq!(raced(1, &[30.0], RULES, 1).1, [0], "alone it is decided");
    }
}
