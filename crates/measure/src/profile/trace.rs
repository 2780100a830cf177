//! Writes a profile as trace events in JSON, for ui.perfetto.dev and chrome://tracing.
//!
//! There are two processes. The host's has its activity in a few updates, as they ran. The device's has one update: its launches
//! end to end with the times they take alone, and above them the plans they belong to. The time between kernels is not in it.
//!
//! With several ranks there is one process per rank, with the tracks of both, and its launches on two tracks: compute and
//! exchanges, at the times that a simulation of the plans gives from the times that launches take alone.

use std::path::Path;

use serde_json::{Value, json};

use super::Report;
use super::launches::Timed;
use super::members::Member;
use flatout_train::Failure;
use flatout_train::UserError;

const HOST: u32 = 1;
const DEVICE: u32 = 2;
const PLANS: u32 = 1;
const LAUNCHES: u32 = 2;
/// Further tracks where there are several ranks.
const EXCHANGES: u32 = 3;
const THREAD: u32 = 4;

/// The whole trace.
pub fn trace(report: &Report) -> Value {
    let events = match report.members.is_empty() {
        true => alone(report),
        false => report.members.iter().flat_map(|member| of_rank(report, member)).collect(),
    };
    json!({ "displayTimeUnit": "ms", "otherData": { "recipe": report.recipe }, "traceEvents": events })
}

/// The events of one of several ranks.
fn of_rank(report: &Report, member: &Member) -> Vec<Value> {
    let process = member.times.rank as u32 + 1;
    let mut events = vec![
        name("process_name", process, 0, &format!("{}: one update, launches timed alone", member.times.name)),
        name("thread_name", process, PLANS, "plans"),
        name("thread_name", process, LAUNCHES, "compute queue"),
        name("thread_name", process, EXCHANGES, "wire queue"),
        name("thread_name", process, THREAD, "host: updates as they ran"),
    ];
    for (what, begin, end) in &member.host {
        events.push(slice(process, THREAD, what, "host", *begin, end - begin, json!({})));
    }
    let mut at = 0.0;
    for (plan, timeline) in plans(&report.timed).zip(&member.timelines) {
        let seconds = timeline.iter().map(|runs| runs.end).fold(0.0, f64::max);
        for part in 0..plan[0].times {
            for (launch, runs) in plan.iter().zip(timeline) {
                let thread = if launch.is_exchange { EXCHANGES } else { LAUNCHES };
                let (begin, takes) = (at + runs.start, runs.end - runs.start);
                let args = args(launch, takes);
                events.push(slice(process, thread, launch.op, launch.work.name(), begin, takes, args));
            }
            let args = json!({ "micro_batch": part });
            events.push(slice(process, PLANS, &plan[0].plan, "plan", at, seconds, args));
            at += seconds;
        }
    }
    events
}

/// The events of the only rank.
fn alone(report: &Report) -> Vec<Value> {
    let mut events = vec![
        name("process_name", HOST, 0, "host: updates as they ran"),
        name("thread_name", HOST, 1, "training thread"),
        name("process_name", DEVICE, 0, &format!("{}: one update, launches timed alone", report.device)),
        name("thread_name", DEVICE, PLANS, "plans"),
        name("thread_name", DEVICE, LAUNCHES, "launches"),
    ];
    for span in &report.host {
        events.push(slice(HOST, 1, span.what, "host", span.begin, span.end - span.begin, json!({})));
    }
    let mut at = 0.0;
    for plan in plans(&report.timed) {
        for part in 0..plan[0].times {
            let begin = at;
            for launch in plan {
                let cat = launch.work.name();
                let args = args(launch, launch.seconds);
                events.push(slice(DEVICE, LAUNCHES, launch.op, cat, at, launch.seconds, args));
                at += launch.seconds;
            }
            let args = json!({ "micro_batch": part });
            events.push(slice(DEVICE, PLANS, &plan[0].plan, "plan", begin, at - begin, args));
        }
    }
    events
}

/// Writes the trace. A path that cannot be written is a user error.
pub fn write(report: &Report, path: &Path) -> Result<(), Failure> {
    std::fs::write(path, trace(report).to_string()).map_err(|error| unwritable(path, &error))
}

/// Checks before any work that a trace can be written.
pub fn check(path: &Path) -> Result<(), Failure> {
    let (was_there, mut options) = (path.exists(), std::fs::OpenOptions::new());
    // Opening for appending does not change an existing file, and a new one is removed again.
    let tried = options.append(true).create(true).open(path);
    let tried = tried.and_then(|_| if was_there { Ok(()) } else { std::fs::remove_file(path) });
    tried.map_err(|error| unwritable(path, &error))
}

fn unwritable(path: &Path, error: &std::io::Error) -> Failure {
    Failure::User(UserError(format!("{} cannot be written: {error}; give another --trace", path.display())))
}

/// The launches of each plan.
fn plans(timed: &[Timed]) -> impl Iterator<Item = &[Timed]> {
    timed.chunk_by(|a, b| a.plan == b.plan)
}

fn name(what: &str, process: u32, thread: u32, name: &str) -> Value {
    json!({ "ph": "M", "name": what, "pid": process, "tid": thread, "args": { "name": name } })
}

/// A slice of the trace, whose times are in microseconds.
fn slice(
    process: u32,
    thread: u32,
    name: &str,
    category: &str,
    begin: f64,
    seconds: f64,
    args: Value,
) -> Value {
    json!({
        "ph": "X", "name": name, "cat": category, "pid": process, "tid": thread,
        "ts": 1e6 * begin, "dur": 1e6 * seconds, "args": args,
    })
}

fn args(launch: &Timed, seconds: f64) -> Value {
    json!({
        "path": launch.path,
        "kernel": launch.kernel,
        "in": launch.ins.join(", "),
        "out": launch.outs.join(", "),
        "flops": launch.flops,
        "bytes": launch.bytes,
        "of_roofline": if seconds > 0.0 { launch.roofline_seconds() / seconds } else { 0.0 },
        "computed_again": launch.is_again,
    })
}
