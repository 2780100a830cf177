//! Compares the vision-language decoder with `transformers`' Qwen3-VL: logits, loss and every gradient of a tiny random model, in
//! f32 on the CPU and with the oracle. `make_vl.py` beside the fixtures made them, in f64.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use flatout_data::vision::{Grid, Stretch, positions};
use flatout_ir::passes::differentiate::{LOSS_SUM, differentiate, gradient_path};
use flatout_ir::passes::{input_path, update};
use flatout_ir::{Class, Graph, Options, Program, Recompute, Role, compile, oracle};
use flatout_models::config::{DecoderConfig, Model, Qwen3VlConfig, Vision};
use flatout_models::form::{Form, ImageExtents, LossForm, SeenPatches};
use flatout_models::library;
use flatout_models::library::stored::Stored;
use flatout_runtime::{Session, cpu};
use flatout_train::device::Device;
use flatout_train::recipes;
use flatout_train::resolve::compile::settle_for;
use flatout_train::run::checkpoint::{Dtype, TensorFile, header};
use flatout_train::weights::adapters;
use flatout_train::weights::export::{Export, Width, export};
use flatout_train::weights::initial;
use flatout_train::weights::loaded::Loaded;
use serde_json::json;

use crate::adapters::theirs;
use crate::distance::relative;
use crate::fixture::{Fixture, sums};
use crate::small_run::train_in;
use crate::unfused;

/// The largest relative L2 distance of any tensor.
const BOUND: f64 = 1e-5;
const ROWS: usize = 2;

/// Two images between texts, DeepStack after three blocks.
#[test]
fn images_between_texts() {
    equals_the_reference("qwen3-vl");
}

/// Images first and last in a row, and a tied head.
#[test]
fn images_first_and_last_with_a_tied_head() {
    equals_the_reference("qwen3-vl-ends");
}

#[test]
fn without_deepstack() {
    equals_the_reference("qwen3-vl-plain");
}

/// Merged grids of one column and of one row, DeepStack after one block.
#[test]
fn one_column_and_one_block_of_deepstack() {
    equals_the_reference("qwen3-vl-column");
}

fn equals_the_reference(name: &str) {
    let mut golden = Golden::open(name);
    let tables = Options { rope_positions: Some(golden.len), ..Options::default() };
    let full = Options { recompute: Recompute::Full, ..tables.clone() };
    for (how, options) in [
        ("fused", Options::default()),
        ("rope tables", tables),
        ("recompute", full),
        ("plain", unfused::options()),
    ] {
        let computed = golden.compiled(&options);
        golden.check(&format!("{name}, {how}"), &computed);
    }
    let computed = golden.by_the_oracle();
    golden.check(&format!("{name}, oracle"), &computed);
}

/// The results of a pass over a fixture: gradients by our paths.
struct Computed {
    logits: Vec<f64>,
    loss: Vec<f64>,
    gradients: BTreeMap<String, Vec<f64>>,
}

pub struct Golden {
    pub model: DecoderConfig,
    fixture: Fixture,
    /// Values by the library's names.
    weights: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
    len: usize,
    inputs: Inputs,
}

/// The inputs of a plan, except for targets.
struct Inputs {
    seen: SeenPatches,
    i32s: BTreeMap<&'static str, Vec<i32>>,
    tap_weights: Vec<f32>,
    patches: Vec<u8>,
}

fn golden_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/golden")
}

fn decoder(model: Model) -> DecoderConfig {
    match model {
        Model::Decoder(decoder) => decoder,
        other => panic!("{other:?} is no decoder"),
    }
}

fn wide<T: Copy + Into<f64>>(values: &[T]) -> Vec<f64> {
    values.iter().map(|x| (*x).into()).collect()
}

