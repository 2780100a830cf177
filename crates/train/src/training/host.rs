//! Host memory of a run besides the arena: the copy of the state that checkpoints are written from, and batches that are
//! prefetched.

use flatout_ir::passes::input_path;
use flatout_models::vision::qwen3_vl::features::FEATURES;

use crate::UserError;
use crate::config::Config;
use crate::machine;
use crate::refuse;
use crate::resolve::compile::Compiled;
use crate::resolve::prediction;
use crate::run::state::copied_bytes;

/// A queued token: its number, its target and its weight.
const TOKEN_BYTES: u64 = 12;
const PIXEL_BYTES: u64 = 3;
/// Updates whose features are in memory: two prefetched, the next one, the one under way and the previous one.
const FEATURES_AHEAD: u64 = 5;

/// Bytes of host memory besides the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostMemory {
    /// The copy of the state, while a checkpoint is written.
    pub copy: u64,
    /// Prefetched batches, the one under way and the previous one.
    pub batches: u64,
}

impl HostMemory {
    pub fn of(config: &Config, compiled: &Compiled) -> HostMemory {
        let sample = match config.model.image_size() {
            Some(size) => PIXEL_BYTES.saturating_mul((size * size) as u64),
            None => TOKEN_BYTES.saturating_mul(config.model.tokens() as u64),
        };
        let ahead = (config.loader.prefetch as u64).saturating_add(2);
        let batch = sample.saturating_mul(config.train.batch as u64);
        let features = feature_bytes(config, compiled).saturating_mul(FEATURES_AHEAD);
        HostMemory {
            copy: copied_bytes(&compiled.plans),
            batches: batch.saturating_mul(ahead).saturating_add(features),
        }
    }

    pub fn total(&self) -> u64 {
        self.copy.saturating_add(self.batches)
    }
}

/// Bytes of the cached image features that an update reads.
fn feature_bytes(config: &Config, compiled: &Compiled) -> u64 {
    let of = |role| compiled.plans.slot(&input_path(role, FEATURES)).map_or(0, |slot| slot.ty.bytes() as u64);
    let runs = prediction::typical_runs(compiled, config.train.batch).into_iter();
    runs.map(|(role, times)| times.saturating_mul(of(role))).sum()
}

/// Refuses a run that needs more memory than this machine has, before any is allocated.
pub fn check(config: &Config, compiled: &Compiled) -> Result<(), UserError> {
    let arena = if compiled.target.name == "cpu" { compiled.plans.arena_bytes as u64 } else { 0 };
    check_free(config, compiled, machine::memory_bytes().saturating_sub(arena))
}

fn check_free(config: &Config, compiled: &Compiled, free: u64) -> Result<(), UserError> {
    let beside = HostMemory::of(config, compiled);
    if beside.total() <= free {
        return Ok(());
    }
    let gib = |bytes: u64| bytes as f64 / (1u64 << 30) as f64;
    let parts = [
        (
            beside.copy,
            "the copy of the state that a checkpoint is written from",
            "lower train.micro_batch, or use a smaller model",
        ),
        (beside.batches, "prefetched batches", "lower loader.prefetch or train.batch"),
    ];
    let (most, what, advice) = parts.into_iter().max_by_key(|(bytes, ..)| *bytes).expect("two parts");
    refuse!(
        "the run takes {:.1} GiB of this machine's memory beside its plans, {:.1} of them for {what}, and {:.1} GiB are free: \
         {advice}",
        gib(beside.total()),
        gib(most),
        gib(free)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipes::resolve;
    use crate::resolve::compile;

    #[test]
    fn the_largest_part_is_named_with_what_makes_it_smaller() {
        let asked = |words: &[&str], free: u64| {
            let words: Vec<String> = words.iter().map(|word| word.to_string()).collect();
            let config = resolve("tiny", &[], &words).unwrap();
            let compiled = compile::compile(&config, &compile::target()).unwrap();
            (HostMemory::of(&config, &compiled), check_free(&config, &compiled, free))
        };
        let (beside, fits) = asked(&[], 1 << 30);
        assert_eq!(fits, Ok(()));
        // Weights, two moments of 610K parameters, and the update counter.
        assert_eq!(beside.copy / 1000, 12 * 610_368 / 1000);
        assert_eq!(beside.batches, 6 * 8 * 128 * 12);
        let sentence = asked(&["train.batch=8388608"], 1 << 30).1.unwrap_err().0;
        let part = "for prefetched batches, and 1.0 GiB are free: lower loader.prefetch or train.batch";
        assert!(sentence.contains(part), "{sentence}");
        let sentence = asked(&[], 1 << 20).1.unwrap_err().0;
        assert!(
            sentence.contains("for the copy of the state that a checkpoint is written from"),
            "{sentence}"
        );
    }
}
