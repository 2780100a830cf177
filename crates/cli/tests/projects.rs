//! The projects of `examples/` and the guide `first-hour.md`: runs every command of their pages in order, and checks what it prints and
//! learns.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::program::execute;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Copies files and folders, except existing runs.
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

/// A fenced block without a language: commands, or the output of the last one.
struct Block<'a> {
    lines: Vec<&'a str>,
    /// Whether it follows the block before it directly.
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

/// Splits a command line at spaces outside quotes, as a shell does.
fn words(line: &str) -> Vec<&str> {
    let parts = line.split('"').enumerate();
    parts
        .flat_map(|(at, part)| if at % 2 == 1 { vec![part] } else { part.split_whitespace().collect() })
        .collect()
}

/// Runs the commands of a page in a copy of its project, and compares their output with the page.
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
            let result = execute(&folder, &words(line)[1..]);
            assert_eq!(result.code, Some(0), "{project}: {line}\n{result:?}");
            printed = result.out;
            ran += 1;
        }
    }
    assert!(ran >= 2, "{project} has {ran} commands");
    scratch
}

/// The last evaluation in the log of a project's run.
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

/// Replaces every number in a text by one mark and every unit of time by another: speeds, times and counts differ between machines, and a
/// slow one takes minutes where another takes seconds.
fn without_numbers(line: &str) -> String {
    let mut masked = String::new();
    let mut digits = line.chars().peekable();
    while let Some(letter) = digits.next() {
        if !letter.is_ascii_digit() {
            masked.push(letter);
            continue;
        }
        while digits.next_if(|next| next.is_ascii_digit() || matches!(next, '.' | ',')).is_some() {}
        masked.push('#');
    }
    let mut words: Vec<&str> = masked.split_whitespace().collect();
    for at in 1..words.len() {
        if words[at - 1].ends_with('#') && matches!(words[at], "ms" | "s" | "min" | "h") {
            words[at] = "time";
        }
    }
    words.join(" ")
}

/// Whether a line shows progress between the first step and the last, as `step 121/200`: such lines are printed at intervals.
fn is_by_the_clock(line: &str) -> bool {
    let counted = line.strip_prefix("step ").and_then(|rest| rest.split(' ').next()?.split_once('/'));
    counted.is_some_and(|(step, steps)| step != "1" && step != steps)
}

/// Compares the output on a page with what was printed. A line `...` stands for any lines, and `...` at the end of a line for its rest;
/// numbers may differ.
fn compare(shown: &[&str], printed: &str, page: &str) {
    let mut printed_lines = printed.lines().filter(|line| !is_by_the_clock(line)).map(without_numbers);
    let mut may_skip = false;
    for line in shown {
        if *line == "..." {
            may_skip = true;
            continue;
        }
        let (beginning, is_cut) =
            line.strip_suffix(" ...").map_or((*line, false), |beginning| (beginning, true));
        let wanted = without_numbers(beginning);
        let is_it = |result: &String| if is_cut { result.starts_with(&wanted) } else { *result == wanted };
        let found = if may_skip { printed_lines.find(is_it) } else { printed_lines.next().filter(is_it) };
        assert!(found.is_some(), "{page} shows `{line}`, and this was printed:\n{printed}");
        may_skip = false;
    }
    let rest = printed_lines.next();
    assert!(may_skip || rest.is_none(), "{page} ends its output before {rest:?}");
}

/// A command line, and the exit code that the page gives in a comment after it.
fn line_and_code(line: &str) -> (&str, i32) {
    match line.split_once("    # ends with code ") {
        Some((command, code)) => (command, code.parse().expect("a code")),
        None => (line, 0),
    }
}

/// The guide for new users: its commands are run on the CPU, in a new folder beside the project's.
#[test]
fn first_hour() {
    let scratch = tempfile::tempdir().expect("a folder");
    let project = scratch.path().join("flatout");
    for name in ["docs", "README.md", "examples/chat-lora"] {
        fs::create_dir_all(project.join("examples")).expect("a folder");
        copy(&root().join(name), &project.join(name));
    }
    let folder = scratch.path().join("first-hour");
    fs::create_dir(&folder).expect("a folder");

    let mut path = OsString::from(Path::new(env!("CARGO_BIN_EXE_flatout")).parent().expect("its folder"));
    path.push(":");
    path.push(env::var_os("PATH").unwrap_or_default());
    let page = fs::read_to_string(root().join("docs/guides/first-hour.md")).expect("the page");
    let (mut printed, mut ran, mut compared) = (String::new(), 0, 0);
    let mut was_output = false;
    for Block { lines, is_output } in blocks(&page) {
        // Commands may follow output without text between their blocks.
        if is_output && !was_output {
            compare(&lines, &printed, "docs/guides/first-hour.md");
            (was_output, compared) = (true, compared + 1);
            continue;
        }
        was_output = false;
        for line in lines {
            let (command, code) = line_and_code(line);
            let result = Command::new("sh")
                .args(["-c", &format!("({command}) 2>&1")])
                .current_dir(&folder)
                .env("PATH", &path)
                .env("CUDA_VISIBLE_DEVICES", "")
                .stdin(Stdio::null())
                .output()
                .expect("a shell");
            printed = String::from_utf8(result.stdout).expect("UTF-8");
            assert_eq!(result.status.code(), Some(code), "{command}\n{printed}");
            ran += 1;
        }
    }
    assert!(ran >= 30 && compared >= 20, "{ran} commands, {compared} outputs");
}
