//! Runs that learn images: their accuracy, resuming, export and import.

use std::fs;
use std::path::Path;

use flatout_data::images::Augment;
use flatout_models::config::Model;
use flatout_train::Config;
use flatout_train::device::Device;
use flatout_train::infer::images::classify;
use flatout_train::metrics::ClassMetrics;
use flatout_train::recipes;
use flatout_train::run::checkpoint::TensorFile;
use flatout_train::run::events::Event;
use flatout_train::tasks::images::view;
use flatout_train::weights::export::{Export, Width, export};
use flatout_train::weights::loaded::Loaded;

use crate::small_run::train_in;

/// The recipe `vision-tiny`, made smaller, with overrides.
fn config(overrides: &[&str]) -> Config {
    let small = [
        "model.width=32",
        "model.layers=2",
        "model.heads=2",
        "model.image_size=16",
        "data.synthetic_rows=400",
        "data.held_out=0.125",
        "train.steps=8",
        "train.batch=16",
        "schedule.warmup_steps=2",
        "schedule.horizon_steps=8",
        "eval.rows=0",
        "checkpoint.every=0",
    ];
    let all: Vec<String> = small.iter().chain(overrides).map(|word| word.to_string()).collect();
    recipes::resolve("vision-tiny", &[], &all).expect("a config")
}

fn losses(dir: &Path, config: &Config) -> Vec<f32> {
    train_in(dir, config, |_| {}).iter().map(|step| step.loss).collect()
}

/// Everything that uses random numbers: stochastic depth, dropout, mixup, cutmix, crops.
const DRAWS: [&str; 6] = [
    "model.drop_path=0.2",
    "model.head_dropout=0.1",
    "model.layer_scale=0.5",
    "train.mixup=0.4",
    "train.cutmix=1",
    "train.label_smoothing=0.1",
];

#[test]
fn a_run_resumes_to_the_bit() {
    let dir = tempfile::tempdir().unwrap();
    let whole = config(&DRAWS);
    let unbroken = losses(&dir.path().join("whole"), &whole);
    let broken = dir.path().join("broken");
    let mut first = losses(&broken, &whole.with(&["steps=3".into()]).unwrap());
    first.extend(losses(&broken, &whole));
    assert_eq!(first, unbroken);
    assert_eq!(unbroken.len(), 8);
}

/// RandAugment and erasing depend only on the seed and the index of an image, not on the thread or on how often a run was
/// resumed.
#[test]
fn changed_images_depend_on_nothing_but_their_place() {
    let dir = tempfile::tempdir().unwrap();
    let changes = ["data.augment=randaugment", "data.erase=0.5", "data.erase_with=noise"];
    let whole = config(&changes);
    let unbroken = losses(&dir.path().join("whole"), &whole.with(&["loader.workers=1".into()]).unwrap());
    assert_ne!(unbroken, losses(&dir.path().join("plain"), &config(&[])));
    let (broken, threads) = (dir.path().join("broken"), whole.with(&["loader.workers=3".into()]).unwrap());
    let mut first = losses(&broken, &threads.with(&["steps=3".into()]).unwrap());
    first.extend(losses(&broken, &threads));
    assert_eq!(first, unbroken);
    for (word, sentence) in [
        ("data.augment_magnitude=11", "`data.augment_magnitude` is 11 and must be from 0 to 10"),
        ("data.augment_ops=0", "`data.augment_ops` is 0 and must be at least 1"),
        ("data.erase=2", "`data.erase` is 2 and must be from 0 to 1"),
        ("data.erase_area=[0.5,0.1]", "`data.erase_area` is [0.5, 0.1] and not two numbers"),
    ] {
        let refused = recipes::resolve("vision-tiny", &[], &[word.into()]).unwrap_err().to_string();
        assert!(refused.contains(sentence), "{refused}");
    }
    let refused = recipes::resolve("tiny", &[], &["data.erase=0.1".into()]).unwrap_err().to_string();
    assert!(refused.contains("and `data.task` is text"), "{refused}");
}

