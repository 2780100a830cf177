//! Gathers the measurements of all ranks of a profile.

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
    /// The update as in training.
    pub step_ms: f64,
    /// Its launches without exchanges, each timed alone.
    pub kernels_ms: f64,
    /// Its exchanges: the part that launches wait for, and the part that overlaps them.
    pub exposed_ms: f64,
    pub hidden_ms: f64,
}

/// One rank, with its own time axis.
#[derive(Clone, Debug)]
pub struct Member {
    pub times: RankTimes,
    /// When the launches of each plan run, from the plan's beginning.
    pub timelines: Vec<Vec<Range<f64>>>,
    /// Spans of its host: activity, begin and end in seconds.
    pub host: Vec<(String, f64, f64)>,
}

/// The message that a rank sends to the others.
#[derive(Serialize, Deserialize)]
struct RankMessage {
    step_seconds: f64,
    /// Seconds of every launch, one vector per plan.
    seconds: Vec<Vec<f64>>,
    host: Vec<(String, f64, f64)>,
}

/// Sends this rank's measurements and returns those of all ranks in order; `times` has a vector for each plan in `runs`. Every
/// rank calls this.
pub fn gathered(
    stage: &Stage,
    compiled: &Compiled,
    (times, runs): (&[Vec<LaunchTime>], &[(Role, u64)]),
    step_seconds: f64,
    host: &[Span],
) -> Result<Vec<Member>, Failure> {
    let seconds = times.iter().map(|times| times.iter().map(|time| time.seconds).collect());
    let span = |span: &Span| (span.what.to_string(), span.begin, span.end);
    let own = RankMessage { step_seconds, seconds: seconds.collect(), host: host.iter().map(span).collect() };
    let all: Vec<RankMessage> = stage.gather(&own)?;
    let member = |(rank, message): (usize, RankMessage)| {
        let timelines = timelines(compiled, &message.seconds, runs);
        let exposed = exposed_seconds(compiled, &timelines, runs);
        let sum = |is_exchange: bool| {
            let of_plan = |((role, times), seconds): (&(Role, u64), &Vec<f64>)| {
                let plan = compiled.plans.plan(*role).expect("an update has its plans");
                let of = plan.launches.iter().zip(seconds);
                let of = of.filter(|(launch, _)| launch.op.kind().is_collective() == is_exchange);
                *times as f64 * of.map(|(_, seconds)| seconds).sum::<f64>()
            };
            runs.iter().zip(&message.seconds).map(of_plan).sum::<f64>()
        };
        let times = RankTimes {
            rank,
            name: stage.named(rank),
            step_ms: 1e3 * message.step_seconds,
            kernels_ms: 1e3 * sum(false),
            exposed_ms: 1e3 * exposed,
            hidden_ms: 1e3 * (sum(true) - exposed).max(0.0),
        };
        Member { times, timelines, host: message.host }
    };
    Ok(all.into_iter().enumerate().map(member).collect())
}
