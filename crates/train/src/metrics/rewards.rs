//! Preference metrics: rewards of preferred answers and of others.
//!
//! The reward of an answer is beta times its gain in log-probability over the reference, or, without a reference, beta times the
//! mean log-probability of its tokens.

use serde::{Deserialize, Serialize};

use super::null_is_nan;

/// Metrics of the preferences of an update or an evaluation. Each is a mean over pairs, or over the answers that are wanted
/// (`chosen`) and those that are not (`rejected`).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RewardMetrics {
    /// Share of pairs whose chosen answer has the larger reward; for judged answers the share on the correct side of the
    /// baseline.
    #[serde(deserialize_with = "null_is_nan")]
    pub reward_accuracy: f64,
    /// Reward of the chosen answer minus that of the rejected one.
    #[serde(deserialize_with = "null_is_nan")]
    pub reward_margin: f64,
    #[serde(deserialize_with = "null_is_nan")]
    pub reward_chosen: f64,
    #[serde(deserialize_with = "null_is_nan")]
    pub reward_rejected: f64,
    /// Sums of the log-probabilities of the answers' tokens; present for pairs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logp_chosen: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logp_rejected: Option<f64>,
}

impl RewardMetrics {
    /// From means by the names of a plan's sums; `None` if the plan has none.
    pub fn of(mean: impl Fn(&str) -> Option<f64>) -> Option<RewardMetrics> {
        // Sums over wanted answers alone were divided by the number of all answers.
        let wanted = mean("wanted");
        let over = |value: f64, share: Option<f64>| match share {
            Some(0.0) => 0.0,
            share => value / share.unwrap_or(1.0),
        };
        let chosen = over(mean("reward_chosen")?, wanted);
        let rejected = over(mean("reward_rejected")?, wanted.map(|wanted| 1.0 - wanted));
        Some(RewardMetrics {
            reward_accuracy: mean("reward_accuracy")?,
            reward_margin: mean("reward_margin").unwrap_or(chosen - rejected),
            reward_chosen: chosen,
            reward_rejected: rejected,
            logp_chosen: mean("logp_chosen"),
            logp_rejected: mean("logp_rejected"),
        })
    }

    /// One line for people.
    pub fn words(&self) -> String {
        format!(
            "reward accuracy {:.4}  margin {:.4}  chosen {:.4}  rejected {:.4}",
            self.reward_accuracy, self.reward_margin, self.reward_chosen, self.reward_rejected
        )
    }

    /// The metrics by name, for curves.
    pub fn named(&self) -> Vec<(&'static str, f64)> {
        let always = [
            ("reward_accuracy", self.reward_accuracy),
            ("reward_margin", self.reward_margin),
            ("reward_chosen", self.reward_chosen),
            ("reward_rejected", self.reward_rejected),
        ];
        let known = [("logp_chosen", self.logp_chosen), ("logp_rejected", self.logp_rejected)];
        always.into_iter().chain(known.into_iter().filter_map(|(name, value)| Some((name, value?)))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(sums: &[(&str, f64)]) -> Option<RewardMetrics> {
        RewardMetrics::of(|name| sums.iter().find(|(own, _)| *own == name).map(|(_, value)| *value))
    }

    #[test]
    fn pairs_have_all_numbers_and_judged_answers_their_own_means() {
        let pairs = [("reward_accuracy", 0.75), ("reward_margin", 2.0), ("reward_chosen", 1.5)];
        let rest = [("reward_rejected", -0.5), ("logp_chosen", -3.0), ("logp_rejected", -4.0)];
        let pairs = of(&[&pairs[..], &rest].concat()).unwrap();
        assert_eq!((pairs.reward_margin, pairs.logp_chosen), (2.0, Some(-3.0)));
        let line = serde_json::to_string(&pairs).unwrap();
        assert_eq!(serde_json::from_str::<RewardMetrics>(&line).unwrap(), pairs);
        // Of four answers three are wanted.
        let judged = [("reward_accuracy", 1.0), ("reward_chosen", 0.3), ("reward_rejected", -0.1)];
        let judged = of(&[&judged[..], &[("wanted", 0.75)]].concat()).unwrap();
        assert!((judged.reward_chosen - 0.4).abs() < 1e-12 && (judged.reward_rejected + 0.4).abs() < 1e-12);
        assert!((judged.reward_margin - 0.8).abs() < 1e-12 && judged.logp_chosen.is_none());
        assert_eq!(of(&[]), None);
    }
}
