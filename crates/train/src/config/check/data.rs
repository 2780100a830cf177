//! Checks of the keys of `data` that say which files are read and which are held out, and of mixtures.

use super::{at_least_one, within};
use crate::UserError;
use crate::config::{Config, MixPart, Paths, SourceKind, Unit};
use crate::refuse;

/// Upper bound on the parts of a mixture, beyond any use.
const MAX_PARTS: usize = 1000;
/// Weights of a mixture; within these bounds its shares are computed without loss of precision.
const WEIGHTS: std::ops::RangeInclusive<f64> = 1e-9..=1e9;

impl Config {
    pub(super) fn validate_data(&self) -> Result<(), UserError> {
        let data = &self.data;
        within("data.held_out", data.held_out, 0.0, 1.0)?;
        if data.held_out == 1.0 {
            refuse!("`data.held_out` is 1, which leaves nothing to train on");
        }
        if data.held_out == 0.0 && data.held_out_path.is_none() && self.eval.rows > 0 {
            refuse!(
                "`data.held_out` is 0, so there is nothing to evaluate on: raise it, name files with \
                 data.held_out_path, or give eval.rows=0"
            );
        }
        let names_nothing = |paths: &Paths| paths.0.is_empty() || paths.0.iter().any(String::is_empty);
        if data.path.as_ref().is_some_and(names_nothing) {
            refuse!("`data.path` is empty: name a file");
        }
        self.validate_held_out_path()?;
        if data.tokenizer.as_deref() == Some("") {
            refuse!("`data.tokenizer` is empty: name a file");
        }
        for (key, given) in [
            ("path", data.path.is_some()),
            ("mix", !data.mix.0.is_empty()),
            ("tokenizer", data.tokenizer.is_some()),
            ("new_tokens", !data.new_tokens.is_empty()),
        ] {
            let is_read = ["tokenizer", "new_tokens"].contains(&key) && data.task.unit() != Unit::Documents;
            if given && data.source() == SourceKind::Synthetic && !is_read {
                refuse!(
                    "`data.{key}` is given but the synthetic source reads no file: give data.source=text"
                );
            }
        }
        self.validate_new_tokens()?;
        if data.path.is_some() && !data.mix.0.is_empty() {
            refuse!("`data.path` and `data.mix` are both given: give one of them");
        }
        if data.mix.0.len() > MAX_PARTS {
            refuse!("`data.mix` has {} tables and may have {MAX_PARTS} at most", data.mix.0.len());
        }
        for MixPart { path, weight } in &data.mix.0 {
            if names_nothing(path) {
                refuse!("`data.mix` has a table whose `path` is empty: name a file");
            }
            if !weight.is_finite() || *weight <= 0.0 {
                refuse!("`data.mix` gives {path} the weight {weight}, which must be a number above 0");
            }
            if !WEIGHTS.contains(weight) {
                let (least, most) = (WEIGHTS.start(), WEIGHTS.end());
                refuse!(
                    "`data.mix` gives {path} the weight {weight:e}, which must be from {least:e} to {most:e}"
                );
            }
        }
        self.validate_examples()?;
        within("data.stream_cache_gb", data.stream_cache_gb, 0.0, 1e6)?;
        at_least_one("data.max_document_bytes", data.max_document_bytes)?;
        self.validate_lengths()?;
        let kind = self.model.kind();
        if self.model.as_decoder().is_none() {
            for (key, given) in
                [("document_mask", data.document_mask), ("mean_tokens", data.mean_tokens.is_some())]
            {
                if given {
                    refuse!("`data.{key}` is given and `model.kind` is {kind}: only a decoder has it");
                }
            }
        }
        if let Some(vocab) =
            self.model.vocab().filter(|vocab| data.eos.is_some_and(|eos| eos >= *vocab as u64))
        {
            refuse!("`data.eos` must be below `model.vocab` = {vocab}: lower it");
        }
        Ok(())
    }

    /// Checks `data.held_out_path`, which excludes every other way to hold out data.
    fn validate_held_out_path(&self) -> Result<(), UserError> {
        let data = &self.data;
        let Some(paths) = &data.held_out_path else { return Ok(()) };
        if paths.0.is_empty() || paths.0.iter().any(String::is_empty) {
            refuse!("`data.held_out_path` is empty: name a file");
        }
        if paths.0.iter().any(|path| path == "-") {
            refuse!("`data.held_out_path` is standard input, which only data.path may be: name a file");
        }
        if self.data.source() == SourceKind::Synthetic {
            refuse!(
                "`data.held_out_path` is given and the training data is synthetic: give data.path, or leave it out"
            );
        }
        if self.train.folds.is_some() {
            refuse!(
                "`train.folds` and `data.held_out_path` are both given: folds are parts of data.path; leave one out"
            );
        }
        if data.group.is_some() {
            refuse!(
                "`data.group` and `data.held_out_path` are both given, and files divide the rows already: leave one out"
            );
        }
        Ok(())
    }
}
