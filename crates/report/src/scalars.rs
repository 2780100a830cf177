//! The scalars of an event by tag, the same for TensorBoard and MLflow.

use flatout_train::metrics::Metrics;
use flatout_train::metrics::goal::Metric;
use flatout_train::run::events::{Event, Step};

/// The step of an event and its scalars; `None` for events without any.
pub fn of(event: &Event) -> Option<(u64, Vec<(String, f64)>)> {
    match event {
        Event::Step(step) => Some((step.step, of_step(step))),
        Event::Eval { step, loss, metrics, .. } => Some((*step, of_evaluation(*loss, metrics.as_ref()))),
        _ => None,
    }
}

/// An evaluation's scalars by tag.
fn of_evaluation(loss: f32, metrics: Option<&Metrics>) -> Vec<(String, f64)> {
    let tags = [
        ("eval/loss", Metric::Loss),
        ("eval/accuracy", Metric::Accuracy),
        ("eval/f1", Metric::F1),
        ("eval/precision", Metric::Precision),
        ("eval/recall", Metric::Recall),
        ("eval/macro_f1", Metric::MacroF1),
        ("eval/exact", Metric::Exact),
        ("eval/token_accuracy", Metric::TokenAccuracy),
    ];
    let value = |(tag, metric): (&str, Metric)| Some((tag.to_string(), metric.of(loss, metrics)?));
    let text =
        metrics.and_then(Metrics::text).map(|text| ("eval/bits_per_byte".to_string(), text.bits_per_byte));
    tags.into_iter().filter_map(value).chain(rewards(metrics, "eval")).chain(text).collect()
}

/// Reward metrics of preference pairs, in an evaluation or in training.
fn rewards(metrics: Option<&Metrics>, of: &str) -> Vec<(String, f64)> {
    let named = metrics.and_then(Metrics::rewards).map_or(vec![], |rewards| rewards.named());
    named.into_iter().map(|(name, value)| (format!("{of}/{name}"), value)).collect()
}

/// A step's scalars by tag. Unknown ones are left out; those that are not finite are kept, because trackers mark them.
fn of_step(step: &Step) -> Vec<(String, f64)> {
    let gpu = step.gpu.clone().unwrap_or_default();
    let throttled = step.gpu.as_ref().map(|gpu| if gpu.throttled.is_empty() { 0.0 } else { 1.0 });
    let known = [
        ("train/loss", Some(step.loss as f64)),
        ("train/grad_norm", Some(step.grad_norm as f64)),
        ("train/lr", Some(step.lr as f64)),
        ("train/epoch", Some(step.epoch)),
        ("train/tokens", Some(step.tokens as f64)),
        ("train/skipped", Some(step.skipped as f64)),
        ("speed/tokens_per_second", Some(step.tokens_per_second)),
        ("speed/samples_per_second", Some(step.samples_per_second)),
        ("speed/step_ms", Some(step.step_ms)),
        ("speed/mfu", step.mfu),
        ("speed/of_predicted", step.of_predicted),
        ("speed/of_roofline", step.of_roofline),
        ("speed/data_wait_ms", step.data_wait_ms),
        ("gpu/utilization", gpu.utilization),
        ("gpu/memory_bytes", gpu.memory_bytes.map(|bytes| bytes as f64)),
        ("gpu/power_watts", gpu.power_watts),
        ("gpu/temperature_celsius", gpu.temperature_celsius.map(f64::from)),
        ("gpu/clock_mhz", gpu.clock_mhz.map(f64::from)),
        ("gpu/throttled", throttled),
    ];
    let known = known.into_iter().filter_map(|(tag, value)| Some((tag.to_string(), value?)));
    let rates = step.lrs.iter().map(|(group, rate)| (format!("train/lr/{group}"), *rate as f64));
    known.chain(rewards(step.metrics.as_ref(), "train")).chain(rates).collect()
}
