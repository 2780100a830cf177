//! Checks of a config's values against their bounds and against one another. The checks of a section of its own file are there
//! (`optimizer.rs`, `adapter.rs`, ...); the others are here by subject.

mod augmentation;
mod data;
mod examples;
mod lengths;
mod new_tokens;
mod schedule;
#[cfg(test)]
pub(super) mod tests;
mod track;
mod train;
mod unread;

pub(super) use unread::SetKey;

use flatout_models::decoder::DecoderConfig;

use super::{AdapterKind, Config, SourceKind};
use crate::UserError;
use crate::refuse;

/// Upper bounds beyond any use: batches prepared ahead, and threads.
const MAX_PREFETCH: usize = 1000;
const MAX_WORKERS: usize = 1024;

impl Config {
    /// Checks all values; the error is one sentence that names the keys.
    pub fn validate(&self) -> Result<(), UserError> {
        self.model.validate()?;
        self.validate_data()?;
        self.validate_changes()?;
        self.validate_train()?;
        self.validate_preference()?;
        self.adapter.validate()?;
        self.validate_lengths_of_rows()?;
        self.validate_optimizer()?;
        self.validate_schedule()?;
        self.validate_classes()?;
        self.validate_samples()?;
        at_least_one("checkpoint.keep", self.checkpoint.keep)?;
        if self.checkpoint.best && self.eval.rows == 0 {
            refuse!(
                "`checkpoint.best` is true but `eval.rows` is 0: without evaluation no checkpoint is the best"
            );
        }
        at_least_one("train.max_skipped", self.train.max_skipped as usize)?;
        within("log.spike", self.log.spike, 0.0, f64::MAX)?;
        at_least_one("loader.prefetch", self.loader.prefetch)?;
        at_most("loader.prefetch", self.loader.prefetch, MAX_PREFETCH)?;
        at_most("loader.workers", self.loader.workers.given().unwrap_or(0), MAX_WORKERS)?;
        self.validate_track()?;
        at_least_one("log.every", self.log.every as usize)
    }

    /// Checks that the run has data to train on. Separate from `validate`, because plans and listings need no data.
    pub fn validate_for_training(&self) -> Result<(), UserError> {
        self.validate_head_and_data()?;
        // Only checked here: the resolved config of a run that three ranks began has three lanes.
        if let Some(lanes) = self.train.lanes.given().filter(|lanes| !lanes.is_power_of_two()) {
            refuse!("`train.lanes` = {lanes} is not a power of two: give 1, 2, 4, 8 ...");
        }
        if self.data.source() != SourceKind::Synthetic && !self.data.has_files() {
            refuse!(
                "`data.path` is not given, and {} trains on text: name a text file or a folder of them, as in \
                 data.path=book.txt",
                if self.recipe.is_empty() { "this recipe" } else { &self.recipe }
            );
        }
        Ok(())
    }

    /// DoRA divides by the lengths of rows, which must not be zero.
    fn validate_lengths_of_rows(&self) -> Result<(), UserError> {
        let is_zero = |model: &DecoderConfig| model.init_residual == 0.0 && model.from.is_none();
        if self.adapter.kind == AdapterKind::Dora && self.model.as_decoder().is_some_and(is_zero) {
            refuse!(
                "`adapter.kind=dora` divides by the lengths of rows, and with `model.init_residual=0` some rows are zero at first: \
                 give model.from or adapter.kind=lora"
            );
        }
        Ok(())
    }
}

pub(super) fn at_least_one(key: &str, value: usize) -> Result<(), UserError> {
    if value == 0 {
        refuse!("`{key}` is 0 and must be at least 1");
    }
    Ok(())
}

pub(super) fn at_most(key: &str, value: usize, most: usize) -> Result<(), UserError> {
    if value > most {
        refuse!("`{key}` is {value} and may be {most} at most");
    }
    Ok(())
}

pub(super) fn within(key: &str, value: f64, least: f64, most: f64) -> Result<(), UserError> {
    if !(least..=most).contains(&value) {
        let bounds =
            if most == f64::MAX { format!("at least {least}") } else { format!("from {least} to {most}") };
        refuse!("`{key}` is {value} and must be {bounds}");
    }
    Ok(())
}
