//! Strong scaling of a run: the same update on 1, 2, 4 .. ranks. The batch stays the same, so each rank has fewer of its rows.

use flatout_ir::{OpKind, Role, Target};
use flatout_train::config::Config;
use flatout_train::resolve::compile::{Compiled, compile};
use flatout_train::resolve::fit::compile_unbounded;
use flatout_train::resolve::prediction;
use rayon::prelude::*;

/// An update on a number of ranks; all times are predictions.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Scaled {
    pub ranks: usize,
    pub nodes: usize,
    pub micro_batch: usize,
    /// Bytes of the arena on each rank.
    pub arena_bytes: usize,
    /// Whether it fits the memory of a rank's device.
    pub fits: bool,
    pub exchange: Exchange,
    pub tokens_per_second: f64,
    /// Scaling efficiency: tokens per second over `ranks` times those of one rank.
    pub share_of_linear: f64,
}

/// The time that exchanges add to an update, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Exchange {
    pub step_ms: f64,
    /// The launches of a rank, as if nothing were exchanged.
    pub compute_ms: f64,
    /// The exchanges, as if nothing else ran.
    pub wire_ms: f64,
    /// The part of the step that exchanges add.
    pub exposed_ms: f64,
    /// Buckets in which sharded tensors are exchanged; 0 where nothing is sharded.
    pub buckets: usize,
}

/// A number of ranks among which the run cannot be divided, and the reason.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Refused {
    pub ranks: usize,
    pub refused: String,
}

/// Predicts the exchanges of an update from timings of kernels and exchanges where there are any; otherwise the least times.
pub fn exchange(compiled: &Compiled, batch: usize) -> Exchange {
    let (played, _) = prediction::step_played(compiled, batch);
    // Sums are scattered once per update, or in every micro-batch.
    let plans = [Role::Apply, Role::GRAD].into_iter().filter_map(|role| compiled.plans.plan(role));
    let scatters = plans.flat_map(|plan| &plan.launches);
    Exchange {
        step_ms: 1e3 * played.seconds,
        compute_ms: 1e3 * played.compute_seconds,
        wire_ms: 1e3 * played.wire_seconds,
        exposed_ms: 1e3 * played.exposed_seconds(),
        buckets: scatters.filter(|launch| launch.op.kind() == OpKind::ReduceScatter).count(),
    }
}

