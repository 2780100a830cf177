//! Metrics of an evaluation besides its loss.
//!
//! ```text
//! classes   a confusion matrix, and the numbers computed from it
//! answers   the share of answers that greedy decoding would reproduce
//! rewards   the reward margin of preferred answers over others
//! text      bits per byte of text
//! goal      the metric that the best checkpoint and early stopping follow
//! ```

mod answers;
mod classes;
pub mod goal;
mod rewards;
mod text;

pub use answers::{AnswerMetrics, AnswerTally};
pub use classes::{ClassMetrics, Confusion, Score, Tally, likeliest, probabilities};
pub use rewards::RewardMetrics;
pub use text::TextMetrics;

use serde::{Deserialize, Deserializer, Serialize};

/// Metrics of an evaluation, by what the model learns.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Metrics {
    Classes(ClassMetrics),
    Answers(AnswerMetrics),
    Rewards(RewardMetrics),
    Text(TextMetrics),
}

/// Reads a number that is not finite, which JSON has only as null.
pub(crate) fn null_is_nan<'de, D: Deserializer<'de>, F: Deserialize<'de> + From<f32>>(
    deserializer: D,
) -> Result<F, D::Error> {
    Ok(Option::<F>::deserialize(deserializer)?.unwrap_or_else(|| F::from(f32::NAN)))
}

impl Metrics {
    /// One line for people.
    pub fn words(&self) -> String {
        match self {
            Metrics::Classes(classes) => classes.words(),
            Metrics::Answers(answers) => answers.words(),
            Metrics::Rewards(rewards) => rewards.words(),
            Metrics::Text(text) => text.words(),
        }
    }

    /// Present where classes are learned.
    pub fn classes(&self) -> Option<&ClassMetrics> {
        match self {
            Metrics::Classes(classes) => Some(classes),
            _ => None,
        }
    }

    /// Present where answers are learned.
    pub fn answers(&self) -> Option<&AnswerMetrics> {
        match self {
            Metrics::Answers(answers) => Some(answers),
            _ => None,
        }
    }

    /// Present where preferences are learned.
    pub fn rewards(&self) -> Option<&RewardMetrics> {
        match self {
            Metrics::Rewards(rewards) => Some(rewards),
            _ => None,
        }
    }

    /// Present where text is predicted.
    pub fn text(&self) -> Option<&TextMetrics> {
        match self {
            Metrics::Text(text) => Some(text),
            _ => None,
        }
    }
}
