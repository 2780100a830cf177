//! Expands image tokens: one for every merge block of an image that the text sees, none of them learned.

use std::sync::Arc;

use crate::examples::conversation::wrong;
use crate::examples::encoder::TokenSpan;
use crate::examples::row_error::RowError;
use crate::formats::Reason;
use crate::vision::{EncodedImage, Patching};

/// An image among the tokens of an example.
pub(in crate::examples) struct ImageSpan {
    /// Position of its first token, and the number of its tokens.
    pub start: usize,
    pub tokens: usize,
    pub image: Arc<EncodedImage>,
}

/// The tokens of a text, their weights, and the images among them.
pub(in crate::examples) struct Expanded {
    pub tokens: Vec<u32>,
    pub weights: Vec<f32>,
    pub images: Vec<ImageSpan>,
}

/// The tokens of a text with their weights, in which every `token` stands for the next image.
pub(in crate::examples) fn expand<'i>(
    pieces: &[TokenSpan],
    weights: &[f32],
    token: u32,
    patching: &Patching,
    images: impl Iterator<Item = &'i Arc<EncodedImage>>,
) -> Result<Expanded, RowError> {
    let images: Vec<&Arc<EncodedImage>> = images.collect();
    let places = pieces.iter().filter(|piece| piece.token == token).count();
    if places != images.len() {
        let message = format!(
            "the text has {places} image tokens and the row has {} images; no text may spell the token, and the template must \
             write one for each image; correct the row, or give another template with data.template",
            images.len()
        );
        return wrong(Reason::ImageCount, message);
    }
    let mut expanded = Expanded { tokens: Vec::new(), weights: Vec::new(), images: Vec::new() };
    let mut next = images.into_iter();
    for (piece, weight) in pieces.iter().zip(weights) {
        if piece.token != token {
            expanded.tokens.push(piece.token);
            expanded.weights.push(*weight);
            continue;
        }
        let image = next.next().expect("their number was checked above").clone();
        let (start, tokens) = (expanded.tokens.len(), patching.tokens(image.grid));
        expanded.tokens.resize(start + tokens, token);
        expanded.weights.resize(start + tokens, 0.0);
        expanded.images.push(ImageSpan { start, tokens, image });
    }
    Ok(expanded)
}
