//! Reads a run's log and sends it to a server, in a thread during training, or all of it afterwards.

use std::collections::{HashSet, VecDeque};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use flatout_train::Config;
use serde_json::{Value, json};

use super::client::{Client, Trouble};
use super::points::{Batch, MOST, first_start, pair, read};
use super::upload_record::UploadRecord;

/// The experiment of runs that name none.
const EXPERIMENT: &str = "flatout";
/// The tag by which a run is found again if the response with its id was lost.
const KEY: &str = "flatout.key";
/// The most parameters in a request.
const MOST_PARAMETERS: usize = 100;
/// The most refused parameters that a warning names.
const SHOWN: usize = 3;
/// The interval at which the log is polled, and the longest back-off while the server is away.
const INTERVAL: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(30);

/// State shared by the training loop and the thread that sends.
#[derive(Default)]
pub struct Shared {
    warnings: Mutex<VecDeque<String>>,
    is_closing: AtomicBool,
    has_given_up: AtomicBool,
}

impl Shared {
    pub fn close(&self) {
        self.is_closing.store(true, Ordering::Relaxed);
    }

    /// The next warning; never waits.
    pub fn warning(&self) -> Option<String> {
        self.warnings.try_lock().ok()?.pop_front()
    }

    /// Whether sending has ended for good, which a warning says.
    pub fn has_given_up(&self) -> bool {
        self.has_given_up.load(Ordering::Relaxed)
    }

    fn warn(&self, sentence: String) {
        if let Ok(mut warnings) = self.warnings.lock() {
            warnings.push_back(sentence);
        }
    }

    fn is_closing(&self) -> bool {
        self.is_closing.load(Ordering::Relaxed)
    }
}

/// The outcome of sending a whole log.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sent {
    pub run_id: String,
    pub lines: usize,
    pub points: usize,
    /// Why some points or parameters were refused.
    pub refused: Option<String>,
}

pub struct Follower {
    run: PathBuf,
    client: Client,
    name: String,
    tags: Vec<Value>,
    parameters: Vec<Value>,
    kept: UploadRecord,
    /// The most points in a request; fewer once the server has found a request too large.
    most: usize,
    /// Reasons of refusals that are not reported yet, and all known reasons without their digits, since times and steps differ.
    refusals: Vec<String>,
    known_refusals: HashSet<String>,
}

/// The experiment of a run.
pub fn experiment(config: &Config) -> &str {
    config.track.experiment_name.as_deref().unwrap_or(EXPERIMENT)
}

impl Follower {
    pub fn new(run: &Path, config: &Config, server: &str, client: Client) -> Follower {
        let place = run.canonicalize().unwrap_or(run.to_path_buf());
        let folder = place.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let tags = [
            ("mlflow.source.name", "flatout".to_string()),
            ("mlflow.source.type", "LOCAL".to_string()),
            ("flatout.run", place.display().to_string()),
            ("flatout.recipe", config.recipe.clone()),
        ];
        Follower {
            run: run.to_path_buf(),
            client,
            name: config.track.run_name.clone().unwrap_or(folder),
            tags: tags
                .into_iter()
                .filter(|(_, value)| !value.is_empty())
                .map(|(key, value)| pair(key, &value))
                .collect(),
            parameters: config.shown_values().iter().map(|(key, value)| pair(key, value)).collect(),
            kept: UploadRecord::of(run, server, experiment(config)),
            most: MOST,
            refusals: vec![],
            known_refusals: HashSet::new(),
        }
    }

