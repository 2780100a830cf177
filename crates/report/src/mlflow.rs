//! Sends a run to MLflow: its parameters, all metrics of its log, and its final state, over MLflow's REST interface.
//!
//! A thread reads `events.jsonl` from the offset up to which it was sent, and keeps that offset in the run's folder. So no step
//! waits, nothing is buffered in memory, and sending continues where it stopped after a server was away or a run was killed. A
//! line that is sent twice, because a response was lost, is one point in MLflow's SQL stores, because it has the time of its
//! line.

mod client;
mod follow;
mod points;
#[cfg(test)]
mod server;
#[cfg(test)]
mod tests;
mod upload_record;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use flatout_train::run::events::Event;
use flatout_train::training::trainer::Sink;
use flatout_train::{Config, UserError};

use client::{Client, Credentials};
use follow::{Follower, Shared, experiment};
use upload_record::UploadRecord;

pub use follow::Sent;

/// Timeout at the end of a run for sending the rest of the log.
const PATIENCE: Duration = Duration::from_secs(10);

/// A sink of events that sends a run to an MLflow server; idle where `track.mlflow` names none.
#[derive(Default)]
pub struct Mlflow {
    following: Option<Following>,
    /// Why nothing is sent, until a warning has said so.
    trouble: Option<String>,
}

struct Following {
    run: PathBuf,
    server: String,
    experiment: String,
    shared: Arc<Shared>,
    thread: JoinHandle<()>,
}

impl Following {
    fn begin(run: &Path, config: &Config, server: &str) -> Result<Following, String> {
        let client = Client::new(server, Credentials::of_environment())?;
        let shared = Arc::new(Shared::default());
        let follower = Follower::new(run, config, server, client);
        let thread = std::thread::Builder::new().name("mlflow".into());
        let of_thread = Arc::clone(&shared);
        let thread = thread.spawn(move || follower.follow(&of_thread)).map_err(|error| error.to_string())?;
        let experiment = experiment(config).to_string();
        Ok(Following { run: run.to_path_buf(), server: server.to_string(), experiment, shared, thread })
    }

    /// Waits until everything is sent, at most for `patience`, and returns remaining warnings.
    fn finish(self, patience: Duration) -> Option<String> {
        self.shared.close();
        self.thread.thread().unpark();
        let began = Instant::now();
        while !self.thread.is_finished() && began.elapsed() < patience {
            std::thread::sleep(Duration::from_millis(2));
        }
        let words = || {
            let all: Vec<String> = std::iter::from_fn(|| self.shared.warning()).collect();
            (!all.is_empty()).then(|| all.join("; "))
        };
        match UploadRecord::of(&self.run, &self.server, &self.experiment).lines_left(&self.run) {
            0 => words(),
            _ if self.shared.has_given_up() => words(),
            lines => Some(format!(
                "MLflow at {} has not received the last {lines} lines of events.jsonl: `flatout runs track {}` sends them",
                self.server,
                self.run.display()
            )),
        }
    }
}

impl Sink for Mlflow {
    fn open(&mut self, run: &Path, _step: u64, config: &Config) {
        *self = Mlflow::default();
        let Some(server) = &config.track.mlflow else { return };
        match Following::begin(run, config, server) {
            Ok(following) => self.following = Some(following),
            Err(why) => self.trouble = Some(format!("nothing is sent to MLflow at {server}: {why}")),
        }
    }

    /// The thread reads events from the log, so this only returns the thread's warnings. The end of a run waits for the thread.
    fn record(&mut self, event: &Event) -> Option<String> {
        match event {
            Event::End(_) => self.following.take().and_then(|following| following.finish(PATIENCE)),
            _ => match &self.following {
                Some(following) => following.shared.warning(),
                None => self.trouble.take(),
            },
        }
    }
}

/// Sends a server everything of a run that it has not received yet.
pub fn tell(run: &Path, config: &Config) -> Result<Sent, UserError> {
    let Some(server) = &config.track.mlflow else {
        return Err(UserError(format!(
            "{} names no tracker: give the address of an MLflow server, as track.mlflow=http://localhost:5000",
            run.display()
        )));
    };
    let failed = |why: String| UserError(format!("MLflow at {server}: {why}"));
    let client = Client::new(server, Credentials::of_environment()).map_err(failed)?;
    Follower::new(run, config, server, client).send_all().map_err(failed)
}
