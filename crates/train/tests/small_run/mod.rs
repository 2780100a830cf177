//! Complete runs of a small decoder, for tests that compare their losses.

mod training;

use flatout_train::Config;
use flatout_train::recipes;
pub use training::train_in;

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
