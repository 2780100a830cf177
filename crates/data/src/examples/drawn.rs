//! Generates examples of the synthetic language with lengths drawn from a distribution.
//!
//! They serve to measure fine-tuning, and to try it without a download.

use super::lengths::Lengths;
use super::{Example, ExampleTable};
use crate::error::DataError;
use crate::random::{Uniform, key};
use crate::text::synthetic::Language;
use crate::text::tokenizer::Vocabulary;

/// Training and held-out examples, and the words they consist of.
pub struct DrawnExamples {
    pub train: ExampleTable,
    pub held_out: ExampleTable,
    pub vocabulary: Vocabulary,
}

/// Share of an example that is only read, as a question before its answer.
const PROMPT: f64 = 1.0 / 3.0;

/// Number of tokens at the beginning of an example of `len` that are only read.
pub(super) fn prompt_of(len: usize) -> usize {
    ((PROMPT * len as f64) as usize).max(1)
}

/// Draws `train` and `held_out` examples with the words that a model of `vocab` tokens must know. Each is a text of the
/// language from the beginning of a document, cut at its length; its first part is only read. The examples share prefixes where
/// the lengths say so.
pub fn drawn_examples(
    lengths: &Lengths,
    [train, held_out]: [usize; 2],
    seed: u64,
    vocab: usize,
) -> Result<DrawnExamples, DataError> {
    let language = Language::new();
    let vocabulary = Vocabulary::from_words(language.words());
    vocabulary.fits(vocab)?;
    let side = |side: u64, count: usize| {
        let (seed, mut table) = (key(seed, side), ExampleTable::default());
        let mut uniform = Uniform::new(key(seed, 1));
        let mut document = 0;
        let mut text = |len: usize| {
            let mut tokens = vec![];
            while tokens.len() < len {
                tokens.extend(language.document(seed, document));
                document += 1;
            }
            tokens.truncate(len);
            tokens
        };
        while table.count() < count {
            let (extent, prefix, examples) = lengths.draw(&mut uniform);
            let begin = text(prefix.tokens);
            for _ in 0..examples.min(count - table.count()) {
                // At least two tokens: one is predicted from the other.
                let len = extent.tokens.max(2);
                let tokens = [&begin[..], &text(len - prefix.tokens)].concat();
                let prompt = len - extent.learned.clamp(1, len - 1);
                let weights: Vec<f32> = (0..len).map(|i| if i < prompt { 0.0 } else { 1.0 }).collect();
                table.push(Example { tokens: &tokens, weights: &weights, label: None, images: &[] });
            }
        }
        table
    };
    Ok(DrawnExamples { train: side(0, train), held_out: side(1, held_out), vocabulary })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drawn_examples_have_the_lengths_and_something_to_learn() {
        let lengths = Lengths::drawn(20, 64);
        let drawn = drawn_examples(&lengths, [400, 30], 5, 512).unwrap();
        assert_eq!((drawn.train.count(), drawn.held_out.count()), (400, 30));
        let all: Vec<usize> = (0..400).map(|index| drawn.train.len_of(index)).collect();
        let mean = all.iter().sum::<usize>() as f64 / 400.0;
        assert!((mean / lengths.mean() - 1.0).abs() < 0.1, "{mean} {}", lengths.mean());
        assert!(all.iter().all(|len| (2..=64).contains(len)) && all.contains(&64));
        assert!(drawn.train.iter().all(|e| e.is_supervised() && e.weights[0] == 0.0));
        assert!(drawn.train.iter().flat_map(|e| e.tokens).all(|t| (*t as usize) < drawn.vocabulary.size()));
        assert_ne!(drawn.train.get(0), drawn.held_out.get(0));
        assert_eq!(drawn_examples(&lengths, [400, 30], 5, 512).unwrap().train, drawn.train);
        assert!(drawn_examples(&lengths, [1, 1], 5, 16).is_err(), "the words do not fit");
    }
}
