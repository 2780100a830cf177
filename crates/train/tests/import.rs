//! Checkpoints written by other tools: the reference library's logits, its AdamW steps, and runs that begin from them.
//! `make_checkpoints.py` beside the fixtures made them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use flatout_ir::Role;
use flatout_ir::passes::differentiate::gradient_path;
use flatout_ir::passes::{input_path, update};
use flatout_models::library::huggingface;
use flatout_runtime::{Session, cpu};
use flatout_train::device::Device;
use flatout_train::infer::generate::Generator;
use flatout_train::infer::logits;
use flatout_train::recipes;
use flatout_train::resolve::compile;
use flatout_train::run::checkpoint::TensorFile;
use flatout_train::weights::loaded::Loaded;
use flatout_train::weights::pretrained;

use crate::distance::relative;
use crate::small_run::{self, train_in};

pub fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/golden/checkpoints").join(name)
}

fn bytes(file: &mut TensorFile, name: &str) -> Vec<[u8; 4]> {
    let entry = file.entries().get(name).unwrap_or_else(|| panic!("a tensor {name}"));
    let mut bytes = vec![0; entry.bytes()];
    file.read_into(name, &mut bytes).expect("a tensor");
    bytes.as_chunks::<4>().0.to_vec()
}

pub fn f32s(file: &mut TensorFile, name: &str) -> Vec<f32> {
    bytes(file, name).into_iter().map(f32::from_le_bytes).collect()
}

fn i32s(file: &mut TensorFile, name: &str) -> Vec<i32> {
    bytes(file, name).into_iter().map(i32::from_le_bytes).collect()
}

/// The logits that `logits` writes for rows of a model.
pub fn computed(model: &Path, rows: &[Vec<u32>]) -> Vec<f32> {
    let out = tempfile::tempdir().expect("a folder");
    let path = out.path().join("logits.safetensors");
    let mut loaded = Loaded::open(model, &[]).expect("a model");
    logits::write(&mut loaded, &Device::Cpu { threads: 2 }, rows, &path).expect("logits");
    f32s(&mut TensorFile::open(&path).expect("a file"), "logits")
}

fn rows(ids: &[i32], len: usize) -> Vec<Vec<u32>> {
    ids.chunks(len).map(|row| row.iter().map(|id| *id as u32).collect()).collect()
}

/// Number of rows in a fixture.
const ROWS: usize = 2;

pub fn has_the_references_logits(name: &str) {
    let mut expected = TensorFile::open(&folder(name).join("expected.safetensors")).expect("a file");
    let ids = i32s(&mut expected, "input_ids");
    let wanted = f32s(&mut expected, "logits");
    let got = computed(&folder(name), &rows(&ids, ids.len() / ROWS));
    let worst = got.iter().zip(&wanted).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    println!("{name}: logits off by {worst:.1e} at most, {:.1e} relative", relative(&got, &wanted));
    assert!(got.len() == wanted.len() && worst < 1e-4, "{name}: off by {worst:.1e}");
}

#[test]
fn logits_of_llama_shapes() {
    ["llama", "llama-bf16-shards", "llama-f16"].into_iter().for_each(has_the_references_logits);
}

#[test]
fn logits_of_smollm2_shapes() {
    has_the_references_logits("smollm2");
}

#[test]
fn logits_of_qwen3_shapes() {
    ["qwen3", "qwen3-untied-shards", "qwen3-head-stored"].into_iter().for_each(has_the_references_logits);
}

#[test]
fn logits_with_stretched_rotations() {
    ["llama-linear", "llama-llama3", "qwen3-yarn"].into_iter().for_each(has_the_references_logits);
}

#[test]
fn logits_with_biases() {
    has_the_references_logits("llama-biases");
}

#[test]
fn logits_of_gpt2_shapes() {
    ["gpt2", "gpt2-exact-shards"].into_iter().for_each(has_the_references_logits);
}

#[test]
fn logits_of_gemma3_shapes() {
    ["gemma3", "gemma3-images"].into_iter().for_each(has_the_references_logits);
}