impl Golden {
    pub fn open(name: &str) -> Golden {
        let mut fixture = Fixture::open(name);
        let mut model = decoder(library::read(&fixture.json).expect("a Qwen3-VL").model);
        let ids = fixture.i32s("input_ids");
        let len = ids.len() / ROWS;
        model.context = len;
        let file = TensorFile::open(&golden_folder().join("qwen3-vl-weights.safetensors")).expect("weights");
        let names: Vec<(String, Vec<usize>)> =
            file.entries().iter().map(|(name, entry)| (name.clone(), entry.shape.clone())).collect();
        let mut weights = BTreeMap::new();
        for (name, shape) in names {
            let mut bytes = vec![0; shape.iter().product()];
            file.read_into(&name, &mut bytes).expect("a tensor");
            let offset = if name.contains("norm") && name.ends_with(".weight") { 1.0 } else { 0.0 };
            let values = bytes.iter().map(|byte| (*byte as f32 - 128.0) / 128.0 + offset).collect();
            weights.insert(name, (shape, values));
        }
        let tower = model.vision.as_ref().and_then(Vision::as_qwen3_vl).expect("a tower");
        let inputs = Inputs::of(&mut fixture, tower, &ids, len);
        Golden { model, fixture, weights, len, inputs }
    }

    /// The location of each of our weights among the library's.
    pub fn places(&self) -> Vec<Stored> {
        let shapes = flatout_train::weights::pretrained::parameters(&self.model.clone().into());
        let model = Model::from(self.model.clone());
        model.published().unwrap().stored(&|path| shapes[path].0.dims.clone()).expect("names")
    }

    pub fn ours(&self) -> Vec<(String, Vec<f32>)> {
        let value = |at: Stored| (at.ours.clone(), at.take(&self.weights[&at.theirs].1));
        self.places().into_iter().map(value).collect()
    }

    fn graphs(&self) -> [Graph; 2] {
        let seen = Some(ImageExtents::Patches(self.inputs.seen));
        let model = Model::from(self.model.clone());
        let loss = Form::Loss(LossForm { seen, ..LossForm::rows(ROWS, self.len) });
        [model.build(loss), model.build(Form::Logits { rows: ROWS, len: self.len, seen })]
    }

    fn labels(&mut self) -> (Vec<i32>, Vec<f32>) {
        let labels = self.fixture.i32s("labels");
        let weights = labels.iter().map(|label| if *label < 0 { 0.0 } else { 1.0 }).collect();
        (labels, weights)
    }

    /// Computes a pass by a session that is compiled with these options.
    fn compiled(&mut self, options: &Options) -> Computed {
        let [loss, logits] = self.graphs();
        let programs =
            [Program { role: Role::GRAD, graph: loss }, Program { role: Role::Logits, graph: logits }];
        let plans = compile(&programs, &cpu::target(2), options).expect("plans");
        let mut session = Session::new(plans, 2).expect("a session");
        let ours = self.ours();
        for (path, values) in &ours {
            session.write_f32(path, values).expect("a weight");
        }
        initial::write_tables(&mut session).expect("tables");
        for role in [Role::GRAD, Role::Logits] {
            self.inputs.write(&mut session, role);
        }
        let (labels, weights) = self.labels();
        session.write_i32(&input_path(Role::GRAD, "targets"), &labels).expect("targets");
        session.write_f32(&input_path(Role::GRAD, "weights"), &weights).expect("weights");
        session.run(Role::Logits).expect("logits");
        let logits = wide(&session.result(Role::Logits, "logits").expect("logits"));
        session.run(Role::GRAD).expect("gradients");
        let gradient = |(path, _): &(String, Vec<f32>)| {
            (path.clone(), wide(&session.read_f32(&gradient_path(path)).expect("a gradient")))
        };
        Computed {
            gradients: ours.iter().map(gradient).collect(),
            logits,
            loss: wide(&session.read_f32(LOSS_SUM).expect("a sum")),
        }
    }

