//! The result on a time axis, as trace events in JSON: ui.perfetto.dev and chrome://tracing show them.
//!
//! Two processes. The host's has what it did in a few updates, as they ran. The device's has one update, its launches end
//! to end with the times they take alone, and above them the plans they belong to; what passes between kernels is not
//! in it.

use std::path::Path;

use serde_json::{Value, json};

use super::Report;
use super::launches::Timed;
use flatout_train::Failure;
use flatout_train::UserError;

const HOST: u32 = 1;
const DEVICE: u32 = 2;
const PLANS: u32 = 1;
const LAUNCHES: u32 = 2;

/// The whole trace.
pub fn trace(report: &Report) -> Value {
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
                events.push(slice(DEVICE, LAUNCHES, launch.op, cat, at, launch.seconds, args(launch)));
                at += launch.seconds;
            }
            let args = json!({ "micro_batch": part });
            events.push(slice(DEVICE, PLANS, &plan[0].plan, "plan", begin, at - begin, args));
        }
    }
    json!({ "displayTimeUnit": "ms", "otherData": { "recipe": report.recipe }, "traceEvents": events })
}

/// Writes the trace; a path that cannot be written is the user's to change.
pub fn write(report: &Report, path: &Path) -> Result<(), Failure> {
    std::fs::write(path, trace(report).to_string()).map_err(|error| unwritable(path, &error))
}

/// Says before any work that a trace could not be written.
pub fn check(path: &Path) -> Result<(), Failure> {
    let (was_there, mut options) = (path.exists(), std::fs::OpenOptions::new());
    // Opening for appending harms nothing that is there, and what was only tried is taken away.
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

/// A slice; times are in microseconds there.
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

fn args(launch: &Timed) -> Value {
    json!({
        "path": launch.path,
        "kernel": launch.kernel,
        "in": launch.ins.join(", "),
        "out": launch.outs.join(", "),
        "flops": launch.flops,
        "bytes": launch.bytes,
        "of_roofline": if launch.seconds > 0.0 { launch.roofline_seconds() / launch.seconds } else { 0.0 },
        "computed_again": launch.is_again,
    })
}
