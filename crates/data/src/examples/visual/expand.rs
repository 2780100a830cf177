//! Image tokens as many as an image has: one for every merge block of its patches that the text is shown, which nobody learns.

use std::sync::Arc;

use crate::examples::conversation::wrong;
use crate::examples::encoder::TokenSpan;
use crate::examples::wrong::Wrong;
use crate::formats::Reason;
use crate::vision::{EncodedImage, Patching};

/// An image among the tokens of an example.
pub(in crate::examples) struct ImageSpan {
    /// The first of its tokens, and how many they are.
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

/// The tokens of a text with their weights, where every `token` stands for one of the images, in order.
pub(in crate::examples) fn expand<'i>(
    pieces: &[TokenSpan],
    weights: &[f32],
    token: u32,
    patching: &Patching,
    images: impl Iterator<Item = &'i Arc<EncodedImage>>,
) -> Result<Expanded, Wrong> {
    let images: Vec<&Arc<EncodedImage>> = images.collect();
    let places = pieces.iter().filter(|piece| piece.token == token).count();
    if places != images.len() {
        let said = format!(
            "the text has {places} image tokens and the row has {} images; no text may spell the token, and the template must \
             write one for each image; correct the row, or give another template with data.template",
            images.len()
        );
        return wrong(Reason::ImageCount, said);
    }
    let mut expanded = Expanded { tokens: Vec::new(), weights: Vec::new(), images: Vec::new() };
    let mut next = images.into_iter();
    for (piece, weight) in pieces.iter().zip(weights) {
        if piece.token != token {
            expanded.tokens.push(piece.token);
            expanded.weights.push(*weight);
            continue;
        }
        let image = next.next().expect("they were counted").clone();
        let (start, tokens) = (expanded.tokens.len(), patching.tokens(image.grid));
        expanded.tokens.resize(start + tokens, token);
        expanded.weights.resize(start + tokens, 0.0);
        expanded.images.push(ImageSpan { start, tokens, image });
    }
    Ok(expanded)
}
