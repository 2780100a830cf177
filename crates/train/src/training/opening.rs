//! The description of a run before its first step: the `start` event, which lists and reports are made from.

use std::collections::BTreeMap;

use flatout_ir::{Shard, optimizers};
use flatout_runtime::{Laps, Session, cuda};

use crate::config::{Config, Optimizer, Rate};
use crate::device::kernels;
use crate::machine;
use crate::ranks::Ranks;
use crate::resolve::compile::Compiled;
use crate::resolve::fp8_layers;
use crate::resolve::prediction;
use crate::run::events::{DataFacts, Prepared, Start, WorldFacts, now};
use crate::switches::active;
use crate::tasks::dataset::Dataset;

pub fn opening(
    ranks: &Ranks,
    config: &Config,
    compiled: &Compiled,
    data: &dyn Dataset,
    session: &Session,
    steps: u64,
    laps: &Laps,
) -> Start {
    let described = data.describe();
    let on_gpu = session.as_cuda().is_some();
    let prepared = active::Prepared::session(session, &compiled.settled);
    let switches = active::active(&compiled.plans, &compiled.target, prepared);
    let loading = data.loading(config, compiled.feeding());
    Start {
        recipe: config.recipe.clone(),
        backend: compiled.target.name.clone(),
        optimizer: optimizer(config, &switches, steps),
        loader: if on_gpu { format!("{loading}; copies go through pinned memory") } else { loading },
        switches,
        not_deterministic: active::not_deterministic(&compiled.plans, &compiled.target)
            .iter()
            .map(|name| name.to_string())
            .collect(),
        attention: session.as_cuda().and_then(|cuda| cuda.attention()),
        products: session.as_cuda().and_then(|cuda| cuda.products()),
        fp8: fp8_layers::sentence(&compiled.plans, &compiled.settled),
        prepared: session.as_cuda().map(|cuda| Prepared {
            kernels_compiled: cuda.compiled().compiled,
            kernels_from_disk: cuda.compiled().from_disk,
            products_timed: cuda.tuning().timed,
            products_remembered: cuda.tuning().remembered,
        }),
        start_seconds: laps.iter().map(|(name, seconds)| (name.to_string(), seconds)).collect(),
        arena_bytes: compiled.plans.arena_bytes as u64,
        driver_bytes: session.driver_bytes(),
        time: now(),
        version: env!("CARGO_PKG_VERSION").into(),
        device: if on_gpu { kernels::gpu().sentence } else { machine::processor(compiled.target.cores) },
        libraries: if on_gpu { libraries() } else { BTreeMap::new() },
        steps,
        micro_batch: compiled.micro_batch as u64,
        parameters: compiled.parameters,
        memory: compiled
            .plans
            .categories()
            .into_iter()
            .map(|(name, n)| (name.to_string(), n as u64))
            .collect(),
        auto: compiled.settled.chosen.iter().map(|c| (c.switch.to_string(), c.why.clone())).collect(),
        predicted_ms: 1e3 * prediction::step_cost(compiled, config.train.batch).predicted_seconds,
        is_calibrated: prediction::is_calibrated(compiled),
        data: DataFacts {
            source: config.data.named(),
            vocabulary: data.vocabulary().map_or(0, |vocabulary| vocabulary.size() as u64),
            documents: described.documents,
            held_out_documents: described.held_out_documents,
            tokens: described.tokens,
            layout: compiled.settled.arrangement.as_ref().map(|arrangement| arrangement.words()),
        },
        world: world(ranks, compiled, session),
    }
}

/// The ranks of the run, and what they exchange over.
fn world(ranks: &Ranks, compiled: &Compiled, session: &Session) -> Option<WorldFacts> {
    let options = &compiled.settled.options;
    let nccl = session.as_cuda().and_then(|cuda| cuda.wire());
    (ranks.are_many() || options.lanes > 1 || nccl.is_some()).then(|| WorldFacts {
        ranks: ranks.count() as u64,
        nodes: ranks.nodes() as u64,
        mesh: options.mesh.to_string(),
        environment: if nccl.is_some() { nccl_variables() } else { vec![] },
        wire: nccl.unwrap_or_else(|| if ranks.are_many() { "sockets".into() } else { String::new() }),
        wire_bytes: session.wire_bytes(),
        shard: if compiled.plans.sharded.is_empty() { Shard::None } else { options.shard }.name().into(),
        lanes: options.lanes as u64,
    })
}

/// Environment variables of NCCL that are set, sorted.
fn nccl_variables() -> Vec<String> {
    let all = std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value)));
    let of_nccl = all.filter(|(name, _)| name.starts_with("NCCL_"));
    let mut words: Vec<String> =
        of_nccl.map(|(name, value)| format!("{name}={}", value.to_string_lossy())).collect();
    words.sort();
    words
}

/// The update rule in words: how it is compiled, as read from the plans, and its hyperparameters.
fn optimizer(config: &Config, switches: &BTreeMap<String, String>, steps: u64) -> String {
    let (Optimizer { name, betas: [first, second], weight_decay, clip, .. }, schedule) =
        (&config.optimizer, &config.schedule);
    let lr = rates(config);
    let momentum = match name.0 {
        optimizers::Name::AdamW => String::new(),
        optimizers::Name::Muon => format!("momentum {}, ", config.optimizer.momentum),
    };
    let is_on = |switch: &str| switches.get(switch).is_some_and(|state| state == "on");
    let fused = if is_on("fuse.optimizer") { ", fused" } else { "" };
    let moments = switches.get("optimizer.state").map_or("", |state| &state[..]);
    let horizon = schedule.horizon_steps.unwrap_or(steps);
    let warmup = schedule.resolved_warmup(horizon).unwrap_or(schedule.warmup_steps);
    let clip = if *clip > 0.0 { format!("clipped at {clip}") } else { "not clipped".into() };
    let plural = if warmup == 1 { "" } else { "s" };
    format!(
        "{name}{fused}: lr {lr}, warm-up {warmup} step{plural}, weight decay {weight_decay}, {momentum}betas {first} {second}, {clip}, \
         moments in {moments}"
    )
}

/// The peak of every learning rate, and the schedule they follow.
fn rates(config: &Config) -> String {
    let (rates, schedule) = (config.rates(), &config.schedule);
    let mut words = format!("{} {}", rates[0].peak, schedule.name);
    if let Some(end) = schedule.final_lr {
        words += &format!(" to {end}");
    }
    for Rate { name, peak, end } in &rates[1..] {
        words += &format!(", {name} {peak}");
        if let Some(end) = end.filter(|end| Some(*end) != schedule.final_lr) {
            words += &format!(" to {end}");
        }
    }
    words
}

/// The libraries that were opened.
fn libraries() -> BTreeMap<String, String> {
    let opened = cuda::library::libraries();
    let version = |kind: cuda::library::LibraryKind| {
        opened.get(kind).map(|library| (kind.name().to_string(), library.version.to_string()))
    };
    cuda::library::LibraryKind::ALL.into_iter().filter_map(version).collect()
}
