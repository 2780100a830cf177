//! Divides the time of an update by cause, with measurements that each leave one more thing out.
//!
//! | measured | left out |
//! |---|---|
//! | an update as in training | nothing |
//! | the same on the inputs already on the device | rows, and the writing of inputs |
//! | its plans one after another | also the results that the host reads |
//! | its launches one by one | also the time between kernels |
//!
//! The difference between two lines is the time of what the second leaves out; the wait for rows is measured directly. So the
//! parts add up to the update. With several ranks, the launches and their exchanges are simulated on their queues, and the time
//! beyond that of the launches alone is the wire's.
//! Machines drift: the measurements are interleaved in rounds, and each round is normalised by its own update. Every part is
//! computed from medians over the rounds. On a machine with other load a part close to zero may come out negative; `noise_ms` is
//! by how much.

use std::time::Instant;

use flatout_ir::Role;
use flatout_runtime::{LaunchTime, Posted, Session};

use super::launches::Timed;
use crate::bench::Bench;
use crate::statistics::median;
use flatout_train::Failure;
use flatout_train::training::update::{collect, post};

/// Timed passes over the launches in a round, after one warm-up pass.
const PASSES: usize = 2;

/// The time of an update, and its parts.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Budget {
    pub step_ms: f64,
    /// The sum of all launches, timed one by one.
    pub kernels_ms: f64,
    /// Exchanges that launches wait for; none for a single rank.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wire_ms: Option<f64>,
    /// Time between kernels: launching, and the gaps it leaves.
    pub launch_ms: f64,
    /// Reading results on the host before it continues.
    pub synchronisation_ms: f64,
    /// Writing inputs and copying them to the device.
    pub copy_ms: f64,
    /// Waiting for rows.
    pub data_ms: f64,
    /// Parts below this cannot be told from zero: three standard errors.
    pub noise_ms: f64,
}

impl Budget {
    /// Time in which the device does not compute.
    pub fn idle_ms(&self) -> f64 {
        self.step_ms - self.kernels_ms
    }

