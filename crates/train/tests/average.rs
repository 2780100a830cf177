//! The running average of the weights: its definition, its use in evaluation and all commands, and its memory.

use std::collections::BTreeMap;
use std::path::Path;

use flatout_ir::passes::average::{average_path, averaged_weight};
use flatout_ir::plan::Category;
use flatout_train::Config;
use flatout_train::device::Device;
use flatout_train::infer::evaluate;
use flatout_train::infer::images;
use flatout_train::recipes;
use flatout_train::resolve::compile;
use flatout_train::run::checkpoint::TensorFile;
use flatout_train::run::events::Event;
use flatout_train::weights::export::{Export, Width, export};
use flatout_train::weights::initial;
use flatout_train::weights::loaded::Loaded;
use flatout_train::weights::pretrained::parameters;

use crate::small_run::{config, train_in};

const UPDATES: u64 = 9;
/// The warm-up ends after five updates, so that the time after it is tested too.
const DECAY: f64 = 0.4;

/// Keys of a short run that saves every update.
const SHORT: [&str; 6] = [
    "train.steps=9",
    "schedule.warmup_steps=2",
    "checkpoint.every=1",
    "checkpoint.keep=9",
    "train.ema=0.4",
    "eval.rows=8",
];

fn images_config(recipe: &str, overrides: &[&str]) -> Config {
    let small = ["data.synthetic_rows=200", "train.batch=8", "data.held_out=0.125", "backend=cpu"];
    let words = small.iter().chain(&SHORT).chain(overrides).map(|word| word.to_string());
    recipes::resolve(recipe, &[], &words.collect::<Vec<_>>()).expect("a config")
}

fn decoder(overrides: &[&str]) -> Config {
    config(&[&SHORT, overrides].concat())
}

/// The tensors of a checkpoint in f32, by name.
fn state(dir: &Path, step: u64) -> BTreeMap<String, Vec<f32>> {
    let path = dir.join(format!("checkpoints/step-{step}/state.safetensors"));
    let file = TensorFile::open(&path).expect("a checkpoint");
    let names: Vec<(String, usize, usize)> =
        file.entries().iter().map(|(name, e)| (name.clone(), e.bytes(), e.dtype.bytes())).collect();
    let mut tensors = BTreeMap::new();
    for (name, bytes, width) in names {
        let mut place = vec![0; bytes];
        file.read_into(&name, &mut place).expect("a tensor");
        if width == 4 {
            let words = place.as_chunks::<4>().0;
            tensors.insert(name, words.iter().map(|word| f32::from_le_bytes(*word)).collect());
        }
    }
    tensors
}

/// Trains, and recomputes every average from the weights that were saved after each update.
fn follows_its_definition(dir: &Path, config: &Config) {
    train_in(dir, config, |_| {});
    let first = state(dir, 1);
    let weights: Vec<&str> = first.keys().filter_map(|name| averaged_weight(name)).collect();
    assert!(!weights.is_empty());
    let trained =
        first.keys().filter(|name| !name.starts_with("average.") && !name.starts_with("optimizer."));
    assert_eq!(trained.count(), weights.len(), "all that is trained has an average");
    let drawn = parameters(&config.model);
    for weight in weights {
        // An adapter's initial value is drawn relative to its weight; for those the first saved average is taken as given.
        let mut average: Vec<f64> = match drawn.get(weight) {
            Some((ty, init)) => {
                initial::values(weight, ty, init, config.train.seed).iter().map(|x| *x as f64).collect()
            }
            None => first[&average_path(weight)].iter().map(|x| *x as f64).collect(),
        };
        for step in if drawn.contains_key(weight) { 1 } else { 2 }..=UPDATES {
            let state = state(dir, step);
            let decay = DECAY.min((1.0 + step as f64) / (10.0 + step as f64));
            let (now, kept) = (&state[weight], &state[&average_path(weight)]);
            for ((average, now), kept) in average.iter_mut().zip(now).zip(kept) {
                *average = decay * *average + (1.0 - decay) * *now as f64;
                let off = (*average - *kept as f64).abs();
                assert!(off <= 2e-6 * (1.0 + average.abs()), "{weight} after {step}: {average} and {kept}");
            }
        }
    }
}

#[test]
fn averages_of_a_decoder_follow_their_definition() {
    let dir = tempfile::tempdir().expect("a folder");
    for (name, words) in [
        ("fused", &[][..]),
        ("apart", &["fuse.optimizer=off", "fuse.elementwise=off", "fuse.qkv=off"][..]),
        ("narrow", &["precision=bf16", "optimizer.state=int8", "fuse.optimizer=off"][..]),
        ("frozen", &["train.freeze=[layers.0.attn.*]"][..]),
        ("dora", &["adapter.kind=dora", "adapter.also_train=norm"][..]),
    ] {
        println!("{name}");
        follows_its_definition(&dir.path().join(name), &decoder(words));
    }
}

#[test]
fn averages_of_models_of_images_follow_their_definition() {
    let dir = tempfile::tempdir().expect("a folder");
    let vit = ["model.width=32", "model.layers=1", "model.heads=2", "model.image_size=16"];
    follows_its_definition(&dir.path().join("vit"), &images_config("vision-tiny", &vit));
    let bdh =
        ["model.width=16", "model.layers=2", "model.heads=2", "model.latent=32", "data.source=synthetic"];
    let more = ["train.epochs=none", "eval.every_epochs=none", "model.image_size=16", "precision=fp32"];
    follows_its_definition(
        &dir.path().join("bdh"),
        &images_config("bdh-cifar10", &[&bdh[..], &more].concat()),
    );
}

