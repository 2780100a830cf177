//! `data inspect` of images, and evaluation and predictions of image models, through the program.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::program::execute;

fn pictures() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/tests/pictures")
}

#[test]
fn the_synthetic_set_is_shown() {
    let folder = tempfile::tempdir().expect("a folder");
    let result = execute(folder.path(), &["data", "inspect", "--task", "images", "--samples", "2"]);
    assert_eq!(result.code, Some(0), "{}", result.err);
    for part in [
        "20000 images of 10 classes to train on, 1000 held out (synthetic)",
        "looked at 1,000: 1,000 pixels",
        "32 to 32 pixels wide",
        "triangle",
        "2,000 to train on, 100 held out",
    ] {
        assert!(result.out.contains(part), "{part:?} is not in {}", result.out);
    }
}

#[test]
fn the_images_of_a_recipe_are_shown() {
    let folder = tempfile::tempdir().expect("a folder");
    let result = execute(
        folder.path(),
        &["data", "inspect", "vision-tiny", "data.synthetic_rows=100", "--samples", "1"],
    );
    assert_eq!(result.code, Some(0), "{}", result.err);
    assert!(result.out.starts_with("100 images of 10 classes to train on"), "{}", result.out);
}

#[test]
fn folders_are_shown_with_broken_images() {
    let folder = tempfile::tempdir().expect("a folder");
    for (name, picture) in [
        ("a/1.jpg", "420.jpg"),
        ("a/2.png", "rgb16.png"),
        ("b/3.jpg", "cmyk.jpg"),
        ("b/5.webp", "lossy.webp"),
    ] {
        let path = folder.path().join("set").join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::copy(pictures().join(picture), path).unwrap();
    }
    fs::write(folder.path().join("set/b/4.jpg"), b"GIF89a").unwrap();
    let words = ["data", "inspect", "--task", "images", "set", "--time", "0.02", "--json"];
    let result = execute(folder.path(), &words);
    assert_eq!(result.code, Some(0), "{}", result.err);
    let object: Value = serde_json::from_str(&result.out).expect("one object");
    assert_eq!(object["images"]["sets"]["kind"], "folder");
    assert_eq!(object["images"]["kinds"], serde_json::json!([["JPEG", 2], ["PNG", 1], ["WebP", 1]]));
    assert_eq!(object["images"]["unusable"][0][0], "neither JPEG, PNG nor WebP");
    assert!(object["speed"]["fed"].as_f64().unwrap() > 0.0);
}

#[test]
fn other_files_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    fs::write(folder.path().join("notes.txt"), "text").unwrap();
    for (words, part) in [
        (&["data", "inspect", "--task", "images", "notes.txt"][..], "not a known source of images"),
        (&["data", "inspect", "--task", "images", "nowhere.tar"], "There is no file or folder nowhere.tar"),
        (&["data", "inspect", "--task", "images", "."], "has no folders"),
    ] {
        let result = execute(folder.path(), words);
        assert_eq!(result.code, Some(2), "{words:?}: {}", result.err);
        assert!(result.err.contains(part) && result.err.lines().count() == 1, "{words:?}: {}", result.err);
    }
}

/// Trains a small model on synthetic images.
fn trained(folder: &Path) {
    let small = ["model.width=32", "model.layers=1", "model.heads=2", "model.image_size=16", "train.steps=3"];
    let more = ["schedule.warmup_steps=1", "data.synthetic_rows=64", "train.batch=8", "eval.rows=0"];
    let words = [&["train", "vision-tiny", "--run", "run", "backend=cpu"], &small[..], &more[..]].concat();
    let result = execute(folder, &words);
    assert_eq!(result.code, Some(0), "{}", result.err);
}

