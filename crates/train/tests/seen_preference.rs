//! Preferences about images and frames: ten steps of DPO on Qwen3-VL equal PyTorch's, gradients of pairs with a shared prompt
//! equal those apart, and tests of where runs begin, resuming, stored scores, and a frame that cannot be decoded.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use flatout_data::examples::Sighting;
use flatout_data::vision::{Given, Grid, ImageReader, ImageStore, Patching};
use flatout_data::{Example, ExampleTable};
use flatout_ir::passes::differentiate::{WEIGHT_SUM, gradient_path};
use flatout_models::config::{DecoderConfig, Model};
use flatout_runtime::{Session, cpu};
use flatout_train::Config;
use flatout_train::config::resolved::Resolved;
use flatout_train::device::Device;
use flatout_train::infer::evaluate;
use flatout_train::metrics::{Metrics, RewardMetrics};
use flatout_train::recipes;
use flatout_train::resolve::arranged::eval_layout;
use flatout_train::resolve::compile::compile;
use flatout_train::run;
use flatout_train::run::events::{Event, Step};
use flatout_train::tasks::batch::{BatchSource, Draw};
use flatout_train::tasks::dataset::Dataset;
use flatout_train::tasks::examples::{self, Examples};
use flatout_train::tasks::preference::ComparedAnswers;
use flatout_train::tasks::seen::{PatchImages, SeenImages};
use flatout_train::training::reference;
use flatout_train::training::update::{accumulate, apply, collect};
use flatout_train::weights::initial;
use flatout_train::weights::loaded::Loaded;

use crate::distance::relative;
use crate::fixture::{Fixture, sums};
use crate::foveated_run;
use crate::small_run::train_in;
use crate::update_sums;
use crate::vl_golden::Golden;

/// Bound on the L2 distance of every tensor of the gradient.
const BOUND: f64 = 1e-5;
const THREADS: usize = 2;

/// Recipes of both kinds of vision models, with sizes that make a run short.
const IMAGES: (&str, &[&str]) = ("qwen3-vl-2b-dpo", &["model.width=32", "model.ffn=48", "model.layers=2"]);
const FRAMES: (&str, &[&str]) = ("fvlm-135m-dpo", &foveated_run::SIZES);

fn config((recipe, sizes): (&str, &[&str]), overrides: &[&str]) -> Config {
    let fixed = [
        "backend=cpu",
        "precision=fp32",
        "preference.sft=0",
        "data.synthetic_rows=120",
        "data.held_out=0.2",
        "train.epochs=none",
        "train.steps=4",
        "train.batch=8",
        "eval.every_epochs=none",
        "eval.every=4",
        "eval.rows=8",
        "checkpoint.best=false",
    ];
    let words: Vec<String> =
        fixed.iter().chain(sizes).chain(overrides).map(|word| word.to_string()).collect();
    recipes::resolve(recipe, &["small".into()], &words).expect("a config")
}

/// A session for some pairs, with the source of its batches.
struct PairSession<'d> {
    data: &'d Examples,
    session: Session,
    source: Box<dyn BatchSource>,
}

impl PairSession<'_> {
    /// Compiles for the data, lets `write` set the weights, and scores all answers with them.
    fn new<'d>(
        asked: &Config,
        data: &'d Examples,
        seed: u64,
        write: &dyn Fn(&mut Session),
    ) -> (PairSession<'d>, Vec<f32>) {
        let mut resolved = Resolved::default();
        data.measure(asked, &mut resolved);
        let config = resolved.over(asked);
        let compiled = compile(&config, &cpu::target(THREADS)).expect("plans");
        let mut session = Session::new(compiled.plans.clone(), THREADS).expect("a session");
        initial::write(&mut session, seed).expect("weights");
        write(&mut session);
        let layout = eval_layout(&config, compiled.settled.arrangement.as_ref().expect("pairs are arranged"));
        let compared = data.compared().expect("pairs are compared");
        let scores = reference::score(&mut session, compared, &layout, &mut |_| {}).expect("scores");
        let of_training = scores.0[0].clone();
        compared.give(scores);
        let source = data.source(&config, compiled.feeding(), None).expect("a source");
        (PairSession { data, session, source }, of_training)
    }

    /// Sums the gradients of the next update, and returns its number of micro-batches.
    fn accumulate(&mut self) -> usize {
        self.source.begin_update();
        let mut parts = 0;
        while let Some(batch) = self.source.next_batch().expect("a batch") {
            accumulate(&mut self.session, &batch, Draw { seed: 1, step: 0 }).expect("gradients");
            parts += 1;
        }
        assert!(self.data.train.units() > 0);
        parts
    }
}