    /// Computes a pass by evaluating the graphs as they are before all passes of the compiler.
    fn by_the_oracle(&mut self) -> Computed {
        let [loss, logits] = self.graphs();
        let mut values: HashMap<String, Vec<f64>> =
            self.ours().into_iter().map(|(path, x)| (path, wide(&x))).collect();
        values.extend(self.inputs.i32s.iter().map(|(name, x)| (name.to_string(), wide(x))));
        values.insert("tap_weights".into(), wide(&self.inputs.tap_weights));
        values.insert("patches".into(), wide(&self.inputs.patches));
        let logits = oracle::run(&logits, &values).results["logits"].clone();
        let (labels, weights) = self.labels();
        values.insert("targets".into(), wide(&labels));
        values.insert("weights".into(), wide(&weights));
        let trained = differentiate(&loss).graph;
        for slot in trained.slots.iter().filter(|slot| !values.contains_key(&slot.path)).collect::<Vec<_>>() {
            values.insert(slot.path.clone(), vec![0.0; slot.ty.elements()]);
        }
        let mut written = oracle::run(&trained, &values).writes;
        let ours = self.places().into_iter().map(|at| at.ours);
        Computed {
            gradients: ours
                .map(|path| (path.clone(), written.remove(&gradient_path(&path)).unwrap()))
                .collect(),
            logits,
            loss: written.remove(LOSS_SUM).expect("a sum"),
        }
    }

    fn check(&mut self, what: &str, computed: &Computed) {
        let mut worst = (0.0, String::new());
        let mut off = |tensor: &str, got: &[f64], want: &[f32]| {
            let off = relative(got, want);
            assert!(off < BOUND, "{what}: {tensor} is off by {off:.1e}");
            if off > worst.0 {
                worst = (off, tensor.to_string());
            }
        };
        off("logits", &computed.logits, &self.fixture.f32s("logits"));
        off("loss", &computed.loss, &self.fixture.f32s("loss_sum"));
        let mut gradients: BTreeMap<String, Vec<f64>> = BTreeMap::new();
        for at in self.places() {
            let theirs =
                gradients.entry(at.theirs.clone()).or_insert_with(|| vec![0.0; at.dims.iter().product()]);
            at.put(&computed.gradients[&at.ours], theirs);
        }
        let in_file = self.fixture.file.entries().keys().filter(|name| name.starts_with("grad.")).count();
        assert_eq!(gradients.len(), in_file, "every gradient of the file is compared");
        for (name, gradient) in &gradients {
            off(name, &sums(gradient), &self.fixture.f32s(&format!("grad.{name}")));
        }
        println!("{what}: {} gradients, {} is off most, by {:.1e}", gradients.len(), worst.1, worst.0);
    }
}