    /// Sends the log as it grows, until it is asked to close and everything is sent or the server is away, or until the server
    /// refuses the run. An absence is reported once, and so is every reason of a refusal.
    pub fn follow(mut self, shared: &Shared) {
        let server = self.kept.server.clone();
        let mut wait = INTERVAL;
        let mut is_away = false;
        loop {
            // Checked before the log is read, so that the last lines are sent before the loop ends.
            let is_closing = shared.is_closing();
            let result = self.send();
            for why in self.refusals.drain(..) {
                shared.warn(format!("MLflow at {server} refuses some of the data: {why}"));
            }
            match result {
                Ok(batch) => {
                    if std::mem::take(&mut is_away) {
                        shared.warn(format!("MLflow at {server} answers again and receives what it missed"));
                    }
                    wait = INTERVAL;
                    if batch.lines > 0 {
                        continue;
                    }
                }
                Err(Trouble::Away(why)) => {
                    if !std::mem::replace(&mut is_away, true) {
                        shared.warn(format!(
                            "MLflow at {server}: {why}; the run goes on, and the missing data is sent later"
                        ));
                    }
                    wait = (2 * wait).min(LONGEST);
                }
                Err(trouble) => {
                    shared.warn(format!(
                        "MLflow at {server} no longer follows this run: {}; `flatout runs track {}` sends the rest later",
                        trouble.sentence(),
                        self.run.display()
                    ));
                    shared.has_given_up.store(true, Ordering::Relaxed);
                    return;
                }
            }
            if is_closing {
                return;
            }
            std::thread::park_timeout(if shared.is_closing() { Duration::ZERO } else { wait });
        }
    }

    /// Sends the whole log.
    pub fn send_all(mut self) -> Result<Sent, String> {
        let mut sent = Sent::default();
        loop {
            match self.send() {
                Ok(batch) if batch.lines == 0 => break,
                Ok(batch) => {
                    sent.lines += batch.lines;
                    sent.points += batch.points.len() - batch.refused;
                }
                Err(trouble) => return Err(trouble.sentence()),
            }
        }
        sent.refused = (!self.refusals.is_empty()).then(|| self.refusals.join("; "));
        sent.run_id = self.kept.run_id.unwrap_or_default();
        Ok(sent)
    }

    /// Sends the next lines. Points that the server refuses are skipped; after an error the same lines are sent again.
    fn send(&mut self) -> Result<Batch, Trouble> {
        let id = self.begin()?;
        let unreadable = |error: io::Error| Trouble::Away(format!("events.jsonl cannot be read ({error})"));
        let mut batch =
            read(&self.run.join("events.jsonl"), self.kept.offset, self.kept.time).map_err(unreadable)?;
        if batch.lines == 0 {
            return Ok(batch);
        }
        batch.refused = self.log(&id, &batch.points, &batch.tags)?;
        if let Some(status) = batch.status {
            let mut request = json!({ "run_id": id, "status": status });
            if status != "RUNNING" {
                request["end_time"] = json!(milliseconds(batch.time));
            }
            let result = self.client.post("runs/update", &request);
            self.skip_refused(&id, result)?;
        }
        (self.kept.offset, self.kept.time) = (batch.offset, batch.time);
        self.keep()?;
        Ok(batch)
    }

    /// Sends points and tags, in requests that the server does not find too large. Returns the number of refused points.
    fn log(&mut self, id: &str, points: &[Value], tags: &[Value]) -> Result<usize, Trouble> {
        let (mut points, mut tags) = (points, tags);
        let mut refused = 0;
        while !points.is_empty() || !tags.is_empty() {
            let (now, later) = points.split_at(self.most.min(points.len()));
            let request = json!({ "run_id": id, "metrics": now, "tags": tags });
            match self.client.post("runs/log-batch", &request) {
                Err(Trouble::TooLarge(_)) if now.len() > 1 => self.most = now.len() / 2,
                result => {
                    refused += if result.is_err() { now.len() } else { 0 };
                    self.skip_refused(id, result)?;
                    (points, tags) = (later, &[]);
                }
            }
        }
        Ok(refused)
    }

