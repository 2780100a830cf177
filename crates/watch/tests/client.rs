//! A test fixture: a served folder of runs, and a client that reads what a browser would be sent.

use std::fs::{self, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use flatout_http::Server;
use serde_json::{Value, json};

/// A timeout that is only reached by something that hangs, even on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A served folder of runs.
pub struct Fixture {
    pub dir: tempfile::TempDir,
    pub server: Server,
}

impl Fixture {
    pub fn new() -> Fixture {
        Fixture::of(|_| {})
    }

    /// A served folder that is filled beforehand.
    pub fn of(fill: impl FnOnce(&Path)) -> Fixture {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("runs")).unwrap();
        fill(&dir.path().join("runs"));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let server = flatout_watch::serve(&dir.path().join("runs"), listener).unwrap();
        Fixture { dir, server }
    }

    pub fn runs(&self) -> PathBuf {
        self.dir.path().join("runs")
    }

    /// A run without a log.
    pub fn run(&self, name: &str) -> PathBuf {
        let dir = self.runs().join(name);
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("config.toml"), "recipe = \"tiny\"\n").unwrap();
        dir
    }

    /// The status and the body of an answer.
    pub fn get(&self, path: &str) -> (u16, String) {
        let mut answer = String::new();
        self.ask(path).read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body.into())
    }

    /// The status of an answer whose body may not be text.
    pub fn status(&self, path: &str) -> u16 {
        let mut answer = vec![];
        self.ask(path).read_to_end(&mut answer).unwrap();
        let head = String::from_utf8_lossy(&answer[..answer.len().min(12)]).into_owned();
        head.split(' ').nth(1).unwrap().parse().unwrap()
    }

    /// Sends an HTTP/1.0 request, whose connection closes after an answer without chunked encoding.
    fn ask(&self, path: &str) -> TcpStream {
        let mut stream = TcpStream::connect(self.server.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(format!("GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n").as_bytes()).unwrap();
        stream
    }

    /// Opens the stream of updates as a page does.
    pub fn live(&self, runs: &[&str]) -> News {
        let query: Vec<String> = runs.iter().map(|id| format!("run={}", encoded(id))).collect();
        let stream = self.ask(&format!("/api/live?{}", query.join("&")));
        News { lines: BufReader::new(stream), kind: String::new() }
    }
}

/// Percent-encodes a name for a query.
pub fn encoded(text: &str) -> String {
    text.bytes().map(|byte| format!("%{byte:02x}")).collect()
}

pub struct News {
    lines: BufReader<TcpStream>,
    kind: String,
}

impl News {
    /// The next message: its kind and its data.
    pub fn next(&mut self) -> (String, Value) {
        let began = Instant::now();
        loop {
            // Heartbeats arrive for ever.
            assert!(began.elapsed() < PATIENCE, "no message arrives");
            let mut line = String::new();
            assert!(self.lines.read_line(&mut line).unwrap() > 0, "the stream ended");
            if let Some(kind) = line.trim_end().strip_prefix("event: ") {
                self.kind = kind.into();
            } else if let Some(data) = line.trim_end().strip_prefix("data: ") {
                return (self.kind.clone(), serde_json::from_str(data).unwrap());
            }
        }
    }

    /// Reads until a message of a kind satisfies the predicate.
    pub fn until(&mut self, kind: &str, mut is_wanted: impl FnMut(&Value) -> bool) -> Value {
        let began = Instant::now();
        loop {
            assert!(began.elapsed() < PATIENCE, "no such {kind}");
            let (found, data) = self.next();
            if found == kind && is_wanted(&data) {
                return data;
            }
        }
    }
}

/// Appends lines to the log of a run.
pub fn append(run: &Path, lines: &[Value]) {
    let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    let mut log = OpenOptions::new().create(true).append(true).open(run.join("events.jsonl")).unwrap();
    log.write_all(text.as_bytes()).unwrap();
}

pub fn start(steps: u64) -> Value {
    json!({ "event": "start", "recipe": "tiny", "steps": steps, "time": 1000.0, "switches": {} })
}

pub fn step(step: u64, loss: f64) -> Value {
    json!({
        "event": "step", "step": step, "epoch": 0, "loss": loss, "grad_norm": 1.0, "lr": 0.001, "tokens": 1024 * step, "samples": 8 * step,
        "step_ms": 10.0, "tokens_per_second": 100_000.0, "samples_per_second": 800.0, "skipped": 0, "time": 1000.0 + step as f64,
    })
}
