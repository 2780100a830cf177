//! Classes of texts through the program: training on a labelled file, evaluation, predictions and folds.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::program::{CommandOutput, execute};

/// Writes texts about weather or food, which one word decides; every document has two rows.
fn write_texts(path: &Path, rows: usize, labelled: bool) {
    let words = [["rain", "cloud", "storm", "wind"], ["soup", "bread", "apple", "rice"]];
    let mut text = String::from(if labelled { "text,topic,document\n" } else { "text\n" });
    for row in 0..rows {
        let topic = (row * 7 / 3) % 2;
        let word = words[topic][row % 4];
        let line = format!("here is number {row} about {word} again");
        text += &match labelled {
            true => format!("{line},{},{}\n", ["weather", "food"][topic], row / 2),
            false => format!("{line}\n"),
        };
    }
    fs::write(path, text).expect("a file");
}

fn done(result: CommandOutput) -> CommandOutput {
    assert_eq!(result.code, Some(0), "{result:?}");
    result
}

const CLASSES: [&str; 20] = [
    "train",
    "tiny",
    "model.width=32",
    "model.layers=1",
    "model.heads=2",
    "model.kv_heads=1",
    "model.ffn=48",
    "model.vocab=300",
    "model.context=64",
    "model.head=classes",
    "model.classes=2",
    "model.pooling=mean",
    "data.task=classes",
    "data.path=texts.csv",
    "data.label=topic",
    "data.group=document",
    "data.held_out=0.3",
    "train.batch=16",
    "eval.metric=macro_f1",
    "schedule.warmup_share=0.1",
];

