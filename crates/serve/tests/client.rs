//! A test fixture: a server with a small chat model, and a client.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use flatout_serve::{Model, Service};
use flatout_train::device::Device;
use flatout_train::infer::generate::{Generator, GeneratorCapacity};
use flatout_train::recipes;
use flatout_train::run::signal::StopFlag;
use flatout_train::run::{Entered, Resume, Run};
use flatout_train::training::trainer::train;
use flatout_train::weights::loaded::Loaded;
use serde_json::Value;

/// The capacity of the server, in tokens per request.
const TOKENS: usize = 96;

/// The folder of a run that all tests of a process share.
fn run() -> &'static Path {
    static RUN: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
    let (_, dir) = RUN.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("small");
        let words = [
            "data.task=chat",
            "data.synthetic_rows=64",
            "model.width=32",
            "model.layers=2",
            "model.heads=2",
            "model.kv_heads=1",
            "model.ffn=48",
            "model.context=128",
            "train.steps=20",
            "train.batch=4",
            "schedule.warmup_steps=2",
            "eval.rows=0",
            "checkpoint.every=0",
            "backend=cpu",
        ];
        let words: Vec<String> = words.iter().map(|word| word.to_string()).collect();
        let config = recipes::resolve("tiny", &[], &words).expect("a config");
        let (Entered::Fresh(run) | Entered::Existing(run)) = Run::enter(&dir, Resume::Auto).expect("a run");
        train(&config, None, &run, &Device::cpu(), &StopFlag::never(), &mut [], &mut |_| {}).expect("a run");
        (folder, dir)
    });
    dir
}

/// A server that ends with the test.
pub struct Fixture {
    address: SocketAddr,
    key: Option<&'static str>,
    stop: Arc<AtomicBool>,
    lines: Arc<Mutex<Vec<String>>>,
    thread: Option<JoinHandle<()>>,
}

impl Fixture {
    pub fn new(key: Option<&'static str>) -> Fixture {
        let (stop, lines) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(vec![])));
        let (sender, receiver) = mpsc::channel();
        let (stopped, written) = (Arc::clone(&stop), Arc::clone(&lines));
        let thread = std::thread::spawn(move || {
            let loaded = Loaded::open(run(), &["backend=cpu".into()]).expect("a run");
            let model = Model::of(&loaded, TOKENS).expect("a model");
            let room = GeneratorCapacity { sequences: 3, tokens: TOKENS };
            let mut generator = Generator::serving(loaded, &Device::cpu(), room, None).expect("a generator");
            let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
            let service = Service::start(listener, model, key.map(String::from)).expect("a server");
            sender.send(service.address()).expect("a test");
            let log = |line: String| written.lock().unwrap().push(line);
            service.run(&mut generator, &|| stopped.load(Ordering::Relaxed), &log).expect("no failure");
        });
        Fixture { address: receiver.recv().expect("a server"), key, stop, lines, thread: Some(thread) }
    }

    pub fn name(&self) -> &'static str {
        "small"
    }

    /// A line for every request that has ended.
    pub fn lines(&self) -> Vec<String> {
        self.lines.lock().unwrap().clone()
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream
    }

    /// Sends a request as raw text and returns the raw response.
    pub fn ask(&self, text: &str) -> String {
        let mut stream = self.connect();
        // A server that refuses a request early may close before all of it is sent.
        let _ = stream.write_all(text.as_bytes());
        let mut answer = vec![];
        let _ = stream.read_to_end(&mut answer);
        String::from_utf8_lossy(&answer).into_owned()
    }

    /// The head and the body of the answer to a POST.
    fn posted(&self, path: &str, body: &str) -> (String, String) {
        let key = self.key.map_or(String::new(), |key| format!("Authorization: Bearer {key}\r\n"));
        let head = format!(
            "Host: localhost\r\nContent-Type: application/json\r\n{key}Content-Length: {}",
            body.len()
        );
        let answer = self.ask(&format!("POST {path} HTTP/1.0\r\n{head}\r\n\r\n{body}"));
        let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {answer:?}"));
        (head.into(), body.into())
    }

    pub fn post_text(&self, path: &str, body: &str) -> (u16, String) {
        let (head, body) = self.posted(path, body);
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body)
    }

    pub fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let (status, body) = self.post_text(path, &body.to_string());
        (status, serde_json::from_str(&body).unwrap_or_else(|error| panic!("{error}: {body}")))
    }

    pub fn post_raw(&self, path: &str, body: &Value) -> String {
        self.posted(path, &body.to_string()).1
    }

    /// Stops the server and waits for its end.
    pub fn stop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().expect("it ends without a panic");
        }
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.stop();
        }
    }
}

/// The messages of a stream, which must end with `[DONE]`.
pub fn sse(body: &str) -> Vec<Value> {
    let mut lines: Vec<&str> = body.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
    assert_eq!(lines.pop(), Some("[DONE]"), "{body}");
    lines.iter().map(|line| serde_json::from_str(line).unwrap()).collect()
}