/// The last held-out loss of a run, checks that it belongs to the averages, and the losses that `eval` computes with the averages
/// and with the weights.
fn evaluated(dir: &Path, config: &Config) -> (f64, [f64; 2]) {
    let mut said = vec![];
    train_in(dir, config, |event| {
        if let Event::Eval { loss, averaged, .. } = event {
            said.push((*loss as f64, *averaged));
        }
    });
    let found = [&[][..], &["train.ema=0".to_string()][..]].map(|overrides| {
        let mut loaded = Loaded::open(dir, overrides).expect("a run");
        assert_eq!(loaded.weights.are_averages(), overrides.is_empty());
        if config.model.image_size().is_some() {
            return images::classify(&mut loaded, &Device::cpu(), overrides).expect("classes").0.loss;
        }
        let rows = evaluate::rows(&mut loaded, overrides).expect("rows");
        evaluate::evaluate(&mut loaded, &Device::cpu(), &rows).expect("a loss").loss
    });
    let (last, averaged) = *said.last().expect("an evaluation");
    assert!(averaged);
    (last, found)
}

#[test]
fn evaluation_reads_the_averages() {
    let dir = tempfile::tempdir().expect("a folder");
    let slow = "train.ema=0.99";
    let vit = ["model.width=32", "model.layers=1", "model.heads=2", "model.image_size=16"];
    let vit =
        images_config("vision-tiny", &[&vit[..], &[slow, "optimizer.lr=0.001", "eval.rows=25"]].concat());
    for (name, config, tolerance) in [
        ("wide", decoder(&[slow]), 1e-6),
        // Both round averages to bf16 once.
        ("narrow", decoder(&[slow, "precision=bf16"]), 1e-6),
        ("fp8", decoder(&[slow, "precision=fp8", "train.micro_batch=4"]), 1e-6),
        ("lora", decoder(&[slow, "adapter.kind=lora", "optimizer.lr=0.03"]), 1e-6),
        ("dora", decoder(&[slow, "adapter.kind=dora", "optimizer.lr=0.03", "precision=bf16"]), 1e-6),
        ("images", vit, 1e-6),
    ] {
        let (said, [averages, weights]) = evaluated(&dir.path().join(name), &config);
        println!("{name}: said {said}, averages {averages}, weights {weights}");
        assert!((said - averages).abs() <= tolerance * averages, "{name}: {said} and {averages}");
        assert!((averages - weights).abs() > 5e-4, "{name}: {averages} and {weights} should differ");
    }
}

/// The exported tensors are the averages, to the bit; and a model that begins from the run begins from them.
#[test]
fn the_averages_are_exported() {
    let dir = tempfile::tempdir().expect("a folder");
    let (run, to) = (dir.path().join("run"), dir.path().join("hf"));
    train_in(&run, &decoder(&["model.qk_norm=false"]), |_| {});
    let wanted =
        Export { to: to.clone(), dtype: Width::F32, shard_bytes: u64::MAX, force: false, adapter: false };
    export(&mut Loaded::open(&run, &[]).expect("a run"), &wanted).expect("an export");
    let state = state(&run, UPDATES);
    let averages: Vec<u32> = state[&average_path("layers.0.ffn.down")].iter().map(|x| x.to_bits()).collect();
    assert_ne!(averages, state["layers.0.ffn.down"].iter().map(|x| x.to_bits()).collect::<Vec<_>>());
    let file = TensorFile::open(&to.join("model.safetensors")).expect("tensors");
    let name = "model.layers.0.mlp.down_proj.weight";
    let mut bytes = vec![0; file.entries()[name].bytes()];
    file.read_into(name, &mut bytes).expect("a tensor");
    let words: Vec<u32> = bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
    assert_eq!(words, averages);
}

#[test]
fn a_run_without_averages_has_none_to_read() {
    let dir = tempfile::tempdir().expect("a folder");
    let run = dir.path().join("run");
    train_in(&run, &decoder(&["train.ema=0"]), |event| {
        assert!(!matches!(event, Event::Eval { averaged: true, .. }));
    });
    let Err(refused) = Loaded::open(&run, &["train.ema=0.9".into()]) else { panic!("it has none") };
    assert!(refused.0.contains("kept no average of its weights"), "{}", refused.0);
    assert!(!Loaded::open(&run, &[]).expect("a run").weights.are_averages());
}

/// Memory as `plan` prints it: four bytes per parameter, in a category of its own, whatever else is chosen.
#[test]
fn memory_is_planned() {
    for words in [&[][..], &["precision=bf16", "optimizer.state=int8"], &["adapter.kind=lora"]] {
        let of = |ema: &str| {
            let config = config(&[words, &[ema, "eval.rows=4"]].concat());
            compile::compile(&config, &compile::target()).expect("plans")
        };
        let (without, with) = (of("train.ema=0"), of("train.ema=0.999"));
        let bytes = with.plans.categories()[Category::Average.name()];
        let parameters = with.trained() as usize;
        assert!(bytes >= 4 * parameters && bytes < 4 * parameters + 4096 * 64, "{bytes} for {parameters}");
        assert_eq!(without.plans.categories()[Category::Average.name()], 0);
        assert_eq!(with.plans.persistent_bytes - without.plans.persistent_bytes, bytes, "and nothing else");
    }
}

#[test]
fn a_decay_outside_its_range_is_refused() {
    for given in ["1", "-0.1", "1.5", "nan"] {
        let words = [format!("train.ema={given}")];
        let refused = recipes::resolve("tiny", &[], &words).unwrap_err().0;
        assert!(refused.contains("train.ema"), "{given}: {refused}");
    }
}
