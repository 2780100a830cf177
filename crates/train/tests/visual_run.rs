//! Questions about images: an update is the same packed, alone and with shared images; micro-batches without images run plans
//! without a tower; and a run does not depend on the decoding threads.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use flatout_data::examples::Sighting;
use flatout_data::{Example, ExampleTable};
use flatout_ir::passes::differentiate::LOSS_SUM;
use flatout_ir::passes::input_path;
use flatout_train::Config;
use flatout_train::device::Device;
use flatout_train::metrics::Metrics;
use flatout_train::recipes;
use flatout_train::run::events::Event;
use flatout_train::run::signal::StopFlag;
use flatout_train::run::{Entered, Resume, Run};
use flatout_train::switches::Choose;
use flatout_train::tasks::examples::{self, Examples};
use flatout_train::training::trainer::{Notice, train};

use crate::distance::relative;
use crate::update_sums::first_update;

/// Bound on the L2 distance of every tensor of the gradient.
const BOUND: f64 = 1e-5;

fn config(overrides: &[&str]) -> Config {
    let words = ["backend=cpu", "precision=fp32", "eval.metric=loss", "checkpoint.best=false"];
    let words: Vec<String> = words.iter().chain(overrides).map(|word| word.to_string()).collect();
    recipes::resolve("qwen3-vl-8b-vqa", &["small".into()], &words).expect("a config")
}

/// Images of at least forty tokens, so that sharing them as a prefix pays.
const LARGE: [&str; 5] = [
    "data.image_tokens=[40,64]",
    "data.synthetic_rows=40",
    "data.held_out=0.2",
    "model.context=256",
    "eval.rows=0",
];

/// Questions about synthetic shapes, some of them about two images at once, and some texts without images.
fn mixed(config: &Config) -> Examples {
    let drawn = examples::read(config, None, &mut |_| {}).expect("examples");
    let mut table = ExampleTable::default();
    let all: Vec<Example<'_>> = drawn.train.iter().collect();
    for (i, example) in all.iter().enumerate() {
        match i % 8 {
            // Two questions one after another become one with two images.
            3 => {
                let next = all[(i + 1) % all.len()];
                let shift = example.tokens.len() as u32;
                let moved = next.images.iter().map(|image| Sighting { start: image.start + shift, ..*image });
                let images: Vec<Sighting> = example.images.iter().copied().chain(moved).collect();
                let tokens = [example.tokens, next.tokens].concat();
                let weights = [example.weights, next.weights].concat();
                table.push(Example { tokens: &tokens, weights: &weights, label: None, images: &images });
            }
            5 | 6 => {
                // So long that hardly anything else fits into a row of the context.
                let behind = example.images[0].range().end;
                let times = 230 / (example.tokens.len() - behind);
                let (tokens, weights) =
                    (example.tokens[behind..].repeat(times), example.weights[behind..].repeat(times));
                table.push(Example { tokens: &tokens, weights: &weights, label: None, images: &[] });
            }
            _ => table.push(*example),
        }
    }
    if config.switches.data.shared_prefix == Choose::On {
        table.share_prefixes();
    }
    Examples { train: Arc::new(table), ..drawn }
}

/// The sums of one update that has every example once, its number of micro-batches, and the number of these without a tower.
fn sums(overrides: &[&str]) -> (BTreeMap<String, Vec<f32>>, usize, usize) {
    let asked = config(&[&LARGE[..], overrides].concat());
    let data = mixed(&asked);
    let batch = format!("train.batch={}", data.train.count());
    let asked = config(&[&LARGE[..], overrides, &[batch.as_str()]].concat());
    let (mut parts, mut blind) = (0, 0);
    let sums = first_update(&asked, &data, |session, batch| {
        parts += 1;
        blind += usize::from(session.plans().slot(&input_path(batch.role, "patches")).is_none());
    });
    (sums, parts, blind)
}

fn same(name: &str, got: &BTreeMap<String, Vec<f32>>, want: &BTreeMap<String, Vec<f32>>) {
    assert_eq!(got.len(), want.len());
    let distances = want.iter().map(|(path, want)| (relative(&got[path], want), path));
    let (off, path) = distances.max_by(|a, b| a.0.total_cmp(&b.0)).expect("tensors");
    println!("{name}: {path} is furthest, by {off:.1e}");
    assert!(off < BOUND, "{name}: {path} is off by {off:.1e}");
}

#[test]
fn every_layout_gives_the_same_gradients() {
    let (want, parts, _) = sums(&["shared_prefix=off", "micro_batch=1", "head_rows=all"]);
    assert!(parts > 8 && want.len() > 40, "few at a time: {parts}");
    assert!(want.keys().any(|path| path.contains("vision.deepstack")), "the tower is trained too");
    for layout in [
        &["shared_prefix=off", "micro_batch=8"][..],
        &["shared_prefix=on", "micro_batch=8"],
        &["shared_prefix=on", "micro_batch=1", "length_buckets=off"],
    ] {
        let (got, parts, blind) = sums(layout);
        assert_eq!(blind, 0, "every plan trains the tower");
        assert!(parts < 20, "{parts}");
        same(&format!("{layout:?}"), &got, &want);
    }
}

