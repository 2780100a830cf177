//! Samples that a run takes at its evaluations: texts equal those of `generate`, predictions those of the evaluation, and
//! training is unaffected.

use std::fs;
use std::path::Path;

use flatout_ir::{Class, PlanSet, Role};
use flatout_train::Config;
use flatout_train::device::Device;
use flatout_train::infer::generate::Generator;
use flatout_train::infer::sampling::Sampling;
use flatout_train::recipes;
use flatout_train::resolve::compile;
use flatout_train::run::events::{Event, Step};
use flatout_train::run::samples::Sample;
use flatout_train::run::signal::StopFlag;
use flatout_train::run::{Entered, Resume, Run};
use flatout_train::training::trainer::train;

use crate::small_run::{config, train_in};

const EVALUATED: [&str; 2] = ["eval.rows=4", "eval.every=20"];
const PROMPTS: &str = "samples.prompts=['the', 'once at the theatre']";

/// The steps of a run in a directory, and its samples.
fn trained(dir: &Path, config: &Config) -> (Vec<Step>, Vec<Sample>) {
    let mut samples = vec![];
    let steps = train_in(dir, config, |event| {
        if let Event::Sample(sample) = event {
            samples.push(sample.clone());
        }
    });
    (steps, samples)
}

fn losses(steps: &[Step]) -> Vec<[u32; 2]> {
    steps.iter().map(|step| [step.loss.to_bits(), step.grad_norm.to_bits()]).collect()
}

/// A run with samples has the bits of one without, and the texts that `generate` writes from its last checkpoint.
fn writes_what_is_generated(more: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let plain = config(&[&EVALUATED, more].concat());
    let greedy = ["samples.temperature=0", "samples.max_tokens=12", PROMPTS];
    let sampled = config(&[&EVALUATED, more, &greedy].concat());
    let (without, none) = trained(&folder.path().join("plain"), &plain);
    let dir = folder.path().join("sampled");
    let (with, samples) = trained(&dir, &sampled);
    assert_eq!(losses(&with), losses(&without), "{more:?}");
    assert!(none.is_empty());
    let steps: Vec<u64> = samples.iter().map(|sample| sample.step).collect();
    assert_eq!(steps, [20, 20, 40, 40, 50, 50], "{more:?}");
    let mut generator = Generator::open(&dir, &Device::cpu()).unwrap();
    let sampling = Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, seed: 0, max_tokens: 12 };
    for sample in &samples[4..] {
        let whole = generator.generate(&sample.prompt, sampling, |_| {}).unwrap();
        assert_eq!(format!("{}{}", sample.prompt, sample.text.as_deref().unwrap()), whole, "{more:?}");
    }
}

#[test]
fn samples_equal_generate_and_change_no_bit() {
    writes_what_is_generated(&[]);
}

#[test]
fn samples_are_of_the_average_where_it_is_evaluated() {
    writes_what_is_generated(&["train.ema=0.9", "model.dropout=0.1"]);
}

#[test]
fn samples_with_adapters() {
    writes_what_is_generated(&["adapter.kind=lora", "adapter.dropout=0.1", "train.micro_batch=2"]);
}

#[test]
fn a_resumed_run_takes_the_same_samples() {
    let folder = tempfile::tempdir().unwrap();
    let whole = config(
        &[
            &EVALUATED[..],
            &[PROMPTS, "samples.max_tokens=8", "model.dropout=0.1", "schedule.horizon_steps=50"],
        ]
        .concat(),
    );
    let (unbroken, samples) = trained(&folder.path().join("whole"), &whole);
    let broken = folder.path().join("broken");
    let (mut steps, _) = trained(&broken, &whole.with(&["train.steps=25".into()]).unwrap());
    let (more, later) = trained(&broken, &whole);
    steps.extend(more);
    assert_eq!(losses(&steps), losses(&unbroken));
    assert_eq!(later, samples[2..]);
    // A resumed run may ask for other samples, or for none.
    let (_, none) =
        trained(&broken, &whole.with(&["train.steps=60".into(), "samples.prompts=[]".into()]).unwrap());
    assert!(none.is_empty());
}

#[test]
fn plans_have_capacity_for_samples_only_on_request() {
    let plans = |words: &[&str]| {
        compile::compile(&config(&[&EVALUATED, words].concat()), &compile::target()).unwrap().plans
    };
    let (without, with) = (plans(&[]), plans(&[PROMPTS, "samples.max_tokens=8"]));
    assert!(without.plan(Role::Prefill).is_none() && with.plan(Role::Prefill).is_some());
    let cache = |plans: &PlanSet| -> usize {
        plans.slots.iter().filter(|slot| slot.class == Class::Cache).map(|slot| slot.ty.bytes()).sum()
    };
    assert_eq!(cache(&without), 0);
    // Keys and values of two layers with one head of 16 in f32, for a BOS token, a prompt of 19 bytes and 8 tokens.
    assert_eq!(cache(&with), 2 * 2 * 16 * (1 + 19 + 8) * 4);
    assert!(with.arena_bytes >= without.arena_bytes + cache(&with));
}

