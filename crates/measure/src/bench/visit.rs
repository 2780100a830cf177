//! A visit: a configuration opened, warmed up, timed and closed again. Those who compare several visit them in turns.

use std::panic::{AssertUnwindSafe, catch_unwind};

use serde::{Deserialize, Deserializer, Serialize};

use super::{Bench, Stage, Start};
use crate::statistics::middle;
use flatout_train::Failure;
use flatout_train::config::Config;

/// Opens a configuration, makes its first update and `warmup` more, and times `steps`.
pub fn visit(stage: &Stage, config: &Config, warmup: usize, steps: usize) -> Result<Timed, Failure> {
    let mut bench = stage.bench(config)?;
    bench.steps(warmup)?;
    let step_ms = bench.steps(steps)?;
    Ok(timed(&bench, step_ms, vec![]))
}

/// The same with the base open as well: an update of the base lies before each timed one and after the last. What slows
/// a machine down for a tenth of a second or more then touches both alike. Only for a device on which the host does not run
/// ahead of the updates, because here it waits for each.
pub fn visit_beside(
    stage: &Stage,
    base: &Config,
    config: &Config,
    warmup: usize,
    steps: usize,
) -> Result<Timed, Failure> {
    let mut own = stage.bench(config)?;
    let mut base = stage.bench(base)?;
    own.steps(warmup)?;
    base.steps(warmup)?;
    let mut around_ms = base.steps(1)?;
    let mut step_ms = vec![];
    for _ in 0..steps {
        step_ms.extend(own.steps(1)?);
        around_ms.extend(base.steps(1)?);
    }
    Ok(timed(&own, step_ms, around_ms))
}

fn timed(bench: &Bench, step_ms: Vec<f64>, around_ms: Vec<f64>) -> Timed {
    Timed {
        step_ms,
        around_ms,
        losses: bench.losses().to_vec(),
        start: bench.start(),
        arena_bytes: bench.arena_bytes(),
        driver_bytes: bench.driver_bytes(),
        launches: bench.launches(),
        parameters: bench.compiled().parameters,
    }
}

/// One configuration opened, warmed up and timed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Timed {
    /// Of every timed update.
    pub step_ms: Vec<f64>,
    /// Of the base's updates before, between and after those, where both were open; otherwise none.
    pub around_ms: Vec<f64>,
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
