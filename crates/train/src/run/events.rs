//! Events of a run, one JSON object per line in `events.jsonl`. Other tools read this file, so its names are a contract.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Deserializer, Serialize};

use crate::metrics::{Metrics, null_is_nan};
use crate::run::samples::Sample;

/// A line of the log. Non-finite numbers are written as `null` and read as NaN; floats are written in their shortest exact form,
/// 32-bit floats as such.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
#[allow(clippy::large_enum_variant, reason = "a run has one start, and most events are steps")]
pub enum Event {
    Start(Start),
    Step(Step),
    /// Mean loss on held-out data after update `step`.
    Eval {
        step: u64,
        #[serde(deserialize_with = "null_is_nan")]
        loss: f32,
        /// Metrics, where classes, answers or preferences are learned.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        metrics: Option<Metrics>,
        /// Whether the running average of the weights was evaluated (`train.ema`) instead of the weights.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        averaged: bool,
    },
    /// A checkpoint is complete on disk.
    Saved {
        step: u64,
        path: String,
    },
    /// The run continues after update `step`. Earlier lines of later steps are void: of several lines for one step the last one
    /// counts.
    Resume {
        step: u64,
    },
    Warning {
        message: String,
    },
    /// The loss of update `step` stands out from the losses before it.
    Spike {
        step: u64,
        loss: f32,
        /// Median of the losses before it.
        median: f32,
        /// Distance above the median in robust deviations.
        deviations: f64,
    },
    /// A text that the model wrote, or a class that it predicted, at an evaluation.
    Sample(Sample),
    End(End),
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Start {
    pub recipe: String,
    pub backend: String,
    /// The active switches, read from the compiled plans.
    pub switches: BTreeMap<String, String>,
    pub arena_bytes: u64,
    pub driver_bytes: u64,
    /// Kernels of the plans that may give different bits each time.
    #[serde(default)]
    pub not_deterministic: Vec<String>,
    /// The kernels that run attention, on a GPU, with the times they were chosen by.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attention: Option<String>,
    /// Number of products per kernel, on a GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub products: Option<String>,
    /// The layers that multiply in 8-bit floats, where some do, and the reason for the choice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fp8: Option<String>,
    /// The update rule with its hyperparameters, in words.
    #[serde(default)]
    pub optimizer: String,
    /// How batches are prepared, in words.
    #[serde(default)]
    pub loader: String,
    /// Where a GPU's kernels came from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prepared: Option<Prepared>,
    /// Seconds spent on each part of the start.
    #[serde(default)]
    pub start_seconds: BTreeMap<String, f64>,
    /// Seconds since 1970.
    #[serde(default = "unknown", deserialize_with = "null_is_nan")]
    pub time: f64,
    /// Version of flatout.
    #[serde(default)]
    pub version: String,
    /// The device that computes, in words.
    #[serde(default)]
    pub device: String,
    /// Versions of the libraries that were opened, by name.
    #[serde(default)]
    pub libraries: BTreeMap<String, String>,
    /// Updates of the whole run.
    #[serde(default)]
    pub steps: u64,
    /// Rows per micro-batch.
    #[serde(default)]
    pub micro_batch: u64,
    #[serde(default)]
    pub parameters: u64,
    /// The arena's bytes by category.
    #[serde(default)]
    pub memory: BTreeMap<String, u64>,
    /// Reasons for what `auto` chose, by switch.
    #[serde(default)]
    pub auto: BTreeMap<String, String>,
    /// Predicted time of an update: from measured times of this machine's kernels where it is calibrated, otherwise the lower
    /// bound by its peak rates.
    #[serde(default = "unknown", deserialize_with = "null_is_nan")]
    pub predicted_ms: f64,
    /// Whether `predicted_ms` comes from measured times of kernels.
    #[serde(default)]
    pub is_calibrated: bool,
    #[serde(default)]
    pub data: DataFacts,
    /// The ranks that train together; absent for one rank with one lane.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub world: Option<WorldFacts>,
}

fn is_zero(bytes: &u64) -> bool {
    *bytes == 0
}

/// The ranks of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorldFacts {
    pub ranks: u64,
    pub nodes: u64,
    /// The ranks along each axis, as `shard 4`.
    pub mesh: String,
    /// Transport of tensors between ranks; empty where there is one rank.
    pub wire: String,
    /// The tensors that ranks shard, in addition to the rows.
    pub shard: String,
    /// Groups of rows that are summed separately.
    pub lanes: u64,
    /// Device memory that the wire took in addition to the arena on rank 0.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub wire_bytes: u64,
    /// Environment variables of NCCL that are set, as `NCCL_ALGO=Ring`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub environment: Vec<String>,
}

