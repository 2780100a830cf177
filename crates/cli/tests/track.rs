//! Trackers through the program: a run that a server should follow and that nobody answers, and bad input.

use std::fs;
use std::net::TcpListener;

use crate::program::{say, small_train};

#[test]
fn a_tracker_that_is_away_is_a_warning() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    let closed = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a port");
    let tracker = format!("track.mlflow=http://{closed}");
    let trained = say(dir, &small_train(&[&tracker, "--run", "run"]));
    assert_eq!(trained.code, Some(0), "{}", trained.err);
    let events = fs::read_to_string(dir.join("run/events.jsonl")).expect("events");
    let warnings: Vec<&str> = events.lines().filter(|line| line.contains("MLflow")).collect();
    let last = warnings.last().expect("a warning");
    assert!(last.contains("`flatout runs track run` sends them") && warnings.len() <= 2, "{warnings:?}");
    let kept = fs::read_to_string(dir.join("run/config.toml")).expect("a config");
    assert!(kept.contains("[track]") && kept.contains("mlflow = "), "{kept}");

    let said = say(dir, &["runs", "track", "run"]);
    assert!(said.code == Some(2) && said.err.contains("it does not answer"), "{said:?}");
    assert_eq!(said.err.lines().count(), 1, "{}", said.err);
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
        let said = say(dir, words);
        assert_eq!(said.code, Some(2), "{words:?}: {said:?}");
        assert!(said.err.contains(part) && said.err.lines().count() == 1, "{}", said.err);
        assert!(!said.err.contains("secret") && fs::read_dir(dir).expect("a folder").count() == 0);
    }
    assert_eq!(say(dir, &small_train(&["--run", "plain", "-q"])).code, Some(0));
    let said = say(dir, &["runs", "track", "plain"]);
    assert!(said.code == Some(2) && said.err.contains("names no tracker"), "{said:?}");
    let plain = fs::read_to_string(dir.join("plain/config.toml")).expect("a config");
    assert!(!plain.contains("track"), "a run that nobody follows says nothing of it");
    assert!(!dir.join("plain/mlflow.json").exists());
}
