//! Events of a run, one JSON object a line in `events.jsonl`. Other tools read this: names are a contract.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Deserializer, Serialize};

use crate::metrics::{Metrics, null_is_nan};
use crate::run::samples::Sample;

/// A line. Numbers that are not finite are written as `null` and read as NaN; floats are in their shortest exact
/// form, those of 32 bits as such.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
#[allow(clippy::large_enum_variant, reason = "a run has one start, and steps are what there are many of")]
pub enum Event {
    Start(Start),
    Step(Step),
    /// Mean loss on held-out data after update `step`.
    Eval {
        step: u64,
        #[serde(deserialize_with = "null_is_nan")]
        loss: f32,
        /// Where classes are learned, answers or preferences: how well.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        metrics: Option<Metrics>,
        /// The running average of the weights was evaluated (`train.ema`), not the weights.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        averaged: bool,
    },
    /// A checkpoint is whole on disk.
    Saved {
        step: u64,
        path: String,
    },
    /// The run goes on after update `step`. Lines of later steps that were written before are void: of several
    /// lines for one step the last is right.
    Resume {
        step: u64,
    },
    Warning {
        message: String,
    },
    /// The loss of update `step` stands out from those before it.
    Spike {
        step: u64,
        loss: f32,
        /// Of the losses before it.
        median: f32,
        /// How many robust deviations it lies above the median.
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
    /// The active switches, read from what was compiled.
    pub switches: BTreeMap<String, String>,
    pub arena_bytes: u64,
    pub driver_bytes: u64,
    /// Kernels of the plans that may give other bits each time.
    #[serde(default)]
    pub not_deterministic: Vec<String>,
    /// The kernels that attention runs on, on a GPU, with the times they were chosen by.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attention: Option<String>,
    /// How many products run on which kernel, on a GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub products: Option<String>,
    /// Which layers multiply 8-bit floats, where some do, and why those.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fp8: Option<String>,
    /// The update rule with its numbers, in words.
    #[serde(default)]
    pub optimizer: String,
    /// How batches are made ready, in words.
    #[serde(default)]
    pub loader: String,
    /// The preparation of a GPU's kernels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prepared: Option<Prepared>,
    /// Where the time before the first step went, in seconds.
    #[serde(default)]
    pub start_seconds: BTreeMap<String, f64>,
    /// Seconds since 1970.
    #[serde(default = "unknown", deserialize_with = "null_is_nan")]
    pub time: f64,
    /// Of flatout.
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
    /// Rows computed at once.
    #[serde(default)]
    pub micro_batch: u64,
    #[serde(default)]
    pub parameters: u64,
    /// The arena's bytes by category.
    #[serde(default)]
    pub memory: BTreeMap<String, u64>,
    /// Why `auto` chose what it did, by switch.
    #[serde(default)]
    pub auto: BTreeMap<String, String>,
    /// The time of an update: by the times of this machine's kernels where it is calibrated, otherwise the least by its
    /// peak rates.
    #[serde(default = "unknown", deserialize_with = "null_is_nan")]
    pub predicted_ms: f64,
    /// Whether `predicted_ms` comes from measured times of kernels.
    #[serde(default)]
    pub is_calibrated: bool,
    #[serde(default)]
    pub data: DataFacts,
    /// The ranks that train together; absent where there is one with one lane.
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
    /// The carrier of tensors between ranks; empty where there is one rank.
    pub wire: String,
    /// The tensors that ranks divide among themselves beside the rows.
    pub shard: String,
    /// Groups of rows that are summed apart.
    pub lanes: u64,
    /// Device memory that the wire took beside the arena on rank 0.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub wire_bytes: u64,
    /// Variables of the environment that NCCL reads, as `NCCL_ALGO=Ring`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub environment: Vec<String>,
}

/// Where a GPU's kernels and the algorithms of its products came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Prepared {
    pub kernels_compiled: usize,
    pub kernels_from_disk: usize,
    pub products_timed: usize,
    pub products_remembered: usize,
}

/// The training data in numbers; absent where a source cannot tell.
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
    /// As the device multiplies by it: of the parameters that no group gives another.
    #[serde(deserialize_with = "null_is_nan")]
    pub lr: f32,
    /// All learning rates by the names of their groups; empty where there is one.
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
    /// The model's arithmetic over the device's peak in the run's precision; absent on the CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mfu: Option<f64>,
    /// The predicted time over the time taken; absent where the machine is not calibrated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub of_predicted: Option<f64>,
    /// The least time by the device's peak rates over the time taken, where it is not calibrated; absent on the CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub of_roofline: Option<f64>,
    /// Time the update waited for its rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_wait_ms: Option<f64>,
    /// The share of the update's computed tokens that only fill up; absent where rows are equally long.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub padding: Option<f64>,
    /// The newest sample, at most about a second old; absent on the CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<GpuSample>,
    /// Where answers are compared: the rewards of the update's pairs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metrics: Option<Metrics>,
    /// Where there are several ranks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ranks: Option<RankTimes>,
}

/// How long ranks took for their own rows of an update, before they exchanged anything. Ranks tell their times late, so that no
/// update waits for them: these are of the newest step that all have told of.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RankTimes {
    /// The step that the times are of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<u64>,
    pub slowest: u64,
    pub slowest_ms: f64,
    pub median_ms: f64,
    /// The longest that any rank waited for its data.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_wait_ms: Option<f64>,
    /// The time that the rank which waited least spent in exchanges: the others also waited for slower ranks there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wire_ms: Option<f64>,
}

