//! The one who reads a log and tells a server of it, in a thread beside the training or by itself afterwards.

use std::collections::{HashSet, VecDeque};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use flatout_train::Config;
use serde_json::{Value, json};

use super::client::{Client, Trouble};
use super::kept::Kept;
use super::points::{Batch, MOST, first_start, pair, read};

/// The experiment of runs that name none.
const EXPERIMENT: &str = "flatout";
/// The tag by which a run is found again whose number was lost on its way.
const KEY: &str = "flatout.key";
/// Parameters of a request at most.
const MOST_PARAMETERS: usize = 100;
/// Refused parameters that a warning names.
const SHOWN: usize = 3;
/// The time between two looks at the log, and the longest between two attempts to reach a server that is away.
const INTERVAL: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(30);

/// The thread's words to the loop, and back.
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

    /// The next sentence to warn with; never waits.
    pub fn warning(&self) -> Option<String> {
        self.warnings.try_lock().ok()?.pop_front()
    }

    /// Whether the server will take nothing more of the run, which a warning says.
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

/// Everything that was told at once.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Told {
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
    kept: Kept,
    /// Points of a request at most; fewer once the server has found a request too large.
    most: usize,
    /// Reasons of refusals that were not handed on yet, and those that were, without their digits: times and steps differ.
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
            kept: Kept::of(run, server, experiment(config)),
            most: MOST,
            refusals: vec![],
            known_refusals: HashSet::new(),
        }
    }

    /// Tells of the log as it grows, until it is asked to close and all was told, or the server is away then, or takes nothing more of this run. An
    /// absence is told once, and so is every reason of a refusal.
    pub fn follow(mut self, shared: &Shared) {
        let server = self.kept.server.clone();
        let mut wait = INTERVAL;
        let mut is_away = false;
        loop {
            // Asked before the log is read: the last lines are among those that are read then.
            let is_closing = shared.is_closing();
            let told = self.tell();
            for why in self.refusals.drain(..) {
                shared.warn(format!("MLflow at {server} leaves something out: {why}"));
            }
            match told {
                Ok(batch) => {
                    if std::mem::take(&mut is_away) {
                        shared.warn(format!("MLflow at {server} answers again and gets what it missed"));
                    }
                    wait = INTERVAL;
                    if batch.lines > 0 {
                        continue;
                    }
                }
                Err(Trouble::Away(why)) => {
                    if !std::mem::replace(&mut is_away, true) {
                        shared.warn(format!(
                            "MLflow at {server}: {why}; the run goes on, and what it misses is told later"
                        ));
                    }
                    wait = (2 * wait).min(LONGEST);
                }
                Err(trouble) => {
                    shared.warn(format!(
                        "MLflow at {server} follows this run no more: {}; `flatout runs track {}` sends the rest later",
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

    /// Tells of all that the log has.
    pub fn tell_all(mut self) -> Result<Told, String> {
        let mut told = Told::default();
        loop {
            match self.tell() {
                Ok(batch) if batch.lines == 0 => break,
                Ok(batch) => {
                    told.lines += batch.lines;
                    told.points += batch.points.len() - batch.refused;
                }
                Err(trouble) => return Err(trouble.sentence()),
            }
        }
        told.refused = (!self.refusals.is_empty()).then(|| self.refusals.join("; "));
        told.run_id = self.kept.run_id.unwrap_or_default();
        Ok(told)
    }

    /// Tells of the next lines. Points that a server refuses are passed over; where this fails, the lines are told again.
    fn tell(&mut self) -> Result<Batch, Trouble> {
        let id = self.begin()?;
        let unreadable = |error: io::Error| Trouble::Away(format!("events.jsonl cannot be read ({error})"));
        let mut batch =
            read(&self.run.join("events.jsonl"), self.kept.offset, self.kept.time).map_err(unreadable)?;
        if batch.lines == 0 {
            return Ok(batch);
        }
        batch.refused = self.log(&id, &batch.points, &batch.tags)?;
        if let Some(status) = batch.status {
            let mut asked = json!({ "run_id": id, "status": status });
            if status != "RUNNING" {
                asked["end_time"] = json!(milliseconds(batch.time));
            }
            let told = self.client.post("runs/update", &asked);
            self.pass_over(&id, told)?;
        }
        (self.kept.offset, self.kept.time) = (batch.offset, batch.time);
        self.keep()?;
        Ok(batch)
    }

    /// Tells of points and tags, in requests that the server does not find too large. Returns the number of points that were refused.
    fn log(&mut self, id: &str, points: &[Value], tags: &[Value]) -> Result<usize, Trouble> {
        let (mut points, mut tags) = (points, tags);
        let mut refused = 0;
        while !points.is_empty() || !tags.is_empty() {
            let (now, later) = points.split_at(self.most.min(points.len()));
            let asked = json!({ "run_id": id, "metrics": now, "tags": tags });
            match self.client.post("runs/log-batch", &asked) {
                Err(Trouble::TooLarge(_)) if now.len() > 1 => self.most = now.len() / 2,
                told => {
                    refused += if told.is_err() { now.len() } else { 0 };
                    self.pass_over(id, told)?;
                    (points, tags) = (later, &[]);
                }
            }
        }
        Ok(refused)
    }

    /// Goes on behind a refusal, whose reason is kept, unless the run itself is gone.
    fn pass_over(&mut self, id: &str, told: Result<Value, Trouble>) -> Result<(), Trouble> {
        match told {
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

    /// The server's number of the run, which is made with its parameters where it is not there yet.
    fn begin(&mut self) -> Result<String, Trouble> {
        if let (Some(id), true) = (&self.kept.run_id, self.kept.has_parameters) {
            return Ok(id.clone());
        }
        // Nothing can be told to a run that is not there, so what is refused ends it.
        let final_word = |trouble: Trouble| match trouble {
            Trouble::Refused(why) | Trouble::TooLarge(why) => Trouble::Absent(why),
            other => other,
        };
        let id = match &self.kept.run_id {
            Some(id) => id.clone(),
            None => self.create().map_err(final_word)?,
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

    /// Tells of parameters. Of those that are refused together, each half is told, until those are left that are refused alone: the server
    /// keeps another value of them, or cannot take this one.
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
            told => told.map(|_| ()),
        }
    }

    fn create(&mut self) -> Result<String, Trouble> {
        let experiment = self.client.experiment(&self.kept.experiment)?;
        if self.kept.key.is_empty() {
            self.kept.key = new_key();
            self.keep()?;
        } else if let Some(id) = self.client.run_with_tag(&experiment, KEY, &self.kept.key)? {
            // It was made, and the answer was lost.
            return Ok(id);
        }
        // A run that has only just begun has no such line yet.
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

/// Seconds since 1970.
fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

fn milliseconds(seconds: f64) -> i64 {
    (seconds * 1e3).round() as i64
}

/// A mark that no other run has.
fn new_key() -> String {
    let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    format!("{time:x}-{:x}", std::process::id())
}
