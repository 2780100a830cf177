//! Detects slow ranks: collects the times of all ranks step by step, and warns of a rank that stays behind.

use std::collections::VecDeque;
use std::time::Duration;

use flatout_runtime::cuda::session::clock::PlanTimes;
use serde::{Deserialize, Serialize};

use crate::run::events::{GpuSample, RankTimes};

/// Ratio of a rank's own computing time to that of the median rank from which it counts as slow in a step.
const SLOW_RATIO: f64 = 1.1;
/// Consecutive steps after which a slow rank is reported, or a reported one has recovered.
const STEPS: usize = 20;

/// The times of one rank in one update.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepTimes {
    pub step: u64,
    /// Time of its own micro-batches, without the wait for their data.
    pub compute_ms: f64,
    /// Time spent waiting for data.
    pub data_ms: f64,
    /// Time spent in exchanges with other ranks, including the wait for slower ones.
    pub wire_ms: f64,
}

impl StepTimes {
    /// The times of an update on a GPU, by the device's clock: its plans, minus their waits for exchanges.
    pub fn on_device(step: u64, plans: PlanTimes, data: Duration) -> StepTimes {
        let ms = |time: Duration| 1e3 * time.as_secs_f64();
        StepTimes {
            step,
            compute_ms: ms(plans.ran.saturating_sub(plans.waited)),
            data_ms: ms(data),
            wire_ms: ms(plans.waited),
        }
    }
}

/// Times of all ranks, kept on rank 0.
pub struct Stragglers {
    /// For every rank, the times of steps that not all ranks have reported yet.
    unmatched: Vec<VecDeque<StepTimes>>,
    ranks: Vec<RankState>,
}

/// State of one rank.
#[derive(Clone, Copy, Debug, Default)]
struct RankState {
    /// Consecutive steps in which it was behind, or was not.
    in_a_row: usize,
    is_behind: bool,
    /// Sums over these steps.
    own_ms: f64,
    median_ms: f64,
    /// A warning was given, and the rank has not recovered since.
    is_reported: bool,
}

/// A rank that stays behind, with its mean times over those steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Slow {
    pub rank: usize,
    pub own_ms: f64,
    pub median_ms: f64,
}

impl Slow {
    /// The warning text; `named` is the rank with its host, and `gpu` the newest sample of its GPU, if it has one.
    pub fn sentence(&self, named: &str, gpu: Option<&GpuSample>) -> String {
        let clock = gpu.and_then(|gpu| {
            let held = match &gpu.throttled[..] {
                [] => String::new(),
                why => format!(", held down by {}", why.join(" and ")),
            };
            Some(format!("; its GPU runs at {} MHz{held}", gpu.clock_mhz?))
        });
        format!(
            "{named} is slow: in each of the last {STEPS} steps its own rows took at least 10% longer than the median rank's, in the \
             mean {:.1} ms against {:.1} ms; the others wait for it{}",
            self.own_ms,
            self.median_ms,
            clock.unwrap_or_default()
        )
    }
}

impl Stragglers {
    pub fn new(ranks: usize) -> Stragglers {
        Stragglers { unmatched: vec![VecDeque::new(); ranks], ranks: vec![RankState::default(); ranks] }
    }

    /// Takes the times of a rank, in order of steps.
    pub fn take(&mut self, rank: usize, times: &[StepTimes]) {
        self.unmatched[rank].extend(times);
    }

    /// The next step that all ranks have reported, and the ranks it reveals as slow.
    pub fn next(&mut self) -> Option<(RankTimes, Vec<Slow>)> {
        let is_complete = self.unmatched.iter().all(|times| !times.is_empty());
        let times: Vec<StepTimes> = if is_complete {
            self.unmatched.iter_mut().filter_map(VecDeque::pop_front).collect()
        } else {
            vec![]
        };
        let step = times.first()?.step;
        let most = |of: fn(&StepTimes) -> f64| times.iter().map(of).fold(0.0, f64::max);
        let least = |of: fn(&StepTimes) -> f64| times.iter().map(of).fold(f64::INFINITY, f64::min);
        let compute: Vec<f64> = times.iter().map(|times| times.compute_ms).collect();
        let all = RankTimes {
            step: Some(step),
            data_wait_ms: Some(most(|times| times.data_ms)),
            wire_ms: Some(least(|times| times.wire_ms)),
            ..RankTimes::of(&compute)
        };
        let slow = self.slow(&compute, all.median_ms);
        Some((all, slow))
    }