impl Inputs {
    /// Rows of tokens and images, with capacity for one more block of patches and one more image.
    fn of(fixture: &mut Fixture, v: &Qwen3VlConfig, ids: &[i32], len: usize) -> Inputs {
        let grids: Vec<Grid> = fixture
            .i32s("grids")
            .chunks(2)
            .map(|sides| Grid { rows: sides[0] as usize, columns: sides[1] as usize })
            .collect();
        let used: usize = grids.iter().map(|grid| grid.patches()).sum();
        let largest = grids.iter().map(|grid| grid.patches()).max().unwrap_or(0);
        let seen = SeenPatches { patches: used + v.block(), images: grids.len() + 1, largest };
        let is_image = |id: i32| id as usize == v.image_token;
        let mut left = grids.iter();
        let mut placed: Vec<[i32; 3]> = vec![];
        for row in ids.chunks(len) {
            let mut stretches = vec![];
            let mut at = 0;
            while at < row.len() {
                let stretch = match is_image(row[at]) {
                    true => Stretch::Image(*left.next().expect("an image")),
                    false => Stretch::Text(1),
                };
                at += match stretch {
                    Stretch::Image(grid) => grid.tokens(v.merge),
                    Stretch::Text(tokens) => tokens,
                };
                stretches.push(stretch);
            }
            placed.extend(positions(stretches, v.merge).0);
        }
        let positions: Vec<i32> = (0..3).flat_map(|axis| placed.iter().map(move |p| p[axis])).collect();
        assert_eq!(positions, fixture.i32s("positions"), "tokens stand where the library says");

        let mut next = 0;
        let features = ids.iter().map(|id| {
            let row = if is_image(*id) { next } else { -1 };
            next += is_image(*id) as i32;
            row
        });
        let features: Vec<i32> = features.collect();
        let mut starts: Vec<i32> = vec![];
        for grid in &grids {
            let before = starts.last().map_or(0, |start| start + grids[starts.len() - 1].patches() as i32);
            starts.push(before);
            assert!(grid.patches() > 0);
        }
        let filled = |mut values: Vec<i32>, count: usize, fill: i32| {
            values.resize(count, fill);
            values
        };
        let places: Vec<[usize; 2]> = grids.iter().flat_map(|grid| grid.places(v.merge)).collect();
        let taps: Vec<_> = grids.iter().flat_map(|grid| grid.taps(v.merge, v.positions)).collect();
        let places = (0..2).flat_map(|axis| {
            filled(places.iter().map(|place| place[axis] as i32).collect(), seen.patches, 0)
        });
        let of_taps = (0..4)
            .flat_map(|tap| filled(taps.iter().map(|taps| taps[tap].0 as i32).collect(), seen.patches, -1));
        let tap_weights = (0..4).flat_map(|tap| {
            let shares = taps.iter().map(move |taps| taps[tap].1);
            shares.chain(std::iter::repeat(0.0)).take(seen.patches)
        });
        let tap_weights = tap_weights.collect();
        let mut patches = fixture.bytes("patches");
        patches.resize(seen.patches * v.patch_values(), 0);
        let i32s = BTreeMap::from([
            ("tokens", ids.iter().map(|id| if is_image(*id) { -1 } else { *id }).collect()),
            ("seen", features),
            ("positions", positions),
            ("patch_places", places.collect()),
            ("taps", of_taps.collect()),
            ("image_start", filled(starts, seen.images, 0)),
            ("image_len", filled(grids.iter().map(|grid| grid.patches() as i32).collect(), seen.images, 0)),
        ]);
        Inputs { seen, i32s, tap_weights, patches }
    }

    fn write(&self, session: &mut Session, role: Role) {
        for (name, values) in &self.i32s {
            session.write_i32(&input_path(role, name), values).expect("an input");
        }
        self.write_images(session, role);
    }

    fn write_images(&self, session: &mut Session, role: Role) {
        session.write_f32(&input_path(role, "tap_weights"), &self.tap_weights).expect("shares");
        session.write_u8(&input_path(role, "patches"), &self.patches).expect("patches");
    }
}

/// A row of text gives the same result in a plan without the tower as beside images.
#[test]
fn text_alone_needs_no_tower() {
    let mut golden = Golden::open("qwen3-vl");
    let (len, model) = (golden.len, Model::from(golden.model.clone()));
    let graph = model.build(Form::Logits { rows: 1, len, seen: None });
    assert!(graph.slots.iter().all(|slot| !slot.path.starts_with("vision.")), "no tower");
    let plans = compile(&[Program { role: Role::Logits, graph }], &cpu::target(2), &Options::default())
        .expect("plans");
    let mut session = Session::new(plans, 2).expect("a session");
    for (path, values) in golden.ours().iter().filter(|(path, _)| !path.starts_with("vision.")) {
        session.write_f32(path, values).expect("a weight");
    }
    let positions: Vec<i32> = (0..len as i32).collect();
    let tokens = &golden.inputs.i32s["tokens"][len..];
    session.write_i32(&input_path(Role::Logits, "tokens"), tokens).expect("tokens");
    session.write_i32(&input_path(Role::Logits, "positions"), &positions.repeat(3)).expect("positions");
    session.run(Role::Logits).expect("logits");
    let got = session.result(Role::Logits, "logits").expect("logits");
    let off = relative(&got, &golden.fixture.f32s("logits")[got.len()..]);
    assert!(off < BOUND, "off by {off:.1e}");
}

