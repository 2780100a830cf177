//! The time of an update by cause, from measurements that each leave one thing out.
//!
//! | measured | holds |
//! |---|---|
//! | an update as a run makes it | everything |
//! | the same on the inputs that lie there | no rows, no writing of inputs |
//! | its plans one after another | also no results that the host reads |
//! | its launches one by one | also nothing between kernels |
//!
//! What one takes more than the next is the time of what the next leaves out; the wait for rows is measured itself. So
//! the parts add up to the update. Measurements take turns, and each part is made of medians over the rounds: on a
//! machine with other work a part that is next to nothing may come out slightly below it.

use std::time::{Duration, Instant};

use flatout_data::Waited;
use flatout_ir::Role;
use flatout_runtime::{LaunchTime, Session};

use super::launches::Timed;
use crate::failure::Failure;
use crate::measure::Bench;
use crate::update::{collect, post};

/// The roles of an update, in its order.
pub const ROLES: [Role; 2] = [Role::Grad, Role::Apply];
/// Passes over the launches in a round, beside one that is not timed.
const PASSES: usize = 2;

/// The time of an update, and its parts.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Budget {
    pub step_ms: f64,
    /// All launches, timed one by one.
    pub kernels_ms: f64,
    /// Between kernels: launching, and the gaps it leaves.
    pub launch_ms: f64,
    /// Results that the host reads before it goes on.
    pub synchronisation_ms: f64,
    /// Inputs written and brought to the device.
    pub copy_ms: f64,
    /// Standing still for want of rows.
    pub data_ms: f64,
}

impl Budget {
    /// What the device does not compute in.
    pub fn idle_ms(&self) -> f64 {
        self.step_ms - self.kernels_ms
    }

    /// Parts that are not kernels, by name.
    pub fn idle(&self) -> [(&'static str, f64); 4] {
        [
            ("launch", self.launch_ms),
            ("synchronisation", self.synchronisation_ms),
            ("copy", self.copy_ms),
            ("data", self.data_ms),
        ]
    }
}

/// Seconds an update, one a round.
#[derive(Default)]
pub struct Rounds {
    step: Vec<f64>,
    data: Vec<f64>,
    unfed: Vec<f64>,
    plans: Vec<f64>,
    launches: Vec<Vec<Vec<LaunchTime>>>,
    waited: Waited,
}

impl Rounds {
    /// A round: so many updates of each kind, and the launches one by one.
    pub fn measure(&mut self, bench: &mut Bench, updates: usize) -> Result<(), Failure> {
        let before = bench.waited();
        let each = |time: Duration| time.as_secs_f64() / updates as f64;
        let mut clock = Instant::now();
        bench.steps(updates)?;
        self.step.push(each(clock.elapsed()));
        let waited = bench.waited().since(before);
        self.data.push(each(waited.total));
        self.waited += waited;

        let (parts, session) = (bench.parts(), bench.session());
        clock = Instant::now();
        unfed(session, parts, updates)?;
        self.unfed.push(each(clock.elapsed()));

        clock = Instant::now();
        for _ in 0..updates {
            run(session, parts)?;
        }
        // The host learns that the device is done.
        let last = post(session)?;
        collect(session, last)?;
        self.plans.push(each(clock.elapsed()));

        self.launches.push(session.time(&ROLES, PASSES)?);
        Ok(())
    }

    /// The median time of every launch of every role.
    pub fn launches(&self) -> Vec<Vec<LaunchTime>> {
        let first = self.launches.first().into_iter().flatten().enumerate();
        let of = |role: usize, launch: usize| {
            let times = || self.launches.iter().map(move |round| round[role][launch]);
            let least = times().map(|time| time.least_seconds).fold(f64::INFINITY, f64::min);
            LaunchTime {
                launch,
                seconds: median(&times().map(|time| time.seconds).collect::<Vec<_>>()),
                least_seconds: least,
            }
        };
        first.map(|(role, times)| (0..times.len()).map(|launch| of(role, launch)).collect()).collect()
    }

    /// All that updates waited for rows, and for what.
    pub fn waited(&self) -> Waited {
        self.waited
    }

    pub fn budget(&self, timed: &[Timed]) -> Budget {
        let [step, data, unfed, plans] =
            [&self.step, &self.data, &self.unfed, &self.plans].map(|times| 1e3 * median(times));
        let kernels = 1e3 * timed.iter().map(Timed::update_seconds).sum::<f64>();
        Budget {
            step_ms: step,
            kernels_ms: kernels,
            launch_ms: plans - kernels,
            synchronisation_ms: unfed - plans,
            copy_ms: step - data - unfed,
            data_ms: data,
        }
    }
}

/// Updates on the inputs that lie there. As in a run an update is asked for before the results of the last are read.
fn unfed(session: &mut Session, parts: usize, updates: usize) -> Result<(), Failure> {
    let mut pending = None;
    for _ in 0..updates {
        run(session, parts)?;
        let posted = post(session)?;
        if let Some(before) = pending.replace(posted) {
            collect(session, before)?;
        }
    }
    if let Some(last) = pending {
        collect(session, last)?;
    }
    Ok(())
}

fn run(session: &mut Session, parts: usize) -> Result<(), Failure> {
    for _ in 0..parts {
        session.run(Role::Grad)?;
    }
    Ok(session.run(Role::Apply)?)
}

pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        n => (sorted[(n - 1) / 2] + sorted[n / 2]) / 2.0,
    }
}