/// Sources of a GPU's kernels and of the algorithms of its products.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Prepared {
    pub kernels_compiled: usize,
    pub kernels_from_disk: usize,
    pub products_timed: usize,
    pub products_remembered: usize,
}

/// The training data in numbers; a number is absent if the source does not know it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DataFacts {
    pub source: String,
    pub vocabulary: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub documents: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_out_documents: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens: Option<u64>,
    /// How examples of unequal length are laid out, in words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layout: Option<String>,
}

/// Update number `step`, counted from 1.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Step {
    pub step: u64,
    /// Passes over the data so far.
    #[serde(deserialize_with = "null_is_nan")]
    pub epoch: f64,
    #[serde(deserialize_with = "null_is_nan")]
    pub loss: f32,
    #[serde(deserialize_with = "null_is_nan")]
    pub grad_norm: f32,
    /// Learning rate that the device uses for parameters to which no group gives another.
    #[serde(deserialize_with = "null_is_nan")]
    pub lr: f32,
    /// All learning rates by the names of their groups; empty where there is only one.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty", deserialize_with = "nulls_are_nan")]
    pub lrs: BTreeMap<String, f32>,
    /// Tokens since the run began.
    pub tokens: u64,
    /// Samples since the run began.
    pub samples: u64,
    #[serde(deserialize_with = "null_is_nan")]
    pub step_ms: f64,
    #[serde(deserialize_with = "null_is_nan")]
    pub tokens_per_second: f64,
    #[serde(deserialize_with = "null_is_nan")]
    pub samples_per_second: f64,
    /// Updates left out so far because they were not finite, this one included.
    #[serde(default)]
    pub skipped: u64,
    /// Seconds since 1970 when the update was reported.
    #[serde(default = "unknown", deserialize_with = "null_is_nan")]
    pub time: f64,
    /// Model FLOP/s as a share of the device's peak in the run's precision; absent on the CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mfu: Option<f64>,
    /// Predicted time divided by measured time; absent where the machine is not calibrated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub of_predicted: Option<f64>,
    /// Time by the device's peak rates divided by the measured time, where it is not calibrated; absent on the CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub of_roofline: Option<f64>,
    /// Time the update waited for its rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_wait_ms: Option<f64>,
    /// Share of the update's computed tokens that are padding; absent where rows are equally long.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub padding: Option<f64>,
    /// The newest sample, at most about a second old; absent on the CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<GpuSample>,
    /// Rewards of the update's pairs, where preferences are learned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metrics: Option<Metrics>,
    /// Times of ranks, where there are several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ranks: Option<RankTimes>,
}

/// Times that ranks took for their own rows of an update, without exchanges. Ranks report them late, so that no update waits for
/// them: these belong to the newest step that all ranks have reported.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RankTimes {
    /// The step that the times belong to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<u64>,
    pub slowest: u64,
    pub slowest_ms: f64,
    pub median_ms: f64,
    /// The longest that any rank waited for its data.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_wait_ms: Option<f64>,
    /// Time that the rank with the shortest exchanges spent in them: for the others this includes the wait for slower ranks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wire_ms: Option<f64>,
}

impl RankTimes {
    /// Statistics of times indexed by rank.
    pub fn of(times_ms: &[f64]) -> RankTimes {
        let mut sorted: Vec<(f64, usize)> = times_ms.iter().copied().zip(0..).collect();
        sorted.sort_by(|a, b| a.0.total_cmp(&b.0));
        let (slowest_ms, slowest) = sorted[sorted.len() - 1];
        let median_ms = sorted[(sorted.len() - 1) / 2].0;
        RankTimes { slowest: slowest as u64, slowest_ms, median_ms, ..RankTimes::default() }
    }
}

