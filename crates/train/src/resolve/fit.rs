//! Whether a run fits a device, and the largest micro-batch that does.

use flatout_ir::Target;

use crate::Failure;
use crate::config::{Config, Count};
use crate::resolve::compile::{Compiled, compile, compile_for};

/// A run's plans for a device, whose memory they may exceed.
pub struct Fit {
    /// Compiled for the device if the plans fit, otherwise for one with unlimited memory.
    pub compiled: Compiled,
    pub fits: bool,
    /// The largest micro-batch, among the divisors of the batch, that fits; sizes that need `recompute=full` as a last resort
    /// count only if no other fits.
    pub largest: Option<usize>,
}

impl Fit {
    /// Memory of plans and driver together.
    pub fn bytes(&self) -> u64 {
        self.compiled.plans.arena_bytes as u64 + self.compiled.target.bytes_beside()
    }
}

pub fn fit(config: &Config, target: &Target) -> Result<Fit, Failure> {
    let (compiled, fits) = match compile(config, target) {
        Ok(compiled) => (compiled, true),
        Err(refused) => (compile_unbounded(config, target).ok_or(refused)?, false),
    };
    // Each of several ranks has the rows of its lanes.
    let batch = if target.ranks == 1 { config.train.batch } else { config.train.batch / target.ranks };
    let (least, most) = if fits { (compiled.micro_batch, batch) } else { (1, compiled.micro_batch) };
    let divisors = || (least..=most).rev().filter(|rows| batch.is_multiple_of(*rows));
    let fitting = |may_recompute_all: bool| {
        divisors().find(|rows| compile_for(config, target, *rows, may_recompute_all).is_ok())
    };
    let largest = fitting(false).or_else(|| fitting(true));
    Ok(Fit { compiled, fits, largest })
}

