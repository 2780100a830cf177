//! Which switches are active, read from the launches that were compiled and not from what was asked for.

use std::collections::{BTreeMap, HashMap, HashSet};

use flatout_ir::plan::{Launch, Plan};
use flatout_ir::{Class, DType, Op, OpKind, PlanSet, Role, Target, View};

use crate::compile::Compiled;
use crate::config::Config;
use crate::failure::Failure;

/// What a fusion reports where the model has nothing for it.
pub const NOTHING: &str = "nothing to fuse";

/// The state of every switch, by name.
pub fn active(plans: &PlanSet, target: &Target) -> BTreeMap<String, String> {
    let grad = plans.plan(Role::Grad).expect("a training run has a grad plan");
    let on = |yes: bool| if yes { "on" } else { "off" };
    let table: [(&str, &str); 14] = [
        ("backend", if target.name == "cpu" { "cpu" } else { "cuda" }),
        ("precision", precision(grad)),
        ("attention", if has(grad, OpKind::Attention) { "flash" } else { "naive" }),
        ("fuse.qkv", fused_inputs(grad, OpKind::Attention, 2)),
        ("fuse.gate_up", fused_inputs(grad, OpKind::Gated, 0)),
        ("fuse.norm", fused_norms(grad)),
        ("fuse.elementwise", fused_elementwise(grad)),
        ("fuse.loss", on(has(grad, OpKind::HeadLossTrain))),
        ("fuse.optimizer", on(updates_regions(plans))),
        ("recompute", recompute(grad)),
        ("memory_plan", on(shares_memory(plans))),
        ("rope_cache", on(reads_table(grad))),
        ("cuda_graphs", "off"),
        ("deterministic", on(is_deterministic(plans, target))),
    ];
    table.into_iter().map(|(name, value)| (name.into(), value.into())).collect()
}

/// Refuses to train with a switch that was asked for and is not active: that is a mistake of ours, and the user must
/// not find out later.
pub fn check(config: &Config, compiled: &Compiled) -> Result<(), Failure> {
    let active = active(&compiled.plans, &compiled.target);
    for (name, state) in &active {
        let asked = config.switches.get(name).unwrap_or_default();
        let settled = compiled.chosen.iter().find(|c| c.switch == name).map_or(asked.as_str(), |c| &c.value);
        // Determinism beyond what was asked for is no harm, and so is memory that needs no sharing.
        let extra = name == "deterministic" || name == "memory_plan";
        if state != settled
            && state != NOTHING
            && !(extra && settled != "on")
            && !(name == "memory_plan" && asked == "on")
        {
            return Err(Failure::Environment(format!(
                "`{name}={settled}` was asked for and the compiled plan has it {state}: this is a bug of flatout; \
                 {name}={state} runs what was compiled"
            )));
        }
    }
    Ok(())
}

fn launches(plan: &Plan, kind: OpKind) -> impl Iterator<Item = &Launch> {
    plan.launches.iter().filter(move |l| l.op.kind() == kind)
}

fn has(plan: &Plan, kind: OpKind) -> bool {
    launches(plan, kind).next().is_some()
}

fn precision(grad: &Plan) -> &'static str {
    let narrow = launches(grad, OpKind::Product).any(|l| l.ins[0].dtype == DType::BF16);
    if narrow { "bf16" } else { "fp32" }
}

/// Whether an operation reads its input out of a wider tensor, as it does behind a merged product.
fn fused_inputs(grad: &Plan, kind: OpKind, input: usize) -> &'static str {
    let is_slice = |view: &View| {
        let row: usize = view.dims[1..].iter().product();
        view.dims[0] > 1 && view.strides[0] > row
    };
    let (mut all, mut found) = (true, false);
    for launch in launches(grad, kind) {
        found = true;
        all &= is_slice(&launch.ins[input]);
    }
    match (found, all) {
        (true, true) => "on",
        (true, false) => "off",
        (false, _) => NOTHING,
    }
}

fn fused_norms(grad: &Plan) -> &'static str {
    let fused = launches(grad, OpKind::RmsNorm).any(|l| matches!(l.op, Op::RmsNorm { residual: true, .. }));
    if fused || has(grad, OpKind::QkNormRope) { "on" } else { "off" }
}

fn fused_elementwise(grad: &Plan) -> &'static str {
    let joined = has(grad, OpKind::Region) || has(grad, OpKind::Gated);
    match (joined, has(grad, OpKind::Map)) {
        (true, _) => "on",
        (false, true) => "off",
        (false, false) => NOTHING,
    }
}

/// Whether updates run over whole regions: fewer launches than tensors.
fn updates_regions(plans: &PlanSet) -> bool {
    let apply = plans.plan(Role::Apply).expect("a training run has an apply plan");
    let wholes: HashSet<usize> = plans
        .slots
        .iter()
        .filter(|s| s.class == Class::Weight && s.is_whole && s.path.starts_with("region."))
        .map(|s| s.view.elements())
        .collect();
    launches(apply, OpKind::AdamW).all(|l| wholes.contains(&l.ins[0].elements()))
}

/// What runs twice: launches that share their key and kind with another.
fn recompute(grad: &Plan) -> &'static str {
    let mut seen: HashMap<(u64, OpKind), usize> = HashMap::new();
    for l in &grad.launches {
        *seen.entry((l.key, l.op.kind())).or_default() += 1;
    }
    let twice = |kind: OpKind| seen.iter().any(|((_, k), n)| *k == kind && *n > 1);
    if twice(OpKind::Product) || twice(OpKind::Attention) {
        "full"
    } else if [OpKind::RmsNorm, OpKind::QkNormRope, OpKind::Rope, OpKind::Gated].into_iter().any(twice) {
        "cheap"
    } else {
        "none"
    }
}

/// Whether two transient buffers of the largest plan lie in the same place.
fn shares_memory(plans: &PlanSet) -> bool {
    let mut transient: Vec<(usize, usize)> =
        plans.buffers.iter().filter(|b| b.live.is_some()).map(|b| (b.offset, b.offset + b.bytes)).collect();
    transient.sort_unstable();
    transient.windows(2).any(|pair| pair[1].0 < pair[0].1)
}

fn reads_table(grad: &Plan) -> bool {
    grad.launches
        .iter()
        .any(|l| matches!(l.op, Op::Rope { table: true, .. } | Op::QkNormRope { table: true, .. }))
}

fn is_deterministic(plans: &PlanSet, target: &Target) -> bool {
    let used: HashSet<&str> = plans.plans.iter().flat_map(|p| &p.launches).map(|l| l.kernel).collect();
    target.kernels.iter().filter(|k| used.contains(k.name)).all(|k| k.deterministic)
}
