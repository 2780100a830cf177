//! Checks of the lengths of examples, of the trees that share prefixes, and of the images in them.

use flatout_data::Tree;

use crate::UserError;
use crate::config::{Config, SourceKind, Unit};
use crate::refuse;

impl Config {
    pub(super) fn validate_lengths(&self) -> Result<(), UserError> {
        let (data, context) = (&self.data, self.model.tokens());
        if let Some(mean) = data.mean_tokens {
            if data.source() != SourceKind::Synthetic {
                refuse!(
                    "`data.mean_tokens` is for synthetic examples, and data.path is given: leave one out"
                );
            }
            if data.task.unit() != Unit::Documents {
                refuse!(
                    "`data.mean_tokens` makes synthetic examples of text, and `data.task` is {}: leave one out",
                    data.task
                );
            }
            if !(2..=context).contains(&mean) {
                refuse!("`data.mean_tokens` is {mean} and must be from 2 to `model.context` = {context}");
            }
        }
        let is_text = data.task.unit() == Unit::Documents && self.model.classes().is_none();
        if !data.lengths.is_empty() && data.mean_tokens.is_none() && is_text {
            refuse!("`data.lengths` is for examples, and rows of text are equally long: leave it out");
        }
        if let Some(len) = data.lengths.iter().find(|len| !(1..=context).contains(*len)) {
            refuse!("`data.lengths` has {len}, and each must be from 1 to `model.context` = {context}");
        }
        for (key, counts) in [("images", &data.images), ("patches", &data.patches)] {
            if !counts.is_empty() && counts.len() != data.lengths.len() {
                refuse!(
                    "`data.{key}` has {} numbers and `data.lengths` {}: give one for each share of the examples",
                    counts.len(),
                    data.lengths.len()
                );
            }
        }
        if Tree::list(&data.trees, &[]).is_some() && Tree::list(&data.trees, &data.tree_images).is_none() {
            refuse!(
                "`data.tree_images` must have four numbers for each tree of `data.trees`: images and patches of the prefix, \
                 images and patches after it"
            );
        }
        if Tree::list(&data.trees, &[]).is_none() {
            refuse!(
                "`data.trees` must have four numbers per tree: examples, tokens of their prefix, tokens after it (at least one per \
                 example), and how many of these are trained on"
            );
        }
        Ok(())
    }
}
