//! Load tests: a thousand runs, ten thousand lines per second, long logs, pages that do not read.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::time::{Duration, Instant};

use flatout_watch::live::MOST_SHOWN;
use serde_json::Value;

use crate::client::{Fixture, PATIENCE, append, start, step};

#[test]
fn a_thousand_runs_are_listed() {
    let fixture = Fixture::new();
    for index in 0..1000 {
        append(&fixture.run(&format!("run-{index}")), &[start(5), step(1, index as f64)]);
    }
    let names: Vec<String> = (0..100).map(|index| format!("run-{index}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let began = Instant::now();
    let mut live = fixture.live(&names);
    let (mut known, mut shown) = (BTreeSet::new(), BTreeSet::new());
    // Curves are sent for as many runs as a page may request.
    while known.len() < 1000 || shown.len() < MOST_SHOWN {
        assert!(began.elapsed() < PATIENCE, "{} of the list, {} curves", known.len(), shown.len());
        let (kind, response) = live.next();
        let id = |run: &Value| run["id"].as_str().unwrap().to_string();
        match kind.as_str() {
            "run" => drop(shown.insert(id(&response))),
            _ => known
                .extend(response["runs"].as_array().unwrap().iter().filter(|run| run["step"] == 1).map(id)),
        }
    }
    assert_eq!(shown.len(), MOST_SHOWN);
}

#[test]
fn ten_thousand_lines_per_second_are_followed() {
    let fixture = Fixture::new();
    let run = fixture.run("fast");
    append(&run, &[start(100_000)]);
    let mut live = fixture.live(&["fast"]);
    live.until("runs", |_| true);
    let log = run.join("events.jsonl");
    let writer = std::thread::spawn(move || {
        let mut file = fs::OpenOptions::new().append(true).open(log).unwrap();
        let began = Instant::now();
        for tenth in 0..20u64 {
            let lines: String = (1..=1000).map(|n| format!("{}\n", step(1000 * tenth + n, 1.0))).collect();
            file.write_all(lines.as_bytes()).unwrap();
            std::thread::sleep(
                (began + Duration::from_millis(100 * (tenth + 1))).saturating_duration_since(Instant::now()),
            );
        }
    });
    let began = Instant::now();
    let mut messages = 0;
    live.until("run", |run| {
        messages += 1;
        run["steps"]["step"].as_array().unwrap().last().is_some_and(|last| *last == 20_000)
    });
    writer.join().unwrap();
    assert!(began.elapsed() < PATIENCE);
    assert!(messages < 200, "{messages} messages for 20,000 lines: a page is sent states, not lines");
}

#[test]
fn a_long_log_is_listed_at_once_and_read_in_bounded_memory() {
    let fixture = Fixture::new();
    let run = fixture.run("long");
    const STEPS: u64 = 300_000;
    let mut file = std::io::BufWriter::new(fs::File::create(run.join("events.jsonl")).unwrap());
    writeln!(file, "{}", start(STEPS)).unwrap();
    for n in 1..=STEPS {
        let loss = if n == 123_456 { 999.0 } else { 2.0 };
        writeln!(
            file,
            "{{\"event\":\"step\",\"step\":{n},\"loss\":{loss},\"tokens\":{},\"time\":{}}}",
            10 * n,
            1000 + n
        )
        .unwrap();
    }
    drop(file);
    let mut live = fixture.live(&["long"]);
    let (kind, list) = live.next();
    assert_eq!(
        (kind.as_str(), &list["runs"][0]["step"]),
        ("runs", &STEPS.into()),
        "the newest step comes before the log is read"
    );
    live.until("run", |run| run["read"] == 1.0);
    // A page that is opened later is sent the downsampled curve, which still has the spike.
    let late = fixture.live(&["long"]).until("run", |run| run["read"] == 1.0);
    let most = late["steps"]["curves"]["loss"]["most"].as_array().unwrap();
    assert!(most.len() <= 2048, "{}", most.len());
    assert!(most.iter().any(|value| *value == 999.0));
    assert_eq!(late["steps"]["step"].as_array().unwrap().last().unwrap(), STEPS);
}

#[test]
fn pages_that_do_not_read_do_not_delay_others() {
    let fixture = Fixture::new();
    let run = fixture.run("a");
    append(&run, &[start(5), step(1, 2.5)]);
    let asleep: Vec<_> = (0..10).map(|_| fixture.live(&["a"])).collect();
    let mut awake = fixture.live(&["a"]);
    for n in 2..=30 {
        append(&run, &[step(n, 2.0)]);
        awake.until("run", |run| {
            run["steps"]["step"].as_array().unwrap().last().is_some_and(|last| *last == n)
        });
    }
    drop(asleep);
    append(&run, &[step(31, 2.0)]);
    awake.until("run", |run| run["steps"]["step"].as_array().unwrap().last().is_some_and(|last| *last == 31));
}