/// Images of 16 rows and 24 columns, for every kind of model, mixed and cropped; other libraries have no such models.
#[test]
fn images_need_not_be_square() {
    let dir = tempfile::tempdir().unwrap();
    let bdh =
        ["model.width=16", "model.heads=2", "model.latent=32", "model.layers=2", "data.source=synthetic"];
    let more =
        ["train.epochs=none", "train.steps=8", "train.batch=16", "eval.every_epochs=none", "eval.rows=0"];
    let wide = ["model.image_size=24", "model.image_height=16", "train.mixup=0.4", "train.cutmix=1"];
    let rest = [
        "checkpoint.best=false",
        "data.synthetic_rows=400",
        "schedule.warmup_steps=2",
        "schedule.horizon_steps=8",
    ];
    let words = [&bdh[..], &more, &wide, &rest].concat();
    let words: Vec<String> = words.iter().map(|word| word.to_string()).collect();
    let bdh = recipes::resolve("bdh-cifar10", &[], &words).expect("a config");
    for (name, whole) in [("vit", config(&wide)), ("bdh", bdh)] {
        assert_eq!(whole.model.image_sides(), Some([16, 24]));
        // Without other settings, training sees crops with the view's own aspect ratio.
        let plain = whole.with(&["data.crop_ratio=[1.0,1.0]".into()]).unwrap();
        let Augment::Train { ratio, .. } = view(&plain, true).augment else { panic!("training draws parts") };
        assert_eq!(ratio, (1.5, 1.5));
        let unbroken = losses(&dir.path().join(name), &whole);
        let broken = dir.path().join(format!("{name}-broken"));
        let mut first = losses(&broken, &whole.with(&["steps=3".into()]).unwrap());
        first.extend(losses(&broken, &whole));
        assert_eq!(first, unbroken);
        let mut loaded = Loaded::open(&dir.path().join(name), &[]).unwrap();
        let (found, _) = classify(&mut loaded, &Device::cpu(), &[]).unwrap();
        assert!(found.loss.is_finite() && found.texts > 0);
        let (to, dtype) = (dir.path().join("out"), Width::F32);
        let wanted = Export { to, dtype, shard_bytes: 1 << 30, force: false, adapter: false };
        assert!(export(&mut loaded, &wanted).is_err());
    }
}

/// Stochastic depth and dropout depend on the sample, so a batch may be split anywhere. Mixing pairs images within a micro-batch.
#[test]
fn a_batch_may_be_split() {
    let dir = tempfile::tempdir().unwrap();
    let of = |name: &str, micro_batch: &str| {
        let words = [&DRAWS[..3], &["train.label_smoothing=0.1", micro_batch]].concat();
        losses(&dir.path().join(name), &config(&words))
    };
    let (whole, split) = (of("whole", "train.micro_batch=16"), of("split", "train.micro_batch=4"));
    for (a, b) in whole.iter().zip(&split) {
        assert!((a - b).abs() < 2e-5 * a.abs(), "{whole:?} and {split:?}");
    }
}

fn trained(dir: &Path, config: &Config) -> ClassMetrics {
    let mut last = None;
    train_in(dir, config, |event| {
        if let Event::Eval { metrics, .. } = event {
            last = metrics.as_ref().and_then(|metrics| metrics.classes().cloned());
        }
    });
    last.expect("an evaluation")
}

#[test]
fn drawn_images_are_learned_and_judged_afterwards() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let words = [
        "model.width=48",
        "model.image_size=32",
        "train.steps=150",
        "schedule.horizon_steps=150",
        "train.batch=32",
        "eval.rows=50",
        "eval.every=0",
    ];
    let metrics = trained(&run, &config(&words));
    assert!(metrics.accuracy > 0.4 && metrics.top5.unwrap() >= metrics.accuracy, "{metrics:?}");
    let mut loaded = Loaded::open(&run, &[]).unwrap();
    assert_eq!(loaded.config.data.classes.len(), 10);
    let (judged, _) = classify(&mut loaded, &Device::cpu(), &[]).unwrap();
    assert_eq!(judged.texts, 50);
    assert_eq!(judged.metrics, metrics);
}

/// Records of a label and 32 x 32 pixels in CIFAR-10's format, of noise that can only be memorised.
fn cifar(path: &Path, images: usize) {
    let mut state = 7u64;
    let mut byte = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as u8
    };
    let mut bytes = vec![];
    for image in 0..images {
        bytes.push((image % 10) as u8);
        bytes.extend((0..3072).map(|_| byte()));
    }
    fs::write(path, bytes).unwrap();
}

