//! Marginal cost of kernels: the time and energy that one more run of each adds to an update.
//!
//! A GPU at its power limit lowers its clock, so that an update takes as long as its energy over that limit: there a kernel's own
//! time says little about what leaving it out would save. So the update is measured as it is, interleaved with measurements in
//! which every launch of one kernel runs twice. The difference is the kernel's share of the update's time and energy. Launches
//! that write in place over their inputs cannot be repeated; they are only counted.

use std::collections::BTreeMap;
use std::time::Instant;

use flatout_ir::Role;
use flatout_runtime::Session;

use super::launches::Timed;
use super::table::kernel;
use crate::bench::Bench;
use crate::statistics::median;
use flatout_train::training::update::{collect, post};
use flatout_train::{Failure, UserError};

/// Kernels with a smaller share of the launches' time are left out.
const LEAST_SHARE: f64 = 0.004;
/// Interleaved rounds of the plain update and the update with a kernel doubled.
const ROUNDS: usize = 3;

#[derive(Clone, Debug, serde::Serialize)]
pub struct Marginal {
    /// The plain update, with launches enqueued one by one.
    pub step_ms: f64,
    /// None where the device does not measure energy.
    pub joules: Option<f64>,
    pub watts: Option<f64>,
    pub limit_watts: Option<f64>,
    pub kernels: Vec<Added>,
    /// Launches that write in place over their inputs and cannot be repeated. Kernels below the least share are in neither.
    pub once: u64,
}

/// A kernel's launches of one update.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Added {
    pub name: String,
    pub launches: u64,
    /// Each timed alone.
    pub ms: f64,
    /// The time that running all of them once more adds.
    pub added_ms: f64,
    pub added_joules: Option<f64>,
}

/// One measurement: seconds and joules per update.
#[derive(Clone, Copy)]
struct Sample {
    seconds: f64,
    joules: Option<f64>,
}

/// Measures every kernel for `seconds` per round; `say` is called when a measurement begins.
pub fn marginal(
    bench: &mut Bench,
    runs: &[(Role, u64)],
    timed: &[Timed],
    seconds: f64,
    say: &mut dyn FnMut(usize, usize),
) -> Result<Marginal, Failure> {
    let groups = groups(bench.session(), runs, timed);
    let monitor = bench.session().as_cuda().and_then(|cuda| cuda.device().monitor().ok());
    let energy = || monitor.as_ref().and_then(|monitor| monitor.energy_millijoules());
    let limit = monitor.as_ref().and_then(|monitor| monitor.read().power_limit_milliwatts);
    let mut sample = |of: Option<&Group>| -> Result<Sample, Failure> {
        let times = |role: Role, plan: usize| match of {
            Some(group) => group.times[plan].clone(),
            None => vec![1; timed.iter().filter(|t| t.plan == role.name()).count()],
        };
        let times: Vec<Vec<usize>> =
            runs.iter().enumerate().map(|(plan, (role, _))| times(*role, plan)).collect();
        repeat(bench.session(), runs, &times, seconds, &energy)
    };
    let of = ROUNDS * (groups.len() + 1);
    let mut samples: Vec<Vec<[Sample; 2]>> = vec![vec![]; groups.len()];
    for round in 0..ROUNDS {
        let mut before = sample(None)?;
        for (i, group) in groups.iter().enumerate() {
            say(round * (groups.len() + 1) + i, of);
            let doubled = sample(Some(group))?;
            let after = sample(None)?;
            let joules = before.joules.zip(after.joules).map(|(a, b)| (a + b) / 2.0);
            samples[i].push([Sample { seconds: (before.seconds + after.seconds) / 2.0, joules }, doubled]);
            before = after;
        }
    }
    let plain: Vec<Sample> = samples.iter().flatten().map(|[plain, _]| *plain).collect();
    let Some(step) = median_sample(&plain) else {
        return Err(Failure::User(UserError("no kernel of this recipe can run twice in a row".into())));
    };
    let added = |(group, samples): (&Group, &Vec<[Sample; 2]>)| {
        let of = |which: usize| median_sample(&samples.iter().map(|pair| pair[which]).collect::<Vec<_>>());
        let (plain, doubled) = (of(0).expect("measured"), of(1).expect("measured"));
        Added {
            name: group.name.clone(),
            launches: group.launches,
            ms: group.ms,
            added_ms: 1e3 * (doubled.seconds - plain.seconds),
            added_joules: doubled.joules.zip(plain.joules).map(|(doubled, plain)| doubled - plain),
        }
    };
    let kernels: Vec<Added> = groups.iter().zip(&samples).map(added).collect();
    let once = timed.iter().filter(|launch| !is_repeatable(bench.session(), runs, launch));
    Ok(Marginal {
        step_ms: 1e3 * step.seconds,
        joules: step.joules,
        watts: step.joules.map(|joules| joules / step.seconds),
        limit_watts: limit.map(|milliwatts| milliwatts as f64 / 1e3),
        once: once.map(|launch| launch.times).sum(),
        kernels,
    })
}