    /// Ignores a refusal, whose reason is kept for a warning, unless the run itself is gone.
    fn skip_refused(&mut self, id: &str, result: Result<Value, Trouble>) -> Result<(), Trouble> {
        match result {
            Err(Trouble::Refused(why) | Trouble::TooLarge(why)) => {
                self.client.check_run(id)?;
                self.refused(why);
                Ok(())
            }
            other => other.map(|_| ()),
        }
    }

    fn refused(&mut self, why: String) {
        if self.known_refusals.insert(why.chars().filter(|letter| !letter.is_ascii_digit()).collect()) {
            self.refusals.push(why);
        }
    }

    /// The server's id of the run, which is created with its parameters if it does not exist.
    fn begin(&mut self) -> Result<String, Trouble> {
        if let (Some(id), true) = (&self.kept.run_id, self.kept.has_parameters) {
            return Ok(id.clone());
        }
        // Without the run nothing can be sent, so a refusal here is final.
        let to_final = |trouble: Trouble| match trouble {
            Trouble::Refused(why) | Trouble::TooLarge(why) => Trouble::Absent(why),
            other => other,
        };
        let id = match &self.kept.run_id {
            Some(id) => id.clone(),
            None => self.create().map_err(to_final)?,
        };
        self.kept.run_id = Some(id.clone());
        self.keep()?;
        let mut refused = vec![];
        for parameters in self.parameters.chunks(MOST_PARAMETERS) {
            self.log_parameters(&id, parameters, &mut refused)?;
        }
        if let Some((_, why)) = refused.first() {
            let named = refused.iter().take(SHOWN).map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
            let more = match refused.len().saturating_sub(SHOWN) {
                0 => String::new(),
                more => format!(" and {more} more"),
            };
            let why = format!("{why} (parameters {named}{more})");
            self.refused(why);
        }
        self.kept.has_parameters = true;
        self.keep()?;
        Ok(id)
    }

    /// Sends parameters. A refused request is split in halves, until each refused parameter is found alone: the server has
    /// another value of it, or cannot accept this one.
    fn log_parameters<'p>(
        &self,
        id: &str,
        parameters: &'p [Value],
        refused: &mut Vec<(&'p str, String)>,
    ) -> Result<(), Trouble> {
        match self.client.post("runs/log-batch", &json!({ "run_id": id, "params": parameters })) {
            Err(Trouble::Refused(why) | Trouble::TooLarge(why)) => {
                self.client.check_run(id)?;
                if let [parameter] = parameters {
                    refused.push((parameter["key"].as_str().unwrap_or_default(), why));
                    return Ok(());
                }
                let (first, second) = parameters.split_at(parameters.len() / 2);
                self.log_parameters(id, first, refused)?;
                self.log_parameters(id, second, refused)
            }
            result => result.map(|_| ()),
        }
    }

    fn create(&mut self) -> Result<String, Trouble> {
        let experiment = self.client.experiment(&self.kept.experiment)?;
        if self.kept.key.is_empty() {
            self.kept.key = new_key();
            self.keep()?;
        } else if let Some(id) = self.client.run_with_tag(&experiment, KEY, &self.kept.key)? {
            // It was created, and the response was lost.
            return Ok(id);
        }
        // A run that has just begun has no `start` line yet.
        let start = first_start(&self.run.join("events.jsonl")).unwrap_or_else(now);
        let tags: Vec<Value> = self.tags.iter().cloned().chain([pair(KEY, &self.kept.key)]).collect();
        self.client.create_run(&json!({
            "experiment_id": experiment, "run_name": self.name, "start_time": milliseconds(start), "tags": tags,
        }))
    }

    fn keep(&self) -> Result<(), Trouble> {
        self.kept.keep(&self.run).map_err(|error| Trouble::Away(error.to_string()))
    }
}

/// Unix time in seconds.
fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

fn milliseconds(seconds: f64) -> i64 {
    (seconds * 1e3).round() as i64
}

/// A key that is unique to a run.
fn new_key() -> String {
    let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    format!("{time:x}-{:x}", std::process::id())
}
