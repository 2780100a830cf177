//! Moments in fewer bytes: losses within half a percent of those with f32 moments, the memory saved, and the same bitwise
//! guarantees as with f32 moments.

use std::path::Path;

use flatout_ir::plan::Category;
use flatout_train::Config;
use flatout_train::recipes;
use flatout_train::resolve::compile;

use crate::small_run::{config, train_in};

const KINDS: [&str; 2] = ["optimizer.state=bf16", "optimizer.state=int8"];

/// The losses of a run, and the file of its last checkpoint.
fn run(config: &Config) -> (Vec<f32>, Vec<u8>) {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path().join("run");
    let losses = train_in(&dir, config, |_| {}).iter().map(|step| step.loss).collect();
    let last = config.train.steps.expect("a number of steps");
    (losses, saved(&dir, last))
}

fn saved(dir: &Path, step: u64) -> Vec<u8> {
    std::fs::read(dir.join(format!("checkpoints/step-{step}/state.safetensors"))).expect("a checkpoint")
}

fn mean(losses: &[f32]) -> f64 {
    losses.iter().map(|loss| *loss as f64).sum::<f64>() / losses.len() as f64
}

#[test]
fn losses_of_a_recipes_betas_stay_within_half_a_percent() {
    losses_stay_near("optimizer.betas=[0.9,0.95]");
}

#[test]
fn losses_with_slow_second_moments_stay_within_half_a_percent() {
    losses_stay_near("optimizer.betas=[0.9,0.999]");
}

/// Trains a decoder nearly to convergence with three seeds. Different rounding changes a single run by up to 0.3% in either
/// direction; the effect of moments is visible in the mean.
fn losses_stay_near(betas: &str) {
    const SEEDS: usize = 3;
    let trained = |state: &str, seed: usize| {
        let seed = format!("train.seed={}", seed + 1);
        let losses = run(&config(&["train.steps=200", "optimizer.lr=3e-3", betas, state, &seed])).0;
        (losses[0] as f64, mean(&losses[150..]))
    };
    let base: [(f64, f64); SEEDS] = std::array::from_fn(|seed| trained("optimizer.state=fp32", seed));
    assert!(base.iter().all(|(first, last)| *last < 0.75 * first), "it learns: {base:?}");
    for kind in KINDS {
        let ratios: [f64; SEEDS] = std::array::from_fn(|seed| trained(kind, seed).1 / base[seed].1);
        let off = ratios.iter().sum::<f64>() / SEEDS as f64 - 1.0;
        println!("{betas} {kind}: times {ratios:.5?}, {off:+.5} in the mean");
        assert!(off.abs() < 0.005, "{betas} {kind}: {ratios:?}");
    }
}

/// Splitting an update and loader threads change no bit of losses or state.
#[test]
fn bitwise_guarantees_hold() {
    for kind in KINDS {
        let of = |more: &[&str]| {
            run(&config(&[&[kind, "model.dropout=0.1", "train.micro_batch=4"], more].concat()))
        };
        let base = of(&[]);
        for more in ["fuse.optimizer=off", "recompute=full", "memory_plan=off", "loader.workers=3"] {
            assert!(of(&[more]) == base, "{kind} {more}");
        }
    }
}

/// Memory as `plan` prints it: bytes of the category `optimizer` per parameter.
#[test]
fn memory_falls_as_planned() {
    let bytes = |state: &str| {
        let words = [state.to_string(), "eval.rows=0".into()];
        let config = recipes::resolve("tiny", &[], &words).expect("a config");
        let compiled = compile::compile(&config, &compile::target()).expect("plans");
        let bytes = compiled.plans.categories()[Category::Optimizer.name()];
        bytes as f64 / compiled.parameters as f64
    };
    for (state, a_parameter) in [("fp32", 8.0), ("bf16", 4.0), ("int8", 2.0 + 8.0 / 256.0)] {
        let found = bytes(&format!("optimizer.state={state}"));
        println!("{state}: {found:.3} bytes a parameter");
        assert!((found / a_parameter - 1.0).abs() < 0.01, "{state}: {found}");
    }
}
