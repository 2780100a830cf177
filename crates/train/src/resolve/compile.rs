//! Compiles a config to the plans of a run. Nothing is allocated here and no data is read, so `plan` and `train` agree to the
//! byte.

use std::collections::HashSet;

use flatout_data::Arrangement;
use flatout_ir::cost::{Trainability, training_flops};
use flatout_ir::passes::adapter::slot_beside;
use flatout_ir::passes::lanes::{lanes_of, ranks_in_step};
use flatout_ir::{
    Adapter, Class, Codes, PlanSet, Program, Recompute, Role, Shard, Target, compile as compile_programs,
};
use flatout_runtime::cpu;

use crate::Failure;
use crate::UserError;
use crate::config::resolved::Resolved;
use crate::config::{AdapterKind, Config};
use crate::machine;
use crate::resolve::arranged;
use crate::resolve::arranged::eval_layout;
use crate::resolve::buckets;
use crate::resolve::fp8_layers;
use crate::resolve::lanes;
use crate::resolve::mesh;
use crate::resolve::recompute_layers;
use crate::resolve::samples;
use crate::resolve::settle::{check_base, settle};
use crate::resolve::tower;
use crate::resolve::windows::{self, WindowPlan};
use crate::switches::active;
use crate::switches::memory::{BASE, Base, SHARD};
use crate::switches::{Auto, Settled};
use crate::tasks::capacities::Capacities;
use crate::tasks::dataset::Feeding;
use crate::tasks::{self, image_table};
use crate::weights::{adapters, pretrained};
use flatout_waits::{self as waits, Unit};

/// Plans of a run and the extents they were compiled for.
#[derive(Clone, Debug)]
pub struct Compiled {
    pub plans: PlanSet,
    pub target: Target,
    /// Rows of a `grad` run.
    pub micro_batch: usize,
    /// The capacities of the gradient plans, the largest first.
    pub capacities: Vec<Capacities>,
    /// Rows per evaluation; 0 disables evaluation.
    pub eval_batch: usize,
    /// The settled switches.
    pub settled: Settled,
    /// Number of trained and frozen parameters.
    pub parameters: u64,
    /// Forward and backward FLOPs of products, attention and head; the mean over the run if windows differ.
    pub flops_per_token: u64,
    /// The gradient plans of a window schedule, the widest window first; empty without one.
    pub windows: Vec<WindowPlan>,
}

impl Compiled {
    /// The plans as sources of batches need them.
    pub fn feeding(&self) -> Feeding<'_> {
        self.feeding_rank(0)
    }

    /// The same for the rows of one of several ranks.
    pub fn feeding_rank(&self, rank: usize) -> Feeding<'_> {
        let Settled { options, arrangement, .. } = &self.settled;
        Feeding {
            plans: &self.plans,
            micro_batch: self.micro_batch,
            arrangement: arrangement.as_ref(),
            lanes: lanes_of(rank, options),
            of_lanes: options.lanes,
            together: ranks_in_step(options),
        }
    }

    /// Number of trained parameters.
    pub fn trained(&self) -> u64 {
        let trained = self.plans.held(0).into_iter().filter(|piece| piece.class == Class::Weight);
        trained.map(|piece| piece.ty.elements() as u64).sum()
    }

    /// Records what `auto` chose from the memory and timings of this start: a resumed run must not choose differently, because
    /// the split of a batch and the recomputed layers change the last bits, and 8-bit tensors have a state.
    pub fn pin(&self, config: &Config, resolved: &mut Resolved) {
        if config.train.micro_batch().is_none() {
            resolved.micro_batch = Some(self.micro_batch);
        }
        let lanes = self.settled.options.lanes;
        if config.train.lanes.given().is_none() {
            resolved.lanes = (lanes > 1).then_some(lanes);
        }
        resolved.recompute = Some(self.settled.options.recompute.name().into());
        resolved.recompute_layers = self.settled.options.recompute_layers.or(resolved.recompute_layers);
        fp8_layers::pin(&self.settled, config, resolved);
        resolved.switches =
            active::active(&self.plans, &self.target, active::Prepared::settled(&self.settled));
        resolved.capacities.clone_from(&self.capacities);
    }

    /// The values resolved so far, plus those resolved in these plans.
    pub fn pinned_over(&self, config: &Config, resolved: &Resolved) -> Resolved {
        let mut pinned = resolved.clone();
        self.pin(config, &mut pinned);
        pinned
    }

    /// A config with the values resolved in these plans, so that plans compiled from it do the same work.
    pub fn pinned(&self, config: &Config) -> Config {
        let mut resolved = Resolved::default();
        self.pin(config, &mut resolved);
        resolved.over(config)
    }
}

