//! What a trained model is used for: text, classes, logits, and how well it does.

pub mod classify;
pub mod evaluate;
pub mod generate;
pub mod images;
pub mod logits;
pub mod predictions;
pub mod sampling;
mod session;