/// The vision part is left out, and a warning says so.
#[test]
fn of_a_model_that_sees_images_the_text_part_is_read() {
    let loaded = Loaded::open(&folder("gemma3-images"), &[]).expect("a model");
    let said = loaded.weights.left_out().expect("a line");
    assert!(said.starts_with("23 tensors of the part that sees images are not read"), "{said}");
    assert_eq!(Loaded::open(&folder("gemma3"), &[]).expect("a model").weights.left_out(), None);
}

#[test]
fn a_cache_keeps_what_windows_need() {
    reads_in_portions(&folder("gemma3"), 19);
}

/// Tokens read a few at a time attend to the same ones as all at once, even if windows are shorter than the text.
pub fn reads_in_portions(folder: &Path, tokens: usize) {
    let mut expected = TensorFile::open(&folder.join("expected.safetensors")).expect("a file");
    let ids: Vec<u32> = i32s(&mut expected, "input_ids").into_iter().map(|id| id as u32).collect();
    let (row, logits) = (&ids[..ids.len() / ROWS], f32s(&mut expected, "logits"));
    let vocab = logits.len() / ids.len();
    let mut generator = Generator::open(folder, &Device::Cpu { threads: 2 }).expect("a model");
    let mut at = 0;
    for count in [3, 1, 1, 7, 1, 1, 5].into_iter().chain([1; 99]) {
        if at == tokens {
            break;
        }
        let got = generator.read(&row[at..at + count]).expect("logits");
        at += count;
        let off = relative(&got, &logits[(at - 1) * vocab..at * vocab]);
        assert!(off < 1e-5, "after {at} tokens the logits are off by {off:.1e}");
    }
    assert_eq!(at, tokens);
}

#[test]
fn rows_of_other_lengths_are_separate_tensors() {
    let folder = folder("llama");
    let all = [vec![1, 2, 3, 4, 5], vec![1, 2, 3], vec![7]];
    let out = tempfile::tempdir().expect("a folder");
    let path = out.path().join("logits.safetensors");
    let mut loaded = Loaded::open(&folder, &[]).expect("a model");
    logits::write(&mut loaded, &Device::Cpu { threads: 2 }, &all, &path).expect("logits");
    let mut file = TensorFile::open(&path).expect("a file");
    for (number, row) in all.iter().enumerate() {
        let name = format!("logits.{number}");
        assert_eq!(file.entries()[&name].shape, [row.len(), 53]);
        let off = relative(&f32s(&mut file, &name), &computed(&folder, std::slice::from_ref(row)));
        assert!(off < 1e-5, "row {number} among others is off by {off:.1e}");
    }
}

