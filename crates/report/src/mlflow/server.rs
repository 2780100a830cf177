//! A test server with the part of MLflow's interface that sending a run needs; it can be made to misbehave.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};

/// How the server answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Behaviour {
    Well,
    /// With this status and no message.
    Status(u16),
    /// Accepts requests about runs and closes the connection before it answers.
    BreaksOff,
    /// Never answers.
    Silent,
    /// With bytes that are not HTTP.
    Noise,
    /// After a delay.
    Slow(Duration),
    /// Refuses points and accepts everything else.
    RefusesPoints,
    /// Refuses requests with more points than this as too large.
    AtMost(usize),
}

/// Everything the server has received.
#[derive(Clone, Debug, Default)]
pub struct Known {
    pub experiments: Vec<String>,
    /// Runs in order: the request that created each, and its state.
    pub runs: Vec<(Value, String)>,
    pub parameters: BTreeMap<String, String>,
    pub tags: BTreeMap<String, String>,
    /// Points, keyed by run and content: equal ones are stored once, as in MLflow.
    pub points: BTreeMap<String, Value>,
    pub authorizations: Vec<Option<String>>,
    pub largest_request: usize,
    /// Deleted runs.
    pub deleted: BTreeSet<usize>,
}

pub struct Server {
    pub address: String,
    pub known: Arc<Mutex<Known>>,
    behaviour: Arc<Mutex<Behaviour>>,
    pub requests: Arc<AtomicUsize>,
}

impl Server {
    pub fn start(behaviour: Behaviour) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = format!("http://{}", listener.local_addr().expect("an address"));
        let server = Server {
            address,
            known: Arc::default(),
            behaviour: Arc::new(Mutex::new(behaviour)),
            requests: Arc::default(),
        };
        let (known, behaviour, requests) =
            (Arc::clone(&server.known), Arc::clone(&server.behaviour), Arc::clone(&server.requests));
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (known, behaviour, requests) =
                    (Arc::clone(&known), Arc::clone(&behaviour), Arc::clone(&requests));
                std::thread::spawn(move || serve(stream, &known, &behaviour, &requests));
            }
        });
        server
    }

    pub fn behave(&self, behaviour: Behaviour) {
        *self.behaviour.lock().unwrap() = behaviour;
    }

    pub fn known(&self) -> Known {
        self.known.lock().unwrap().clone()
    }
}

/// Answers requests of one connection until it is closed.
fn serve(
    stream: TcpStream,
    known: &Mutex<Known>,
    behaviour: &Mutex<Behaviour>,
    requests: &AtomicUsize,
) -> Option<()> {
    let mut reader = BufReader::new(stream.try_clone().ok()?);
    let mut stream = stream;
    loop {
        let mut first = String::new();
        reader.read_line(&mut first).ok().filter(|bytes| *bytes > 0)?;
        let (mut length, mut authorization) = (0, None);
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).ok()?;
            let Some((name, value)) = line.trim_end().split_once(": ") else { break };
            match name.to_ascii_lowercase().as_str() {
                "content-length" => length = value.parse().ok()?,
                "authorization" => authorization = Some(value.to_string()),
                _ => {}
            }
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body).ok()?;
        requests.fetch_add(1, Ordering::Relaxed);
        let path = first.split(' ').nth(1)?.strip_prefix("/api/2.0/mlflow/")?.to_string();
        let body: Value = serde_json::from_slice(&body).unwrap_or_default();
        let now = *behaviour.lock().unwrap();
        let (status, answer) = match now {
            Behaviour::Status(status) => (status, json!({})),
            Behaviour::Silent => {
                std::thread::sleep(Duration::from_secs(60));
                return None;
            }
            Behaviour::Noise => {
                stream.write_all(b"\x00\xff not http at all\r\n\r\n").ok()?;
                return None;
            }
            Behaviour::RefusesPoints if !body["metrics"][0].is_null() => (
                400,
                json!({ "error_code": "INVALID_PARAMETER_VALUE", "message": "no\u{1b}[31m points\nhere" }),
            ),
            Behaviour::AtMost(points) if body["metrics"].as_array().map_or(0, Vec::len) > points => {
                (413, json!({}))
            }
            _ => {
                if let Behaviour::Slow(pause) = now {
                    std::thread::sleep(pause);
                }
                let mut known = known.lock().unwrap();
                known.authorizations.push(authorization);
                known.largest_request =
                    known.largest_request.max(body["metrics"].as_array().map_or(0, Vec::len));
                take(&mut known, &path, &body)
            }
        };
        if now == Behaviour::BreaksOff && path.starts_with("runs/") {
            return None;
        }
        let answer = answer.to_string();
        write!(stream, "HTTP/1.1 {status} X\r\ncontent-length: {}\r\n\r\n{answer}", answer.len()).ok()?;
    }
}

