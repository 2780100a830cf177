//! Images among the tokens of examples, as plans take them.

use std::collections::HashSet;
use std::sync::Arc;

use flatout_data::vision::{Grid, ImageRows, ImageStore, StoredFeatures, TowerInputs};
use flatout_data::{ExampleTable, ImageRoom, MicroBatch};
use flatout_models::vision::Qwen3VlConfig;
use flatout_models::vision::qwen3_vl::features::FEATURES;

use super::batch::{HostTensor, Inputs};
use crate::config::Config;
use crate::{UserError, refuse};

/// The images of a set, and what plans with a tower must know of them.
#[derive(Clone)]
pub struct SeenImages {
    pub store: Arc<ImageStore>,
    /// Features that a tower made of them before: plans that read these have no tower.
    pub features: Option<Arc<StoredFeatures>>,
    /// Images that an epoch of the training shows a tower.
    pub sightings: u64,
    /// Learned positions of the tower a side.
    positions: usize,
    merge: usize,
}

impl SeenImages {
    /// `None` where no example has an image; refuses images with more patches a side than the model has positions.
    pub fn of(config: &Config, store: ImageStore) -> Result<Option<SeenImages>, UserError> {
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
        Ok(is_any.then_some(SeenImages { store, features: None, sightings: 0, positions, merge }))
    }

    /// With the images that an epoch over these examples shows a tower: all that examples have or, where those of an image
    /// share its computation, each once.
    pub fn shown_by(self, table: &ExampleTable, shares_prefixes: bool) -> SeenImages {
        let shown = || table.iter().flat_map(|example| example.images.iter().map(|image| image.image));
        let sightings = match shares_prefixes {
            true => shown().collect::<HashSet<u32>>().len(),
            false => shown().count(),
        };
        SeenImages { sightings: sightings as u64, ..self }
    }

    /// Patches that become one token.
    pub fn block(&self) -> usize {
        self.merge * self.merge
    }

    /// How images enter plans: as patches, or as features where those were made.
    pub fn rows(&self) -> ImageRows {
        match &self.features {
            None => ImageRows::Patches(self.store.clone()),
            Some(features) => ImageRows::Features(features.clone(), self.block()),
        }
    }

    /// The inputs of the tower, or the features in its place, of those that a plan has.
    pub fn tensors(
        &self,
        laid_out: &MicroBatch,
        rows: Vec<u8>,
        inputs: &Inputs,
    ) -> Vec<(&'static str, HostTensor)> {
        if self.features.is_some() {
            return inputs.only([(
                FEATURES,
                Box::new(|| HostTensor::Stored(rows)) as Box<dyn FnOnce() -> HostTensor>,
            )]);
        }
        self.tower_tensors(laid_out.images.iter().map(|image| image.grid), laid_out.image_room, rows, inputs)
    }

    /// The inputs of a tower with some room, of those that a plan has, over images of these grids and their patches.
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
