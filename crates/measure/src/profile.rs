//! Where the time of an update goes: every kernel against what the device could do, what passes between kernels, and what
//! would help.
//!
//! `budget` measures the update as it runs and with one thing after another left out, down to the launches one by one;
//! what each step of that ladder takes is its cause's. `launches` joins the times of launches with what the plan says of
//! them, `table` adds them up, `sinks` says in words where the most is lost, `trace` draws it on a time axis.

pub mod budget;
pub mod launches;
pub mod page;
pub mod sinks;
pub mod table;
pub mod trace;

use crate::bench::{Span, Stage};
use budget::Budget;
use flatout_train::Failure;
use flatout_train::config::Config;
use flatout_train::device::Device;
use flatout_train::device::kernels;
use flatout_train::machine;
use launches::{Timed, joined};
use sinks::{Sink, sinks};
use table::{Row, by_kernel, by_place, by_work};

/// Updates after the first that are not timed.
const WARMUP: usize = 2;
/// Updates of which the trace shows what the host did.
const TRACED: usize = 3;

#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Updates that are timed in a round, of each kind.
    pub steps: usize,
    pub rounds: usize,
}

/// The whole result. Times are of one update.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Report {
    pub recipe: String,
    pub version: String,
    pub device: String,
    pub precision: String,
    /// What was trained on.
    pub data: String,
    /// What attention runs on, on a GPU.
    pub attention: Option<String>,
    pub tokens_per_update: usize,
    pub tokens_per_second: f64,
    /// Micro-batches an update.
    pub micro_batches: usize,
    /// Launches an update.
    pub launches: u64,
    pub rounds: usize,
    pub steps: usize,
    pub roofline_ms: f64,
    /// By kernels that were timed on this device before; none where none were.
    pub predicted_ms: Option<f64>,
    pub budget: Budget,
    pub work: Vec<Row>,
    pub kernels: Vec<Row>,
    pub places: Vec<Row>,
    pub sinks: Vec<Sink>,
    pub timed: Vec<Timed>,
    #[serde(skip)]
    pub host: Vec<Span>,
}

/// Opens a configuration as a run does and measures it. `say` hears of each round that begins.
pub fn profile(
    config: &Config,
    options: &Options,
    say: &mut dyn FnMut(usize, usize),
) -> Result<Report, Failure> {
    let stage = Stage::open(config)?;
    let mut bench = stage.bench(config)?;
    bench.steps(WARMUP)?;
    let (mut rounds, before) = (vec![], bench.waited());
    for round in 0..options.rounds {
        say(round, options.rounds);
        rounds.push(budget::round(&mut bench, options.steps)?);
    }
    let (rounds, waited) = (budget::steadied(rounds), bench.waited().since(before));
    let host = bench.spans(TRACED)?;
    let (parts, runs) = (bench.parts(), bench.runs());
    let compiled = bench.compiled();
    let timed = joined(compiled, &budget::launches(&rounds), &runs);
    let budget = budget::budget(&rounds, &timed, &runs);
    let active = bench.active();
    let scene = sinks::Scene {
        config,
        stage: &stage,
        compiled,
        active: &active,
        budget: &budget,
        waited,
        launches: bench.launches(),
        parts,
    };
    let step_seconds = budget.step_ms / 1e3;
    let sum = |of: fn(&Timed) -> f64| 1e3 * timed.iter().map(|t| t.times as f64 * of(t)).sum::<f64>();
    let is_predicted = timed.iter().all(|t| t.predicted_seconds.is_some());
    Ok(Report {
        recipe: config.recipe.clone(),
        version: env!("CARGO_PKG_VERSION").into(),
        device: match stage.device() {
            Device::Cpu { .. } => machine::processor(machine::threads()),
            Device::Cuda(_) => kernels::gpu().sentence,
        },
        precision: compiled.settled.options.precision.name().into(),
        data: stage.data().into(),
        tokens_per_update: bench.tokens_per_update(),
        tokens_per_second: bench.tokens_per_update() as f64 / step_seconds,
        micro_batches: parts,
        launches: bench.launches() as u64,
        rounds: options.rounds,
        steps: options.steps,
        roofline_ms: sum(Timed::roofline_seconds),
        predicted_ms: is_predicted.then(|| sum(|t| t.predicted_seconds.unwrap_or(0.0))),
        work: by_work(&timed, budget.step_ms),
        kernels: by_kernel(&timed, budget.step_ms),
        places: by_place(&timed, budget.step_ms),
        sinks: sinks(&scene, &timed),
        budget,
        timed,
        host,
        attention: bench.session().as_cuda().and_then(|cuda| cuda.attention()),
    })
}

#[cfg(test)]
mod tests;