fn take(known: &mut Known, path: &str, body: &Value) -> (u16, Value) {
    let absent = || (404, json!({ "error_code": "RESOURCE_DOES_NOT_EXIST", "message": "there is none" }));
    let pairs = |list: &Value| -> Vec<(String, String)> {
        let pair =
            |pair: &Value| (pair["key"].as_str().unwrap().into(), pair["value"].as_str().unwrap().into());
        list.as_array().into_iter().flatten().map(pair).collect()
    };
    if let Some(name) = path.strip_prefix("experiments/get-by-name?experiment_name=") {
        let place = known.experiments.iter().position(|known| known.replace(' ', "%20") == name);
        return place.map_or_else(absent, |place| {
            (200, json!({ "experiment": { "experiment_id": place.to_string() } }))
        });
    }
    if let Some(run) = path.strip_prefix("runs/get?run_id=") {
        let run: usize = run.parse().unwrap();
        let stage = if known.deleted.contains(&run) { "deleted" } else { "active" };
        return match run < known.runs.len() {
            true => (200, json!({ "run": { "info": { "lifecycle_stage": stage } } })),
            false => absent(),
        };
    }
    let refused = |why: &str| (400, json!({ "error_code": "INVALID_PARAMETER_VALUE", "message": why }));
    match path {
        "experiments/create" => {
            known.experiments.push(body["name"].as_str().unwrap().into());
            (200, json!({ "experiment_id": (known.experiments.len() - 1).to_string() }))
        }
        "runs/search" => {
            let filter = body["filter"].as_str().unwrap();
            let has = |run: &Value| {
                pairs(&run["tags"]).iter().any(|(key, value)| *filter == format!("tags.`{key}` = '{value}'"))
            };
            let found = known.runs.iter().position(|(run, _)| has(run));
            (200, found.map_or(json!({}), |at| json!({ "runs": [{ "info": { "run_id": at.to_string() } }] })))
        }
        "runs/create" => {
            known.runs.push((body.clone(), "RUNNING".into()));
            (200, json!({ "run": { "info": { "run_id": (known.runs.len() - 1).to_string() } } }))
        }
        "runs/update" => {
            let run: usize = body["run_id"].as_str().unwrap().parse().unwrap();
            known.runs[run].1 = body["status"].as_str().unwrap().into();
            (200, json!({ "run_info": {} }))
        }
        "runs/log-batch" => {
            let run: usize = body["run_id"].as_str().unwrap().parse().unwrap();
            if run >= known.runs.len() {
                return absent();
            }
            if known.deleted.contains(&run) {
                return refused("the run must be in the 'active' state");
            }
            let parameters = pairs(&body["params"]);
            let is_changed =
                |(key, value): &(String, String)| known.parameters.get(key).is_some_and(|own| own != value);
            if parameters.iter().any(is_changed) {
                return refused("changing a parameter is not allowed");
            }
            known.parameters.extend(parameters);
            known.tags.extend(pairs(&body["tags"]));
            let points = body["metrics"].as_array().into_iter().flatten();
            known.points.extend(points.map(|point| (format!("{run} {point}"), point.clone())));
            (200, json!({}))
        }
        _ => (404, json!({})),
    }
}
