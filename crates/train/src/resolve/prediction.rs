//! Predicts the time of an update from the compiled plans and the target's rates and timings; progress is compared with this
//! prediction.

use std::collections::BTreeMap;

use flatout_ir::cost::{Cost, by_work, played, rate};
use flatout_ir::passes::lanes::{lanes_a_rank, roles_after};
use flatout_ir::schedule::SimulatedTime;
use flatout_ir::{OpKind, Role, Work};

use crate::config::Config;
use crate::resolve::compile::Compiled;

/// The cost of one update of `batch` rows: `grad` for every micro-batch, `keep` and `fold` after lanes, then `apply`. For several
/// ranks, the time of one of them including its exchanges.
pub fn step_cost(compiled: &Compiled, batch: usize) -> Cost {
    cost_of(compiled, &mean_runs(compiled, batch))
}

/// The same for an update whose micro-batches all run one gradient plan, as those of one window do.
pub fn step_cost_by(compiled: &Compiled, batch: usize, grad: Role) -> Cost {
    cost_of(compiled, &by_one_plan(mean_runs(compiled, batch), grad))
}

fn cost_of(compiled: &Compiled, runs: &[(Role, f64)]) -> Cost {
    let mut total = Cost::default();
    by_work_of(compiled, runs).into_iter().for_each(|(_, cost)| total += cost);
    if compiled.target.ranks > 1 {
        let (predicted, roofline) = played_of(compiled, runs);
        (total.predicted_seconds, total.roofline_seconds) = (predicted.seconds, roofline.seconds);
    }
    total
}

/// Replaces all runs of gradient plans by runs of one of them.
fn by_one_plan(runs: Vec<(Role, f64)>, grad: Role) -> Vec<(Role, f64)> {
    let (grads, others): (Vec<_>, Vec<_>) = runs.into_iter().partition(|(role, _)| role.is_grad());
    let micro_batches = grads.iter().map(|(_, times)| times).sum();
    [(grad, micro_batches)].into_iter().chain(others).collect()
}

/// Simulates one update whose exchanges overlap with work that does not wait for them: by the target's timings, and at best by
/// its rates.
pub fn step_played(compiled: &Compiled, batch: usize) -> (SimulatedTime, SimulatedTime) {
    played_of(compiled, &mean_runs(compiled, batch))
}

fn played_of(compiled: &Compiled, runs: &[(Role, f64)]) -> (SimulatedTime, SimulatedTime) {
    let (mut predicted, mut roofline) = (SimulatedTime::default(), SimulatedTime::default());
    for (role, times) in runs.iter().copied() {
        if let Some(plan) = compiled.plans.plan(role) {
            let of_plan = played(plan, &compiled.target);
            predicted += of_plan.0.times(times);
            roofline += of_plan.1.times(times);
        }
    }
    (predicted, roofline)
}

/// The cost by kind of work.
pub fn step_by_work(compiled: &Compiled, batch: usize) -> Vec<(Work, Cost)> {
    by_work_of(compiled, &mean_runs(compiled, batch))
}

fn by_work_of(compiled: &Compiled, runs: &[(Role, f64)]) -> Vec<(Work, Cost)> {
    let mut sums: BTreeMap<Work, Cost> = BTreeMap::new();
    for (role, times) in runs.iter().copied() {
        let of_plan = compiled.plans.plan(role).map(|plan| by_work(plan, &compiled.target));
        for (work, cost) in of_plan.unwrap_or_default() {
            let cost = if times.fract() == 0.0 { cost.times(times as u64) } else { cost.scaled(times) };
            *sums.entry(work).or_default() += cost;
        }
    }
    sums.into_iter().collect()
}

/// The mean number of runs of each plan per update, on one rank.
fn mean_runs(compiled: &Compiled, batch: usize) -> Vec<(Role, f64)> {
    let (ranks, options) = (compiled.target.ranks, &compiled.settled.options);
    let lanes = lanes_a_rank(options);
    let mut runs: Vec<(Role, f64)> = match &compiled.settled.arrangement {
        None => {
            let of_lane = batch.div_ceil(lanes * ranks).div_ceil(compiled.micro_batch);
            let micro_batches = (lanes * of_lane) as f64;
            match &compiled.windows[..] {
                [] => vec![(Role::GRAD, micro_batches)],
                all => (0..).map(Role::Grad).zip(all.iter().map(|of| of.share * micro_batches)).collect(),
            }
        }
        Some(arrangement) => {
            let runs = arrangement.runs.iter().map(|times| times / ranks as f64);
            (0..).map(Role::Grad).zip(runs).collect()
        }
    };
    let mut behind: BTreeMap<Role, f64> = BTreeMap::new();
    let roles = (0..lanes).flat_map(|lane| roles_after(lane, lanes));
    roles.for_each(|role| *behind.entry(role).or_default() += 1.0);
    runs.extend(behind);
    runs.push((Role::Apply, 1.0));
    runs
}

/// The plans of an update in order, with their numbers of runs. If lengths vary, those of a typical update: the mean number of
/// micro-batches, distributed by how often each plan runs.
pub fn typical_runs(compiled: &Compiled, batch: usize) -> Vec<(Role, u64)> {
    let mean = mean_runs(compiled, batch);
    let (grads, others): (Vec<_>, Vec<_>) = mean.into_iter().partition(|(role, _)| role.is_grad());
    let parts = (grads.iter().map(|(_, runs)| runs).sum::<f64>().round() as u64).max(1);
    let mut shared: Vec<(Role, u64)> = grads.iter().map(|(role, runs)| (*role, *runs as u64)).collect();
    let mut by_rest: Vec<usize> = (0..grads.len()).collect();
    by_rest.sort_by(|a, b| grads[*b].1.fract().total_cmp(&grads[*a].1.fract()));
    let left = parts.saturating_sub(shared.iter().map(|(_, runs)| runs).sum());
    by_rest.iter().cycle().take(left as usize).for_each(|index| shared[*index].1 += 1);
    shared.retain(|(_, runs)| *runs > 0);
    shared.extend(others.into_iter().map(|(role, runs)| (role, runs as u64)));
    shared
}

