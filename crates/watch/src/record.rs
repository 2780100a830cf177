//! The state of a run, built from its log line by line: curves, evaluations, warnings, its start and its end.
//!
//! The last of several lines for one step counts: when a run is resumed from a checkpoint, earlier lines of later steps are void.
//! Memory is bounded whatever the log has: [`MOST_BYTES`] per run.

use std::collections::VecDeque;

use serde_json::{Value, json};

use crate::curves::{At, Curves};
use crate::line::{Gpu, Line, Metrics};

/// Buckets of the curves of steps, and of those of evaluations.
const STEPS: usize = 2048;
const EVALUATIONS: usize = 512;
/// The number of newest warnings that are kept, and the most bytes of one.
const WARNINGS: usize = 100;
const WARNING_BYTES: usize = 2000;
/// The most bytes of a `start` line, and classes of a confusion matrix, that are kept.
const START_BYTES: usize = 1 << 20;
const CLASSES: usize = 128;
/// The number of newest samples that are kept, and the most bytes of all their lines and of one.
const SAMPLES: usize = 512;
const SAMPLE_BYTES: usize = 256 << 10;
const SAMPLE_LINE: usize = 16 << 10;
/// The most bytes of a record, with full curves and all other parts at their limits.
pub const MOST_BYTES: usize = 4 << 20;

/// The name of a curve, and the function that reads its value from a line.
pub type Channel = (&'static str, for<'a, 'b> fn(&'a Line<'b>) -> Option<f64>);

/// The curves of steps.
pub const STEP_CHANNELS: [Channel; 18] = [
    ("loss", |line| line.loss),
    ("grad_norm", |line| line.grad_norm),
    ("lr", |line| line.lr),
    ("tokens_per_second", |line| line.tokens_per_second),
    ("samples_per_second", |line| line.samples_per_second),
    ("step_ms", |line| line.step_ms),
    ("mfu", |line| line.mfu),
    ("of_predicted", |line| line.of_predicted),
    ("of_roofline", |line| line.of_roofline),
    ("data_wait", |line| Some(line.data_wait_ms? / line.step_ms?)),
    ("padding", |line| line.padding),
    ("reward_accuracy", |line| line.metrics.as_ref()?.reward_accuracy),
    ("reward_margin", |line| line.metrics.as_ref()?.reward_margin),
    ("gpu_utilization", |line| gpu(line)?.utilization),
    ("gpu_memory_bytes", |line| gpu(line)?.memory_bytes),
    ("gpu_power_watts", |line| gpu(line)?.power_watts),
    ("gpu_temperature_celsius", |line| gpu(line)?.temperature_celsius),
    ("gpu_clock_mhz", |line| gpu(line)?.clock_mhz),
];

/// The curves of evaluations.
pub const EVALUATION_CHANNELS: [Channel; 8] = [
    ("loss", |line| line.loss),
    ("accuracy", |line| metrics(line)?.accuracy),
    ("f1", |line| metrics(line)?.mean.as_ref()?.f1),
    ("exact", |line| metrics(line)?.exact),
    ("token_accuracy", |line| metrics(line)?.token_accuracy),
    ("reward_accuracy", |line| metrics(line)?.reward_accuracy),
    ("reward_margin", |line| metrics(line)?.reward_margin),
    ("bits_per_byte", |line| metrics(line)?.bits_per_byte),
];

fn gpu<'a>(line: &'a Line<'_>) -> Option<&'a Gpu> {
    line.gpu.as_ref()
}

fn metrics<'a>(line: &'a Line<'_>) -> Option<&'a Metrics> {
    line.metrics.as_ref()
}

#[derive(Clone, Debug)]
pub struct Record {
    pub steps: Curves,
    pub evaluations: Curves,
    /// The newest `start` line.
    pub start: Option<Value>,
    /// The number of starts, and the time of the first.
    pub starts: u64,
    pub first_time: Option<f64>,
    /// The newest `end` line, where the newest process wrote one.
    pub end: Option<Value>,
    pub saved: Option<u64>,
    /// The newest confusion matrix and the step of its evaluation.
    pub confusion: Option<(u64, Vec<Vec<u64>>)>,
    pub warnings: VecDeque<String>,
    pub warning_count: u64,
    /// The newest samples, each with the bytes of its line.
    samples: VecDeque<(usize, Value)>,
    pub skipped: u64,
    pub epoch: Option<f64>,
    /// The reasons for which the GPU's clock is throttled at the newest step.
    pub throttled: Vec<String>,
    /// Increases with every change except of the curves.
    pub revision: u64,
    clock: Clock,
}

/// The clock of the newest process.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    /// Training seconds before it.
    before: f64,
    /// Its start time.
    began: f64,
    /// Whether its first step is still to come.
    begins: bool,
    /// Training seconds at the last step of the log.
    seconds: f64,
}