/// The CPU as the compiler sees it, with all threads that the process may use.
pub fn target() -> Target {
    cpu::target(machine::threads())
}

/// The most tokens of a micro-batch whose size is chosen here. On a CPU larger ones leave the caches; on a GPU larger ones are no
/// faster.
const AUTO_TOKENS_CPU: usize = 2048;
const AUTO_TOKENS_GPU: usize = 65536;

/// The levels that `shard=auto` tries in turn where memory does not suffice, with the reason for each.
const FURTHER: [(Shard, &str); 2] = [
    (
        Shard::Gradients,
        "each rank then keeps a share of gradients too, without which memory does not suffice",
    ),
    (
        Shard::Parameters,
        "each rank then keeps a share of all that layers read, and gathers a layer at a time: memory suffices no other way",
    ),
];

/// Compiles for training: `grad`, `apply`, `eval` where data is held out, and the plans that generate samples of text where these
/// are asked for. Several ranks also shard gradient sums, and then what layers read, if `shard=auto` fits no other way. With
/// adapters, `base=auto` stores frozen weights in four bits if nothing else fits.
pub fn compile(config: &Config, target: &Target) -> Result<Compiled, Failure> {
    let _wait = waits::begin("planning", Unit::Nothing, None);
    let refused = match compile_as_asked(config, target) {
        Err(refused) => refused,
        compiled => return compiled,
    };
    let divided = further_divided(config, target);
    divided.or_else(|| kept_in_four_bits(config, target)).ok_or(refused)
}

fn further_divided(config: &Config, target: &Target) -> Option<Compiled> {
    if target.ranks == 1 || config.switches.memory.shard != Auto::Auto {
        return None;
    }
    FURTHER.into_iter().find_map(|(level, reason)| {
        let mut further = config.clone();
        further.switches.memory.shard = Auto::Given(level);
        let mut compiled = compile_as_asked(&further, target).ok()?;
        compiled.settled.choose(SHARD.name, level.name(), reason);
        (!compiled.plans.sharded.is_empty()).then_some(compiled)
    })
}

/// Different numbers are better than no run, and they are reported. If the source has no such base, the refusal says so.
fn kept_in_four_bits(config: &Config, target: &Target) -> Option<Compiled> {
    if config.adapter.kind == AdapterKind::None || config.switches.memory.base != Auto::Auto {
        return None;
    }
    // A config that would be refused with any amount of memory is not handled here.
    let endless = Target { memory_bytes: u64::MAX, ..target.clone() };
    compile_as_asked(config, &endless).ok()?;
    let mut small = config.clone();
    small.switches.memory.base = Auto::Given(Base::Nf4);
    let mut compiled = compile_as_asked(&small, target).ok()?;
    pretrained::check(&small, &mut |_| {}).ok()?;
    compiled.settled.choose(
        BASE.name,
        Base::Nf4.name(),
        "the frozen base does not fit in bf16; losses differ from those with base=bf16",
    );
    Some(compiled)
}

fn compile_as_asked(config: &Config, target: &Target) -> Result<Compiled, Failure> {
    // All rows of a micro-batch belong to one lane.
    let batch = lanes::rows_a_lane(config, lanes::lanes(config, target.ranks)?);
    let tokens = config.model.tokens() * config.together();
    if let Some(rows) = config.train.micro_batch() {
        let rows = rows.min(batch);
        let compiled = compile_for(config, target, rows, true);
        return compiled.map_err(|refused| too_large(config, target, rows, refused));
    }
    let auto_tokens = if target.name == "cpu" { AUTO_TOKENS_CPU } else { AUTO_TOKENS_GPU };
    let divisors = (1..=batch).rev().filter(|n| batch.is_multiple_of(*n));
    let wanted: Vec<usize> = divisors.filter(|n| *n == 1 || n * tokens <= auto_tokens).collect();
    let mut refused = None;
    // Fewer rows at once cost little, running every layer twice costs a third: the second round serves configs that fit no other
    // way.
    for may_recompute_all in [false, true] {
        for &rows in &wanted {
            match compile_for(config, target, rows, may_recompute_all) {
                Ok(compiled) => return Ok(compiled),
                Err(failure) => refused = Some(failure),
            }
        }
    }
    Err(too_large(config, target, 1, refused.expect("a batch has the divisor 1")))
}

