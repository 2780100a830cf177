//! Runs of a small decoder through the whole loop, for proofs that compare their losses.

use std::path::Path;

use flatout_train::device::Device;
use flatout_train::events::{Event, Step};
use flatout_train::run::{Entered, Resume, Run};
use flatout_train::signal::StopFlag;
use flatout_train::trainer::{Notice, train};
use flatout_train::{Config, recipes};

/// Updates of a run.
pub const STEPS: u64 = 50;

/// The recipe `tiny`, made smaller, with overrides.
pub fn config(overrides: &[&str]) -> Config {
    let steps = format!("train.steps={STEPS}");
    let small = [
        "model.width=32",
        "model.layers=2",
        "model.heads=2",
        "model.kv_heads=1",
        "model.ffn=48",
        "model.context=32",
        steps.as_str(),
        "train.batch=8",
        "schedule.warmup_steps=5",
        "eval.rows=0",
        "checkpoint.every=0",
    ];
    let all: Vec<String> = small.iter().chain(overrides).map(|word| word.to_string()).collect();
    recipes::resolve("tiny", &[], &all).expect("a config")
}

/// Trains in a directory, from where it stands to the end; gives the step lines of this part.
pub fn train_in(dir: &Path, config: &Config, mut see: impl FnMut(&Event)) -> Vec<Step> {
    let (Entered::Fresh(run) | Entered::Existing(run)) = Run::enter(dir, Resume::Auto).expect("a run");
    let mut steps = vec![];
    let outcome = train(config, &run, &Device::cpu(), &StopFlag::never(), &mut |notice| {
        if let Notice::Event(event) = notice {
            if let Event::Step(step) = event {
                steps.push(step.clone());
            }
            see(event);
        }
    });
    assert_eq!(Some(outcome.expect("a run to its end").steps), config.train.steps);
    assert!(steps.iter().all(|step| step.loss.is_finite()));
    steps
}