impl RankTimes {
    /// Of times by rank.
    pub fn of(times_ms: &[f64]) -> RankTimes {
        let mut sorted: Vec<(f64, usize)> = times_ms.iter().copied().zip(0..).collect();
        sorted.sort_by(|a, b| a.0.total_cmp(&b.0));
        let (slowest_ms, slowest) = sorted[sorted.len() - 1];
        let median_ms = sorted[(sorted.len() - 1) / 2].0;
        RankTimes { slowest: slowest as u64, slowest_ms, median_ms, ..RankTimes::default() }
    }
}

/// A GPU as NVML sees it. Values that a model does not tell are absent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct GpuSample {
    /// Share of the last sampling period in which a kernel ran, 0 to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub utilization: Option<f64>,
    /// In use on the whole device, by every process.
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
    /// Why the clock is held down: `power`, `heat`, `power brake`, `hardware`; empty where it is not.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub throttled: Vec<String>,
}

/// How long training stood still for want of rows, since this process began.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DataWait {
    /// Of the time since the first update.
    pub share: f64,
    /// The largest cause of it: reading, tokenising, packing or busy cores.
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
    /// The least loss any model can reach, where the data's entropy is known.
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
    /// Why the run ended before its last step, where nobody stopped it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub early: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    Done,
    /// By a signal, after saving.
    Stopped,
    Failed,
}

fn nulls_are_nan<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<String, f32>, D::Error> {
    let values = BTreeMap::<String, Option<f32>>::deserialize(deserializer)?;
    Ok(values.into_iter().map(|(name, value)| (name, value.unwrap_or(f32::NAN))).collect())
}

/// For numbers that logs of earlier versions do not have.
fn unknown() -> f64 {
    f64::NAN
}

/// The time now, as events carry it: seconds since 1970, to the millisecond.
pub fn now() -> f64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    since.as_millis() as f64 / 1e3
}

impl Event {
    /// The object on one line, without the line's end.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("events have a JSON form")
    }
}

/// The file events are appended to.
#[derive(Debug)]
pub struct EventLog {
    file: File,
    /// Bytes that the disk has not taken yet. They may begin within a line, of which the file has the first part.
    waiting: Vec<u8>,
    /// Lines there was no room for in memory either.
    lost: u64,
}

/// Bytes that wait in memory at most while the disk takes nothing: some hundred thousand lines.
const MAX_WAITING_BYTES: usize = 64 << 20;

impl EventLog {
    /// Begins the file of a new run.
    pub fn create(path: &Path) -> io::Result<EventLog> {
        Ok(EventLog::over(OpenOptions::new().append(true).create_new(true).open(path)?))
    }

    /// Opens the file of a run that goes on, with what it holds. A last line that was cut short by a crash is
    /// removed, so that the next one starts on a line of its own.
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

    /// Appends one line, in one write: a reader that follows the file sees all of it or, after a crash, a part
    /// that `reopen` removes. A disk that is full is no end: on an error the line waits, and goes before the next one.
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

/// The events of a run, also while it is running: a last line without its end is left out.
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
            // A crash of the machine may also leave zeros where the last line should be.
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

/// The step lines that count, in order: of several for one step the last, and none from beyond where a resumed
/// run went on before it got there again, or from before it had to begin again.
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

/// The loss and the metrics of the evaluation after a step, where there was one that counts for a run which is at that step:
/// what was evaluated before the run went back behind it, or began again, is void.
pub fn eval_at(events: &[Event], at: u64) -> Option<(f32, Option<Metrics>)> {
    // A start may be followed by where the run goes on: until then it is open whether what was found counts.
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
    fn what_only_a_gpu_tells_is_there_where_it_is_known() {
        let gpu =
            GpuSample { utilization: Some(0.98), throttled: vec!["power".into()], ..GpuSample::default() };
        let seen = Step { mfu: Some(0.5), data_wait_ms: Some(1.5), gpu: Some(gpu), ..step(1, 0.1) };
        let line = Event::Step(seen.clone()).to_json();
        let tail = r#","mfu":0.5,"data_wait_ms":1.5,"gpu":{"utilization":0.98,"throttled":["power"]}}"#;
        assert!(line.ends_with(tail), "{line}");
        assert_eq!(serde_json::from_str::<Event>(&line).unwrap(), Event::Step(seen));
    }

    #[test]
    fn several_learning_rates_are_there_by_name() {
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

    /// A full device takes nothing: what is said meanwhile waits, in order, and is written once there is room.
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
    fn lines_beyond_what_memory_is_given_are_counted() {
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

    /// A step is evaluated once in the life of a run's state: patience counts evaluations.
    #[test]
    fn an_evaluation_counts_until_the_run_goes_back_behind_it() {
        let (start, made) = (|| Event::Start(Start::default()), |at| Event::Step(step(at, 1.0)));
        let eval = |step, loss| Event::Eval { step, loss, metrics: None, averaged: false };
        let at_ten = |events: &[Event]| eval_at(events, 10).map(|(loss, _)| loss);
        let first = [start(), made(10), eval(10, 0.5)];
        let then = |more: &[Event]| at_ten(&[&first[..], more].concat());
        assert_eq!(then(&[]), Some(0.5));
        // Killed beyond it and taken up at it, twice, the second time before it said so.
        let beyond = [start(), Event::Resume { step: 10 }, made(11), eval(12, 0.4), start()];
        assert_eq!(then(&beyond), Some(0.5));
        // Back behind it, the step is made again: with its evaluation, or killed before that.
        let behind = [start(), Event::Resume { step: 9 }, made(10)];
        assert_eq!(then(&behind), None);
        assert_eq!(then(&[&behind[..], &[eval(10, 0.6)]].concat()), Some(0.6));
        assert_eq!(then(&[Event::Resume { step: 5 }]), None, "a rollback");
        assert_eq!(then(&[start(), made(1), start(), Event::Resume { step: 10 }]), None, "begun again");
        assert_eq!(at_ten(&[start(), eval(9, 0.1)]), None);
    }
}
