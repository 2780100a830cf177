//! Reads a run back from its directory: its config, its progress and its curves, over all the processes that worked on it.
//! Reading needs no lock, and a run may be read while it is written.

use std::fs;
use std::path::{Path, PathBuf};

use flatout_settings::choice;
use serde::Serialize;

use crate::plot::smoothed;
use flatout_train::UserError;
use flatout_train::config::Config;
use flatout_train::metrics::Metrics;
use flatout_train::metrics::goal::Metric;
use flatout_train::refuse;
use flatout_train::run;
use flatout_train::run::events::{self, End, Event, Start, Status, Step};

choice! {
    /// The state of a run.
    pub enum State {
        /// Its last step was made.
        Done = "done",
        /// It ended before its last step, after saving.
        Stopped = "stopped",
        /// It ended with an error.
        Failed = "failed",
        /// A process holds it.
        Running = "running",
        /// Its process ended without an `end` event.
        Crashed = "crashed",
    }
}

choice! {
    /// The horizontal axis of a curve.
    pub enum Axis {
        Step = "step",
        Tokens = "tokens",
        /// Training time over all processes, without the time between them.
        Time = "time",
    }
}

/// A step of the log that was not undone by a resume, and the training time up to it.
#[derive(Clone, Debug)]
pub struct LoggedStep {
    pub step: Step,
    pub seconds: f64,
}

#[derive(Clone, Debug)]
pub struct History {
    pub dir: PathBuf,
    pub config: Config,
    pub state: State,
    /// The first and the newest `start` event.
    pub first: Option<Start>,
    pub start: Option<Start>,
    /// How often it was started.
    pub starts: usize,
    pub steps: Vec<LoggedStep>,
    /// Held-out losses by step.
    pub evals: Vec<(u64, f32)>,
    /// Metrics of evaluations besides the loss, by step.
    pub metrics: Vec<(u64, Metrics)>,
    pub warnings: Vec<String>,
    /// The step of the newest checkpoint in the log.
    pub saved: Option<u64>,
    /// The `end` event of the newest process, if it wrote one.
    pub end: Option<End>,
}

/// A run on one line.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    pub name: String,
    pub path: String,
    pub recipe: String,
    pub state: State,
    pub step: u64,
    /// Updates of the whole run, where they are known.
    pub steps: Option<u64>,
    pub loss: Option<f32>,
    pub eval_loss: Option<f32>,
    /// The metric of the newest evaluation that the run is judged by, as [`History::judged_by`] has it.
    pub metric: Option<Metric>,
    pub metric_value: Option<f64>,
    pub tokens_per_second: Option<f64>,
    /// Rows, examples or images.
    pub samples_per_second: Option<f64>,
    /// Unix time of its beginning.
    pub started: Option<f64>,
    /// Training time so far.
    pub seconds: f64,
}

impl History {
    pub fn read(dir: &Path) -> Result<History, UserError> {
        let config = run::config(dir)?;
        // Between its config and its first event a run has no log.
        let log = dir.join("events.jsonl");
        let events = match events::read(&log) {
            Ok(events) => events,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => vec![],
            Err(error) => refuse!("{} cannot be read: {error}", log.display()),
        };
        let mut history = History::of(dir, config, &events);
        if run::is_running(dir) {
            history.state = State::Running;
        }
        Ok(history)
    }

    /// Builds a history from events alone, assuming that no process is running.
    pub fn of(dir: &Path, config: Config, events: &[Event]) -> History {
        let mut history = History {
            dir: dir.to_path_buf(),
            config,
            state: State::Crashed,
            first: None,
            start: None,
            starts: 0,
            steps: vec![],
            evals: vec![],
            metrics: vec![],
            warnings: vec![],
            saved: None,
            end: None,
        };
        // The clock of the newest process: training seconds before it, and its start time.
        let (mut before, mut began, mut begins) = (0.0, f64::NAN, false);
        for event in events {
            match event {
                Event::Start(start) => {
                    history.first.get_or_insert_with(|| start.clone());
                    history.start = Some(start.clone());
                    history.starts += 1;
                    history.end = None;
                    (began, begins) = (start.time, true);
                }
                Event::Resume { step } => {
                    history.keep(*step);
                    if std::mem::take(&mut begins) {
                        before = history.steps.last().map_or(0.0, |made| made.seconds);
                    }
                }
                Event::Step(step) => {
                    if std::mem::take(&mut begins) {
                        history.keep(0);
                        before = 0.0;
                    }
                    history.keep(step.step.saturating_sub(1));
                    let elapsed = (step.time - began).max(0.0);
                    history.steps.push(LoggedStep { step: step.clone(), seconds: before + elapsed });
                }
                Event::Eval { step, loss, metrics, .. } => {
                    history.evals.retain(|(at, _)| at < step);
                    history.evals.push((*step, *loss));
                    history.metrics.retain(|(at, _)| at < step);
                    history.metrics.extend(metrics.clone().map(|metrics| (*step, metrics)));
                }
                Event::Saved { step, .. } => history.saved = Some(*step),
                Event::Warning { message } => history.warnings.push(message.clone()),
                Event::Spike { step, loss, median, .. } => history.warnings.push(format!(
                    "step {step}: the loss of {loss:.4} stands out; the median before it is {median:.4}"
                )),
                Event::Sample(_) => {}
                Event::End(end) => history.end = Some(end.clone()),
            }
        }
        history.state = match history.end.as_ref().map(|end| end.status) {
            Some(Status::Done) => State::Done,
            Some(Status::Stopped) => State::Stopped,
            Some(Status::Failed) => State::Failed,
            None => State::Crashed,
        };
        history
    }

