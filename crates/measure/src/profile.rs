//! Profiles an update: every kernel against the roofline, the time between kernels, and advice on what would help.
//! `budget` measures the update as it runs and with one cause of time after another left out, down to the launches one by one;
//! the differences are the times of the causes. `launches` joins the times of launches with the plan, `table` sums them, `sinks`
//! describes the largest losses, `trace` writes a time axis. `marginal` measures what one more run of each kernel adds to the
//! update, which is less than its own time where the device is limited by power.
//! With several ranks, all measure the same at the same time, and the tables are those of one; `exchanges` has the exchanges
//! between them, and `members` the times of all.

pub mod budget;
pub mod exchanges;
pub mod launches;
pub mod marginal;
pub mod members;
pub mod page;
pub mod sinks;
pub mod table;
pub mod trace;

use crate::bench::{Bench, Span, Stage};
use budget::{Budget, Round};
use exchanges::Exchange;
use flatout_data::Waited;
use flatout_train::Failure;
use flatout_train::config::Config;
use launches::{Timed, joined};
use marginal::Marginal;
use members::{Member, RankTimes};
use sinks::{Sink, sinks};
use table::{Row, by_kernel, by_place, by_work};

/// Warm-up updates after the first.
const WARMUP: usize = 2;
/// Updates whose host activity is in the trace.
const TRACED: usize = 3;

#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Timed updates per round, for each kind of measurement.
    pub steps: usize,
    pub rounds: usize,
    /// Seconds of each measurement of what one more run of a kernel adds; `None` skips these.
    pub marginal_seconds: Option<f64>,
}

/// The result of a profile. Times are of one update.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Report {
    pub recipe: String,
    pub version: String,
    pub device: String,
    pub precision: String,
    /// The training data.
    pub data: String,
    /// The kernels that attention runs on, on a GPU.
    pub attention: Option<String>,
    /// The number of products on each kernel, on a GPU.
    pub products: Option<String>,
    pub tokens_per_update: usize,
    pub tokens_per_second: f64,
    /// Micro-batches per update.
    pub micro_batches: usize,
    /// Launches per update.
    pub launches: u64,
    pub rounds: usize,
    pub steps: usize,
    pub roofline_ms: f64,
    /// From kernels that were timed on this device before; none where none were.
    pub predicted_ms: Option<f64>,
    pub budget: Budget,
    pub work: Vec<Row>,
    pub kernels: Vec<Row>,
    pub places: Vec<Row>,
    /// The exchanges between ranks, which the tables above leave out.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub exchanges: Vec<Exchange>,
    /// The times of each of several ranks.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ranks: Vec<RankTimes>,
    pub sinks: Vec<Sink>,
    /// The time and energy that one more run of each kernel adds to the update, where this was requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub marginal: Option<Marginal>,
    pub timed: Vec<Timed>,
    #[serde(skip)]
    pub host: Vec<Span>,
    /// The time axis of every rank, where there are several.
    #[serde(skip)]
    pub members: Vec<Member>,
}

/// The measurements of one rank.
struct Measured {
    rounds: Vec<Round>,
    waited: Waited,
    host: Vec<Span>,
}

fn measure(
    bench: &mut Bench,
    options: &Options,
    say: &mut dyn FnMut(usize, usize),
) -> Result<Measured, Failure> {
    bench.steps(WARMUP)?;
    let (mut rounds, before) = (vec![], bench.waited());
    for round in 0..options.rounds {
        say(round, options.rounds);
        rounds.push(budget::round(bench, options.steps)?);
    }
    let (rounds, waited) = (budget::normalised(rounds), bench.waited().since(before));
    Ok(Measured { rounds, waited, host: bench.spans(TRACED)? })
}

/// Opens a configuration on the stage that was opened for it and measures it. Every rank calls this. `say` is called when a round
/// begins.
pub fn profile(
    config: &Config,
    options: &Options,
    stage: &Stage,
    say: &mut dyn FnMut(usize, usize),
) -> Result<Report, Failure> {
    let mut bench = stage.bench(config)?;
    let Measured { rounds, waited, host } = stage.in_step(|| measure(&mut bench, options, say))?;
    let (parts, runs) = (bench.parts(), bench.runs());
    let compiled = bench.compiled();
    let times = budget::launches(&rounds);
    let all = joined(compiled, &times, &runs);
    let members = match stage.ranks() {
        1 => vec![],
        _ => members::gathered(stage, compiled, (&times, &runs), rounds[0].step, &host)?,
    };
    let own = members.get(stage.rank());
    let wire_ms = own.map(|own| own.times.exposed_ms);
    let exchanges = own.map_or(vec![], |own| exchanges::table(compiled, &all, &own.timelines, &runs));
    let timed: Vec<Timed> = all.iter().filter(|t| members.is_empty() || !t.is_exchange).cloned().collect();
    let budget = budget::budget(&rounds, &timed, wire_ms, &runs);
    let marginal = match options.marginal_seconds {
        Some(seconds) => Some(marginal::marginal(&mut bench, &runs, &timed, seconds, say)?),
        None => None,
    };
    let (compiled, active) = (bench.compiled(), bench.active());
    let context = sinks::Context {
        config,
        stage,
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
        device: stage.sentence(),
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
        exchanges,
        ranks: members.iter().map(|member| member.times.clone()).collect(),
        sinks: sinks(&context, &timed),
        marginal,
        budget,
        timed: all,
        host,
        members,
        attention: bench.session().as_cuda().and_then(|cuda| cuda.attention()),
        products: bench.session().as_cuda().and_then(|cuda| cuda.products()),
    })
}

#[cfg(test)]
mod tests;
