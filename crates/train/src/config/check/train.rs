//! Checks of the keys of `train`: the length of the run, the batch and how it is divided, regularisation.

use super::{at_least_one, at_most, within};
use crate::UserError;
use crate::config::Config;
use crate::refuse;

/// Row and token indices on the device are 32-bit.
const MAX_ROWS: usize = 1 << 24;

impl Config {
    pub(super) fn validate_train(&self) -> Result<(), UserError> {
        let train = &self.train;
        match (train.steps, train.epochs) {
            (None, None) => refuse!("neither `train.steps` nor `train.epochs` is given: give one of them"),
            (Some(_), Some(_)) => {
                refuse!("`train.steps` and `train.epochs` are both given: give one of them")
            }
            (Some(0), _) => refuse!("`train.steps` is 0 and must be at least 1"),
            (_, Some(0)) => refuse!("`train.epochs` is 0 and must be at least 1"),
            _ => {}
        }
        let batch = train.batch;
        at_least_one("train.batch", batch)?;
        at_most("train.batch", batch, MAX_ROWS)?;
        if let Some(accumulate) = train.accumulate {
            if train.micro_batch.given().is_some() {
                refuse!("`train.micro_batch` and `train.accumulate` are both given: give one of them");
            }
            at_least_one("train.accumulate", accumulate)?;
            if !batch.is_multiple_of(accumulate) {
                refuse!(
                    "`train.accumulate` = {accumulate} does not divide `train.batch` = {batch}: change one of them"
                );
            }
        }
        if let Some(rows) = train.micro_batch() {
            at_least_one("train.micro_batch", rows)?;
            // With several lanes, the last micro-batch of each is padded.
            let has_one_lane = train.lanes.given().is_none_or(|lanes| lanes == 1);
            if has_one_lane && !batch.is_multiple_of(rows) {
                refuse!(
                    "`train.micro_batch` = {rows} does not divide `train.batch` = {batch}: change one of them"
                );
            }
        }
        if let Some(lanes) = train.lanes.given() {
            at_least_one("train.lanes", lanes)?;
            if lanes > batch {
                refuse!(
                    "`train.lanes` = {lanes} is more than the rows of `train.batch` = {batch}: some lanes would have none"
                );
            }
        }
        let context = self.model.tokens();
        for (key, rows) in
            [("train.micro_batch", train.micro_batch()), ("eval.micro_batch", self.eval.micro_batch.given())]
        {
            if rows.is_some_and(|rows| rows.saturating_mul(context) > i32::MAX as usize) {
                refuse!(
                    "`{key}` rows of {context} tokens (`model.context`) are more tokens than 2147483647: make it smaller"
                );
            }
        }
        let of_images =
            [("label_smoothing", train.label_smoothing), ("mixup", train.mixup), ("cutmix", train.cutmix)];
        if let Some((key, _)) = of_images.iter().find(|(_, value)| *value != 0.0)
            && self.model.image_size().is_none()
        {
            refuse!(
                "`train.{key}` is given and `model.kind` is {}: only a model of images has it",
                self.model.kind()
            );
        }
        if !(0.0..1.0).contains(&train.label_smoothing) {
            refuse!(
                "`train.label_smoothing` is {} and must be at least 0 and below 1",
                train.label_smoothing
            );
        }
        if !(0.0..1.0).contains(&train.ema) {
            refuse!(
                "`train.ema` is {} and must be at least 0 and below 1: 0.9999 averages over about 10,000 updates",
                train.ema
            );
        }
        within("train.mixup", train.mixup, 0.0, 1000.0)?;
        within("train.cutmix", train.cutmix, 0.0, 1000.0)?;
        self.validate_groups()
    }
}
