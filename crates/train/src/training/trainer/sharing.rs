//! The words of ranks about updates. A steady update has none that anyone waits for: why a rank is asked to stop goes with the sums of
//! the update, tokens of all ranks are known to each of them, and times and warnings reach rank 0 late, some steps at a time.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::Trainer;
use crate::Failure;
use crate::run::events::{Event, GpuSample, RankTimes};
use crate::training::stragglers::{StepTimes, Stragglers};
use crate::training::update::ask_to_stop;

/// Samples of which nothing is learned that are warned of, at most.
const WARNED: u64 = 20;

/// Between two messages of a rank to rank 0; the first comes after the first step.
const TELL_EVERY: Duration = Duration::from_millis(500);

/// A rank's words about its updates.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Told {
    times: Vec<StepTimes>,
    /// The newest sample of its GPU, where it has one.
    gpu: Option<GpuSample>,
    /// Sentences about samples that could not be used.
    left_out: Vec<String>,
}

/// The words of ranks, as this one has them.
pub(super) struct Sharing {
    /// Not told yet.
    own: Told,
    told_at: Option<Instant>,
    /// Of rank 0.
    stragglers: Stragglers,
    /// The newest samples of GPUs that ranks have told of, by rank.
    gpus: Vec<Option<GpuSample>>,
    /// Of the newest step that all ranks have told of.
    newest: Option<RankTimes>,
}

impl Sharing {
    pub fn new(ranks: usize) -> Sharing {
        Sharing {
            own: Told::default(),
            told_at: None,
            stragglers: Stragglers::new(ranks),
            gpus: vec![None; ranks],
            newest: None,
        }
    }

    /// Takes up the times of an update of this rank, which are told with the next.
    pub fn take(&mut self, times: StepTimes) {
        self.own.times.push(times);
    }

    /// Takes up a sample of this rank's GPU.
    pub fn see(&mut self, gpu: Option<&GpuSample>) {
        if gpu.is_some() {
            self.own.gpu = gpu.cloned();
        }
    }
}

impl Trainer<'_, '_, '_> {
    /// Passes on with the next update why this rank is asked to stop, where there are others.
    pub(super) fn pass_on_stop(&mut self) -> Result<(), Failure> {
        if self.ranks.are_many() {
            let asked = self.stop.asked(self.time_to_stop());
            ask_to_stop(self.session, asked)?;
            self.ranks.at(self.progress.step + 1, "training", 0);
            self.ranks.called("apply");
        }
        Ok(())
    }

    /// Takes up an update that was made: its times on this rank, where the host knows them, and sentences about its samples.
    pub(super) fn share(&mut self, times: Option<StepTimes>, left_out: Vec<String>) -> Result<(), Failure> {
        if !self.ranks.are_many() {
            return self.tell_left_out(&left_out);
        }
        self.sharing.own.times.extend(times);
        self.sharing.own.left_out.extend(left_out);
        let is_due = self.sharing.told_at.is_none_or(|at| at.elapsed() >= TELL_EVERY);
        match self.ranks.is_first() {
            true => {
                let told = self.ranks.posts()?;
                let own = std::mem::take(&mut self.sharing.own);
                self.hear([(0, own)].into_iter().chain(told))?;
            }
            false if is_due => {
                self.ranks.post(&std::mem::take(&mut self.sharing.own));
                self.sharing.told_at = Some(Instant::now());
            }
            false => {}
        }
        Ok(())
    }

    /// The times of the newest step that all ranks have told of.
    pub(super) fn rank_times(&self) -> Option<RankTimes> {
        self.sharing.newest.clone()
    }

    /// Hears what is left untold at the end of a run. Every rank calls this.
    pub(super) fn hear_the_rest(&mut self) -> Result<(), Failure> {
        if !self.ranks.are_many() {
            return Ok(());
        }
        let own = std::mem::take(&mut self.sharing.own);
        let rest = self.ranks.gather(&own)?;
        // Posts of a rank come before its part of a call.
        let told = self.ranks.posts()?;
        self.hear(told.into_iter().chain(rest.into_iter().enumerate()))
    }

    /// Takes in what ranks told, on rank 0.
    fn hear(&mut self, told: impl Iterator<Item = (usize, Told)>) -> Result<(), Failure> {
        for (rank, Told { times, gpu, left_out }) in told {
            self.sharing.stragglers.take(rank, &times);
            if gpu.is_some() {
                self.sharing.gpus[rank] = gpu;
            }
            self.tell_left_out(&left_out)?;
        }
        while let Some((times, slow)) = self.sharing.stragglers.next() {
            self.sharing.newest = Some(times);
            for slow in slow {
                let gpu = self.sharing.gpus[slow.rank].as_ref();
                let message = slow.sentence(&self.ranks.named(slow.rank), gpu);
                self.say(Event::Warning { message })?;
            }
        }
        Ok(())
    }

    /// Warns of samples of which nothing is learned, the first ones by name.
    fn tell_left_out(&mut self, left_out: &[String]) -> Result<(), Failure> {
        for words in left_out {
            self.samples_left_out += 1;
            let message = match self.samples_left_out {
                1..WARNED => format!("nothing is learned from a sample: {words}"),
                WARNED => {
                    format!("nothing is learned from {WARNED} samples so far, and no more of them are named")
                }
                _ => continue,
            };
            self.say(Event::Warning { message })?;
        }
        Ok(())
    }
}
