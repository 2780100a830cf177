//! Static capacities of a plan, and the forward graph of a model at these capacities.

use flatout_data::{ImageRoom, Layout, Shape, max_segments, patch_step};
use flatout_ir::Graph;
use flatout_models::form::{Documents, Form, ImageExtents, LossForm, SeenFrames, SeenPatches};
use flatout_models::vision::Qwen3VlConfig;

use super::images;
pub use crate::config::resolved::Capacities;
use crate::config::{Config, IMAGE_TOKENS, Sight, Task};
use crate::switches::data::HeadRows;

/// Assumed tokens of an image before any is known: those of about one megapixel.
const USUAL_IMAGE: usize = 1024;
/// Assumed frames of a video before any is known.
const USUAL_FRAMES: usize = 8;

impl Capacities {
    /// Capacities for rows of the model's whole context, or for images.
    pub fn of_rows(config: &Config, rows: usize) -> Capacities {
        let (model, len) = (&config.model, config.model.tokens());
        // Before lengths are known, every answer may be as long as the context.
        let (rows, answers) = match config.data.task {
            Task::Preference => (rows * config.together(), rows * config.together()),
            _ => (rows, 0),
        };
        let of_text = Capacities { rows, tokens: rows * len, longest: len, answers, ..Capacities::default() };
        if model.image_sides().is_some() {
            return Capacities { tokens: rows * len, images: rows, ..Capacities::default() };
        }
        if model.class_head().is_some() {
            // Before lengths are known, every text may be as long as the context.
            return Capacities::of_shape(config, &Layout::new(vec![Shape::Padded { rows, len }]), 0);
        }
        match config.sight() {
            Some(Sight::Images) => {
                // Before images are known, every row has one.
                let block = model.as_qwen3_vl().map_or(1, Qwen3VlConfig::block);
                let [least, most] = config.data.image_tokens.unwrap_or(IMAGE_TOKENS);
                let tokens = USUAL_IMAGE.clamp(least, most).min(len);
                let largest_image = (tokens * block).next_multiple_of(patch_step(block));
                Capacities { images: rows, patches: rows * largest_image, largest_image, ..of_text }
            }
            Some(Sight::Frames) => {
                // Before samples are known, every row is a video with frames of its own.
                let (frames, repeats) = (rows * USUAL_FRAMES, config.data.still_frames);
                let longest_video = USUAL_FRAMES;
                Capacities { images: frames, frames, videos: rows, longest_video, repeats, ..of_text }
            }
            None if answers > 0 => of_text,
            None => {
                let segments = if config.data.document_mask { rows * max_segments(len) } else { 0 };
                Capacities { segments, ..of_text }
            }
        }
    }

    /// Capacities for examples in one shape of a layout.
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
        let of_text = Capacities {
            rows,
            tokens,
            segments,
            trees,
            longest,
            read,
            images,
            answers,
            ..Capacities::default()
        };
        match config.model.as_fovea() {
            // To layouts a frame is a single patch, and a still image is the only one with several frames.
            Some(_) if images > 0 => Capacities {
                frames: patches,
                videos: shape.segments(),
                longest_video: largest_image,
                repeats: config.data.still_frames,
                ..of_text
            },
            _ => Capacities { patches, largest_image, ..of_text },
        }
    }
}

/// The forward graph over texts, with the loss of next tokens, classes or preferences.
pub fn texts(config: &Config, capacities: &Capacities, training: bool) -> Graph {
    let Capacities { rows, tokens, segments, trees, longest, read, answers, window, .. } = *capacities;
    let form = match config.model.class_head() {
        Some(_) => Form::Classes { tokens, texts: segments, longest, dropout: training },
        None => {
            let documents = match (segments, trees) {
                (0, 0) => Documents::Joined,
                (most, 0) => Documents::Apart { most },
                (_, most) => Documents::Trees { most, longest },
            };
            let read = (read > 0).then_some(read);
            let trims_last = read.is_some() && trims_last_layer(config);
            Form::Loss(LossForm {
                documents,
                read,
                trims_last,
                // A window as wide as a row has no effect, and then costs nothing either.
                window: (1..tokens / rows).contains(&window).then_some(window),
                dropout: training,
                seen: image_extents(capacities),
                features_given: config.data.vision_cache.is_some(),
                scored: !training && (answers > 0 || config.data.task.has_answers()),
                preference: (answers > 0).then(|| config.preference.form(answers)),
                ..LossForm::rows(rows, tokens / rows)
            })
        }
    };
    config.model.build(form)
}

/// Whether the last layer runs, after its attention, only on the rows that the head reads, where these are not all rows.
pub fn trims_last_layer(config: &Config) -> bool {
    config.model.as_decoder().is_some() && config.switches.data.last_layer != HeadRows::All
}

/// Capacities for the images among a plan's tokens.
fn image_extents(capacities: &Capacities) -> Option<ImageExtents> {
    let Capacities { images, patches, largest_image, frames, videos, longest_video, repeats, .. } =
        *capacities;
    match (patches, frames) {
        (0, 0) => None,
        (_, 0) => Some(ImageExtents::Patches(SeenPatches { patches, images, largest: largest_image })),
        _ => {
            Some(ImageExtents::Frames(SeenFrames { images, frames, videos, longest: longest_video, repeats }))
        }
    }
}

/// The forward graph over images, with the loss of classes.
pub fn of_images(config: &Config, capacities: &Capacities, training: bool) -> Graph {
    config.model.build(Form::Images(images::form(config, capacities.images, training)))
}