/// A plan with the tower reads the images, and a plan without one continues from the cache: the logits equal those of the whole
/// row.
#[test]
fn a_prompt_with_images_continues_from_the_cache() {
    const NEW: usize = 3;
    let mut golden = Golden::open("qwen3-vl");
    let (len, vocab) = (golden.len, golden.model.vocab);
    let (model, prompt) = (Model::from(golden.model.clone()), len - NEW);
    let form = |tokens: usize, seen| Form::Cached { sequences: 1, tokens, capacity: len, read: 1, seen };
    let programs = [
        Program {
            role: Role::Prefill,
            graph: model.build(form(prompt, Some(ImageExtents::Patches(golden.inputs.seen)))),
        },
        Program { role: Role::Decode, graph: model.build(form(1, None)) },
    ];
    let plans = compile(&programs, &cpu::target(2), &Options::default()).expect("plans");
    let mut session = Session::new(plans, 2).expect("a session");
    for (path, values) in golden.ours() {
        session.write_f32(&path, &values).expect("a weight");
    }
    let inputs = &golden.inputs;
    inputs.write_images(&mut session, Role::Prefill);
    for name in ["patch_places", "taps", "image_start", "image_len"] {
        session.write_i32(&input_path(Role::Prefill, name), &inputs.i32s[name]).expect("an input");
    }
    let row = |name: &str, at: usize, count: usize| inputs.i32s[name][at..at + count].to_vec();
    session.write_i32(&input_path(Role::Prefill, "seen"), &row("seen", 0, prompt)).expect("rows");
    let wanted = golden.fixture.f32s("logits");
    for (role, at, count) in
        [(Role::Prefill, 0, prompt)].into_iter().chain((prompt..len).map(|at| (Role::Decode, at, 1)))
    {
        let positions: Vec<i32> =
            (0..3).flat_map(|axis| row("positions", axis * ROWS * len + at, count)).collect();
        let end = at + count;
        for (name, values) in [
            ("tokens", row("tokens", at, count)),
            ("positions", positions),
            ("cache_rows", (at as i32..end as i32).collect()),
            ("new_start", vec![0]),
            ("new_len", vec![count as i32]),
            ("seen_start", vec![0]),
            ("seen_len", vec![end as i32]),
            ("last", vec![count as i32 - 1]),
        ] {
            session.write_i32(&input_path(role, name), &values).expect("an input");
        }
        session.run(role).expect("logits");
        let off = relative(
            &session.result(role, "logits").expect("logits"),
            &wanted[(end - 1) * vocab..end * vocab],
        );
        assert!(off < BOUND, "after {end} tokens the logits are off by {off:.1e}");
    }
}

/// Words of the synthetic language, on which the runs below train.
const WORDS: usize = 512;

/// Writes the fixture's model as the library does, with capacity for more words; returns its tensors as stored in the file.
fn write_folder(golden: &Golden, folder: &Path) -> BTreeMap<String, (Vec<usize>, Vec<u8>)> {
    let mut config = golden.fixture.json.clone();
    config["text_config"]["vocab_size"] = json!(WORDS);
    fs::write(folder.join("config.json"), serde_json::to_vec(&config).unwrap()).expect("a file");
    let mut tensors = BTreeMap::new();
    for at in golden.places() {
        let (mut shape, mut values) = golden.weights[&at.theirs].clone();
        if shape[0] == golden.model.vocab {
            shape[0] = WORDS;
            values = values.iter().copied().cycle().take(shape.iter().product()).collect();
        }
        tensors.insert(at.theirs, (shape, values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>()));
    }
    let described: Vec<_> =
        tensors.iter().map(|(name, (shape, _))| (name.as_str(), Dtype::F32, shape.as_slice())).collect();
    let mut file = header(&described, &[("format", "pt")]).expect("a header");
    tensors.values().for_each(|(_, bytes)| file.extend_from_slice(bytes));
    fs::write(folder.join("model.safetensors"), file).expect("a file");
    tensors
}

fn run_from(folder: &Path, more: &[&str]) -> flatout_train::Config {
    let from = format!("model.from={}", folder.display());
    let small = ["train.steps=1", "train.batch=2", "model.context=16", "warmup_steps=0", "eval.rows=0"];
    let words: Vec<String> =
        small.iter().chain(more).chain([&from.as_str()]).map(|word| word.to_string()).collect();
    recipes::resolve("tiny", &[], &words).expect("a config")
}