/// Extends a refusal for lack of memory by where the bytes would go and the largest micro-batch that fits; returns any other
/// refusal unchanged.
fn too_large(config: &Config, target: &Target, rows: usize, refused: Failure) -> Failure {
    let endless = Target { memory_bytes: u64::MAX, ..target.clone() };
    let Ok(planned) = compile_for(config, &endless, rows, true) else { return refused };
    let gib = |bytes: usize| bytes as f64 / (1u64 << 30) as f64;
    let parts = planned.plans.categories().into_iter().filter(|(_, bytes)| gib(*bytes) >= 0.05);
    let parts: Vec<String> = parts.map(|(name, bytes)| format!("{name} {:.1}", gib(bytes))).collect();
    let smaller = (1..rows).rev().filter(|n| config.train.batch.is_multiple_of(*n));
    let advice = match smaller.into_iter().find(|n| compile_for(config, target, *n, true).is_ok()) {
        Some(fits) => format!("train.micro_batch={fits} is the largest that fits"),
        None => "no micro-batch fits: use a smaller model or context, or recompute=full".into(),
    };
    let smaller_base = in_four_bits(config, target, rows).map(|sentence| format!("; {sentence}"));
    let parts = parts.join(", ");
    Failure::User(UserError(format!(
        "{refused} (GiB: {parts}); {advice}{}",
        smaller_base.unwrap_or_default()
    )))
}

/// With adapters, whether and in how many bytes the run would fit with a base in four bits: for `base=bf16`, and where other
/// settings keep `auto` from choosing it.
fn in_four_bits(config: &Config, target: &Target, rows: usize) -> Option<String> {
    if config.adapter.kind == AdapterKind::None || config.switches.memory.codes() == Some(Codes::Nf4) {
        return None;
    }
    let mut small = config.clone();
    small.switches.memory.base = Auto::Given(Base::Nf4);
    let mut settings = String::from("base=nf4");
    let mut compiled = compile_for(&small, target, rows, true).ok();
    if compiled.is_none() && small.switches.memory.recompute != Auto::Given(Recompute::Full) {
        small.switches.memory.recompute = Auto::Given(Recompute::Full);
        settings += " recompute=full";
        compiled = compile_for(&small, target, rows, true).ok();
    }
    if compiled.is_none() && rows > 1 {
        settings += " train.micro_batch=1";
        compiled = compile_for(&small, target, 1, true).ok();
    }
    let bytes = compiled?.plans.arena_bytes as u64 + target.bytes_beside();
    Some(format!(
        "{settings} keeps the frozen base in four bits, with other numbers, and takes {bytes} bytes, the driver's included"
    ))
}

/// Settles the switches for a micro-batch size, without plans.
pub fn settle_for(config: &Config, target: &Target, micro_batch: usize) -> Result<Settled, UserError> {
    tower::check(config)?;
    let target = &mesh::grouped(config, target)?;
    let (config, of_images) = &image_table::settle(config, target)?;
    let arranged = arranged::arranged(config, micro_batch)?;
    let capacities = capacities(config, micro_batch, arranged.as_ref().map(|(arrangement, _)| arrangement));
    let graph = tasks::graph(config, &capacities[0], true);
    let mut settled = settle(config, target, &graph)?.with_lengths(arranged);
    settled.chosen.extend(of_images.clone());
    Ok(settled)
}

/// The capacities of the gradient plans, the largest first.
fn capacities(config: &Config, micro_batch: usize, arrangement: Option<&Arrangement>) -> Vec<Capacities> {
    match arrangement {
        None => windows::of(config, Capacities::of_rows(config, micro_batch)),
        Some(arrangement) => {
            let layout = &arrangement.layout;
            (0..layout.shapes().len()).map(|shape| Capacities::of_shape(config, layout, shape)).collect()
        }
    }
}

