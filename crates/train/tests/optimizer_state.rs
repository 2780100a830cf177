//! Moments in fewer bytes: the losses of f32 moments within half a percent, the bytes that are saved, and everything that
//! is bitwise with f32 moments bitwise with these.

mod small_run;

use std::path::Path;

use flatout_ir::plan::Category;
use flatout_train::{Config, compile, recipes};
use small_run::{config, train_in};

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

/// `tiny` at a third of its width, until it has learnt most of what it can: with either kind the mean of the last losses is
/// that of f32 moments, at the betas of a recipe and at those with the slowest second moment.
#[test]
fn losses_stay_within_half_a_percent() {
    for betas in ["optimizer.betas=[0.9,0.95]", "optimizer.betas=[0.9,0.999]"] {
        let trained = |state: &str| run(&config(&["train.steps=300", "optimizer.lr=3e-3", betas, state])).0;
        let base = trained("optimizer.state=fp32");
        let (first, last) = (base[0] as f64, mean(&base[250..]));
        assert!(last < 0.75 * first, "it learns: {first} to {last}");
        for kind in KINDS {
            let losses = trained(kind);
            let ratio = mean(&losses[250..]) / last;
            println!("{betas} {kind}: {first:.4} to {last:.4} with fp32, times {ratio:.5}");
            assert!((ratio - 1.0).abs() < 0.005, "{betas} {kind}: {ratio}");
        }
    }
}

/// Cutting an update, and loader threads, change no bit of losses or state.
#[test]
fn what_is_bitwise_stays_so() {
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

/// What `plan` prints: bytes of the category `optimizer` a parameter.
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
