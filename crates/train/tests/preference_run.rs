//! Runs that learn preferences: their beginning, resuming, the reference, and learning.

use std::fs;
use std::path::Path;

use flatout_ir::{OpKind, Role};
use flatout_train::config::Config;
use flatout_train::device::Device;
use flatout_train::infer::evaluate;
use flatout_train::metrics::{Metrics, RewardMetrics};
use flatout_train::resolve::compile::{compile, target};
use flatout_train::run::checkpoint::TensorFile;
use flatout_train::run::events::{Event, Step};
use flatout_train::weights::loaded::Loaded;
use flatout_train::{recipes, run};

use crate::small_run::train_in;

const SMALL: [&str; 15] = [
    "backend=cpu",
    "precision=fp32",
    "data.task=preference",
    "data.synthetic_rows=300",
    "data.held_out=0.1",
    "model.width=32",
    "model.layers=2",
    "model.heads=2",
    "model.kv_heads=1",
    "model.ffn=48",
    "model.vocab=330",
    "model.context=64",
    "train.batch=4",
    "eval.rows=8",
    "schedule.warmup_steps=2",
];

fn config(overrides: &[&str]) -> Config {
    let words: Vec<String> = SMALL.iter().chain(overrides).map(|word| word.to_string()).collect();
    recipes::resolve("tiny", &[], &words).expect("a config")
}

fn rewards(step: &Step) -> RewardMetrics {
    *step.metrics.as_ref().and_then(Metrics::rewards).expect("rewards")
}

/// The reference scores that a run stored.
fn scores(run: &Path) -> Vec<Vec<u8>> {
    let file = TensorFile::open(&run.join("reference.safetensors")).expect("scores");
    let read = |name: &String| {
        let mut bytes = vec![0; file.entries()[name].bytes()];
        file.read_into(name, &mut bytes).expect("a tensor");
        bytes
    };
    file.entries().keys().filter(|name| *name != "key").map(read).collect()
}

/// Kept logits have the bits of those that are computed again.
#[test]
fn keeping_logits_changes_no_bit_and_saves_a_product() {
    let folder = tempfile::tempdir().expect("a folder");
    let words = |recompute| ["model.vocab=336", "train.steps=3", "train.micro_batch=2", recompute];
    let losses = ["recompute=none", "recompute=cheap"].map(|recompute| {
        let steps = train_in(&folder.path().join(recompute), &config(&words(recompute)), |_| {});
        steps.iter().map(|step| step.loss.to_bits()).collect::<Vec<_>>()
    });
    assert_eq!(losses[0], losses[1]);
    let flops = ["recompute=none", "recompute=cheap"].map(|recompute| {
        let compiled = compile(&config(&words(recompute)), &target()).expect("plans");
        let plan = compiled.plans.plan(Role::GRAD).expect("a gradient plan");
        plan.launches.iter().filter(|l| l.op.kind() == OpKind::HeadLossGrad).map(|l| l.flops).sum::<u64>()
    });
    assert!(flops[0] > 0 && 3 * flops[0] == 2 * flops[1], "{flops:?}");
}

/// The reference is the model at the start of training: nothing is preferred yet.
#[test]
fn the_first_loss_is_the_logarithm_of_2() {
    let folder = tempfile::tempdir().expect("a folder");
    for (name, more) in [
        ("all", &[][..]),
        ("lora", &["adapter.kind=lora"]),
        ("dora", &["adapter.kind=dora"]),
        ("apart", &["shared_prefix=off"]),
        ("rows", &["packing=off", "train.micro_batch=2"]),
    ] {
        let run = folder.path().join(name);
        let steps = train_in(&run, &config(&[&["train.steps=2"], more].concat()), |_| {});
        let off = (steps[0].loss as f64 - 2f64.ln()).abs();
        assert!(off < 1e-6, "{name}: {} is off by {off:.1e}", steps[0].loss);
        assert!(rewards(&steps[0]).reward_margin.abs() < 1e-5, "{name}: {:?}", rewards(&steps[0]));
        assert!(steps[1].loss != steps[0].loss, "{name}: the second step is another");
    }
    // A fresh adapter adds nothing, so the reference is the model without it; layouts differ in their last bits.
    let [all, lora, apart] = ["all", "lora", "apart"].map(|name| scores(&folder.path().join(name)));
    let values = |bytes: &[Vec<u8>]| -> Vec<f32> {
        let words = bytes.iter().flat_map(|side| side.chunks_exact(4));
        words.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
    };
    assert_eq!(all, lora);
    let off = crate::distance::relative(&values(&apart), &values(&all));
    assert!(off < 1e-6, "{off:.1e}");
}