/// A GPU as NVML reports it. Values that a model does not report are absent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct GpuSample {
    /// Share of the last sampling period in which a kernel ran, 0 to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub utilization: Option<f64>,
    /// Memory in use on the whole device, by all processes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub power_watts: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub power_limit_watts: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temperature_celsius: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clock_mhz: Option<u32>,
    /// Reasons for a lowered clock: `power`, `heat`, `power brake`, `hardware`; empty where it is not lowered.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub throttled: Vec<String>,
}

/// Time that training stood still waiting for rows, since this process began.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DataWait {
    /// Share of the time since the first update.
    pub share: f64,
    /// Its largest cause: reading, tokenising, packing or busy cores.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cause: Option<String>,
}

impl DataWait {
    pub fn new(waited: flatout_data::Waited, seconds: f64) -> DataWait {
        let share = waited.total.as_secs_f64() / seconds.max(f64::MIN_POSITIVE);
        DataWait { share, cause: waited.cause().map(String::from) }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct End {
    pub status: Status,
    /// Updates made since the run began.
    pub steps: u64,
    #[serde(deserialize_with = "null_is_nan")]
    pub loss: f32,
    /// The lowest loss that any model can reach, where the data's entropy is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_floor: Option<f64>,
    #[serde(deserialize_with = "null_is_nan")]
    pub tokens_per_second: f64,
    /// Updates left out since the run began because they were not finite.
    #[serde(default)]
    pub skipped: u64,
    /// Seconds since 1970.
    #[serde(default = "unknown", deserialize_with = "null_is_nan")]
    pub time: f64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_wait: Option<DataWait>,
    /// Reason for ending before the last step, where nobody stopped the run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub early: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    Done,
    /// Stopped by a signal, after saving.
    Stopped,
    Failed,
}

fn nulls_are_nan<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<String, f32>, D::Error> {
    let values = BTreeMap::<String, Option<f32>>::deserialize(deserializer)?;
    Ok(values.into_iter().map(|(name, value)| (name, value.unwrap_or(f32::NAN))).collect())
}

/// Default of numbers that logs of earlier versions lack.
fn unknown() -> f64 {
    f64::NAN
}

/// The present time as events store it: seconds since 1970, to the millisecond.
pub fn now() -> f64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    since.as_millis() as f64 / 1e3
}

impl Event {
    /// The object on one line, without the newline.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("events have a JSON form")
    }
}

/// The file that events are appended to.
#[derive(Debug)]
pub struct EventLog {
    file: File,
    /// Bytes that are not written to disk yet. They may begin within a line whose first part is in the file.
    waiting: Vec<u8>,
    /// Number of lines dropped because the buffer was full, too.
    lost: u64,
}

/// The most bytes that are buffered while the disk takes none: some hundred thousand lines.
const MAX_WAITING_BYTES: usize = 64 << 20;

impl EventLog {
    /// Creates the file of a new run.
    pub fn create(path: &Path) -> io::Result<EventLog> {
        Ok(EventLog::over(OpenOptions::new().append(true).create_new(true).open(path)?))
    }

    /// Opens the file of a continued run and returns its events. A last line that was cut short by a crash is removed, so that
    /// the next one starts on a new line.
    pub fn reopen(path: &Path) -> io::Result<(EventLog, Vec<Event>)> {
        let file = OpenOptions::new().append(true).create(true).open(path)?;
        let (events, whole_bytes) = read_whole(path)?;
        if file.metadata()?.len() != whole_bytes {
            file.set_len(whole_bytes)?;
        }
        Ok((EventLog::over(file), events))
    }

    fn over(file: File) -> EventLog {
        EventLog { file, waiting: Vec::new(), lost: 0 }
    }

