//! The cost or saving of every switch: the same micro-batch compiled with each of its other values.

use flatout_ir::{Options, PlanSet, Target};

use super::{Done, Job};
use flatout_train::config::Config;
use flatout_train::resolve::compile::{Compiled, compile_for, settle_for};
use flatout_train::resolve::prediction;
use flatout_train::switches::active;
use flatout_train::switches::{Settled, Switch, Switches, TABLE};

/// A switch at another value.
#[derive(Clone, Debug, PartialEq)]
pub struct Alternative {
    pub switch: &'static str,
    pub value: &'static str,
    pub outcome: Outcome,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    Plans {
        arena_bytes: usize,
        /// The arena minus that of the present plans.
        more_bytes: i64,
        /// The time of a step, predicted as for the run itself.
        predicted_seconds: f64,
        fits: bool,
    },
    /// It cannot run here; the reason.
    Refused(String),
}

impl Alternative {
    /// Whether neither memory nor the predicted time changes: the switch acts outside the plans, inside kernels, or not at all.
    pub fn is_same(&self, step_seconds: f64) -> bool {
        matches!(self.outcome, Outcome::Plans { more_bytes: 0, predicted_seconds, .. }
            if (predicted_seconds / step_seconds - 1.0).abs() < 1e-9)
    }
}

pub(super) fn jobs<'a>(
    config: &'a Config,
    compiled: &'a Compiled,
    target_for: &dyn Fn(&Switches) -> Target,
) -> Vec<Job<'a>> {
    let prepared = active::Prepared::settled(&compiled.settled);
    let now = active::active(&compiled.plans, &compiled.target, prepared);
    let mut jobs: Vec<Job<'a>> = vec![];
    // Left out are the backend, which is another device; `auto`, which resolves to one of the other values; and switches that
    // read other tokens of the data, whose lengths are not known here.
    for switch in TABLE.iter().filter(|switch| switch.off.is_some() && !switch.rereads) {
        let is_now = |value: &str| now.get(switch.name).is_some_and(|state| state == value);
        for value in switch.values().iter().copied().filter(|value| *value != "auto" && !is_now(value)) {
            let other = config.with(&[format!("{}={value}", switch.path())]).expect("a value of the switch");
            let target = target_for(&other.switches);
            jobs.push(Box::new(move || {
                Done::Alternative(alternative(switch, value, &other, target, compiled))
            }));
        }
    }
    jobs
}

fn alternative(
    switch: &'static Switch,
    value: &'static str,
    config: &Config,
    target: Target,
    base: &Compiled,
) -> Option<Alternative> {
    let memory_bytes = target.memory_bytes;
    let unlimited = Target { memory_bytes: u64::MAX, ..target };
    let rows = base.micro_batch;
    let planned = |plans: &PlanSet, settled: &Settled, predicted_seconds: f64| {
        let state = |plans: &PlanSet, target: &Target, settled: &Settled| {
            switch.active(plans, target, active::Prepared::settled(settled))
        };
        // A value that leads to the present state, such as fusing what the model does not have, is no alternative.
        let is_other = state(plans, &unlimited, settled) != state(&base.plans, &base.target, &base.settled);
        let arena_bytes = plans.arena_bytes;
        (switch.field.is_none() || is_other).then_some(Outcome::Plans {
            arena_bytes,
            more_bytes: arena_bytes as i64 - base.plans.arena_bytes as i64,
            predicted_seconds,
            fits: arena_bytes as u64 + unlimited.driver_bytes <= memory_bytes,
        })
    };
    let seconds = |compiled: &Compiled| prediction::step_cost(compiled, config.train.batch).predicted_seconds;
    let outcome = match settle_for(config, &unlimited, rows) {
        // The same plans: the switch acts outside them or inside kernels.
        Ok(settled) if is_alike(&settled.options, &base.settled.options) => {
            planned(&base.plans, &settled, seconds(base))?
        }
        Ok(_) => match compile_for(config, &unlimited, rows, false) {
            Ok(other) => planned(&other.plans, &other.settled, seconds(&other))?,
            Err(refused) => Outcome::Refused(refused.to_string()),
        },
        Err(refused) => Outcome::Refused(refused.to_string()),
    };
    Some(Alternative { switch: switch.name, value, outcome })
}

/// Whether options lead to the same plans. The number of buckets is not compared, because it follows from the others.
fn is_alike(one: &Options, other: &Options) -> bool {
    Options { buckets: other.buckets, ..one.clone() } == *other
}
