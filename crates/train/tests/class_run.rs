//! Runs that learn classes from random weights: their accuracy, early stopping and resuming, and predictions afterwards.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use flatout_data::{Example, ExampleTable, Vocabulary};
use flatout_report::report::AtEnd;
use flatout_train::Config;
use flatout_train::config::resolved::Resolved;
use flatout_train::device::Device;
use flatout_train::infer::classify::{classify, predict};
use flatout_train::infer::generate::Generator;
use flatout_train::metrics::goal::Metric;
use flatout_train::metrics::{ClassMetrics, Metrics};
use flatout_train::recipes;
use flatout_train::resolve::compile;
use flatout_train::run::checkpoint;
use flatout_train::run::events::{Event, Step};
use flatout_train::run::signal::StopFlag;
use flatout_train::run::{Entered, Resume, Run};
use flatout_train::tasks::dataset::Dataset;
use flatout_train::tasks::examples::Examples;
use flatout_train::training::trainer::{Notice, Opened, Outcome, train_on};
use flatout_train::weights::export::{Export, Width, export};
use flatout_train::weights::loaded::Loaded;

/// Texts of 4 to 23 tokens with words of their class among neutral words: a third of the words, but at least one.
fn texts(count: usize, seed: u64) -> ExampleTable {
    let mut state = seed;
    let mut below = |n: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % n
    };
    let mut table = ExampleTable::default();
    for _ in 0..count {
        // One text of three is of the positive class.
        let label = (below(3) == 0) as u32;
        let len = 4 + below(20) as usize;
        let sure = below(len as u64) as usize;
        let tokens: Vec<u32> = (0..len)
            .map(|i| match below(3) == 0 || i == sure {
                true => 10 + 10 * label + below(10) as u32,
                false => 30 + below(100) as u32,
            })
            .collect();
        table.push(Example { tokens: &tokens, weights: &vec![0.0; len], label: Some(label), images: &[] });
    }
    table
}

/// Texts for training, and held-out texts.
pub type Sides = (ExampleTable, ExampleTable);

/// A data set whose tokens are named after their numbers, as many as the model has.
fn material((train, held_out): &Sides, vocab: usize) -> Examples {
    let words = ["<bos>", "<eos>"].map(String::from).into_iter().chain((2..vocab).map(|n| format!("w{n}")));
    let vocabulary = Vocabulary::from_words(&words.collect::<Vec<_>>());
    Examples {
        train: Arc::new(train.clone()),
        held_out: Arc::new(held_out.clone()),
        vocabulary,
        classes: vec![],
        images: None,
        compared: None,
    }
}

/// Compiled plans for the data, in the form in which a run is opened.
fn opened(data: Examples, config: &Config) -> Opened {
    let mut resolved = Resolved::default();
    data.measure(config, &mut resolved);
    let compiled = compile::compile(&resolved.over(config), &compile::target()).expect("plans");
    Opened { data: Box::new(data), resolved, compiled, left_out: vec![], laps: Device::cpu().laps() }
}

/// A small bidirectional Gemma-3.
fn config(overrides: &[&str]) -> Config {
    let small = [
        "model.width=32",
        "model.layers=2",
        "model.heads=2",
        "model.kv_heads=1",
        "model.head_size=16",
        "model.ffn=48",
        "model.context=32",
        "model.activation=geglu",
        "model.norm_weight=one_plus",
        "model.post_norms=true",
        "model.window=8",
        "model.global_every=2",
        "model.embed_scale=5.65625",
        "model.attention=bidirectional",
        "data.task=classes",
        "model.head=classes",
        "model.classes=2",
        "model.head_dropout=0.1",
        "train.batch=16",
        "train.epochs=3",
        "train.class_weights=balanced",
        "eval.every_epochs=1",
        "eval.rows=200",
        "eval.metric=f1",
        "schedule.name=linear",
        "schedule.warmup_share=0.1",
        "schedule.final_ratio=0",
        "optimizer.lr=3e-3",
        "checkpoint.best=true",
        "checkpoint.every=0",
    ];
    let all: Vec<String> = small.iter().chain(overrides).map(|word| word.to_string()).collect();
    recipes::resolve("tiny", &[], &all).expect("a config")
}

pub struct RunResult {
    outcome: Outcome,
    steps: Vec<Step>,
    evals: Vec<(u64, f32, ClassMetrics)>,
}

