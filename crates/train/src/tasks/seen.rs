//! Images among the tokens of examples, in the form in which plans take them.

use std::collections::HashSet;
use std::sync::{Arc, OnceLock};

use flatout_data::vision::{
    FrameInputs, FrameRoom, FrameStore, Grid, ImageRows, ImageStore, LookRead, StoredFeatures, TowerInputs,
    Video,
};
use flatout_data::{ExampleTable, ImageRoom, MicroBatch};
use flatout_models::vision::qwen3_vl::features::FEATURES;
use flatout_models::vision::{Look, Qwen3VlConfig};

use super::batch::{HostTensor, Inputs};
use crate::config::Config;
use crate::{UserError, refuse};

/// The images of a set, with the properties of the tower that reads them.
#[derive(Clone)]
pub enum SeenImages {
    Patches(PatchImages),
    Frames(FrameImages),
}

impl SeenImages {
    /// `None` if no example has an image; refuses images with more patches per side than the model has positions.
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
            let images = FrameImages { store: frames, read };
            return Ok((images.store.count() > 0).then_some(SeenImages::Frames(images)));
        }
        Ok(PatchImages::of(config, store)?.map(SeenImages::Patches))
    }

    /// The form in which the images enter plans.
    pub fn rows(&self) -> ImageRows {
        match self {
            SeenImages::Patches(images) => images.rows(),
            SeenImages::Frames(images) => ImageRows::Frames(images.store.clone()),
        }
    }

    /// Those inputs of the tower, or features in its place, that a plan has. If tokens are frames, also the look that each of
    /// them belongs to.
    pub fn tensors(
        &self,
        laid_out: &mut MicroBatch,
        rows: Vec<u8>,
        inputs: &Inputs,
    ) -> Vec<(&'static str, HostTensor)> {
        match self {
            SeenImages::Patches(images) => images.tensors(laid_out, rows, inputs),
            SeenImages::Frames(images) => images.tensors(laid_out, rows, inputs),
        }
    }
}

/// Images of any size, cut into patches.
#[derive(Clone)]
pub struct PatchImages {
    pub store: Arc<ImageStore>,
    /// Features that a tower computed, once it has: plans that read these contain no tower.
    features: Arc<OnceLock<Arc<StoredFeatures>>>,
    /// Images per epoch that training passes through a tower.
    pub sightings: u64,
    /// Learned positions of the tower per side.
    positions: usize,
    merge: usize,
}

impl PatchImages {
    /// `None` if no example has an image; refuses images with more patches per side than the model has positions.
    pub fn of(config: &Config, store: ImageStore) -> Result<Option<PatchImages>, UserError> {
        let Some(vision) = config.model.as_qwen3_vl() else { return Ok(None) };
        let context = config.model.tokens();
        let grids = (0..store.count() as u32).map(|number| store.get(number).grid);
        if let Some(side) = grids.map(|grid| grid.rows.max(grid.columns)).find(|side| *side > context) {
            refuse!(
                "an image is cut into {side} patches a side and `model.context` is {context}: raise it, or lower \
                 data.image_tokens"
            );
        }
        let Qwen3VlConfig { positions, merge, .. } = *vision;
        let store = Arc::new(store);
        let is_any = store.count() > 0;
        Ok(is_any.then_some(PatchImages { store, features: Arc::default(), sightings: 0, positions, merge }))
    }

    /// Counts the images per epoch that these examples pass through a tower: all of them, or each image once where examples share
    /// its computation; the answers of a pair share it only with each other.
    pub fn count_sightings(&mut self, table: &ExampleTable, shares_prefixes: bool) {
        let shown = || table.iter().flat_map(|example| example.images.iter().map(|image| image.image));
        let sightings = match (shares_prefixes, table.together()) {
            (true, 1) => shown().collect::<HashSet<u32>>().len(),
            (true, together) => shown().count() / together,
            (false, _) => shown().count(),
        };
        self.sightings = sightings as u64;
    }

    /// Sets the features of all images, once. All clones of this read them from then on.
    pub fn give_features(&self, features: StoredFeatures) {
        assert!(self.features.set(Arc::new(features)).is_ok(), "features are made once");
    }

    /// Patches that are merged into one token.
    pub fn block(&self) -> usize {
        self.merge * self.merge
    }

    /// Patches, or features if they were computed.
    fn rows(&self) -> ImageRows {
        match self.features.get() {
            None => ImageRows::Patches(self.store.clone()),
            Some(features) => ImageRows::Features(features.clone(), self.block()),
        }
    }

    fn tensors(
        &self,
        laid_out: &MicroBatch,
        rows: Vec<u8>,
        inputs: &Inputs,
    ) -> Vec<(&'static str, HostTensor)> {
        if self.features.get().is_some() {
            return inputs.only([(
                FEATURES,
                Box::new(|| HostTensor::Stored(rows)) as Box<dyn FnOnce() -> HostTensor>,
            )]);
        }
        self.tower_tensors(laid_out.images.iter().map(|image| image.grid), laid_out.image_room, rows, inputs)
    }

    /// Those inputs of a tower that a plan has, over images of these grids and their patches.
    pub fn tower_tensors(
        &self,
        grids: impl Iterator<Item = Grid>,
        room: ImageRoom,
        patches: Vec<u8>,
        inputs: &Inputs,
    ) -> Vec<(&'static str, HostTensor)> {
        let TowerInputs { places, taps, tap_weights, image_start, image_len } =
            TowerInputs::new(grids, room, self.merge, self.positions);
        inputs.only([
            ("patches", Box::new(|| HostTensor::U8(patches)) as Box<dyn FnOnce() -> HostTensor>),
            ("patch_places", Box::new(|| HostTensor::I32(places))),
            ("taps", Box::new(|| HostTensor::I32(taps))),
            ("tap_weights", Box::new(|| HostTensor::F32(tap_weights))),
            ("image_start", Box::new(|| HostTensor::I32(image_start))),
            ("image_len", Box::new(|| HostTensor::I32(image_len))),
        ])
    }
}

/// Frames of one size, and the way in which the text reads looks at them.
#[derive(Clone)]
pub struct FrameImages {
    store: Arc<FrameStore>,
    read: LookRead,
}

impl FrameImages {
    fn tensors(
        &self,
        laid_out: &mut MicroBatch,
        pixels: Vec<u8>,
        inputs: &Inputs,
    ) -> Vec<(&'static str, HostTensor)> {
        let made = looks(laid_out, self.read);
        laid_out.seen = made.seen;
        inputs.only([
            ("pixels", Box::new(|| HostTensor::U8(pixels)) as Box<dyn FnOnce() -> HostTensor>),
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

/// Positions of the frames of a micro-batch.
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
