//! Checks of the keys that crop, augment and scale images.

use super::{at_least_one, at_most, within};
use crate::UserError;
use crate::config::{Augmentation, Config, Task};
use crate::refuse;

/// Upper bound on the operations of RandAugment, beyond any use.
const MOST_OPERATIONS: usize = 100;

impl Config {
    /// Checks the keys of crops and augmentation.
    pub(super) fn validate_views(&self) -> Result<(), UserError> {
        let data = &self.data;
        for (key, [least, most], bound) in [
            ("crop_scale", data.crop_scale, 1.0),
            ("crop_ratio", data.crop_ratio, 100.0),
            ("erase_area", data.erase_area, 1.0),
            ("erase_ratio", data.erase_ratio, 100.0),
        ] {
            if !(least > 0.0 && least <= most && most <= bound) {
                refuse!(
                    "`data.{key}` is [{least}, {most}] and not two numbers above 0, in order, up to {bound}"
                );
            }
        }
        let is_set =
            |extents: &[usize]| extents.len() == 3 && extents.iter().all(|n| (1..1 << 31).contains(n));
        if !data.decoded.is_empty() && !is_set(&data.decoded) {
            refuse!(
                "`data.decoded` is {:?} and not the number of images, their rows and their columns",
                data.decoded
            );
        }
        within("data.flip", data.flip, 0.0, 1.0)?;
        at_least_one("data.augment_ops", data.augment_ops)?;
        at_most("data.augment_ops", data.augment_ops, MOST_OPERATIONS)?;
        within("data.augment_magnitude", data.augment_magnitude, 0.0, 10.0)?;
        within("data.augment_noise", data.augment_noise, 0.0, 10.0)?;
        within("data.augment_probability", data.augment_probability, 0.0, 1.0)?;
        within("data.erase", data.erase, 0.0, 1.0)?;
        within("data.centre_crop", data.centre_crop, 0.01, 1.0)?;
        self.validate_resize()
    }

    /// Refuses augmentation for tasks other than images.
    pub(super) fn validate_changes(&self) -> Result<(), UserError> {
        let data = &self.data;
        let is_changed = data.augment != Augmentation::None || data.erase > 0.0;
        if is_changed && data.task != Task::Images {
            refuse!(
                "`data.augment` and `data.erase` change the images of data.task=images, and `data.task` is {}: leave them out",
                data.task
            );
        }
        Ok(())
    }

    /// Checks that the model's images fit into the size that images are scaled to.
    fn validate_resize(&self) -> Result<(), UserError> {
        let resize = &self.data.resize;
        let Some([height, width]) = self.model.image_sides() else { return Ok(()) };
        let fits = match resize[..] {
            [] => true,
            [shorter] => shorter >= height.max(width),
            [rows, columns] => rows >= height && columns >= width,
            _ => refuse!("`data.resize` is {resize:?} and not the shorter side, or rows and columns"),
        };
        if !fits || resize.iter().any(|side| *side > 1 << 16) {
            refuse!(
                "`data.resize` is {resize:?}, and the model's images of {height} x {width} pixels are cut out of it: give at \
                 least as many, and at most 65536"
            );
        }
        Ok(())
    }
}