/// Two updates with AdamW: loss, gradients, norm and weights equal PyTorch's.
fn steps_as_pytorch_does(name: &str) {
    let mut steps = TensorFile::open(&folder(name).join("steps.safetensors")).expect("a file");
    let mut expected = TensorFile::open(&folder(name).join("expected.safetensors")).expect("a file");
    let (ids, labels) = (i32s(&mut expected, "input_ids"), i32s(&mut steps, "labels"));
    let words = [
        format!("model.from={}", folder(name).display()),
        format!("train.batch={ROWS}"),
        format!("train.micro_batch={ROWS}"),
        "optimizer.betas=[0.9,0.95]".into(),
        "optimizer.eps=1e-8".into(),
        "optimizer.weight_decay=0.1".into(),
        "optimizer.clip=1".into(),
        "eval.rows=0".into(),
    ];
    let config = recipes::resolve("tiny", &[], &words).expect("a config");
    let compiled = compile::compile(&config, &cpu::target(2)).expect("plans");
    let mut session = Session::new(compiled.plans, 2).expect("a session");
    pretrained::begin(&config, &mut session).expect("weights");

    // The model's rows are longer than the file's: the padding has weight 0.
    let (context, len) = (config.model.decoder().context, ids.len() / ROWS);
    let padded = |values: &[i32], fill: i32| -> Vec<i32> {
        values.chunks(len).flat_map(|row| [row, &vec![fill; context - len]].concat()).collect()
    };
    let (ids, labels) = (padded(&ids, 0), padded(&labels, -1));
    let positions: Vec<i32> = (0..ROWS).flat_map(|_| 0..context as i32).collect();
    let weights: Vec<f32> = labels.iter().map(|label| if *label < 0 { 0.0 } else { 1.0 }).collect();
    let shapes = pretrained::parameters(&config.model);
    let mut names =
        huggingface::stored(config.model.decoder(), |path| shapes[path].0.dims.clone()).expect("names");
    // A value added to every key alike changes no probability: without rotary positions, its gradient is only rounding.
    names.retain(|stored| !(name == "gpt2" && stored.ours.ends_with("attn.wk_bias")));
    let check = |what: &str, got: &[f32], wanted: Vec<f32>, bound: f64| {
        let off = relative(got, &wanted);
        assert!(got.len() == wanted.len() && off < bound, "{name}, {what}: off by {off:.1e}");
    };
    let supervised: f32 = weights.iter().sum();
    for step in 1..=2 {
        for (input, values) in [("tokens", &ids), ("targets", &labels), ("positions", &positions)] {
            session.write_i32(&input_path(Role::GRAD, input), values).expect("an input");
        }
        session.write_f32(&input_path(Role::GRAD, "weights"), &weights).expect("an input");
        session.run(Role::GRAD).expect("gradients");
        for stored in names.iter().filter(|_| step == 1) {
            // Sums here, means in the file.
            let sums = session.read_f32(&gradient_path(&stored.ours)).expect("a gradient");
            let means: Vec<f32> = sums.iter().map(|sum| sum / supervised).collect();
            let wanted = stored.take(&f32s(&mut steps, &format!("grad.{}", stored.theirs)));
            check(&stored.ours, &means, wanted, 1e-4);
        }
        session.write_f32(&input_path(Role::Apply, update::LR), &[3e-3]).expect("a rate");
        session.run(Role::Apply).expect("an update");
        for (what, theirs) in [("loss", "loss"), ("grad_norm", "norm")] {
            let got = session.result(Role::Apply, what).expect("a result");
            check(what, &got, f32s(&mut steps, &format!("{theirs}.{step}")), 1e-5);
        }
        for stored in &names {
            let weight = session.read_f32(&stored.ours).expect("a weight");
            let wanted = stored.take(&f32s(&mut steps, &format!("after.{step}.{}", stored.theirs)));
            check(&stored.ours, &weight, wanted, 1e-4);
        }
    }
}

#[test]
fn adamw_steps_of_llama() {
    steps_as_pytorch_does("llama");
}

#[test]
fn adamw_steps_of_gpt2() {
    steps_as_pytorch_does("gpt2");
}

#[test]
fn adamw_steps_of_qwen3() {
    steps_as_pytorch_does("qwen3");
}

/// A run on the synthetic language from weights of a model whose vocabulary is large enough for it.
fn config_from(from: &str, more: &[&str]) -> flatout_train::Config {
    let from = format!("model.from={from}");
    let small = [
        "model.context=32",
        "train.steps=12",
        "train.batch=4",
        "schedule.warmup_steps=2",
        "eval.rows=0",
        "checkpoint.every=4",
        from.as_str(),
    ];
    let words: Vec<String> = small.iter().chain(more).map(|word| word.to_string()).collect();
    recipes::resolve("tiny", &[], &words).expect("a config")
}

/// A run of 12 steps whose model has the words of the synthetic language.
fn first_run(dir: &Path) {
    let config = small_run::config(&["train.steps=12", "checkpoint.every=4", "checkpoint.keep=9"]);
    train_in(dir, &config, |_| {});
}

fn parameters(checkpoint: &Path) -> BTreeMap<String, Vec<[u8; 4]>> {
    let mut file = TensorFile::open(&checkpoint.join("state.safetensors")).expect("a checkpoint");
    let names: Vec<String> = file.entries().keys().cloned().collect();
    names.into_iter().map(|name| (name.clone(), bytes(&mut file, &name))).collect()
}