/// Compiles for micro-batches of `micro_batch` rows; `recompute=auto` may choose `full` only with `may_recompute_all`.
pub fn compile_for(
    config: &Config,
    target: &Target,
    micro_batch: usize,
    may_recompute_all: bool,
) -> Result<Compiled, Failure> {
    tower::check(config)?;
    let target = &mesh::grouped(config, target)?;
    let asked = config;
    let (config, of_images) = &image_table::settle(config, target)?;
    let eval_batch = match config.eval.rows {
        0 => 0,
        rows => config.eval.micro_batch.given().unwrap_or(micro_batch).min(rows),
    };
    let arranged = arranged::arranged(config, micro_batch)?;
    let arrangement = arranged.as_ref().map(|(arrangement, _)| arrangement);
    let capacities = capacities(config, micro_batch, arrangement);
    let program =
        |role, capacities, training| Program { role, graph: tasks::graph(config, capacities, training) };
    let grads = capacities.iter().enumerate();
    let mut programs: Vec<Program> = grads.map(|(index, c)| program(Role::Grad(index), c, true)).collect();
    // The plan `eval` also scores answers for the reference.
    if eval_batch > 0 || config.has_reference() {
        let rows = if eval_batch > 0 { eval_batch } else { micro_batch };
        let capacities = match arrangement {
            None => Capacities::of_rows(config, rows),
            Some(arrangement) => Capacities::of_shape(config, &eval_layout(config, arrangement), 0),
        };
        programs.push(program(Role::Eval, &capacities, false));
    }
    programs.extend(samples::programs(config));
    let is_one_run = arranged.is_none() && capacities.len() == 1 && micro_batch == config.train.batch;
    let mut settled = settle(config, target, &programs[0].graph)?.with_lengths(arranged);
    let options = &mut settled.options;
    options.one_run =
        is_one_run && options.mesh.ranks() == 1 && options.lanes == 1 && !options.exchange_alone;
    check_base(config, &settled)?;
    settled.chosen.extend(of_images.clone());
    fp8_layers::settle(config, &programs[0], target, &mut settled)?;
    settled.options.buckets = buckets::at_first(&settled.options);
    let mut plans = compile_programs(&programs, target, &settled.options);
    // `auto` recomputes more only if memory requires it.
    let may_go_on = may_recompute_all && config.switches.memory.recompute == Auto::Auto;
    if plans.is_err()
        && may_go_on
        && let Some(smaller) = recompute_layers::fewest(&programs, target, &mut settled)
    {
        plans = Ok(smaller);
    }
    // More buckets let exchanges overlap with the update.
    if let Ok(one) = &plans
        && settled.options.overlap
        && settled.options.buckets == 1
    {
        settled.options.buckets = buckets::fastest(one, target);
        if settled.options.buckets > 1
            && let Ok(several) = compile_programs(&programs, target, &settled.options)
        {
            plans = Ok(several);
        } else {
            settled.options.buckets = 1;
        }
    }
    let forward = &programs[0].graph;
    let tokens = capacities[0].tokens;
    let beside = adapters::parameters(forward, &settled.options.adapters);
    let options = &settled.options;
    let slot = |adapter: &Adapter| slot_beside(forward, &adapter.weight).map(|slot| slot.path.as_str());
    let adapted: HashSet<&str> = options.adapters.iter().filter_map(slot).collect();
    let part = |path: &str| match options.freeze.contains(path) {
        _ if adapted.contains(path) => Trainability::Adapted,
        true => Trainability::Frozen,
        false => Trainability::Trained,
    };
    let flops_of = |program: &Program| training_flops(&program.graph, part) / tokens as u64;
    let of_window = |(program, share)| WindowPlan { flops_per_token: flops_of(program), share };
    let windows: Vec<WindowPlan> =
        programs.iter().zip(windows::shares(&config.schedule)).map(of_window).collect();
    // With plans of several lengths, the longest one counts.
    let flops_per_token = match &windows[..] {
        [] => flops_of(&programs[0]),
        all => all.iter().map(|of| of.share * of.flops_per_token as f64).sum::<f64>() as u64,
    };
    let compiled = Compiled {
        plans: plans?,
        target: target.clone(),
        micro_batch,
        capacities,
        eval_batch,
        settled,
        parameters: forward
            .slots
            .iter()
            .filter(|s| s.class.is_parameter())
            .chain(&beside)
            .chain(&tower::parameters_apart(config))
            .map(|s| s.ty.elements() as u64)
            .sum(),
        flops_per_token,
        windows,
    };
    active::check(&asked.switches, &compiled.plans, target, &compiled.settled)?;
    Ok(compiled)
}
