//! Overlap of exchanges between ranks with the launches of an update: when each launch runs, and which part of an exchange is
//! exposed.
//!
//! Launches are timed one by one. On a GPU exchanges have their own queue, so the plans are simulated with these times
//! (`ir::schedule`): an exchange is exposed while no launch runs at the same time, and hidden otherwise. What launches lose by
//! sharing the device with an exchange is in neither: it is part of the time between kernels. The CPU runs exchanges in sequence
//! with launches, so there all of their time is exposed.

use std::collections::BTreeMap;
use std::ops::Range;

use flatout_ir::links::sent_bytes;
use flatout_ir::schedule;
use flatout_ir::{Plan, Queue, Role};

use super::launches::Timed;
use super::table::kernel;
use flatout_train::resolve::compile::Compiled;

/// The sum of the exchanges of one kernel. Times are of one update.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Exchange {
    pub name: String,
    pub launches: u64,
    /// Timed alone.
    pub ms: f64,
    /// The part in which launches wait for it, and the part in which they run at the same time.
    pub exposed_ms: f64,
    pub hidden_ms: f64,
    /// Sent by this rank, in a ring.
    pub bytes: u64,
    pub gigabytes_per_second: f64,
}

/// When the launches of each plan of an update run, from the plan's beginning; `seconds` has a vector for each plan in `runs`.
pub fn timelines(compiled: &Compiled, seconds: &[Vec<f64>], runs: &[(Role, u64)]) -> Vec<Vec<Range<f64>>> {
    let of = |((role, _), seconds): (&(Role, u64), &Vec<f64>)| {
        let plan = compiled.plans.plan(*role).expect("an update has its plans");
        if compiled.target.name == "cpu" {
            sequential(seconds)
        } else {
            schedule::timeline(plan, 0.0, seconds)
        }
    };
    runs.iter().zip(seconds).map(of).collect()
}

fn sequential(seconds: &[f64]) -> Vec<Range<f64>> {
    let mut now = 0.0;
    let next = |takes: &f64| {
        let begin = now;
        now += takes;
        begin..now
    };
    seconds.iter().map(next).collect()
}

/// The exposed seconds of each launch of a plan: 0 except for exchanges.
pub fn exposed(plan: &Plan, runs: &[Range<f64>]) -> Vec<f64> {
    let is_of = |queue: Queue| move |i: &usize| plan.launches[*i].queue == queue;
    let all = 0..plan.launches.len();
    let mut seconds = vec![0.0; plan.launches.len()];
    // Where the compute queue is idle: before a launch that joins an exchange, and at the end of the plan.
    let (mut gaps, mut now): (Vec<Range<f64>>, f64) = (vec![], 0.0);
    for i in all.clone().filter(is_of(Queue::Compute)) {
        gaps.push(now..runs[i].start);
        now = runs[i].end;
    }
    gaps.push(now..runs.iter().map(|runs| runs.end).fold(now, f64::max));
    for i in all.filter(is_of(Queue::Wire)) {
        let within = |gap: &Range<f64>| (gap.end.min(runs[i].end) - gap.start.max(runs[i].start)).max(0.0);
        seconds[i] = gaps.iter().map(within).sum();
    }
    seconds
}

/// The exposed seconds of one update, by the timelines of its plans.
pub fn exposed_seconds(compiled: &Compiled, timelines: &[Vec<Range<f64>>], runs: &[(Role, u64)]) -> f64 {
    let of = |((role, times), runs): (&(Role, u64), &Vec<Range<f64>>)| {
        let plan = compiled.plans.plan(*role).expect("an update has its plans");
        *times as f64 * exposed(plan, runs).iter().sum::<f64>()
    };
    runs.iter().zip(timelines).map(of).sum()
}

