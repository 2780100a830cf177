//! Visits that all ranks make together: rank 0 says which is next, every rank makes it, and its time is the slowest rank's.
//!
//! The next visit may depend on clocks and on earlier measurements, which differ from rank to rank: so rank 0 alone decides,
//! and the others follow until they are dismissed. A configuration that some rank cannot open is a failure that all ranks know of,
//! and the next one is visited; a failure behind that, when ranks wait for each other's exchanges, ends all of them.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::visit::{self, Visit, guarded};
use super::{Stage, Timed};
use flatout_train::Failure;
use flatout_train::config::Config;
use flatout_train::ranks::message;

/// A visit as rank 0 tells the others of it: settings as text.
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
        self.ordered(&Visit { config, beside: None, warmup, steps })
    }

    /// The same with the base open as well, whose updates alternate with the timed ones.
    pub fn visit_beside(
        &self,
        base: &Config,
        config: &Config,
        warmup: usize,
        steps: usize,
    ) -> Result<Timed, Failure> {
        self.ordered(&Visit { config, beside: Some(base), warmup, steps })
    }

    /// Makes a visit on all ranks, which follow this one.
    fn ordered(&self, visit: &Visit<'_>) -> Result<Timed, Failure> {
        if self.ranks.are_many() {
            let order = Order {
                config: visit.config.to_toml(),
                beside: visit.beside.map(Config::to_toml),
                warmup: visit.warmup,
                steps: visit.steps,
            };
            self.ranks.of_first(Some(order))?;
        }
        self.made(visit)
    }

    /// Makes the visits that rank 0 orders, until it dismisses the others. Their outcomes are rank 0's to tell.
    pub fn follow(&self) -> Result<(), Failure> {
        while let Some(order) = self.ranks.of_first(None::<Order>)? {
            let Order { config, beside, warmup, steps } = order;
            let read = |text: String| Config::parse(&text, "the settings of rank 0");
            let (config, beside) = self.in_step(|| Ok((read(config)?, beside.map(read).transpose()?)))?;
            let _ = self.made(&Visit { config: &config, beside: beside.as_ref(), warmup, steps });
        }
        Ok(())
    }

    /// Lets the ranks go that follow this one.
    pub fn dismiss(&self) -> Result<(), Failure> {
        self.ranks.of_first(None::<Order>).map(drop)
    }

    /// Does something that all ranks do at once and in which they wait for each other: a failure ends all of them.
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

    /// A visit of this rank, put together with those of the others.
    fn made(&self, visit: &Visit<'_>) -> Result<Timed, Failure> {
        self.moves("measuring");
        let own = guarded(|| visit::visit(self, visit))?;
        if !self.ranks.are_many() {
            return Ok(own);
        }
        Ok(Timed::slowest(&self.ranks.gather(&own)?))
    }
}