#[test]
fn invalid_sample_settings_are_refused() {
    let refused = |words: &[&str]| {
        let words: Vec<String> = EVALUATED.iter().chain(words).map(|word| word.to_string()).collect();
        recipes::resolve("tiny", &[], &words).unwrap_err().to_string()
    };
    for (words, wanted) in [
        (&["samples.prompts=['a']", "eval.rows=0"][..], "`samples.prompts` is given but `eval.rows` is 0"),
        (&["samples.count=4"], "the model predicts no classes: give samples.prompts instead"),
        (
            &["samples.prompts=['a']", "samples.max_tokens=500"],
            "leaves no room for a prompt in a context of 128",
        ),
        (&["samples.max_tokens=0"], "`samples.max_tokens` is 0 and must be at least 1"),
        (&["samples.temperature=-1"], "`samples.temperature` is -1 and must be from 0 to 100"),
        (&["samples.prompts=['a']", "model.attention=bidirectional"], "is bidirectional (model.attention)"),
    ] {
        let sentence = refused(words);
        assert!(sentence.contains(wanted), "{words:?}: {sentence}");
    }
    let folder = tempfile::tempdir().unwrap();
    let long = format!("samples.prompts=['{}']", "the ".repeat(40));
    let asked = config(&[&EVALUATED[..], &[long.as_str(), "samples.max_tokens=8"]].concat());
    let (Entered::Fresh(run) | Entered::Existing(run)) = Run::enter(folder.path(), Resume::Auto).unwrap();
    let outcome = train(&asked, None, &run, &Device::cpu(), &StopFlag::never(), &mut [], &mut |_| {});
    let sentence = outcome.unwrap_err().to_string();
    assert!(sentence.contains("has 41 tokens, and there is room for 32"), "{sentence}");
    let unknown = asked.with(&["samples.prompts=['the xylophone']".into()]).unwrap();
    let outcome = train(&unknown, None, &run, &Device::cpu(), &StopFlag::never(), &mut [], &mut |_| {});
    let sentence = outcome.unwrap_err().to_string();
    assert!(sentence.starts_with("`samples.prompts`: The word \"xylophone\" is not one of"), "{sentence}");
}

/// With a sample for every evaluated row, the share of right ones is the accuracy of the evaluation.
fn predictions(dir: &Path, config: &Config) -> Vec<Sample> {
    let (mut accuracies, mut samples) = (vec![], vec![]);
    train_in(dir, config, |event| match event {
        Event::Eval { metrics, .. } => {
            accuracies.push(serde_json::to_value(metrics).unwrap()["accuracy"].as_f64().unwrap());
        }
        Event::Sample(sample) => samples.push(sample.clone()),
        _ => {}
    });
    let each = samples.len() / accuracies.len();
    for (samples, accuracy) in samples.chunks(each).zip(&accuracies) {
        let seen = samples.iter().map(|sample| sample.prediction.as_ref().unwrap());
        let right = seen.clone().filter(|seen| seen.is_right).count();
        assert_eq!(right as f64 / each as f64, *accuracy);
        for seen in seen {
            assert_eq!(seen.is_right, seen.truth.as_ref() == Some(&seen.predicted));
            assert!(seen.probability > 0.0 && seen.probability <= 1.0);
        }
    }
    samples
}

#[test]
fn images_are_logged_with_their_predictions() {
    let folder = tempfile::tempdir().unwrap();
    let small = [
        "model.width=32",
        "model.layers=1",
        "model.heads=2",
        "data.synthetic_rows=400",
        "data.held_out=0.125",
        "train.steps=30",
        "train.batch=16",
        "schedule.warmup_steps=2",
        "eval.rows=24",
        "eval.every=15",
        "eval.micro_batch=7",
        "samples.count=24",
        "checkpoint.every=0",
    ];
    let words: Vec<String> = small.iter().map(|word| word.to_string()).collect();
    let config = recipes::resolve("vision-tiny", &[], &words).expect("a config");
    let dir = folder.path().join("run");
    let samples = predictions(&dir, &config);
    assert_eq!(samples.len(), 48);
    for sample in &samples {
        let file = fs::read(dir.join("samples").join(sample.image.as_ref().unwrap())).unwrap();
        assert!(file.starts_with(b"\x89PNG") && file.len() <= 4096, "{} bytes", file.len());
    }
    let few = config.with(&["samples.count=3".into()]).unwrap();
    let (_, few) = trained(&folder.path().join("few"), &few);
    assert_eq!(
        few.iter().map(|sample| sample.image.as_deref().unwrap()).collect::<Vec<_>>()[..3],
        ["0.png", "8.png", "16.png"]
    );
}

#[test]
fn texts_are_logged_with_their_predictions() {
    let folder = tempfile::tempdir().unwrap();
    let words = [
        "data.task=classes",
        "model.head=classes",
        "model.classes=2",
        "data.synthetic_rows=200",
        "data.held_out=0.2",
        "train.steps=20",
        "eval.rows=16",
        "samples.count=16",
    ];
    let samples = predictions(&folder.path().join("run"), &config(&words));
    assert!(samples.iter().all(|sample| !sample.prompt.is_empty() && sample.text.is_none()), "{samples:?}");
    let texts: std::collections::BTreeSet<&str> =
        samples.iter().map(|sample| sample.prompt.as_str()).collect();
    assert!(texts.len() > 4, "{texts:?}");
}
