//! Keeps the plan of a run in its folder as `plan.json`, for the page that shows runs: memory over the step, and the roofline
//! time of every kernel.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use flatout_data::durable;
use flatout_ir::cost::{Cost, of_launch};
use flatout_train::config::Config;
use flatout_train::resolve::compile::Compiled;
use flatout_train::resolve::prediction;
use serde_json::{Value, json};

use super::timeline::{self, Timeline};

/// File name of a run's plan.
pub const PLAN: &str = "plan.json";
/// The most points of the timeline that are kept, more than a chart has pixels. Of the launches that share a point, the one with
/// the most bytes alive counts.
const POINTS: usize = 1000;
/// The most buffers kept of those alive at the peak.
const ALIVE: usize = 12;

/// Writes the plan of a run into its folder.
pub fn write(dir: &Path, config: &Config, compiled: &Compiled) -> io::Result<()> {
    durable::replace(&dir.join(PLAN), object(config, compiled).to_string().as_bytes())
}

fn object(config: &Config, compiled: &Compiled) -> Value {
    let batch = config.train.batch;
    let mut timeline = timeline::over_step(&compiled.plans, batch / compiled.micro_batch);
    timeline.peak.alive.truncate(ALIVE);
    let width = timeline.launches.div_ceil(POINTS).max(1);
    let step = prediction::step_cost(compiled, batch);
    let is_calibrated = prediction::is_calibrated(compiled);
    json!({
        "arena_bytes": compiled.plans.arena_bytes,
        "launches": timeline.launches,
        "launches_a_place": width,
        "areas": areas(&timeline, width),
        "parts": timeline.parts.iter().map(|(at, name)| json!({ "launch": at, "name": name })).collect::<Vec<_>>(),
        "peak": timeline.peak,
        "peak_launch": timeline.peak_at,
        "roofline_ms": 1e3 * step.roofline_seconds,
        "predicted_ms": is_calibrated.then_some(1e3 * step.predicted_seconds),
        "kernels": kernels(compiled, batch, is_calibrated),
    })
}

/// Downsamples the timeline to points of `width` launches, each with the bytes of its launch at which most is alive.
fn areas(timeline: &Timeline, width: usize) -> Vec<Value> {
    let alive = |launch: &usize| timeline.areas.iter().map(|(_, bytes)| bytes[*launch]).sum::<usize>();
    let points = (0..timeline.launches).step_by(width);
    let highest: Vec<usize> = points
        .map(|first| {
            let launches = first..(first + width).min(timeline.launches);
            launches.max_by_key(|launch| (alive(launch), std::cmp::Reverse(*launch))).unwrap_or(first)
        })
        .collect();
    let row = |(name, bytes): &(&'static str, Vec<usize>)| json!({ "name": name, "bytes": highest.iter().map(|launch| bytes[*launch]).collect::<Vec<_>>() });
    timeline.areas.iter().map(row).collect()
}

/// A row per kernel with its launches per update and their cost, ordered by roofline time, the longest first.
fn kernels(compiled: &Compiled, batch: usize, is_calibrated: bool) -> Vec<Value> {
    let mut sums: BTreeMap<&'static str, Cost> = BTreeMap::new();
    for (role, times) in prediction::typical_runs(compiled, batch) {
        for launch in compiled.plans.plan(role).map_or(&[][..], |plan| &plan.launches) {
            *sums.entry(launch.kernel).or_default() += of_launch(launch, &compiled.target).times(times);
        }
    }
    let mut rows: Vec<(&str, Cost)> = sums.into_iter().collect();
    rows.sort_by(|(_, a), (_, b)| b.roofline_seconds.total_cmp(&a.roofline_seconds));
    let row = |(name, cost): (&str, Cost)| {
        json!({
            "name": name,
            "launches": cost.launches,
            "flops": cost.flops,
            "bytes": cost.bytes,
            "roofline_ms": 1e3 * cost.roofline_seconds,
            "predicted_ms": is_calibrated.then_some(1e3 * cost.predicted_seconds),
        })
    };
    rows.into_iter().map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use flatout_train::recipes;
    use flatout_train::resolve::compile;

    #[test]
    fn the_kept_plan_is_the_plan() {
        let config = recipes::resolve("tiny", &[], &[]).unwrap();
        let compiled = compile::compile(&config, &compile::target()).unwrap();
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), &config, &compiled).unwrap();
        let kept: Value = serde_json::from_slice(&std::fs::read(dir.path().join(PLAN)).unwrap()).unwrap();
        assert_eq!(kept["arena_bytes"], json!(compiled.plans.arena_bytes));
        let areas = kept["areas"].as_array().unwrap();
        let points = areas[0]["bytes"].as_array().unwrap().len();
        assert!(points > 10 && points <= POINTS, "{points}");
        let sum = |point: usize| areas.iter().map(|area| area["bytes"][point].as_u64().unwrap()).sum::<u64>();
        let highest = (0..points).map(sum).max().unwrap();
        assert_eq!(json!(highest), kept["peak"]["bytes"], "downsampling keeps the peak");
        let kernels = kept["kernels"].as_array().unwrap();
        let least: f64 = kernels.iter().map(|row| row["roofline_ms"].as_f64().unwrap()).sum();
        assert!((least / kept["roofline_ms"].as_f64().unwrap() - 1.0).abs() < 1e-9, "{least}"); // A coarser sampling keeps the peak too.
        let timeline = timeline::over_step(&compiled.plans, 1);
        let thin = super::areas(&timeline, 7);
        let sum = |point: usize| thin.iter().map(|area| area["bytes"][point].as_u64().unwrap()).sum::<u64>();
        assert_eq!((0..timeline.launches.div_ceil(7)).map(sum).max(), Some(highest));
    }
}