    /// Drops everything after a step.
    fn keep(&mut self, step: u64) {
        while self.steps.last().is_some_and(|made| made.step.step > step) {
            self.steps.pop();
        }
        while self.evals.last().is_some_and(|(at, _)| *at > step) {
            self.evals.pop();
        }
        self.metrics.retain(|(at, _)| *at <= step);
    }

    /// The name of the folder.
    pub fn name(&self) -> String {
        let path = fs::canonicalize(&self.dir).unwrap_or_else(|_| self.dir.clone());
        path.file_name()
            .map_or_else(|| path.display().to_string(), |name| name.to_string_lossy().into_owned())
    }

    /// Updates of the whole run.
    pub fn total(&self) -> Option<u64> {
        self.start.as_ref().map(|start| start.steps).filter(|steps| *steps > 0).or(self.config.train.steps)
    }

    pub fn last(&self) -> Option<&LoggedStep> {
        self.steps.last()
    }

    /// The median of a number over the newest steps, which neither the first steps nor a save disturb.
    pub fn recent(&self, of: impl Fn(&Step) -> f64) -> Option<f64> {
        const RECENT: usize = 100;
        let newest = self.steps.iter().rev().take(RECENT).map(|made| of(&made.step));
        let mut values: Vec<f64> = newest.filter(|value| value.is_finite()).collect();
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied()
    }

    /// A metric of every evaluation that has it, by step.
    pub fn judged(&self, metric: Metric) -> Vec<(u64, f64)> {
        let metrics = |step: u64| self.metrics.iter().find(|(at, _)| *at == step).map(|(_, metrics)| metrics);
        let judged = |(step, loss): &(u64, f32)| Some((*step, metric.of(*loss, metrics(*step))?));
        self.evals.iter().filter_map(judged).filter(|(_, value)| !value.is_nan()).collect()
    }

    /// Whether the run learns preferences, and so has rewards.
    pub fn has_rewards(&self) -> bool {
        let of_step =
            |made: &LoggedStep| made.step.metrics.as_ref().is_some_and(|metrics| metrics.rewards().is_some());
        self.steps.iter().any(of_step) || self.metrics.iter().any(|(_, metrics)| metrics.rewards().is_some())
    }

    /// The metric that a run with classes, answers or preferences is judged by.
    pub fn judged_by(&self) -> Option<Metric> {
        let metric = self.config.eval.metric;
        let metric = if metric.is_of_classes() { metric } else { Metric::Accuracy };
        let has_answers = self.metrics.iter().any(|(_, metrics)| metrics.answers().is_some());
        match self.config.model.classes() {
            Some(_) => Some(metric),
            None if self.has_rewards() => Some(Metric::RewardAccuracy),
            None => has_answers.then_some(Metric::Exact),
        }
    }

    /// Whether the run learns from images, which have no count of tokens.
    pub fn is_of_images(&self) -> bool {
        self.config.model.image_size().is_some()
    }

    /// The best evaluation, the first of equals.
    pub fn best(&self, metric: Metric) -> Option<(u64, f64)> {
        let better =
            |best: (u64, f64), new: (u64, f64)| if metric.is_better(new.1, best.1) { new } else { best };
        self.judged(metric).into_iter().reduce(better)
    }

    pub fn summary(&self) -> Summary {
        let finite = |loss: f32| Some(loss).filter(|loss| loss.is_finite());
        let judged = self.judged_by().and_then(|metric| Some((metric, self.judged(metric).last()?.1)));
        Summary {
            name: self.name(),
            path: self.dir.display().to_string(),
            recipe: self.config.recipe.clone(),
            state: self.state,
            step: self.last().map_or(0, |made| made.step.step),
            steps: self.total(),
            loss: self.last().and_then(|made| finite(made.step.loss)),
            eval_loss: self.evals.last().and_then(|(_, loss)| finite(*loss)),
            metric: judged.map(|(metric, _)| metric),
            metric_value: judged.map(|(_, value)| value),
            tokens_per_second: self.recent(|step| step.tokens_per_second),
            samples_per_second: self.recent(|step| step.samples_per_second),
            started: self.first.as_ref().map(|start| start.time).filter(|time| time.is_finite()),
            seconds: self.last().map_or(0.0, |made| made.seconds).max(0.0),
        }
    }