/// The plans of an update of one window in order, with their numbers of runs.
pub fn runs_of_window(compiled: &Compiled, batch: usize, grad: Role) -> Vec<(Role, u64)> {
    let runs = by_one_plan(mean_runs(compiled, batch), grad);
    runs.into_iter().map(|(role, times)| (role, times.round() as u64)).collect()
}

/// Tokens that an update learns from or reads, without padding; the mean if lengths vary.
pub fn tokens_per_update(config: &Config, compiled: &Compiled) -> usize {
    match &compiled.settled.arrangement {
        None => config.train.batch * config.together() * config.model.tokens(),
        Some(arrangement) => arrangement.real_tokens.round() as usize,
    }
}

/// Whether predictions add up measured times of this device's kernels; otherwise they are lower bounds from peak rates.
pub fn is_calibrated(compiled: &Compiled) -> bool {
    compiled.target.timings.knows_kernels()
}

/// The device's peak FLOP/s in the fastest type in which the run computes products. `None` on the CPU, whose rates are only
/// constants for predictions.
pub fn peak_flops(compiled: &Compiled) -> Option<f64> {
    let (target, grad) = (&compiled.target, compiled.plans.plan(Role::GRAD)?);
    let products = grad.launches.iter().filter(|l| l.op.kind() == OpKind::Product);
    let peak = products.map(|l| rate(l, &target.rates)).max_by(f64::total_cmp)?;
    (target.name != "cpu").then_some(peak)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipes;
    use crate::resolve::compile;

    #[test]
    fn a_typical_update_has_as_many_micro_batches_as_the_mean() {
        let compiled = |more: &[&str]| {
            let words = ["model.context=64", "data.mean_tokens=16", "train.batch=32", "packing=on"];
            let words: Vec<String> = words.iter().chain(more).map(|word| word.to_string()).collect();
            compile::compile(&recipes::resolve("tiny", &[], &words).unwrap(), &compile::target()).unwrap()
        };
        let whole = compiled(&["train.micro_batch=32"]);
        let runs = typical_runs(&whole, 32);
        assert_eq!((runs.len(), runs[0].1, runs[1]), (2, 1, (Role::Apply, 1)), "{runs:?}");
        let mean = mean_runs(&whole, 32);
        let most = mean[..mean.len() - 1].iter().max_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
        assert_eq!(runs[0].0, most.0, "the plan that runs most often: {mean:?}");
        let split = compiled(&["train.micro_batch=2"]);
        let sum = |runs: &[(Role, u64)]| runs.iter().filter(|(role, _)| role.is_grad()).map(|r| r.1).sum();
        let parts: u64 = sum(&typical_runs(&split, 32));
        let expected: f64 = mean_runs(&split, 32).iter().map(|(_, runs)| runs).sum::<f64>() - 1.0;
        assert_eq!(parts, expected.round() as u64);
        // Padding is computed and therefore part of the prediction.
        let naive = compiled(&["train.micro_batch=32", "packing=off", "length_buckets=off"]);
        assert!(step_cost(&naive, 32).flops > 2 * step_cost(&whole, 32).flops);
    }

    #[test]
    fn a_step_is_its_micro_batches_and_one_update() {
        let compiled = |rows: &str| {
            let words = ["train.batch=8".to_string(), format!("train.micro_batch={rows}")];
            compile::compile(&recipes::resolve("tiny", &[], &words).unwrap(), &compile::target()).unwrap()
        };
        let (whole, split) = (step_cost(&compiled("8"), 8), step_cost(&compiled("2"), 8));
        assert!(whole.roofline_seconds > 0.0 && whole.roofline_seconds.is_finite());
        // The same rows in four parts need the same arithmetic and read the weights four times.
        assert!((whole.flops as f64 / split.flops as f64 - 1.0).abs() < 0.05);
        assert!(split.bytes > whole.bytes);
        let lanes = ["train.batch=8", "train.lanes=8"].map(String::from);
        let lanes = recipes::resolve("tiny", &[], &lanes).unwrap();
        let lanes = compile::compile(&lanes, &compile::target()).unwrap();
        let runs = typical_runs(&lanes, 8);
        let times = |role: Role| runs.iter().find(|(own, _)| *own == role).map(|(_, times)| *times);
        let kept = [Role::Keep(0), Role::Keep(1), Role::Keep(2), Role::Fold(0), Role::Fold(1), Role::Fold(2)];
        assert_eq!(kept.map(times), [4, 2, 1, 4, 2, 1].map(Some), "{runs:?}");
        assert_eq!((times(Role::GRAD), runs.last()), (Some(8), Some(&(Role::Apply, 1))));
        assert!(step_cost(&lanes, 8).bytes > split.bytes);
        assert_eq!(peak_flops(&compiled("8")), None, "the CPU promises no peak");
        let mut gpu = compiled("8");
        gpu.target.name = "h200".into();
        assert_eq!(peak_flops(&gpu), Some(gpu.target.rates.f32_flops));
    }
}
