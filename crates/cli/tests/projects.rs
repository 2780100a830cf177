//! The projects of `examples/`: every command of their pages, in order and as it is written there, and what it must print and learn.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::program::say;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Copies files and folders, without runs that somebody left there.
fn copy(from: &Path, to: &Path) {
    if from.is_file() {
        fs::copy(from, to).expect("a copy");
        return;
    }
    fs::create_dir_all(to).expect("a folder");
    for entry in fs::read_dir(from).expect("a folder").map(|entry| entry.expect("an entry")) {
        if entry.file_name() != "runs" {
            copy(&entry.path(), &to.join(entry.file_name()));
        }
    }
}

/// A fenced block of a page that names no language: commands, or what the last one printed.
struct Block<'a> {
    lines: Vec<&'a str>,
    /// Whether it begins where the block before it ends.
    is_output: bool,
}

fn blocks(page: &str) -> Vec<Block<'_>> {
    let mut found = vec![];
    let mut open: Option<(&str, Block)> = None;
    let mut before = "";
    for line in page.lines() {
        match (line.strip_prefix("```"), &mut open) {
            (Some(language), None) => {
                open = Some((language, Block { lines: vec![], is_output: before == "```" }))
            }
            (Some(_), Some(_)) => found.extend(open.take().filter(|(language, _)| language.is_empty())),
            (None, Some((_, block))) => block.lines.push(line),
            (None, None) => {}
        }
        before = line;
    }
    found.into_iter().map(|(_, block)| block).collect()
}

/// A command line as a shell takes it apart: at spaces, quotes aside.
fn words(line: &str) -> Vec<&str> {
    let parts = line.split('"').enumerate();
    parts
        .flat_map(|(at, part)| if at % 2 == 1 { vec![part] } else { part.split_whitespace().collect() })
        .collect()
}

/// Runs the commands of a page in a copy of its project, and compares what the page says that they print.
fn follow(project: &str) -> tempfile::TempDir {
    let scratch = tempfile::tempdir().expect("a folder");
    for name in ["docs", "README.md", "ARCHITECTURE.md"] {
        copy(&root().join(name), &scratch.path().join(name));
    }
    let folder = scratch.path().join("examples").join(project);
    copy(&root().join("examples").join(project), &folder);
    let page = fs::read_to_string(folder.join("README.md")).expect("a page");
    let (mut printed, mut ran) = (String::new(), 0);
    for Block { lines, is_output } in blocks(&page) {
        if is_output {
            assert_eq!(printed.trim_end(), lines.join("\n"), "{project}");
        }
        for line in lines.into_iter().filter(|line| line.starts_with("flatout ")) {
            let said = say(&folder, &words(line)[1..]);
            assert_eq!(said.code, Some(0), "{project}: {line}\n{said:?}");
            printed = said.out;
            ran += 1;
        }
    }
    assert!(ran >= 2, "{project} has {ran} commands");
    scratch
}

/// The last evaluation that a run of a project wrote down.
fn last_evaluation(scratch: &tempfile::TempDir, run: &str) -> Value {
    let path = scratch.path().join("examples").join(run).join("events.jsonl");
    let events = fs::read_to_string(path).expect("events");
    let mut events = events.lines().rev().map(|line| serde_json::from_str::<Value>(line).expect("an event"));
    events.find(|event| event["event"] == "eval").expect("an evaluation")
}

#[test]
fn text() {
    let scratch = follow("text");
    let loss = last_evaluation(&scratch, "text/runs/text")["loss"].as_f64().expect("a loss");
    assert!(loss < 5.2, "{loss}");
}

#[test]
fn chat_lora() {
    let scratch = follow("chat-lora");
    for run in ["base", "lora"] {
        let loss =
            last_evaluation(&scratch, &format!("chat-lora/runs/{run}"))["loss"].as_f64().expect("a loss");
        assert!(loss < 0.1, "{run}: {loss}");
    }
    let exported = scratch.path().join("examples/chat-lora");
    assert!(
        exported.join("adapter/adapter_config.json").exists() && exported.join("merged/config.json").exists()
    );
}

#[test]
fn classes() {
    let scratch = follow("classes");
    let accuracy = last_evaluation(&scratch, "classes/runs/classes")["metrics"]["accuracy"].as_f64();
    assert!(accuracy > Some(0.95), "{accuracy:?}");
    let classified =
        fs::read_to_string(scratch.path().join("examples/classes/classified.csv")).expect("classes");
    let given: Vec<&str> = classified.lines().skip(1).filter_map(|line| line.rsplit(',').nth(3)).collect();
    assert_eq!(given, ["complaint", "question", "praise"]);
}

#[test]
fn images() {
    let scratch = follow("images");
    let accuracy = last_evaluation(&scratch, "images/runs/images")["metrics"]["accuracy"].as_f64();
    assert!(accuracy > Some(0.9), "{accuracy:?}");
}

#[test]
fn preference() {
    let scratch = follow("preference");
    let accuracy =
        last_evaluation(&scratch, "preference/runs/preference")["metrics"]["reward_accuracy"].as_f64();
    assert!(accuracy > Some(0.95), "{accuracy:?}");
}