/// With features that are added after the last layer, and with adapters whose dropout depends on rows.
#[test]
fn a_trimmed_last_layer_changes_no_gradient() {
    let dora = ["adapter.kind=dora", "adapter.paths=[layers]", "adapter.rank=2", "adapter.dropout=0.2"];
    for model in [&["model.layers=1"][..], &["model.dropout=0.1"], &dora] {
        let of = |more: &[&str]| sums(&[model, &["shared_prefix=off", "micro_batch=8"], more].concat()).0;
        same(&format!("{model:?}"), &of(&["last_layer=answers"]), &of(&["last_layer=all"]));
    }
}

#[test]
fn a_part_of_every_image_gives_the_same_gradients_in_every_layout() {
    let of = |more: &[&str]| sums(&[&["visual_tokens=75%"], more].concat());
    let (want, parts, _) = of(&["shared_prefix=off", "micro_batch=1", "head_rows=all"]);
    assert!(parts > 8, "few at a time: {parts}");
    for layout in [&["shared_prefix=off", "micro_batch=8"][..], &["shared_prefix=on", "micro_batch=8"]] {
        same(&format!("{layout:?}"), &of(layout).0, &want);
    }
    let whole = sums(&["shared_prefix=off", "micro_batch=8"]).0;
    assert!(relative(&want[LOSS_SUM], &whole[LOSS_SUM]) > 1e-6, "it is not the whole image");
    // A quarter of sixty-four tokens, and one of four.
    let tokens = |share: &str| {
        let config = config(&[&LARGE[..], &[share]].concat());
        let drawn = examples::read(&config, None, &mut |_| {}).expect("examples");
        let images: Vec<u32> = drawn.train.iter().map(|example| example.images[0].tokens).collect();
        assert!(images.iter().all(|tokens| *tokens == images[0]), "{images:?}");
        images[0]
    };
    let all = tokens("visual_tokens=all");
    assert_eq!(
        ["75%", "50%", "25%"].map(|share| tokens(&format!("visual_tokens={share}"))),
        [3, 2, 1].map(|n| (all * n).div_ceil(4))
    );
}

#[test]
fn texts_without_images_skip_a_frozen_tower() {
    let lora = ["adapter.kind=lora", "adapter.paths=[layers]", "adapter.rank=2"];
    let of = |more: &[&str]| sums(&[&lora, more].concat());
    let (want, _, blind) = of(&["shared_prefix=off", "micro_batch=1"]);
    assert!(blind > 0, "some micro-batches have no image");
    assert!(want.keys().all(|path| !path.contains("vision")), "{:?}", want.keys());
    for layout in [&["shared_prefix=off", "micro_batch=8"][..], &["shared_prefix=on", "micro_batch=8"]] {
        same(&format!("{layout:?}"), &of(layout).0, &want);
    }
}

/// Losses of the steps bit by bit, and the last evaluation.
fn trained(config: &Config, dir: &Path) -> (Vec<u32>, Option<Metrics>) {
    let (Entered::Fresh(run) | Entered::Existing(run)) = Run::enter(dir, Resume::Auto).expect("a run");
    let (mut steps, mut metrics) = (vec![], None);
    train(config, None, &run, &Device::cpu(), &StopFlag::never(), &mut [], &mut |notice| match notice {
        Notice::Event(Event::Step(step)) => steps.push(step.loss.to_bits()),
        Notice::Event(Event::Eval { metrics: said, .. }) => metrics.clone_from(said),
        _ => {}
    })
    .expect("a run to its end");
    (steps, metrics)
}

#[test]
fn threads_that_decode_change_nothing_and_answers_are_counted() {
    let folder = tempfile::tempdir().expect("a folder");
    let of = |threads: &str, share: &str| {
        let words =
            ["data.synthetic_rows=120", "train.epochs=none", "train.steps=6", "eval.every_epochs=none"];
        let rest = ["eval.every=6", "eval.rows=12", "train.batch=8", threads, share];
        let config = config(&[&words[..], &rest].concat());
        trained(&config, &folder.path().join(format!("{threads} {share}")))
    };
    let some = of("loader.workers=1", "visual_tokens=50%").0;
    assert_eq!(of("loader.workers=3", "visual_tokens=50%").0, some);
    let (one, metrics) = of("loader.workers=1", "visual_tokens=all");
    assert_ne!(one, some);
    assert_eq!((one.len(), &of("loader.workers=3", "visual_tokens=all").0), (6, &one));
    let Some(Metrics::Answers(answers)) = metrics else { panic!("answers: {metrics:?}") };
    assert!((0.0..=1.0).contains(&answers.exact) && answers.token_accuracy >= answers.exact);
}
