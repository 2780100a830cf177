//! Metrics of answers: the share that greedy decoding would reproduce exactly.
//!
//! An answer is right if every learned token of it, its end included, is the most likely one given those before it. Greedy
//! decoding then gives the answer, so nothing has to be generated.

use serde::{Deserialize, Serialize};

use super::classes::share;

/// Metrics of the answers of an evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct AnswerMetrics {
    /// Share of examples whose every learned token is the most likely one.
    pub exact: f64,
    /// Share of learned tokens that are the most likely ones.
    pub token_accuracy: f64,
}

impl AnswerMetrics {
    /// One line for people.
    pub fn words(&self) -> String {
        format!("exact {:.4}  token accuracy {:.4}", self.exact, self.token_accuracy)
    }
}

/// Counts of answers and their tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AnswerTally {
    answers: u64,
    right: u64,
    tokens: u64,
    right_tokens: u64,
}

impl AnswerTally {
    /// Counts the answers of a micro-batch: the example of every row that is read, `None` if the row has no target; the
    /// log-probability of its target; and the largest log-probability of the row.
    pub fn see(&mut self, examples: &[Option<u32>], logp: &[f32], best: &[f32]) {
        let count = examples.iter().flatten().max().map_or(0, |last| *last as usize + 1);
        let mut is_right: Vec<Option<bool>> = vec![None; count];
        for ((example, logp), best) in examples.iter().zip(logp).zip(best) {
            let Some(example) = example else { continue };
            let hit = logp >= best;
            let so_far = &mut is_right[*example as usize];
            *so_far = Some(so_far.unwrap_or(true) && hit);
            self.tokens += 1;
            self.right_tokens += u64::from(hit);
        }
        self.answers += is_right.iter().flatten().count() as u64;
        self.right += is_right.iter().flatten().filter(|right| **right).count() as u64;
    }

    /// `None` if no answer was counted.
    pub fn metrics(&self) -> Option<AnswerMetrics> {
        (self.answers > 0).then(|| AnswerMetrics {
            exact: share(self.right, self.answers),
            token_accuracy: share(self.right_tokens, self.tokens),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_right_where_all_its_tokens_are_likeliest() {
        let mut tally = AnswerTally::default();
        assert_eq!(tally.metrics(), None);
        // The second of three answers has a token that is not the most likely; a row without a target does not count.
        let examples = [Some(0), Some(0), None, Some(1), Some(1), Some(2)];
        tally.see(&examples, &[-0.1, -0.7, 0.0, -0.2, -2.0, -0.5], &[-0.1, -0.7, -0.3, -0.2, -0.4, -0.5]);
        let seen = tally.metrics().unwrap();
        assert_eq!((seen.exact, seen.token_accuracy), (2.0 / 3.0, 0.8));
        // Examples are numbered from 0 in every micro-batch, and NaN is never right.
        tally.see(&[Some(0)], &[f32::NAN], &[f32::NAN]);
        assert_eq!(tally.metrics().unwrap().exact, 0.5);
    }
}
