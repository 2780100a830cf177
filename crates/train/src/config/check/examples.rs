//! Checks of the keys of tasks that learn from examples: texts, images beside texts, and frames of videos.

use flatout_data::examples::MOST_FRAMES;

use super::{at_least_one, at_most};
use crate::UserError;
use crate::config::{Config, Data, Sight, Task, Unit};
use crate::refuse;
use crate::switches::Choose;

/// Tokens of an image; no context is as long.
const MAX_IMAGE_TOKENS: usize = 1 << 20;

impl Config {
    /// Checks the keys of tasks other than text.
    pub(super) fn validate_examples(&self) -> Result<(), UserError> {
        let data = &self.data;
        let toml = |data| toml::Value::try_from(data).expect("a section has a TOML form");
        let (written, defaults) = (toml(data), toml(&Data::default()));
        for (key, of) in Task::own_keys() {
            if written.get(key) != defaults.get(key) && !self.reads(key) {
                return Err(UserError(self.unread(key, of)));
            }
        }
        if data.task.unit() == Unit::Documents {
            return Ok(());
        }
        if !data.mix.0.is_empty() && self.sight() != Some(Sight::Frames) {
            refuse!(
                "`data.mix` is for texts and for samples with frames, and `data.task` is {}: list the files in data.path",
                data.task
            );
        }
        let context = self.model.tokens();
        if let Some(most) = data.max_tokens
            && !(2..=context).contains(&most)
        {
            refuse!("`data.max_tokens` is {most} and must be from 2 to `model.context` = {context}");
        }
        if let Some(date) = &data.date
            && flatout_data::examples::Date::parse(date).is_none()
        {
            refuse!("`data.date` is {date}, which is not a date: write it as 2025-01-31");
        }
        self.validate_sight()?;
        self.validate_frames()?;
        self.validate_views()?;
        at_least_one("data.max_pixels", data.max_pixels as usize)?;
        at_least_one("data.synthetic_rows", data.synthetic_rows as usize)
    }

    /// Checks the keys of images beside texts and of the answers about them.
    fn validate_sight(&self) -> Result<(), UserError> {
        let data = &self.data;
        if let Some([least, most]) = data.image_tokens
            && !(1 <= least && least <= most && most <= MAX_IMAGE_TOKENS)
        {
            refuse!(
                "`data.image_tokens` is [{least}, {most}] and not the fewest and the most tokens of an image, in order, from 1 to \
                 {MAX_IMAGE_TOKENS}"
            );
        }
        if data.vision_cache.as_deref() == Some("") {
            refuse!("`data.vision_cache` is empty: name a folder");
        }
        if data.vision_cache.is_some() && self.switches.data.visual_tokens.percent() < 100 {
            refuse!(
                "`visual_tokens` chooses the tokens of an image by its pixels, and with `data.vision_cache` none are decoded: \
                 leave one of them out"
            );
        }
        if let Some([open, close]) = &data.answer_marks
            && (open.is_empty() || close.is_empty() || open == close)
        {
            refuse!("`data.answer_marks` must be two different texts, such as [\"<ANS>\", \"</ANS>\"]");
        }
        Ok(())
    }

    /// Checks that frames and text of a sample fit into the context, and how examples are kept together.
    fn validate_frames(&self) -> Result<(), UserError> {
        let (data, context) = (&self.data, self.model.tokens());
        if self.sight() != Some(Sight::Frames) {
            return Ok(());
        }
        at_least_one("data.still_frames", data.still_frames)?;
        at_most("data.still_frames", data.still_frames, MOST_FRAMES)?;
        let text = data.max_tokens.unwrap_or(2);
        if text + MOST_FRAMES > context {
            refuse!(
                "a sample has up to {MOST_FRAMES} frames, a token each, and up to {text} tokens of text (`data.max_tokens`), and \
                 `model.context` is {context}: raise it, or lower data.max_tokens"
            );
        }
        let keeps_together = self.switches.data.shared_prefix == Choose::On && self.together() == 1;
        if keeps_together && !data.mix.0.is_empty() {
            refuse!(
                "`shared_prefix=on` keeps examples with the same beginning together, and `data.mix` draws examples by shares: leave \
                 one out"
            );
        }
        Ok(())
    }
}