/// `model.from` reads a checkpoint, and a run of texts with zero updates writes the same bytes under the same names.
#[test]
fn a_checkpoint_is_read_and_exported_to_the_bit() {
    for name in ["qwen3-vl", "qwen3-vl-ends", "qwen3-vl-plain"] {
        let golden = Golden::open(name);
        let scratch = tempfile::tempdir().expect("a folder");
        let [source, run, out] = ["source", "run", "out"].map(|name| scratch.path().join(name));
        fs::create_dir(&source).expect("a folder");
        let tensors = write_folder(&golden, &source);
        // A learning rate that is zero in f32: weights that are exactly zero stay so too.
        train_in(&run, &run_from(&source, &["lr=1e-50", "weight_decay=0"]), |_| {});
        let wanted = Export {
            to: out.clone(),
            dtype: Width::F32,
            shard_bytes: u64::MAX,
            force: false,
            adapter: false,
        };
        let made = export(&mut Loaded::open(&run, &[]).expect("a run"), &wanted).expect("a folder");
        assert_eq!(made.architecture, "Qwen3VLForConditionalGeneration");
        assert!(made.files.contains(&"preprocessor_config.json".to_string()), "{:?}", made.files);
        let file = TensorFile::open(&out.join("model.safetensors")).expect("tensors");
        let names: Vec<&String> = file.entries().keys().collect();
        assert_eq!(names, tensors.keys().collect::<Vec<_>>());
        for (tensor, (shape, bytes)) in &tensors {
            let mut got = vec![0; bytes.len()];
            assert_eq!(&file.entries()[tensor].shape, shape, "{tensor}");
            file.read_into(tensor, &mut got).expect("a tensor");
            assert!(got == *bytes, "{name}: {tensor} came out other than it went in");
        }
        let read =
            |folder: &Path| flatout_train::weights::pretrained::folder::describe(folder).unwrap().model;
        assert_eq!(read(&out), read(&source));
    }
}

/// The weights as read give the library's logits.
#[test]
fn logits_of_a_checkpoint_with_images() {
    let mut golden = Golden::open("qwen3-vl");
    let scratch = tempfile::tempdir().expect("a folder");
    write_folder(&golden, scratch.path());
    let mut loaded = Loaded::open(scratch.path(), &[]).expect("a model");
    let form =
        Form::Logits { rows: ROWS, len: golden.len, seen: Some(ImageExtents::Patches(golden.inputs.seen)) };
    let graph = loaded.config.model.build(form);
    let programs = [Program { role: Role::Logits, graph }];
    let mut session = loaded.session(&Device::Cpu { threads: 2 }, &programs).expect("a session");
    golden.inputs.write(&mut session, Role::Logits);
    session.run(Role::Logits).expect("logits");
    let got = session.result(Role::Logits, "logits").expect("logits");
    let got: Vec<f32> = got.chunks(WORDS).flat_map(|row| row[..golden.model.vocab].to_vec()).collect();
    let off = relative(&got, &golden.fixture.f32s("logits"));
    assert!(off < BOUND, "off by {off:.1e}");
}

/// `layers` are the text model's, `vision.layers` the tower's.
#[test]
fn adapters_are_the_texts_or_the_towers() {
    let scratch = tempfile::tempdir().expect("a folder");
    let golden = Golden::open("qwen3-vl");
    write_folder(&golden, scratch.path());
    let of = |paths: &str| {
        let config = run_from(
            scratch.path(),
            &["adapter.kind=lora", "adapter.rank=2", &format!("adapter.paths=[{paths}]")],
        );
        let graph = config.model.build(config.model.least());
        let all = adapters::of(&config, &graph).expect("adapters");
        all.into_iter().map(|adapter| adapter.weight).collect::<Vec<_>>()
    };
    let text = of("layers");
    assert!(text.len() == 4 * 7 && text.iter().all(|path| path.starts_with("layers.")), "{text:?}");
    let tower = of("vision.layers");
    assert!(tower.len() == 4 * 6 && tower.iter().all(|path| path.starts_with("vision.layers.")), "{tower:?}");
    assert_eq!(of("layers, vision.layers").len(), text.len() + tower.len());
}

