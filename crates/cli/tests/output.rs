//! Standard output that cannot be written, and control characters in data that is printed.

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader};
use std::process::Stdio;

use flatout_train::run::events::{Event, Status};

use crate::fixture::{Fixture, checkpoints};
use crate::program::{execute, flatout, small_train};

fn full() -> File {
    OpenOptions::new().write(true).open("/dev/full").expect("a device that is always full")
}

/// Asserts that a run reached its end with everything saved.
fn assert_done(fixture: &Fixture, run: &str, steps: u64) {
    let events = fixture.events(run);
    let Some(Event::End(end)) = events.last() else { panic!("{run}: {:?} is last", events.last()) };
    assert_eq!((end.status, end.steps), (Status::Done, steps), "{run}");
    assert_eq!(checkpoints(&fixture.dir(run)).whole, Some(steps), "{run}");
}

#[test]
fn a_run_continues_without_standard_output() {
    let fixture = Fixture::new();
    for (run, json) in [("json", true), ("text", false)] {
        let mut words = small_train(&["--run", run]);
        words.extend(json.then_some("--json"));
        let output = flatout(fixture.folder.path(), &words).stdout(full()).output().expect("an end");
        let result = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{result}");
        let complaints = result.matches("standard output cannot be written: No space left on device").count();
        assert_eq!(complaints, 1, "it is reported once: {result}");
        assert_done(&fixture, run, 6);
    }
}

#[test]
fn a_run_continues_when_its_reader_closes_the_pipe() {
    let fixture = Fixture::new();
    let words = small_train(&["train.steps=60", "--run", "run", "--json"]);
    let mut child = flatout(fixture.folder.path(), &words).stderr(Stdio::null()).spawn().expect("a program");
    let mut first = String::new();
    // The reader closes the pipe like `head -1`.
    let mut reader = BufReader::new(child.stdout.take().expect("a pipe"));
    reader.read_line(&mut first).expect("a line");
    drop(reader);
    assert!(first.starts_with("{\"event\":\"start\""), "{first}");
    assert_eq!(child.wait().expect("an end").code(), Some(0));
    assert_done(&fixture, "run", 60);
}

#[test]
fn no_stream_at_all_changes_nothing() {
    let fixture = Fixture::new();
    let words = small_train(&["--run", "run"]);
    let status =
        flatout(fixture.folder.path(), &words).stdout(full()).stderr(full()).status().expect("an end");
    assert_eq!(status.code(), Some(0));
    assert_done(&fixture, "run", 6);
    // An error keeps its exit code even if it cannot be printed.
    let status =
        flatout(fixture.folder.path(), &words).stdout(full()).stderr(full()).status().expect("an end");
    assert_eq!(status.code(), Some(2));
}

#[test]
fn a_command_whose_output_is_its_result_fails_without_it() {
    let fixture = Fixture::new();
    let trained = execute(fixture.folder.path(), &small_train(&["--run", "run"]));
    assert_eq!(trained.code, Some(0), "{}", trained.err);
    for words in [
        &["recipes"][..],
        &["schema"],
        &["runs", "."],
        &["generate", "run"],
        &["eval", "run", "--json"],
        &["plan", "tiny"],
    ] {
        let output = flatout(fixture.folder.path(), words).stdout(full()).output().expect("an end");
        let result = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{words:?}: {result}");
        let complaint = "flatout: standard output cannot be written: No space left on device";
        assert!(result.lines().any(|line| line.starts_with(complaint)), "{words:?}: {result}");
    }
}

/// Clears the screen, returns to the beginning of the line, and starts a sequence with an 8-bit control character.
const HOSTILE: &str = "\u{1b}[2J\r\u{9b}31mred";

fn assert_escaped(what: &str, text: &str) {
    let control = text.chars().find(|c| c.is_control() && *c != '\n' && *c != '\t');
    assert_eq!(control, None, "{what}: {text:?}");
}

