//! Checkpoints of a run: copies the state between steps, writes it in the background, and handles failures to write.

use std::path::PathBuf;
use std::time::Instant;

use flatout_waits::{self as waits, Unit};

use super::{Notice, Outcome, Progress, Trainer};
use crate::Failure;
use crate::metrics::goal::Metric;
use crate::run::checkpoint::{Best, Retention, State, Unsaved};
use crate::run::events::{Event, Status};
use crate::run::state::Snapshot;
use crate::run::writer::Writer;

/// Checkpoints that a run has saved or is saving.
pub(super) struct Saving {
    writer: Writer,
    /// Bytes of the state of all ranks.
    pub bytes: u64,
    /// The newest whole checkpoint.
    pub newest: Option<(u64, PathBuf)>,
    /// The whole checkpoint with the best evaluation, where that one is kept.
    pub best: Option<Best>,
    /// A checkpoint is due, and waits for an update that is not left out.
    pub is_due: bool,
    /// Why the newest attempt failed, if it did.
    pub trouble: Option<String>,
    /// The longest time a save took, copying and writing together.
    pub slowest_seconds: Option<f64>,
    copy_seconds: f64,
    /// Saves begun by this process: the same number on every rank.
    begun: u64,
    /// The warning that a save waited for the one before it was given.
    is_slow: bool,
}

impl Saving {
    pub fn new(writer: Writer, bytes: u64, newest: Option<(u64, PathBuf)>, best: Option<Best>) -> Saving {
        Saving {
            writer,
            bytes,
            newest,
            best,
            is_due: false,
            trouble: None,
            slowest_seconds: None,
            copy_seconds: 0.0,
            begun: 0,
            is_slow: false,
        }
    }
}

/// The shortest wait for an earlier save that gives a warning, once per run.
const LONG_WAIT_SECONDS: f64 = 1.0;

