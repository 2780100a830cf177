//! Foveated models with the commands: generation about frames, import and export with the authors' names, and a text model and a
//! DINOv2 that become one model.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use flatout_models::config::{Look, Vision};
use flatout_train::device::Device;
use flatout_train::infer::generate::{CHUNK_WITH_FRAMES, Generator, GeneratorCapacity, Pictures, Prompt};
use flatout_train::infer::sampling::Sampling;
use flatout_train::recipes;
use flatout_train::run::checkpoint::{Dtype, TensorFile, header};
use flatout_train::weights::export::{Export, Width, export};
use flatout_train::weights::loaded::Loaded;
use serde_json::{Value, json};

use crate::fovea_golden::Golden;
use crate::small_run::train_in;

/// Words of the synthetic language, on which the runs below train.
const WORDS: usize = 512;

type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

fn write_model(folder: &Path, config: &Value, tensors: &Tensors) {
    fs::create_dir_all(folder).expect("a folder");
    fs::write(folder.join("config.json"), serde_json::to_vec(config).unwrap()).expect("a file");
    let described: Vec<_> =
        tensors.iter().map(|(name, (shape, _))| (name.as_str(), Dtype::F32, shape.as_slice())).collect();
    let mut file = header(&described, &[("format", "pt")]).expect("a header");
    tensors.values().for_each(|(_, values)| file.extend(values.iter().flat_map(|x| x.to_le_bytes())));
    fs::write(folder.join("model.safetensors"), file).expect("a file");
}

/// The fixture's weights for more words: its first rows repeated.
fn wordy(golden: &Golden) -> Tensors {
    let mut tensors = golden.weights.clone();
    let (shape, values) = tensors.get_mut("llm.model.embed_tokens.weight").expect("an embedding");
    shape[0] = WORDS;
    *values = values.iter().copied().cycle().take(shape.iter().product()).collect();
    tensors
}

/// The tensors with a name prefix, which is removed.
fn below(tensors: &Tensors, scope: &str) -> Tensors {
    let within = |(name, tensor): (&String, &(Vec<usize>, Vec<f32>))| {
        Some((name.strip_prefix(scope)?.to_string(), tensor.clone()))
    };
    tensors.iter().filter_map(within).collect()
}

fn run_from(words: &[String]) -> flatout_train::Config {
    let small = ["train.steps=1", "train.batch=2", "model.context=16", "warmup_steps=0", "eval.rows=0"];
    // A learning rate that is zero in f32: weights that are exactly zero stay so too.
    let small = small.into_iter().chain(["lr=1e-50", "weight_decay=0"]).map(String::from);
    recipes::resolve("tiny", &[], &small.chain(words.iter().cloned()).collect::<Vec<_>>()).expect("a config")
}

fn exported(run: &Path, to: PathBuf) -> Tensors {
    let wanted =
        Export { to: to.clone(), dtype: Width::F32, shard_bytes: u64::MAX, force: false, adapter: false };
    let made = export(&mut Loaded::open(run, &[]).expect("a run"), &wanted).expect("a folder");
    assert_eq!(made.architecture, "FoveatedVLM");
    let file = TensorFile::open(&to.join("model.safetensors")).expect("tensors");
    let read = |(name, entry): (&String, &flatout_train::run::checkpoint::Entry)| {
        let mut bytes = vec![0; entry.bytes()];
        file.read_into(name, &mut bytes).expect("a tensor");
        let values = bytes.as_chunks::<4>().0.iter().map(|x| f32::from_le_bytes(*x)).collect();
        (name.clone(), (entry.shape.clone(), values))
    };
    file.entries().iter().map(read).collect()
}

/// `model.from` reads the authors' names, and a run with zero updates writes the same bytes under the same names.
#[test]
fn a_checkpoint_is_read_and_exported_to_the_bit() {
    let golden = Golden::open(Look::Fine);
    let scratch = tempfile::tempdir().expect("a folder");
    let [source, run, out] = ["source", "run", "out"].map(|name| scratch.path().join(name));
    let mut config = golden.fixture.json.clone();
    config["text_config"]["vocab_size"] = json!(WORDS);
    let tensors = wordy(&golden);
    write_model(&source, &config, &tensors);
    train_in(&run, &run_from(&[format!("model.from={}", source.display())]), |_| {});
    assert!(exported(&run, out.clone()) == tensors, "tensors came out other than they went in");
    let read = |folder: &Path| flatout_train::weights::pretrained::folder::describe(folder).unwrap().model;
    assert_eq!(read(&out), read(&source));
}