    /// A number of every step over an axis.
    pub fn curve(&self, axis: Axis, of: impl Fn(&Step) -> f64) -> Vec<(f64, f64)> {
        self.steps.iter().map(|made| (place(made, axis), of(&made.step))).collect()
    }

    /// A number of every step over an axis, smoothed over `span` tokens.
    pub fn smoothed_curve(&self, axis: Axis, of: impl Fn(&Step) -> f64, span: f64) -> Vec<(f64, f64)> {
        let tokens: Vec<f64> = self.steps.iter().map(|made| made.step.tokens as f64).collect();
        smoothed(&self.curve(axis, of), &tokens, span)
    }

    /// The smoothed loss at the end.
    pub fn smoothed_loss(&self, span: f64) -> Option<f64> {
        self.smoothed_curve(Axis::Step, |step| step.loss as f64, span).last().map(|(_, loss)| *loss)
    }

    /// Held-out losses over an axis. An evaluation whose step was not logged is placed at the last logged step before it.
    pub fn eval_curve(&self, axis: Axis) -> Vec<(f64, f64)> {
        let at = |step: u64| {
            let after = self.steps.partition_point(|made| made.step.step <= step);
            self.steps[..after].last().map(|made| place(made, axis))
        };
        let points = self.evals.iter();
        points
            .filter_map(|(step, loss)| {
                Some((if axis == Axis::Step { *step as f64 } else { at(*step)? }, *loss as f64))
            })
            .collect()
    }
}

fn place(made: &LoggedStep, axis: Axis) -> f64 {
    match axis {
        Axis::Step => made.step.step as f64,
        Axis::Tokens => made.step.tokens as f64,
        Axis::Time => made.seconds,
    }
}

/// Updates that a smoothed value averages over.
const SMOOTHED_UPDATES: f64 = 20.0;

/// The tokens over which curves of these runs are smoothed, the same for all: those of twenty updates of the run with the largest
/// updates.
pub fn smoothing_span<'a>(runs: impl IntoIterator<Item = &'a History>) -> f64 {
    let update = |run: &History| {
        let last = run.last().map(|made| made.step.tokens as f64 / made.step.step.max(1) as f64);
        last.unwrap_or(0.0)
    };
    SMOOTHED_UPDATES * runs.into_iter().map(update).fold(1.0, f64::max)
}

/// A run's directory, and its history or the reason why it cannot be read.
pub type ListedRun = (PathBuf, Result<History, UserError>);

