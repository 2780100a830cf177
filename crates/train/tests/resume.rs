//! A run that stops at step 25 of 50 and resumes equals the unbroken run to the bit; and nothing depends on the number of loader
//! threads.

use std::fs;
use std::path::Path;

use flatout_train::run;
use flatout_train::run::events::{Event, Step};

use crate::small_run::{STEPS, config, train_in};

const STOP: u64 = 25;

#[test]
fn resumed_runs_end_in_the_same_bits() {
    resumes_exactly(&[]);
}

#[test]
fn with_dropout_and_micro_batches() {
    resumes_exactly(&["model.dropout=0.1", "train.micro_batch=2"]);
}

#[test]
fn in_bf16_with_evaluation() {
    resumes_exactly(&["precision=bf16", "eval.rows=4", "eval.every=10"]);
}

/// The scales of a step come from previous steps, so a checkpoint must contain them.
#[test]
fn in_fp8_with_delayed_scales() {
    resumes_exactly(&["precision=fp8", "fp8.scaling=delayed", "train.micro_batch=4", "eval.rows=4"]);
}

#[test]
fn with_lora_and_dropout() {
    resumes_exactly(&["adapter.kind=lora", "adapter.dropout=0.1", "train.micro_batch=2"]);
}

#[test]
fn with_lora_of_the_embedding_and_the_head() {
    let ends = "adapter.paths=['layers','embed','head']";
    resumes_exactly(&["adapter.kind=lora", ends, "adapter.dropout=0.1", "precision=bf16", "eval.rows=4"]);
    let narrow = ["adapter.kind=lora", ends, "adapter.rank=16", "precision=fp8", "model.tied=false"];
    resumes_exactly(&[&narrow[..], &["train.micro_batch=4"]].concat());
}

/// Row norms are recomputed, to the bit.
#[test]
fn with_dora_in_bf16() {
    resumes_exactly(&["adapter.kind=dora", "precision=bf16", "eval.rows=4", "adapter.also_train=norm"]);
}

/// The base is quantised again, from the same source, to the same codes.
#[test]
fn with_lora_and_dora_and_a_base_in_four_bits() {
    resumes_exactly(&["adapter.kind=lora", "base=nf4", "adapter.dropout=0.1", "train.micro_batch=2"]);
    resumes_exactly(&["adapter.kind=dora", "base=nf4", "precision=bf16", "eval.rows=4", "recompute=full"]);
    resumes_exactly(&["train.freeze=[layers.0]", "base=nf4", "train.ema=0.9"]);
    let lora = ["adapter.kind=lora", "adapter.rank=16", "base=nf4", "precision=fp8"];
    resumes_exactly(&[&lora[..], &["train.micro_batch=4", "adapter.dropout=0.1", "eval.rows=4"]].concat());
    let dora = ["adapter.kind=dora", "adapter.rank=16", "base=nf4", "precision=fp8"];
    resumes_exactly(&[&dora[..], &["train.micro_batch=4", "fp8.scaling=current", "recompute=full"]].concat());
}

#[test]
fn with_lora_and_dora_and_a_base_in_eight_bits() {
    let lora = ["adapter.kind=lora", "adapter.rank=16", "base=fp8"];
    resumes_exactly(&[&lora[..], &["precision=fp8", "train.micro_batch=4", "adapter.dropout=0.1"]].concat());
    resumes_exactly(&["adapter.kind=dora", "base=fp8", "precision=bf16", "eval.rows=4", "recompute=full"]);
    resumes_exactly(&["train.freeze=[layers.0]", "base=fp8", "train.ema=0.9"]);
}

#[test]
fn with_dora_and_products_in_8_bits() {
    resumes_exactly(&["adapter.kind=dora", "adapter.rank=16", "precision=fp8", "train.micro_batch=4"]);
}

#[test]
fn with_moments_in_bf16() {
    resumes_exactly(&["optimizer.state=bf16", "fuse.optimizer=off"]);
}

#[test]
fn with_moments_in_eight_bits() {
    resumes_exactly(&["optimizer.state=int8", "precision=bf16"]);
}

#[test]
fn with_averages_of_the_weights() {
    resumes_exactly(&["train.ema=0.9", "precision=bf16", "eval.rows=4", "eval.every=10"]);
}

#[test]
fn with_muon_and_averages() {
    resumes_exactly(&["optimizer.name=muon", "train.ema=0.9", "train.micro_batch=4", "eval.rows=4"]);
}

#[test]
fn with_muon_in_bf16() {
    resumes_exactly(&["optimizer.name=muon", "optimizer.state=bf16", "precision=bf16"]);
}

/// The options of `gpt2-speedrun`: learned values, first outputs of zero, capped logits, and a window schedule that changes in
/// the middle of either half.
#[test]
fn with_learned_values_and_a_schedule_of_windows() {
    resumes_exactly(&[
        "optimizer.name=muon",
        "model.value_embeddings=1",
        "model.tied=false",
        "model.init_head=0",
        "model.init_residual=0",
        "model.logit_cap=15",
        "model.activation=relu2",
        "model.dropout=0.1",
        "schedule.windows=[4,8,16,32]",
        "train.micro_batch=4",
        "precision=bf16",
        "eval.rows=4",
        "eval.every=10",
    ]);
}