/// A text model from `model.from` and a DINOv2 from `model.vision.from`: their weights are read, and the connecting parameters
/// are drawn.
#[test]
fn a_text_model_and_a_dinov2_become_one() {
    let golden = Golden::open(Look::Fine);
    let scratch = tempfile::tempdir().expect("a folder");
    let [text, tower, run, out] = ["text", "tower", "run", "out"].map(|name| scratch.path().join(name));
    let tensors = wordy(&golden);
    let mut config = golden.fixture.json["text_config"].clone();
    (config["vocab_size"], config["architectures"]) = (json!(WORDS), json!(["LlamaForCausalLM"]));
    write_model(&text, &config, &below(&tensors, "llm."));
    let mut config = golden.fixture.json["vision_config"].clone();
    config["architectures"] = json!(["Dinov2Model"]);
    write_model(&tower, &config, &below(&tensors, "encoder.dino."));
    let words = |more: &[&str]| -> Vec<String> {
        let from = [
            format!("model.from={}", text.display()),
            format!("model.vision.from={}", tower.display()),
            "model.vision.kind=fovea".into(),
            "model.vision.query=14".into(),
            "model.vision.image_size=24".into(),
        ];
        from.into_iter().chain(more.iter().map(|word| word.to_string())).collect()
    };
    let config = run_from(&words(&[]));
    let fovea = config.model.as_fovea().expect("a tower");
    assert_eq!((fovea.width, fovea.layers, fovea.positions, fovea.query), (24, 3, 7, 14));
    train_in(&run, &config, |_| {});
    // The run records both sources exactly, whatever directory it is resumed from.
    let pinned = flatout_train::run::config(&run).expect("the run's config").model;
    let exactly = |path: &Path| Some(path.canonicalize().expect("a folder").display().to_string());
    assert_eq!(pinned.from().map(String::as_str), exactly(&text).as_deref());
    assert_eq!(pinned.as_fovea().expect("a tower").from, exactly(&tower));
    let origin = flatout_train::weights::pretrained::Origin::of(&run).expect("an origin");
    assert_eq!((Some(origin.from), origin.vision_from), (exactly(&text), exactly(&tower)));
    let made = exported(&run, out);
    assert_eq!(made.keys().collect::<Vec<_>>(), tensors.keys().collect::<Vec<_>>());
    for (name, (shape, values)) in &made {
        assert_eq!(*shape, tensors[name].0, "{name}");
        if name.starts_with("llm.") || name.starts_with("encoder.dino.") {
            assert!(*values == tensors[name].1, "{name} is not what its source has");
        } else if name.starts_with("q_") {
            let size = values.iter().map(|x| x * x).sum::<f32>() / values.len() as f32;
            assert!((0.2..3.0).contains(&size), "{name} has a mean square of {size}");
        } else {
            // Uniform within the bounds of PyTorch's linear layers, weights and vectors alike.
            let inner = made[&name.replace("bias", "weight")].0[1] as f32;
            let largest = values.iter().fold(0f32, |largest, x| largest.max(x.abs())) * inner.sqrt();
            assert!(largest <= 1.0 && largest > 0.7, "{name} is up to {largest} of its bound");
        }
    }
    for (word, sentence) in [
        ("model.vision.width=48", "`model.vision.width` is 48 and the model of"),
        ("model.vision.deepstack=[0]", "`model.vision.deepstack` is a key of model.vision.kind=qwen3_vl"),
        ("model.vision.heads=5", "`model.vision.heads` is 5"),
        ("dropout=0.1", "with model.vision.kind=fovea nothing is dropped"),
    ] {
        let words = words(&[word]);
        let refused = recipes::resolve("tiny", &[], &words).expect_err(word).to_string();
        assert!(refused.contains(sentence), "{refused}");
    }
    let swapped = words(&[&format!("model.vision.from={}", text.display())]);
    let refused = recipes::resolve("tiny", &[], &swapped).expect_err("no DINOv2").to_string();
    assert!(refused.contains("give a DINOv2"), "{refused}");
    // A run with a tower provides it, and keys of a recipe for another tower are ignored.
    let next = run_from(&[format!("model.from={}", run.display())]);
    let brought = next.model.as_fovea().expect("a tower");
    assert_eq!((brought.query, brought.image_size, &brought.from), (14, 24, &None));
}

/// Prompts about frames, and the reference's continuations.
struct PromptFixture {
    folder: tempfile::TempDir,
    pictures: Pictures,
    prompts: Vec<Prompt>,
    wanted: Vec<Vec<u32>>,
}

