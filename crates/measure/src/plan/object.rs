//! A plan as one JSON object.

use flatout_train::device::gpus;
use flatout_train::resolve::fp8_layers;
use flatout_train::resolve::tower::Forecast;
use flatout_train::switches::active;
use serde_json::{Value, json};

use super::{PlanReport, world};
use crate::forecast::{Alternative, Outcome};

pub fn object(report: &PlanReport<'_>) -> Value {
    let PlanReport { config, compiled, forecast, attention, on_paper, features, world } = report;
    let step = &forecast.step;
    let timings = &compiled.target.timings;
    let predicted = |seconds: f64| timings.knows_kernels().then_some(seconds);
    let run = |seconds: f64| config.train.steps.map(|steps| steps as f64 * seconds);
    let work = forecast.work.iter().map(|(work, cost)| {
        json!({
            "work": work.name(),
            "launches": cost.launches,
            "flops": cost.flops,
            "bytes": cost.bytes,
            "roofline_ms": 1e3 * cost.roofline_seconds,
            "predicted_ms": predicted(1e3 * cost.predicted_seconds),
        })
    });
    let layers = forecast.layers.iter().map(
        |l| json!({ "path": l.path, "count": l.count, "each": l.each, "bytes": l.count * l.each.total() }),
    );
    let mut all = json!({
        "recipe": config.recipe,
        "backend": compiled.target.name,
        "arena_bytes": compiled.plans.arena_bytes,
        "driver_bytes": compiled.target.driver_bytes,
        "categories": compiled.plans.categories(),
        "layers": layers.collect::<Vec<_>>(),
        "peak": forecast.peak,
        "parameters": compiled.parameters,
        "trained_parameters": compiled.trained(),
        "flops_per_token": compiled.flops_per_token,
        "micro_batch": compiled.micro_batch,
        "step_flops": step.flops,
        "step_bytes": step.bytes,
        "roofline_step_ms": 1e3 * step.roofline_seconds,
        "predicted_step_ms": predicted(1e3 * step.predicted_seconds),
        "roofline_run_seconds": run(step.roofline_seconds),
        "predicted_run_seconds": predicted(step.predicted_seconds).and_then(run),
        "timed_kernels": timings.points().len(),
        "work": work.collect::<Vec<_>>(),
        "largest_micro_batch": forecast.largest,
        "switches": active::active(&compiled.plans, &compiled.target, active::Prepared::settled(&compiled.settled)),
        "instead": forecast.alternatives.iter().map(alternative).collect::<Vec<_>>(),
        "attention_kernels": attention,
        "not_deterministic": active::not_deterministic(&compiled.plans, &compiled.target),
        "auto": compiled.settled.chosen,
        "fp8": fp8_layers::sentence(&compiled.plans, &compiled.settled),
    });
    if compiled.target.wire_bytes > 0 {
        all["wire_bytes"] = json!(compiled.target.wire_bytes);
    }
    if let Some(arrangement) = &compiled.settled.arrangement {
        all["layout"] = json!({
            "words": arrangement.words(),
            "tokens": arrangement.layout.shapes().iter().map(|shape| shape.tokens()).collect::<Vec<_>>(),
            "runs": arrangement.runs,
            "real_tokens": arrangement.real_tokens,
            "padding": arrangement.padding,
        });
    }
    if let Some(Forecast { economy, tokens, read_bytes_per_second }) = features {
        all["vision_cache"] = json!({
            "image_tokens": tokens,
            "bytes_per_image": economy.bytes_per_image,
            "tower_ms_per_image": 1e3 * economy.seconds_per_image,
            "read_bytes_per_second": read_bytes_per_second,
            "epochs": economy.epochs,
            "shares_prefixes": economy.shares_prefixes,
            "words": features.as_ref().map(Forecast::words),
        });
    }
    if let Some(of_world) = world {
        all["world"] = world::object(of_world, compiled);
    }
    if let Some(gpu) = on_paper {
        all["gpu"] = json!({
            "name": compiled.target.name,
            "memory_bytes": compiled.target.memory_bytes,
            "fits": gpu.fits,
            "largest_micro_batch": gpu.largest,
            "measured": gpus::find(&gpu.name).and_then(|gpu| gpu.measured),
        });
    }
    all
}

fn alternative(one: &Alternative) -> Value {
    let Alternative { switch, value, outcome } = one;
    match outcome {
        Outcome::Plans { arena_bytes, more_bytes, predicted_seconds, fits } => json!({
            "switch": switch,
            "value": value,
            "arena_bytes": arena_bytes,
            "more_bytes": more_bytes,
            "step_ms": 1e3 * predicted_seconds,
            "fits": fits,
        }),
        Outcome::Refused(why) => json!({ "switch": switch, "value": value, "refused": why }),
    }
}
