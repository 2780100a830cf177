//! Trackers through the program: a run whose MLflow server does not answer, and bad input.

use std::fs;
use std::net::TcpListener;

use crate::program::{execute, small_train};

#[test]
fn an_unreachable_tracker_is_a_warning() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    let closed = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a port");
    let tracker = format!("track.mlflow=http://{closed}");
    let trained = execute(dir, &small_train(&[&tracker, "--run", "run"]));
    assert_eq!(trained.code, Some(0), "{}", trained.err);
    let events = fs::read_to_string(dir.join("run/events.jsonl")).expect("events");
    let warnings: Vec<&str> = events.lines().filter(|line| line.contains("MLflow")).collect();
    let last = warnings.last().expect("a warning");
    assert!(last.contains("`flatout runs track run` sends them") && warnings.len() <= 2, "{warnings:?}");
    let kept = fs::read_to_string(dir.join("run/config.toml")).expect("a config");
    assert!(kept.contains("[track]") && kept.contains("mlflow = "), "{kept}");

    let result = execute(dir, &["runs", "track", "run"]);
    result.assert_refused(&["it does not answer"]);
    assert_eq!(result.err.lines().count(), 1, "{}", result.err);
}

#[test]
fn bad_addresses_are_a_sentence_before_any_work() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    for (words, part) in [
        (&small_train(&["track.mlflow=localhost:5000"])[..], "not the address of an MLflow server"),
        (&small_train(&["track.mlflow=http://me:secret@host"]), "set MLFLOW_TRACKING_USERNAME"),
        (&["runs", "track", "nowhere"], "there is no run in nowhere"),
    ] {
        let result = execute(dir, words);
        assert_eq!(result.code, Some(2), "{words:?}: {result:?}");
        assert!(result.err.contains(part) && result.err.lines().count() == 1, "{}", result.err);
        assert!(!result.err.contains("secret") && fs::read_dir(dir).expect("a folder").count() == 0);
    }
    assert_eq!(execute(dir, &small_train(&["--run", "plain", "-q"])).code, Some(0));
    let result = execute(dir, &["runs", "track", "plain"]);
    result.assert_refused(&["names no tracker"]);
    let plain = fs::read_to_string(dir.join("plain/config.toml")).expect("a config");
    assert!(!plain.contains("track"), "a run without a tracker does not mention one");
    assert!(!dir.join("plain/mlflow.json").exists());
}
