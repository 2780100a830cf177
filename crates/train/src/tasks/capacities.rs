//! Static capacities of a plan, and the forward graph that a model has at them.

use flatout_data::{Shape, max_segments};
use flatout_ir::Graph;
use flatout_models::form::{Documents, Form};

use super::images;
use crate::config::Config;
pub use crate::config::resolved::Capacities;

impl Capacities {
    /// Of rows of the model's whole context, or of images.
    pub fn of_rows(config: &Config, rows: usize) -> Capacities {
        let (model, len) = (&config.model, config.model.tokens());
        if model.image_sides().is_some() {
            return Capacities { tokens: rows * len, images: rows, ..Capacities::default() };
        }
        if model.class_head().is_some() {
            // Before lengths are known every text may be as long as the context.
            return Capacities::of_shape(config, Shape::Padded { rows, len }, None);
        }
        let segments = if config.data.document_mask { rows * max_segments(len) } else { 0 };
        Capacities { rows, tokens: rows * len, segments, longest: len, ..Capacities::default() }
    }

    /// Of examples that are laid out in a shape, of which the loss reads so many rows, or every one.
    pub fn of_shape(config: &Config, shape: Shape, read: Option<usize>) -> Capacities {
        let (rows, longest) = match shape {
            Shape::Packed { tokens, .. } => (1, tokens.min(config.model.tokens())),
            Shape::Padded { rows, len } => (rows, len),
        };
        let has_segments = config.model.class_head().is_some() || matches!(shape, Shape::Packed { .. });
        let segments = if has_segments { shape.segments() } else { 0 };
        let tokens = shape.tokens();
        Capacities { rows, tokens, segments, longest, read: read.unwrap_or(0), images: 0 }
    }
}

/// The forward graph over texts, with the loss of the next token or of classes.
pub fn texts(config: &Config, capacities: &Capacities, training: bool) -> Graph {
    let Capacities { rows, tokens, segments, longest, read, .. } = *capacities;
    let form = match config.model.class_head() {
        Some(_) => Form::Classes { tokens, texts: segments, longest, dropout: training },
        None => {
            let documents = match segments {
                0 => Documents::Joined,
                most => Documents::Apart { most },
            };
            let read = (read > 0).then_some(read);
            Form::Loss { rows, len: tokens / rows, documents, read, dropout: training }
        }
    };
    config.model.build(form)
}

/// The forward graph over images, with the loss of classes.
pub fn of_images(config: &Config, capacities: &Capacities, training: bool) -> Graph {
    config.model.build(Form::Images(images::form(config, capacities.images, training)))
}
