//! A window schedule trains like models with these windows, one after the other, and evaluates like the model itself.

use std::path::Path;

use flatout_ir::Role;
use flatout_train::resolve::{compile, prediction};
use flatout_train::run::events::Event;
use flatout_train::weights::loaded::Loaded;

use crate::small_run::{STEPS, config, train_in};

/// The losses of a run as bits, and its evaluations.
fn losses(folder: &Path, name: &str, overrides: &[&str]) -> (Vec<u32>, Vec<f32>) {
    let shared = ["eval.rows=8", "eval.every=10", "model.dropout=0.1"];
    let mut evaluations = vec![];
    let steps = train_in(&folder.join(name), &config(&[overrides, &shared].concat()), |event| {
        if let Event::Eval { loss, .. } = event {
            evaluations.push(*loss);
        }
    });
    assert_eq!(steps.len(), STEPS as usize);
    (steps.iter().map(|step| step.loss.to_bits()).collect(), evaluations)
}

#[test]
fn one_window_trains_as_the_model_of_that_window() {
    let folder = tempfile::tempdir().expect("a folder");
    let losses = |name: &str, overrides: &[&str]| losses(folder.path(), name, overrides);
    let scheduled = losses("scheduled", &["schedule.windows=[4]"]);
    let own = losses("own", &["model.window=4"]);
    assert_eq!(scheduled.0, own.0);
    assert_ne!(scheduled.1, own.1, "evaluations use the window of the model, which here is unlimited");
    // A window of the whole context has no effect.
    assert_eq!(losses("wide", &["schedule.windows=[32]"]), losses("plain", &[]));
}

#[test]
fn parts_of_the_run_have_their_windows() {
    let folder = tempfile::tempdir().expect("a folder");
    let losses = |name: &str, overrides: &[&str]| losses(folder.path(), name, overrides).0;
    let two = losses("two", &["schedule.windows=[4,32]"]);
    let narrow = losses("narrow", &["schedule.windows=[4]"]);
    let half = STEPS as usize / 2;
    assert_eq!(two[..half], narrow[..half]);
    assert!(two[half..].iter().zip(&narrow[half..]).all(|(a, b)| a != b), "the second half sees further");
    // A local layer's window stays its own, whatever the schedule says.
    let local = ["model.window=4", "schedule.windows=[8]"];
    assert_eq!(losses("local", &local), losses("local alone", &["model.window=4"]));
}

#[test]
fn every_window_has_a_plan_and_its_own_arithmetic() {
    let config = config(&["schedule.windows=[4,32,8,4]"]);
    let compiled = compile::compile(&config, &compile::target()).expect("plans");
    let grads: Vec<Role> = compiled.plans.grads().map(|plan| plan.role).collect();
    assert_eq!(grads, [Role::Grad(0), Role::Grad(1), Role::Grad(2)]);
    let windows: Vec<usize> = compiled.capacities.iter().map(|capacities| capacities.window).collect();
    assert_eq!(windows, [32, 8, 4]);
    let windows = &compiled.windows;
    let flops: Vec<u64> = windows.iter().map(|window| window.flops_per_token).collect();
    assert!(flops[0] > flops[1] && flops[1] > flops[2], "{flops:?}");
    assert_eq!(windows.iter().map(|window| window.share).collect::<Vec<_>>(), [0.25, 0.25, 0.5]);
    let mean = (flops[0] + flops[1] + 2 * flops[2]) / 4;
    assert!(compiled.flops_per_token.abs_diff(mean) <= 1, "{} and {mean}", compiled.flops_per_token);
    let plain = compile::compile(&self::config(&[]), &compile::target()).expect("plans");
    assert_eq!(flops[0], plain.flops_per_token, "a window of the whole context costs what none costs");
    let flops = |role| prediction::step_cost_by(&compiled, 8, role).flops;
    let [widest, _, narrowest] = [0, 1, 2].map(|index| flops(Role::Grad(index)));
    let mean = prediction::step_cost(&compiled, 8).flops;
    assert!(narrowest < mean && mean < widest, "{narrowest} {mean} {widest}");
}

#[test]
fn a_schedule_that_cannot_be_is_refused() {
    let refused = |overrides: &[&str], words: &str| {
        let words_of = |overrides: &[&str]| overrides.iter().map(|word| word.to_string()).collect::<Vec<_>>();
        let recipe = if words.contains("decoders") { "vision-tiny" } else { "tiny" };
        let sentence = flatout_train::recipes::resolve(recipe, &[], &words_of(overrides)).expect_err(words).0;
        assert!(sentence.contains(words), "{sentence:?} lacks {words:?}");
    };
    refused(&["schedule.windows=[4,0]"], "a window of 0 tokens");
    refused(&["schedule.windows=[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17]"], "has 17 windows");
    refused(&["schedule.windows=[4]", "data.mean_tokens=20"], "rows of one length");
    refused(&["schedule.windows=[4]"], "for decoders of text");
}

/// A run with windows can be used for tasks that windows do not support.
#[test]
fn a_run_with_windows_answers_other_tasks() {
    let folder = tempfile::tempdir().expect("a folder");
    losses(folder.path(), "run", &["schedule.windows=[4,32]"]);
    let loaded = Loaded::open(&folder.path().join("run"), &["data.task=chat".into()]).expect("a model");
    assert!(loaded.config.schedule.windows.is_empty());
}
