//! Spans of an example: which of its tokens are trained on and which are only read.

use super::Example;
use crate::text::inspect::Span;
use crate::text::tokenizer::Vocabulary;
use crate::vision::Grid;

/// The tokens of an example in runs that are learned or only read, as text. Special tokens are spelled out. An image's token
/// appears once with its count, and consecutive frames are counted.
pub fn spans(vocabulary: &Vocabulary, example: Example<'_>) -> Vec<Span> {
    let mut spans: Vec<Span> = Vec::new();
    let mut add = |is_trained: bool, tokens: usize, text: String| match spans.last_mut() {
        Some(last) if last.is_trained == is_trained => {
            last.tokens += tokens;
            last.text.push_str(&text);
        }
        _ => spans.push(Span { is_trained, tokens, text }),
    };
    let mut images = example.images.iter().peekable();
    let mut at = 0;
    while at < example.tokens.len() {
        let next_image = images.peek().map_or(example.tokens.len(), |image| image.start as usize);
        if at == next_image {
            let image = images.next().expect("an image begins here");
            if image.grid == Grid::FRAME {
                let more = std::iter::from_fn(|| images.next_if(|next| next.grid == Grid::FRAME)).count();
                add(false, 1 + more, format!("<frame> x {}", 1 + more));
                at += 1 + more;
                continue;
            }
            let spelled = vocabulary.spell_out(&example.tokens[at..=at]);
            add(false, image.tokens as usize, format!("{spelled} x {}", image.tokens));
            at += image.tokens as usize;
            continue;
        }
        let is_trained = example.weights[at] > 0.0;
        let same = example.weights[at..next_image].iter().take_while(|weight| (**weight > 0.0) == is_trained);
        let end = at + same.count();
        add(is_trained, end - at, vocabulary.spell_out(&example.tokens[at..end]));
        at = end;
    }
    spans
}
