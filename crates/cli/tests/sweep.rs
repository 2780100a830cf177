//! `sweep`: several runs of a recipe, through the program.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::fixture::{Fixture, send, wait_until};
use crate::program::{CommandOutput, SMALL, execute};

fn words<'a>(words: &[&'a str]) -> Vec<&'a str> {
    ["sweep", "tiny"]
        .iter()
        .chain(&SMALL)
        .chain(&["eval.every=3", "backend=cpu"])
        .chain(words)
        .copied()
        .collect()
}

fn done(dir: &Path, own: &[&str]) -> CommandOutput {
    let result = execute(dir, &words(own));
    assert_eq!(result.code, Some(0), "{own:?}: {}", result.err);
    result
}

fn summary(dir: &Path) -> Value {
    serde_json::from_slice(&fs::read(dir.join("sweep.json")).expect("a summary")).expect("JSON")
}

fn names(summary: &Value) -> Vec<String> {
    let runs = summary["runs"].as_array().expect("runs");
    runs.iter().map(|run| run["name"].as_str().expect("a name").to_string()).collect()
}

#[test]
fn a_sweep_trains_compares_and_is_extended() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    let result = done(dir, &["lr=1e-4,1e-2", "train.seed=1..2"]);
    let sweep = dir.join("runs/tiny-sweep-1");
    let came = summary(&sweep);
    let first = names(&came);
    assert_eq!((first.len(), &came["goal"], &came["by"]), (4, &"loss".into(), &"grid".into()));
    assert!(
        first[..2].iter().all(|name| name.starts_with("lr=1e-2_seed=")),
        "the higher rate wins: {first:?}"
    );
    let best: Vec<f64> =
        came["runs"].as_array().unwrap().iter().map(|run| run["best"].as_f64().unwrap()).collect();
    assert!(best.is_sorted(), "{best:?}");
    assert!(
        came["runs"].as_array().unwrap().iter().all(|run| run["state"] == "done" && run["best_step"] == 6)
    );
    assert_eq!(came["runs"][0]["values"]["optimizer.lr"], "1e-2");
    // Means over seeds: a row per learning rate, whose mean lies between its runs.
    let means = came["means"].as_array().expect("means");
    assert_eq!((means.len(), means[0]["values"]["optimizer.lr"].as_str()), (2, Some("1e-2")), "{came}");
    assert!((means[0]["mean"].as_f64().unwrap() - (best[0] + best[1]) / 2.0).abs() < 1e-9, "{came}");
    assert!(result.out.contains("mean loss") && result.out.contains("seeds"), "{}", result.out);
    // The table has keys, then results, the best first.
    let table: Vec<&str> = result.out.lines().skip_while(|line| !line.contains("best loss")).collect();
    assert!(table[0].contains("optimizer.lr") && table[0].contains("train.seed"), "{}", result.out);
    assert!(table[1].contains("1e-2") && table[4].contains("1e-4"), "{}", result.out);
    assert!(result.out.contains(&format!("best     runs/tiny-sweep-1/{}", first[0])), "{}", result.out);

    // More values are added to the same folder, and finished runs are kept.
    let log = |name: &str| fs::read_to_string(sweep.join(name).join("events.jsonl")).expect("a log");
    let before = log(&first[0]);
    let named = ["--run", "runs/tiny-sweep-1"];
    let wider = ["lr=1e-4,1e-2,5e-2", "train.seed=1..2", named[0], named[1]];
    let refused = execute(dir, &words(&wider));
    refused.assert_refused(&["holds a sweep already"]);
    let result = done(dir, &[&wider[..], &["--resume", "auto"]].concat());
    assert_eq!(result.err.matches(" is done: ").count(), 4, "{}", result.err);
    assert_eq!(names(&summary(&sweep)).len(), 6);
    assert_eq!(log(&first[0]), before);
    // The same values with another batch are refused.
    let other = ["lr=1e-4,1e-2", "train.seed=1..2", "train.batch=2", "--resume", "auto", named[0], named[1]];
    let refused = execute(dir, &words(&other));
    assert_eq!(refused.code, Some(2), "{refused:?}");
    assert!(
        refused.err.contains("optimizer.lr=1e-4 train.seed=1: the run that is there was begun with other")
    );
}

#[test]
fn a_dry_run_lists_runs_with_their_memory() {
    let folder = tempfile::tempdir().expect("a folder");
    let result = done(
        folder.path(),
        &["model.layers=2,4", "lr=1e-4..1e-2", "--by", "random", "--runs", "5", "--dry-run", "--json"],
    );
    let listed: Value = serde_json::from_str(&result.out).expect("JSON");
    let runs = listed["runs"].as_array().expect("runs");
    assert_eq!(runs.len(), 5);
    let of = |layers: &str| {
        let run = runs.iter().find(|run| run["values"]["model.layers"] == layers).expect("both are drawn");
        run["arena_bytes"].as_u64().expect("bytes")
    };
    assert!(of("4") > of("2"));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is made");
}

#[test]
fn a_wrong_combination_is_named_before_anything_is_made() {
    let folder = tempfile::tempdir().expect("a folder");
    for (own, part) in [
        (&["model.heads=2,3"][..], "model.heads=3: `model.heads` = 3 does not divide"),
        (&["lr=1e-3,fast"], "optimizer.lr=fast: `optimizer.lr` must be a number"),
        (&["lr=1e-3"], "nothing to sweep over"),
        (&["lr=1e-3,1e-2", "--goal", "f1"], "`eval.metric`"),
        (&["backend=cpu,cuda"], "give it one value"),
        (&["lr=1e-3,1e-2", "--run", "none", "--resume", "must"], "there is no sweep in none"),
    ] {
        let result = execute(folder.path(), &words(own));
        assert_eq!(result.code, Some(2), "{own:?}: {result:?}");
        assert!(result.err.starts_with("flatout: ") && result.err.contains(part), "{own:?}: {}", result.err);
        assert_eq!(result.err.lines().count(), 1, "{}", result.err);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is made");
    }
}

#[test]
fn a_run_that_fails_does_not_end_the_others() {
    let folder = tempfile::tempdir().expect("a folder");
    let own = ["lr=1e30,1e-3", "clip=0", "train.steps=12", "train.on_nonfinite=stop", "--run", "s"];
    let result = execute(folder.path(), &words(&own));
    assert_eq!(result.code, Some(1), "{result:?}");
    let came = summary(&folder.path().join("s"));
    assert_eq!(names(&came), ["lr=1e-3", "lr=1e30"]);
    assert!(came["runs"][1]["why"].is_string(), "{came}");
}

#[test]
fn a_sweep_that_is_stopped_continues() {
    let fixture = Fixture::new();
    let own = ["train.seed=1..2", "train.steps=400", "eval.rows=0", "--run", "s", "--resume", "auto"];
    let mut child = fixture.start(&words(&own));
    wait_until(&mut child, || fixture.events("s/seed=2").len() > 20);
    send("-TERM", &child);
    assert_eq!(child.wait().expect("an end").code(), Some(3));
    assert_eq!(summary(&fixture.dir("s"))["runs"].as_array().unwrap().len(), 2);
    let result = done(fixture.folder.path(), &own);
    assert!(
        result.err.contains("1 of 2 is done") && !result.err.contains("2 of 2 is done"),
        "{}",
        result.err
    );
    let came = summary(&fixture.dir("s"));
    assert!(
        came["runs"].as_array().unwrap().iter().all(|run| run["state"] == "done" && run["step"] == 400),
        "{came}"
    );
    assert_eq!(fixture.losses("s/seed=2").len(), 400);
}
