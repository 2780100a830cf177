//! Visits that all ranks make together: rank 0 chooses the next one, every rank makes it, and its time is the slowest rank's.
//!
//! The next visit may depend on clocks and on earlier measurements, which differ between ranks, so rank 0 alone decides and the
//! others follow until they are dismissed. If a rank cannot open a configuration, all ranks learn of the failure and continue
//! with the next one; a later failure, when ranks wait for each other's exchanges, ends all of them.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::visit::{self, Visit, guarded};
use super::{Stage, Timed};
use flatout_train::Failure;
use flatout_train::config::Config;
use flatout_train::ranks::message;

/// A visit as rank 0 broadcasts it, with configs as text.
#[derive(Serialize, Deserialize)]
struct Order {
    config: String,
    beside: Option<String>,
    warmup: usize,
    steps: usize,
}

impl Stage {
    /// Opens a configuration, makes its first update and `warmup` more, and times `steps`.
    pub fn visit(&self, config: &Config, warmup: usize, steps: usize) -> Result<Timed, Failure> {
        self.visit_on_all(&Visit { config, beside: None, warmup, steps })
    }

    /// The same with the base open as well and its updates interleaved with the timed ones.
    pub fn visit_interleaved(
        &self,
        base: &Config,
        config: &Config,
        warmup: usize,
        steps: usize,
    ) -> Result<Timed, Failure> {
        self.visit_on_all(&Visit { config, beside: Some(base), warmup, steps })
    }

    /// Makes a visit on all ranks: broadcasts it to those that follow this one and makes it here.
    fn visit_on_all(&self, visit: &Visit<'_>) -> Result<Timed, Failure> {
        if self.ranks.are_many() {
            let order = Order {
                config: visit.config.to_toml(),
                beside: visit.beside.map(Config::to_toml),
                warmup: visit.warmup,
                steps: visit.steps,
            };
            self.ranks.of_first(Some(order))?;
        }
        self.visit_combined(visit)
    }

    /// Makes the visits that rank 0 broadcasts, until it dismisses the others. Rank 0 reports the outcomes.
    pub fn follow(&self) -> Result<(), Failure> {
        while let Some(order) = self.ranks.of_first(None::<Order>)? {
            let Order { config, beside, warmup, steps } = order;
            let read = |text: String| Config::parse(&text, "the settings of rank 0");
            let (config, beside) = self.in_step(|| Ok((read(config)?, beside.map(read).transpose()?)))?;
            let _ = self.visit_combined(&Visit { config: &config, beside: beside.as_ref(), warmup, steps });
        }
        Ok(())
    }

    /// Ends `follow` on the other ranks.
    pub fn dismiss(&self) -> Result<(), Failure> {
        self.ranks.of_first(None::<Order>).map(drop)
    }

    /// Runs work that all ranks do at once and in which they wait for each other: a failure ends all of them.
    pub fn in_step<T>(&self, work: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
        match self.ranks.are_many() {
            true => self.ranks.in_step(|| guarded(work)),
            false => work(),
        }
    }

    /// Every rank's value, in order of ranks.
    pub fn gather<T: Serialize + DeserializeOwned>(&self, own: &T) -> Result<Vec<T>, Failure> {
        message::read_all(&self.ranks.gather_bytes(&message::write(own))?)
    }

    /// Makes a visit on this rank and combines it with those of the others.
    fn visit_combined(&self, visit: &Visit<'_>) -> Result<Timed, Failure> {
        self.progressed("measuring");
        let own = guarded(|| visit::visit(self, visit))?;
        if !self.ranks.are_many() {
            return Ok(own);
        }
        Ok(Timed::slowest(&self.ranks.gather(&own)?))
    }
}
