//! Fuzzes logs: reading damaged ones ends within bounds, and a whole line after damaged ones is never lost.

use std::fs::File;
use std::io::Write;

use flatout_fuzz::{Limits, feed};
use flatout_watch::follow::Follower;
use flatout_watch::glance::Glance;
use serde_json::json;

use crate::client::{start, step};

#[test]
fn logs() {
    let lines = [
        start(9),
        step(1, 5.5),
        json!({ "event": "eval", "step": 1, "loss": 5.0, "metrics": { "accuracy": 0.5, "confusion": [[1, 2], [3, 4]], "mean": { "f1": 0.5 } } }),
        json!({ "event": "warning", "message": "é\u{0}\u{2028}" }),
        json!({ "event": "spike", "step": 1, "loss": 9.0, "median": 1.0, "deviations": 8.0 }),
        json!({ "event": "resume", "step": 1 }),
        json!({ "event": "step", "step": 2, "loss": null, "gpu": { "power_watts": 600.0, "throttled": ["power"] } }),
        json!({ "event": "end", "status": "done", "steps": 2, "loss": 5.5 }),
    ];
    let seed: String = lines.iter().map(|line| format!("{line}\n")).collect();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("events.jsonl");
    feed("logs", &[seed.into_bytes()], Limits::default(), |input| {
        let mut file = File::create(&path).unwrap();
        file.write_all(input).unwrap();
        let file = File::open(&path).unwrap();
        Glance::at(&file, None).unwrap();
        let mut follower = Follower::default();
        while follower.advance(&file, 1 << 16).unwrap() {}
        let _ =
            (follower.record.object(), follower.record.steps.since(0), follower.record.evaluations.since(0));
        // A whole line after the damaged input is read.
        let last = step(u64::from(u32::MAX), 1.25);
        writeln!(File::options().append(true).open(&path).unwrap(), "\n{last}\n").unwrap();
        while follower.advance(&file, 1 << 16).unwrap() {}
        assert_eq!(follower.record.steps.newest("loss"), Some(1.25));
    });
}
