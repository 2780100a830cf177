//! Updates that are not finite: counted, explained, and too many in a row answered by going back or stopping.

use flatout_ir::Class;

use super::{Progress, Trainer, patience};
use crate::Failure;
use crate::config::OnNonfinite;
use crate::run::checkpoint;
use crate::run::events::Event;
use crate::run::state::load;
use crate::tasks::batch::{Batch, Draw};
use crate::training::diagnosis::{diagnose, is_all_finite};

/// Updates that were left out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Skips {
    /// Since the run began.
    pub total: u64,
    /// Up to the last update that was reported.
    pub in_a_row: u64,
    /// How often the run went back since it last saved.
    pub rollbacks: u32,
}

/// Going back to one checkpoint more often than this changes nothing.
const MAX_ROLLBACKS: u32 = 3;

impl Trainer<'_, '_, '_> {
    /// Counts an update that was left out. The first of a row is looked into, which computes its rows again; later ones
    /// are told at every doubling.
    pub(super) fn left_out(&mut self, step: u64, parts: &[Batch]) -> Result<(), Failure> {
        self.skips.total += 1;
        self.skips.in_a_row += 1;
        let count = self.skips.in_a_row;
        if count == 1 {
            let draw = Draw { step: step - 1, ..self.draw };
            let found = diagnose(self.session, parts, draw)?;
            let all = self.ranks.gather(&found)?;
            // Of the first rank whose rows are not finite.
            let found = all.iter().find(|found| !is_all_finite(found)).unwrap_or(&all[0]);
            let message = format!("step {step} is not finite, so its update was left out: {found}");
            return self.say(Event::Warning { message });
        }
        if count.is_power_of_two() {
            let message = format!("step {step} is not finite: {count} updates in a row were left out");
            return self.say(Event::Warning { message });
        }
        Ok(())
    }

    /// After too many updates in a row that were left out, does what the config says. `true` where the run went back.
    pub(super) fn recover(&mut self) -> Result<bool, Failure> {
        let recovered = self.go_back_or_stop();
        self.alike(recovered)
    }

    /// A result that is the same on every rank. Where it is a failure, rank 0 says it, which ends the others here.
    pub(super) fn alike<T>(&self, result: Result<T, Failure>) -> Result<T, Failure> {
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
        // The update that is still on its way may be well.
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

    /// Takes up the state of a checkpoint. The data goes on where it is: rows between the checkpoint and here, the
    /// offending ones among them, are not read again.
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
        self.say(Event::Warning { message })?;
        self.say(Event::Resume { step: whole.step })?;
        self.progress = Progress::of(&state)?;
        self.patience = patience(&state);
        self.skips.in_a_row = 0;
        self.skips.rollbacks += 1;
        self.evaluated = self.evaluated.filter(|(step, _)| *step <= whole.step);
        // Rank 0 has just removed what was newer.
        self.saving.best = self.ranks.of_first(checkpoint::best(&folder))?;
        self.saving.newest = Some((whole.step, whole.path));
        self.saving.is_due = false;
        Ok(())
    }
}
