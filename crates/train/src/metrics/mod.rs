//! How well a model does on what it was not trained on.
//!
//! ```text
//! classes   a confusion matrix, and the numbers that follow from it
//! answers   how many answers a model would give as they are written
//! goal      the number that the best checkpoint and the early stop follow
//! ```

mod answers;
mod classes;
pub mod goal;

pub use answers::{AnswerMetrics, AnswerTally};
pub use classes::{ClassMetrics, Confusion, Score, Tally, likeliest, probabilities};

use serde::{Deserialize, Serialize};

/// The numbers of an evaluation beside its loss.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Metrics {
    Classes(ClassMetrics),
    Answers(AnswerMetrics),
}

impl Metrics {
    /// One line for people.
    pub fn words(&self) -> String {
        match self {
            Metrics::Classes(classes) => classes.words(),
            Metrics::Answers(answers) => answers.words(),
        }
    }

    /// Where classes are learned.
    pub fn classes(&self) -> Option<&ClassMetrics> {
        match self {
            Metrics::Classes(classes) => Some(classes),
            Metrics::Answers(_) => None,
        }
    }

    /// Where answers are learned.
    pub fn answers(&self) -> Option<&AnswerMetrics> {
        match self {
            Metrics::Answers(answers) => Some(answers),
            Metrics::Classes(_) => None,
        }
    }
}