    /// Appends one line, in one write: a reader that follows the file sees all of it or, after a crash, a part that `reopen`
    /// removes. A full disk does not end the run: on an error the line is buffered and written before the next one.
    pub fn write(&mut self, event: &Event) -> io::Result<()> {
        let line = event.to_json() + "\n";
        if self.waiting.len() + line.len() > MAX_WAITING_BYTES {
            self.lost += 1;
        } else {
            self.waiting.extend_from_slice(line.as_bytes());
        }
        while !self.waiting.is_empty() {
            match self.file.write(&self.waiting) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => drop(self.waiting.drain(..written)),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        match std::mem::take(&mut self.lost) {
            0 => Ok(()),
            lost => self
                .write(&Event::Warning { message: format!("{lost} lines could not be kept and are lost") }),
        }
    }
}

/// The events of a run, also while it is running: a last line without its newline is left out.
pub fn read(path: &Path) -> io::Result<Vec<Event>> {
    read_whole(path).map(|(events, _)| events)
}

fn read_whole(path: &Path) -> io::Result<(Vec<Event>, u64)> {
    let bytes = std::fs::read(path)?;
    let mut events = Vec::new();
    let mut whole_bytes = 0;
    for (i, line) in bytes.split_inclusive(|byte| *byte == b'\n').enumerate() {
        let last = whole_bytes + line.len() == bytes.len();
        match serde_json::from_slice(line) {
            Ok(event) if line.ends_with(b"\n") => events.push(event),
            // A crash of the machine may also leave zeros in place of the last line.
            _ if last => break,
            Ok(_) => unreachable!("only the last line has no end"),
            Err(error) => {
                let sentence = format!("{} line {} is no event: {error}", path.display(), i + 1);
                return Err(io::Error::new(io::ErrorKind::InvalidData, sentence));
            }
        }
        whole_bytes += line.len();
    }
    Ok((events, whole_bytes as u64))
}

/// The step lines that count, in order: of several lines for one step the last one, and none that a resumed run had written
/// beyond its checkpoint or before it began again.
pub fn steps(events: &[Event]) -> Vec<Step> {
    let mut steps = BTreeMap::new();
    let mut begins = false;
    for event in events {
        match event {
            Event::Start(_) => begins = true,
            Event::Step(step) => {
                if std::mem::take(&mut begins) {
                    steps.clear();
                }
                steps.insert(step.step, step.clone());
            }
            Event::Resume { step } => {
                begins = false;
                steps.retain(|made, _| made <= step);
            }
            _ => {}
        }
    }
    steps.into_values().collect()
}

/// The loss and the metrics of the evaluation after step `at`, if there is one that counts for a run at that step: evaluations
/// from before the run was rolled back behind it, or began again, are void.
pub fn eval_at(events: &[Event], at: u64) -> Option<(f32, Option<Metrics>)> {
    // A start may be followed by a resume event: until then it is undecided whether the evaluation counts.
    let (mut found, mut before) = (None, None);
    for event in events {
        match event {
            Event::Start(_) => before = found.take().or(before),
            Event::Resume { step } => found = before.take().or(found).filter(|_| *step >= at),
            Event::Step(_) => before = None,
            Event::Eval { step, loss, metrics, .. } if *step == at => {
                (found, before) = (Some((*loss, metrics.clone())), None);
            }
            _ => {}
        }
    }
    found.or(before)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Confusion;

    fn step(step: u64, loss: f32) -> Step {
        Step {
            step,
            epoch: 0.5,
            loss,
            grad_norm: 0.1,
            lr: 3e-3,
            lrs: BTreeMap::new(),
            tokens: 4096 * step,
            samples: 32 * step,
            step_ms: 12.5,
            tokens_per_second: 1e6,
            samples_per_second: 2560.0,
            skipped: 3,
            time: 1e9,
            mfu: None,
            of_predicted: None,
            of_roofline: None,
            data_wait_ms: None,
            padding: None,
            gpu: None,
            metrics: None,
            ranks: None,
        }
    }

    #[test]
    fn lines_have_the_contracts_names() {
        let switches = BTreeMap::from([("fuse.qkv".to_string(), "on".to_string())]);
        let start = Start {
            recipe: "tiny".into(),
            backend: "cpu".into(),
            switches,
            arena_bytes: 1 << 40,
            not_deterministic: vec!["cuda.attention_grad".into()],
            time: 1e9,
            version: "0.1.0".into(),
            device: "cpu".into(),
            steps: 9,
            predicted_ms: 0.5,
            is_calibrated: false,
            ..Start::default()
        };
        let end = End {
            status: Status::Done,
            steps: 9,
            loss: 1.5,
            loss_floor: Some(1.25),
            tokens_per_second: 2.5,
            skipped: 2,
            time: 2e9,
            data_wait: None,
            early: None,
        };
        let lines = [
            (
                Event::Start(start),
                r#"{"event":"start","recipe":"tiny","backend":"cpu","switches":{"fuse.qkv":"on"},"arena_bytes":1099511627776,"driver_bytes":0,"not_deterministic":["cuda.attention_grad"],"optimizer":"","loader":"","start_seconds":{},"time":1000000000.0,"version":"0.1.0","device":"cpu","libraries":{},"steps":9,"micro_batch":0,"parameters":0,"memory":{},"auto":{},"predicted_ms":0.5,"is_calibrated":false,"data":{"source":"","vocabulary":0}}"#,
            ),
            (
                Event::Step(step(1, 0.1)),
                r#"{"event":"step","step":1,"epoch":0.5,"loss":0.1,"grad_norm":0.1,"lr":0.003,"tokens":4096,"samples":32,"step_ms":12.5,"tokens_per_second":1000000.0,"samples_per_second":2560.0,"skipped":3,"time":1000000000.0}"#,
            ),
            (
                Event::Eval { step: 2, loss: 2.5, metrics: None, averaged: false },
                r#"{"event":"eval","step":2,"loss":2.5}"#,
            ),
            (
                Event::Eval {
                    step: 3,
                    loss: 0.5,
                    metrics: Some(Metrics::Classes(Confusion(vec![vec![3, 0], vec![0, 1]]).metrics())),
                    averaged: true,
                },
                r#"{"event":"eval","step":3,"loss":0.5,"metrics":{"accuracy":1.0,"positive":{"precision":1.0,"recall":1.0,"f1":1.0},"mean":{"precision":1.0,"recall":1.0,"f1":1.0},"confusion":[[3,0],[0,1]]},"averaged":true}"#,
            ),
            (
                Event::Saved { step: 2, path: "checkpoints/step-2".into() },
                r#"{"event":"saved","step":2,"path":"checkpoints/step-2"}"#,
            ),
            (Event::Resume { step: 2 }, r#"{"event":"resume","step":2}"#),
            (Event::Warning { message: "a\nb".into() }, r#"{"event":"warning","message":"a\nb"}"#),
            (
                Event::Spike { step: 4, loss: 9.5, median: 2.5, deviations: 7.25 },
                r#"{"event":"spike","step":4,"loss":9.5,"median":2.5,"deviations":7.25}"#,
            ),
            (
                Event::End(end.clone()),
                r#"{"event":"end","status":"done","steps":9,"loss":1.5,"loss_floor":1.25,"tokens_per_second":2.5,"skipped":2,"time":2000000000.0}"#,
            ),
            (
                Event::End(End { loss_floor: None, status: Status::Stopped, ..end }),
                r#"{"event":"end","status":"stopped","steps":9,"loss":1.5,"tokens_per_second":2.5,"skipped":2,"time":2000000000.0}"#,
            ),
        ];
        for (event, line) in lines {
            assert_eq!(event.to_json(), line);
            assert_eq!(serde_json::from_str::<Event>(line).unwrap(), event);
        }
    }

    #[test]
    fn gpu_fields_are_written_when_known() {
        let gpu =
            GpuSample { utilization: Some(0.98), throttled: vec!["power".into()], ..GpuSample::default() };
        let seen = Step { mfu: Some(0.5), data_wait_ms: Some(1.5), gpu: Some(gpu), ..step(1, 0.1) };
        let line = Event::Step(seen.clone()).to_json();
        let tail = r#","mfu":0.5,"data_wait_ms":1.5,"gpu":{"utilization":0.98,"throttled":["power"]}}"#;
        assert!(line.ends_with(tail), "{line}");
        assert_eq!(serde_json::from_str::<Event>(&line).unwrap(), Event::Step(seen));
    }

    #[test]
    fn several_learning_rates_are_logged_by_name() {
        let lrs = BTreeMap::from([("base".to_string(), 1e-5), ("connector".to_string(), 1e-3)]);
        let line = Event::Step(Step { lrs, ..step(1, 0.1) }).to_json();
        assert!(line.contains(r#""lr":0.003,"lrs":{"base":0.00001,"connector":0.001},"tokens""#), "{line}");
        let Event::Step(back) = serde_json::from_str(&line.replace("0.001}", "null}")).unwrap() else {
            panic!()
        };
        assert!(back.lrs["base"] == 1e-5 && back.lrs["connector"].is_nan());
    }

    #[test]
    fn logs_without_the_newer_fields_are_read() {
        let line = r#"{"event":"end","status":"done","steps":9,"loss":1.5,"tokens_per_second":2.5}"#;
        let Event::End(end) = serde_json::from_str(line).unwrap() else { panic!() };
        assert!(end.time.is_nan());
    }

    #[test]
    fn floats_are_shortest_and_exact() {
        for loss in [0.1, 1.0 / 3.0, f32::MIN_POSITIVE, f32::MAX, 16_777_216.0, 1e-45, -0.0] {
            let line = Event::Eval { step: 1, loss, metrics: None, averaged: false }.to_json();
            let Event::Eval { loss: back, .. } = serde_json::from_str(&line).unwrap() else { panic!() };
            assert_eq!(back.to_bits(), loss.to_bits(), "{line}");
        }
        assert!(
            Event::Eval { step: 1, loss: 0.1, metrics: None, averaged: false }
                .to_json()
                .contains(r#""loss":0.1}"#)
        );
    }

    #[test]
    fn numbers_that_are_not_finite_are_null() {
        for loss in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let line = Event::Step(Step { lr: f32::INFINITY, ..step(1, loss) }).to_json();
            assert!(line.contains(r#""loss":null"#) && line.contains(r#""lr":null"#), "{line}");
            let Event::Step(back) = serde_json::from_str(&line).unwrap() else { panic!() };
            assert!(back.loss.is_nan() && back.lr.is_nan());
        }
    }

    /// A log is read, and a run goes on, also behind an evaluation whose numbers were not finite.
    #[test]
    fn metrics_that_are_not_finite_are_null() {
        use crate::metrics::{RewardMetrics, TextMetrics};
        let nan = f64::NAN;
        let rewards = RewardMetrics {
            reward_accuracy: 0.5,
            reward_margin: nan,
            reward_chosen: nan,
            reward_rejected: nan,
            logp_chosen: None,
            logp_rejected: None,
        };
        for metrics in [Metrics::Text(TextMetrics { bits_per_byte: nan }), Metrics::Rewards(rewards)] {
            let event =
                Event::Eval { step: 1, loss: f32::NAN, metrics: Some(metrics.clone()), averaged: false };
            let line = event.to_json();
            assert!(line.contains("null"), "{line}");
            let Event::Eval { metrics: Some(back), .. } = serde_json::from_str(&line).unwrap() else {
                panic!("{line}")
            };
            assert_eq!(format!("{back:?}"), format!("{metrics:?}"));
        }
    }

    #[test]
    fn a_torn_last_line_is_removed_wherever_it_was_cut() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("events.jsonl");
        let mut log = EventLog::create(&path).unwrap();
        let events: Vec<Event> = (1..=3).map(|n| Event::Step(step(n, n as f32))).collect();
        events.iter().for_each(|event| log.write(event).unwrap());
        let whole = std::fs::read(&path).unwrap();
        let third = whole.len() - events[2].to_json().len() - 1;
        for cut in third..whole.len() {
            std::fs::write(&path, &whole[..cut]).unwrap();
            assert_eq!(read(&path).unwrap(), events[..2]);
            let (mut log, held) = EventLog::reopen(&path).unwrap();
            assert_eq!(held, events[..2]);
            log.write(&events[2]).unwrap();
            assert_eq!(std::fs::read(&path).unwrap(), whole, "cut at {cut}");
        }
        std::fs::write(&path, [&whole[..third], &[0; 40]].concat()).unwrap();
        assert_eq!(EventLog::reopen(&path).unwrap().1, events[..2]);
    }

    /// A full disk takes nothing: lines written meanwhile are buffered, in order, and are written once there is room.
    #[test]
    fn lines_wait_for_a_full_disk() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("events.jsonl");
        let events: Vec<Event> = (1..=3).map(|n| Event::Step(step(n, n as f32))).collect();
        let mut log = EventLog::over(OpenOptions::new().write(true).open("/dev/full").unwrap());
        for event in &events[..2] {
            assert_eq!(log.write(event).unwrap_err().kind(), io::ErrorKind::StorageFull);
        }
        log.lost = 7;
        // Half of the first line had reached the disk.
        let half: Vec<u8> = log.waiting.drain(..20).collect();
        std::fs::write(&path, half).unwrap();
        log.file = OpenOptions::new().append(true).open(&path).unwrap();
        log.write(&events[2]).unwrap();
        let found = read(&path).unwrap();
        assert_eq!(found[..3], events[..]);
        assert_eq!(found[3..], [Event::Warning { message: "7 lines could not be kept and are lost".into() }]);
    }

    #[test]
    fn lines_beyond_the_buffer_are_counted() {
        let mut log = EventLog::over(OpenOptions::new().write(true).open("/dev/full").unwrap());
        log.waiting = vec![b' '; MAX_WAITING_BYTES - 10];
        log.write(&Event::Resume { step: 1 }).unwrap_err();
        assert_eq!((log.waiting.len(), log.lost), (MAX_WAITING_BYTES - 10, 1));
    }

    #[test]
    fn a_broken_line_in_the_middle_is_an_error_with_its_number() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("events.jsonl");
        std::fs::write(
            &path,
            "{\"event\":\"resume\",\"step\":1}\nnonsense\n{\"event\":\"resume\",\"step\":2}\n",
        )
        .unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("line 2 is no event"));
    }

    #[test]
    fn a_new_run_does_not_append_to_an_old_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("events.jsonl");
        EventLog::create(&path).unwrap();
        assert_eq!(EventLog::create(&path).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
    }

    #[test]
    fn later_lines_of_a_step_win() {
        let line = |n, loss| Event::Step(step(n, loss));
        let events = [
            line(1, 1.0),
            line(2, 2.0),
            line(3, 3.0),
            Event::Resume { step: 1 },
            line(2, 20.0),
            Event::Resume { step: 2 },
        ];
        let losses: Vec<_> = steps(&events).iter().map(|step| (step.step, step.loss)).collect();
        assert_eq!(losses, [(1, 1.0), (2, 20.0)]);
        let again = [line(1, 1.0), line(2, 2.0), Event::Start(Start::default()), line(1, 3.0)];
        assert_eq!(steps(&again).iter().map(|step| step.loss).collect::<Vec<_>>(), [3.0], "begun again");
    }

    /// A step is evaluated once in the history of a run's state: patience counts evaluations.
    #[test]
    fn an_evaluation_counts_until_the_run_is_rolled_back_behind_it() {
        let (start, made) = (|| Event::Start(Start::default()), |at| Event::Step(step(at, 1.0)));
        let eval = |step, loss| Event::Eval { step, loss, metrics: None, averaged: false };
        let at_ten = |events: &[Event]| eval_at(events, 10).map(|(loss, _)| loss);
        let first = [start(), made(10), eval(10, 0.5)];
        let then = |more: &[Event]| at_ten(&[&first[..], more].concat());
        assert_eq!(then(&[]), Some(0.5));
        // Killed after that step and resumed at it, twice, the second time killed before the resume event.
        let beyond = [start(), Event::Resume { step: 10 }, made(11), eval(12, 0.4), start()];
        assert_eq!(then(&beyond), Some(0.5));
        // Resumed before that step, which is made again: with its evaluation, or killed before it.
        let behind = [start(), Event::Resume { step: 9 }, made(10)];
        assert_eq!(then(&behind), None);
        assert_eq!(then(&[&behind[..], &[eval(10, 0.6)]].concat()), Some(0.6));
        assert_eq!(then(&[Event::Resume { step: 5 }]), None, "a rollback");
        assert_eq!(then(&[start(), made(1), start(), Event::Resume { step: 10 }]), None, "begun again");
        assert_eq!(at_ten(&[start(), eval(9, 0.1)]), None);
    }
}