impl Default for Record {
    fn default() -> Record {
        let names = |channels: &[Channel]| channels.iter().map(|(name, _)| *name).collect();
        Record {
            steps: Curves::new(names(&STEP_CHANNELS), STEPS),
            evaluations: Curves::new(names(&EVALUATION_CHANNELS), EVALUATIONS),
            start: None,
            starts: 0,
            first_time: None,
            end: None,
            saved: None,
            confusion: None,
            warnings: VecDeque::new(),
            warning_count: 0,
            samples: VecDeque::new(),
            skipped: 0,
            epoch: None,
            throttled: vec![],
            revision: 0,
            clock: Clock { before: 0.0, began: f64::NAN, begins: false, seconds: 0.0 },
        }
    }
}

impl Record {
    /// A record that continues from a position in a log.
    pub fn at(clock: Clock) -> Record {
        Record { clock, ..Record::default() }
    }

    pub fn clock(&self) -> Clock {
        self.clock
    }

    /// The last valid step; 0 where there is none.
    pub fn last_step(&self) -> u64 {
        self.steps.last().map_or(0, |at| at.step)
    }

    /// Processes the next line, given with the bytes it was read from.
    pub fn take(&mut self, line: &Line<'_>, bytes: &[u8]) {
        let step = line.step.unwrap_or(0);
        if line.event != "step" {
            self.revision += 1;
        }
        match &*line.event {
            "start" => {
                self.starts += 1;
                self.first_time = self.first_time.or(line.time);
                self.start =
                    if bytes.len() <= START_BYTES { serde_json::from_slice(bytes).ok() } else { None };
                self.end = None;
                (self.clock.began, self.clock.begins) = (line.time.unwrap_or(f64::NAN), true);
            }
            "resume" => {
                self.keep(step);
                if std::mem::take(&mut self.clock.begins) {
                    self.clock.before = self.steps.last().map_or(self.clock.seconds, |at| at.seconds);
                }
            }
            "step" => {
                if std::mem::take(&mut self.clock.begins) {
                    self.keep(0);
                    self.clock.before = 0.0;
                }
                self.keep(step.saturating_sub(1));
                let elapsed = (line.time.unwrap_or(f64::NAN) - self.clock.began).max(0.0);
                let seconds = self.clock.before + if elapsed.is_finite() { elapsed } else { 0.0 };
                self.clock.seconds = seconds;
                let at = At { step, tokens: line.tokens.unwrap_or(0) as f64, seconds };
                self.steps.push(at, STEP_CHANNELS.iter().map(|(_, of)| of(line)));
                self.skipped = line.skipped.unwrap_or(self.skipped);
                self.epoch = line.epoch;
                self.throttled = line.gpu.as_ref().map_or(vec![], |gpu| gpu.throttled.clone());
            }
            "eval" => {
                self.evaluations.keep(step.saturating_sub(1));
                let known = self.steps.at(step).unwrap_or(At { step, tokens: 0.0, seconds: 0.0 });
                self.evaluations
                    .push(At { step, ..known }, EVALUATION_CHANNELS.iter().map(|(_, of)| of(line)));
                let confusion = line.metrics.as_ref().and_then(|metrics| metrics.confusion.clone());
                self.confusion = confusion.filter(|rows| rows.len() <= CLASSES).map(|rows| (step, rows));
            }
            "saved" => self.saved = Some(step),
            "sample" if bytes.len() <= SAMPLE_LINE => self.sample(bytes),
            "warning" => self.warn(line.message.as_deref().unwrap_or("")),
            "spike" => {
                let (loss, median) = (line.loss.unwrap_or(f64::NAN), line.median.unwrap_or(f64::NAN));
                self.warn(&format!(
                    "step {step}: the loss of {loss:.4} stands out; the median before it is {median:.4}"
                ));
            }
            "end" => self.end = serde_json::from_slice(bytes).ok().filter(|_| bytes.len() <= START_BYTES),
            _ => {}
        }
    }

    /// Removes everything after a step.
    fn keep(&mut self, step: u64) {
        self.steps.keep(step);
        self.evaluations.keep(step);
        // Samples are in the order of their steps, so the last one shows whether there is anything to remove.
        let counts = |(_, sample): &(usize, Value)| sample["step"].as_u64().is_some_and(|at| at <= step);
        if !self.samples.back().is_none_or(counts) {
            self.samples.retain(counts);
        }
        if self.confusion.as_ref().is_some_and(|(at, _)| *at > step) {
            self.confusion = None;
        }
    }

    fn sample(&mut self, bytes: &[u8]) {
        let Ok(sample) = serde_json::from_slice(bytes) else { return };
        self.samples.push_back((bytes.len(), sample));
        let size = |samples: &VecDeque<(usize, Value)>| samples.iter().map(|(bytes, _)| bytes).sum::<usize>();
        while self.samples.len() > SAMPLES || size(&self.samples) > SAMPLE_BYTES {
            self.samples.pop_front();
        }
    }

    /// The newest samples, the oldest first.
    pub fn samples(&self) -> Vec<Value> {
        self.samples.iter().map(|(_, sample)| sample.clone()).collect()
    }

