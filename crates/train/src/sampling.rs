//! Samples the next token from a model's logits.

use std::collections::BTreeMap;

use flatout_ir::ops::sample::Draw;
pub use flatout_ir::ops::sample::{likeliest, log_sum};

/// Sampling parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// 0 takes the most likely token.
    pub temperature: f64,
    /// Samples from the `top_k` most likely tokens; 0 means all.
    pub top_k: usize,
    /// Samples from the most likely tokens that together have this probability; 1 means all.
    pub top_p: f64,
    pub seed: u64,
    pub max_tokens: usize,
}

impl Default for Sampling {
    /// Temperature 1 without truncation, and no tokens.
    fn default() -> Sampling {
        Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, seed: 0, max_tokens: 0 }
    }
}

/// Range of temperatures in which a device's arithmetic is safe.
const MIN_TEMPERATURE: f64 = 1e-6;
const MAX_TEMPERATURE: f64 = 1e6;

/// Changes to the logits before a token is sampled.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Adjustments {
    /// Subtracted from the logit of every token that was drawn before.
    pub presence: f64,
    /// Subtracted once for each time the token was drawn before.
    pub frequency: f64,
    /// Added to the logits of these tokens.
    pub bias: Vec<(u32, f32)>,
}

impl Adjustments {
    pub fn is_none(&self) -> bool {
        *self == Adjustments::default()
    }

    /// Adjusts logits, given the tokens drawn so far.
    pub fn apply(&self, logits: &mut [f32], drawn: &[u32]) {
        if self.presence != 0.0 || self.frequency != 0.0 {
            let mut counts: BTreeMap<u32, u32> = BTreeMap::new();
            drawn.iter().for_each(|token| *counts.entry(*token).or_default() += 1);
            for (token, count) in counts {
                logits[token as usize] -= (self.presence + self.frequency * f64::from(count)) as f32;
            }
        }
        for (token, bias) in &self.bias {
            logits[*token as usize] += bias;
        }
    }
}

impl Sampling {
    /// The draw at a position of a sequence. A temperature below the range counts as 0, which takes the most likely token; one
    /// above it is clamped, where all tokens are equally likely.
    pub fn at(&self, sequence: u32, index: usize) -> Draw {
        let is_cold = self.temperature < MIN_TEMPERATURE;
        Draw {
            temperature: if is_cold { 0.0 } else { self.temperature.min(MAX_TEMPERATURE) as f32 },
            top_k: self.top_k,
            top_p: self.top_p as f32,
            seed: self.seed,
            sequence,
            index: index as u32,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAMPLING: Sampling = Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, seed: 3, max_tokens: 0 };

    /// How often each token is drawn.
    fn counts(logits: &[f32], sampling: Sampling) -> Vec<usize> {
        let mut counts = vec![0; logits.len()];
        (0..4000).for_each(|index| counts[sampling.at(0, index).token(logits) as usize] += 1);
        counts
    }

    #[test]
    fn tokens_come_as_often_as_they_are_likely() {
        // Probabilities 1/8, 1/2, 1/8, 1/4.
        let logits = [0.0, 4f32.ln(), 0.0, 2f32.ln()];
        let all = counts(&logits, SAMPLING);
        for (count, wanted) in all.iter().zip([500, 2000, 500, 1000]) {
            assert!(count.abs_diff(wanted) < 120, "{all:?}");
        }
        let hot = counts(&logits, Sampling { temperature: 100.0, ..SAMPLING });
        assert!(hot.iter().all(|count| count.abs_diff(1000) < 120), "{hot:?}");
        for temperature in [0.0, 1e-300, 1e-40, 1e-7] {
            assert_eq!(counts(&logits, Sampling { temperature, ..SAMPLING }), [0, 4000, 0, 0]);
        }
        let most = Sampling { temperature: f64::MAX, ..SAMPLING }.at(0, 0);
        assert!((1.0 / most.temperature).is_normal(), "{most:?}");
        let two = counts(&logits, Sampling { top_k: 2, ..SAMPLING });
        assert!(two[0] == 0 && two[2] == 0 && two[3].abs_diff(1333) < 120, "{two:?}");
        assert_eq!(counts(&logits, Sampling { top_k: 1, ..SAMPLING }), [0, 4000, 0, 0]);
        for (top_p, kept) in [(0.1, 1), (0.49, 1), (0.51, 2), (0.74, 2), (0.76, 3), (0.87, 3), (0.88, 4)] {
            let counts = counts(&logits, Sampling { top_p, ..SAMPLING });
            assert_eq!(counts.iter().filter(|count| **count > 0).count(), kept, "{top_p}: {counts:?}");
        }
        // Top-p applies to the tokens that top-k left.
        let both = counts(&logits, Sampling { top_k: 2, top_p: 0.6, ..SAMPLING });
        assert_eq!(both, [0, 4000, 0, 0]);
    }

    #[test]
    fn log_probabilities_are_those_of_a_softmax() {
        let logits = [0.0, 4f32.ln(), 0.0, 2f32.ln()];
        assert!((log_sum(&logits) - 8f64.ln()).abs() < 1e-6);
        assert!((log_sum(&[1e4, 1e4]) - (1e4 + 2f64.ln())).abs() < 1e-6, "large logits do not overflow");
        assert_eq!(likeliest(&logits, 3), [1, 3, 0]);
        assert!(likeliest(&logits, 0).is_empty());
        assert_eq!(likeliest(&logits, 9), [1, 3, 0, 2]);
    }

    #[test]
    fn tokens_that_were_drawn_become_less_likely() {
        let mut logits = [1.0f32; 4];
        let adjustments = Adjustments { presence: 0.5, frequency: 0.25, bias: vec![(3, -2.0), (1, 1.0)] };
        adjustments.apply(&mut logits, &[1, 2, 1]);
        assert_eq!(logits, [1.0, 1.0, 0.25, -1.0]);
        assert!(Adjustments::default().is_none() && !adjustments.is_none());
    }

    #[test]
    fn seeds_sequences_and_places_draw_differently_and_always_the_same() {
        let logits = [0.0; 64];
        let drawn = |seed: u64, sequence: u32| -> Vec<u32> {
            (0..32).map(|index| Sampling { seed, ..SAMPLING }.at(sequence, index).token(&logits)).collect()
        };
        assert_eq!(drawn(1, 0), drawn(1, 0));
        assert_ne!(drawn(1, 0), drawn(2, 0));
        assert_ne!(drawn(1, 0), drawn(1, 1));
    }
}
