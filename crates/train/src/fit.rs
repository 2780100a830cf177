//! Whether a run fits a device, and how many rows at once do.

use flatout_ir::Target;

use crate::compile::{Compiled, compile, compile_for};
use crate::config::{Config, Count};
use crate::failure::Failure;

/// A run's plans for a device, whose memory they may exceed.
pub struct Fit {
    /// For the device where they fit; otherwise for one like it with memory without end.
    pub compiled: Compiled,
    pub fits: bool,
    /// The largest micro-batch, among the divisors of the batch, that fits; where any does without it, without
    /// `recompute=full` as a last resort.
    pub largest: Option<usize>,
}

impl Fit {
    /// What plans and driver take together.
    pub fn bytes(&self) -> u64 {
        self.compiled.plans.arena_bytes as u64 + self.compiled.target.driver_bytes
    }
}

pub fn fit(config: &Config, target: &Target) -> Result<Fit, Failure> {
    let (compiled, fits) = match compile(config, target) {
        Ok(compiled) => (compiled, true),
        Err(refused) => (compile_unbounded(config, target).ok_or(refused)?, false),
    };
    let batch = config.train.batch;
    let (least, most) = if fits { (compiled.micro_batch, batch) } else { (1, compiled.micro_batch) };
    let divisors = || (least..=most).rev().filter(|rows| batch.is_multiple_of(*rows));
    let fitting = |may_recompute_all: bool| {
        divisors().find(|rows| compile_for(config, target, *rows, may_recompute_all).is_ok())
    };
    let largest = fitting(false).or_else(|| fitting(true));
    Ok(Fit { compiled, fits, largest })
}

/// The plans on a device with memory without end, of a row at a time where the config leaves the number open.
fn compile_unbounded(config: &Config, target: &Target) -> Option<Compiled> {
    let mut config = config.clone();
    if config.train.micro_batch().is_none() {
        config.train.micro_batch = Count::Given(1);
    }
    let endless = Target { memory_bytes: u64::MAX, ..target.clone() };
    let mut compiled = compile(&config, &endless).ok()?;
    compiled.target = target.clone();
    Some(compiled)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::named;
    use crate::recipes::resolve;

    fn fitted(gpu: &str, overrides: &[&str]) -> Fit {
        let overrides: Vec<String> = overrides.iter().map(|s| s.to_string()).collect();
        let config = resolve("pretrain-226m", &[gpu.into()], &overrides).unwrap();
        fit(&config, &named(gpu, &config.switches).unwrap()).unwrap()
    }

    /// Small memory takes fewer rows at once before it recomputes whole layers.
    #[test]
    fn rows_follow_from_the_memory() {
        let small = fitted("rtx3090", &["layers=4"]);
        let large = fitted("h200", &["layers=4"]);
        assert!(small.fits && large.fits);
        assert_eq!(large.compiled.micro_batch, 32, "beyond 65,536 tokens nothing gets faster");
        assert!(small.largest.unwrap() <= large.largest.unwrap());
        assert!(small.bytes() <= small.compiled.target.memory_bytes);
        let cramped = fitted("rtx3090", &["context=8192"]);
        let recompute = cramped.compiled.settled.chosen.iter().find(|c| c.switch == "recompute").unwrap();
        assert_eq!(recompute.value, "cheap");
        assert!(cramped.compiled.micro_batch < 8, "{}", cramped.compiled.micro_batch);
    }

    #[test]
    fn what_does_not_fit_is_planned_and_said() {
        let given = fitted("rtx3090", &["layers=8", "micro_batch=64", "recompute=none"]);
        assert!(!given.fits && given.bytes() > given.compiled.target.memory_bytes);
        let largest = given.largest.unwrap();
        assert!(largest < 64 && 64_usize.is_multiple_of(largest));
        let huge = fitted("rtx3090", &["layers=4", "width=16384", "ffn=65536", "heads=128", "kv_heads=128"]);
        assert!(!huge.fits && huge.largest.is_none());
        assert_eq!(huge.compiled.micro_batch, 1);
    }
}