/// Trains without a break, copies the directory as it is once a step is saved, and resumes the copy to the end.
fn resumes_exactly(overrides: &[&str]) {
    let folder = tempfile::tempdir().expect("a folder");
    let (whole, broken) = (folder.path().join("whole"), folder.path().join("broken"));
    let often = ["train.steps=12", "checkpoint.every=6", "checkpoint.keep=3", "eval.every=6"];
    let config = config(&[overrides, &often].concat());
    let mut wanted = vec![];
    let unbroken = train_in(&whole, &config, |event| {
        if matches!(event, Event::Saved { step: 6, .. }) {
            copy(&whole, &broken);
        }
        wanted.extend(eval(event));
    });
    let config = run::config(&broken).and_then(|config| config.resumed(&[])).expect("the run's own config");
    let mut got = vec![];
    let rest = train_in(&broken, &config, |event| got.extend(eval(event)));
    let numbers = |steps: &[Step]| -> Vec<(u64, u32, RewardMetrics)> {
        steps.iter().map(|step| (step.step, step.loss.to_bits(), rewards(step))).collect()
    };
    assert_eq!(numbers(&rest), numbers(&unbroken[6..]), "{overrides:?}");
    assert_eq!(got.last(), wanted.last(), "{overrides:?}");
    let state =
        |run: &Path| fs::read(run.join("checkpoints/step-12/state.safetensors")).expect("a checkpoint");
    assert!(state(&whole) == state(&broken), "the weights differ with {overrides:?}");
}

fn eval(event: &Event) -> Option<(u64, u32, Option<Metrics>)> {
    match event {
        Event::Eval { step, loss, metrics, .. } => Some((*step, loss.to_bits(), metrics.clone())),
        _ => None,
    }
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a folder");
    for entry in fs::read_dir(from).expect("a folder").flatten() {
        let (path, target) = (entry.path(), to.join(entry.file_name()));
        if path.is_dir() {
            copy(&path, &target);
        } else {
            fs::copy(&path, &target).expect("a file");
        }
    }
}

#[test]
fn resumed_runs_end_in_the_same_bits() {
    resumes_exactly(&["model.dropout=0.1", "train.micro_batch=2"]);
    resumes_exactly(&["adapter.kind=lora", "preference.loss=ipo", "precision=bf16"]);
    resumes_exactly(&["preference.loss=orpo"]);
    resumes_exactly(&["preference.loss=kto", "train.micro_batch=2"]);
}

/// Stored scores equal the computed ones to the bit; a file with scores of other answers, or a missing file, ends the run.
#[test]
fn a_resumed_run_reads_the_stored_reference_scores() {
    let folder = tempfile::tempdir().expect("a folder");
    let [one, other] = ["one", "other"].map(|name| folder.path().join(name));
    let config = config(&["train.steps=3", "checkpoint.every=0"]);
    train_in(&one, &config, |_| {});
    train_in(&other, &config, |_| {});
    let kept = fs::read(one.join("reference.safetensors")).expect("scores");
    assert!(kept == fs::read(other.join("reference.safetensors")).expect("scores"), "computed twice");
    // A process that was killed in the reference pass left a run without scores and without a checkpoint.
    fs::remove_file(other.join("reference.safetensors")).expect("gone");
    fs::remove_dir_all(other.join("checkpoints")).expect("gone");
    let again = train_in(&other, &config, |_| {});
    assert!(kept == fs::read(other.join("reference.safetensors")).expect("scores"), "computed again");
    let first = train_in(&folder.path().join("third"), &config, |_| {});
    let losses = |steps: &[Step]| steps.iter().map(|step| step.loss.to_bits()).collect::<Vec<_>>();
    assert_eq!(losses(&again), losses(&first));

    let longer =
        run::config(&one).and_then(|config| config.resumed(&["train.steps=4".into()])).expect("a config");
    fs::remove_file(one.join("reference.safetensors")).expect("gone");
    let sentence = refused(&one, &longer);
    assert!(sentence.contains("reference.safetensors is not there"), "{sentence}");
    let mut others = kept.clone();
    let at = others.windows(7).position(|word| word == b"answers").expect("a key");
    others[at + 12] ^= 1;
    fs::write(one.join("reference.safetensors"), others).expect("a file");
    let sentence = refused(&one, &longer);
    assert!(sentence.contains("belongs to other answers"), "{sentence}");
}

