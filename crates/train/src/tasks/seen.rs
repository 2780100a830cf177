//! Images among the tokens of examples, as plans take them.

use std::sync::Arc;

use flatout_data::vision::{ImageStore, TowerInputs, patches};
use flatout_data::{DataError, MicroBatch};

use super::batch::{HostTensor, Inputs};
use crate::config::Config;
use crate::{UserError, refuse};

/// The images of a set, and the positions that the tower learns a side.
#[derive(Clone)]
pub struct SeenImages {
    pub store: Arc<ImageStore>,
    positions: usize,
    merge: usize,
}

impl SeenImages {
    /// `None` where no example has an image; refuses images with more patches a side than the model has positions.
    pub fn of(config: &Config, store: ImageStore) -> Result<Option<SeenImages>, UserError> {
        let decoder = config.model.as_decoder();
        let Some((vision, context)) = decoder.and_then(|d| Some((d.vision.as_ref()?, d.context))) else {
            return Ok(None);
        };
        let grids = (0..store.count() as u32).map(|number| store.get(number).grid);
        if let Some(side) = grids.map(|grid| grid.rows.max(grid.columns)).find(|side| *side > context) {
            refuse!(
                "an image is cut into {side} patches a side and `model.context` is {context}: raise it, or lower \
                 data.image_tokens"
            );
        }
        let (positions, merge) = (vision.positions, vision.merge);
        Ok((store.count() > 0).then(|| SeenImages { store: Arc::new(store), positions, merge }))
    }

    /// The patches of a micro-batch, decoded now, with which its tokens learn what of an image they are.
    pub fn patches(&self, laid_out: &mut MicroBatch) -> Result<Vec<u8>, DataError> {
        patches(&self.store, laid_out)
    }

    /// The inputs of the tower, of those that a plan has.
    pub fn tensors(
        &self,
        laid_out: &MicroBatch,
        patches: Vec<u8>,
        inputs: &Inputs,
    ) -> Vec<(&'static str, HostTensor)> {
        let grids = laid_out.images.iter().map(|image| image.grid);
        let TowerInputs { places, taps, tap_weights, image_start, image_len } =
            TowerInputs::new(grids, laid_out.image_room, self.merge, self.positions);
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
