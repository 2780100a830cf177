//! Images among the tokens of examples, as plans take them.

use std::sync::Arc;

use flatout_data::MicroBatch;
use flatout_data::vision::{
    FrameInputs, FrameRoom, FrameStore, ImageRows, ImageStore, LookRead, TowerInputs, Video,
};
use flatout_models::vision::Look;

use super::batch::{HostTensor, Inputs};
use crate::config::Config;
use crate::{UserError, refuse};

/// The images of a set, and what the tower that sees them must be told of each.
#[derive(Clone)]
pub enum SeenImages {
    /// Images of any size, for a tower that learns so many positions a side and merges so many patches a side.
    Patches { store: Arc<ImageStore>, positions: usize, merge: usize },
    /// Frames of one size, and which look at them the text reads.
    Frames { store: Arc<FrameStore>, read: LookRead },
}

impl SeenImages {
    /// `None` where no example has an image; refuses images with more patches a side than the model has positions.
    pub fn of(
        config: &Config,
        store: ImageStore,
        frames: Arc<FrameStore>,
    ) -> Result<Option<SeenImages>, UserError> {
        if let Some(fovea) = config.model.as_fovea() {
            let read = match fovea.mode {
                Look::Fine => LookRead::Fine,
                Look::Coarse => LookRead::Coarse,
            };
            return Ok((frames.count() > 0).then_some(SeenImages::Frames { store: frames, read }));
        }
        let Some(vision) = config.model.as_qwen3_vl() else { return Ok(None) };
        let context = config.model.tokens();
        let grids = (0..store.count() as u32).map(|number| store.get(number).grid);
        if let Some(side) = grids.map(|grid| grid.rows.max(grid.columns)).find(|side| *side > context) {
            refuse!(
                "an image is cut into {side} patches a side and `model.context` is {context}: raise it, or lower \
                 data.image_tokens"
            );
        }
        let (positions, merge) = (vision.positions, vision.merge);
        Ok((store.count() > 0).then(|| SeenImages::Patches { store: Arc::new(store), positions, merge }))
    }

    /// The rows that the images enter plans as.
    pub fn rows(&self) -> ImageRows {
        match self {
            SeenImages::Patches { store, .. } => ImageRows::Patches(store.clone()),
            SeenImages::Frames { store, .. } => ImageRows::Frames(store.clone()),
        }
    }

    /// The inputs of the tower, of those that a plan has. Where tokens are frames, the micro-batch is told which look each is.
    pub fn tensors(
        &self,
        laid_out: &mut MicroBatch,
        rows: Vec<u8>,
        inputs: &Inputs,
    ) -> Vec<(&'static str, HostTensor)> {
        match self {
            SeenImages::Patches { positions, merge, .. } => {
                let grids = laid_out.images.iter().map(|image| image.grid);
                let made = TowerInputs::new(grids, laid_out.image_room, *merge, *positions);
                let TowerInputs { places, taps, tap_weights, image_start, image_len } = made;
                inputs.only([
                    ("patches", Box::new(|| HostTensor::U8(rows)) as Box<dyn FnOnce() -> HostTensor>),
                    ("patch_places", Box::new(|| HostTensor::I32(places))),
                    ("taps", Box::new(|| HostTensor::I32(taps))),
                    ("tap_weights", Box::new(|| HostTensor::F32(tap_weights))),
                    ("image_start", Box::new(|| HostTensor::I32(image_start))),
                    ("image_len", Box::new(|| HostTensor::I32(image_len))),
                ])
            }
            SeenImages::Frames { read, .. } => {
                let made = looks(laid_out, *read);
                laid_out.seen = made.seen;
                inputs.only([
                    ("pixels", Box::new(|| HostTensor::U8(rows)) as Box<dyn FnOnce() -> HostTensor>),
                    ("frame_images", Box::new(|| HostTensor::I32(made.frame_images))),
                    ("frame_positions", Box::new(|| HostTensor::I32(made.frame_positions))),
                    ("video_start", Box::new(|| HostTensor::I32(made.video_start))),
                    ("video_len", Box::new(|| HostTensor::I32(made.video_len))),
                    ("look_start", Box::new(|| HostTensor::I32(made.look_start))),
                    ("look_len", Box::new(|| HostTensor::I32(made.look_len))),
                    ("previous", Box::new(|| HostTensor::I32(made.previous))),
                ])
            }
        }
    }
}

/// Where the frames of a micro-batch lie.
fn looks(laid_out: &MicroBatch, read: LookRead) -> FrameInputs {
    let (videos, _) = laid_out.videos();
    let videos: Vec<Video<'_>> =
        videos.iter().map(|video| Video { row: video.row, images: &video.images }).collect();
    let room = FrameRoom {
        images: laid_out.image_room.images,
        frames: laid_out.image_room.patches,
        videos: laid_out.labels.len(),
    };
    FrameInputs::new(&videos, room, laid_out.tokens.len(), read)
}