pub fn run_in(dir: &Path, config: &Config, sides: &Sides) -> RunResult {
    let (Entered::Fresh(run) | Entered::Existing(run)) = Run::enter(dir, Resume::Auto).expect("a run");
    let config = config.clone();
    let opened = opened(material(sides, config.model.decoder().vocab), &config);
    let (mut steps, mut evals) = (vec![], vec![]);
    let notice = &mut |notice: Notice<'_>| match notice {
        Notice::Event(Event::Step(step)) => steps.push(step.clone()),
        Notice::Event(Event::Eval { step, loss, metrics, .. }) => {
            evals.push((
                *step,
                *loss,
                metrics.as_ref().and_then(Metrics::classes).expect("classes have metrics").clone(),
            ));
        }
        _ => {}
    };
    let device = Device::cpu();
    let outcome =
        train_on(&config, opened, &run, &device, &StopFlag::never(), &mut [&mut AtEnd::default()], notice);
    RunResult { outcome: outcome.expect("a run to its end"), steps, evals }
}

#[test]
fn a_separable_set_is_learned_from_random_weights() {
    let scratch = tempfile::tempdir().expect("a folder");
    let dir = scratch.path().join("run");
    let held_out = texts(200, 2);
    let sides = (texts(800, 1), held_out.clone());
    let ran = run_in(&dir, &config(&[]), &sides);
    assert_eq!((ran.steps.len(), ran.evals.len()), (150, 3));
    let metrics = ran.outcome.metrics.as_ref().and_then(Metrics::classes).expect("metrics");
    let f1 = metrics.positive.expect("two classes").f1;
    assert!(f1 > 0.95, "{}", metrics.words());
    assert_eq!(metrics.confusion.total(), 200);

    // The best checkpoint is the one with the best F1, and can be opened by its name.
    let best = checkpoint::best(&dir.join("checkpoints")).expect("a best one");
    let (at, value) = ran
        .evals
        .iter()
        .map(|(step, _, m)| (*step, m.positive.unwrap().f1))
        .fold((0, -1.0), |best, now| if now.1 > best.1 { now } else { best });
    assert_eq!((best.step, best.score), (at, Some((Metric::F1, value))));
    let device = Device::cpu();
    let mut loaded = Loaded::open(Path::new(&format!("{}@best", dir.display())), &[]).expect("a run");
    assert_eq!(loaded.step, Some(at));
    let judged = classify(&mut loaded, &device, &held_out).expect("classes");
    let (_, loss, metrics) = ran.evals.iter().find(|(step, ..)| *step == at).expect("an evaluation");
    assert_eq!(judged.metrics, *metrics);
    assert!((judged.loss - *loss as f64).abs() < 1e-5, "{} and {loss}", judged.loss);

    let said = predict(&mut loaded, &device, &held_out).expect("classes");
    let right = said.iter().zip(held_out.iter()).filter(|(said, text)| Some(said.class as u32) == text.label);
    assert_eq!(right.count() as f64 / 200.0, metrics.accuracy);
    assert!(said.iter().all(|said| (said.probabilities.iter().sum::<f64>() - 1.0).abs() < 1e-9));
    let report = fs::read_to_string(dir.join("report.md")).expect("a report");
    assert!(
        report.contains("| F1 of the positive class |") && report.contains("| class | predicted 0 |"),
        "{report}"
    );

    let refused = Generator::open(&dir, &device).err().expect("no text").to_string();
    assert!(refused.contains("predicts classes, not text"), "{refused}");
}

/// A model can be exported to a folder and read back with the same classes, and a run can begin from it or from a language model.
#[test]
fn a_class_head_is_exported_and_read_back() {
    let scratch = tempfile::tempdir().expect("a folder");
    let at = |name: &str| scratch.path().join(name);
    let held_out = texts(20, 2);
    let sides = (texts(64, 1), held_out.clone());
    let words = ["train.epochs=1", "embed_scale=5.6568542494923806"];
    run_in(&at("run"), &config(&words), &sides);
    let device = Device::cpu();
    let open = |name: &str| Loaded::open(&at(name), &[]).expect("a model");
    let wanted =
        Export { to: at("out"), dtype: Width::F32, shard_bytes: 5_000_000_000, force: false, adapter: false };
    let bf16 = Export { dtype: Width::Bf16, ..wanted.clone() };
    let refused = export(&mut open("run"), &bf16).unwrap_err().to_string();
    assert!(refused.contains("in bfloat16 a Gemma of this width multiplies them by 5.65625"), "{refused}");
    // The embedding factor that the library uses in f32.
    let mut loaded = open("run");
    loaded.config.model.decoder_mut().embed_scale = 32f64.sqrt() as f32 as f64;
    let made = export(&mut loaded, &wanted).expect("a folder");
    assert_eq!(made.architecture, "Gemma3TextForSequenceClassification");
    let ours = classify(&mut open("run"), &device, &held_out).expect("classes");
    let theirs = classify(&mut open("out"), &device, &held_out).expect("classes");
    assert!((ours.loss - theirs.loss).abs() < 1e-5, "{} and {}", ours.loss, theirs.loss);

    let from = format!("model.from={}", at("out").display());
    let words = [
        from.as_str(),
        "data.task=classes",
        "train.steps=1",
        "train.batch=2",
        "optimizer.lr=1e-30",
        "eval.rows=0",
        "warmup_steps=0",
    ]
    .map(String::from);
    let again = recipes::resolve("tiny", &[], &words).expect("a config");
    assert_eq!((again.model.classes(), again.model.decoder().head.name()), (Some(2), "classes"));
    run_in(&at("again"), &again, &sides);
    let same = classify(&mut open("again"), &device, &held_out).expect("classes");
    assert!((same.loss - theirs.loss).abs() < 1e-5, "{} and {}", same.loss, theirs.loss);
    let three = [&words[..], &["model.classes=3".to_string()]].concat();
    let refused = recipes::resolve("tiny", &[], &three).unwrap_err().0;
    assert!(refused.contains("has a head of 2"), "{refused}");
}

