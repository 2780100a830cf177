//! Reports of ranks about updates. No steady update waits for one: the reason to stop travels with the sums of the update, every
//! rank computes the token counts of all ranks itself, and times and warnings reach rank 0 later, several steps at a time.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::Trainer;
use crate::Failure;
use crate::run::events::{Event, GpuSample, RankTimes};
use crate::training::stragglers::{StepTimes, Stragglers};
use crate::training::update::ask_to_stop;

/// The most warnings about samples that contribute nothing to training.
const MAX_WARNINGS: u64 = 20;

/// Interval between two reports of a rank to rank 0; the first one is sent after the first step.
const REPORT_EVERY: Duration = Duration::from_millis(500);

/// A rank's report about its updates.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct RankReport {
    times: Vec<StepTimes>,
    /// The newest sample of its GPU, if it has one.
    gpu: Option<GpuSample>,
    /// Sentences about samples that could not be used.
    left_out: Vec<String>,
}

/// Reports of ranks, sent and received by this rank.
pub(super) struct Sharing {
    /// Values that this rank has not sent yet.
    unsent: RankReport,
    reported_at: Option<Instant>,
    /// Used on rank 0.
    stragglers: Stragglers,
    /// The newest GPU samples received, by rank.
    gpus: Vec<Option<GpuSample>>,
    /// Times of the newest step that all ranks have reported.
    newest: Option<RankTimes>,
}

impl Sharing {
    pub fn new(ranks: usize) -> Sharing {
        Sharing {
            unsent: RankReport::default(),
            reported_at: None,
            stragglers: Stragglers::new(ranks),
            gpus: vec![None; ranks],
            newest: None,
        }
    }

    /// Adds the times of an update of this rank to the next report.
    pub fn take(&mut self, times: StepTimes) {
        self.unsent.times.push(times);
    }

    /// Adds a sample of this rank's GPU to the next report.
    pub fn see(&mut self, gpu: Option<&GpuSample>) {
        if gpu.is_some() {
            self.unsent.gpu = gpu.cloned();
        }
    }
}

impl Trainer<'_, '_, '_> {
    /// Sends the reason to stop, if this rank has one, along with the next update, where there are other ranks.
    pub(super) fn pass_on_stop(&mut self) -> Result<(), Failure> {
        if self.ranks.are_many() {
            let asked = self.stop.asked(self.time_to_stop());
            ask_to_stop(self.session, asked)?;
            self.ranks.at(self.progress.step + 1, "training", 0);
            self.ranks.called("apply");
        }
        Ok(())
    }

    /// Adds an update to the next report: its times on this rank, where the host knows them, and sentences about its samples.
    pub(super) fn share(&mut self, times: Option<StepTimes>, left_out: Vec<String>) -> Result<(), Failure> {
        if !self.ranks.are_many() {
            return self.warn_of_left_out(&left_out);
        }
        self.sharing.unsent.times.extend(times);
        self.sharing.unsent.left_out.extend(left_out);
        let is_due = self.sharing.reported_at.is_none_or(|at| at.elapsed() >= REPORT_EVERY);
        match self.ranks.is_first() {
            true => {
                let reports = self.ranks.posts()?;
                let unsent = std::mem::take(&mut self.sharing.unsent);
                self.receive([(0, unsent)].into_iter().chain(reports))?;
            }
            false if is_due => {
                self.ranks.post(&std::mem::take(&mut self.sharing.unsent));
                self.sharing.reported_at = Some(Instant::now());
            }
            false => {}
        }
        Ok(())
    }

    /// The times of the newest step that all ranks have reported.
    pub(super) fn rank_times(&self) -> Option<RankTimes> {
        self.sharing.newest.clone()
    }

    /// Receives the remaining reports at the end of a run. Every rank calls this.
    pub(super) fn receive_remaining_reports(&mut self) -> Result<(), Failure> {
        if !self.ranks.are_many() {
            return Ok(());
        }
        let unsent = std::mem::take(&mut self.sharing.unsent);
        let rest = self.ranks.gather(&unsent)?;
        // A rank's posts arrive before its part of a collective call.
        let reports = self.ranks.posts()?;
        self.receive(reports.into_iter().chain(rest.into_iter().enumerate()))
    }

    /// Processes reports on rank 0.
    fn receive(&mut self, reports: impl Iterator<Item = (usize, RankReport)>) -> Result<(), Failure> {
        for (rank, RankReport { times, gpu, left_out }) in reports {
            self.sharing.stragglers.take(rank, &times);
            if gpu.is_some() {
                self.sharing.gpus[rank] = gpu;
            }
            self.warn_of_left_out(&left_out)?;
        }
        while let Some((times, slow)) = self.sharing.stragglers.next() {
            self.sharing.newest = Some(times);
            for slow in slow {
                let gpu = self.sharing.gpus[slow.rank].as_ref();
                let message = slow.sentence(&self.ranks.named(slow.rank), gpu);
                self.emit(Event::Warning { message })?;
            }
        }
        Ok(())
    }

    /// Warns of samples that contribute nothing to training, the first ones by name.
    fn warn_of_left_out(&mut self, left_out: &[String]) -> Result<(), Failure> {
        for words in left_out {
            self.samples_left_out += 1;
            let message = match self.samples_left_out {
                1..MAX_WARNINGS => format!("nothing is learned from a sample: {words}"),
                MAX_WARNINGS => {
                    format!(
                        "nothing is learned from {MAX_WARNINGS} samples so far, and no more of them are named"
                    )
                }
                _ => continue,
            };
            self.emit(Event::Warning { message })?;
        }
        Ok(())
    }
}