/// Separate rates by group: the schedule of each continues where it was.
#[test]
fn with_learning_rates_by_group() {
    let steps = resumes_exactly(&[
        "lr=1e-4",
        "schedule.name=converge",
        "schedule.final_lr=1e-3",
        "schedule.warmup_steps=5",
        "train.groups=[{paths=['embed'],lr=1e-2,name='table'},{paths=['**.ffn'],final_lr=0.0}]",
    ]);
    let at = |step: usize, name: &str| steps[step - 1].lrs[name];
    for (name, base, target) in [("base", 1e-4_f32, 1e-3_f32), ("table", 1e-2, 1e-3), ("**.ffn", 1e-4, 0.0)] {
        let close = |a: f32, b: f32| (a - b).abs() <= 1e-6 * base.max(target);
        assert!(close(at(1, name), base / 5.0) && close(at(5, name), base), "{name}");
        // p = 20/45 and 25/45: the two steps around the middle.
        assert!(close(at(25, name) + at(30, name), base + target), "{name}");
        assert!(close(at(50, name), target), "{name}: {}", at(50, name));
    }
    assert_eq!(steps[10].lr, steps[10].lrs["base"]);
}

#[test]
fn with_documents_apart() {
    resumes_exactly(&["data.document_mask=true", "recompute=full"]);
}

#[test]
fn on_text_over_several_epochs() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = text(folder.path());
    let steps =
        resumes_exactly(&[&format!("data.path={path}"), "data.held_out=0", "data.document_mask=true"]);
    let epoch = |i: usize| steps[i].epoch;
    assert!(epoch(49) > 2.0 && epoch(24) > 0.5 && epoch(24) < epoch(49), "{} {}", epoch(24), epoch(49));
}

/// A text of a few thousand tokens.
fn text(folder: &Path) -> String {
    let words =
        ["a river", "the hill", "some rain", "one stone", "falls on", "runs over", "and then", "below"];
    let draw = |i: u32| flatout_ir::random::philox([i, 0, 0, 0], [1, 2])[0] as usize;
    let line = |l: u32| (0..9).map(|w| words[draw(9 * l + w) % words.len()]).collect::<Vec<_>>().join(" ");
    let path = folder.join("text.txt");
    fs::write(&path, (0..260).map(|l| line(l) + ".\n").collect::<String>()).expect("a text");
    path.display().to_string()
}

/// Trains without a break, copies the directory as it is once step 25 is saved, and resumes the copy to the end.
pub fn resumes_exactly(overrides: &[&str]) -> Vec<Step> {
    let folder = tempfile::tempdir().expect("a folder");
    let (whole, broken) = (folder.path().join("whole"), folder.path().join("broken"));
    let every = ["checkpoint.every=25"];
    let config = config(&[overrides, &every].concat());
    let unbroken = train_in(&whole, &config, |event| {
        if matches!(event, Event::Saved { step: STOP, .. }) {
            copy(&whole, &broken);
        }
    });
    let config = run::config(&broken).and_then(|config| config.resumed(&[])).expect("the run's own config");
    let mut went_on_after = None;
    let rest = train_in(&broken, &config, |event| {
        if let Event::Resume { step } = event {
            went_on_after = Some(*step);
        }
    });
    assert_eq!(went_on_after, Some(STOP));
    assert_eq!((unbroken.len(), rest.len()), (STEPS as usize, (STEPS - STOP) as usize));
    for (resumed, wanted) in rest.iter().zip(&unbroken[STOP as usize..]) {
        assert_eq!(untimed(resumed), untimed(wanted));
    }
    // Weights, moments, counters and the cursor.
    for file in ["state.safetensors", "state.json"] {
        let read =
            |run: &Path| fs::read(run.join("checkpoints/step-50").join(file)).expect("a last checkpoint");
        assert!(read(&whole) == read(&broken), "{file} differs with {overrides:?}");
    }
    unbroken
}

/// A step line without the fields that depend on a clock.
fn untimed(step: &Step) -> Step {
    let rates = Step { step_ms: 0.0, tokens_per_second: 0.0, samples_per_second: 0.0, ..step.clone() };
    Step { time: 0.0, of_predicted: None, data_wait_ms: None, ..rates }
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir(to).expect("a folder");
    for entry in fs::read_dir(from).expect("a folder") {
        let path = entry.expect("an entry").path();
        let to = to.join(path.file_name().expect("a name"));
        if path.is_dir() {
            copy(&path, &to);
        } else {
            fs::copy(&path, &to).expect("a copy");
        }
    }
}

#[test]
fn order_and_loss_are_the_same_for_any_number_of_loader_threads() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = format!("data.path={}", text(folder.path()));
    for data in [vec![], vec![path.as_str(), "data.held_out=0"]] {
        let losses = [1, 2, 7].map(|threads| {
            let workers = format!("loader.workers={threads}");
            let dir = folder.path().join(format!("{threads}-{}", data.len()));
            let steps = train_in(&dir, &config(&[&data[..], &[&workers]].concat()), |_| {});
            steps.iter().map(|step| step.loss.to_bits()).collect::<Vec<_>>()
        });
        assert_eq!(losses[0].len(), STEPS as usize);
        assert!(losses[0] == losses[1] && losses[0] == losses[2], "{data:?}");
    }
}