fn train(more: &[&'static str]) -> Vec<&'static str> {
    CLASSES.iter().chain(more).copied().collect()
}

#[test]
fn a_labelled_file_is_trained_evaluated_and_predicted() {
    let scratch = tempfile::tempdir().expect("a folder");
    let dir = scratch.path();
    write_texts(&dir.join("texts.csv"), 160, true);
    let words = [
        "train.epochs=10",
        "eval.every_epochs=1",
        "eval.rows=1000",
        "train.patience=6",
        "lr=5e-3",
        "--run",
        "run",
    ];
    let result = done(execute(dir, &train(&words)));
    assert!(result.out.contains("accuracy ") && result.out.contains("macro F1 "), "{result:?}");

    let judged = done(execute(dir, &["eval", "run@best", "--json"]));
    let judged: Value = serde_json::from_str(&judged.out).expect("JSON");
    assert_eq!(judged["on"], "held_out");
    assert!(judged["metrics"]["mean"]["f1"].as_f64().unwrap() > 0.95, "{judged}");
    let shown = done(execute(dir, &["eval", "run@best", "data.path=texts.csv"]));
    assert!(shown.out.contains("over 160 texts") && shown.out.contains("weather"), "{shown:?}");

    // The names of classes come from the run, and new texts need no labels.
    write_texts(&dir.join("new.csv"), 10, false);
    let asked = done(execute(dir, &["eval", "run@best", "--predict", "new.csv", "--out", "said.csv"]));
    assert!(asked.out.contains("10 texts classified"), "{asked:?}");
    let rows = fs::read_to_string(dir.join("said.csv")).expect("predictions");
    let rows: Vec<&str> = rows.lines().collect();
    assert_eq!((rows[0], rows.len()), ("row,class,food,weather", 11));
    assert!(rows[1].starts_with("\"new.csv, line 2\",weather,"), "{}", rows[1]);
    let refused = execute(dir, &["eval", "run", "--predict", "new.csv", "--out", "said.txt"]);
    refused.assert_refused(&["must end in .jsonl or .csv"]);

    done(execute(dir, &["export", "run@best", "--to", "out"]));
    let config: Value =
        serde_json::from_slice(&fs::read(dir.join("out/config.json")).unwrap()).expect("JSON");
    assert_eq!(config["architectures"][0], "Qwen3ForSequenceClassification");
    assert_eq!(config["label2id"]["weather"], 1);
}

#[test]
fn the_best_checkpoint_and_the_early_stop_follow_a_validation_file() {
    let scratch = tempfile::tempdir().expect("a folder");
    let dir = scratch.path();
    write_texts(&dir.join("texts.csv"), 160, true);
    // The labels of this file are swapped, so its loss grows as training succeeds.
    let swapped = fs::read_to_string(dir.join("texts.csv")).expect("texts");
    let swapped = swapped.replace(",weather,", ",?,").replace(",food,", ",weather,").replace(",?,", ",food,");
    fs::write(dir.join("swapped.csv"), swapped).expect("a file");
    let words = [
        "data.group=none",
        "data.held_out_path=swapped.csv",
        "train.epochs=30",
        "eval.every_epochs=1",
        "eval.rows=1000",
        "train.patience=4",
        "lr=5e-3",
        "--run",
        "run",
    ];
    let result = done(execute(dir, &train(&words)));
    assert!(result.err.contains("160 of 160 examples in swapped.csv are trained on too"), "{result:?}");
    let log = fs::read_to_string(dir.join("run/events.jsonl")).expect("a log");
    let events: Vec<Value> = log.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let start = events.iter().find(|event| event["event"] == "start").expect("a start");
    assert_eq!(
        (&start["data"]["documents"], &start["data"]["held_out_documents"]),
        (&160.into(), &160.into())
    );
    let steps = start["steps"].as_u64().expect("steps");
    let last = events.iter().filter_map(|event| event["step"].as_u64()).max().expect("steps");
    assert!(last < steps, "{last} of {steps} steps: nothing stopped it");
    let judged = |run: &'static str, on: &'static [&'static str]| -> f64 {
        let told = done(execute(dir, &[&["eval", run, "--json"], on].concat()));
        let told: Value = serde_json::from_str(&told.out).expect("JSON");
        told["metrics"]["mean"]["f1"].as_f64().expect("a number")
    };
    // The run fits the training rows and is wrong about the file, so the best checkpoint is better on it than the last one.
    assert!(judged("run", &["data.path=texts.csv"]) > 0.9);
    assert!(judged("run@best", &[]) > judged("run", &[]) + 0.1);
}

#[test]
fn folds_are_runs_with_a_summary() {
    let scratch = tempfile::tempdir().expect("a folder");
    let dir = scratch.path();
    write_texts(&dir.join("texts.csv"), 60, true);
    let words = ["train.steps=6", "eval.every=3", "eval.rows=1000", "train.folds=3", "--run", "folds"];
    let result = done(execute(dir, &train(&words)));
    assert!(result.out.contains("over 3 folds"), "{result:?}");
    let summary: Value =
        serde_json::from_slice(&fs::read(dir.join("folds/folds.json")).unwrap()).expect("JSON");
    let texts = |fold: usize| -> u64 {
        let rows = summary["folds"][fold]["metrics"]["confusion"].as_array().unwrap();
        rows.iter().flat_map(|row| row.as_array().unwrap()).map(|count| count.as_u64().unwrap()).sum()
    };
    assert_eq!(texts(0) + texts(1) + texts(2), 60, "every text is held out once: {summary}");
    assert!((1..=3).all(|fold| dir.join(format!("folds/fold-{fold}/report.md")).is_file()));
    assert!(fs::read_to_string(dir.join("folds/folds.md")).unwrap().contains("(fold-2/report.md)"));

    // Finished folds are kept: only a fold that is missing is trained again.
    fs::remove_dir_all(dir.join("folds/fold-2")).expect("a fold");
    let again = done(execute(dir, &train(&[&words[..], &["--resume", "auto"]].concat())));
    assert!(again.err.contains("1 of 3 is done") && !again.err.contains("2 of 3 is done"), "{again:?}");
    assert!(dir.join("folds/fold-2/report.md").is_file());
    // Folds of other settings are refused.
    let refused = execute(dir, &train(&[&words[..], &["lr=2e-5", "--resume", "auto"]].concat()));
    refused.assert_refused(&["`optimizer.lr` is 2e-5 now"]);
}

#[test]
fn heads_and_data_that_do_not_match_are_refused() {
    let scratch = tempfile::tempdir().expect("a folder");
    let dir = scratch.path();
    write_texts(&dir.join("texts.csv"), 20, true);
    let refused = |words: &[&'static str], expected: &str| {
        let result = execute(dir, &train(words));
        result.assert_refused(&[expected]);
    };
    refused(&["train.steps=2", "model.classes=3"], "the labels are of 2 classes (food, weather)");
    refused(&["train.steps=2", "eval.metric=f1", "model.classes=4"], "eval.metric=macro_f1");
    assert!(!dir.join("runs").exists() || fs::read_dir(dir.join("runs")).unwrap().next().is_none());
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).expect("JSON")
}

/// An exported head whose outputs are not in alphabetical order: its `id2label` says which output is which class.
#[test]
fn classes_of_other_models_are_matched_by_name() {
    let scratch = tempfile::tempdir().expect("a folder");
    let dir = scratch.path();
    write_texts(&dir.join("texts.csv"), 160, true);
    let words = ["data.classes=[weather,food]", "train.steps=60", "lr=5e-3", "--run", "run"];
    done(execute(dir, &train(&words)));
    done(execute(dir, &["export", "run", "--to", "out"]));
    let labels = |folder: &str| json(&fs::read_to_string(dir.join(folder).join("config.json")).unwrap());
    assert_eq!(labels("out")["id2label"], serde_json::json!({ "0": "weather", "1": "food" }));

    let columns = ["data.path=texts.csv", "data.label=topic"];
    let judged = |model: &'static str, more: &[&'static str]| {
        execute(dir, &[&["eval", model, "--json"], &columns[..], more].concat())
    };
    let own = json(&done(judged("run", &[])).out);
    let found = json(&done(judged("out", &[])).out);
    assert!(own["metrics"]["accuracy"].as_f64().unwrap() > 0.9, "{own}");
    assert_eq!(found["metrics"]["confusion"], own["metrics"]["confusion"]);
    let shown = done(execute(dir, &[&["eval", "out"], &columns[..]].concat()));
    assert!(shown.out.contains("a row per true class and a column per predicted class\n"), "{shown:?}");
    assert!(shown.out.contains("weather     food"), "{shown:?}");

    write_texts(&dir.join("new.csv"), 6, false);
    done(execute(dir, &["eval", "out", "--predict", "new.csv", "--out", "said.csv"]));
    assert!(fs::read_to_string(dir.join("said.csv")).unwrap().starts_with("row,class,weather,food\n"));

    // Training continues from these weights, and keeps the order.
    let more =
        ["model.from=out", "data.task=classes", "data.held_out=0.3", "train.batch=16", "train.steps=1"];
    let rest = ["schedule.warmup_steps=0", "model.head=classes", "model.classes=2", "model.pooling=mean"];
    let on = [&["train", "tiny", "--run", "on", "lr=1e-9"], &columns[..], &more[..], &rest[..]].concat();
    done(execute(dir, &on));
    let events = fs::read_to_string(dir.join("on/events.jsonl")).unwrap();
    let first = events.lines().map(json).find(|event| event["event"] == "step").expect("a step");
    assert!(first["loss"].as_f64().unwrap() < 0.5, "{first}");
    done(execute(dir, &["export", "on", "--to", "again"]));
    assert_eq!(labels("again")["id2label"], labels("out")["id2label"]);

    // Names in another order, and labels that are not among the names.
    let swapped = judged("out", &["data.classes=[food,weather]"]);
    swapped.assert_refused(&["`food` as class 0"]);
    let refused = execute(dir, &[&on[..], &["data.classes=[food,weather]"]].concat());
    refused.assert_refused(&["it is class 1"]);
    fs::write(dir.join("other.csv"), "text,topic\nrain,rainy\nsoup,tasty\n").unwrap();
    let other = execute(dir, &["eval", "out", "data.path=other.csv", "data.label=topic"]);
    other.assert_refused(&["none of the classes `weather`, `food`"]);
    let renamed = ["eval", "out", "data.path=other.csv", "data.label=topic", "data.classes=[rainy,tasty]"];
    done(execute(dir, &renamed));
}

/// A multi-label head is refused, because it would be read as a head of classes.
#[test]
fn a_head_of_many_labels_is_refused() {
    let scratch = tempfile::tempdir().expect("a folder");
    let dir = scratch.path();
    write_texts(&dir.join("texts.csv"), 40, true);
    done(execute(dir, &train(&["train.steps=1", "--run", "run"])));
    done(execute(dir, &["export", "run", "--to", "out"]));
    let path = dir.join("out/config.json");
    let mut config = json(&fs::read_to_string(&path).unwrap());
    config["problem_type"] = "multi_label_classification".into();
    fs::write(&path, config.to_string()).unwrap();
    let refused = execute(dir, &["eval", "out", "data.path=texts.csv", "data.label=topic"]);
    refused.assert_refused(&["`problem_type`"]);
}
