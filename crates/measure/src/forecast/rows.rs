//! Finds the largest micro-batch that fits a device. Memory is almost linear in the rows, so a few compilations find the exact
//! number. Where the head's logits go from one chunk to two, a few more rows take a little less memory; a limit just there may be
//! met on either side.

use flatout_ir::{Recompute, Target};

use super::{Done, Job};
use flatout_train::config::Config;
use flatout_train::resolve::compile::{Compiled, compile_for};
use flatout_train::resolve::prediction;
use flatout_train::switches::{Auto, Named};

/// Upper bound of the search.
const MOST_ROWS: usize = 1 << 16;

/// The largest micro-batch for a setting of `recompute`.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Largest {
    pub recompute: &'static str,
    /// The largest number of rows whatever the batch; `None` where not even one fits.
    pub rows: Option<usize>,
    /// The largest divisor of the batch that fits.
    pub of_batch: Option<usize>,
    /// The arena of plans of `rows`.
    pub arena_bytes: Option<usize>,
    /// Tokens per second, as predicted for updates of `rows`.
    pub tokens_per_second: Option<f64>,
}

pub(super) fn jobs<'a>(config: &'a Config, compiled: &'a Compiled) -> Vec<Job<'a>> {
    let settings = [Recompute::None, Recompute::Cheap, Recompute::Wide, Recompute::Full];
    let job = |recompute: Recompute| -> Job<'a> {
        let mut config = config.clone();
        config.switches.memory.recompute = Auto::Given(recompute);
        Box::new(move || Done::Largest(largest(&config, &compiled.target, compiled.micro_batch)))
    };
    settings.into_iter().map(job).collect()
}

fn largest(config: &Config, target: &Target, near: usize) -> Largest {
    let unlimited = Target { memory_bytes: u64::MAX, ..target.clone() };
    let available = target.memory_bytes.saturating_sub(target.bytes_beside()) as usize;
    let plans = |rows: usize| compile_for(config, &unlimited, rows, false).ok();
    // A micro-batch of examples never holds more than those of the update.
    let most = if config.data.has_examples() { config.train.batch } else { MOST_ROWS };
    let mut known: Vec<(usize, usize)> = vec![];
    let mut fitting: Option<(usize, Compiled)> = None;
    let mut too_many = most + 1;
    let mut next = near.clamp(1, most);
    // Secant steps through the two points nearest to the limit; every third step is a bisection, because secants converge slowly
    // where the slope changes.
    for attempt in 1..64 {
        let Some(compiled) = plans(next) else { break };
        let bytes = compiled.plans.arena_bytes;
        known.push((next, bytes));
        if bytes <= available {
            fitting = Some((next, compiled));
        } else {
            too_many = next;
        }
        let low = fitting.as_ref().map_or(0, |(rows, _)| *rows);
        if too_many - low == 1 {
            break;
        }
        next = match attempt % 3 {
            0 if too_many <= most => low + (too_many - low) / 2,
            _ => guess(&known, available).clamp(low + 1, too_many - 1),
        };
    }
    // With several ranks each computes the rows of its lanes.
    let batch = match target.ranks {
        1 => config.train.batch,
        ranks => config.train.batch / ranks,
    };
    let rows = fitting.as_ref().map(|(rows, _)| *rows);
    let of_batch = rows.and_then(|rows| (1..=rows.min(batch)).rev().find(|n| batch.is_multiple_of(*n)));
    Largest {
        recompute: config.switches.memory.recompute.name(),
        rows,
        of_batch,
        arena_bytes: fitting.as_ref().map(|(_, compiled)| compiled.plans.arena_bytes),
        tokens_per_second: fitting.as_ref().map(|(rows, compiled)| {
            let rows = rows * target.ranks;
            let seconds = prediction::step_cost(compiled, rows).predicted_seconds;
            // With an arrangement the cost is that of a whole update, otherwise that of the rows.
            match &compiled.settled.arrangement {
                Some(arrangement) => arrangement.real_tokens / seconds,
                None => (rows * config.model.tokens()) as f64 / seconds,
            }
        }),
    }
}

/// The rows at which the line through the two points nearest to the limit meets it; twice or half as many as the only point where
/// there is one.
fn guess(known: &[(usize, usize)], available: usize) -> usize {
    let mut near = known.to_vec();
    near.sort_by_key(|(_, bytes)| bytes.abs_diff(available));
    match near[..] {
        [(a, x), (b, y), ..] if a != b && x != y => {
            let slope = (y as f64 - x as f64) / (b as f64 - a as f64);
            let rows = a as f64 + (available as f64 - x as f64) / slope;
            rows.floor().clamp(0.0, MOST_ROWS as f64) as usize
        }
        [(rows, bytes), ..] if bytes <= available => 2 * rows,
        [(rows, _), ..] => rows / 2,
        [] => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flatout_train::device;
    use flatout_train::recipes;
    use flatout_train::resolve::compile;

    /// An update in several micro-batches costs several times what one micro-batch does.
    #[test]
    fn no_number_of_rows_is_faster_than_the_device() {
        for recipe in ["qwen3-0.6b-sft", "gemma3-1b-pairs", "pretrain-226m"] {
            let config = recipes::resolve(recipe, &[], &["data.synthetic_rows=64".into()]).unwrap();
            let config = config.with(&["layers=2".into(), "train.batch=32".into()]).unwrap();
            let target = device::named("rtx3090", &config.switches).unwrap();
            let found = largest(&config, &target, 4);
            let (rows, rate) = (found.rows.unwrap(), found.tokens_per_second.unwrap());
            let compiled = compile_for(&config, &target, rows, false).unwrap();
            let most = compiled.target.rates.bf16_flops / compiled.flops_per_token as f64;
            assert!(
                rate < most,
                "{recipe}: {rate} tokens/s with {rows} rows, and the device's peak is {most}"
            );
        }
    }

    #[test]
    fn one_row_more_does_not_fit() {
        let words = ["layers=2", "width=64", "heads=2", "kv_heads=2", "ffn=96", "context=32", "eval.rows=0"];
        let config = recipes::resolve("tiny", &[], &words.map(String::from)).unwrap();
        let bytes = |rows: usize, recompute: &str, target: &Target| {
            let config = config.with(&[format!("recompute={recompute}")]).unwrap();
            compile_for(&config, target, rows, false).map(|c| c.plans.arena_bytes)
        };
        let unlimited = compile::target();
        let mut target = unlimited.clone();
        target.memory_bytes = bytes(45, "cheap", &unlimited).unwrap() as u64;
        let found = |near: usize, recompute: Recompute| {
            let mut config = config.clone();
            config.switches.memory.recompute = Auto::Given(recompute);
            largest(&config, &target, near)
        };
        for (near, recompute) in
            [(8, Recompute::None), (1, Recompute::Cheap), (400, Recompute::Cheap), (8, Recompute::Full)]
        {
            let largest = found(near, recompute);
            let rows = largest.rows.unwrap();
            assert_eq!(bytes(rows, recompute.name(), &target).ok(), largest.arena_bytes);
            assert!(
                bytes(rows + 1, recompute.name(), &target).is_err(),
                "{rows} with {recompute:?} from {near}"
            );
            assert_eq!(largest.of_batch, Some(8), "of 8 rows all fit");
            assert!(largest.tokens_per_second.unwrap() > 0.0);
        }
        assert!(found(8, Recompute::Cheap).rows >= Some(45));
        assert!(found(8, Recompute::None).rows < found(8, Recompute::Full).rows);
        target.memory_bytes = 1000;
        assert_eq!(largest(&config, &target, 8).rows, None);
    }
}
