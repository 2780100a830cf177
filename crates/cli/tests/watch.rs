//! `watch` and `train --watch` through the program: addresses that open, tokens, and bad input.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Child;

use serde_json::Value;

use crate::program::{execute, flatout, refused, small_train};

/// A server that ends with the test.
struct Serving {
    child: Child,
    url: String,
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn watch(dir: &Path, words: &[&str]) -> Serving {
    let mut child =
        flatout(dir, &[&["watch", "--json"], words].concat()).spawn().expect("the program starts");
    let mut out = BufReader::new(child.stdout.take().expect("it is captured"));
    let mut text = String::new();
    while !text.trim_end().ends_with('}') {
        assert!(out.read_line(&mut text).expect("text") > 0, "it ended: {text}");
    }
    let told: Value = serde_json::from_str(&text).expect("an object");
    Serving { child, url: told["url"].as_str().expect("an address").into() }
}

/// The response to a request for a path at an address, with additional headers.
fn get(url: &str, path: &str, headers: &str) -> String {
    let place = url.strip_prefix("http://").expect("an address").split('/').next().expect("a place");
    let port = place.rsplit(':').next().expect("a port");
    let mut stream = TcpStream::connect(format!("127.0.0.1:{port}")).expect("it listens");
    stream
        .write_all(format!("GET {path} HTTP/1.0\r\nHost: {place}\r\n{headers}\r\n").as_bytes())
        .expect("a request");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    answer
}

#[test]
fn a_run_and_its_plan_are_served() {
    let folder = tempfile::tempdir().expect("a folder");
    let result = execute(folder.path(), &small_train(&["--run", "runs/a"]));
    assert_eq!(result.code, Some(0), "{}", result.err);
    for file in ["plan.json", "samples.jsonl"] {
        assert!(folder.path().join("runs/a").join(file).is_file(), "{file}");
    }
    let before = fs::read(folder.path().join("runs/a/events.jsonl")).expect("a log");
    let serving = watch(folder.path(), &["--port", "0"]);
    assert!(!serving.url.contains("token"), "{}", serving.url);
    let page = get(&serving.url, "/", "");
    assert!(
        page.starts_with("HTTP/1.0 200") && page.contains("content-security-policy: default-src 'none'"),
        "{page}"
    );
    assert!(get(&serving.url, "/api/run?id=b", "").starts_with("HTTP/1.0 404"));
    assert_eq!(fs::read(folder.path().join("runs/a/events.jsonl")).expect("a log"), before);
}

#[test]
fn other_addresses_need_a_token() {
    let folder = tempfile::tempdir().expect("a folder");
    let serving = watch(folder.path(), &[".", "--host", "0.0.0.0", "--port", "0"]);
    let (_, token) = serving.url.split_once("?token=").expect("a token in the address");
    assert!(get(&serving.url, "/", "").starts_with("HTTP/1.0 403"));
    assert!(get(&serving.url, "/?token=0", "").starts_with("HTTP/1.0 403"));
    let entered = get(&serving.url, &format!("/?token={token}"), "");
    assert!(entered.starts_with("HTTP/1.0 303") && entered.contains("location: /\r\n"), "{entered}");
    let cookie = entered.lines().find_map(|line| line.strip_prefix("set-cookie: ")).expect("a cookie");
    let pair = cookie.split(';').next().expect("a pair");
    assert!(get(&serving.url, "/", &format!("Cookie: {pair}\r\n")).starts_with("HTTP/1.0 200"));
}

/// Starts a command that trains with `--watch`, waits until its page answers, kills the process, and returns the address.
fn shows_itself(dir: &Path, words: &[&str]) -> String {
    let mut child =
        flatout(dir, words).env_remove("DISPLAY").env_remove("WAYLAND_DISPLAY").spawn().expect("it starts");
    let mut err = BufReader::new(child.stderr.take().expect("it is captured"));
    let url = loop {
        let mut line = String::new();
        assert!(err.read_line(&mut line).expect("text") > 0, "it ended without an address");
        if let Some(url) = line.trim_end().strip_prefix("watch    ") {
            break url.to_string();
        }
    };
    assert!(url.starts_with("http://127.0.0.1:") && url.ends_with("/#run=a"), "{url}");
    let page = get(&url, "/", "");
    child.kill().expect("it is ended");
    child.wait().expect("it has ended");
    assert!(page.starts_with("HTTP/1.0 200"), "{page}");
    url
}

#[test]
fn a_run_shows_itself_while_it_trains() {
    let folder = tempfile::tempdir().expect("a folder");
    shows_itself(folder.path(), &small_train(&["train.steps=100000", "--run", "runs/a", "--watch"]));
}

/// Only rank 0 serves a page. The parent prints its address, and if the parent is killed its ranks end too.
#[test]
fn ranks_show_their_run_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let words =
        ["train.steps=100000", "train.batch=4", "--run", "runs/a", "--watch", "--ranks", "2", "backend=cpu"];
    shows_itself(folder.path(), &small_train(&words));
}

#[test]
fn a_resumed_run_shows_itself() {
    let folder = tempfile::tempdir().expect("a folder");
    let result = execute(folder.path(), &small_train(&["train.steps=4", "--run", "runs/a"]));
    assert_eq!(result.code, Some(0), "{}", result.err);
    shows_itself(folder.path(), &["resume", "runs/a", "train.steps=100000", "--watch"]);
    let ranks = ["resume", "runs/a", "train.steps=100000", "--watch", "--ranks", "2"];
    shows_itself(folder.path(), &ranks);
}

#[test]
fn bad_input_is_a_sentence() {
    let folder = tempfile::tempdir().expect("a folder");
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("an address").port().to_string();
    fs::write(folder.path().join("file"), "").expect("a file");
    for (words, wanted) in [
        (vec!["watch"], "there is no folder runs: flatout train makes a run in it"),
        (vec!["watch", "elsewhere"], "there is no folder elsewhere: name a folder of runs, or a run"),
        (vec!["watch", "file"], "there is no folder file"),
        (vec!["watch", ".", "--port", &port], "cannot be listened on"),
        (vec!["watch", ".", "--host", "not an address"], "is no address of this machine"),
    ] {
        refused(folder.path(), &words, wanted);
    }
    assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 1, "nothing was written");
}