#[test]
fn a_bdh_learns_a_small_set_by_heart() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("data_batch_1.bin");
    cifar(&file, 20);
    let (path, held_out) =
        (format!("data.path={}", file.display()), format!("data.held_out_path={}", file.display()));
    let words = [
        "model.width=32",
        "model.layers=3",
        "model.heads=2",
        "model.latent=64",
        "model.patch=8",
        "model.init=wide",
        "model.dropout=0",
        "data.crop_scale=[1,1]",
        "data.crop_ratio=[1.0,1.0]",
        "data.flip=0",
        "train.epochs=none",
        "train.steps=60",
        "train.batch=20",
        "schedule.warmup_steps=5",
        "optimizer.lr=1e-2",
        "eval.rows=20",
        "eval.every=0",
        "checkpoint.every=0",
        &path,
        &held_out,
    ]
    .map(String::from);
    let config = recipes::resolve("bdh-cifar10", &[], &words).expect("a config");
    let metrics = trained(&dir.path().join("run"), &config);
    assert_eq!(metrics.accuracy, 1.0, "{metrics:?}");
}

fn tensors(path: &Path) -> Vec<(String, Vec<usize>, Vec<u8>)> {
    let file = TensorFile::open(path).expect("tensors");
    let names: Vec<(String, Vec<usize>, usize)> =
        file.entries().iter().map(|(name, e)| (name.clone(), e.shape.clone(), e.bytes())).collect();
    let read = |name: &str, bytes: usize| {
        let mut out = vec![0; bytes];
        file.read_into(name, &mut out).expect("a tensor");
        out
    };
    names.into_iter().map(|(name, shape, bytes)| (name.clone(), shape, read(&name, bytes))).collect()
}

#[test]
fn exported_models_read_back_to_the_bit() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let dinov2 = ["model.pooling=cls_mean", "model.layer_scale=0.1", "model.grid=5"];
    for (name, overrides, class, tensor) in [
        (
            "timm",
            &["model.grid=3", "model.pooling=cls", "model.layer_scale=none"][..],
            "VisionTransformer",
            "blocks.1.attn.qkv.weight",
        ),
        ("timm-mean", &["model.pooling=mean"][..], "VisionTransformer", "blocks.0.attn.qkv.bias"),
        (
            "dinov2",
            &dinov2[..],
            "Dinov2ForImageClassification",
            "dinov2.encoder.layer.1.attention.attention.key.bias",
        ),
        (
            "vit",
            &["model.library=transformers", "model.grid=3", "model.pooling=cls"][..],
            "ViTForImageClassification",
            "vit.embeddings.cls_token",
        ),
        (
            "deit",
            &[
                "model.library=transformers",
                "model.grid=3",
                "model.pooling=cls",
                "model.registers=1",
                "model.prefix_positions=2",
            ][..],
            "DeiTForImageClassification",
            "deit.embeddings.distillation_token",
        ),
        (
            "clip",
            &[
                "model.library=transformers",
                "model.grid=3",
                "model.input_norm=true",
                "model.final_norm=none",
                "model.activation=quick_gelu",
            ][..],
            "CLIPForImageClassification",
            "vision_model.pre_layrnorm.weight",
        ),
        (
            "siglip",
            &[
                "model.library=transformers",
                "model.grid=3",
                "model.class_token=false",
                "model.activation=gelu_tanh",
            ][..],
            "SiglipForImageClassification",
            "vision_model.post_layernorm.bias",
        ),
        (
            "timm-registers",
            &["model.grid=3", "model.class_token=false", "model.registers=2", "model.final_norm=pooled"][..],
            "VisionTransformer",
            "fc_norm.weight",
        ),
        (
            "timm-clip",
            &["model.input_norm=true", "model.norm_eps=1e-5", "model.pooling=cls"][..],
            "VisionTransformer",
            "norm_pre.weight",
        ),
    ] {
        let (run, out, back, twice) =
            (at(name), at(&format!("{name}-out")), at(&format!("{name}-back")), at(&format!("{name}-twice")));
        losses(&run, &config(&[overrides, &["train.steps=2"]].concat()));
        let exported = |run: &Path, to: &Path| {
            let wanted = Export {
                to: to.to_path_buf(),
                dtype: Width::F32,
                shard_bytes: 1 << 30,
                force: false,
                adapter: false,
            };
            export(&mut Loaded::open(run, &[]).unwrap(), &wanted).expect("a folder")
        };
        let made = exported(&run, &out);
        assert_eq!(made.architecture, class);
        assert_eq!(made.files, ["config.json", "model.safetensors", "preprocessor_config.json"]);
        let of_out = tensors(&out.join("model.safetensors"));
        assert!(of_out.iter().any(|(name, ..)| name == tensor), "{tensor}");
        // Positions that were learned for another grid are resampled to the images of the run, and the config states the new
        // size.
        let said: serde_json::Value =
            serde_json::from_slice(&fs::read(out.join("config.json")).unwrap()).unwrap();
        let size = said.get("image_size").or(said.pointer("/vision_config/image_size"));
        if let Some(size) = size.filter(|_| name != "dinov2") {
            assert_eq!(*size, 16, "{name}");
            let positions = |(name, ..): &&(String, Vec<usize>, Vec<u8>)| name.contains("position_embedding");
            let (_, shape, _) = of_out.iter().find(positions).expect("positions");
            let prefix = match name {
                "deit" => 2,
                "siglip" => 0,
                _ => 1,
            };
            assert_eq!(shape[shape.len() - 2], prefix + 2 * 2, "{name}");
        }
        // A run that begins from the folder with zero updates has the same weights, and its export has the same files.
        let from = format!("model.from={}", out.display());
        let still =
            ["train.steps=1", "train.batch=2", "warmup_steps=0", "lr=1e-30", "weight_decay=0", "eval.rows=0"];
        let words: Vec<String> =
            still.iter().map(|w| w.to_string()).chain([from, "image_size=16".into()]).collect();
        let again = recipes::resolve("vision-tiny", &[], &words).expect("a config");
        losses(&back, &again);
        exported(&back, &twice);
        assert_eq!(tensors(&twice.join("model.safetensors")), of_out);
        for file in ["config.json", "preprocessor_config.json"] {
            assert_eq!(
                fs::read_to_string(out.join(file)).unwrap(),
                fs::read_to_string(twice.join(file)).unwrap()
            );
        }
    }
}