    fn warn(&mut self, message: &str) {
        self.warning_count += 1;
        if self.warnings.len() == WARNINGS {
            self.warnings.pop_front();
        }
        let end = message.char_indices().map(|(at, _)| at).find(|at| *at >= WARNING_BYTES);
        self.warnings.push_back(message[..end.unwrap_or(message.len())].into());
    }

    /// Everything besides the curves, as a page shows it.
    pub fn object(&self) -> Value {
        json!({
            "start": self.start,
            "starts": self.starts,
            "first_time": self.first_time,
            "end": self.end,
            "saved": self.saved,
            "confusion": self.confusion.as_ref().map(|(step, rows)| json!({ "step": step, "rows": rows })),
            "warnings": self.warnings,
            "warning_count": self.warning_count,
            "skipped": self.skipped,
            "epoch": self.epoch,
            "throttled": self.throttled,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recorded(lines: &[Value]) -> Record {
        let mut record = Record::default();
        for line in lines {
            let text = line.to_string();
            record.take(&Line::read(text.as_bytes()).unwrap(), text.as_bytes());
        }
        record
    }

    fn step(step: u64, loss: f64, time: f64) -> Value {
        json!({ "event": "step", "step": step, "loss": loss, "tokens": 100 * step, "time": time })
    }

    #[test]
    fn a_resumed_run_removes_later_steps() {
        let start = |time: f64| json!({ "event": "start", "time": time, "steps": 9 });
        let record = recorded(&[
            start(100.0),
            step(1, 5.0, 101.0),
            step(2, 4.0, 102.0),
            json!({ "event": "sample", "step": 2, "prompt": "", "text": "kept" }),
            json!({ "event": "saved", "step": 2 }),
            step(3, 99.0, 103.0),
            json!({ "event": "eval", "step": 3, "loss": 98.0, "metrics": { "confusion": [[1, 0], [0, 1]] } }),
            json!({ "event": "sample", "step": 3, "prompt": "", "text": "void" }),
            start(500.0),
            json!({ "event": "resume", "step": 2 }),
            step(3, 3.0, 501.5),
        ]);
        let columns = record.steps.since(0);
        assert_eq!(columns["curves"]["loss"]["mean"], json!([5.0, 4.0, 3.0]));
        assert_eq!(columns["seconds"], json!([1.0, 2.0, 3.5]), "without the time between processes");
        assert!(record.evaluations.is_empty() && record.confusion.is_none());
        let samples = record.samples();
        assert_eq!((samples.len(), &samples[0]["text"]), (1, &json!("kept")));
        assert_eq!((record.starts, record.saved), (2, Some(2)));
    }

    #[test]
    fn a_run_that_starts_over_has_no_earlier_steps() {
        let start = json!({ "event": "start", "time": 1.0 });
        let record =
            recorded(&[start.clone(), step(1, 5.0, 2.0), step(2, 4.0, 3.0), start, step(1, 6.0, 4.0)]);
        assert_eq!(record.steps.since(0)["curves"]["loss"]["mean"], json!([6.0]));
    }

    #[test]
    fn memory_is_bounded() {
        let mut record =
            recorded(&[json!({ "event": "start", "time": 0.0, "recipe": "x".repeat(START_BYTES) })]);
        assert!(record.start.is_none());
        for step in 1..=20_000 {
            let text = json!({ "event": "warning", "message": "é".repeat(WARNING_BYTES) }).to_string();
            if step % 100 == 0 {
                record.take(&Line::read(text.as_bytes()).unwrap(), text.as_bytes());
            }
            let text = self::step(step, 1.0, step as f64).to_string();
            record.take(&Line::read(text.as_bytes()).unwrap(), text.as_bytes());
        }
        for step in 0..2000 {
            let text = json!({ "event": "sample", "step": step, "text": "x".repeat(1000) }).to_string();
            record.take(&Line::read(text.as_bytes()).unwrap(), text.as_bytes());
        }
        let kept: usize = record.samples.iter().map(|(bytes, _)| bytes).sum();
        assert!(kept <= SAMPLE_BYTES && record.samples().last().unwrap()["step"] == 1999);
        let huge = json!({ "event": "sample", "step": 3000, "text": "x".repeat(SAMPLE_LINE) }).to_string();
        record.take(&Line::read(huge.as_bytes()).unwrap(), huge.as_bytes());
        assert_eq!(record.samples().last().unwrap()["step"], 1999);
        assert_eq!((record.warnings.len(), record.warning_count), (WARNINGS, 200));
        assert!(record.steps.len() <= STEPS);
        let curves = record.steps.most_bytes() + record.evaluations.most_bytes();
        // A value of JSON takes at most a few times the bytes of its text.
        let rest =
            WARNINGS * (WARNING_BYTES + 4) + 2 * START_BYTES + CLASSES * CLASSES * 8 + 2 * SAMPLE_BYTES;
        assert!(curves + rest < MOST_BYTES, "{curves} and {rest}");
    }
}
