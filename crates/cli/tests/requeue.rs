//! The command that began a run, given again with `--resume auto`, continues it: for every recipe, from any folder, and for sweeps and
//! folds as a whole.

use std::fs;

use flatout_train::recipes;
use flatout_train::run::events::Event;
use serde_json::Value;

use crate::data::gzip;
use crate::fixture::{Fixture, send, wait_until};
use crate::program::{SMALL, execute, flatout, small_train};

/// Overrides that make a recipe short and keep its kinds of settings: epochs, shares, patience, classes.
fn small(recipe: &str) -> Vec<String> {
    let config = recipes::resolve(recipe, &[], &[]).expect("a recipe");
    let every = ["train.batch=4", "train.micro_batch=auto", "eval.rows=8", "backend=cpu"];
    let mut words = every.map(String::from).to_vec();
    match config.model.as_decoder() {
        Some(decoder) if decoder.vision.is_some() => {
            let few = "--with small data.synthetic_rows=40 data.held_out=0.3";
            words.extend(few.split(' ').map(String::from));
        }
        Some(decoder) => {
            words.push(format!("model.width={}", 16 * decoder.heads));
            let sizes = "model.head_size=16 model.ffn=32 model.vocab=320 model.context=64";
            words.extend(sizes.split(' ').map(String::from));
            // One table of value embeddings serves two layers.
            let tables = decoder.value_embeddings.min(1);
            words.push(format!("model.value_embeddings={tables}"));
            words.push(format!("model.layers={}", 1 + tables));
        }
        None => {
            let own = if config.model.kind().to_string() == "bdh" {
                "model.width=24 model.heads=2 model.latent=48"
            } else {
                "model.width=32 model.heads=2 model.grid=none train.groups=[]"
            };
            words.extend(own.split(' ').map(String::from));
            words.extend("model.layers=1 model.patch=4 model.image_size=16".split(' ').map(String::from));
        }
    }
    if config.train.epochs.is_some() {
        words.push("train.epochs=1".into());
        words.push("data.synthetic_rows=40".into());
        words.push("data.held_out=0.3".into());
    } else {
        words.push("train.steps=4".into());
    }
    if config.schedule.warmup_share.is_none() {
        words.push("schedule.warmup_steps=1".into());
    }
    if config.validate_for_training().is_err() {
        words.push("data.path=book.txt".into());
    }
    words
}

fn write_book(fixture: &Fixture) {
    let line = |i: u64| format!("line {} of the book has {} words.\n", i * 7919 % 10_007, i % 13);
    fs::write(fixture.dir("book.txt"), (0..300).map(line).collect::<String>()).expect("a text");
}

fn begins(fixture: &Fixture, run: &str) -> usize {
    fixture.events(run).iter().filter(|event| matches!(event, Event::Start(_))).count()
}

#[test]
fn the_same_command_continues_every_recipe() {
    let fixture = Fixture::new();
    write_book(&fixture);
    for recipe in recipes::list() {
        let name = recipe.name;
        let own = small(name);
        let fixed = ["train", name, "--run", name, "--resume", "auto", "-q"];
        let words: Vec<&str> = fixed.into_iter().chain(own.iter().map(String::as_str)).collect();
        for life in 1..=2 {
            let result = execute(fixture.folder.path(), &words);
            assert_eq!(result.code, Some(0), "{name}, life {life}: {}", result.err);
            assert_eq!(begins(&fixture, name), life, "{name}");
        }
        let other = execute(fixture.folder.path(), &[&words[..], &["optimizer.lr=0.123"]].concat());
        other.assert_refused(&["`optimizer.lr` is 0.123 now and was "]);
    }
}

#[test]
fn changeable_keys_may_change_and_resolved_values_may_be_given() {
    let fixture = Fixture::new();
    let first = small_train(&["--run", "run", "--resume", "auto", "-q"]);
    let go = |more: &[&str]| execute(fixture.folder.path(), &[&first[..], more].concat());
    assert_eq!(go(&[]).code, Some(0));
    let longer = go(&["train.steps=8", "eval.every=2", "checkpoint.keep=1", "train.patience=50"]);
    assert_eq!(longer.code, Some(0), "{}", longer.err);
    let resumed = execute(fixture.folder.path(), &["resume", "run", "train.steps=9", "-q"]);
    assert_eq!(resumed.code, Some(0), "{}", resumed.err);
    let spelled = go(&["train.steps=9", "train.micro_batch=4"]);
    assert_eq!(spelled.code, Some(0), "{}", spelled.err);
    assert_eq!(go(&["train.steps=9", "train.micro_batch=2"]).code, Some(2), "that is another split");
    assert_eq!(go(&["train.steps=9", "train.batch=8"]).code, Some(2));
    let kept = fs::read_to_string(fixture.dir("run/config.toml")).expect("a config");
    assert!(kept.contains("micro_batch = \"auto\""), "what was asked for stays: {kept}");
}