/// The fixture's pairs about its images, in place of synthetic ones.
fn golden_pairs(small: &Config, config: &Config, fixture: &mut Fixture) -> Examples {
    let drawn = examples::read(small, None, &mut |_| {}).expect("examples");
    let patching =
        Patching { patch: 4, merge: 2, least_pixels: 64, most_pixels: 1 << 20, ..Patching::default() };
    let reader = ImageReader::new(patching, 1 << 20, 1 << 20);
    let mut store = ImageStore::new(patching, 1 << 20);
    let images: Vec<(u32, Grid, u64)> = [0, 1]
        .map(|number| {
            let png = fixture.bytes(&format!("png.{number}"));
            let image = reader.read(Given::Bytes(&png), Path::new(".")).expect("an image");
            let sides = (image.grid.columns as u64 * 4, image.grid.rows as u64 * 4);
            assert_eq!(sides, (image.width as u64, image.height as u64), "it is not scaled");
            (store.number(&image), image.grid, image.hash as u64)
        })
        .to_vec();
    let [tokens, lengths, prompts, shown, starts] =
        ["tokens", "lengths", "prompts", "shown", "starts"].map(|name| fixture.i32s(name));
    let mut table = ExampleTable::of_pairs();
    let mut start = 0;
    for (at, length) in lengths.iter().enumerate() {
        let end = start + *length as usize;
        let tokens: Vec<u32> = tokens[start..end].iter().map(|token| *token as u32).collect();
        let weights: Vec<f32> = (0..*length).map(|token| f32::from(token >= prompts[at])).collect();
        let (image, grid, hash) = images[shown[at] as usize];
        let sighting = Sighting {
            start: starts[at] as u32,
            image,
            grid,
            merge: 2,
            tokens: grid.patches() as u32 / 4,
            hash,
        };
        table.push(Example { tokens: &tokens, weights: &weights, label: None, images: &[sighting] });
        start = end;
    }
    if examples::shares_prefixes(config) {
        table.share_prefixes();
    }
    let images = PatchImages::of(config, store).expect("images that fit").map(SeenImages::Patches);
    let (train, held_out) = (Arc::new(table), Arc::new(ExampleTable::of_pairs()));
    let compared = ComparedAnswers::new([train.clone(), held_out.clone()], images.clone(), "a mark".into());
    Examples { train, held_out, images, compared: Some(compared), ..drawn }
}

/// Log-probabilities, the gradient of the first step, and the losses of ten. `make_vl_preference.py` beside the fixture made
/// them.
#[test]
fn ten_steps_about_images_are_pytorchs() {
    let mut fixture = Fixture::tensors("vl-preference");
    let golden = Golden::open("qwen3-vl");
    let (wanted, logp) = (fixture.f32s("loss"), fixture.f32s("logp"));
    for layout in [
        &["micro_batch=4"][..],
        &["micro_batch=1"],
        &["shared_prefix=off", "micro_batch=2", "head_rows=all"],
        &["micro_batch=4", "recompute=full", "last_layer=all"],
    ] {
        let own = [&["train.batch=4", "eval.rows=0", "optimizer.clip=0"], layout].concat();
        let small = config(("qwen3-vl-2b-dpo", &[]), &own);
        let model = Model::Decoder(DecoderConfig { context: 64, ..golden.model.clone() });
        let asked = Config { model, ..small.clone() };
        let data = golden_pairs(&small, &asked, &mut fixture);
        let weights = |session: &mut Session| {
            for (path, values) in golden.ours() {
                session.write_f32(&path, &values).expect("a weight");
            }
        };
        let (mut pairs, scores) = PairSession::new(&asked, &data, 1, &weights);
        let off = relative(&scores, &logp);
        assert!(off < BOUND, "{layout:?}: log-probabilities are off by {off:.1e}");
        for (step, wanted) in wanted.iter().enumerate() {
            pairs.accumulate();
            if step == 0 {
                check_gradients(&pairs.session, &golden, &mut fixture, layout);
            }
            let posted = apply(&mut pairs.session, &[1e-3]).expect("an update");
            let results = collect(&mut pairs.session, posted).expect("results");
            let off = (results.loss - wanted).abs();
            let bound = if step == 0 { 1e-6 } else { 1e-5 };
            assert!(off < bound, "{layout:?}, step {}: {} is not {wanted}", step + 1, results.loss);
        }
    }
}

