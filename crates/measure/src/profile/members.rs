//! The ranks of a profile: what each of them measured, told to all.

use std::ops::Range;

use flatout_ir::Role;
use flatout_runtime::LaunchTime;
use serde::{Deserialize, Serialize};

use super::exchanges::{exposed_seconds, timelines};
use crate::bench::{Span, Stage};
use flatout_train::Failure;
use flatout_train::resolve::compile::Compiled;

/// An update of one rank, in milliseconds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RankTimes {
    pub rank: usize,
    /// With its host and process.
    pub name: String,
    /// As a run makes it.
    pub step_ms: f64,
    /// Its launches, timed alone, without exchanges.
    pub kernels_ms: f64,
    /// Its exchanges: what launches wait for, and what runs beside them.
    pub exposed_ms: f64,
    pub hidden_ms: f64,
}

/// One rank on a time axis of its own.
#[derive(Clone, Debug)]
pub struct Member {
    pub times: RankTimes,
    /// When the launches of each plan run, from the plan's beginning.
    pub timelines: Vec<Vec<Range<f64>>>,
    /// The activities of its host, from when to when in seconds.
    pub host: Vec<(String, f64, f64)>,
}

/// The message of a rank to the others.
#[derive(Serialize, Deserialize)]
struct Told {
    step_seconds: f64,
    /// Of every launch, a vector a plan.
    seconds: Vec<Vec<f64>>,
    host: Vec<(String, f64, f64)>,
}

/// All ranks in their order, by what this one measured: the times of launches, a vector a plan that an update `runs`. Every rank calls
/// this.
pub fn gathered(
    stage: &Stage,
    compiled: &Compiled,
    (times, runs): (&[Vec<LaunchTime>], &[(Role, u64)]),
    step_seconds: f64,
    host: &[Span],
) -> Result<Vec<Member>, Failure> {
    let seconds = times.iter().map(|times| times.iter().map(|time| time.seconds).collect());
    let span = |span: &Span| (span.what.to_string(), span.begin, span.end);
    let own = Told { step_seconds, seconds: seconds.collect(), host: host.iter().map(span).collect() };
    let all: Vec<Told> = stage.gather(&own)?;
    let member = |(rank, told): (usize, Told)| {
        let timelines = timelines(compiled, &told.seconds, runs);
        let exposed = exposed_seconds(compiled, &timelines, runs);
        let sum = |is_exchange: bool| {
            let of_plan = |((role, times), seconds): (&(Role, u64), &Vec<f64>)| {
                let plan = compiled.plans.plan(*role).expect("an update has its plans");
                let of = plan.launches.iter().zip(seconds);
                let of = of.filter(|(launch, _)| launch.op.kind().is_collective() == is_exchange);
                *times as f64 * of.map(|(_, seconds)| seconds).sum::<f64>()
            };
            runs.iter().zip(&told.seconds).map(of_plan).sum::<f64>()
        };
        let times = RankTimes {
            rank,
            name: stage.named(rank),
            step_ms: 1e3 * told.step_seconds,
            kernels_ms: 1e3 * sum(false),
            exposed_ms: 1e3 * exposed,
            hidden_ms: 1e3 * (sum(true) - exposed).max(0.0),
        };
        Member { times, timelines, host: told.host }
    };
    Ok(all.into_iter().enumerate().map(member).collect())
}