/// The run on 1, 2, 4 .. ranks up to this many, on the targets that `target_of` gives.
pub fn scaling(
    config: &Config,
    ranks: usize,
    target_of: &(dyn Fn(usize) -> Target + Sync),
) -> Vec<Result<Scaled, Refused>> {
    let numbers: Vec<usize> =
        std::iter::successors(Some(1), |n| Some(2 * n)).take_while(|n| *n < ranks).chain([ranks]).collect();
    let planned = |ranks: usize| -> Result<Scaled, Refused> {
        let target = target_of(ranks);
        let compiled = match compile(config, &target) {
            Ok(compiled) => compiled,
            Err(why) => compile_unbounded(config, &target)
                .ok_or_else(|| Refused { ranks, refused: why.to_string() })?,
        };
        let exchange = exchange(&compiled, config.train.batch);
        let tokens = prediction::tokens_per_update(config, &compiled) as f64;
        let arena_bytes = compiled.plans.arena_bytes;
        Ok(Scaled {
            ranks,
            nodes: ranks.div_ceil(target.links.as_ref().map_or(ranks, |links| links.ranks_a_node)),
            micro_batch: compiled.micro_batch,
            arena_bytes,
            fits: arena_bytes as u64 + target.bytes_beside() <= target.memory_bytes,
            exchange,
            tokens_per_second: 1e3 * tokens / exchange.step_ms,
            share_of_linear: 1.0,
        })
    };
    let mut rows: Vec<_> = numbers.into_par_iter().with_max_len(1).map(planned).collect();
    let one = rows.first().and_then(|row| row.as_ref().ok()).map(|one| one.tokens_per_second);
    for row in rows.iter_mut().flatten() {
        row.share_of_linear = one.map_or(f64::NAN, |one| row.tokens_per_second / (one * row.ranks as f64));
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use flatout_train::device;
    use flatout_train::ranks::target_among;
    use flatout_train::recipes;

    /// `pretrain-226m` with this batch on GPUs of a name in nodes, and the setting.
    fn planned(gpu: &str, a_node: usize, nodes: usize, words: &[&str]) -> (Exchange, Compiled) {
        let words: Vec<String> = words.iter().map(|word| word.to_string()).collect();
        let config = recipes::resolve("pretrain-226m", &[], &words).unwrap();
        let links = device::links_of(gpu, None, None, None, a_node).unwrap();
        let target = device::named(gpu, &config.switches).unwrap();
        let target = Target { links: Some(links), timings: Default::default(), ..target };
        let compiled = compile(&config, &target_among(a_node * nodes, target)).unwrap();
        (exchange(&compiled, config.train.batch), compiled)
    }

    fn close(got: f64, want: f64, part: f64) {
        assert!((got / want - 1.0).abs() < part, "{got:.2}, wanted {want} within {part}");
    }

    /// The time of exchanges, within 6%, and the share of linear scaling that remains with the compute time that such GPUs were
    /// expected to need, within a hundredth: (GPU, a node, nodes, rows, scatter and gather, compute, share).
    #[test]
    fn exchanges_leave_the_expected_share_of_linear_scaling() {
        for (gpu, a_node, nodes, rows, wire_ms, compute_ms, share) in [
            ("h100", 8, 1, 64, 2.2 + 1.1, 64.0, 0.95),
            ("h100", 8, 4, 64, 2.7 + 1.4, 16.0, 0.80),
            ("h100", 8, 4, 512, 2.7 + 1.4, 129.0, 0.97),
            ("rtx4090", 4, 1, 64, 62.0 + 31.0, 546.0, 0.85),
        ] {
            let rows = format!("train.batch={rows}");
            let (exchange, compiled) = planned(gpu, a_node, nodes, &[&rows]);
            close(exchange.wire_ms, wire_ms, 0.06);
            let is_exposed = exchange.exposed_ms > 0.8 * exchange.wire_ms;
            assert!(exchange.exposed_ms <= exchange.wire_ms && is_exposed, "{exchange:?}");
            assert!((compute_ms / (compute_ms + exchange.exposed_ms) - share).abs() < 0.01, "{exchange:?}");
            // Compute here is the least by data sheets.
            assert!(
                exchange.compute_ms < compute_ms && exchange.compute_ms > 0.5 * compute_ms,
                "{exchange:?}"
            );
            assert_eq!(compiled.settled.options.shard, flatout_ir::Shard::Optimizer);
        }
    }

    /// Sums that every rank gets move twice as many bytes of f32, and no computation overlaps them.
    #[test]
    fn levels_and_overlap_change_the_exchanges() {
        let of = |word: &str| planned("h100", 8, 1, &["train.batch=64", word]);
        let (shared, in_shares) = of("shard=optimizer");
        let (whole, on_all) = of("shard=none");
        close(whole.wire_ms, 4.4, 0.05);
        assert_eq!((whole.buckets, shared.buckets), (0, 2));
        assert!(on_all.plans.arena_bytes > in_shares.plans.arena_bytes + (2 << 30));
        let (apart, _) = of("overlap=off");
        assert!((apart.exposed_ms - apart.wire_ms).abs() < 1e-6, "{apart:?}");
        assert!(shared.exposed_ms < apart.exposed_ms - 0.1, "{} and {}", shared.exposed_ms, apart.exposed_ms);
    }

    /// Exchanges that were timed among as many ranks of one node are predicted from these times: here three times what the links
    /// give.
    #[test]
    fn timed_exchanges_win_over_links_on_one_node() {
        let config = recipes::resolve("pretrain-226m", &[], &["train.batch=64".into()]).unwrap();
        let (by_links, compiled) = planned("h100", 8, 1, &["train.batch=64"]);
        let mesh = compiled.target.mesh();
        let links = compiled.target.links.clone().unwrap();
        let exchanges = compiled.plans.plans.iter().flat_map(|plan| &plan.launches);
        let exchanges = exchanges.filter(|launch| launch.queue == flatout_ir::Queue::Wire);
        let point = |launch: &flatout_ir::Launch| {
            let size = flatout_ir::timings::Size::of(launch);
            flatout_ir::timings::Point { size, seconds: 3.0 * links.seconds(launch, &mesh) }
        };
        let timings = flatout_ir::timings::Timings::new(exchanges.map(point));
        let among = |a_node: usize| {
            let links = device::links_of("h100", None, None, None, a_node).unwrap();
            let target = Target { links: Some(links), timings: timings.clone(), ..compiled.target.clone() };
            let compiled = compile(&config, &target).unwrap();
            assert!(!prediction::is_calibrated(&compiled), "no kernel was timed");
            exchange(&compiled, config.train.batch)
        };
        let timed = among(8);
        close(timed.wire_ms, 3.0 * by_links.wire_ms, 1e-6);
        close(timed.compute_ms, by_links.compute_ms, 1e-9);
        assert_eq!(timed.buckets, by_links.buckets, "ranks must choose alike, so links alone choose");
        let (across, _) = planned("h100", 4, 2, &["train.batch=64"]);
        close(among(4).wire_ms, across.wire_ms, 1e-9);
    }

    /// Weights that layers gather are sent twice in addition to their gradients, in every micro-batch, and most of that overlaps
    /// layers.
    #[test]
    fn gathered_layers_take_less_memory_and_more_wire() {
        let of = |word: &str| planned("h100", 8, 1, &["train.batch=64", "train.micro_batch=8", word]);
        let (scattered, of_gradients) = of("shard=gradients");
        let (gathered, of_parameters) = of("shard=parameters");
        let [whole, cut] = [of_gradients, of_parameters].map(|compiled| compiled.plans.arena_bytes);
        assert!(cut < whole - (200 << 20), "{cut} bytes, and {whole} with whole weights");
        assert!(gathered.wire_ms > scattered.wire_ms, "{gathered:?} and {scattered:?}");
        assert!(gathered.exposed_ms < 0.3 * gathered.wire_ms, "{gathered:?}");
    }

    #[test]
    fn a_run_scales_over_powers_of_two() {
        let config = recipes::resolve("tiny", &[], &["train.batch=6".into()]).unwrap();
        let alone = device::named("h100", &config.switches).unwrap();
        let target_of = |ranks: usize| {
            let links = device::links_of("h100", None, None, None, 4).unwrap();
            target_among(ranks, Target { links: Some(links), ..alone.clone() })
        };
        let rows = scaling(&config, 12, &target_of);
        let ranks = |row: &Result<Scaled, Refused>| match row {
            Ok(row) => (row.ranks, row.nodes, true),
            Err(row) => (row.ranks, 0, row.refused.is_empty()),
        };
        let got: Vec<_> = rows.iter().map(ranks).collect();
        assert_eq!(got, [(1, 1, true), (2, 1, true), (4, 1, true), (8, 0, false), (12, 0, false)]);
        let shares: Vec<f64> = rows.iter().flatten().map(|row| row.share_of_linear).collect();
        assert_eq!(shares[0], 1.0);
        assert!(shares[2] < shares[1] && shares[1] < 1.0, "{shares:?}");
    }
}
