//! Inference: generates text, predicts classes, writes logits, and evaluates a trained model.

pub mod choices;
pub mod classify;
pub mod evaluate;
pub mod generate;
pub mod images;
pub mod logits;
pub mod predictions;
pub mod session;

pub use crate::sampling;