/// The runs in a folder, oldest first, or the folder itself if it is a run. Runs of sweeps and folds are one folder deeper. A run
/// that cannot be read is listed with the reason.
pub fn list(dir: &Path) -> Result<Vec<ListedRun>, UserError> {
    if run::is_run(dir) {
        return Ok(vec![(dir.to_path_buf(), History::read(dir))]);
    }
    let within = |dir: &Path| -> std::io::Result<Vec<PathBuf>> {
        Ok(fs::read_dir(dir)?.flatten().map(|entry| entry.path()).filter(|path| path.is_dir()).collect())
    };
    if !dir.exists() {
        return Err(run::no_run(dir));
    }
    let folders = match within(dir) {
        Ok(folders) => folders,
        Err(error) => refuse!("{} cannot be read: {error}", dir.display()),
    };
    let deeper = folders.iter().filter(|folder| !run::is_run(folder)).flat_map(|folder| within(folder).ok());
    let all = folders.iter().cloned().chain(deeper.flatten()).filter(|folder| run::is_run(folder));
    let mut runs: Vec<_> = all.map(|path| (path.clone(), History::read(&path))).collect();
    let begun = |run: &Result<History, UserError>| {
        run.as_ref().ok().and_then(|h| h.first.as_ref().map(|start| start.time)).unwrap_or(f64::NAN)
    };
    runs.sort_by(|(a, x), (b, y)| begun(x).total_cmp(&begun(y)).then_with(|| a.cmp(b)));
    Ok(runs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use flatout_train::recipes;

    fn start(time: f64) -> Event {
        Event::Start(Start { time, steps: 6, ..Start::default() })
    }

    fn step(step: u64, loss: f32, time: f64) -> Event {
        let line = format!(
            r#"{{"event":"step","step":{step},"epoch":0,"loss":{loss},"grad_norm":1,"lr":1,"tokens":{},"samples":0,
                "step_ms":1,"tokens_per_second":{},"samples_per_second":1,"time":{time}}}"#,
            100 * step,
            1000 + step
        );
        serde_json::from_str(&line).unwrap()
    }

    fn end(status: Status) -> Event {
        Event::End(End {
            status,
            steps: 6,
            loss: 1.0,
            loss_floor: None,
            tokens_per_second: 1.0,
            skipped: 0,
            time: 1.0,
            data_wait: None,
            early: None,
        })
    }

    fn history(events: &[Event]) -> History {
        History::of(Path::new("runs/tiny-1"), recipes::resolve("tiny", &[], &[]).unwrap(), events)
    }

    #[test]
    fn the_time_between_two_processes_does_not_count() {
        let run = history(&[
            start(1000.0),
            step(1, 5.0, 1010.0),
            Event::Eval { step: 1, loss: 5.5, metrics: None, averaged: false },
            step(2, 4.0, 1020.0),
            step(3, 3.0, 1030.0),
            Event::Eval { step: 3, loss: 3.5, metrics: None, averaged: false },
            start(5000.0),
            Event::Resume { step: 2 },
            step(3, 3.25, 5005.0),
            step(4, 2.0, 5015.0),
            Event::Eval { step: 4, loss: 2.5, metrics: None, averaged: false },
            end(Status::Stopped),
        ]);
        assert_eq!(
            run.curve(Axis::Time, |step| step.loss as f64),
            [(10.0, 5.0), (20.0, 4.0), (25.0, 3.25), (35.0, 2.0)]
        );
        assert_eq!(run.eval_curve(Axis::Tokens), [(100.0, 5.5), (400.0, 2.5)]);
        assert_eq!((run.state, run.starts), (State::Stopped, 2));
        let summary = run.summary();
        assert_eq!(
            (summary.step, summary.steps, summary.loss, summary.eval_loss),
            (4, Some(6), Some(2.0), Some(2.5))
        );
        assert_eq!((summary.started, summary.seconds), (Some(1000.0), 35.0));
        assert_eq!(summary.tokens_per_second, Some(1003.0));
    }

    #[test]
    fn a_step_back_within_a_process_keeps_its_clock() {
        let run = history(&[
            start(0.0),
            step(1, 5.0, 10.0),
            step(2, 4.0, 20.0),
            Event::Resume { step: 1 },
            step(2, 4.5, 40.0),
        ]);
        assert_eq!(run.steps.len(), 2);
        assert_eq!(run.curve(Axis::Time, |step| step.loss as f64), [(10.0, 5.0), (40.0, 4.5)]);
    }

    #[test]
    fn a_run_that_began_again_has_one_beginning() {
        let run =
            history(&[start(0.0), step(1, 5.0, 1.0), step(2, 4.0, 2.0), start(10.0), step(1, 5.0, 11.0)]);
        assert_eq!(run.curve(Axis::Step, |step| step.loss as f64), [(1.0, 5.0)]);
        assert_eq!(run.state, State::Crashed);
    }

    #[test]
    fn states_are_those_of_the_newest_process() {
        assert_eq!(history(&[]).state, State::Crashed);
        assert_eq!(history(&[start(0.0), end(Status::Done)]).state, State::Done);
        assert_eq!(history(&[start(0.0), end(Status::Failed)]).state, State::Failed);
        assert_eq!(history(&[start(0.0), end(Status::Done), start(1.0)]).state, State::Crashed);
        assert_eq!(history(&[]).summary().steps, Some(800), "from the config where it never began");
    }

    #[test]
    fn a_folder_lists_its_runs_and_a_broken_one_with_the_reason() {
        let folder = tempfile::tempdir().unwrap();
        let config = recipes::resolve("tiny", &[], &[]).unwrap();
        for (name, time) in [("b", 2.0), ("a", 3.0), ("c", 1.0)] {
            let dir = folder.path().join(name);
            fs::create_dir(&dir).unwrap();
            fs::write(dir.join("config.toml"), config.to_toml()).unwrap();
            fs::write(dir.join("events.jsonl"), start(time).to_json() + "\n").unwrap();
        }
        fs::create_dir(folder.path().join("notes")).unwrap();
        fs::write(folder.path().join("b/events.jsonl"), "nonsense\n{}\n").unwrap();
        let runs = list(folder.path()).unwrap();
        let named: Vec<_> = runs.iter().map(|(path, run)| (path.file_name().unwrap(), run.is_ok())).collect();
        assert_eq!(named, [("c".as_ref(), true), ("a".as_ref(), true), ("b".as_ref(), false)]);
        assert_eq!(list(&folder.path().join("a")).unwrap().len(), 1, "a run is a list of itself");
        assert!(list(&folder.path().join("none")).unwrap_err().0.starts_with("there is no run in "));
    }
}
