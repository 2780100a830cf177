use super::*;
use flatout_train::recipes::resolve;
use flatout_train::run::events::Event;
use flatout_train::run::signal::StopFlag;
use flatout_train::run::{Entered, Resume, Run};
use flatout_train::training::trainer::{Notice, train};

const SMALL: [&str; 9] = [
    "model.width=32",
    "model.layers=2",
    "model.heads=2",
    "model.kv_heads=1",
    "model.ffn=48",
    "model.context=32",
    "train.batch=8",
    "schedule.warmup_steps=3",
    "eval.rows=0",
];

fn config(recipe: &str, overrides: &[&str]) -> Config {
    let words: Vec<String> = SMALL.iter().chain(overrides).map(|word| word.to_string()).collect();
    resolve(recipe, &[], &words).expect("a config")
}

/// The losses of a run of the training loop.
fn trained(config: &Config) -> Vec<f32> {
    let folder = tempfile::tempdir().expect("a folder");
    let entered = Run::enter(&folder.path().join("run"), Resume::Never).expect("a run");
    let (Entered::Fresh(run) | Entered::Existing(run)) = entered;
    let mut losses = vec![];
    train(config, None, &run, &Device::cpu(), &StopFlag::never(), &mut [], &mut |notice| {
        if let Notice::Event(Event::Step(step)) = notice {
            losses.push(step.loss);
        }
    })
    .expect("a run to its end");
    losses
}

#[test]
fn a_measurement_makes_the_updates_of_the_run() {
    for split in ["train.micro_batch=8", "train.micro_batch=2"] {
        let config =
            config("tiny", &[split, "train.steps=6", "model.dropout=0.1", "data.document_mask=true"]);
        let mut bench = open(&config).expect("a bench");
        let times: Vec<f64> = [2, 3].into_iter().flat_map(|n| bench.steps(n).expect("updates")).collect();
        assert_eq!(times.len(), 5);
        assert!(times.iter().all(|ms| *ms > 0.0));
        let bits = |losses: &[f32]| losses.iter().map(|loss| loss.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(bench.losses()), bits(&trained(&config)), "{split}");
        assert!(bench.start().seconds() > 0.0 && bench.start().first_update_seconds > 0.0);
    }
}

#[test]
fn reported_figures_are_those_of_the_compiled_plans() {
    let config = config("tiny", &["fuse.qkv=off", "train.micro_batch=4"]);
    let stage = Stage::open(&config).expect("a stage");
    let compiled = stage.compile(&config).expect("plans");
    let bench = stage.bench(&config).expect("a bench");
    assert_eq!(bench.arena_bytes(), compiled.plans.arena_bytes as u64);
    assert_eq!(bench.peak_bytes(), bench.arena_bytes(), "the CPU has no driver");
    assert_eq!(bench.active()["fuse.qkv"], "off");
    let of = |role| compiled.plans.plan(role).expect("a plan").launches.len();
    assert_eq!(bench.launches(), 2 * of(Role::GRAD) + of(Role::Apply));
    assert_eq!(bench.tokens_per_update(), 8 * 32);
}

#[test]
fn a_recipe_without_data_is_measured_on_drawn_tokens() {
    let config = config("pretrain-226m", &["model.vocab=512", "model.head_size=16", "train.micro_batch=8"]);
    assert!(config.validate_for_training().is_err(), "it has no data to train on");
    let stage = Stage::open(&config).expect("a stage");
    assert_eq!(stage.data(), "tokens drawn at random");
    let mut first = stage.bench(&config).expect("a bench");
    first.steps(2).expect("updates");
    let chance = (512f32).ln();
    assert!(first.losses().iter().all(|loss| (loss - chance).abs() < 0.3), "{:?}", first.losses());
    let mut again = stage.bench(&config).expect("a bench");
    again.steps(2).expect("updates");
    assert_eq!(first.losses(), again.losses(), "the same rows");
    assert_ne!(first.losses()[0], first.losses()[1]);
}

#[test]
fn a_config_with_other_rows_opens_its_own_data() {
    let stage = Stage::open(&config("tiny", &[])).expect("a stage");
    let longer = config("tiny", &["model.context=64"]);
    let losses = stage.bench(&longer).expect("a bench").losses().to_vec();
    assert_eq!(losses, open(&longer).expect("a bench").losses());
}

#[test]
fn standard_input_cannot_be_measured() {
    let refused = open(&config("tiny", &["data.path=-"])).err().expect("a refusal").to_string();
    assert!(refused.starts_with("`data.path` is standard input"), "{refused}");
}