/// Ten updates of adapters of the text model with a frozen tower: every loss and norm, the first gradients and the last adapters
/// equal PEFT's. `peft/make_vl_peft.py` made the fixture.
#[test]
fn ten_steps_of_lora_with_a_frozen_tower() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/peft/vl-lora.safetensors");
    let expected = TensorFile::open(&file).expect("a file");
    let known = |name: &str| -> Vec<f32> {
        let mut bytes = vec![0; expected.entries()[name].bytes()];
        expected.read_into(name, &mut bytes).expect("a tensor");
        bytes.as_chunks::<4>().0.iter().map(|x| f32::from_le_bytes(*x)).collect()
    };
    let mut golden = Golden::open("qwen3-vl");
    let scratch = tempfile::tempdir().expect("a folder");
    write_folder(&golden, scratch.path());
    let words = ["adapter.kind=lora", "adapter.rank=2", "adapter.alpha=4", "optimizer.betas=[0.9,0.95]"];
    let more = ["optimizer.eps=1e-8", "optimizer.weight_decay=0.1", "optimizer.clip=1"];
    let config = run_from(scratch.path(), &[&words[..], &more].concat());
    let target = cpu::target(2);
    let mut options = settle_for(&config, &target, ROWS).expect("settled").options;
    let ours = golden.ours();
    options.freeze.extend(ours.iter().map(|(path, _)| path.clone()));
    let [loss, _] = golden.graphs();
    let plans = compile(&[Program { role: Role::GRAD, graph: loss }], &target, &options).expect("plans");
    let mut session = Session::new(plans, 2).expect("a session");
    for (path, values) in &ours {
        session.write_f32(path, values).expect("a weight");
    }
    initial::write_tables(&mut session).expect("tables");
    let slots = session.plans().slots.iter().filter(|slot| slot.class == Class::Weight && !slot.is_whole);
    let trained: Vec<String> = slots.map(|slot| slot.path.clone()).collect();
    assert_eq!(trained.len(), 2 * 4 * 7, "{trained:?}");
    let theirs = |ours: &str| theirs(ours).replace("model.model.layers", "model.model.language_model.layers");
    for path in &trained {
        session.write_f32(path, &known(&format!("before.{}", theirs(path)))).expect("an adapter");
    }
    if session.plans().plan(Role::Derive).is_some() {
        session.run(Role::Derive).expect("copies of the weights");
    }
    let (labels, weights) = golden.labels();
    let supervised: f32 = weights.iter().sum();
    let check = |what: &str, got: &[f32], wanted: &[f32]| {
        let off = relative(got, wanted);
        assert!(off < 1e-4, "{what} is off by {off:.1e}");
    };
    for step in 1..=10 {
        golden.inputs.write(&mut session, Role::GRAD);
        session.write_i32(&input_path(Role::GRAD, "targets"), &labels).expect("targets");
        session.write_f32(&input_path(Role::GRAD, "weights"), &weights).expect("weights");
        session.run(Role::GRAD).expect("gradients");
        for path in trained.iter().filter(|_| step == 1) {
            let sums = session.read_f32(&gradient_path(path)).expect("a gradient");
            let means: Vec<f32> = sums.iter().map(|sum| sum / supervised).collect();
            check(path, &means, &known(&format!("grad.{}", theirs(path))));
        }
        session.write_f32(&input_path(Role::Apply, update::LR), &[3e-3]).expect("a rate");
        session.run(Role::Apply).expect("an update");
        for (what, theirs) in [("loss", "loss"), ("grad_norm", "norm")] {
            let got = session.result(Role::Apply, what).expect("a result");
            check(&format!("{what} {step}"), &got, &known(&format!("{theirs}.{step}")));
        }
    }
    for path in &trained {
        check(path, &session.read_f32(path).expect("an adapter"), &known(&format!("after.{}", theirs(path))));
    }
}