#[test]
fn new_images_are_classified() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    trained(dir);
    let put = |name: &str, picture: &str| {
        let path = dir.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::copy(pictures().join(picture), path).unwrap();
    };
    put("new/one.jpg", "420.jpg");
    put("new/deep/two.png", "rgb16.png");
    put("new/three.jpg", "cmyk.jpg");
    fs::write(dir.join("rows.csv"), "image\nnew/one.jpg\nnew/deep/two.png\n").unwrap();
    let rows = |words: &[&str], out: &str| -> Vec<Value> {
        let result =
            execute(dir, &[&["eval", "run", "backend=cpu", "--out", out, "--predict"], words].concat());
        assert_eq!(result.code, Some(0), "{}", result.err);
        assert!(result.out.contains("images classified"), "{}", result.out);
        let text = fs::read_to_string(dir.join(out)).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let all = rows(&["new"], "all.jsonl");
    let of = |row: &Value| row["row"].as_str().unwrap().to_string();
    assert_eq!(all.iter().map(of).collect::<Vec<_>>(), ["new/deep/two.png", "new/one.jpg", "new/three.jpg"]);
    for row in &all {
        let probabilities = row["probabilities"].as_object().unwrap();
        let sum: f64 = probabilities.values().map(|p| p.as_f64().unwrap()).sum();
        let most = probabilities.values().map(|p| p.as_f64().unwrap()).fold(0.0, f64::max);
        assert!((sum - 1.0).abs() < 1e-6 && probabilities.len() == 10, "{row}");
        assert_eq!(probabilities[row["class"].as_str().unwrap()], most);
    }
    // A single image, or one named by a table, has the same prediction except for rounding.
    let alike = |one: &Value, other: &Value| {
        assert_eq!((&one["row"], &one["class"]), (&other["row"], &other["class"]));
        for (class, p) in one["probabilities"].as_object().unwrap() {
            let apart = p.as_f64().unwrap() - other["probabilities"][class].as_f64().unwrap();
            assert!(apart.abs() < 1e-5, "{one} {other}");
        }
    };
    alike(&rows(&["new/one.jpg"], "one.jsonl")[0], &all[1]);
    let table = rows(&["rows.csv", "eval.micro_batch=1"], "table.jsonl");
    assert_eq!(table.len(), 2);
    alike(&table[0], &all[1]);
    alike(&table[1], &all[0]);
    let result = execute(dir, &["eval", "run", "backend=cpu", "--predict", "new", "--out", "all.csv"]);
    assert_eq!(result.code, Some(0), "{}", result.err);
    let csv = fs::read_to_string(dir.join("all.csv")).unwrap();
    assert!(csv.starts_with("row,class,") && csv.lines().count() == 4, "{csv}");

    // A broken image ends the command with its name and nothing is written, or it is left out and named.
    fs::write(dir.join("new/broken.jpg"), b"GIF89a").unwrap();
    let result = execute(dir, &["eval", "run", "backend=cpu", "--predict", "new", "--out", "no.csv"]);
    assert_eq!(result.code, Some(2), "{}", result.err);
    assert!(result.err.contains("new/broken.jpg") && !dir.join("no.csv").exists(), "{}", result.err);
    let words =
        ["eval", "run", "backend=cpu", "on_error=skip", "--predict", "new", "--out", "skip.jsonl", "--json"];
    let result = execute(dir, &words);
    assert_eq!(result.code, Some(0), "{}", result.err);
    let object: Value = serde_json::from_str(&result.out).expect("one object");
    assert_eq!(object["images"], 3);
    assert!(object["left_out"][0].as_str().unwrap().contains("new/broken.jpg"), "{object}");
    let kept = fs::read_to_string(dir.join("skip.jsonl")).unwrap();
    let kept: Vec<Value> = kept.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(kept.len(), 3);
    kept.iter().zip(&all).for_each(|(one, other)| alike(one, other));

    for (path, part) in
        [("nowhere", "holds no images"), ("run", "There is no .jpg"), ("run/config.toml", "holds no images")]
    {
        let result = execute(dir, &["eval", "run", "backend=cpu", "--predict", path, "--out", "no.csv"]);
        assert_eq!(result.code, Some(2), "{}", result.err);
        assert!(result.err.contains(part) && result.err.lines().count() == 1, "{path}: {}", result.err);
    }
}

#[test]
fn a_run_warns_that_its_images_have_changed() {
    let fixture = crate::fixture::Fixture::new();
    for class in ["a", "b"] {
        fs::create_dir_all(fixture.dir("set").join(class)).unwrap();
        for n in 0..6 {
            let name = format!("set/{class}/{n}.jpg");
            fs::copy(pictures().join(if n % 2 == 0 { "420.jpg" } else { "422.jpg" }), fixture.dir(&name))
                .unwrap();
        }
    }
    let words = [
        "train",
        "vision-tiny",
        "data.path=set",
        "data.held_out=0.3",
        "model.classes=2",
        "model.width=32",
        "model.layers=1",
        "model.heads=2",
        "train.batch=2",
        "train.steps=3",
        "schedule.warmup_steps=1",
        "eval.rows=2",
        "--run",
        "run",
    ];
    let result = execute(fixture.folder.path(), &words);
    assert_eq!(result.code, Some(0), "{}", result.err);
    let changed = "the files of the images have other sizes or times";
    for (steps, touched) in [("train.steps=4", false), ("train.steps=5", true), ("train.steps=6", false)] {
        if touched {
            fs::copy(pictures().join("444.jpg"), fixture.dir("set/a/0.jpg")).unwrap();
        }
        let result = execute(fixture.folder.path(), &["resume", "run", steps]);
        assert_eq!(result.code, Some(0), "{}", result.err);
        assert_eq!(result.err.contains(changed), touched, "{}", result.err);
    }
}

