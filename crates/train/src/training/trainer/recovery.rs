//! Non-finite updates: counts and explains them, and after too many in a row rolls back to a checkpoint or stops.

use flatout_ir::Class;

use super::{Progress, Trainer, patience};
use crate::Failure;
use crate::config::OnNonfinite;
use crate::run::checkpoint;
use crate::run::events::Event;
use crate::run::state::load;
use crate::tasks::batch::{Batch, Draw};
use crate::training::diagnosis::{diagnose, is_all_finite};

/// Counts of updates that were left out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Skips {
    /// Total since the run began.
    pub total: u64,
    /// Consecutive updates, up to the last one that was reported.
    pub in_a_row: u64,
    /// Rollbacks since the run last saved.
    pub rollbacks: u32,
}

/// Rolling back to the same checkpoint more often than this is pointless.
const MAX_ROLLBACKS: u32 = 3;

impl Trainer<'_, '_, '_> {
    /// Counts an update that was left out. The first of a row is diagnosed, which computes its rows again; later ones are
    /// reported whenever their number is a power of two.
    pub(super) fn left_out(&mut self, step: u64, parts: &[Batch]) -> Result<(), Failure> {
        self.skips.total += 1;
        self.skips.in_a_row += 1;
        let count = self.skips.in_a_row;
        if count == 1 {
            let draw = Draw { step: step - 1, ..self.draw };
            let found = diagnose(self.session, parts, draw)?;
            let all = self.ranks.gather(&found)?;
            // Reports the diagnosis of the first rank whose rows are not finite.
            let found = all.iter().find(|found| !is_all_finite(found)).unwrap_or(&all[0]);
            let message = format!("step {step} is not finite, so its update was left out: {found}");
            return self.emit(Event::Warning { message });
        }
        if count.is_power_of_two() {
            let message = format!("step {step} is not finite: {count} updates in a row were left out");
            return self.emit(Event::Warning { message });
        }
        Ok(())
    }

    /// After too many consecutive updates that were left out, does what the config says. Returns `true` if the run was rolled
    /// back.
    pub(super) fn recover(&mut self) -> Result<bool, Failure> {
        let recovered = self.go_back_or_stop();
        self.same_on_every_rank(recovered)
    }

    /// Returns a result that is the same on every rank. If it is a failure, only rank 0 returns it; the others end in `meet`.
    pub(super) fn same_on_every_rank<T>(&self, result: Result<T, Failure>) -> Result<T, Failure> {
        if result.is_err() && !self.ranks.is_first() {
            self.ranks.meet()?;
        }
        result
    }

    fn go_back_or_stop(&mut self) -> Result<bool, Failure> {
        let (most, how) = (self.config.train.max_skipped, self.config.train.on_nonfinite);
        if self.skips.in_a_row < most || how == OnNonfinite::Skip {
            return Ok(false);
        }
        // The update that is still in flight may be finite.
        self.flush()?;
        let skipped = self.skips.in_a_row;
        if skipped < most {
            return Ok(false);
        }
        let what = format!("step {}: {skipped} updates in a row were not finite", self.progress.step);
        let advice =
            "lower optimizer.lr, lengthen schedule.warmup_steps or look at the rows the warning names";
        if how == OnNonfinite::Stop {
            return Err(Failure::Environment(format!("{what}, and train.on_nonfinite is stop: {advice}")));
        }
        self.collect_saved(true)?;
        let is_sound = |state: &checkpoint::State| state.counters.get("skipped_in_a_row") == Some(&0);
        let folder = self.run.checkpoints_dir();
        let Some(whole) = checkpoint::latest_among(self.ranks, &folder, is_sound)?.whole else {
            return Err(Failure::Environment(format!(
                "{what}, and there is no checkpoint to go back to: {advice}"
            )));
        };
        if self.skips.rollbacks == MAX_ROLLBACKS {
            return Err(Failure::Environment(format!(
                "{what}, and going back to step {} did not help {MAX_ROLLBACKS} times: {advice}",
                whole.step
            )));
        }
        self.go_back(whole, &what)?;
        Ok(true)
    }

    /// Restores the state of a checkpoint. The data continues from where it is now: the rows since the checkpoint, among them the
    /// offending ones, are not read again.
    fn go_back(&mut self, whole: checkpoint::Whole, what: &str) -> Result<(), Failure> {
        let (state, file) = checkpoint::open(&whole.path).map_err(Failure::io(whole.path.display()))?;
        load(self.session, &file, Class::is_saved)?;
        self.ended = None;
        let folder = self.run.checkpoints_dir();
        self.ranks.meet()?;
        if self.ranks.is_first() {
            checkpoint::forget_after(&folder, whole.step)
                .map_err(Failure::io("removing newer checkpoints"))?;
        }
        let row = self.source.sample();
        let message = format!("{what}: going back to step {} and on with row {row}", whole.step);
        self.emit(Event::Warning { message })?;
        self.emit(Event::Resume { step: whole.step })?;
        self.progress = Progress::of(&state)?;
        self.patience = patience(&state);
        self.skips.in_a_row = 0;
        self.skips.rollbacks += 1;
        self.evaluated = self.evaluated.filter(|(step, _)| *step <= whole.step);
        // Rank 0 has just removed the newer checkpoints.
        self.saving.best = self.ranks.of_first(checkpoint::best(&folder))?;
        self.saving.newest = Some((whole.step, whole.path));
        self.saving.is_due = false;
        Ok(())
    }
}
