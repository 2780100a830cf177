//! How a run scales: the same update on 1, 2, 4 .. ranks. The batch is the run's, so each rank has fewer rows of it.

use flatout_ir::{OpKind, Role, Target};
use flatout_train::config::Config;
use flatout_train::resolve::compile::{Compiled, compile};
use flatout_train::resolve::fit::compile_unbounded;
use flatout_train::resolve::prediction;
use rayon::prelude::*;

/// A number of ranks, and what an update takes on them; all times are predictions.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Scaled {
    pub ranks: usize,
    pub nodes: usize,
    pub micro_batch: usize,
    /// On each rank.
    pub arena_bytes: usize,
    /// Whether it fits the memory of a rank's device.
    pub fits: bool,
    pub exchange: Exchange,
    pub tokens_per_second: f64,
    /// Tokens a second over as many times those of one rank.
    pub share_of_linear: f64,
}

/// What exchanges add to an update, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Exchange {
    pub step_ms: f64,
    /// The launches of a rank, as if nothing were exchanged.
    pub compute_ms: f64,
    /// The exchanges, as if nothing else ran.
    pub wire_ms: f64,
    /// The part of the step that exchanges add.
    pub exposed_ms: f64,
    /// The parts in which what ranks have shares of is exchanged; 0 where they have none.
    pub buckets: usize,
}

/// A number of ranks that cannot share the run out, and why.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Refused {
    pub ranks: usize,
    pub refused: String,
}

/// By timings of kernels where there are any, and otherwise at best.
pub fn exchange(compiled: &Compiled, batch: usize) -> Exchange {
    let (predicted, roofline) = prediction::step_played(compiled, batch);
    let played = if prediction::is_calibrated(compiled) { predicted } else { roofline };
    let apply = compiled.plans.plan(Role::Apply);
    let scatters = apply.iter().flat_map(|plan| &plan.launches);
    Exchange {
        step_ms: 1e3 * played.seconds,
        compute_ms: 1e3 * played.compute_seconds,
        wire_ms: 1e3 * played.wire_seconds,
        exposed_ms: 1e3 * played.exposed_seconds(),
        buckets: scatters.filter(|launch| launch.op.kind() == OpKind::ReduceScatter).count(),
    }
}

/// The run on 1, 2, 4 .. ranks up to this many, on devices that `target_of` gives.
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