/// A base model has no class head: it is drawn, and everything else comes from the source.
#[test]
fn a_head_that_the_source_has_not_is_drawn() {
    let scratch = tempfile::tempdir().expect("a folder");
    let base = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/golden/checkpoints/gemma3");
    let from = format!("model.from={}", base.display());
    let words = [
        from.as_str(),
        "head=classes",
        "model.classes=2",
        "model.attention=bidirectional",
        "context=32",
        "steps=1",
        "batch=4",
    ];
    let words: Vec<String> = words
        .iter()
        .chain(&["eval.rows=0", "data.held_out=0", "lr=1e-30", "warmup_steps=0"])
        .map(|word| word.to_string())
        .collect();
    let config = recipes::resolve("tiny", &[], &words).expect("a config");
    assert_eq!(
        (
            config.model.decoder().vocab,
            config.model.decoder().head.name(),
            config.model.decoder().attention.name()
        ),
        (45, "classes", "bidirectional")
    );
    let mut table = ExampleTable::default();
    for label in [0, 1, 1, 0] {
        table.push(Example {
            tokens: &[2, 5, 7 + label],
            weights: &[0.0; 3],
            label: Some(label),
            images: &[],
        });
    }
    let sides = (table.clone(), table.clone());
    let dir = scratch.path().join("run");
    let ran = run_in(&dir, &config, &sides);
    assert!(ran.steps[0].loss.is_finite() && ran.steps[0].grad_norm > 0.0);
    let judged =
        classify(&mut Loaded::open(&dir, &[]).expect("a run"), &Device::cpu(), &table).expect("classes");
    assert_eq!(judged.texts, 4);
    // The update was zero, so the run still equals its beginning.
    assert!(
        (judged.loss / ran.steps[0].loss as f64 - 1.0).abs() < 1e-4,
        "{} {}",
        judged.loss,
        ran.steps[0].loss
    );
}

/// The files of a body have no head: a class head is drawn and exported with it, and a language model is refused.
#[test]
fn a_body_without_a_head_is_trained_and_exported_with_a_class_head() {
    let scratch = tempfile::tempdir().expect("a folder");
    let at = |name: &str| scratch.path().join(name);
    let body = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/golden/families/mistral-body");
    let from = format!("model.from={}", body.display());
    let words = ["context=32", "steps=2", "batch=4", "eval.rows=0", "data.held_out=0", "warmup_steps=0"];
    let words: Vec<String> = words.iter().chain([&from.as_str()]).map(|word| word.to_string()).collect();
    let refused = recipes::resolve("tiny", &[], &words).unwrap_err().0;
    assert!(
        refused.contains("has a MistralModel, which has no head") && refused.contains("model.head=classes"),
        "{refused}"
    );
    let refused = Loaded::open(&body, &[]).err().expect("no head").0;
    assert!(refused.contains("take a checkpoint with its head of tokens"), "{refused}");

    let classes = ["model.head=classes", "model.classes=2"].map(String::from);
    let config = recipes::resolve("tiny", &[], &[words, classes.to_vec()].concat()).expect("a config");
    let mut table = ExampleTable::default();
    for label in [0, 1, 1, 0] {
        let tokens = [1, 5, 7 + label];
        table.push(Example { tokens: &tokens, weights: &[0.0; 3], label: Some(label), images: &[] });
    }
    let ran = run_in(&at("run"), &config, &(table.clone(), table.clone()));
    assert!(ran.steps.iter().all(|step| step.grad_norm > 0.0));
    let open = |name: &str| Loaded::open(&at(name), &[]).expect("a model");
    let to = at("out");
    let wanted = Export { to, dtype: Width::F32, shard_bytes: 5_000_000_000, force: false, adapter: false };
    let made = export(&mut open("run"), &wanted).expect("a folder");
    assert_eq!(made.architecture, "MistralForSequenceClassification");
    let judged = |name: &str| classify(&mut open(name), &Device::cpu(), &table).expect("classes").loss;
    let (ours, theirs) = (judged("run"), judged("out"));
    assert!((ours - theirs).abs() < 1e-5, "{ours} and {theirs}");
}

