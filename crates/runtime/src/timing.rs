//! Per-launch times of a plan.
//!
//! The CPU reads the clock around each launch; `cuda::session::timing` explains how a GPU is timed. The time of a whole plan,
//! replayed as a graph or enqueued at once, is a different measurement.

use flatout_ir::Role;

use crate::RuntimeError;

/// The time of one launch over several passes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LaunchTime {
    /// Index of the launch in the plan.
    pub launch: usize,
    /// Median of the samples.
    pub seconds: f64,
    /// Minimum of the samples, which other load on the machine disturbs less.
    pub least_seconds: f64,
}

/// Seconds of each launch of each plan, one sample per pass.
#[derive(Clone, Debug)]
pub(crate) struct Samples {
    plans: Vec<Vec<Vec<f64>>>,
    wanted: usize,
}

impl Samples {
    /// No samples yet, for plans with these numbers of launches; `wanted` samples of each suffice.
    pub fn new(launches: impl IntoIterator<Item = usize>, wanted: usize) -> Self {
        let plans = launches.into_iter().map(|count| vec![vec![]; count]).collect();
        Samples { plans, wanted: wanted.max(1) }
    }

    pub fn add(&mut self, plan: usize, launch: usize, seconds: f64) {
        self.plans[plan][launch].push(seconds);
    }

    pub fn are_enough(&self) -> bool {
        self.plans.iter().flatten().all(|samples| samples.len() >= self.wanted)
    }

    /// Reduces the samples to a time per launch of each plan.
    pub fn times(self) -> Result<Vec<Vec<LaunchTime>>, RuntimeError> {
        let of = |(launch, mut samples): (usize, Vec<f64>)| {
            samples.sort_by(f64::total_cmp);
            let seconds = match samples.len() {
                0 => return Err(RuntimeError::Resources(NEVER_AHEAD.into())),
                n => (samples[(n - 1) / 2] + samples[n / 2]) / 2.0,
            };
            Ok(LaunchTime { launch, seconds, least_seconds: samples[0] })
        };
        let plans = self.plans.into_iter();
        plans.map(|plan| plan.into_iter().enumerate().map(of).collect()).collect()
    }
}

const NEVER_AHEAD: &str =
    "the host is too busy to time kernels: it never enqueued them before the GPU ran out of work";

/// The error for a role that the plan set has no plan for.
pub(crate) fn missing(role: Role) -> RuntimeError {
    RuntimeError::Name(format!("there is no plan `{}`", role.name()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_the_median_and_the_least_of_its_samples() {
        let mut samples = Samples::new([2, 1], 2);
        for (plan, launch, seconds) in [(0, 0, 3.0), (0, 1, 1.0), (1, 0, 7.0), (0, 0, 1.0), (0, 1, 2.0)] {
            samples.add(plan, launch, seconds);
            assert!(!samples.are_enough());
        }
        samples.add(1, 0, 5.0);
        assert!(samples.are_enough());
        samples.add(0, 0, 10.0);
        let time = |launch, seconds, least_seconds| LaunchTime { launch, seconds, least_seconds };
        let times = samples.times().expect("samples of all");
        assert_eq!(times, [vec![time(0, 3.0, 1.0), time(1, 1.5, 1.0)], vec![time(0, 6.0, 5.0)]]);
        assert!(Samples::new([1], 1).times().unwrap_err().to_string().contains("too busy"));
    }
}
