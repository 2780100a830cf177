//! A set of images on the device: training sees the bytes that a loader gives.

use std::fs;
use std::path::Path;

use flatout_data::LoaderOptions;
use flatout_data::images::{ByteTable, ImageLoader, PartLoader};
use flatout_ir::graph::Class;
use flatout_ir::passes::input_path;
use flatout_ir::{DType, Graph, Init, Options, Program, Role, compile};
use flatout_runtime::{Session, cpu};
use flatout_train::Config;
use flatout_train::device::Device;
use flatout_train::recipes;
use flatout_train::run::signal::StopFlag;
use flatout_train::run::{Entered, Resume, Run};
use flatout_train::tasks::images;
use flatout_train::training::trainer::train;

use crate::small_run::train_in;

/// Records in CIFAR-10's format, of noise.
fn cifar(path: &Path, images: usize) {
    let mut state = 11u64;
    let mut byte = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as u8
    };
    let record = |image: usize| -> Vec<u8> {
        std::iter::once((image % 10) as u8).chain((0..3072).map(|_| byte())).collect()
    };
    fs::write(path, (0..images).flat_map(record).collect::<Vec<u8>>()).unwrap();
}

/// A small Vision-BDH on that file.
fn config(file: &Path, overrides: &[&str]) -> Config {
    let path = format!("data.path={}", file.display());
    let small = [
        path.as_str(),
        "model.width=32",
        "model.layers=2",
        "model.heads=2",
        "model.latent=32",
        "model.patch=8",
        "train.epochs=none",
        "train.steps=6",
        "train.batch=12",
        "train.micro_batch=6",
        "schedule.warmup_steps=2",
        "schedule.horizon_steps=6",
        "eval.rows=4",
        "eval.every=3",
        "checkpoint.every=0",
    ];
    let all: Vec<String> = small.iter().chain(overrides).map(|word| word.to_string()).collect();
    recipes::resolve("bdh-cifar10", &[], &all).expect("a config")
}

fn losses(dir: &Path, config: &Config) -> Vec<f32> {
    train_in(dir, config, |_| {}).iter().map(|step| step.loss).collect()
}

/// Three epochs of all kinds of views: random crops, whole images mirrored, and a view of another size.
#[test]
fn a_launch_gives_the_bytes_of_the_loader() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("data_batch_1.bin");
    cifar(&file, 40);
    for words in [
        &[][..],
        &["data.crop_scale=[0.08,1]", "train.seed=5"],
        &["data.crop_scale=[1,1]", "data.crop_ratio=[1,1]", "data.flip=1"],
        &["data.crop_scale=[0.3,0.9]", "model.image_size=24"],
        &["data.crop_scale=[0.3,0.9]", "model.image_size=48"],
    ] {
        let config = config(&file, words);
        let set = images::sets(&config, &mut |_| {}).unwrap().train;
        let [count, rows, columns] = ByteTable::extents(&set).unwrap();
        let (view, seed, at_once) = (images::view(&config, true), config.train.seed, 3 * count);
        let b = flatout_ir::Builder::new();
        let table = b.read(b.slot("table", Class::Const, DType::U8, &[count, rows, columns, 3], Init::Data));
        let seen = table.resample(b.input("parts", DType::I32, &[at_once, 6]), [view.height, view.width]);
        b.result("seen", seen.cast(DType::F32));
        let graph: Graph = b.finish();
        let plans =
            compile(&[Program { role: Role::Eval, graph }], &cpu::target(2), &Options::default()).unwrap();
        let mut session = Session::new(plans, 2).unwrap();
        session.write_u8("table", &ByteTable::of(&set).unwrap().unwrap().pixels).unwrap();
        let cursor = ImageLoader::start(&set, seed);
        let options = LoaderOptions::default();
        let mut loader = ImageLoader::new(set.clone(), view, seed, cursor.clone(), options).unwrap();
        let mut parts = PartLoader::new(set, view, seed, cursor, options).unwrap();
        let (given, drawn) = (loader.next_images(at_once).unwrap(), parts.next_images(at_once));
        assert_eq!(given.labels, drawn.labels);
        session.write_i32(&input_path(Role::Eval, "parts"), &drawn.parts).unwrap();
        session.run(Role::Eval).unwrap();
        let seen: Vec<u8> =
            session.result(Role::Eval, "seen").unwrap().into_iter().map(|x| x as u8).collect();
        assert_eq!(seen, given.pixels, "{words:?}");
    }
}

/// With everything that uses random numbers, including mixing.
#[test]
fn runs_with_and_without_the_table_have_the_same_bits_and_resume_each_other() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("data_batch_1.bin");
    cifar(&file, 40);
    let of = |table: &str, steps: &str| {
        let draws = ["train.mixup=0.4", "train.cutmix=1", "train.label_smoothing=0.1"];
        config(&file, &[&draws[..], &[table, steps]].concat())
    };
    let (on, off) = ("image_table=on", "image_table=off");
    let loaded = losses(&dir.path().join("off"), &of(off, "train.steps=6"));
    assert_eq!(losses(&dir.path().join("on"), &of(on, "train.steps=6")), loaded);
    let broken = dir.path().join("broken");
    let mut parts = losses(&broken, &of(on, "train.steps=3"));
    parts.extend(losses(&broken, &of(off, "train.steps=6")));
    assert_eq!(parts, loaded);
}

#[test]
fn a_table_of_encoded_images_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    for class in ["a", "b"] {
        fs::create_dir(dir.path().join(class)).unwrap();
        let picture = concat!(env!("CARGO_MANIFEST_DIR"), "/../data/tests/pictures/rgb.png");
        for name in ["1.png", "2.png", "3.png"] {
            fs::copy(picture, dir.path().join(class).join(name)).unwrap();
        }
    }
    let words = ["model.classes=2", "data.held_out=0.5", "image_table=on"];
    let (Entered::Fresh(run) | Entered::Existing(run)) =
        Run::enter(&dir.path().join("run"), Resume::Auto).expect("a run");
    let config = config(dir.path(), &words);
    let failed = train(&config, None, &run, &Device::cpu(), &StopFlag::never(), &mut [], &mut |_| {})
        .unwrap_err()
        .to_string();
    assert!(failed.contains("`image_table=on` cannot run: the images of"), "{failed}");
}