/// The plans for a device with unlimited memory, with one row at a time if the config leaves the number open.
pub fn compile_unbounded(config: &Config, target: &Target) -> Option<Compiled> {
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
    use flatout_ir::{Options, Recompute};

    use super::*;
    use crate::device::named;
    use crate::recipes::resolve;

    fn fitted(gpu: &str, overrides: &[&str]) -> Fit {
        let overrides: Vec<String> = overrides.iter().map(|s| s.to_string()).collect();
        let config = resolve("pretrain-226m", &[gpu.into()], &overrides).unwrap();
        fit(&config, &named(gpu, &config.switches).unwrap()).unwrap()
    }

    /// With little memory, fewer rows at once are tried before whole layers are recomputed.
    #[test]
    fn rows_follow_from_the_memory() {
        let small = fitted("rtx3090", &["layers=4"]);
        let large = fitted("h200", &["layers=4"]);
        assert!(small.fits && large.fits);
        assert_eq!(large.compiled.micro_batch, 32, "beyond 65,536 tokens nothing gets faster");
        assert!(small.largest.unwrap() <= large.largest.unwrap());
        assert!(small.bytes() <= small.compiled.target.memory_bytes);
        let cramped = fitted("rtx3090", &["context=8192"]);
        let recompute = cramped.compiled.settled.choice("recompute").unwrap();
        assert_eq!(recompute.value, "cheap");
        assert!(cramped.compiled.micro_batch < 8, "{}", cramped.compiled.micro_batch);
    }

    /// If the given rows do not fit, as little as possible is recomputed: the wide products of as few layers as possible, and
    /// only then whole layers. The choice is recorded for resumed runs.
    #[test]
    fn layers_run_again_one_by_one() {
        let rows = ["layers=8", "micro_batch=32", "batch=32"];
        let layers = |compiled: &Compiled| {
            let Options { recompute, recompute_layers, .. } = compiled.settled.options;
            (recompute, recompute_layers)
        };
        let roomy = fitted("h200", &rows);
        let arena = |more: &[&str]| fitted("h200", &[&rows, more].concat()).compiled.plans.arena_bytes as u64;
        assert_eq!(layers(&roomy.compiled), (Recompute::Cheap, None));
        let of = |how: &str, count: usize| {
            arena(&[&format!("recompute={how}"), &format!("train.recompute_layers={count}")])
        };
        let (all, three) = (arena(&["recompute=full"]), of("wide", 3));
        assert!(all < three && three < roomy.compiled.plans.arena_bytes as u64);
        let target = roomy.compiled.target.clone();
        let with = |bytes: u64| Target { memory_bytes: bytes + target.bytes_beside(), ..target.clone() };
        let given: Vec<String> = rows.iter().map(|s| s.to_string()).collect();
        let config = resolve("pretrain-226m", &["h200".into()], &given).unwrap();
        let three_fit = compile(&config, &with(three)).unwrap();
        assert_eq!(layers(&three_fit), (Recompute::Wide, Some(3)));
        assert_eq!(layers(&compile(&config, &with(three - 1)).unwrap()), (Recompute::Wide, Some(4)));
        let least = of("wide", 7).min(arena(&["recompute=wide"]));
        let (how, count) = layers(&compile(&config, &with(least - 1)).unwrap());
        assert_eq!(how, Recompute::Full, "wide products are not enough");
        assert!(of("full", count.unwrap()) < least && of("full", count.unwrap() - 1) >= least);
        let seven = of("full", 7);
        let all_but_last = (Recompute::Full, Some(7));
        assert_eq!(layers(&compile(&config, &with(seven)).unwrap()), all_but_last);
        assert!(compile(&config, &with(seven.min(all) - 1)).is_err());
        let again = compile(&three_fit.pinned(&config), &with(u64::MAX / 2)).unwrap();
        assert_eq!(again.plans.arena_bytes, three_fit.plans.arena_bytes);
    }

    #[test]
    fn a_number_of_layers_needs_layers_that_run_again() {
        let config = resolve("pretrain-226m", &[], &["train.recompute_layers=3".into()]).unwrap();
        let refused = compile(&config, &named("h200", &config.switches).unwrap()).err().unwrap().to_string();
        assert!(
            refused.contains("train.recompute_layers=3") && refused.contains("recompute=full"),
            "{refused}"
        );
    }

    /// Fine-tuning on a card of 24 GB with whole rows, driver included.
    #[test]
    fn adapters_fit_small_cards() {
        for (recipe, batch, gigabytes) in [("gemma3-1b-pairs", 8, 12.0), ("gemma3-4b-pairs", 2, 22.0)] {
            let batch = format!("batch={batch}");
            let config = resolve(recipe, &["rtx3090".into()], std::slice::from_ref(&batch)).unwrap();
            let fit = fit(&config, &named("rtx3090", &config.switches).unwrap()).unwrap();
            assert!(fit.fits && fit.compiled.micro_batch == config.train.batch, "{recipe}");
            assert!((fit.bytes() as f64) < gigabytes * 1e9, "{recipe} {batch}: {} bytes", fit.bytes());
        }
    }

    /// A frozen base in four bits, one row at a time, embedding and head in bf16, driver included: 8B in 9 GiB, and 32B on a card
    /// of 24 GB, where a base in bf16 does not fit and the refusal says what would.
    #[test]
    fn bases_in_four_bits_fit_small_cards() {
        let row = ["batch=1", "micro_batch=1", "recompute=full"];
        let large = ["layers=64", "width=5120", "heads=64", "ffn=25600", "context=1024"];
        for (shape, gib) in [(&[][..], 9.0), (&large[..], 23.5)] {
            let words: Vec<String> =
                row.iter().chain(shape).chain(&["base=nf4"]).map(|word| word.to_string()).collect();
            let config = resolve("qwen3-8b-lora", &["rtx4090".into()], &words).unwrap();
            let target = named("rtx4090", &config.switches).unwrap();
            let small = fit(&config, &target).unwrap();
            let taken = small.bytes() as f64 / (1u64 << 30) as f64;
            assert!(small.fits && taken < gib, "{shape:?}: {taken:.2} GiB");
            let with_base = |base: &str| {
                let words = words.iter().map(|word| word.replace("base=nf4", base)).collect::<Vec<_>>();
                compile(&resolve("qwen3-8b-lora", &["rtx4090".into()], &words).unwrap(), &target)
            };
            let auto = with_base("base=auto").expect("a base that fits");
            let chosen = auto.settled.choice("base").map(|choice| choice.value.as_str());
            match with_base("base=bf16") {
                Ok(_) => assert!(shape.is_empty() && chosen.is_none(), "32B in bf16 does not fit"),
                Err(refused) => {
                    let refused = refused.to_string();
                    let takes = format!(
                        "base=nf4 keeps the frozen base in four bits, with other numbers, and takes {} bytes",
                        small.bytes()
                    );
                    assert!(refused.contains(&takes), "{refused}");
                    assert_eq!(chosen, Some("nf4"), "what fits no other way");
                    assert_eq!(auto.plans.arena_bytes, small.compiled.plans.arena_bytes);
                }
            }
        }
    }

    /// With products in 8 bits a base in four bits takes what it takes with bf16, and the codes of gate and up for one product at
    /// a time. A base in eight bits has its codes twice.
    #[test]
    fn products_in_eight_bits_keep_no_codes_of_a_base_in_four() {
        let categories = |base: &str, precision: &str| {
            let words = ["batch=8", "micro_batch=8", "recompute=cheap", base, precision].map(String::from);
            let config = resolve("qwen3-8b-lora", &["h200".into()], &words).unwrap();
            let target = named("h200", &config.switches).unwrap();
            compile(&config, &target).expect("plans").plans.categories()
        };
        let four = categories("base=nf4", "precision=fp8");
        let (eight, in_bf16) =
            (categories("base=fp8", "precision=fp8"), categories("base=nf4", "precision=bf16"));
        let gate_and_up = 2 * 12288 * 4096;
        assert!(four["activations"] <= eight["activations"] + gate_and_up, "{four:?} and {eight:?}");
        assert_eq!(four["frozen"], in_bf16["frozen"]);
        assert!(four["parameters"] < 1 << 20 && eight["parameters"] > 6 << 30, "{four:?} and {eight:?}");
    }

    #[test]
    fn plans_that_do_not_fit_are_reported() {
        let given = fitted("rtx3090", &["layers=8", "micro_batch=64", "recompute=none"]);
        assert!(!given.fits && given.bytes() > given.compiled.target.memory_bytes);
        let largest = given.largest.unwrap();
        assert!(largest < 64 && 64_usize.is_multiple_of(largest));
        let huge = fitted("rtx3090", &["layers=4", "width=16384", "ffn=65536", "heads=128", "kv_heads=128"]);
        assert!(!huge.fits && huge.largest.is_none());
        assert_eq!(huge.compiled.micro_batch, 1);
    }
}