impl PromptFixture {
    fn open() -> PromptFixture {
        let mut golden = Golden::open(Look::Fine);
        let folder = tempfile::tempdir().expect("a folder");
        write_model(folder.path(), &golden.fixture.json, &golden.weights);
        let generated = golden.fixture.i32s("generated");
        let frames = golden.samples.iter().flat_map(|sample| sample.frames.clone());
        let (pictures, numbers) =
            Pictures::of_frames(frames.map(|image| golden.images[image as usize].as_slice()));
        assert_eq!(numbers, [0, 1, 2, 3, 3, 3, 3], "frames of the same bytes are one picture");
        let mut numbers = &numbers[..];
        let mut prompts = vec![];
        for sample in golden.samples.iter().filter(|sample| !sample.frames.is_empty()) {
            let (own, rest) = numbers.split_at(sample.frames.len());
            numbers = rest;
            let tokens: Vec<u32> = sample.tokens[..4].iter().map(|token| *token as u32).collect();
            prompts.push(Pictures::before(own, &tokens));
        }
        let each = generated.len() / prompts.len();
        let wanted =
            generated.chunks(each).map(|row| row.iter().map(|token| *token as u32).collect()).collect();
        PromptFixture { folder, pictures, prompts, wanted }
    }

    fn answers(&self, prompts: &[Prompt], sequences: usize, overrides: &[&str]) -> Vec<Vec<u32>> {
        let overrides: Vec<String> = overrides.iter().map(|word| word.to_string()).collect();
        let loaded = Loaded::open(self.folder.path(), &overrides).expect("a model");
        let sampling =
            Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, seed: 0, max_tokens: self.wanted[0].len() };
        let longest = prompts.iter().map(|prompt| prompt.tokens.len()).max().expect("a prompt");
        let room = GeneratorCapacity { sequences, tokens: longest + sampling.max_tokens };
        let device = Device::Cpu { threads: 2 };
        let mut generator =
            Generator::with_pictures(loaded, &device, room, self.pictures.clone(), CHUNK_WITH_FRAMES)
                .expect("a model");
        generator.continue_prompts(prompts, sampling, &mut |_, _| {}).expect("answers")
    }
}

/// Both at once, one after another in one lane, and more prompts than lanes.
#[test]
fn answers_about_frames_are_those_of_the_reference() {
    let fixture = PromptFixture::open();
    for sequences in [2, 1, 3] {
        assert_eq!(fixture.answers(&fixture.prompts, sequences, &[]), fixture.wanted, "{sequences} at once");
    }
    let more = [fixture.prompts.clone(), fixture.prompts.clone(), fixture.prompts[..1].to_vec()].concat();
    let wanted = [fixture.wanted.clone(), fixture.wanted.clone(), fixture.wanted[..1].to_vec()].concat();
    assert_eq!(fixture.answers(&more, 3, &[]), wanted, "the same picture in two lanes is encoded once");
}

/// A model can be used with first looks alone, and gives other answers.
#[test]
fn a_model_can_be_used_with_first_looks_alone() {
    let fixture = PromptFixture::open();
    let together = fixture.answers(&fixture.prompts, 2, &["model.vision.mode=coarse"]);
    assert_ne!(together, fixture.wanted);
    for (prompt, wanted) in fixture.prompts.iter().zip(&together) {
        let alone = fixture.answers(std::slice::from_ref(prompt), 1, &["model.vision.mode=coarse"]);
        assert_eq!(alone, std::slice::from_ref(wanted));
    }
}

/// SmolLM2-135M's 134,515,008 parameters, DINOv2-S's 22,056,192 without the mask token, and those that connect them.
#[test]
fn models_of_the_published_sizes_have_their_values() {
    let words = ["model.vision.kind=fovea", "vision.width=384", "vision.layers=12", "vision.heads=6"];
    let words = [&words[..], &["vision.ffn=1536"]].concat();
    let words: Vec<String> = words.into_iter().map(String::from).collect();
    let config = recipes::resolve("smollm2-135m", &[], &words).expect("a config");
    assert!(matches!(config.model.vision(), Some(Vision::Fovea(_))));
    let connector = 384 * 384 + (384 * 384 + 384) + (576 * 384 + 576) + (384 * 576 + 384) + 2 * 384;
    assert_eq!(config.model.parameters(), 134_515_008 + 22_056_192 + connector);
    let drawn = flatout_train::weights::pretrained::parameters(&config.model);
    let counted: usize = drawn.values().map(|(ty, _)| ty.elements()).sum();
    assert_eq!(counted as u64, config.model.parameters(), "what is declared is what is counted");
    assert_eq!(flatout_train::Config::parse(&config.to_toml(), "config.toml").unwrap(), config);
}