/// An exported model whose outputs are not in alphabetical order: classes are matched by name with a folder per class.
#[test]
fn classes_of_other_image_models_are_matched_by_name() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    for (class, picture) in [("a", "420.jpg"), ("b", "grey.jpg")] {
        fs::create_dir_all(dir.join("set").join(class)).unwrap();
        for number in 0..8 {
            fs::copy(pictures().join(picture), dir.join(format!("set/{class}/{number}.jpg"))).unwrap();
        }
    }
    let small =
        ["model.width=32", "model.layers=1", "model.heads=2", "model.image_size=16", "model.classes=2"];
    let data = ["data.path=set", "data.source=auto", "data.classes=[b,a]", "data.held_out=0.25"];
    let more = ["train.steps=40", "schedule.warmup_steps=1", "train.batch=8", "lr=3e-3"];
    let words = ["train", "vision-tiny", "--run", "run", "backend=cpu"];
    let result = execute(dir, &[&words[..], &small, &data, &more].concat());
    assert_eq!(result.code, Some(0), "{}", result.err);
    let result = execute(dir, &["export", "run", "--to", "out"]);
    assert_eq!(result.code, Some(0), "{}", result.err);
    let judged = |model: &'static str| -> Value {
        let result =
            execute(dir, &["eval", model, "backend=cpu", "data.task=images", "data.path=set", "--json"]);
        assert_eq!(result.code, Some(0), "{}", result.err);
        serde_json::from_str(&result.out).expect("one object")
    };
    let (own, found) = (judged("run"), judged("out"));
    assert!(own["metrics"]["accuracy"].as_f64().unwrap() > 0.9, "{own}");
    assert_eq!(found["metrics"]["confusion"], own["metrics"]["confusion"]);
    let result =
        execute(dir, &["eval", "out", "backend=cpu", "--predict", "set/a/0.jpg", "--out", "said.csv"]);
    assert_eq!(result.code, Some(0), "{}", result.err);
    let csv = fs::read_to_string(dir.join("said.csv")).unwrap();
    assert!(csv.starts_with("row,class,b,a\nset/a/0.jpg,a,"), "{csv}");

    // Trained on larger images than its positions were made for, and exported: config, processor and weights have the larger size.
    let data = ["data.path=set", "data.source=auto", "data.held_out=0.25", "model.image_size=32"];
    let more =
        ["train.steps=1", "schedule.warmup_steps=0", "train.batch=8", "lr=1e-9", "data.filter=bicubic"];
    let words = ["train", "vision-tiny", "--run", "on", "backend=cpu", "model.from=out"];
    let result = execute(dir, &[&words[..], &data, &more].concat());
    assert_eq!(result.code, Some(0), "{}", result.err);
    let result = execute(dir, &["export", "on", "--to", "larger"]);
    assert_eq!(result.code, Some(0), "{}", result.err);
    let read = |name: &str| -> Value {
        serde_json::from_slice(&fs::read(dir.join("larger").join(name)).unwrap()).expect("JSON")
    };
    assert_eq!(read("config.json")["model_args"]["img_size"], 32);
    assert_eq!(read("config.json")["pretrained_cfg"]["interpolation"], "bicubic");
    assert_eq!(read("preprocessor_config.json")["crop_size"]["height"], 32);
    let loss = |judged: Value| judged["loss"].as_f64().unwrap();
    assert!((loss(judged("on")) - loss(judged("larger"))).abs() < 1e-3);

    fs::rename(dir.join("set/b"), dir.join("set/c")).unwrap();
    let result = execute(dir, &["eval", "out", "backend=cpu", "data.task=images", "data.path=set"]);
    result.assert_refused(&["none of the classes `b`, `a`"]);
}

#[test]
fn adapters_of_image_models_are_exported_only_merged() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    let small = ["model.width=32", "model.layers=1", "model.heads=2", "model.image_size=16", "train.steps=1"];
    let more = ["schedule.warmup_steps=0", "data.synthetic_rows=16", "train.batch=8", "eval.rows=0"];
    let adapter = ["adapter.kind=lora", "adapter.rank=2", "--run", "run", "backend=cpu"];
    let result = execute(dir, &[&["train", "vision-tiny"], &small[..], &more[..], &adapter[..]].concat());
    assert_eq!(result.code, Some(0), "{}", result.err);
    let result = execute(dir, &["export", "run", "--to", "apart", "--adapter"]);
    result.assert_refused(&["leave --adapter out"]);
    let result = execute(dir, &["export", "run", "--to", "out"]);
    assert_eq!(result.code, Some(0), "{}", result.err);
}
