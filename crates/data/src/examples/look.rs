//! Spans of an example: which are trained on and which are only read.

use super::Example;
use crate::text::inspect::Span;
use crate::text::tokenizer::Vocabulary;

/// The tokens of an example in runs that are learned or only read, as they are spelled. Special tokens are spelled out.
pub fn spans(vocabulary: &Vocabulary, example: Example<'_>) -> Vec<Span> {
    let mut spans: Vec<(bool, Vec<u32>)> = Vec::new();
    for (token, weight) in example.tokens.iter().zip(example.weights) {
        let is_trained = *weight > 0.0;
        match spans.last_mut() {
            Some((same, tokens)) if *same == is_trained => tokens.push(*token),
            _ => spans.push((is_trained, vec![*token])),
        }
    }
    let span = |(is_trained, tokens): (bool, Vec<u32>)| Span {
        is_trained,
        tokens: tokens.len(),
        text: vocabulary.spell_out(&tokens),
    };
    spans.into_iter().map(span).collect()
}
