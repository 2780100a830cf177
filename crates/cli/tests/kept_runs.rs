//! Runs that earlier versions wrote, resumed by this version: every kind of task, types of state, adapters.

use std::fs;
use std::path::Path;

use crate::fixture::Fixture;
use crate::program::execute;

/// The largest relative difference of losses, for rounding in another processor's vector units.
const BOUND: f64 = 1e-5;

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a folder");
    for entry in fs::read_dir(from).expect("a kept run").map(|entry| entry.expect("an entry")) {
        let (path, to) = (entry.path(), to.join(entry.file_name()));
        match path.is_dir() {
            true => copy(&path, &to),
            false => drop(fs::copy(&path, &to).expect("a copy")),
        }
    }
}

#[test]
fn runs_of_earlier_versions_resume_with_the_same_losses() {
    let kept = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/runs");
    let mut seen = 0;
    for entry in fs::read_dir(kept).expect("kept runs").map(|entry| entry.expect("an entry")) {
        let name = entry.file_name().into_string().expect("a name");
        let fixture = Fixture::new();
        copy(&entry.path(), &fixture.dir("run"));
        let result = execute(fixture.folder.path(), &["resume", "run", "-q"]);
        assert_eq!(result.code, Some(0), "{name}: {}", result.err);
        let text = fs::read_to_string(entry.path().join("losses.json")).expect("the losses it had");
        let expected: Vec<(String, u64, f64)> =
            serde_json::from_str(&text).expect("events, steps and losses");
        let log = fs::read_to_string(fixture.dir("run").join("events.jsonl")).expect("a log");
        let events: Vec<serde_json::Value> =
            log.lines().map(|line| serde_json::from_str(line).expect("an event")).collect();
        for (event, step, loss) in &expected {
            let is_it = |e: &&serde_json::Value| e["event"] == event.as_str() && e["step"] == *step;
            let found = events.iter().rfind(is_it).and_then(|e| e["loss"].as_f64());
            let found = found.unwrap_or_else(|| panic!("{name}: no {event} of step {step}"));
            let distance = (found - loss).abs() / loss.abs();
            assert!(distance < BOUND, "{name}: {event} {step}: {found} where it was {loss}");
        }
        assert_eq!(expected.len(), 11, "{name}: ten steps and an evaluation");
        seen += 1;
    }
    assert_eq!(seen, 8);
}