impl Trainer<'_, '_, '_> {
    /// Saves if the config says so or the evaluation is the best so far. A state whose last update was left out is not saved
    /// during training, because a run may have to roll back from it.
    pub(super) fn save_if_due(&mut self) -> Result<(), Failure> {
        let (step, every) = (self.progress.step, self.config.checkpoint.every);
        self.saving.is_due |= every > 0 && step.is_multiple_of(every);
        self.saving.is_due |= self.is_best_so_far()?;
        if !self.saving.is_due {
            return Ok(());
        }
        self.flush()?;
        if self.skips.in_a_row > 0 {
            return Ok(());
        }
        self.begin_save()
    }

    /// Saves the present state and waits until it is on disk.
    pub(super) fn save_now(&mut self) -> Result<(), Failure> {
        self.begin_save()?;
        self.collect_saved(true)?;
        let step = self.progress.step;
        match &self.saving.newest {
            Some((saved, _)) if *saved == step => Ok(()),
            newest => {
                let newest = match newest {
                    // A rank's failure is reported together with the newest whole checkpoint.
                    _ if self.ranks.are_many() => String::new(),
                    Some((saved, _)) => format!("; the newest whole checkpoint is that of step {saved}"),
                    None => "; there is no checkpoint".into(),
                };
                let why = self.saving.trouble.clone().unwrap_or_default();
                let sentence = format!("step {step} could not be saved: {why}{newest}");
                self.same_on_every_rank(Err(Failure::Environment(sentence)))
            }
        }
    }

    /// Copies the state and hands it to the writer, unless it was saved already. Waits for the previous save first.
    fn begin_save(&mut self) -> Result<(), Failure> {
        self.flush()?;
        self.saving.is_due = false;
        let began = Instant::now();
        self.collect_saved(true)?;
        let (step, waited) = (self.progress.step, began.elapsed().as_secs_f64());
        if waited > LONG_WAIT_SECONDS && !std::mem::replace(&mut self.saving.is_slow, true) {
            let message = format!(
                "step {step} waited {waited:.1} s for the checkpoint before it: the disk is slower than \
                 checkpoint.every asks for"
            );
            self.emit(Event::Warning { message })?;
        }
        let best = self.best_now();
        if self.saving.newest.as_ref().is_some_and(|(saved, _)| *saved == step) && best == self.saving.best {
            return Ok(());
        }
        let began = Instant::now();
        self.ended = None;
        let snapshot = self.snapshot()?;
        self.saving.copy_seconds = began.elapsed().as_secs_f64();
        self.saving.begun += 1;
        self.saving.writer.begin(snapshot, Retention::of(self.config, best, self.skips.in_a_row));
        Ok(())
    }

    fn snapshot(&mut self) -> Result<Snapshot, Failure> {
        let Progress { step, tokens, samples } = self.progress;
        let cursor = self.source.cursor();
        let counters = [
            ("tokens", tokens),
            ("samples", samples),
            ("skipped", self.skips.total),
            ("skipped_in_a_row", self.skips.in_a_row),
        ];
        let counters = counters.into_iter().chain(self.patience.counters());
        let counters = counters.map(|(name, count)| (name.to_string(), count)).collect();
        Snapshot::begin(self.session, State { step, cursor, counters }, self.saving.begun)
    }

    /// Whether the present state was evaluated and is the best so far. Ranks learn at different steps how the previous save
    /// ended, so rank 0's answer holds for all.
    fn is_best_so_far(&mut self) -> Result<bool, Failure> {
        let is_best = self.best_now() != self.saving.best;
        let is_evaluated = self.evaluated.is_some_and(|(step, _)| step == self.progress.step);
        match is_evaluated && self.config.keeps_best() {
            true => self.ranks.of_first(is_best),
            false => Ok(is_best),
        }
    }

    /// The best checkpoint, assuming that the present state is saved.
    fn best_now(&self) -> Option<Best> {
        let best = self.saving.best;
        if !self.config.keeps_best() {
            return best;
        }
        let metric = self.config.eval.metric;
        let now = self.evaluated.filter(|(step, loss)| *step == self.progress.step && loss.is_finite());
        let (Some((step, loss)), Some(score)) = (now, self.score) else { return best };
        match best.and_then(|best| best.value(metric)) {
            Some(before) if !metric.is_better(score, before) => best,
            _ => Some(Best { step, loss, score: (metric != Metric::Loss).then_some((metric, score)) }),
        }
    }

    /// Processes the result of a finished save; with `wait`, waits for the one under way. A failure to write is only a warning:
    /// the run continues, and the next save tries again.
    pub(super) fn collect_saved(&mut self, wait: bool) -> Result<(), Failure> {
        let (saving, ranks, step) = (&mut self.saving, self.ranks, self.progress.step);
        let written = match wait {
            true => {
                let _wait = waits::begin("saving the checkpoint", Unit::Nothing, None);
                saving.writer.wait(|done| ranks.at(step, "saving", done as usize))
            }
            false => saving.writer.finished(),
        };
        let Some(written) = written else { return Ok(()) };
        let step = written.step;
        let seconds = saving.copy_seconds + written.seconds;
        saving.slowest_seconds = Some(saving.slowest_seconds.unwrap_or(0.0).max(seconds));
        match written.result {
            Ok(saved) => {
                let path = saved.path.display().to_string();
                saving.newest = Some((step, saved.path));
                saving.best = written.kept.best;
                saving.trouble = None;
                self.skips.rollbacks = 0;
                self.emit(Event::Saved { step, path })?;
                if let Some(error) = saved.untidy {
                    let message = format!(
                        "step {step} is saved, but older checkpoints could not be tidied up: {error}"
                    );
                    self.emit(Event::Warning { message })?;
                }
            }
            Err(Unsaved::Unequal(why)) => {
                let failure = Failure::Environment(format!("step {step} is not saved: {why}"));
                // Ranks learn of this at different steps; rank 0 ends the run when it does.
                return if wait || self.ranks.is_first() {
                    self.same_on_every_rank(Err(failure))
                } else {
                    Ok(())
                };
            }
            Err(Unsaved::Failed(error)) => {
                saving.trouble = Some(error.to_string());
                let message = format!(
                    "step {step} could not be saved: {error}; the run goes on, and the next save tries again"
                );
                self.emit(Event::Warning { message })?;
            }
        }
        Ok(())
    }

    /// Ends the run early and saves its state if any update was made.
    pub(super) fn stopped(&mut self, reason: &'static str) -> Result<Outcome, Failure> {
        self.flush()?;
        if self.progress.step == 0 {
            return self.end(Status::Stopped);
        }
        let bytes = self.saving.bytes;
        (self.notice)(Notice::Saving { step: self.progress.step, bytes, signal: reason });
        self.save_now()?;
        self.end(Status::Stopped)
    }
}