/// A tower without a head pools as its library does: the pooling in a recipe belongs to another model.
#[test]
fn towers_without_a_head_pool_as_their_library_does() {
    let dir = tempfile::tempdir().unwrap();
    let vision = serde_json::json!({
        "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
        "image_size": 16, "patch_size": 4, "layer_norm_eps": 1e-6,
    });
    let of_clip = &["cls", "patch", "positions", "input_norm", "input_norm_bias"][..];
    let of_deit = &["cls", "patch", "positions", "registers"][..];
    for (kind, class, pooling, named) in [
        ("siglip_vision_model", "SiglipVisionModel", "mean", &["patch", "positions"][..]),
        ("clip_vision_model", "CLIPVisionModel", "mean", of_clip),
        ("deit", "DeiTForImageClassificationWithTeacher", "cls", of_deit),
    ] {
        let mut config = vision.clone();
        config["model_type"] = kind.into();
        config["architectures"] = serde_json::json!([class]);
        fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        let from = format!("model.from={}", dir.path().display());
        let resolved = |more: &[&str]| {
            let words: Vec<String> =
                [from.as_str(), "model.classes=10"].iter().chain(more).map(|w| w.to_string()).collect();
            recipes::resolve("dinov2-s-classify", &[], &words)
        };
        let Model::Vit(vit) = resolved(&["model.image_size=16"]).expect("a config").model else {
            panic!("{kind}")
        };
        assert_eq!(vit.pooling.name(), pooling, "{kind}");
        let groups = resolved(&["model.image_size=16"]).expect("a config").train.groups.0;
        let paths: Vec<Vec<String>> = groups.into_iter().map(|group| group.paths).collect();
        assert_eq!(paths, [named, &["layers.0"]], "{kind}");
        let said = resolved(&["model.image_size=16", "model.pooling=cls_mean"]);
        assert_eq!(
            said.is_err(),
            kind == "siglip_vision_model",
            "{kind}: what is said counts, where it can be built"
        );
    }
    // A body of timm with a class token, whose norm applies to the mean.
    let pooled = serde_json::json!({
        "architecture": "vit_tiny_patch16_224", "num_classes": 0, "global_pool": "avg", "model_args": { "img_size": 32 },
    });
    fs::write(dir.path().join("config.json"), pooled.to_string()).unwrap();
    let words = [format!("model.from={}", dir.path().display()), "model.image_size=32".into()];
    let resolved = |more: &[&str]| {
        let words: Vec<String> = words.iter().cloned().chain(more.iter().map(|w| w.to_string())).collect();
        recipes::resolve("dinov2-s-classify", &[], &words)
    };
    let Model::Vit(vit) = resolved(&[]).expect("a config").model else { panic!("timm's") };
    assert_eq!((vit.pooling.name(), vit.class_token), ("mean", true));
    let refused = resolved(&["model.pooling=cls"]).expect_err("it norms a mean").0;
    assert!(refused.contains("give model.pooling=mean"), "{refused}");
}
