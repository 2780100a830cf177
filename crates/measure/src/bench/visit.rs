//! A visit is one trial: a configuration is opened, warmed up, timed and closed again. Comparisons alternate between visits of
//! several.

use std::panic::{AssertUnwindSafe, catch_unwind};

use serde::{Deserialize, Deserializer, Serialize};

use super::{Bench, Stage, Start};
use crate::statistics::median;
use flatout_train::Failure;
use flatout_train::config::Config;

/// The arguments of a visit.
#[derive(Clone, Debug)]
pub struct Visit<'a> {
    pub config: &'a Config,
    /// The base, where its updates are interleaved: one runs before each timed update and one after the last, so that a
    /// disturbance of a tenth of a second or more slows down both alike. Only for a device on which the host does not run ahead
    /// of the updates, because here it waits for each.
    pub beside: Option<&'a Config>,
    /// Warm-up updates after the first, and timed updates.
    pub warmup: usize,
    pub steps: usize,
}

/// Makes a visit on this rank, as every rank does.
pub fn visit(stage: &Stage, visit: &Visit<'_>) -> Result<Timed, Failure> {
    let mut own = stage.bench(visit.config)?;
    let Some(base) = visit.beside else {
        own.steps(visit.warmup)?;
        let step_ms = own.steps(visit.steps)?;
        return Ok(timed(&own, step_ms, vec![]));
    };
    let mut base = stage.bench(base)?;
    own.steps(visit.warmup)?;
    base.steps(visit.warmup)?;
    let mut around_ms = base.steps(1)?;
    let mut step_ms = vec![];
    for _ in 0..visit.steps {
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
    /// Milliseconds of each timed update.
    pub step_ms: Vec<f64>,
    /// Milliseconds of the base's updates before, between and after those, where they were interleaved; otherwise empty.
    pub around_ms: Vec<f64>,
    /// The loss of every update from the first.
    #[serde(deserialize_with = "losses")]
    pub losses: Vec<f32>,
    pub start: Start,
    pub arena_bytes: u64,
    pub driver_bytes: u64,
    pub launches: usize,
    pub parameters: u64,
}

impl Timed {
    /// Combines the visits of all ranks: each time is the slowest rank's, because an update is over when it is on all of them.
    /// Losses and plans are the same on all.
    pub fn slowest(all: &[Timed]) -> Timed {
        let most = |of: &dyn Fn(&Timed) -> f64| all.iter().map(of).fold(0.0, f64::max);
        let each = |of: fn(&Timed) -> &Vec<f64>| {
            (0..of(&all[0]).len()).map(|update| most(&|timed| of(timed)[update])).collect()
        };
        Timed {
            step_ms: each(|timed| &timed.step_ms),
            around_ms: each(|timed| &timed.around_ms),
            start: Start {
                compile_seconds: most(&|timed| timed.start.compile_seconds),
                session_seconds: most(&|timed| timed.start.session_seconds),
                weights_seconds: most(&|timed| timed.start.weights_seconds),
                first_update_seconds: most(&|timed| timed.start.first_update_seconds),
            },
            driver_bytes: all.iter().map(|timed| timed.driver_bytes).max().unwrap_or(0),
            ..all[0].clone()
        }
    }

    /// The visit's time: the median of its updates.
    pub fn update_ms(&self) -> f64 {
        median(&self.step_ms)
    }
}

/// Reads losses; in JSON a loss that is not finite is `null`.
fn losses<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<f32>, D::Error> {
    let written = Vec::<Option<f32>>::deserialize(deserializer)?;
    Ok(written.into_iter().map(|loss| loss.unwrap_or(f32::NAN)).collect())
}

/// Turns a panic into a failure of one configuration, so that the others are still measured.
pub fn guarded<T>(work: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let message = panic.downcast_ref::<String>().map(String::as_str);
        let message = message.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
        Err(Failure::Environment(format!("it panicked, which is a bug of flatout: {message}")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_update_takes_as_long_as_on_the_slowest_rank() {
        let timed = |step_ms: &[f64], around_ms: &[f64], session_seconds, driver_bytes| Timed {
            step_ms: step_ms.to_vec(),
            around_ms: around_ms.to_vec(),
            losses: vec![6.5, 6.25],
            start: Start { session_seconds, compile_seconds: 0.5, ..Start::default() },
            arena_bytes: 1 << 20,
            driver_bytes,
            launches: 7,
            parameters: 8,
        };
        let all =
            [timed(&[30.0, 20.0], &[5.0, 6.0, 7.0], 1.0, 9), timed(&[25.0, 28.0], &[9.0, 1.0, 1.0], 2.0, 4)];
        assert_eq!(Timed::slowest(&all), timed(&[30.0, 28.0], &[9.0, 6.0, 7.0], 2.0, 9));
        assert_eq!(Timed::slowest(&all[..1]), all[0]);
    }
}