/// The error with which a run refuses to resume.
fn refused(dir: &Path, config: &Config) -> String {
    use flatout_train::run::signal::StopFlag;
    use flatout_train::run::{Resume, Run};
    use flatout_train::training::trainer::train;
    let (run::Entered::Fresh(run) | run::Entered::Existing(run)) =
        Run::enter(dir, Resume::Auto).expect("a run");
    let stop = StopFlag::never();
    match train(config, None, &run, &Device::cpu(), &stop, &mut [], &mut |_| {}) {
        Err(failure) => failure.to_string(),
        Ok(_) => panic!("it is refused"),
    }
}

/// Another run is the reference: its scores equal those it has for itself, and the first loss is not log 2.
#[test]
fn another_model_can_be_the_reference() {
    let folder = tempfile::tempdir().expect("a folder");
    let [base, from, own] = ["base", "from", "own"].map(|name| folder.path().join(name));
    let few = ["train.steps=4", "checkpoint.every=0", "optimizer.lr=0.01"];
    train_in(&base, &config(&few), |_| {});
    let tokenizer = format!("data.tokenizer={}", base.join("tokenizer.json").display());
    let begin = format!("model.from={}", base.display());
    let named = format!("preference.reference={}", base.display());
    // A run that begins from the other run, and one that is only compared with it.
    train_in(&from, &config(&[&few[..], &[&begin, &tokenizer]].concat()), |_| {});
    let steps = train_in(&own, &config(&[&few[..], &[&named, &tokenizer, "train.seed=0"]].concat()), |_| {});
    assert_eq!(scores(&own), scores(&from));
    assert!((steps[0].loss as f64 - 2f64.ln()).abs() > 1e-3, "{}", steps[0].loss);
    let sentence = refused(
        &folder.path().join("none"),
        &config(&[&few[..], &["preference.reference=nowhere", &tokenizer]].concat()),
    );
    assert!(sentence.contains("nowhere does not exist"), "{sentence}");
}

/// `flatout eval` of a run gives the results of its last evaluation.
#[test]
fn a_run_is_evaluated_as_it_was_in_training() {
    let folder = tempfile::tempdir().expect("a folder");
    for loss in ["dpo", "simpo", "kto"] {
        let run = folder.path().join(loss);
        let named = format!("preference.loss={loss}");
        let mut last = None;
        train_in(&run, &config(&["train.steps=6", "optimizer.lr=0.01", &named]), |event| {
            last = eval(event).or(last.take());
        });
        let (_, bits, metrics) = last.expect("an evaluation");
        let mut loaded = Loaded::open(&run, &[]).expect("a model");
        let rows = evaluate::rows(&mut loaded, &[]).expect("rows");
        let found = evaluate::evaluate(&mut loaded, &Device::cpu(), &rows).expect("an evaluation");
        assert!((found.loss - f32::from_bits(bits) as f64).abs() < 1e-5, "{loss}: {found:?}");
        let [got, wanted] =
            [found.metrics, metrics].map(|m| *m.as_ref().and_then(Metrics::rewards).expect("rewards"));
        assert_eq!(got.reward_accuracy, wanted.reward_accuracy, "{loss}");
        assert!((got.reward_margin - wanted.reward_margin).abs() < 1e-4, "{loss}: {got:?} {wanted:?}");
        assert_eq!(found.rows, 8);
    }
}

/// Every loss increases the reward margin on the pairs it learns.
#[test]
fn every_loss_learns() {
    let folder = tempfile::tempdir().expect("a folder");
    for loss in ["dpo", "ipo", "hinge", "robust", "apo_zero", "simpo", "orpo", "kto"] {
        let named = format!("preference.loss={loss}");
        let more: &[&str] = if loss == "robust" { &["preference.label_smoothing=0.1"] } else { &[] };
        let few = [
            "train.steps=40",
            "data.synthetic_rows=60",
            "train.batch=16",
            "optimizer.lr=0.01",
            "eval.rows=0",
        ];
        let words = [&few[..], &["preference.beta=0.5", &named], more].concat();
        let steps = train_in(&folder.path().join(loss), &config(&words), |_| {});
        let mean = |steps: &[Step]| {
            steps.iter().map(|step| rewards(step).reward_margin).sum::<f64>() / steps.len() as f64
        };
        let (begin, end) = (mean(&steps[..3]), mean(&steps[37..]));
        assert!(end > begin + 0.05, "{loss}: the margin went from {begin:.4} to {end:.4}");
        assert!(steps.iter().all(|step| step.loss.is_finite()), "{loss}");
    }
}