#[test]
fn control_characters_of_data_are_escaped() {
    let fixture = Fixture::new();
    let dir = fixture.folder.path();
    let text: String = (0..80).map(|i| format!("line {i} {HOSTILE} and {}\n", i * 7 % 13)).collect();
    fs::write(fixture.dir("book.txt"), text).expect("a text");
    let rows: String = (0..60)
        .map(|i| {
            let class = if i % 2 == 0 { format!("good{HOSTILE}\nbad") } else { "plain".into() };
            serde_json::json!({ "text": format!("number {i} {HOSTILE}"), "label": class }).to_string() + "\n"
        })
        .collect();
    fs::write(fixture.dir("texts.jsonl"), rows).expect("labelled texts");
    let run = format!("run{HOSTILE}");
    let book = ["data.path=book.txt", "model.vocab=300", "lr=5e-3", "train.steps=20", "--run", &run];
    let classes = [
        "data.path=texts.jsonl",
        "data.task=classes",
        "data.held_out=0.3",
        "model.head=classes",
        "model.classes=2",
        "model.vocab=300",
        "model.context=64",
        "--run",
        "classes",
    ];
    let commands = [
        small_train(&book),
        vec!["generate", &run, "--max-tokens", "100"],
        vec!["generate", &run, "--prompt", HOSTILE, "--prompt", "line", "--max-tokens", "50"],
        vec!["runs", "."],
        vec!["runs", ".", "--json"],
        vec!["data", "inspect", "book.txt"],
        vec!["data", "inspect", "tiny", "data.path=book.txt", "model.vocab=300"],
        vec!["data", "inspect", "--task", "classes", "texts.jsonl"],
        small_train(&classes),
        vec!["eval", "classes"],
        vec!["eval", "classes", "--json"],
        vec!["export", &run, "--to", "out"],
    ];
    let mut escaped = 0;
    for words in commands {
        let result = execute(dir, &words);
        assert_eq!(result.code, Some(0), "{words:?}: {}", result.err);
        assert_escaped(&format!("{words:?}"), &result.out);
        assert_escaped(&format!("{words:?}"), &result.err);
        escaped += usize::from(format!("{}{}", result.out, result.err).contains("\\u{1b}[2J"));
    }
    assert!(escaped >= 6, "{escaped} commands had something to escape");
}

/// Prompts and generated texts may contain control characters.
#[test]
fn control_characters_of_samples_are_escaped() {
    let fixture = Fixture::new();
    fs::write(fixture.folder.path().join("book.txt"), "the \u{1b}[31mred\u{1b}[0m fox <b>\r\n\n".repeat(400))
        .expect("a file");
    let prompts = "samples.prompts=['the \u{1b}[2J<img src=x>']";
    let words = [
        "data.path=book.txt",
        "model.vocab=300",
        "model.context=64",
        "eval.rows=2",
        prompts,
        "samples.max_tokens=8",
        "--run",
        "run",
    ];
    let result = execute(fixture.folder.path(), &small_train(&words));
    assert_eq!(result.code, Some(0), "{}", result.err);
    assert!(result.err.contains("sample   the \\u{1b}[2J<img src=x>"), "{}", result.err);
    assert!(!result.err.contains('\u{1b}') && !result.out.contains('\u{1b}'), "{}", result.err);
    let events = fixture.events("run");
    let sample =
        events.iter().find_map(|event| if let Event::Sample(sample) = event { Some(sample) } else { None });
    let sample = sample.expect("a sample");
    assert_eq!((sample.step, sample.prompt.as_str()), (6, "the \u{1b}[2J<img src=x>"));
    assert!(sample.text.as_ref().is_some_and(|text| !text.is_empty()));
}

/// Lines have colours if they are forced, and none in a pipe.
#[test]
fn colours_follow_the_environment() {
    let fixture = Fixture::new();
    let output = |name: &str, value: &str, run: &str| {
        let mut command = flatout(fixture.folder.path(), &small_train(&["--run", run]));
        let output = command.env_remove("NO_COLOR").env(name, value).output().expect("an end");
        String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
    };
    let plain = output("CLICOLOR", "1", "plain");
    assert!(!plain.contains('\u{1b}') && plain.contains("model    "), "{plain}");
    let forced = output("CLICOLOR_FORCE", "1", "forced");
    assert!(
        forced.contains("\u{1b}[36mmodel   \u{1b}[0m ")
            && forced.contains("\u{1b}[36mdone    \u{1b}[0m 6 steps"),
        "{forced}"
    );
}