#[test]
fn a_run_begins_from_a_run_at_any_step() {
    let scratch = tempfile::tempdir().expect("a folder");
    let first = scratch.path().join("first");
    first_run(&first);
    let given = [vec![5, 6, 7, 8], vec![9, 10, 11, 12]];
    for (said, step) in [("first", 12), ("first@12", 12), ("first@4", 4)] {
        let from = scratch.path().join(said).display().to_string();
        // One update with a negligible learning rate: the weights stay as loaded.
        let config =
            config_from(&from, &["train.steps=1", "schedule.warmup_steps=0", "lr=1e-30", "weight_decay=0"]);
        let dir = scratch.path().join(format!("then-{said}"));
        train_in(&dir, &config, |_| {});
        let (then, source) =
            (computed(&dir, &given), computed(&scratch.path().join(format!("first@{step}")), &given));
        assert_eq!(then, source, "{said}");
        let kept =
            flatout_train::run::config(&dir).expect("a config").model.from().cloned().expect("a source");
        assert!(kept.ends_with(&format!("/first@{step}")), "{kept} is pinned");
    }
    assert_ne!(computed(&scratch.path().join("first@4"), &given), computed(&first, &given));
}

#[test]
fn frozen_weights_are_reloaded_and_verified_by_hash() {
    let scratch = tempfile::tempdir().expect("a folder");
    let (base, dir, whole) =
        (scratch.path().join("base"), scratch.path().join("run"), scratch.path().join("whole"));
    let run = scratch.path().join("first");
    first_run(&run);
    let mut loaded = Loaded::open(&run, &[]).expect("a run");
    let export = flatout_train::weights::export::Export {
        to: base.clone(),
        dtype: flatout_train::weights::export::Width::F32,
        shard_bytes: u64::MAX,
        force: false,
        adapter: false,
    };
    flatout_train::weights::export::export(&mut loaded, &export).expect("a folder");

    let frozen = ["train.freeze=[embed,layers.0]"];
    let config = |steps: &'static str| {
        let mut config = config_from(&base.display().to_string(), &[frozen[0], steps]);
        config.schedule.horizon_steps = Some(12);
        config
    };
    train_in(&whole, &config("train.steps=12"), |_| {});
    train_in(&dir, &config("train.steps=4"), |_| {});
    // In two parts, the second of which must reload the frozen weights, it equals the unbroken run to the bit.
    let own = flatout_train::run::config(&dir).expect("a config");
    train_in(&dir, &own.resumed(&["train.steps=12".into()]).expect("a config"), |_| {});
    let (one, two) = (whole.join("checkpoints/step-12"), dir.join("checkpoints/step-12"));
    assert_eq!(parameters(&one), parameters(&two));
    assert!(!parameters(&one).contains_key("embed.weight"), "what is frozen is in no checkpoint");
    let given = [vec![5, 6, 7, 8]];
    assert_eq!(computed(&whole, &given), computed(&dir, &given));
    let mut generator = Generator::open(&dir, &Device::Cpu { threads: 2 }).expect("a run");
    assert_eq!(generator.read(&[5, 6]).expect("logits").len(), 512);

    // Another file in the same place is noticed before it is used.
    let path = base.join("model.safetensors");
    let mut changed = fs::read(&path).expect("weights");
    let last = changed.len() - 1;
    changed[last] ^= 1;
    fs::write(&path, &changed).expect("a file");
    Loaded::open(&dir, &[]).expect("the last tensor is the final norm, which is trained");
    let at = {
        let file = TensorFile::open(&path).expect("a file");
        assert!(file.entries().contains_key("model.embed_tokens.weight"));
        let header = u64::from_le_bytes(changed[..8].try_into().expect("eight bytes"));
        8 + header as usize
    };
    changed[at] ^= 1;
    fs::write(&path, &changed).expect("a file");
    let failure = Generator::open(&dir, &Device::Cpu { threads: 2 }).err().expect("another weight");
    assert!(failure.to_string().contains("is not what the run began with"), "{failure}");
}

#[test]
fn a_fully_trained_run_no_longer_needs_its_source() {
    let scratch = tempfile::tempdir().expect("a folder");
    let (first, dir) = (scratch.path().join("first"), scratch.path().join("then"));
    first_run(&first);
    train_in(&dir, &config_from(&first.display().to_string(), &["train.steps=4"]), |_| {});
    fs::remove_dir_all(&first).expect("the source");
    let own = flatout_train::run::config(&dir).expect("a config");
    let steps = train_in(&dir, &own.resumed(&["train.steps=6".into()]).expect("a config"), |_| {});
    assert_eq!(steps.len(), 2);
    Generator::open(&dir, &Device::Cpu { threads: 2 }).expect("a run");
}

