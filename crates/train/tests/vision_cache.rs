//! Image features that are stored between runs: they equal the tower's to the bit; a run that reads them equals the run that
//! computes them; and anything that differs is refused by name.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use flatout_ir::{Class, DType};
use flatout_models::vision::qwen3_vl::features::FEATURES;
use flatout_runtime::cpu;
use flatout_train::device::Device;
use flatout_train::recipes;
use flatout_train::resolve::compile::{Compiled, compile};
use flatout_train::run::events::Event;
use flatout_train::run::signal::StopFlag;
use flatout_train::run::{Entered, Resume, Run};
use flatout_train::tasks;
use flatout_train::training::trainer::{Notice, train};
use flatout_train::training::vision_cache::prepare;
use flatout_train::weights::export::{Export, Width, export};
use flatout_train::weights::loaded::Loaded;
use flatout_train::weights::pretrained::Origin;
use flatout_train::{Config, Failure};
use serde_json::{Value, json};

use crate::vl_folder;

/// Adapters of the text model with a frozen tower, on synthetic shapes.
fn drawn(more: &[&str]) -> Config {
    let words = [
        "backend=cpu",
        "precision=fp32",
        "adapter.kind=lora",
        "adapter.paths=[layers]",
        "adapter.rank=2",
        "adapter.dropout=0.1",
        "data.synthetic_rows=60",
        "data.held_out=0.2",
        "train.epochs=none",
        "train.steps=6",
        "train.batch=8",
        "eval.every_epochs=none",
        "eval.every=3",
        "eval.rows=8",
        "eval.metric=loss",
        "checkpoint.best=false",
        "checkpoint.every=3",
    ];
    resolved(&words, more).expect("a config")
}

fn resolved(words: &[&str], more: &[&str]) -> Result<Config, flatout_train::UserError> {
    let words: Vec<String> = words.iter().chain(more).map(|word| word.to_string()).collect();
    recipes::resolve("qwen3-vl-8b-vqa", &["small".into()], &words)
}

fn cache_word(folder: &Path) -> String {
    format!("data.vision_cache={}", folder.display())
}

/// Losses of the steps and of evaluations, bit by bit, and the notes about the data.
#[derive(Debug, Default, PartialEq)]
struct RunLog {
    losses: Vec<u32>,
    held_out: Vec<u32>,
    said: Vec<String>,
}

fn trained(config: &Config, dir: &Path) -> Result<RunLog, Failure> {
    let (Entered::Fresh(run) | Entered::Existing(run)) = Run::enter(dir, Resume::Auto).expect("a run");
    let mut log = RunLog::default();
    train(config, None, &run, &Device::cpu(), &StopFlag::never(), &mut [], &mut |notice| match notice {
        Notice::Event(Event::Step(step)) => log.losses.push(step.loss.to_bits()),
        Notice::Event(Event::Eval { loss, .. }) => log.held_out.push(loss.to_bits()),
        Notice::Data(said) => log.said.push(said),
        _ => {}
    })?;
    Ok(log)
}

/// Fills the cache of a config, as the start of a run does.
fn filled(config: &Config) -> Result<(), Failure> {
    let mut data = tasks::open(config, None, &mut |_| {})?;
    prepare(config, &mut *data, None, &Device::cpu(), &mut |_| {}).map(drop)
}

fn index_of(folder: &Path) -> Value {
    serde_json::from_slice(&fs::read(folder.join("index.json")).expect("an index")).expect("JSON")
}

/// The features of every image, by its hash.
fn features(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let index = index_of(folder);
    let format = &index["format"];
    let number = |value: &Value| value.as_u64().expect("a number") as usize;
    let row = number(&format["levels"]) * number(&format["row_bytes"]);
    let mut all = BTreeMap::new();
    for part in index["parts"].as_array().expect("parts") {
        let bytes = fs::read(folder.join(part["file"].as_str().expect("a name"))).expect("a part");
        for image in part["images"].as_array().expect("images") {
            let (offset, tokens) = (number(&image["offset"]), number(&image["tokens"]));
            assert_eq!(offset % 4096, 0, "blocks begin at multiples of 4096 bytes");
            let own = bytes[offset..offset + tokens * row].to_vec();
            all.insert(image["sha256"].as_str().expect("a hash").to_string(), own);
        }
    }
    all
}