#[test]
fn relative_paths_are_found_from_anywhere() {
    let fixture = Fixture::new();
    write_book(&fixture);
    let elsewhere = fixture.dir("elsewhere");
    fs::create_dir(&elsewhere).expect("a folder");
    let rows: String = (0..60).map(|i| format!("{{\"text\": \"row {i} of {} words\"}}\n", i * i)).collect();
    fs::write(fixture.dir("book.jsonl.gz"), gzip(&rows)).expect("a text");
    let verse: String = (0..40).map(|i| format!("Line {i} of a verse that nobody trains on.\n")).collect();
    fs::write(fixture.dir("verse.txt"), verse).expect("a text");
    for (run, path, held_out) in [
        ("text", "data.path=book.txt", "data.held_out=0.05"),
        ("packed", "data.path=book.jsonl.gz", "data.held_out=0.05"),
        ("checked", "data.path=book.txt", "data.held_out_path=verse.txt"),
    ] {
        let words = [path, held_out, "model.vocab=300", "--run", run, "--resume", "auto", "-q"];
        let cache = fixture.dir("cache");
        let go = |dir: &std::path::Path, words: &[&str]| {
            let output = flatout(dir, words).env("FLATOUT_CACHE", &cache).output().expect("an end");
            (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
        };
        let began = go(fixture.folder.path(), &small_train(&words));
        assert_eq!(began.0, Some(0), "{}", began.1);
        let there = fixture.dir(run);
        let there = there.to_str().expect("a path");
        let resumed = go(&elsewhere, &["resume", there, "train.steps=8", "-q"]);
        assert_eq!(resumed.0, Some(0), "{}", resumed.1);
        let judged = go(&elsewhere, &["eval", there, "-q"]);
        assert_eq!(judged.0, Some(0), "{}", judged.1);
        // The same arguments name other files there.
        let named = if run == "checked" { "`data.held_out_path` is " } else { "`data.path` is " };
        let asked =
            [path, held_out, "model.vocab=300", "train.steps=8", "--run", there, "--resume", "auto", "-q"];
        let other = go(&elsewhere, &small_train(&asked));
        assert!(other.0 == Some(2) && other.1.contains(named), "{other:?}");
        let again = go(fixture.folder.path(), &small_train(&asked));
        assert_eq!(again.0, Some(0), "{}", again.1);
    }
    // If the folder was moved with everything in it, the data is relative to the current folder.
    let moved = Fixture::new();
    fs::rename(fixture.dir("text"), moved.dir("text")).expect("a run that moves");
    fs::rename(fixture.dir("book.txt"), moved.dir("book.txt")).expect("data that moves");
    drop(fixture);
    let resumed = execute(moved.folder.path(), &["resume", "text", "train.steps=10", "-q"]);
    assert_eq!(resumed.code, Some(0), "{}", resumed.err);
}

#[test]
fn folds_and_sweeps_continue_as_a_whole() {
    let fixture = Fixture::new();
    let rows: String = (0..60)
        .map(|i| format!("number {i} about {},{}\n", ["rain", "soup"][i % 2], ["weather", "food"][i % 2]))
        .collect();
    fs::write(fixture.dir("texts.csv"), format!("text,topic\n{rows}")).expect("labelled texts");
    let folds = [
        "data.path=texts.csv",
        "data.task=classes",
        "data.label=topic",
        "model.head=classes",
        "model.classes=2",
        "model.vocab=300",
        "model.context=32",
        "train.folds=3",
        "train.steps=150",
        "eval.rows=1000",
        "eval.every=10",
        "--run",
        "folds",
        "-q",
    ];
    let mut child = fixture.start(&small_train(&folds));
    wait_until(&mut child, || fixture.events("folds/fold-2").len() > 5);
    send("-TERM", &child);
    assert_eq!(child.wait().expect("an end").code(), Some(3));
    let resumed = execute(&fixture.dir("folds"), &["resume", "."]);
    assert_eq!(resumed.code, Some(0), "{}", resumed.err);
    assert!(resumed.out.contains("over 3 folds") && resumed.err.contains("1 of 3 is done"), "{resumed:?}");
    assert!(fixture.dir("folds/folds.json").is_file());

    let swept = ["train.seed=1..3", "train.steps=400", "eval.rows=0", "--run", "sweep"];
    let swept: Vec<&str> = ["sweep", "tiny"].iter().chain(&SMALL).chain(&swept).copied().collect();
    let mut child = fixture.start(&swept);
    wait_until(&mut child, || fixture.events("sweep/seed=2").len() > 20);
    child.kill().expect("a living process");
    child.wait().expect("an end");
    fs::create_dir(fixture.dir("elsewhere")).expect("a folder");
    let refused = execute(&fixture.dir("elsewhere"), &["resume", "../sweep", "train.steps=500"]);
    refused.assert_refused(&["leave train.steps=500 out"]);
    let resumed = execute(&fixture.dir("elsewhere"), &["resume", "../sweep"]);
    assert_eq!(resumed.code, Some(0), "{}", resumed.err);
    assert!(resumed.err.contains("1 of 3 is done") && !resumed.err.contains("2 of 3 is done"), "{resumed:?}");
    let summary: Value =
        serde_json::from_slice(&fs::read(fixture.dir("sweep/sweep.json")).expect("a summary")).expect("JSON");
    let runs = summary["runs"].as_array().expect("runs");
    assert!(runs.len() == 3 && runs.iter().all(|run| run["state"] == "done"), "{summary}");
}
