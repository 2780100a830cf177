//! `serve` and `chat` through the program: addresses and keys, graceful shutdown, chat through a pipe, and bad input.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Stdio};

use serde_json::{Value, json};

use crate::program::{CommandOutput, execute, flatout, refused, small_train};

/// A run with a chat template, and one without.
fn runs(dir: &Path) {
    let chat = small_train(&[
        "data.task=chat",
        "data.synthetic_rows=64",
        "model.context=96",
        "eval.rows=0",
        "--run",
        "chats",
    ]);
    for words in [chat, small_train(&["--run", "texts"])] {
        let result = execute(dir, &words);
        assert_eq!(result.code, Some(0), "{}", result.err);
    }
}

fn end(child: &Child) {
    let sent = std::process::Command::new("kill").args(["-TERM", &child.id().to_string()]).status();
    assert!(sent.expect("kill runs").success());
}

#[test]
fn a_run_is_served_until_it_is_asked_to_end() {
    let folder = tempfile::tempdir().expect("a folder");
    runs(folder.path());
    let mut command = flatout(
        folder.path(),
        &[
            "serve",
            "chats",
            "--port",
            "0",
            "--at-once",
            "2",
            "--tokens",
            "64",
            "--device",
            "cpu",
            "--json",
            "--verbose",
        ],
    );
    let mut child = command.env("FLATOUT_API_KEY", "secret").spawn().expect("the program starts");
    let mut out = BufReader::new(child.stdout.take().expect("it is captured"));
    let mut text = String::new();
    while !text.trim_end().ends_with('}') {
        assert!(out.read_line(&mut text).expect("text") > 0, "it ended: {text}");
    }
    let report: Value = serde_json::from_str(&text).expect("an object");
    assert_eq!(
        (&report["model"], &report["tokens"], &report["chat"], &report["key"]),
        (&json!("chats"), &json!(64), &json!(true), &json!(true))
    );
    // Two layers, keys and values, one head of 16, two sequences of 64 tokens, in f32.
    assert_eq!(report["cache_bytes"], 2 * 2 * 16 * 2 * 64 * 4);
    let port = report["url"]
        .as_str()
        .expect("an address")
        .trim_end_matches('/')
        .rsplit(':')
        .next()
        .expect("a port")
        .to_string();
    let ask = |key: &str| {
        let body =
            json!({ "messages": [{ "role": "user", "content": "hello" }], "max_tokens": 4 }).to_string();
        let mut stream = TcpStream::connect(format!("127.0.0.1:{port}")).expect("it listens");
        let head = format!(
            "Host: localhost\r\nContent-Type: application/json\r\nAuthorization: Bearer {key}\r\nContent-Length: {}",
            body.len()
        );
        stream
            .write_all(format!("POST /v1/chat/completions HTTP/1.0\r\n{head}\r\n\r\n{body}").as_bytes())
            .expect("a request");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        answer
    };
    assert!(ask("wrong").starts_with("HTTP/1.0 401"));
    let answer = ask("secret");
    assert!(answer.starts_with("HTTP/1.0 200") && answer.contains("chat.completion"), "{answer}");
    end(&child);
    let output = child.wait_with_output().expect("it ends");
    let err = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(0), "{err}");
    assert!(err.contains("chat chatcmpl-") && err.contains("done"), "a line a request: {err}");
}

fn talk(dir: &Path, lines: &str, words: &[&str]) -> CommandOutput {
    let mut command = flatout(dir, &[&["chat", "chats", "backend=cpu"], words].concat());
    let mut child = command.stdin(Stdio::piped()).spawn().expect("the program starts");
    child.stdin.take().expect("a pipe").write_all(lines.as_bytes()).expect("lines");
    let output = child.wait_with_output().expect("it ends");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    CommandOutput { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
}

#[test]
fn lines_from_a_pipe_are_turns() {
    let folder = tempfile::tempdir().expect("a folder");
    runs(folder.path());
    let dir = folder.path();
    let result = talk(
        dir,
        "hello\n/system be brief\nwhat is it?\n/nothing\n/save talk.jsonl\n/reset\n/save talk.jsonl\n/quit\nno more\n",
        &["--max-tokens", "6"],
    );
    assert_eq!(result.code, Some(0), "{}", result.err);
    for sentence in ["the system message is set", "there is no command /nothing", "a new conversation begins"]
    {
        assert!(result.err.contains(sentence), "{sentence}: {}", result.err);
    }
    assert!(result.out.chars().all(|c| !c.is_control() || c == '\n' || c == '\t'), "{:?}", result.out);
    let saved = fs::read_to_string(dir.join("talk.jsonl")).expect("a file");
    let rows: Vec<Value> = saved.lines().map(|line| serde_json::from_str(line).expect("a row")).collect();
    let roles: Vec<&str> = rows[0]["messages"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|m| m["role"].as_str().expect("a role"))
        .collect();
    assert_eq!(roles, ["system", "user", "assistant", "user", "assistant"]);
    assert_eq!(rows[1]["messages"].as_array().expect("a list").len(), 1, "only the system message is left");
    assert_eq!(
        talk(dir, "hello\nagain\n", &["--seed", "3"]).out,
        talk(dir, "hello\nagain\n", &["--seed", "3"]).out
    );
    // A conversation that becomes too long loses its oldest turns, and a single message that is too long is refused.
    let long = "what is it now and here?\n".repeat(6) + &"far too long ".repeat(60) + "\n";
    let result = talk(dir, &long, &["--tokens", "90", "--max-tokens", "5", "--json"]);
    let lines: Vec<Value> =
        result.out.lines().map(|line| serde_json::from_str(line).expect("an object")).collect();
    let notes: Vec<&str> = lines.iter().filter_map(|line| line["note"].as_str()).collect();
    assert!(notes.iter().any(|note| note.contains("oldest 2 messages are left out")), "{notes:?}");
    assert!(notes.last().is_some_and(|note| note.contains("shorten it")), "{notes:?}");
    assert_eq!(lines.iter().filter(|line| line["role"] == "assistant").count(), 6);
}

#[test]
fn bad_input_is_refused_before_any_work() {
    let folder = tempfile::tempdir().expect("a folder");
    runs(folder.path());
    for (words, sentence) in [
        (&["serve", "chats", "--host", "0.0.0.0"][..], "give a key with --key or FLATOUT_API_KEY"),
        (&["serve", "chats", "--key", ""], "must have visible ASCII"),
        (&["serve", "chats", "--key", "a b"], "must have visible ASCII"),
        (&["serve", "chats", "--at-once", "0"], "--at-once is 0"),
        (&["serve", "chats", "--host", "nowhere.invalid"], "no address of this machine"),
        (&["serve", "nothing", "--port", "0"], "nothing"),
        (&["chat", "texts"], "no chat template"),
        (&["chat", "chats", "--temperature=-1"], "--temperature is -1"),
        (&["chat", "chats", "--top-p", "0"], "--top-p is 0"),
        (&["chat", "nothing"], "nothing"),
    ] {
        refused(folder.path(), words, sentence);
    }
}