#[test]
fn a_run_that_reads_features_is_the_run_that_computes_them() {
    let folder = tempfile::tempdir().expect("a folder");
    for precision in ["precision=fp32", "precision=bf16"] {
        for shared in ["shared_prefix=on", "shared_prefix=off"] {
            let at = |name: &str| folder.path().join(format!("{precision}-{shared}-{name}"));
            let cache = cache_word(&at("cache"));
            let plain = trained(&drawn(&[precision, shared]), &at("plain")).expect("a run");
            let kept = trained(&drawn(&[precision, shared, &cache]), &at("kept")).expect("a run");
            assert_eq!((plain.losses.len(), plain.held_out.len()), (6, 2));
            assert_eq!(kept.losses, plain.losses, "{precision} {shared}: losses to the bit");
            assert_eq!(kept.held_out, plain.held_out, "{precision} {shared}: evaluations to the bit");
            assert!(
                kept.said.iter().any(|said| said.contains("ms of the tower an image")),
                "{:?}",
                kept.said
            );
            let kind = index_of(&at("cache"))["format"]["made_with"]["type"].clone();
            assert_eq!(kind, if precision.ends_with("bf16") { "bf16" } else { "f32" });
            // A second run finds everything there.
            let again = trained(&drawn(&[precision, shared, &cache]), &at("again")).expect("a run");
            assert_eq!(again.losses, plain.losses);
            assert!(again.said.iter().any(|said| said.contains("images are in")), "{:?}", again.said);
        }
    }
}

#[test]
fn a_stopped_run_resumes_to_the_bit() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let cache = cache_word(&at("cache"));
    let whole = trained(&drawn(&[&cache]), &at("whole")).expect("a run");
    let first =
        trained(&drawn(&[&cache, "train.steps=3", "schedule.horizon_steps=6"]), &at("parts")).expect("a run");
    let rest = trained(&drawn(&[&cache, "schedule.horizon_steps=6"]), &at("parts")).expect("a run");
    assert_eq!([first.losses, rest.losses].concat(), whole.losses);
}

#[test]
fn features_do_not_depend_on_the_other_images_of_a_group() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    for precision in ["precision=fp32", "precision=bf16"] {
        let (grown, whole) = (at(&format!("{precision}-grown")), at(&format!("{precision}-whole")));
        for rows in ["data.synthetic_rows=12", "data.synthetic_rows=60"] {
            filled(&drawn(&[precision, rows, &cache_word(&grown)])).expect("features");
        }
        filled(&drawn(&[precision, &cache_word(&whole)])).expect("features");
        let (grown, whole) = (features(&grown), features(&whole));
        assert!(whole.len() > 10 && whole.iter().all(|(image, own)| grown[image] == *own));
    }
}

fn plans(config: &Config) -> Compiled {
    compile(config, &cpu::target(2)).expect("plans")
}

#[test]
fn plans_that_read_features_have_no_tower_and_take_less() {
    let of = |precision: &str| {
        [plans(&drawn(&[precision])), plans(&drawn(&[precision, "data.vision_cache=features"]))]
    };
    for (precision, dtype) in [("precision=fp32", DType::F32), ("precision=bf16", DType::BF16)] {
        let [tower, kept] = of(precision);
        let of_tower = |compiled: &Compiled| {
            let slots = compiled.plans.slots.iter().filter(|slot| slot.path.contains("vision."));
            let launches = compiled.plans.plans.iter().flat_map(|plan| &plan.launches);
            slots.count() + launches.filter(|launch| launch.path.contains("vision.")).count()
        };
        assert!(of_tower(&tower) > 0 && of_tower(&kept) == 0);
        assert!(kept.plans.arena_bytes < tower.plans.arena_bytes, "{precision}");
        assert_eq!(kept.parameters, tower.parameters, "the model is the same");
        let inputs =
            kept.plans.slots.iter().filter(|s| s.class == Class::Input && s.path.ends_with(FEATURES));
        assert!(inputs.map(|slot| slot.ty.dtype).all(|own| own == dtype));
        assert!(kept.flops_per_token < tower.flops_per_token);
    }
}

#[test]
fn a_tower_that_is_trained_refuses_the_key() {
    let sentence = |words: &[&str]| {
        let config = drawn(&[&["data.vision_cache=features"], words].concat());
        let Err(Failure::User(error)) = compile(&config, &cpu::target(2)) else {
            panic!("{words:?} is refused")
        };
        error.0
    };
    for words in [
        &["adapter.kind=none"][..],
        &["adapter.paths=[layers,vision.layers]"],
        &["adapter.paths=[vision.merger,vision.deepstack]"],
        &["adapter.also_train=[vision.merger]"],
        &["adapter.kind=none", "train.freeze=[vision.layers]"],
    ] {
        let sentence = sentence(words);
        assert!(
            sentence.contains("`data.vision_cache`") && sentence.contains("the tower is trained"),
            "{sentence}"
        );
    }
    // The whole tower is frozen and the text model is trained.
    plans(&drawn(&["data.vision_cache=features", "adapter.kind=none", "train.freeze=[vision]"]));
}

