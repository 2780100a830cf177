//! Static capacities of a plan, and the forward graph that a model has at them.

use flatout_data::{ImageRoom, Layout, Shape, max_segments, patch_step};
use flatout_ir::Graph;
use flatout_models::form::{Documents, Form, LossForm, Seen};

use super::images;
pub use crate::config::resolved::Capacities;
use crate::config::{Config, IMAGE_TOKENS, Task};

/// Tokens of an image before any is known: of one megapixel, about.
const USUAL_IMAGE: usize = 1024;

impl Capacities {
    /// Of rows of the model's whole context, or of images.
    pub fn of_rows(config: &Config, rows: usize) -> Capacities {
        let (model, len) = (&config.model, config.model.tokens());
        if config.data.task == Task::Preference {
            // Before lengths are known every answer may be as long as the context.
            let rows = rows * config.together();
            return Capacities::of_shape(config, &Layout::new(vec![Shape::Padded { rows, len }]), 0);
        }
        if model.image_sides().is_some() {
            return Capacities { tokens: rows * len, images: rows, ..Capacities::default() };
        }
        if model.class_head().is_some() {
            // Before lengths are known every text may be as long as the context.
            return Capacities::of_shape(config, &Layout::new(vec![Shape::Padded { rows, len }]), 0);
        }
        if config.data.task == Task::VisualChat
            && let Some(vision) = model.as_decoder().and_then(|decoder| decoder.vision.as_ref())
        {
            // Before images are known every row has one.
            let [least, most] = config.data.image_tokens.unwrap_or(IMAGE_TOKENS);
            let tokens = USUAL_IMAGE.clamp(least, most).min(len);
            let largest_image = (tokens * vision.block()).next_multiple_of(patch_step(vision.block()));
            let (images, patches) = (rows, rows * largest_image);
            let of_text = Capacities { rows, tokens: rows * len, longest: len, ..Capacities::default() };
            return Capacities { images, patches, largest_image, ..of_text };
        }
        let segments = if config.data.document_mask { rows * max_segments(len) } else { 0 };
        Capacities { rows, tokens: rows * len, segments, longest: len, ..Capacities::default() }
    }

    /// Of examples that are laid out in a shape of a layout.
    pub fn of_shape(config: &Config, layout: &Layout, number: usize) -> Capacities {
        let shape = layout.shapes()[number];
        let (rows, longest) = match shape {
            Shape::Packed { tokens, .. } => (1, tokens.min(layout.trees().unwrap_or(config.model.tokens()))),
            Shape::Padded { rows, len } => (rows, len),
        };
        let has_segments = config.model.class_head().is_some() || matches!(shape, Shape::Packed { .. });
        let apart = if has_segments { shape.segments() } else { 0 };
        let (segments, trees) = if layout.trees().is_some() { (0, apart) } else { (apart, 0) };
        let read = layout.read(number).unwrap_or(0);
        let ImageRoom { patches, images, largest: largest_image } = layout.images(number);
        let tokens = shape.tokens();
        let answers = if config.data.task == Task::Preference { shape.segments() } else { 0 };
        Capacities { rows, tokens, segments, trees, longest, read, images, patches, largest_image, answers }
    }
}

/// The forward graph over texts, with the loss of the next token, of classes or of preferences.
pub fn texts(config: &Config, capacities: &Capacities, training: bool) -> Graph {
    let Capacities { rows, tokens, segments, trees, longest, read, images, patches, largest_image, answers } =
        *capacities;
    let form = match config.model.class_head() {
        Some(_) => Form::Classes { tokens, texts: segments, longest, dropout: training },
        None => {
            let documents = match (segments, trees) {
                (0, 0) => Documents::Joined,
                (most, 0) => Documents::Apart { most },
                (_, most) => Documents::Trees { most, longest },
            };
            let read = (read > 0).then_some(read);
            let seen = (patches > 0).then_some(Seen { patches, images, largest: largest_image });
            Form::Loss(LossForm {
                documents,
                read,
                dropout: training,
                seen,
                scored: !training && (answers > 0 || config.data.task.has_answers()),
                preference: (answers > 0).then(|| config.preference.form(answers)),
                ..LossForm::rows(rows, tokens / rows)
            })
        }
    };
    config.model.build(form)
}

/// The forward graph over images, with the loss of classes.
pub fn of_images(config: &Config, capacities: &Capacities, training: bool) -> Graph {
    config.model.build(Form::Images(images::form(config, capacities.images, training)))
}
