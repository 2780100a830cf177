//! Examples of unequal length through the program: plan, training, report, evaluation and measurement.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::program::{CommandOutput, SMALL, execute, small_train};

/// Synthetic examples with a mean length of 40 and at most 128 tokens.
const EXAMPLES: [&str; 4] = ["model.context=128", "data.mean_tokens=40", "train.batch=16", "eval.rows=24"];

fn ok(dir: &Path, words: &[&str]) -> CommandOutput {
    let result = execute(dir, words);
    assert_eq!(result.code, Some(0), "{words:?}: {}", result.err);
    result
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).expect("an object")
}

#[test]
fn examples_are_planned_trained_reported_and_evaluated() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    let train = small_train(&[&EXAMPLES[..], &["--run", "run", "backend=cpu"]].concat());
    let result = ok(dir, &train);
    let line = |name: &str| {
        let found = result.err.lines().find(|line| line.starts_with(name));
        found.unwrap_or_else(|| panic!("{name} in {}", result.err)).to_string()
    };
    let lengths = line("lengths ");
    assert!(lengths.contains("tokens, ") && lengths.contains("% padding instead of 6"), "{lengths}");
    assert!(line("train ").contains("6 steps of 16 examples (about "), "{}", result.err);
    assert!(line("data ").contains(" examples, 24 held out"), "{}", result.err);
    assert!(line("auto ").contains("packing=on length_buckets=within updates"), "{}", result.err);

    let log = fs::read_to_string(dir.join("run/events.jsonl")).expect("a log");
    let events: Vec<Value> = log.lines().map(json).collect();
    let start = events.iter().find(|event| event["event"] == "start").expect("a start");
    let words = start["data"]["layout"].as_str().expect("words");
    assert!(lengths.ends_with(words), "{lengths}: {words}");
    let steps: Vec<&Value> = events.iter().filter(|event| event["event"] == "step").collect();
    assert!(steps.iter().all(|step| (0.0..0.5).contains(&step["padding"].as_f64().expect("a share"))));
    assert_eq!(steps[5]["samples"], 96);
    let tokens = steps[5]["tokens"].as_f64().expect("tokens") / 96.0;
    assert!((30.0..50.0).contains(&tokens), "{tokens} tokens an example");
    let report = fs::read_to_string(dir.join("run/report.md")).expect("a report");
    assert!(report.contains(&format!("16 examples: {words}")), "{report}");

    // `eval`, which computes single rows, has the same loss as plans with packing.
    let evaluated = json(&ok(dir, &["eval", "run", "--json"]).out)["loss"].as_f64().expect("a loss");
    let last = events.iter().rfind(|event| event["event"] == "eval").expect("an evaluation");
    let trained = last["loss"].as_f64().expect("a loss");
    assert!((evaluated / trained - 1.0).abs() < 1e-5, "{evaluated} {trained}");

    let words: Vec<&str> =
        ["plan", "tiny", "--json"].iter().chain(&SMALL).chain(&EXAMPLES).copied().collect();
    let plan = json(&ok(dir, &words).out);
    assert_eq!(plan["arena_bytes"], start["arena_bytes"], "planned to the byte");
    let tokens = plan["layout"]["tokens"].as_array().expect("plans");
    assert!((2..=4).contains(&tokens.len()) && tokens.iter().all(|n| n.as_u64().expect("tokens") % 128 == 0));
}

#[test]
fn a_plan_reads_the_lengths_of_files_where_it_is_asked_to() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    let rows: String = (0..60)
        .map(|n| {
            let word = "lamp ".repeat(1 + n % 7);
            format!("{{\"messages\":[{{\"role\":\"user\",\"content\":\"{n}\"}},{{\"role\":\"assistant\",\"content\":\"{word}\"}}]}}\n")
        })
        .collect();
    fs::write(dir.join("chat.jsonl"), rows).expect("written");
    let data =
        ["data.task=chat", "data.path=chat.jsonl", "model.context=256", "train.batch=16", "backend=cpu"];
    let train = small_train(&[&data[..], &["--run", "run"]].concat());
    ok(dir, &train);
    let log = fs::read_to_string(dir.join("run/events.jsonl")).expect("a log");
    let start = json(log.lines().find(|line| line.contains("\"event\":\"start\"")).expect("a start"));

    let plan = |more: &[&'static str]| -> CommandOutput {
        let words: Vec<&str> =
            ["plan", "tiny"].iter().chain(&SMALL).chain(&data).chain(more).copied().collect();
        ok(dir, &words)
    };
    let (read, unread) = (json(&plan(&["--read-data", "--json"]).out), json(&plan(&["--json"]).out));
    assert_eq!(read["arena_bytes"], start["arena_bytes"], "planned to the byte");
    assert!(unread["arena_bytes"].as_u64() > read["arena_bytes"].as_u64(), "{}", unread["arena_bytes"]);
    let line =
        |text: &str| text.lines().find(|line| line.starts_with("lengths ")).expect("a line").to_string();
    assert_eq!(
        line(&plan(&[]).out),
        "lengths          unknown: every example counts 256 tokens; --read-data reads the data first"
    );
    assert!(line(&plan(&["--read-data"]).out).contains("padding instead of"));
}

#[test]
fn the_gain_of_packing_can_be_measured() {
    let folder = tempfile::tempdir().expect("a folder");
    let of = |words: &[&'static str]| -> Vec<&str> {
        words.iter().chain(&SMALL).chain(&EXAMPLES).chain(&["backend=cpu"]).copied().collect()
    };
    let profile = of(&["profile", "tiny", "--steps", "2", "--json"]);
    let report = json(&ok(folder.path(), &profile).out);
    assert_eq!(report["data"], "examples of the synthetic language");
    let tokens = report["tokens_per_update"].as_f64().expect("tokens");
    assert!((500.0..800.0).contains(&tokens), "sixteen examples of forty tokens: {tokens}");
    let ablate =
        of(&["ablate", "tiny", "--only", "packing", "--repeats", "1", "--steps", "2", "--fresh", "--json"]);
    let report = json(&ok(folder.path(), &ablate).out);
    let rows = report["rows"].as_array().expect("rows");
    assert!(rows.iter().any(|row| row.to_string().contains("packing=off")), "{rows:?}");
}
