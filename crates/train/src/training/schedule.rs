//! Learning rates as functions of the step number, over a horizon that is fixed when the run starts.

use crate::config::{Config, Rate, Schedule, ScheduleName};

/// Every rate of `Config::rates` at update `step`, in the precision of the device.
pub fn learning_rates(config: &Config, horizon: u64, step: u64) -> Vec<f32> {
    config.rates().iter().map(|rate| learning_rate(&config.schedule, rate, horizon, step) as f32).collect()
}

/// Learning rate of update `step`, counted from 1, of a schedule that spans `horizon` updates. It rises linearly to its peak at
/// update `warmup_steps`, reaches its end value (the rate's own, or `final_ratio` of the peak) at update `horizon`, and stays
/// there. An end value above the peak is approached along the same curve from below.
pub fn learning_rate(schedule: &Schedule, rate: &Rate, horizon: u64, step: u64) -> f64 {
    let (peak, warmup) = (rate.peak, schedule.warmup_steps);
    if step < warmup {
        return peak * step as f64 / warmup as f64;
    }
    let low = rate.end.map_or(schedule.final_ratio, |end| end / peak);
    let ratio = match schedule.name {
        ScheduleName::Constant => 1.0,
        ScheduleName::Linear => 1.0 - (1.0 - low) * share(step, warmup, horizon),
        ScheduleName::Cosine | ScheduleName::Converge => {
            let height = 0.5 * (1.0 + (std::f64::consts::PI * share(step, warmup, horizon)).cos());
            low + (1.0 - low) * height
        }
        ScheduleName::Wsd => {
            let decay = schedule.decay_steps.unwrap_or(horizon / 5);
            let descent = horizon.saturating_sub(decay).max(warmup);
            1.0 - (1.0 - low) * share(step, descent, horizon)
        }
    };
    peak * ratio
}

impl Schedule {
    /// Number of warm-up updates, where it was given as a share of the horizon.
    pub fn resolved_warmup(&self, horizon: u64) -> Option<u64> {
        self.warmup_share.map(|share| (share * horizon as f64).round() as u64)
    }
}

/// Position of `step` between `start` and `end`, from 0 to 1.
fn share(step: u64, start: u64, end: u64) -> f64 {
    match step {
        _ if step >= end => 1.0,
        _ if step <= start => 0.0,
        _ => (step - start) as f64 / (end - start) as f64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(name: ScheduleName) -> Schedule {
        Schedule { name, warmup_steps: 10, final_ratio: 0.1, ..Schedule::default() }
    }

    fn rate(peak: f64, end: Option<f64>) -> Rate {
        Rate { name: String::new(), peak, end }
    }

    fn at(schedule: &Schedule, step: u64) -> f64 {
        learning_rate(schedule, &rate(2.0, None), 110, step)
    }

    fn close(a: f64, b: f64) -> bool {
        (a - b).abs() < 1e-12
    }

    #[test]
    fn a_warm_up_may_be_a_share() {
        let mut schedule = Schedule { warmup_share: Some(0.1), ..schedule(ScheduleName::Linear) };
        assert_eq!(schedule.resolved_warmup(110), Some(11));
        (schedule.warmup_steps, schedule.warmup_share) = (11, None);
        assert_eq!(at(&schedule, 11), 2.0);
        assert_eq!(schedule.resolved_warmup(110), None);
    }

    #[test]
    fn every_schedule_warms_up_to_the_peak() {
        for &name in ScheduleName::ALL {
            let schedule = schedule(name);
            assert!(close(at(&schedule, 1), 0.2), "{name}: the first update already moves");
            assert!(close(at(&schedule, 5), 1.0), "{name}");
            assert_eq!(at(&schedule, 10), 2.0, "{name}");
        }
    }

    #[test]
    fn every_schedule_ends_where_it_should_and_stays() {
        for &name in ScheduleName::ALL {
            let end = if name == ScheduleName::Constant { 2.0 } else { 0.2 };
            for step in [110, 111, 10_000, u64::MAX] {
                assert!(close(at(&schedule(name), step), end), "{name} at {step}");
            }
        }
    }

    #[test]
    fn shapes_between() {
        assert!(close(at(&schedule(ScheduleName::Linear), 60), 1.1));
        assert!(close(at(&schedule(ScheduleName::Cosine), 60), 1.1));
        assert!(at(&schedule(ScheduleName::Cosine), 35) > at(&schedule(ScheduleName::Linear), 35));
        let wsd = Schedule { decay_steps: Some(20), ..schedule(ScheduleName::Wsd) };
        assert_eq!(at(&wsd, 90), 2.0);
        assert!(close(at(&wsd, 100), 1.1));
        let fifth = schedule(ScheduleName::Wsd);
        assert_eq!((at(&fifth, 88), at(&fifth, 89) < 2.0), (2.0, true), "a fifth of 110 is 22");
    }

    /// The rates of the alignment stage, by the published formula: a connector's rate falls, the towers' rate rises, and one
    /// stays constant.
    #[test]
    fn groups_converge_from_above_and_from_below() {
        let (w, n, target) = (10, 110, 3e-5);
        let schedule = schedule(ScheduleName::Converge);
        for base in [1e-3, 1e-5, target] {
            let at = |s: u64| learning_rate(&schedule, &rate(base, Some(target)), n, s);
            let formula = |s: u64| {
                let p = (s - w) as f64 / (n - w) as f64;
                target + (base - target) * (1.0 + (std::f64::consts::PI * p).cos()) / 2.0
            };
            assert!(close(at(1), base / 10.0));
            assert_eq!(at(w), base);
            assert!(close(at(60), (base + target) / 2.0));
            assert!([n, n + 1, u64::MAX].iter().all(|s| close(at(*s), target)), "{base}");
            for s in w..=n {
                assert!((at(s) - formula(s)).abs() < 1e-12 * base.max(target), "{base} at {s}");
                assert!(s == n || (at(s + 1) - at(s)) * (target - base) >= 0.0, "{base} at {s}");
            }
        }
    }

    /// A group's own end value takes precedence under every schedule that has one.
    #[test]
    fn a_groups_own_end_value_overrides_the_ratio() {
        for &name in ScheduleName::ALL {
            let own = learning_rate(&schedule(name), &rate(2.0, Some(0.5)), 110, 110);
            assert!(close(own, if name == ScheduleName::Constant { 2.0 } else { 0.5 }), "{name}");
        }
    }

    #[test]
    fn rates_never_rise_after_warmup_and_are_finite_at_the_edges() {
        for &name in ScheduleName::ALL {
            let schedule = schedule(name);
            assert!((10..120).all(|step| at(&schedule, step + 1) <= at(&schedule, step)), "{name}");
            for (warmup_steps, horizon) in [(0, 1), (1, 1), (5, 5), (0, 3)] {
                let short = Schedule { warmup_steps, ..schedule.clone() };
                for step in 1..=horizon + 1 {
                    let lr = learning_rate(&short, &rate(1.0, None), horizon, step);
                    assert!(lr > 0.0 && lr <= 1.0, "{name} {warmup_steps} {horizon} {step}: {lr}");
                }
            }
        }
    }
}
