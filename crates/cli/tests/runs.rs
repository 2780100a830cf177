//! `runs` over real runs: the state of each, and comparisons of several.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use flatout_train::run::events;
use serde_json::Value;

use crate::program::{CommandOutput, SMALL, execute, flatout, refused, small_train};

fn ok(dir: &Path, words: &[&str]) -> CommandOutput {
    let result = execute(dir, words);
    assert_eq!(result.code, Some(0), "{words:?}: {}", result.err);
    result
}

fn object(result: &CommandOutput) -> Value {
    serde_json::from_str(&result.out).expect("an object")
}

/// Starts a run that trains until it is ended, and waits for some steps.
fn start(dir: &Path, run: &str) -> Child {
    let words = small_train(&["train.steps=1000000", "checkpoint.every=0", "--run", run, "-q"]);
    let mut child = flatout(dir, &words).stdout(Stdio::null()).spawn().expect("the program starts");
    let log = dir.join(run).join("events.jsonl");
    let born = Instant::now();
    while events::read(&log).map_or(0, |events| events::steps(&events).len()) < 3 {
        assert!(child.try_wait().expect("a child").is_none(), "the run ended by itself");
        assert!(born.elapsed() < Duration::from_secs(60), "the run makes no progress");
        std::thread::yield_now();
    }
    child
}

#[test]
fn every_run_is_listed_with_its_state() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    assert!(ok(dir, &["runs"]).out.contains("there are no runs in runs"));
    assert_eq!(object(&ok(dir, &["runs", "--json"])), Value::Array(vec![]));

    ok(dir, &small_train(&["-q"]));
    let mut crashed = start(dir, "runs/crashed");
    crashed.kill().expect("a living process");
    crashed.wait().expect("an end");
    let mut stopped = start(dir, "runs/stopped");
    assert!(
        Command::new("kill").args(["-TERM", &stopped.id().to_string()]).status().expect("kill").success()
    );
    assert_eq!(stopped.wait().expect("an end").code(), Some(3));
    assert!(dir.join("runs/stopped/report.md").is_file(), "a run that is stopped has its report");
    let mut running = start(dir, "runs/running");
    fs::create_dir_all(dir.join("runs/broken")).expect("a folder");
    fs::write(dir.join("runs/broken/config.toml"), "nonsense").expect("a file");

    let result = ok(dir, &["runs", "--json"]);
    assert!(result.err.contains("runs/broken is left out: "), "{}", result.err);
    let listed = object(&result);
    let names = ["tiny-1", "crashed", "stopped", "running"];
    let states = ["done", "crashed", "stopped", "running"];
    for (i, (name, state)) in names.iter().zip(states).enumerate() {
        let run = &listed[i];
        assert_eq!((&run["name"], &run["state"]), (&Value::from(*name), &Value::from(state)), "oldest first");
        assert_eq!(run["recipe"], "tiny");
        assert!(run["step"].as_u64().expect("a step") >= 3 && run["loss"].as_f64().expect("a loss") > 0.0);
        assert!(run["tokens_per_second"].as_f64().expect("a rate") > 0.0);
        assert!(run["started"].as_f64().expect("a time") > 1.7e9);
    }
    assert_eq!((&listed[0]["step"], &listed[0]["steps"]), (&6.into(), &6.into()));
    assert!(listed[0]["eval_loss"].is_number());
    assert_eq!(listed[3]["steps"], 1_000_000);

    let table = ok(dir, &["runs"]).out;
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(lines.len(), 5, "{table}");
    assert!(lines[0].starts_with("run ") && lines[0].ends_with("started"), "{table}");
    assert!(
        lines[1].contains("tiny-1") && lines[1].contains("  done ") && lines[1].contains(" 6/6 "),
        "{table}"
    );
    assert!(lines[4].contains("/1,000,000") && lines[4].ends_with(" ago"), "{table}");
    assert_eq!(ok(dir, &["runs", "runs/tiny-1"]).out.lines().count(), 2, "a run is a list of itself");

    running.kill().expect("a living process");
    running.wait().expect("an end");
    assert_eq!(object(&ok(dir, &["runs", "runs/running", "--json"]))[0]["state"], "crashed");
}

