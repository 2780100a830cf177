//! The messages between ranks about an update, before they make it.

use super::Trainer;
use crate::Failure;
use crate::ranks::Share;
use crate::run::events::{Event, RankTimes};
use crate::training::update::ask_to_stop;

/// An update as this rank computed it, and as all did.
pub(super) struct Work {
    pub own: Share,
    pub all: Share,
    /// Where there are several ranks.
    pub times: Option<RankTimes>,
}

/// Samples of which nothing is learned that are warned of, at most.
const WARNED: u64 = 20;

impl Trainer<'_, '_, '_> {
    /// Adds up what all ranks computed, and passes on why this one is asked to stop.
    pub(super) fn share(&mut self, own: Share) -> Result<Work, Failure> {
        if !self.ranks.are_many() {
            self.tell_left_out(&own.warnings)?;
            return Ok(Work { all: own.clone(), own, times: None });
        }
        let of_ranks = self.ranks.gather(&own)?;
        let times: Vec<f64> = of_ranks.iter().map(|share| share.compute_ms).collect();
        let mut all = of_ranks[0].clone();
        for share in &of_ranks[1..] {
            all.real_tokens += share.real_tokens;
            all.computed_tokens += share.computed_tokens;
            all.warnings.extend(share.warnings.iter().cloned());
        }
        self.tell_left_out(&all.warnings)?;
        let asked = self.stop.asked(self.time_to_stop());
        ask_to_stop(&mut self.session, asked)?;
        self.ranks.at(self.progress.step + 1, "training", 0);
        self.ranks.called("apply");
        Ok(Work { own, all, times: Some(RankTimes::of(&times)) })
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
