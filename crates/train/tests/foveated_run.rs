//! Complete runs on samples with frames: an update is the same in every layout, runs do not depend on the number of threads and
//! resume to the bit, shards of several sources are mixed, and a sample with a frame that cannot be decoded is left out.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use flatout_train::Config;
use flatout_train::recipes;
use flatout_train::run;
use flatout_train::run::checkpoint::TensorFile;
use flatout_train::run::events::{Event, Step};
use flatout_train::tasks::dataset::Dataset;
use flatout_train::tasks::examples;

use crate::adapters::f32s;
use crate::distance::relative;
use crate::small_run::train_in;
use crate::tar::tar;
use crate::update_sums::first_update;

/// Bound on the L2 distance of every tensor of the gradient.
const BOUND: f64 = 1e-5;

/// Sizes of a foveated model that make a run short.
pub const SIZES: [&str; 11] = [
    "model.width=32",
    "model.heads=2",
    "model.kv_heads=1",
    "model.head_size=16",
    "model.ffn=48",
    "model.vision.width=24",
    "model.vision.heads=3",
    "model.vision.ffn=32",
    "model.vision.image_size=24",
    "model.vision.positions=3",
    "model.vision.query=12",
];

fn config(recipe: &str, overrides: &[&str]) -> Config {
    let small = [
        "backend=cpu",
        "precision=fp32",
        "data.synthetic_rows=70",
        "data.held_out=0.2",
        "checkpoint.best=false",
        "eval.rows=0",
    ];
    let words: Vec<String> =
        SIZES.iter().chain(&small).chain(overrides).map(|word| word.to_string()).collect();
    recipes::resolve(recipe, &["small".into()], &words).expect("a config")
}

/// The sums of one update of 48 synthetic samples, and its number of micro-batches.
fn sums(overrides: &[&str]) -> (BTreeMap<String, Vec<f32>>, usize) {
    let asked = config("fvlm-135m-sft", &[overrides, &["train.batch=48"]].concat());
    let data = examples::read(&asked, None, &mut |_| {}).expect("samples");
    let mut parts = 0;
    let sums = first_update(&asked, &data, |_, _| parts += 1);
    (sums, parts)
}

#[test]
fn every_layout_gives_the_same_gradients() {
    let (want, parts) = sums(&["micro_batch=1", "head_rows=all", "recompute=none"]);
    let most = parts;
    assert!(most > 5 && want.len() > 40, "few at a time: {most}");
    for name in ["vision.look", "vision.q_init", "vision.q_static", "vision.to_query"] {
        let has =
            |(path, sums): (&String, &Vec<f32>)| path.contains(name) && sums.iter().any(|sum| *sum != 0.0);
        assert!(want.iter().any(has), "{name} is trained");
    }
    for layout in [
        &["micro_batch=8"][..],
        &["micro_batch=4", "length_buckets=off", "recompute=full"],
        &["micro_batch=48", "fuse.qkv=off"],
    ] {
        let (got, parts) = sums(layout);
        assert!(parts < most, "{parts}");
        assert_eq!(got.len(), want.len());
        let distances = want.iter().map(|(path, want)| (relative(&got[path], want), path));
        let (off, path) = distances.max_by(|a, b| a.0.total_cmp(&b.0)).expect("tensors");
        println!("{layout:?}: {path} is furthest, by {off:.1e}");
        assert!(off < BOUND, "{layout:?}: {path} is off by {off:.1e}");
    }
}

const STEPS: &str = "train.steps=8";

fn losses(steps: &[Step]) -> Vec<f32> {
    steps.iter().map(|step| step.loss).collect()
}

#[test]
fn runs_resume_exactly_with_any_number_of_threads() {
    let folder = tempfile::tempdir().expect("a folder");
    let more = [STEPS, "train.batch=8", "checkpoint.every=4", "eval.rows=8", "eval.every=4"];
    let of = |name: &str, extra: &[&str], broken: Option<&Path>| {
        let (dir, config) = (folder.path().join(name), config("fvlm-135m-align", &[&more, extra].concat()));
        let steps = train_in(&dir, &config, |event| {
            if let (Event::Saved { step: 4, .. }, Some(broken)) = (event, broken) {
                copy(&dir, broken);
            }
        });
        (steps, fs::read(dir.join("checkpoints/step-8/state.safetensors")).expect("a checkpoint"))
    };
    let broken = folder.path().join("broken");
    let (whole, state) = of("whole", &["loader.workers=1"], Some(&broken));
    let (others, other_state) = of("threads", &["loader.workers=3"], None);
    assert_eq!(losses(&whole), losses(&others));
    assert!(state == other_state);
    // The rates of both groups equal those of the unbroken run, to the bit.
    assert!(whole.iter().all(|step| step.lrs.len() == 2 && step.lr == step.lrs["base"]));
    let resumed = run::config(&broken).and_then(|config| config.resumed(&[])).expect("the run's own config");
    let rest = train_in(&broken, &resumed, |_| {});
    assert_eq!(losses(&rest), losses(&whole[4..]));
    assert_eq!(rest[0].lrs, whole[4].lrs);
    let resumed = fs::read(broken.join("checkpoints/step-8/state.safetensors")).expect("a checkpoint");
    assert!(resumed == state);
}