/// Compares the gradients of a step with the fixture's, which are those of the mean over pairs.
fn check_gradients(session: &Session, golden: &Golden, fixture: &mut Fixture, layout: &[&str]) {
    let mut theirs: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    let pairs = session.read_f32(WEIGHT_SUM).expect("a sum")[0] as f64;
    for place in golden.places() {
        let ours = session.read_f32(&gradient_path(&place.ours)).expect("a gradient");
        let whole =
            theirs.entry(place.theirs.clone()).or_insert_with(|| vec![0.0; place.dims.iter().product()]);
        place.put(&ours.iter().map(|x| *x as f64 / pairs).collect::<Vec<f64>>(), whole);
    }
    for (name, gradient) in theirs {
        let want: Vec<f64> = fixture.f32s(&format!("grad.{name}")).iter().map(|x| *x as f64).collect();
        let off = relative(&sums(&gradient), &want);
        assert!(off < BOUND, "{layout:?}: {name} is off by {off:.1e}");
    }
}

/// The sums of one update of 40 synthetic pairs, and its number of micro-batches.
fn update(kind: (&str, &[&str]), overrides: &[&str]) -> (BTreeMap<String, Vec<f32>>, usize) {
    // The gradients of both answers nearly cancel in the tower, where rounding would be a larger share of the rest: so the chosen
    // answer's own loss is learned too.
    let fixed = ["train.batch=40", "eval.rows=0", "preference.sft=1"];
    let asked = config(kind, &[overrides, &fixed].concat());
    let data = examples::read(&asked, None, &mut |_| {}).expect("pairs");
    let (mut pairs, _) = PairSession::new(&asked, &data, 3, &|_| {});
    let parts = pairs.accumulate();
    (update_sums::sums(&pairs.session), parts)
}

/// Both answers after one shared prompt, whose image or frames are encoded once, give the gradients that they give apart.
#[test]
fn gradients_with_a_shared_prompt_equal_those_of_separate_answers() {
    for kind in [IMAGES, FRAMES] {
        let (want, most) =
            update(kind, &["shared_prefix=off", "micro_batch=1", "head_rows=all", "recompute=none"]);
        assert!(want.len() > 20 && want[WEIGHT_SUM] == [40.0], "{}: {:?}", kind.0, want[WEIGHT_SUM]);
        let of_tower =
            |(path, sums): (&String, &Vec<f32>)| path.contains("vision.") && sums.iter().any(|x| *x != 0.0);
        assert!(want.iter().any(of_tower), "{}: the tower learns", kind.0);
        for layout in [
            &["shared_prefix=on", "micro_batch=1"][..],
            &["shared_prefix=on", "micro_batch=8"],
            &["micro_batch=40", "recompute=full"],
            &["shared_prefix=off", "micro_batch=20"],
        ] {
            let (got, parts) = update(kind, layout);
            assert!(parts <= most, "{parts} micro-batches");
            assert_eq!(got.len(), want.len());
            let distances = want.iter().map(|(path, want)| (relative(&got[path], want), path));
            let (off, path) = distances.max_by(|a, b| a.0.total_cmp(&b.0)).expect("tensors");
            println!("{} {layout:?}: {path} is furthest, by {off:.1e}", kind.0);
            assert!(off < BOUND, "{} {layout:?}: {path} is off by {off:.1e}", kind.0);
        }
    }
}

fn rewards(step: &Step) -> RewardMetrics {
    *step.metrics.as_ref().and_then(Metrics::rewards).expect("rewards")
}

/// The reference is the model at the start of training: nothing is preferred yet.
#[test]
fn the_first_loss_is_the_logarithm_of_2() {
    let folder = tempfile::tempdir().expect("a folder");
    let cache = format!("data.vision_cache={}", folder.path().join("features").display());
    let cases: [(_, &str, &[&str]); 8] = [
        (IMAGES, "images", &[]),
        (IMAGES, "apart", &["shared_prefix=off"]),
        (IMAGES, "lora", &["adapter.kind=lora"]),
        (IMAGES, "cached", &[&cache, "adapter.kind=lora"]),
        (IMAGES, "kto", &["preference.loss=kto", "shared_prefix=auto"]),
        (FRAMES, "frames", &[]),
        (FRAMES, "frames-apart", &["shared_prefix=off"]),
        (FRAMES, "coarse", &["model.vision.mode=coarse"]),
    ];
    for (kind, name, more) in cases {
        let run = folder.path().join(name);
        let steps = train_in(&run, &config(kind, more), |_| {});
        // A judged answer without a gain has a loss of one half.
        let wanted = if name == "kto" { 0.5 } else { 2f64.ln() };
        let off = (steps[0].loss as f64 - wanted).abs();
        assert!(off < 1e-6, "{name}: {} is off by {off:.1e}", steps[0].loss);
        assert!(rewards(&steps[0]).reward_margin.abs() < 1e-5, "{name}: {:?}", rewards(&steps[0]));
        assert!(steps[1].loss != steps[0].loss, "{name}: the second step is another");
    }
    // A fresh adapter adds nothing, so the reference is the model without it.
    let [whole, lora] = ["images", "lora"].map(|name| folder.path().join(name).join("reference.safetensors"));
    assert!(fs::read(whole).expect("scores") == fs::read(lora).expect("scores"));
}