    /// Parts that are not kernels, by name.
    pub fn idle(&self) -> [(&'static str, f64); 5] {
        [
            ("wire", self.wire_ms.unwrap_or(0.0)),
            ("launch", self.launch_ms),
            ("synchronisation", self.synchronisation_ms),
            ("copy", self.copy_ms),
            ("data", self.data_ms),
        ]
    }
}

/// The measurements of a round: seconds per update, and the launches.
pub struct Round {
    pub step: f64,
    pub data: f64,
    pub without_inputs: f64,
    pub plans: f64,
    /// One vector per role.
    pub launches: Vec<Vec<LaunchTime>>,
}

/// Measures a round: `updates` updates of each kind, and the launches one by one.
pub fn round(bench: &mut Bench, updates: usize) -> Result<Round, Failure> {
    let before = bench.waited();
    // Ranks begin each part together, because an early one would count its wait for the others.
    bench.meet()?;
    let step = median(&bench.steps(updates)?) / 1e3;
    let data = bench.waited().since(before).total.as_secs_f64() / updates as f64;
    let runs = bench.runs();
    bench.meet()?;
    let without_inputs = median(&without_inputs(bench.session(), &runs, updates)?);
    bench.meet()?;
    let plans = median(&plans(bench.session(), &runs, updates)?);
    let roles: Vec<Role> = runs.iter().map(|(role, _)| *role).collect();
    bench.meet()?;
    Ok(Round { step, data, without_inputs, plans, launches: bench.session().time(&roles, PASSES)? })
}

/// Scales each round so that its update takes the median time over rounds.
pub fn normalised(rounds: Vec<Round>) -> Vec<Round> {
    let step = median(&rounds.iter().map(|round| round.step).collect::<Vec<_>>());
    let normalise = |mut round: Round| {
        let factor = step / round.step;
        for time in round.launches.iter_mut().flatten() {
            time.seconds *= factor;
            time.least_seconds *= factor;
        }
        let [data, without_inputs, plans] =
            [round.data, round.without_inputs, round.plans].map(|time| factor * time);
        Round { step, data, without_inputs, plans, ..round }
    };
    rounds.into_iter().map(normalise).collect()
}

/// The median time of every launch of every role over normalised rounds.
pub fn launches(rounds: &[Round]) -> Vec<Vec<LaunchTime>> {
    let of = |role: usize, launch: usize| {
        let times = || rounds.iter().map(move |round| round.launches[role][launch]);
        LaunchTime {
            launch,
            seconds: median(&times().map(|time| time.seconds).collect::<Vec<_>>()),
            least_seconds: times().map(|time| time.least_seconds).fold(f64::INFINITY, f64::min),
        }
    };
    let roles = rounds.first().map_or(&[][..], |round| &round.launches).iter().enumerate();
    roles.map(|(role, times)| (0..times.len()).map(|launch| of(role, launch)).collect()).collect()
}

/// The parts of an update, from normalised rounds and their launches. `wire_ms` is the time that exchanges between ranks add;
/// `timed` has no exchanges then.
pub fn budget(rounds: &[Round], timed: &[Timed], wire_ms: Option<f64>, runs: &[(Role, u64)]) -> Budget {
    let ms = |of: &dyn Fn(&Round) -> f64| 1e3 * median(&rounds.iter().map(of).collect::<Vec<_>>());
    let noise = |of: &dyn Fn(&Round) -> f64| {
        let centre = ms(of);
        let off = |round: &Round| (1e3 * of(round) - centre).abs() / 1e3;
        // Three standard errors of a median, from the median absolute deviation.
        3.0 * 1.2533 * 1.4826 * ms(&off) / (rounds.len() as f64).sqrt()
    };
    let kernels_of = |round: &Round| {
        let sum = |times: &[LaunchTime]| times.iter().map(|time| time.seconds).sum::<f64>();
        round.launches.iter().zip(runs).map(|(times, (_, runs))| *runs as f64 * sum(times)).sum()
    };
    let [step, data, without_inputs, plans] =
        [ms(&|r| r.step), ms(&|r| r.data), ms(&|r| r.without_inputs), ms(&|r| r.plans)];
    let kernels = 1e3 * timed.iter().map(Timed::update_seconds).sum::<f64>();
    Budget {
        step_ms: step,
        kernels_ms: kernels,
        wire_ms,
        launch_ms: plans - kernels - wire_ms.unwrap_or(0.0),
        synchronisation_ms: without_inputs - plans,
        copy_ms: step - data - without_inputs,
        data_ms: data,
        noise_ms: noise(&|r| r.without_inputs).max(noise(&|r| r.plans)).max(noise(&kernels_of)),
    }
}

/// Seconds of each of some updates on the inputs already on the device. As in training, an update is enqueued before the results
/// of the last are read.
fn without_inputs(session: &mut Session, runs: &[(Role, u64)], updates: usize) -> Result<Vec<f64>, Failure> {
    let mut times = vec![];
    let mut clock = Instant::now();
    let mut read = |session: &mut Session, posted: Posted| -> Result<(), Failure> {
        collect(session, posted)?;
        times.push(std::mem::replace(&mut clock, Instant::now()).elapsed().as_secs_f64());
        Ok(())
    };
    let mut pending = None;
    for _ in 0..updates {
        run(session, runs)?;
        let posted = post(session)?;
        if posted.is_ready() {
            read(session, posted)?;
        } else if let Some(before) = pending.replace(posted) {
            read(session, before)?;
        }
    }
    if let Some(last) = pending {
        read(session, last)?;
    }
    Ok(times)
}

/// Seconds of each of some updates whose results are not read. On a GPU, which is not synchronised between them, their mean.
fn plans(session: &mut Session, runs: &[(Role, u64)], updates: usize) -> Result<Vec<f64>, Failure> {
    let begun = Instant::now();
    let mut times = vec![];
    for _ in 0..updates {
        let clock = Instant::now();
        run(session, runs)?;
        times.push(clock.elapsed().as_secs_f64());
    }
    if session.as_cuda().is_some() {
        let last = post(session)?;
        collect(session, last)?;
        times = vec![begun.elapsed().as_secs_f64() / updates as f64];
    }
    Ok(times)
}

fn run(session: &mut Session, runs: &[(Role, u64)]) -> Result<(), Failure> {
    for (role, times) in runs {
        for _ in 0..*times {
            session.run(*role)?;
        }
    }
    Ok(())
}