#[test]
fn first_looks_alone_are_trained_too() {
    let folder = tempfile::tempdir().expect("a folder");
    let coarse = config("fvlm-135m-sft", &[STEPS, "train.batch=8", "model.vision.mode=coarse"]);
    let steps = train_in(&folder.path().join("coarse"), &coarse, |_| {});
    assert!(steps[7].loss < steps[0].loss);
}

pub fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a folder");
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

/// Samples with these numbers of frames; one frame of one sample cannot be decoded.
fn shard(path: &Path, frames: usize, broken: bool) {
    let image = include_bytes!("../../data/tests/pictures/rgb.png");
    let mut members = vec![];
    for sample in 0..12 {
        for frame in 0..frames {
            let bytes =
                if broken && (sample, frame) == (5, 1) { b"no image".to_vec() } else { image.to_vec() };
            members.push((format!("s{sample}.{frame:03}.png"), bytes));
        }
        let text = format!(r#"{{"user":"what?","assistant":"number {sample}","frame_count":{frames}}}"#);
        members.push((format!("s{sample}.json"), text.into_bytes()));
    }
    fs::write(path, tar(&members)).expect("a shard");
}

#[test]
fn shards_are_mixed_and_a_sample_with_a_broken_frame_is_left_out() {
    let folder = tempfile::tempdir().expect("a folder");
    let [videos, texts] = ["v.tar", "t.tar"].map(|name| folder.path().join(name));
    shard(&videos, 3, true);
    shard(&texts, 0, false);
    let mix = format!(
        "data.mix=[{{path='{}',weight=0.75}},{{path='{}',weight=0.25}}]",
        videos.display(),
        texts.display()
    );
    let words = [
        mix.as_str(),
        "data.source=text",
        "train.batch=8",
        "train.steps=4",
        "data.held_out=0",
        "data.on_error=skip",
    ];
    let mut warnings = vec![];
    train_in(&folder.path().join("run"), &config("fvlm-135m-sft", &words), |event| {
        if let Event::Warning { message } = event {
            warnings.push(message.clone());
        }
    });
    let named = |message: &&String| {
        message.contains("nothing is learned from a sample") && message.contains("v.tar, byte")
    };
    assert!(warnings.iter().any(|message| named(&message)), "{warnings:?}");
    // An epoch is one pass over the first source: its twelve samples are three quarters of sixteen.
    let config = config("fvlm-135m-sft", &words);
    let data = examples::read(&config, None, &mut |_| {}).expect("samples");
    assert_eq!(data.steps_of_epochs(&config, 2).expect("updates"), 4);
}

/// Samples without frames do not count as failed to decode: they are learned.
#[test]
fn texts_without_frames_are_learned() {
    let folder = tempfile::tempdir().expect("a folder");
    let texts = folder.path().join("t.tar");
    shard(&texts, 0, false);
    let path = format!("data.path={}", texts.display());
    let words = [path.as_str(), "data.source=text", "train.batch=8", "train.steps=24", "data.held_out=0"];
    let steps = train_in(&folder.path().join("run"), &config("fvlm-135m-sft", &words), |_| {});
    assert!(steps[23].loss < 0.8 * steps[0].loss, "{} then {}", steps[0].loss, steps[23].loss);
}

/// Weights have an f32 copy beside the bf16 one that products read: at a rate of 1e-5 rounding would swallow most updates.
#[test]
fn updates_below_the_steps_of_bf16_are_kept() {
    let folder = tempfile::tempdir().expect("a folder");
    let saved = |steps: &str| {
        let dir = folder.path().join(steps);
        let words =
            [steps, "train.batch=8", "precision=bf16", "schedule.warmup_share=0", "checkpoint.every=1"];
        let rates = ["train.groups=[]", "optimizer.lr=1e-5", "schedule.final_lr=1e-5"];
        train_in(&dir, &config("fvlm-135m-sft", &[&words[..], &rates].concat()), |_| {});
        let step = steps.trim_start_matches("train.steps=");
        let file = dir.join(format!("checkpoints/step-{step}/state.safetensors"));
        let mut state = TensorFile::open(&file).expect("a checkpoint");
        let name =
            state.entries().keys().find(|name| name.ends_with("layers.0.ffn.up")).expect("a weight").clone();
        f32s(&mut state, &name)
    };
    let (one, two) = (saved("train.steps=1"), saved("train.steps=2"));
    let kept = one.iter().zip(&two).filter(|(a, b)| a != b).count() as f64 / one.len() as f64;
    assert!(kept > 0.95, "{kept} of the weights moved");
    let bits = |value: f32| value.to_bits() >> 16;
    let in_bf16 = one.iter().zip(&two).filter(|(a, b)| bits(**a) != bits(**b)).count();
    assert!(in_bf16 * 4 < one.len(), "{in_bf16} would have moved in bf16 too");
}
