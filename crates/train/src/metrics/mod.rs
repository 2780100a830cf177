//! How well a model does on what it was not trained on.
//!
//! ```text
//! classes   a confusion matrix, and the numbers that follow from it
//! answers   how many answers a model would give as they are written
//! rewards   how much likelier the preferred answers are made than the others
//! text      how many bits a byte of text takes
//! goal      the number that the best checkpoint and the early stop follow
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

/// The numbers of an evaluation beside its loss.
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

    /// Where classes are learned.
    pub fn classes(&self) -> Option<&ClassMetrics> {
        match self {
            Metrics::Classes(classes) => Some(classes),
            _ => None,
        }
    }

    /// Where answers are learned.
    pub fn answers(&self) -> Option<&AnswerMetrics> {
        match self {
            Metrics::Answers(answers) => Some(answers),
            _ => None,
        }
    }

    /// Where answers are compared.
    pub fn rewards(&self) -> Option<&RewardMetrics> {
        match self {
            Metrics::Rewards(rewards) => Some(rewards),
            _ => None,
        }
    }

    /// Where text is predicted.
    pub fn text(&self) -> Option<&TextMetrics> {
        match self {
            Metrics::Text(text) => Some(text),
            _ => None,
        }
    }
}
