//! A visit: a configuration opened, warmed up, timed and closed again. Those who compare several visit them in turns.

use std::panic::{AssertUnwindSafe, catch_unwind};

use serde::{Deserialize, Deserializer, Serialize};

use super::{Stage, Start};
use crate::config::Config;
use crate::failure::Failure;
use crate::statistics::middle;

/// Opens a configuration, makes its first update and `warmup` more, and times `steps`.
pub fn visit(stage: &Stage, config: &Config, warmup: usize, steps: usize) -> Result<Timed, Failure> {
    let mut bench = stage.bench(config)?;
    bench.steps(warmup)?;
    let step_ms = bench.steps(steps)?;
    Ok(Timed {
        step_ms,
        losses: bench.losses().to_vec(),
        start: bench.start(),
        arena_bytes: bench.arena_bytes(),
        driver_bytes: bench.driver_bytes(),
        launches: bench.launches(),
        parameters: bench.compiled().parameters,
    })
}

/// One configuration opened, warmed up and timed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Timed {
    /// Of every timed update.
    pub step_ms: Vec<f64>,
    /// Of every update from the first.
    #[serde(deserialize_with = "losses")]
    pub losses: Vec<f32>,
    pub start: Start,
    pub arena_bytes: u64,
    pub driver_bytes: u64,
    pub launches: usize,
    pub parameters: u64,
}

impl Timed {
    /// The visit's time: the median of its updates.
    pub fn update_ms(&self) -> f64 {
        middle(&self.step_ms)
    }
}

/// JSON has no word for a loss that is not finite but `null`.
fn losses<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<f32>, D::Error> {
    let written = Vec::<Option<f32>>::deserialize(deserializer)?;
    Ok(written.into_iter().map(|loss| loss.unwrap_or(f32::NAN)).collect())
}

/// A panic of ours is one configuration's failure, and the others are still measured.
pub fn guarded<T>(work: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let said = panic.downcast_ref::<String>().map(String::as_str);
        let said = said.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no words");
        Err(Failure::Environment(format!("it panicked, which is a bug of flatout: {said}")))
    })
}