    fn slow(&mut self, compute_ms: &[f64], median_ms: f64) -> Vec<Slow> {
        let mut found = vec![];
        for (rank, (state, own_ms)) in self.ranks.iter_mut().zip(compute_ms).enumerate() {
            let is_behind = *own_ms >= SLOW_RATIO * median_ms;
            if is_behind != state.is_behind || state.in_a_row == STEPS {
                *state = RankState { is_behind, is_reported: state.is_reported, ..RankState::default() };
            }
            state.in_a_row += 1;
            state.own_ms += own_ms;
            state.median_ms += median_ms;
            if state.in_a_row == STEPS && is_behind != state.is_reported {
                state.is_reported = is_behind;
                let mean = |sum: f64| sum / STEPS as f64;
                if is_behind {
                    found.push(Slow { rank, own_ms: mean(state.own_ms), median_ms: mean(state.median_ms) });
                }
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reports of four ranks: rank 2 takes `own` ms, the others 100 ms.
    fn warned(stragglers: &mut Stragglers, own: &[f64]) -> Vec<(u64, Slow)> {
        let mut found = vec![];
        for (step, own) in (1..).zip(own) {
            for rank in 0..4 {
                let compute_ms = if rank == 2 { *own } else { 100.0 };
                let times = StepTimes { step, compute_ms, data_ms: rank as f64, wire_ms: 4.0 - rank as f64 };
                stragglers.take(rank, &[times]);
            }
            let (all, slow) = stragglers.next().expect("all have reported");
            assert_eq!((all.step, all.median_ms), (Some(step), 100.0));
            assert_eq!((all.data_wait_ms, all.wire_ms), (Some(3.0), Some(1.0)));
            found.extend(slow.into_iter().map(|slow| (step, slow)));
        }
        found
    }

    #[test]
    fn a_slow_rank_gives_one_warning_until_it_recovers() {
        let mut stragglers = Stragglers::new(4);
        let long: Vec<f64> = std::iter::repeat_n(120.0, 100).collect();
        let slow = Slow { rank: 2, own_ms: 120.0, median_ms: 100.0 };
        assert_eq!(warned(&mut stragglers, &long), [(20, slow)], "once, after twenty steps");
        assert_eq!(warned(&mut stragglers, &[105.0; 10]), [], "ten steps are no recovery");
        assert_eq!(warned(&mut stragglers, &long), [], "so it is not reported again");
        assert_eq!(warned(&mut stragglers, &[105.0; 20]), []);
        assert_eq!(warned(&mut stragglers, &long), [(20, slow)], "it had recovered");
        let words = slow.sentence("rank 2 (gpu-b, process 7)", None);
        assert!(
            words.starts_with("rank 2 (gpu-b, process 7) is slow: ")
                && words.contains("120.0 ms against 100.0 ms")
                && words.ends_with("the others wait for it")
        );
        let hot = GpuSample { clock_mhz: Some(1110), throttled: vec!["heat".into()], ..GpuSample::default() };
        let words = slow.sentence("rank 2 (gpu-b, GPU 1, process 7)", Some(&hot));
        assert!(words.ends_with("the others wait for it; its GPU runs at 1110 MHz, held down by heat"));
    }

    #[test]
    fn single_slow_steps_and_small_differences_are_no_warning() {
        let mut stragglers = Stragglers::new(4);
        assert_eq!(warned(&mut stragglers, &[109.0; 100]), []);
        let now_and_then: Vec<f64> =
            (0..200).map(|step| if step % 19 == 0 { 101.0 } else { 500.0 }).collect();
        assert_eq!(warned(&mut stragglers, &now_and_then), []);
        assert_eq!(warned(&mut stragglers, &[50.0; 100]), [], "a fast rank makes no other rank slow");
    }

    /// The slow device waits least for the others, which identifies it.
    #[test]
    fn a_device_computes_while_its_plans_run_and_do_not_wait() {
        let ms = Duration::from_millis;
        let times = |ran, waited| {
            let plans = PlanTimes { ran: ms(ran), waited: ms(waited) };
            StepTimes::on_device(7, plans, ms(3))
        };
        let fast = StepTimes { step: 7, compute_ms: 80.0, data_ms: 3.0, wire_ms: 25.0 };
        assert_eq!(times(105, 25), fast);
        let slow = times(105, 5);
        assert_eq!((slow.compute_ms, slow.wire_ms), (100.0, 5.0));
        let mut stragglers = Stragglers::new(2);
        stragglers.take(0, &[fast]);
        stragglers.take(1, &[slow]);
        let (all, _) = stragglers.next().expect("both have reported");
        assert_eq!((all.slowest, all.slowest_ms, all.median_ms), (1, 100.0, 80.0));
        assert_eq!((all.wire_ms, all.data_wait_ms), (Some(5.0), Some(3.0)));
    }

    #[test]
    fn a_step_is_complete_when_all_ranks_have_reported_it() {
        let mut stragglers = Stragglers::new(2);
        let times = |step, compute_ms| StepTimes { step, compute_ms, ..StepTimes::default() };
        stragglers.take(0, &[times(1, 10.0), times(2, 10.0)]);
        assert_eq!(stragglers.next(), None);
        stragglers.take(1, &[times(1, 30.0)]);
        let (all, _) = stragglers.next().expect("step 1");
        assert_eq!((all.step, all.slowest, all.slowest_ms, all.median_ms), (Some(1), 1, 30.0, 10.0));
        assert_eq!(stragglers.next(), None);
    }
}