/// Rows shorter than a model's learned positions use the first of them.
#[test]
fn learned_positions_may_be_fewer_than_the_sources() {
    let words =
        |from: String| [format!("model.from={from}"), "model.context=12".into(), "eval.rows=0".into()];
    let config =
        recipes::resolve("tiny", &[], &words(folder("gpt2").display().to_string())).expect("a config");
    let compiled = compile::compile(&config, &cpu::target(2)).expect("plans");
    let mut session = Session::new(compiled.plans, 2).expect("a session");
    pretrained::begin(&config, &mut session).expect("weights");
    let mut file = TensorFile::open(&folder("gpt2").join("model.safetensors")).expect("a file");
    let all = f32s(&mut file, "transformer.wpe.weight");
    let first = session.read_f32("positions.weight").expect("positions");
    assert_eq!(first, all[..12 * config.model.decoder().width]);
    assert!(first.len() < all.len());

    let long =
        words(folder("gpt2").display().to_string()).map(|word| word.replace("context=12", "context=4096"));
    let refused = recipes::resolve("tiny", &[], &long).unwrap_err().0;
    assert!(refused.contains("learned positions: give at most as many"), "{refused}");

    // The same for a run, where they are frozen and read again when it is resumed.
    let scratch = tempfile::tempdir().expect("a folder");
    let source = scratch.path().join("first");
    let learned =
        ["train.steps=4", "checkpoint.every=4", "model.positions=learned", "schedule.warmup_steps=1"];
    train_in(&source, &small_run::config(&learned), |_| {});
    let still =
        ["train.steps=2", "schedule.warmup_steps=0", "lr=1e-30", "weight_decay=0", "model.context=16"];
    let config =
        config_from(&source.display().to_string(), &[&still[..], &["train.freeze=positions"]].concat());
    let dir = scratch.path().join("then");
    train_in(&dir, &config, |_| {});
    let given = [vec![5, 6, 7, 8], vec![9, 10, 11, 12]];
    assert_eq!(computed(&dir, &given), computed(&source, &given));
    assert_eq!(Loaded::open(&dir, &[]).expect("a run").positions, 16);
}

/// A copy of a fixture's folder with another file beside its weights.
fn with_file(name: &str, file: &str, text: &str) -> tempfile::TempDir {
    let copy = tempfile::tempdir().expect("a folder");
    for file in ["config.json", "model.safetensors"] {
        fs::copy(folder(name).join(file), copy.path().join(file)).expect("a copy");
    }
    fs::write(copy.path().join(file), text).expect("a file");
    copy
}

#[test]
fn texts_end_as_the_generation_config_says() {
    const FILE: &str = "generation_config.json";
    let stops = |text: &str| {
        Loaded::open(with_file("llama", FILE, text).path(), &[]).map(|loaded| loaded.stops).map_err(|e| e.0)
    };
    let own = Loaded::open(&folder("llama"), &[]).expect("a model").stops;
    assert_eq!(stops(r#"{ "eos_token_id": [7, 9] }"#), Ok(vec![7, 9]));
    assert_eq!(stops(r#"{ "eos_token_id": 5 }"#), Ok(vec![5]));
    assert_eq!(stops("{}"), Ok(own));
    let refused = stops(r#"{ "eos_token_id": "</s>" }"#).unwrap_err();
    assert!(refused.contains(FILE) && refused.contains("`eos_token_id` is \"</s>\""), "{refused}");
}

/// If the source can be exported, the trained model must be exportable too: it is refused before training, not afterwards.
#[test]
fn a_run_whose_model_could_not_be_exported_is_refused_before_it_begins() {
    let checked = |more: &[&str]| {
        let from = format!("model.from={}", folder("llama").display());
        let words = ["model.head=classes", "model.classes=2", &from].into_iter().chain(more.iter().copied());
        let words: Vec<String> = words.map(String::from).collect();
        let config = recipes::resolve("tiny", &[], &words).expect("a config");
        pretrained::check(&config, &mut |_| {}).map_err(|error| error.0)
    };
    assert_eq!(checked(&[]), Ok(()));
    let refused = checked(&["model.attention=bidirectional"]).unwrap_err();
    assert!(
        refused.contains("could not") && refused.contains("model.attention = bidirectional"),
        "{refused}"
    );
}
