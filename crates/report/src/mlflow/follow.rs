//! The one who reads a log and tells a server of it, in a thread beside the training or by itself afterwards.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use flatout_data::durable;
use flatout_train::Config;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::client::{Client, Trouble};
use super::points::{Batch, pair, read};

/// The file of a run's folder that says what the server was told.
const KEPT: &str = "mlflow.json";
/// The experiment of runs that name none.
const EXPERIMENT: &str = "flatout";
/// The tag by which a run is found again whose number was lost on its way.
const KEY: &str = "flatout.key";
/// Parameters of a request at most.
const MOST_PARAMETERS: usize = 100;
/// The time between two looks at the log, and the longest between two attempts to reach a server that is away.
const INTERVAL: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(30);

/// The thread's words to the loop, and back.
#[derive(Default)]
pub struct Shared {
    warnings: Mutex<VecDeque<String>>,
    is_closing: AtomicBool,
}

impl Shared {
    pub fn close(&self) {
        self.is_closing.store(true, Ordering::Relaxed);
    }

    /// The next sentence to warn with; never waits.
    pub fn warning(&self) -> Option<String> {
        self.warnings.try_lock().ok()?.pop_front()
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

/// The knowledge that a server has of a run, as the run's folder keeps it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Kept {
    server: String,
    experiment: String,
    /// Its own mark on the run, made before the run is.
    key: String,
    /// The server's number of the run.
    run_id: Option<String>,
    has_parameters: bool,
    /// How far the log was told, in bytes, and the time of its last line.
    offset: u64,
    time: f64,
}

/// Everything that was told at once.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Told {
    pub run_id: String,
    pub lines: usize,
    pub points: usize,
    /// Why some points were refused.
    pub refused: Option<String>,
}

pub struct Follower {
    run: PathBuf,
    client: Client,
    name: String,
    tags: Vec<Value>,
    parameters: Vec<Value>,
    kept: Kept,
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
        let experiment = config.track.experiment_name.clone().unwrap_or(EXPERIMENT.into());
        let kept: Option<Kept> =
            fs::read(run.join(KEPT)).ok().and_then(|text| serde_json::from_slice(&text).ok());
        // Another server, or another experiment, knows nothing yet.
        let kept = kept.filter(|kept| kept.server == server && kept.experiment == experiment);
        let fresh = || Kept { server: server.into(), experiment, ..Kept::default() };
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
            kept: kept.unwrap_or_else(fresh),
        }
    }

    /// Tells of the log as it grows, until it is asked to close and all was told, or the server is away then. An absence is told once.
    pub fn follow(mut self, shared: &Shared) {
        let server = self.kept.server.clone();
        let mut wait = INTERVAL;
        let mut is_away = false;
        loop {
            // Asked before the log is read: the last lines are among those that are read then.
            let is_closing = shared.is_closing();
            match self.tell() {
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
                Err(Trouble::Refused(why)) => {
                    shared.warn(format!("MLflow at {server} leaves some points out: {why}"));
                    continue;
                }
                Err(Trouble::Absent(why)) => {
                    shared.warn(format!("MLflow at {server} follows this run no more: {why}"));
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
                    told.points += batch.points.len();
                }
                Err(Trouble::Refused(why)) if self.kept.has_parameters => told.refused = Some(why),
                Err(trouble) => return Err(trouble.sentence()),
            }
        }
        told.run_id = self.kept.run_id.unwrap_or_default();
        Ok(told)
    }

    /// Tells of the next lines. Those that a server refuses are passed over; otherwise they are told again where this fails.
    fn tell(&mut self) -> Result<Batch, Trouble> {
        let id = self.begin()?;
        let unreadable =
            |error: std::io::Error| Trouble::Away(format!("events.jsonl cannot be read ({error})"));
        let batch =
            read(&self.run.join("events.jsonl"), self.kept.offset, self.kept.time).map_err(unreadable)?;
        if batch.lines == 0 {
            return Ok(batch);
        }
        let mut told = Ok(Value::Null);
        if !batch.points.is_empty() || !batch.tags.is_empty() {
            let asked = json!({ "run_id": id, "metrics": batch.points, "tags": batch.tags });
            told = self.client.post("runs/log-batch", &asked);
        }
        if let (Ok(_), Some(status)) = (&told, batch.status) {
            let mut asked = json!({ "run_id": id, "status": status });
            if status != "RUNNING" {
                asked["end_time"] = json!((batch.time * 1e3).round() as i64);
            }
            told = self.client.post("runs/update", &asked);
        }
        if matches!(told, Ok(_) | Err(Trouble::Refused(_))) {
            (self.kept.offset, self.kept.time) = (batch.offset, batch.time);
            self.keep()?;
        }
        told.map(|_| batch)
    }

    /// The server's number of the run, which is made with its parameters where it is not there yet.
    fn begin(&mut self) -> Result<String, Trouble> {
        if let (Some(id), true) = (&self.kept.run_id, self.kept.has_parameters) {
            return Ok(id.clone());
        }
        // Nothing can be told to a run that is not there, so what is refused ends it.
        let final_word = |trouble: Trouble| match trouble {
            Trouble::Refused(why) => Trouble::Absent(why),
            other => other,
        };
        let id = match &self.kept.run_id {
            Some(id) => id.clone(),
            None => self.create().map_err(final_word)?,
        };
        self.kept.run_id = Some(id.clone());
        self.keep()?;
        for parameters in self.parameters.chunks(MOST_PARAMETERS) {
            let asked = json!({ "run_id": id, "params": parameters });
            match self.client.post("runs/log-batch", &asked) {
                // A parameter keeps its first value there.
                Ok(_) | Err(Trouble::Refused(_)) => {}
                Err(trouble) => return Err(trouble),
            }
        }
        self.kept.has_parameters = true;
        self.keep()?;
        Ok(id)
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
        let start = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as i64;
        let tags: Vec<Value> = self.tags.iter().cloned().chain([pair(KEY, &self.kept.key)]).collect();
        self.client.create_run(&json!({
            "experiment_id": experiment, "run_name": self.name, "start_time": start, "tags": tags,
        }))
    }

    fn keep(&self) -> Result<(), Trouble> {
        let text = serde_json::to_vec_pretty(&self.kept).expect("it has a JSON form");
        let kept = durable::replace(&self.run.join(KEPT), &text);
        kept.map_err(|error| Trouble::Away(format!("{KEPT} cannot be written ({error})")))
    }
}

/// The lines of a run's log that no server was told.
pub fn lines_left(run: &Path) -> usize {
    let kept: Option<Kept> =
        fs::read(run.join(KEPT)).ok().and_then(|text| serde_json::from_slice(&text).ok());
    let from = kept.map_or(0, |kept| kept.offset);
    let log =
        File::open(run.join("events.jsonl")).and_then(|mut log| log.seek(SeekFrom::Start(from)).map(|_| log));
    log.map_or(0, |log| BufReader::new(log).split(b'\n').map_while(Result::ok).count())
}

/// A mark that no other run has.
fn new_key() -> String {
    let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    format!("{time:x}-{:x}", std::process::id())
}