#[test]
fn runs_are_compared_on_the_same_axes() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    ok(dir, &[&["train", "tiny"], &SMALL[..], &["-q"]].concat());
    ok(dir, &[&["train", "tiny"], &SMALL[..], &["lr=1e-3", "train.steps=9", "fuse.qkv=off", "-q"]].concat());
    let result = ok(dir, &["runs", "compare", "tiny-1", "runs/tiny-2"]);
    let row = |name: &str| {
        let line = result
            .out
            .lines()
            .find(|line| line.starts_with(name))
            .unwrap_or_else(|| panic!("{name}: {}", result.out));
        line[name.len()..].split_whitespace().map(String::from).collect::<Vec<_>>()
    };
    assert_eq!(row(""), ["tiny-1", "tiny-2"]);
    assert_eq!(row("step "), ["6", "9"]);
    assert_eq!(row("state"), ["done", "done"]);
    assert_eq!(row("tokens "), ["384", "576"]);
    assert_eq!(row("optimizer.lr"), ["0.005", "0.001"]);
    assert_eq!(row("train.steps"), ["6", "9"]);
    assert_eq!(row("switches.fuse.qkv"), ["\"on\"", "\"off\""]);
    assert!(!result.out.contains("model.width"), "only what differs: {}", result.out);
    assert!(result.out.contains("a tiny-1   b tiny-2") && result.out.contains('└'), "{}", result.out);
    assert!(result.err.contains("compare.svg"), "{}", result.err);
    let svg = fs::read_to_string(dir.join("compare.svg")).expect("a plot");
    assert!(svg.contains(">tiny-1</text>") && svg.contains(">tiny-2</text>") && svg.contains("line c1"));

    let words = ["runs", "compare", "tiny-1", "tiny-2", "--by", "tokens", "--svg", "x.svg", "--json"];
    let compared = object(&ok(dir, &words));
    assert_eq!((&compared["by"], &compared["svg"]), (&"tokens".into(), &"x.svg".into()));
    assert_eq!(compared["differs"]["optimizer.lr"], serde_json::json!(["0.005", "0.001"]));
    assert_eq!((&compared["runs"][1]["name"], &compared["runs"][1]["step"]), (&"tiny-2".into(), &9.into()));
    assert!(
        compared["runs"][0]["smoothed_loss"].is_number() && compared["runs"][0]["memory_bytes"].is_number()
    );
    assert!(fs::read_to_string(dir.join("x.svg")).expect("a plot").contains(">tokens</text>"));
    ok(dir, &["runs", "compare", "tiny-1", "--by", "time", "--log"]);
}

