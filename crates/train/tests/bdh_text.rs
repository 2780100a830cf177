//! BDH on text, with the commands that decoders have: evaluation, logits, and generation with a cache.

use std::path::Path;

use flatout_train::Config;
use flatout_train::device::Device;
use flatout_train::infer::evaluate;
use flatout_train::infer::generate::{Generator, GeneratorCapacity};
use flatout_train::infer::logits;
use flatout_train::infer::sampling::Sampling;
use flatout_train::recipes;
use flatout_train::run::checkpoint::TensorFile;
use flatout_train::run::events::Event;
use flatout_train::weights::loaded::Loaded;

use crate::distance::relative;
use crate::small_run::train_in;

const CONTEXT: usize = 48;

fn config(overrides: &[&str]) -> Config {
    let small = [
        "model.head=tokens",
        "model.classes=none",
        "model.width=32",
        "model.layers=2",
        "model.heads=2",
        "model.latent=64",
        "model.vocab=512",
        "model.context=48",
        "data.task=text",
        "train.epochs=none",
        "train.steps=12",
        "train.batch=4",
        "schedule.warmup_steps=2",
        "eval.every_epochs=none",
        "eval.metric=loss",
        "eval.rows=8",
        "optimizer.lr=0.003",
        "checkpoint.every=0",
        "checkpoint.best=false",
    ];
    let all: Vec<String> = small.iter().chain(overrides).map(|word| word.to_string()).collect();
    recipes::resolve("bdh-cifar10", &[], &all).expect("a config")
}

/// Trains, and returns the last held-out loss of the event log.
fn trained(dir: &Path, config: &Config) -> f64 {
    let mut said = f64::NAN;
    train_in(dir, config, |event| {
        if let Event::Eval { loss, .. } = event {
            said = *loss as f64;
        }
    });
    said
}

#[test]
fn evaluation_gives_the_loss_of_the_run() {
    let folder = tempfile::tempdir().expect("a folder");
    for (name, precision) in [("wide", "precision=fp32"), ("narrow", "precision=bf16")] {
        let dir = folder.path().join(name);
        let said = trained(&dir, &config(&[precision]));
        let mut loaded = Loaded::open(&dir, &[]).expect("a run");
        let rows = evaluate::rows(&mut loaded, &[]).expect("rows");
        let found = evaluate::evaluate(&mut loaded, &Device::cpu(), &rows).expect("a loss");
        assert!((found.loss - said).abs() < 1e-5 * said, "{precision}: {} and {said}", found.loss);
        assert_eq!(found.rows, 8);
    }
}

/// Logits after each token of a row computed at once, from the file that `logits` writes.
fn whole(dir: &Path, tokens: &[u32]) -> Vec<Vec<f32>> {
    let out = dir.with_extension("logits");
    let mut loaded = Loaded::open(dir, &[]).expect("a run");
    logits::write(&mut loaded, &Device::cpu(), &[tokens.to_vec()], &out).expect("logits");
    let file = TensorFile::open(&out).expect("tensors");
    let mut bytes = vec![0; file.entries()["logits"].bytes()];
    file.read_into("logits", &mut bytes).expect("logits");
    let values: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|word| f32::from_le_bytes(*word)).collect();
    values.chunks(values.len() / tokens.len()).map(<[f32]>::to_vec).collect()
}

/// A prompt in pieces and token by token, in either of two lanes, gives the logits of the whole row.
#[test]
fn the_cache_gives_the_logits_of_the_whole_row() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path().join("run");
    trained(&dir, &config(&["precision=fp32"]));
    let tokens: Vec<u32> = (0..CONTEXT as u32).map(|i| (i * i * 7 + 3 * i) % 300).collect();
    let wanted = whole(&dir, &tokens);
    let room = GeneratorCapacity { sequences: 2, tokens: CONTEXT };
    let mut generator =
        Generator::new(Loaded::open(&dir, &[]).expect("a run"), &Device::cpu(), room).expect("a generator");
    for lane in [0, 1] {
        let mut at = 0;
        for portion in [1, 17, 1, 1, 25, 1] {
            let got = generator.read_lanes(&[(lane, &tokens[at..at + portion])]).expect("logits");
            at += portion;
            let apart = relative(&got[0], &wanted[at - 1]);
            assert!(apart < 1e-5, "lane {lane} after {at} tokens: {apart}");
        }
    }
    // The first token attends to nothing, and its logits differ from those of the second.
    assert!(relative(&wanted[0], &wanted[1]) > 1e-3);
}

#[test]
fn many_prompts_are_continued_as_each_alone() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path().join("run");
    trained(&dir, &config(&[]));
    let prompts: Vec<Vec<u32>> = vec![vec![1, 5, 9], vec![1], vec![1, 40, 41, 42, 43, 44, 45], vec![1, 7]];
    let sampling = Sampling { temperature: 0.9, top_k: 0, top_p: 1.0, seed: 3, max_tokens: 9 };
    let made = |prompts: &[Vec<u32>], sequences: usize| {
        let loaded = Loaded::open(&dir, &[]).expect("a run");
        let room = GeneratorCapacity { sequences, tokens: 20 };
        let mut generator = Generator::new(loaded, &Device::cpu(), room).expect("a generator");
        generator.continue_all(prompts, sampling, &mut |_, _| {}).expect("texts")
    };
    let together = made(&prompts, 2);
    assert!(together.iter().any(|text| text.len() == 9), "{together:?}");
    for (prompt, text) in prompts.iter().zip(&together) {
        assert_eq!(made(std::slice::from_ref(prompt), 1)[0], *text);
    }
}