/// A resumed run reads the stored reference scores and ends with the same bits; so does an evaluation of it.
#[test]
fn runs_resume_exactly_with_stored_reference_scores() {
    for kind in [IMAGES, FRAMES] {
        let folder = tempfile::tempdir().expect("a folder");
        let (whole, broken) = (folder.path().join("whole"), folder.path().join("broken"));
        let config = config(kind, &["train.steps=8", "checkpoint.every=4"]);
        let mut last = None;
        let unbroken = train_in(&whole, &config, |event| match event {
            Event::Saved { step: 4, .. } => crate::foveated_run::copy(&whole, &broken),
            Event::Eval { loss, metrics, .. } => last = Some((*loss, metrics.clone())),
            _ => {}
        });
        let kept = fs::read(broken.join("reference.safetensors")).expect("scores");
        let again = run::config(&broken).and_then(|config| config.resumed(&[]));
        let rest = train_in(&broken, &again.expect("the run's own config"), |_| {});
        let numbers = |steps: &[Step]| -> Vec<(u64, u32, RewardMetrics)> {
            steps.iter().map(|step| (step.step, step.loss.to_bits(), rewards(step))).collect()
        };
        assert_eq!(numbers(&rest), numbers(&unbroken[4..]), "{}", kind.0);
        let file = |run: &Path, name: &str| fs::read(run.join(name)).expect("a file");
        let state = "checkpoints/step-8/state.safetensors";
        assert!(file(&whole, state) == file(&broken, state), "{}: the weights differ", kind.0);
        // Stored scores equal the computed ones to the bit: nothing was written again.
        assert!(
            file(&broken, "reference.safetensors") == kept && file(&whole, "reference.safetensors") == kept
        );

        let mut loaded = Loaded::open(&whole, &[]).expect("the run");
        let rows = evaluate::rows(&mut loaded, &[]).expect("held-out pairs");
        let found = evaluate::evaluate(&mut loaded, &Device::cpu(), &rows).expect("an evaluation");
        let (loss, metrics) = last.expect("an evaluation of the run");
        assert!((found.loss - loss as f64).abs() < 1e-5, "{}: {} is not {loss}", kind.0, found.loss);
        let [got, want] = [found.metrics, metrics].map(|of| of.as_ref().and_then(Metrics::rewards).copied());
        assert_eq!(got.expect("rewards").reward_accuracy, want.expect("rewards").reward_accuracy);
    }
}

/// A pair about a frame that cannot be decoded has no weight, in the reference and in the loss.
#[test]
fn a_pair_with_a_broken_frame_is_left_out() {
    let folder = tempfile::tempdir().expect("a folder");
    let image = include_bytes!("../../data/tests/pictures/rgb.png");
    let mut members = vec![];
    for sample in 0..8 {
        let bytes = if sample == 5 { b"no image".to_vec() } else { image.to_vec() };
        members.push((format!("s{sample}.png"), bytes));
        let text = format!(
            r#"{{"user":"which?","chosen_assistant":"number {sample}","rejected_assistant":"another number"}}"#
        );
        members.push((format!("s{sample}.json"), text.into_bytes()));
    }
    let shard = folder.path().join("pairs.tar");
    fs::write(&shard, crate::tar::tar(&members)).expect("a shard");
    let path = format!("data.path={}", shard.display());
    for layout in ["shared_prefix=on", "shared_prefix=off"] {
        let words =
            [&path[..], "data.held_out=0", "eval.rows=0", "data.on_error=skip", "train.steps=2", layout];
        let mut warnings = vec![];
        let steps = train_in(&folder.path().join(layout), &config(FRAMES, &words), |event| {
            if let Event::Warning { message } = event {
                warnings.push(message.clone());
            }
        });
        assert!((steps[0].loss as f64 - 2f64.ln()).abs() < 1e-6, "{layout}: {}", steps[0].loss);
        assert!(warnings.iter().any(|said| said.contains("pairs.tar, byte")), "{layout}: {warnings:?}");
        let asked = config(FRAMES, &words);
        let data = examples::read(&asked, None, &mut |_| {}).expect("pairs");
        let (mut pairs, scores) = PairSession::new(&asked, &data, 1, &|_| {});
        assert_eq!(scores.iter().filter(|score| **score == 0.0).count(), 2, "{layout}: {scores:?}");
        pairs.accumulate();
        assert_eq!(pairs.session.read_f32(WEIGHT_SUM).expect("a sum"), [7.0], "{layout}");
    }
}
