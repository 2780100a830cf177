//! Detects loss spikes: a step whose loss lies far above the losses of the steps before it.

use std::collections::VecDeque;

/// Losses in the sliding window.
const WINDOW: usize = 128;
/// With fewer losses their scatter cannot be estimated.
const MIN_LOSSES: usize = 32;
/// Ratio of the standard deviation of a normal distribution to its median absolute deviation.
const MAD_TO_STD: f64 = 1.4826;
/// Lower bound of the deviation as a share of the median: where losses hardly scatter, every tenth of a percent would be a spike
/// otherwise.
const MIN_DEVIATION_SHARE: f64 = 0.005;

/// The losses of the last steps.
#[derive(Clone, Debug, Default)]
pub struct Spikes {
    losses: VecDeque<f32>,
}

/// A loss that stands out.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spike {
    /// Median of the losses before it.
    pub median: f32,
    /// Distance above the median in robust deviations.
    pub deviations: f64,
}

impl Spikes {
    /// Takes the next loss and returns a spike if it stands out by more than `limit` deviations. A limit of 0 disables the check.
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
        if self.losses.len() < MIN_LOSSES || !loss.is_finite() {
            return None;
        }
        let mut losses: Vec<f64> = self.losses.iter().map(|loss| f64::from(*loss)).collect();
        let median = upper_median(&mut losses);
        let mut distances: Vec<f64> = losses.iter().map(|loss| (loss - median).abs()).collect();
        let deviation = (MAD_TO_STD * upper_median(&mut distances)).max(MIN_DEVIATION_SHARE * median.abs());
        let deviations = (f64::from(loss) - median) / deviation;
        deviations.is_finite().then_some(Spike { median: median as f32, deviations })
    }
}

/// The median; for an even count the upper of the two middle values.
fn upper_median(values: &mut [f64]) -> f64 {
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
        assert_eq!(spikes.clone().see(3.0, 0.0), None, "0 disables the check");
        assert_eq!(spikes.clone().see(1.0, 6.0), None, "a fall is no spike");
        assert_eq!(spikes.see(f32::NAN, 6.0), None, "non-finite losses are handled elsewhere");
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
    fn few_and_constant_losses_are_not_spikes() {
        let mut spikes = Spikes::default();
        for step in 0..MIN_LOSSES {
            assert_eq!(spikes.see(if step == 5 { 1e9 } else { 1.0 }, 6.0), None);
        }
        assert_eq!(spikes.see(1.02, 6.0), None);
        assert!(spikes.see(1.04, 6.0).is_some());
    }
}