/// Nothing is learned, so nothing improves: the run ends when its patience runs out, whether it is interrupted or not.
#[test]
fn patience_ends_a_run_and_is_restored() {
    let scratch = tempfile::tempdir().expect("a folder");
    let sides = (texts(64, 1), texts(20, 2));
    let words = [
        "optimizer.lr=1e-30",
        "epochs=none",
        "steps=100",
        "every_epochs=none",
        "eval.every=2",
        "patience=3",
        "checkpoint.best=false",
    ];
    let (whole, parted) = (scratch.path().join("whole"), scratch.path().join("parted"));
    let ran = run_in(&whole, &config(&words), &sides);
    assert_eq!(ran.outcome.steps, 8, "the first evaluation is the best, and three after it are not better");
    let why = ran.outcome.early.expect("a reason");
    assert!(why.starts_with("f1 was ") && why.contains("no better in 3 evaluations"), "{why}");
    assert_eq!(checkpoint::best(&whole.join("checkpoints")).map(|best| best.step), Some(2));
    assert!(fs::read_to_string(whole.join("report.md")).unwrap().contains("It ended early: f1 was"));

    let short = config(&[&words[..], &["train.steps=5"]].concat());
    assert_eq!(run_in(&parted, &short, &sides).outcome.early, None);
    let own = flatout_train::run::config(&parted).expect("a config");
    let on = own.resumed(&["train.steps=100".into()]).expect("a config");
    let ran = run_in(&parted, &on, &sides);
    assert_eq!((ran.outcome.steps, ran.outcome.early.is_some()), (8, true));
    // Resumed once more, it makes no further step.
    let ran = run_in(&parted, &on, &sides);
    assert_eq!((ran.outcome.steps, ran.steps.len()), (8, 0));
    let patient = on.resumed(&["train.patience=5".into()]).expect("a config");
    assert_eq!(run_in(&parted, &patient, &sides).outcome.steps, 12);
}

/// Padded and packed, in one micro-batch or several: the same updates.
#[test]
fn every_layout_gives_the_same_updates() {
    let scratch = tempfile::tempdir().expect("a folder");
    let sides = (texts(64, 1), texts(20, 2));
    let losses = |name: &str, words: &[&str]| -> Vec<(f32, f32)> {
        let words = [&["every_epochs=none", "epochs=none", "train.steps=4", "eval.every=0"], words].concat();
        let ran = run_in(&scratch.path().join(name), &config(&words), &sides);
        ran.steps.iter().map(|step| (step.loss, step.grad_norm)).collect()
    };
    let packed = losses("packed", &["packing=on"]);
    for (name, words) in [
        ("padded", &["packing=off", "length_buckets=off"][..]),
        ("buckets", &["packing=off"][..]),
        ("parts", &["packing=on", "train.micro_batch=4"][..]),
    ] {
        for ((loss, norm), (other, other_norm)) in packed.iter().zip(losses(name, words)) {
            let close = |a: f32, b: f32| (a - b).abs() < 2e-5 * a.abs();
            assert!(
                close(*loss, other) && close(*norm, other_norm),
                "{name}: {loss} {norm}, {other} {other_norm}"
            );
        }
    }
}

#[test]
fn examples_without_their_class_are_refused() {
    let scratch = tempfile::tempdir().expect("a folder");
    let (Entered::Fresh(run) | Entered::Existing(run)) =
        Run::enter(&scratch.path().join("run"), Resume::Auto).expect("a run");
    let refused = |label: Option<u32>| {
        let mut table = texts(20, 1);
        table.push(Example { tokens: &[5, 6], weights: &[0.0; 2], label, images: &[] });
        let config = config(&[]);
        let opened = opened(material(&(table, texts(20, 2)), config.model.decoder().vocab), &config);
        let failure =
            train_on(&config, opened, &run, &Device::cpu(), &StopFlag::never(), &mut [], &mut |_| {});
        failure.expect_err("a refusal").to_string()
    };
    assert_eq!(refused(Some(2)), "an example has class 2, counted from 0, and `model.classes` is 2");
    assert_eq!(refused(None), "`model.head` is classes and an example has none");
}