/// A row per kernel, the longest first; `timed` are the launches of an update in its order.
pub fn table(
    compiled: &Compiled,
    timed: &[Timed],
    timelines: &[Vec<Range<f64>>],
    runs: &[(Role, u64)],
) -> Vec<Exchange> {
    let mut rows: BTreeMap<String, Exchange> = BTreeMap::new();
    for ((role, times), timeline) in runs.iter().zip(timelines) {
        let plan = compiled.plans.plan(*role).expect("an update has its plans");
        let of_plan = timed.iter().filter(|timed| timed.plan == role.name());
        for ((launch, exposed), timed) in plan.launches.iter().zip(exposed(plan, timeline)).zip(of_plan) {
            if launch.queue != Queue::Wire {
                continue;
            }
            let name = kernel(timed);
            let row = rows.entry(name.clone()).or_insert(Exchange {
                name,
                launches: 0,
                ms: 0.0,
                exposed_ms: 0.0,
                hidden_ms: 0.0,
                bytes: 0,
                gigabytes_per_second: 0.0,
            });
            let (ms, exposed_ms) = (1e3 * timed.update_seconds(), 1e3 * *times as f64 * exposed);
            row.launches += times;
            row.ms += ms;
            row.exposed_ms += exposed_ms;
            row.hidden_ms += (ms - exposed_ms).max(0.0);
            row.bytes += times * sent_bytes(launch);
        }
    }
    let mut rows: Vec<Exchange> = rows.into_values().collect();
    for row in &mut rows {
        row.gigabytes_per_second = if row.ms > 0.0 { row.bytes as f64 / row.ms / 1e6 } else { 0.0 };
    }
    rows.sort_by(|a, b| b.ms.total_cmp(&a.ms));
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use flatout_train::device;
    use flatout_train::ranks::target_among;
    use flatout_train::recipes::resolve;
    use flatout_train::resolve::compile::compile;

    fn compiled(words: &[&str]) -> Compiled {
        let words: Vec<String> = words.iter().map(|word| word.to_string()).collect();
        let config = resolve("tiny", &[], &words).expect("a config");
        let target = device::named("h200", &config.switches).expect("a GPU of the table");
        compile(&config, &target_among(2, target)).expect("plans")
    }

    /// Every launch takes a millisecond and every exchange `wire` of them.
    fn apply(compiled: &Compiled, wire: f64) -> (&Plan, Vec<f64>) {
        let plan = compiled.plans.plan(Role::Apply).expect("an update");
        let takes = |queue: Queue| if queue == Queue::Wire { wire } else { 1.0 };
        (plan, plan.launches.iter().map(|launch| 1e-3 * takes(launch.queue)).collect())
    }

    #[test]
    fn exchanges_are_exposed_where_launches_wait_and_hidden_where_they_do_not() {
        for (words, may_hide) in [(&["overlap=off"][..], false), (&["overlap=on"], true)] {
            let compiled = compiled(words);
            for wire in [0.1, 3.0] {
                let (plan, seconds) = apply(&compiled, wire);
                let runs = schedule::timeline(plan, 0.0, &seconds);
                let played = schedule::play(plan, 0.0, seconds.iter().copied());
                let exposed = exposed(plan, &runs);
                let sum: f64 = exposed.iter().sum();
                assert!((sum - played.exposed_seconds()).abs() < 1e-9, "{sum} and {played:?}");
                assert!(sum <= played.wire_seconds + 1e-9);
                if !may_hide {
                    assert!((sum - played.wire_seconds).abs() < 1e-9, "all of it is waited for");
                }
                for (launch, exposed) in plan.launches.iter().zip(&exposed) {
                    assert!(launch.queue == Queue::Wire || *exposed == 0.0);
                }
            }
        }
    }

    #[test]
    fn a_table_has_a_row_per_exchange_kernel() {
        let compiled = compiled(&[]);
        let runs = [(Role::Apply, 1)];
        let (plan, seconds) = apply(&compiled, 3.0);
        let times = seconds.iter().enumerate();
        let times = times.map(|(launch, &seconds)| flatout_runtime::LaunchTime {
            launch,
            seconds,
            least_seconds: seconds,
        });
        let timed = super::super::launches::joined(&compiled, &[times.collect()], &runs);
        let lines = timelines(&compiled, &[seconds], &runs);
        let rows = table(&compiled, &timed, &lines, &runs);
        let exchanges = plan.launches.iter().filter(|launch| launch.queue == Queue::Wire).count();
        assert_eq!(rows.iter().map(|row| row.launches).sum::<u64>() as usize, exchanges);
        assert!(rows.iter().any(|row| row.name.contains("reduce_scatter")), "{rows:?}");
        for row in &rows {
            assert!((row.exposed_ms + row.hidden_ms - row.ms).abs() < 1e-9 && row.bytes > 0, "{row:?}");
            assert!((row.ms - 3.0 * row.launches as f64).abs() < 1e-9);
        }
        let exposed: f64 = rows.iter().map(|row| row.exposed_ms).sum();
        assert!((exposed - 1e3 * exposed_seconds(&compiled, &lines, &runs)).abs() < 1e-9);
    }

    #[test]
    fn launches_run_in_sequence_on_a_cpu() {
        assert_eq!(sequential(&[1.0, 2.0, 0.5]), [0.0..1.0, 1.0..3.0, 3.0..3.5]);
    }
}