#[test]
fn runs_of_sweeps_classes_and_images_are_listed_with_their_figures() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    ok(dir, &[&["sweep", "tiny"], &SMALL[..], &["lr=1e-3,3e-3", "-q"]].concat());
    let small =
        ["model.width=32", "model.layers=1", "data.synthetic_rows=64", "train.batch=16", "eval.rows=8"];
    let classes = ["train", "text-classify", "--with", "small", "train.steps=4", "-q"];
    ok(dir, &[&classes[..], &small, &["data.max_tokens=32"]].concat());
    let images = ["train", "vision-tiny", "train.steps=4", "eval.every=2"];
    let result = ok(dir, &[&images[..], &small, &["model.heads=2"]].concat());
    assert!(
        result.err.contains("4 steps of 16 images, 16 at once") && result.err.contains(" images/s"),
        "{}",
        result.err
    );
    assert!(!result.err.contains("tok/s"), "images have no rate of tokens: {}", result.err);
    assert!(
        result.err.contains("optim    adamw, fused: lr ") && result.err.contains("weight decay "),
        "{}",
        result.err
    );
    assert!(result.err.contains("loader   "), "{}", result.err);

    let listed = object(&ok(dir, &["runs", "--json"]));
    let names: Vec<&str> =
        listed.as_array().expect("a list").iter().map(|run| run["name"].as_str().expect("a name")).collect();
    assert_eq!(names.len(), 4, "{names:?}");
    assert!(names[..2].iter().all(|name| name.starts_with("tiny-sweep-1/lr=")), "{names:?}");
    assert_eq!(names[2..], ["text-classify-1", "vision-tiny-1"]);
    assert_eq!((&listed[2]["metric"], &listed[0]["metric"]), (&"macro_f1".into(), &Value::Null));
    assert!(listed[2]["metric_value"].is_number() && listed[3]["metric"] == "accuracy", "{listed}");
    let table = ok(dir, &["runs"]).out;
    let lines: Vec<&str> = table.lines().collect();
    assert!(lines[0].contains("metric") && lines[1].contains(" tok/s"), "{table}");
    assert!(lines[3].contains("macro_f1 0.") || lines[3].contains("macro_f1 1."), "{table}");
    assert!(lines[4].contains("accuracy ") && lines[4].contains(" images/s"), "{table}");
    let compared = ok(dir, &["runs", "compare", "vision-tiny-1"]).out;
    assert!(compared.contains("images a second") && !compared.contains("tokens"), "{compared}");
    let report = fs::read_to_string(dir.join("runs/vision-tiny-1/report.md")).expect("a report");
    for part in [
        "predicted triangle",
        "| optimiser | adamw, fused: lr",
        "| loader | ",
        "images a second",
        " in micro-batches of 16 |",
    ] {
        assert!(report.contains(part), "{part}: {report}");
    }
    assert!(!report.replace("`visual_tokens`", "").contains("tokens"), "{report}");
}

#[test]
fn a_run_is_found_by_its_name() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    ok(dir, &small_train(&["-q"]));
    ok(dir, &["resume", "tiny-1", "train.steps=8", "-q"]);
    let text = |run: &str| ok(dir, &["generate", run, "--max-tokens", "3"]).out;
    assert_eq!(text("tiny-1"), text("runs/tiny-1"));
    assert_eq!(text("tiny-1@8"), text("runs/tiny-1@8"));
    assert!(ok(dir, &["eval", "tiny-1"]).out.starts_with("loss "));
    ok(dir, &["export", "tiny-1", "--to", "out"]);
    let result = execute(dir, &["export", "tiny-1", "--to", "tiny.gguf"]);
    assert_eq!(result.code, Some(2));
    assert!(
        result.err.contains("tiny.gguf is the name of a gguf file") && !dir.join("tiny.gguf").exists(),
        "{}",
        result.err
    );
    assert!(execute(dir, &["resume", "tiny-2"]).err.contains("there is no run in tiny-2"));
}

#[test]
fn comparisons_that_fail_are_one_sentence() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    ok(dir, &small_train(&["-q"]));
    for (words, sentence) in [
        (&["runs", "compare", "none"][..], "there is no run in none"),
        (&["runs", "compare", "tiny-1", "--svg", "no/where.svg"], "no/where.svg cannot be written"),
        (&["runs", "none"], "there is no run in none; `flatout runs` lists the runs"),
        (&["runs", "tiny-2"], "there is no run in tiny-2; did you mean runs/tiny-1?"),
        (&["eval", "runs/tniy-1"], "did you mean runs/tiny-1?"),
    ] {
        refused(dir, words, sentence);
    }
    assert_eq!(execute(dir, &["runs", "compare"]).code, Some(2));
    assert_eq!(execute(dir, &["runs", "compare", "tiny-1", "--by", "moon"]).code, Some(2));
}