fn is_repeatable(session: &Session, runs: &[(Role, u64)], launch: &Timed) -> bool {
    let role = runs.iter().map(|(role, _)| *role).find(|role| role.name() == launch.plan);
    role.is_some_and(|role| session.is_repeatable(role, launch.launch))
}

/// The launches of a kernel, and for each plan how often each launch runs where this kernel's run twice.
struct Group {
    name: String,
    launches: u64,
    ms: f64,
    times: Vec<Vec<usize>>,
}

/// The kernels that can run twice, the longest first.
fn groups(session: &Session, runs: &[(Role, u64)], timed: &[Timed]) -> Vec<Group> {
    let whole: f64 = timed.iter().map(Timed::update_seconds).sum();
    let mut of_kernels: BTreeMap<String, Vec<&Timed>> = BTreeMap::new();
    for launch in timed.iter().filter(|launch| is_repeatable(session, runs, launch)) {
        of_kernels.entry(kernel(launch)).or_default().push(launch);
    }
    let group = |(name, launches): (String, Vec<&Timed>)| {
        let of_plan = |(role, _): &(Role, u64)| {
            let count = timed.iter().filter(|t| t.plan == role.name()).count();
            let mut times = vec![1; count];
            launches.iter().filter(|t| t.plan == role.name()).for_each(|t| times[t.launch] = 2);
            times
        };
        Group {
            name,
            launches: launches.iter().map(|t| t.times).sum(),
            ms: 1e3 * launches.iter().map(|t| t.update_seconds()).sum::<f64>(),
            times: runs.iter().map(of_plan).collect(),
        }
    };
    let mut groups: Vec<Group> =
        of_kernels.into_iter().map(group).filter(|group| group.ms / 1e3 > LEAST_SHARE * whole).collect();
    groups.sort_by(|a, b| b.ms.total_cmp(&a.ms));
    groups
}

/// Repeats updates for some time and returns the mean of each.
fn repeat(
    session: &mut Session,
    runs: &[(Role, u64)],
    times: &[Vec<usize>],
    seconds: f64,
    energy: &dyn Fn() -> Option<u64>,
) -> Result<Sample, Failure> {
    let during = |session: &mut Session, seconds: f64| -> Result<usize, Failure> {
        let (clock, mut updates, mut pending) = (Instant::now(), 0, None);
        while updates == 0 || clock.elapsed().as_secs_f64() < seconds {
            for ((role, count), times) in runs.iter().zip(times) {
                for _ in 0..*count {
                    session.run_repeated(*role, times)?;
                }
            }
            updates += 1;
            // As in training, an update is enqueued before the results of the last are read.
            if let Some(before) = pending.replace(post(session)?) {
                collect(session, before)?;
            }
        }
        if let Some(last) = pending {
            collect(session, last)?;
        }
        Ok(updates)
    };
    // Warm up until the device's clock has settled under this load.
    during(session, seconds / 3.0)?;
    let (clock, before) = (Instant::now(), energy());
    let updates = during(session, seconds)?;
    let (took, after) = (clock.elapsed().as_secs_f64(), energy());
    let joules = before.zip(after).map(|(before, after)| (after - before) as f64 / 1e3 / updates as f64);
    Ok(Sample { seconds: took / updates as f64, joules })
}

/// The medians of seconds and of joules.
fn median_sample(samples: &[Sample]) -> Option<Sample> {
    let seconds: Vec<f64> = samples.iter().map(|sample| sample.seconds).collect();
    let joules: Option<Vec<f64>> = samples.iter().map(|sample| sample.joules).collect();
    (!samples.is_empty()).then(|| Sample { seconds: median(&seconds), joules: joules.map(|j| median(&j)) })
}
