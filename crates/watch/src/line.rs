//! A line of `events.jsonl`, with the fields that curves and lists need. Every field may be absent, and unknown ones are ignored.
//! docs/reference/run-directory.md has the fields.

use std::borrow::Cow;

use serde::Deserialize;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Line<'a> {
    #[serde(borrow)]
    pub event: Cow<'a, str>,
    pub step: Option<u64>,
    pub epoch: Option<f64>,
    pub loss: Option<f64>,
    pub grad_norm: Option<f64>,
    pub lr: Option<f64>,
    pub tokens: Option<u64>,
    pub samples: Option<u64>,
    pub step_ms: Option<f64>,
    pub tokens_per_second: Option<f64>,
    pub samples_per_second: Option<f64>,
    pub skipped: Option<u64>,
    pub time: Option<f64>,
    pub mfu: Option<f64>,
    pub of_predicted: Option<f64>,
    pub of_roofline: Option<f64>,
    pub data_wait_ms: Option<f64>,
    pub padding: Option<f64>,
    pub gpu: Option<Gpu>,
    pub metrics: Option<Metrics>,
    pub median: Option<f64>,
    #[serde(borrow)]
    pub message: Option<Cow<'a, str>>,
    #[serde(borrow)]
    pub status: Option<Cow<'a, str>>,
    #[serde(borrow)]
    pub recipe: Option<Cow<'a, str>>,
    /// Steps of the whole run.
    pub steps: Option<u64>,
    pub loss_floor: Option<f64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Gpu {
    pub utilization: Option<f64>,
    pub memory_bytes: Option<f64>,
    pub power_watts: Option<f64>,
    pub temperature_celsius: Option<f64>,
    pub clock_mhz: Option<f64>,
    pub throttled: Vec<String>,
}

/// Metrics of an evaluation or an update, of any task.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Metrics {
    pub accuracy: Option<f64>,
    pub mean: Option<Score>,
    pub exact: Option<f64>,
    pub token_accuracy: Option<f64>,
    pub reward_accuracy: Option<f64>,
    pub reward_margin: Option<f64>,
    pub bits_per_byte: Option<f64>,
    pub confusion: Option<Vec<Vec<u64>>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Score {
    pub f1: Option<f64>,
}

impl Line<'_> {
    /// Parses a line, with its line end or without; `None` where it is not an event.
    pub fn read(bytes: &[u8]) -> Option<Line<'_>> {
        serde_json::from_slice(bytes).ok().filter(|line: &Line<'_>| !line.event.is_empty())
    }
}