/// Questions about pictures in files, for the tiny model as the library stores it.
struct Files {
    folder: tempfile::TempDir,
}

const PICTURES: [&str; 5] = ["rgb.png", "grey.png", "420.jpg", "444.jpg", "palette.png"];

impl Files {
    fn new() -> Files {
        let folder = tempfile::tempdir().expect("a folder");
        vl_folder::write(&folder.path().join("model"));
        fs::create_dir(folder.path().join("images")).expect("a folder");
        let mut rows = String::new();
        for (i, name) in PICTURES.iter().cycle().take(20).enumerate() {
            fs::copy(vl_folder::picture(name), folder.path().join("images").join(name)).expect("a copy");
            let answer = ["table", "is"][i % 2];
            let row = json!({ "image": name, "question": "what is on the table", "answer": answer });
            rows.push_str(&format!("{row}\n"));
        }
        fs::write(folder.path().join("rows.jsonl"), rows).expect("rows");
        Files { folder }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn config(&self, more: &[&str]) -> Config {
        let file = |key: &str, name: &str| format!("{key}={}", self.at(name).display());
        let [from, rows, root, cache] = [
            file("model.from", "model"),
            file("data.path", "rows.jsonl"),
            file("data.image_root", "images"),
            file("data.vision_cache", "cache"),
        ];
        let words = [
            from.as_str(),
            &rows,
            &root,
            &cache,
            "model.context=256",
            "backend=cpu",
            "precision=fp32",
            "data.image_tokens=[4,16]",
            "data.held_out=0.2",
            "adapter.rank=2",
            "train.batch=4",
            "train.epochs=1",
            "eval.every_epochs=none",
            "eval.rows=2",
            "eval.metric=loss",
            "checkpoint.best=false",
        ];
        let words: Vec<String> = words.iter().chain(more).map(|word| word.to_string()).collect();
        recipes::resolve("qwen3-vl-8b-vqa", &[], &words).expect("a config")
    }

    /// Changes a value of a tensor of the model, and returns the file's previous contents.
    fn change(&self, tensor: &str) -> Vec<u8> {
        let path = self.at("model/model.safetensors");
        let whole = fs::read(&path).expect("weights");
        let behind = 8 + u64::from_le_bytes(whole[..8].try_into().expect("eight bytes")) as usize;
        let header: Value = serde_json::from_slice(&whole[8..behind]).expect("a header");
        let begin = header[tensor]["data_offsets"][0].as_u64().expect("a tensor") as usize;
        let mut changed = whole.clone();
        changed[behind + begin + 2] ^= 1;
        fs::write(path, changed).expect("weights");
        whole
    }

    fn refused(&self, more: &[&str]) -> String {
        match filled(&self.config(more)) {
            Err(Failure::User(error)) => error.0,
            other => panic!("{more:?}: {other:?}"),
        }
    }
}

#[test]
fn differences_are_refused_by_name() {
    let files = Files::new();
    filled(&files.config(&[])).expect("features");
    filled(&files.config(&["lr=1e-3", "adapter.rank=4"])).expect("the text and its training are no matter");
    for (words, name) in [
        (&["precision=bf16"][..], "`precision` = fp32"),
        (&["data.image_tokens=[4,12]"], "`data.image_tokens` = [4, 16]"),
    ] {
        let sentence = files.refused(words);
        assert!(sentence.contains(name) && sentence.contains("index.json"), "{words:?}: {sentence}");
    }
    // A tower of another shape.
    let shapes = cache_word(&files.at("shapes"));
    filled(&drawn(&[&shapes])).expect("features");
    for (word, name) in [
        ("model.vision.mean=[0.4,0.5,0.5]", "`model.vision.mean` = "),
        ("model.vision.norm_eps=1e-5", "`model.vision.norm_eps` = "),
        ("model.vision.deepstack=[]", "`model.vision.deepstack` = "),
        ("train.seed=99", "`tower` = "),
    ] {
        let Err(Failure::User(error)) = filled(&drawn(&[&shapes, word])) else { panic!("{word} is refused") };
        assert!(error.0.contains(name), "{word}: {}", error.0);
    }
    // Another tower of the same shape.
    let whole = files.change("model.visual.blocks.0.mlp.linear_fc1.weight");
    assert!(files.refused(&[]).contains("`tower` = "), "{}", files.refused(&[]));
    fs::write(files.at("model/model.safetensors"), &whole).expect("weights");
    // Values of the index itself.
    let index = fs::read_to_string(files.at("cache/index.json")).expect("an index");
    for (what, name) in
        [("\"version\": \"", "`version`"), ("\"filter\": \"", "`filter`"), ("\"type\": \"", "`type`")]
    {
        fs::write(files.at("cache/index.json"), index.replace(what, &format!("{what}x"))).expect("an index");
        assert!(files.refused(&[]).contains(name), "{}", files.refused(&[]));
    }
    fs::write(files.at("cache/index.json"), &index).expect("an index");
    // A part that is shorter or damaged.
    let part = files.at("cache/features-00000.bin");
    let bytes = fs::read(&part).expect("a part");
    fs::write(&part, &bytes[..bytes.len() - 1]).expect("a part");
    assert!(files.refused(&[]).contains("features-00000.bin has"), "{}", files.refused(&[]));
    let mut damaged = bytes.clone();
    damaged[5] ^= 1;
    fs::write(&part, damaged).expect("a part");
    let Err(Failure::Environment(sentence)) = trained(&files.config(&[]), &files.at("run")) else {
        panic!("damage is noticed")
    };
    assert!(sentence.contains("are damaged"), "{sentence}");
    fs::write(&part, bytes).expect("a part");
    // An image that changed, by name.
    let image = files.at("images/rgb.png");
    fs::copy(vl_folder::picture("rgba.png"), &image).expect("a copy");
    let sentence = files.refused(&[]);
    assert!(sentence.contains("images/rgb.png has other bytes"), "{sentence}");
    fs::copy(vl_folder::picture("rgb.png"), &image).expect("a copy");
    filled(&files.config(&[])).expect("everything is as it was");
    // A folder of something else.
    let other = format!("data.vision_cache={}", files.at("images").display());
    assert!(
        files.refused(&[&other]).contains("holds other things than features"),
        "{}",
        files.refused(&[&other])
    );
}

#[test]
fn a_run_of_a_checkpoint_keeps_its_tower() {
    let files = Files::new();
    let plain = trained(&files.config(&["data.vision_cache=none"]), &files.at("plain")).expect("a run");
    let kept = trained(&files.config(&[]), &files.at("kept")).expect("a run");
    assert_eq!((kept.losses, kept.held_out), (plain.losses, plain.held_out));
    // The run records the tensors that it depends on, including the tower's.
    let frozen = |run: &str| Origin::of(&files.at(run)).expect("an origin").frozen;
    assert_eq!(frozen("kept"), frozen("plain"));
    assert!(frozen("kept").keys().any(|path| path.starts_with("vision.layers")));
    let exported = |run: &str| {
        let to = files.at(&format!("{run}-exported"));
        let wanted =
            Export { to: to.clone(), dtype: Width::F32, shard_bytes: 1 << 30, force: false, adapter: false };
        export(&mut Loaded::open(&files.at(run), &[]).expect("a run"), &wanted).expect("an export");
        fs::read(to.join("model.safetensors")).expect("weights")
    };
    assert!(exported("kept") == exported("plain"), "exports have the tower, and are equal");
    // A run used for inference has its tower, and takes no features.
    assert_eq!(Loaded::open(&files.at("kept"), &[]).expect("a run").config.data.vision_cache, None);
    let Err(error) = Loaded::open(&files.at("kept"), &["data.vision_cache=x".into()]) else {
        panic!("refused")
    };
    assert!(error.0.contains("`data.vision_cache` is for training"), "{}", error.0);
    // The tower of a resumed run is the one it began with.
    files.change("model.visual.merger.linear_fc1.weight");
    let Err(Failure::User(error)) = trained(&files.config(&["train.epochs=2"]), &files.at("kept")) else {
        panic!("refused")
    };
    assert!(error.0.contains("is not what the run began with"), "{}", error.0);
}

#[test]
fn a_cache_that_does_not_pay_is_reported() {
    let folder = tempfile::tempdir().expect("a folder");
    let said = |name: &str, words: &[&str]| {
        let cache = cache_word(&folder.path().join(name));
        let config = drawn(&[&["train.steps=none", "eval.rows=0", &cache], words].concat());
        trained(&config, &folder.path().join(format!("{name}-run"))).expect("a run").said.join("\n")
    };
    let once = said("once", &["shared_prefix=on", "train.epochs=1"]);
    assert!(once.contains("the cache does not pay: one epoch with shared_prefix=on"), "{once}");
    let often = said("often", &["shared_prefix=on", "train.epochs=3"]);
    assert!(often.contains("the cache pays: 3 epochs with shared_prefix=on"), "{often}");
}
