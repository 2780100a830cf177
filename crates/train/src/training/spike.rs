//! Losses that stand out: a step whose loss lies far above what the steps before it had.

use std::collections::VecDeque;

/// Losses that are looked back on.
const WINDOW: usize = 128;
/// Fewer say nothing about how losses scatter.
const LEAST: usize = 32;
/// From the median absolute deviation to the standard deviation of a normal distribution.
const NORMAL: f64 = 1.4826;
/// Losses that hardly scatter would make every tenth of a percent a spike: the least deviation, as a share of the median.
const LEAST_SHARE: f64 = 0.005;

/// The losses of the last steps.
#[derive(Clone, Debug, Default)]
pub struct Spikes {
    losses: VecDeque<f32>,
}

/// A loss that stands out.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spike {
    /// Of the losses before it.
    pub median: f32,
    /// How many robust deviations it lies above the median.
    pub deviations: f64,
}

impl Spikes {
    /// Takes the next loss; says whether it stands out by more than `limit` deviations. A limit of 0 looks for nothing.
    pub fn see(&mut self, loss: f32, limit: f64) -> Option<Spike> {
        let found = self.judge(loss).filter(|spike| limit > 0.0 && spike.deviations > limit);
        if loss.is_finite() {
            self.losses.push_back(loss);
            if self.losses.len() > WINDOW {
                self.losses.pop_front();
            }
        }
        found
    }

    fn judge(&self, loss: f32) -> Option<Spike> {
        if self.losses.len() < LEAST || !loss.is_finite() {
            return None;
        }
        let mut losses: Vec<f64> = self.losses.iter().map(|loss| f64::from(*loss)).collect();
        let median = median(&mut losses);
        let mut distances: Vec<f64> = losses.iter().map(|loss| (loss - median).abs()).collect();
        let deviation = (NORMAL * self::median(&mut distances)).max(LEAST_SHARE * median.abs());
        let deviations = (f64::from(loss) - median) / deviation;
        deviations.is_finite().then_some(Spike { median: median as f32, deviations })
    }
}

/// The middle value, or the upper of the two.
fn median(values: &mut [f64]) -> f64 {
    let middle = values.len() / 2;
    *values.select_nth_unstable_by(middle, f64::total_cmp).1
}

#[cfg(test)]
mod tests {
    use super::*;
    use flatout_ir::random::normal_pair;

    fn noisy(step: u64) -> f32 {
        let trend = 2.0 + 4.0 * (-(step as f32) / 100.0).exp();
        trend + 0.05 * normal_pair(1, 2, step)[0]
    }

    #[test]
    fn a_falling_noisy_loss_has_no_spikes_and_a_jump_is_one() {
        let mut spikes = Spikes::default();
        for step in 0..1000 {
            assert_eq!(spikes.see(noisy(step), 6.0), None, "step {step}");
        }
        let spike = spikes.clone().see(3.0, 6.0).expect("a jump of twenty deviations");
        assert!((spike.median - 2.0).abs() < 0.05 && (10.0..40.0).contains(&spike.deviations), "{spike:?}");
        assert_eq!(spikes.clone().see(3.0, 0.0), None, "0 looks for nothing");
        assert_eq!(spikes.clone().see(1.0, 6.0), None, "a fall is no spike");
        assert_eq!(spikes.see(f32::NAN, 6.0), None, "what is not finite is another matter");
        assert_eq!(spikes.losses.len(), WINDOW);
    }

    #[test]
    fn spikes_do_not_hide_the_next_one() {
        let mut spikes = Spikes::default();
        let found = (0..400).filter(|step| {
            let loss = if *step >= 200 && step % 10 == 0 { 50.0 } else { noisy(1000 + step) };
            spikes.see(loss, 6.0).is_some()
        });
        assert_eq!(found.collect::<Vec<_>>(), (200..400).step_by(10).collect::<Vec<_>>());
    }

    #[test]
    fn a_beginning_and_a_constant_are_judged_gently() {
        let mut spikes = Spikes::default();
        for step in 0..LEAST {
            assert_eq!(spikes.see(if step == 5 { 1e9 } else { 1.0 }, 6.0), None);
        }
        assert_eq!(spikes.see(1.02, 6.0), None);
        assert!(spikes.see(1.04, 6.0).is_some());
    }
}
