//! Checks of the keys of `schedule`.

use flatout_models::decoder::Attention;

use super::within;
use crate::UserError;
use crate::config::{Config, ScheduleName, Task};
use crate::refuse;

impl Config {
    fn validate_windows(&self) -> Result<(), UserError> {
        const MOST: usize = 16;
        let windows = &self.schedule.windows;
        if windows.is_empty() {
            return Ok(());
        }
        if windows.len() > MOST {
            refuse!(
                "`schedule.windows` has {} windows and may have {MOST} at most: every one has plans of its own",
                windows.len()
            );
        }
        if windows.contains(&0) {
            refuse!(
                "`schedule.windows` has a window of 0 tokens: a token sees at least itself, so give 1 or more"
            );
        }
        let sees_back = self.model.as_decoder().is_some_and(|model| model.attention == Attention::Causal);
        if !sees_back || self.model.has_tower() {
            refuse!("`schedule.windows` is for decoders of text with causal attention: leave it out");
        }
        let has_lengths = self.data.mean_tokens.is_some() || !self.data.lengths.is_empty();
        if self.data.task != Task::Text || has_lengths {
            refuse!(
                "`schedule.windows` is for rows of one length, which data.task=text without lengths has: leave it out"
            );
        }
        Ok(())
    }

    pub(super) fn validate_schedule(&self) -> Result<(), UserError> {
        let schedule = &self.schedule;
        within("schedule.final_ratio", schedule.final_ratio, 0.0, 1.0)?;
        within("schedule.warmup_share", schedule.warmup_share.unwrap_or(0.0), 0.0, 1.0)?;
        if schedule.decay_steps.is_some() && schedule.name != ScheduleName::Wsd {
            refuse!(
                "`schedule.decay_steps` is given but the schedule is {}: only wsd has it; drop it with \
                 schedule.decay_steps=none",
                schedule.name
            );
        }
        self.validate_windows()?;
        let converges = schedule.name == ScheduleName::Converge;
        match schedule.final_lr {
            None if converges => {
                refuse!(
                    "`schedule.name` is converge and `schedule.final_lr` is missing: give the learning rate that all groups end at"
                );
            }
            Some(_) if !converges => {
                refuse!(
                    "`schedule.final_lr` is given but the schedule is {}: only converge has it; the others end at \
                     `schedule.final_ratio` of their peak, or at `final_lr` of a group; drop it with schedule.final_lr=none",
                    schedule.name
                );
            }
            given => within("schedule.final_lr", given.unwrap_or(0.0), 0.0, f64::MAX)?,
        }
        let Some(horizon) = schedule.horizon_steps.or(self.train.steps) else { return Ok(()) };
        if horizon == 0 {
            refuse!("`schedule.horizon_steps` is 0 and must be at least 1");
        }
        let whose = if schedule.horizon_steps.is_some() { "schedule.horizon_steps" } else { "train.steps" };
        let warmup = schedule.warmup_steps;
        if warmup > horizon {
            refuse!("`schedule.warmup_steps` = {warmup} is more than `{whose}` = {horizon}: lower it");
        }
        if let Some(decay) = schedule.decay_steps
            && warmup.saturating_add(decay) > horizon
        {
            refuse!(
                "`schedule.warmup_steps` = {warmup} and `schedule.decay_steps` = {decay} are more than `{whose}` = \
                 {horizon}: lower one of them"
            );
        }
        Ok(())
    }
}
