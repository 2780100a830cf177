//! Which switches are active, read from the launches that were compiled and not from what was asked for.

use std::collections::{BTreeMap, HashMap, HashSet};

use flatout_data::Manner;
use flatout_ir::ops::elementwise::Elementwise;
use flatout_ir::ops::linear_attention::LinearAttend;
use flatout_ir::ops::product::{self, Compute};
use flatout_ir::ops::quantize::Source;
use flatout_ir::passes::input_path;
use flatout_ir::plan::{Launch, Plan};
use flatout_ir::{Class, DType, Op, OpKind, PlanSet, Role, Target, View};
use flatout_models::images::TABLE;
use flatout_runtime::Session;

use crate::Failure;
use crate::UserError;
use crate::config::Config;
use crate::resolve::arranged::WITHIN_UPDATES;
use crate::resolve::compile::Compiled;
use crate::resolve::settle::Settled;
use crate::switches::{AttentionKernel, Autotune};

/// What a fusion reports where the model has nothing for it.
pub const NOTHING: &str = "nothing to fuse";
/// What `recompute` reports where no operation is cheap enough to run twice.
pub const NOTHING_CHEAP: &str = "nothing cheap to recompute";
/// What `autotune` reports where products have one algorithm.
pub const NOTHING_TO_TIME: &str = "nothing to time";

/// What `fp8.scaling` reports where nothing is 8-bit.
pub const NOTHING_TO_SCALE: &str = "nothing to scale";

/// What `packing` and `length_buckets` report where rows are cut to one length.
pub const NOTHING_UNEQUAL: &str = "nothing of unequal length";

/// What `image_table` reports where images are none, lie encoded, or are in files that are not open yet.
pub const NOTHING_DECODED: &str = "nothing that lies decoded";

/// What a session settles beside the launches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prepared {
    /// Plans are replayed as graphs.
    pub cuda_graphs: bool,
    pub autotune: Autotune,
    /// The only kernel attention may run on.
    pub attention_kernel: AttentionKernel,
    /// How examples are laid out; none where rows are equally long.
    pub lengths: Option<Manner>,
    /// Images are known to lie decoded and to be of one size.
    pub decoded: bool,
}

impl Prepared {
    /// As it will be, before there is a session.
    pub fn settled(settled: &Settled) -> Prepared {
        let Settled { cuda_graphs, autotune, attention_kernel, decoded, .. } = *settled;
        let lengths = settled.arrangement.as_ref().map(|arrangement| arrangement.manner);
        Prepared { cuda_graphs, autotune, attention_kernel, lengths, decoded }
    }

    /// As it is. How much was timed is settled; that nothing was is the session's word.
    pub fn session(session: &Session, settled: &Settled) -> Prepared {
        let is_tuned = session.as_cuda().is_some_and(|cuda| cuda.is_tuned());
        let autotune = if is_tuned { settled.autotune } else { Autotune::Off };
        Prepared { cuda_graphs: session.replays_graphs(), autotune, ..Prepared::settled(settled) }
    }
}

/// The state of every switch, by name.
pub fn active(plans: &PlanSet, target: &Target, prepared: Prepared) -> BTreeMap<String, String> {
    let grad = plans.plan(Role::Grad).expect("a training run has a grad plan");
    let on = |yes: bool| if yes { "on" } else { "off" };
    let table: [(&str, &str); 21] = [
        ("backend", if target.name == "cpu" { "cpu" } else { "cuda" }),
        ("precision", precision(grad)),
        ("fp8.scaling", fp8_scaling(grad)),
        ("attention", if stores_no_scores(grad) { "flash" } else { "naive" }),
        ("attention_kernel", prepared.attention_kernel.name()),
        ("fuse.qkv", fused_inputs(grad, |op| op.kind() == OpKind::Attention, 2)),
        ("fuse.gate_up", fused_gates(grad)),
        ("fuse.norm", fused_norms(grad)),
        ("fuse.elementwise", fused_elementwise(grad)),
        ("fuse.loss", fused_loss(plans, grad)),
        ("fuse.optimizer", on(updates_regions(plans))),
        ("optimizer.state", moments(plans)),
        ("recompute", recompute(grad)),
        ("memory_plan", on(shares_memory(plans))),
        ("packing", packing(plans, prepared)),
        ("length_buckets", length_buckets(plans, prepared)),
        ("image_table", image_table(plans, prepared)),
        ("rope_cache", on(reads_table(grad))),
        ("cuda_graphs", on(prepared.cuda_graphs)),
        ("autotune", if target.name == "cpu" { NOTHING_TO_TIME } else { prepared.autotune.name() }),
        ("deterministic", on(not_deterministic(plans, target).is_empty())),
    ];
    table.into_iter().map(|(name, value)| (name.into(), value.into())).collect()
}

/// Refuses to train with a switch that was asked for and is not active: that is a mistake of ours, and the user must
/// not find out later.
pub fn check(config: &Config, compiled: &Compiled) -> Result<(), Failure> {
    let active = active(&compiled.plans, &compiled.target, Prepared::settled(&compiled.settled));
    for (name, state) in &active {
        let asked = config.switches.get(name).unwrap_or_default();
        let settled =
            compiled.settled.chosen.iter().find(|c| c.switch == name).map_or(asked.as_str(), |c| &c.value);
        // Determinism beyond what was asked for is no harm, and neither is memory that needs no sharing.
        let harmless = match name.as_str() {
            "deterministic" => state == "on",
            "memory_plan" => state == "off",
            _ => {
                [NOTHING, NOTHING_CHEAP, NOTHING_TO_TIME, NOTHING_TO_SCALE, NOTHING_UNEQUAL, NOTHING_DECODED]
                    .contains(&state.as_str())
            }
        };
        if name == "recompute" && settled == "wide" && ["cheap", "none"].contains(&state.as_str()) {
            return Err(Failure::User(UserError(
                "`recompute=wide` has nothing to run again: no product of a layer is twice as wide as what it reads; \
                 give recompute=cheap, which comes to the same, or recompute=full"
                    .into(),
            )));
        }
        if state != settled && !harmless {
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
    let rounds = |l: &Launch| l.op.compute() == Some(Compute::Tf32);
    match narrow {
        _ if launches(grad, OpKind::Product).any(|l| l.ins[0].dtype.is_fp8()) => "fp8",
        true => "bf16",
        false if grad.launches.iter().any(rounds) => "tf32",
        false => "fp32",
    }
}

/// Where the scales of what is quantised come from.
fn fp8_scaling(grad: &Plan) -> &'static str {
    let mut found =
        launches(grad, OpKind::Quantize).map(|l| matches!(l.op, Op::Quantize { current: true, .. }));
    match found.next() {
        Some(true) => "current",
        Some(false) => "delayed",
        None => NOTHING_TO_SCALE,
    }
}

/// Whether logits stay out of memory. Images have few classes, and their targets are spread over all of them: their
/// logits are kept, whatever is asked for.
fn fused_loss(plans: &PlanSet, grad: &Plan) -> &'static str {
    let reads = |input: &str| plans.slot(&input_path(Role::Grad, input)).is_some();
    let reads_images = reads("pixels") || reads("parts");
    match has(grad, OpKind::HeadLossTrain) {
        true => "on",
        false if reads_images => NOTHING,
        false => "off",
    }
}

/// Whether a tensor lies in a wider one, as it does behind a merged product.
fn is_slice(view: &View) -> bool {
    let row: usize = view.dims[1..].iter().product();
    view.dims[0] > 1 && view.strides[0] > row
}

/// Whether gates and what they gate come from one product. Where two products read different tensors, there is nothing
/// to merge.
fn fused_gates(grad: &Plan) -> &'static str {
    let mut written: HashMap<usize, &Launch> = HashMap::new();
    let (mut merged, mut apart) = (false, false);
    for l in &grad.launches {
        if is_gated(&l.op) {
            let reads = [0, 1].map(|i| match written.get(&l.ins[i].offset) {
                Some(writer) if writer.op.kind() == OpKind::Product => Some(writer.ins[0].offset),
                _ => None,
            });
            merged |= is_slice(&l.ins[0]);
            apart |= !is_slice(&l.ins[0]) && reads[0].is_some() && reads[0] == reads[1];
        }
        written.extend(l.outs.iter().flatten().map(|v| (v.offset, l)));
    }
    match (apart, merged) {
        (true, _) => "off",
        (false, true) => "on",
        (false, false) => NOTHING,
    }
}

/// Whether an operation reads its input out of a wider tensor.
fn fused_inputs(grad: &Plan, is: impl Fn(&Op) -> bool, input: usize) -> &'static str {
    let (mut all, mut found) = (true, false);
    for launch in grad.launches.iter().filter(|l| is(&l.op)) {
        found = true;
        all &= is_slice(&launch.ins[input]);
    }
    match (found, all) {
        (true, true) => "on",
        (true, false) => "off",
        (false, _) => NOTHING,
    }
}

/// Norms that joined the addition before them or the rotation after them. Those that could have and did not read what
/// an addition wrote, be it done by a product, or are read by a rotation.
fn fused_norms(grad: &Plan) -> &'static str {
    let joined = grad.launches.iter().any(|l| is_norm(&l.op) == Some(true));
    if joined || has(grad, OpKind::QkNormRope) {
        return "on";
    }
    let adds = |op: &Op| matches!(op, Op::Map { f: Elementwise::Add } | Op::Product { base: true, .. });
    let apart = follows(grad, |writer, reader| match reader.op.kind() {
        _ if is_norm(&reader.op).is_some() => adds(&writer.op),
        OpKind::Rope => writer.op.kind() == OpKind::RmsNorm,
        _ => false,
    });
    if apart || !grad.launches.iter().any(|l| is_norm(&l.op).is_some()) { "off" } else { NOTHING }
}

/// Whether an operation is a norm, be it quantised in the same pass, and if so whether it adds a residual.
fn is_norm(op: &Op) -> Option<bool> {
    match op {
        Op::RmsNorm { residual, .. } | Op::Quantize { of: Source::Norm(_, residual), .. } => Some(*residual),
        Op::DoubleNorm { .. } => Some(true),
        _ => None,
    }
}

/// Elementwise operations of one shape that follow one another run together, or there are none.
fn fused_elementwise(grad: &Plan) -> &'static str {
    let shape = |l: &Launch| l.outs[0].as_ref().map(|v| v.dims.clone());
    let is_map = |l: &Launch| l.op.kind() == OpKind::Map;
    let apart =
        || follows(grad, |writer, reader| is_map(writer) && is_map(reader) && shape(writer) == shape(reader));
    if has(grad, OpKind::Region) || has(grad, OpKind::Bundle) {
        "on"
    } else if apart() {
        "off"
    } else if grad.launches.iter().any(|l| is_gated(&l.op) || is_layer(l)) || has(grad, OpKind::ThinProduct) {
        "on"
    } else {
        NOTHING
    }
}

/// Whether an operation is a gated activation, be it quantised in the same pass.
fn is_gated(op: &Op) -> bool {
    matches!(op, Op::Gated { .. } | Op::Quantize { of: Source::Gated(_), .. })
}

/// Whether a product adds its bias or applies its activation.
fn is_layer(launch: &Launch) -> bool {
    matches!(launch.op, Op::Product { epilogue, .. } if epilogue.has_bias() || epilogue.has_gelu())
}

/// Whether some launch reads first what another wrote last, where the two are `so`.
fn follows(grad: &Plan, so: impl Fn(&Launch, &Launch) -> bool) -> bool {
    let mut written: HashMap<usize, &Launch> = HashMap::new();
    for l in &grad.launches {
        if l.ins.first().and_then(|v| written.get(&v.offset)).is_some_and(|writer| so(writer, l)) {
            return true;
        }
        written.extend(l.outs.iter().flatten().map(|v| (v.offset, l)));
    }
    false
}

/// Whether updates run over whole regions: fewer launches than tensors.
fn updates_regions(plans: &PlanSet) -> bool {
    let wholes: HashSet<usize> = plans
        .slots
        .iter()
        .filter(|s| s.class == Class::Weight && s.is_whole && s.path.starts_with("region."))
        .map(|s| s.view.elements())
        .collect();
    updates(plans).all(|l| wholes.contains(&l.ins[0].elements()))
}

/// The launches that update parameters.
fn updates(plans: &PlanSet) -> impl Iterator<Item = &Launch> {
    let apply = plans.plan(Role::Apply).expect("a training run has an apply plan");
    apply.launches.iter().filter(|l| matches!(l.op.kind(), OpKind::AdamW | OpKind::AdamW8))
}

/// What updates keep both moments in: the widest, were they to differ.
fn moments(plans: &PlanSet) -> &'static str {
    let bytes = updates(plans).flat_map(|l| &l.ins[2..4]).map(|moment| moment.dtype.bytes()).max();
    match bytes {
        Some(1) => "int8",
        Some(2) => "bf16",
        _ => "fp32",
    }
}

/// Attention of either kind is one launch.
fn stores_no_scores(grad: &Plan) -> bool {
    has(grad, OpKind::Attention) || has(grad, OpKind::LinearAttention)
}

/// What runs twice: launches that share their key and kind with another, or a gradient that gives the value again.
fn recompute(grad: &Plan) -> &'static str {
    const CHEAP: [OpKind; 4] = [OpKind::RmsNorm, OpKind::QkNormRope, OpKind::Rope, OpKind::Gated];
    let mut seen: HashMap<(u64, OpKind), usize> = HashMap::new();
    for l in &grad.launches {
        // The second of two norms runs again alone where the sum before it is kept.
        let kind = if l.op.kind() == OpKind::DoubleNorm { OpKind::RmsNorm } else { l.op.kind() };
        *seen.entry((l.key, kind)).or_default() += 1;
    }
    // What layers read in 8 bits is kept in 8 bits, and there is nothing of it to compute again.
    let is_quantised =
        |kind: OpKind| has(grad, OpKind::Quantize) && [OpKind::RmsNorm, OpKind::Gated].contains(&kind);
    let twice = |kind: OpKind| seen.iter().any(|((_, k), n)| *k == kind && *n > 1);
    let is_wide = |l: &Launch| match l.op {
        Op::Product { ta, .. } => {
            let [.., rows, columns] = l.ins[0].dims[..] else { return false };
            let width = l.outs[0].as_ref().and_then(|out| out.dims.last());
            width.is_some_and(|width| product::is_wide(*width, if ta { rows } else { columns }))
        }
        _ => false,
    };
    let again = |l: &&Launch| seen[&(l.key, l.op.kind())] > 1;
    let is_narrow_again = launches(grad, OpKind::Product).filter(again).any(|l| !is_wide(l));
    if is_narrow_again || [OpKind::Attention, OpKind::LinearAttention].into_iter().any(twice) {
        "full"
    } else if twice(OpKind::Product) {
        "wide"
    } else if CHEAP.into_iter().any(twice)
        || grad
            .launches
            .iter()
            .any(|l| matches!(l.op, Op::GatedGrad { again: true, .. } | Op::RmsNormGrad { again: true, .. }))
    {
        "cheap"
    } else if CHEAP.into_iter().any(|kind| has(grad, kind) && !is_quantised(kind)) {
        "none"
    } else {
        NOTHING_CHEAP
    }
}

/// Whether two transient buffers of the largest plan lie in the same place.
fn shares_memory(plans: &PlanSet) -> bool {
    let mut transient: Vec<(usize, usize)> =
        plans.transients(plans.largest_plan()).map(|b| (b.offset, b.offset + b.bytes)).collect();
    transient.sort_unstable();
    transient.windows(2).any(|pair| pair[1].0 < pair[0].1)
}

/// Whether examples lie one after another: then their places are inputs. A head of classes reads the places of its texts
/// in rows too, and it is the layout that tells.
fn packing(plans: &PlanSet, prepared: Prepared) -> &'static str {
    let has = |input: &str| plans.slot(&input_path(Role::Grad, input)).is_some();
    match (prepared.lengths, has("segment_start")) {
        (None, _) => NOTHING_UNEQUAL,
        (Some(manner), _) if has("labels") => {
            if manner.is_packed {
                "on"
            } else {
                "off"
            }
        }
        (Some(_), true) => "on",
        (Some(_), false) => "off",
    }
}

/// Whether micro-batches have plans of several extents, and whether updates are sorted for them, which is the order's.
fn length_buckets(plans: &PlanSet, prepared: Prepared) -> &'static str {
    match (prepared.lengths, plans.grads().count()) {
        (None, _) => NOTHING_UNEQUAL,
        (Some(Manner { is_sorted: true, .. }), _) => "on",
        (Some(_), 1) => "off",
        (Some(_), _) => WITHIN_UPDATES,
    }
}

/// Whether linear attention turns what it reads by a table.
fn turns(op: &Op) -> bool {
    LinearAttend::of(op).is_some_and(|(attend, _)| attend.turn.has_table())
}

/// Whether images lie in the arena and are cut by launches.
fn image_table(plans: &PlanSet, prepared: Prepared) -> &'static str {
    match (plans.slot(TABLE), prepared.decoded) {
        (Some(_), _) => "on",
        (None, true) => "off",
        (None, false) => NOTHING_DECODED,
    }
}

fn reads_table(grad: &Plan) -> bool {
    grad.launches.iter().any(|l| {
        matches!(l.op, Op::Rope { table: true, .. } | Op::QkNormRope { table: true, .. }) || turns(&l.op)
    })
}

/// The kernels of these plans that may give other bits each time, sorted.
pub fn not_deterministic(plans: &PlanSet, target: &Target) -> Vec<&'static str> {
    let used: HashSet<&str> = plans.plans.iter().flat_map(|p| &p.launches).map(|l| l.kernel).collect();
    let rows = target.kernels.iter().filter(|k| !k.deterministic && used.contains(k.name));
    let mut names: Vec<&'static str> = rows.map(|k| k.name).collect();
    names.sort_unstable();
    names
}

/// What a resumed run is told where its bits may leave those of the unbroken one.
pub fn resumed(kernels: &[&str], autotune: Autotune) -> Option<String> {
    let timed = (autotune != Autotune::Off)
        .then_some("autotune may choose other algorithms of products and attention");
    let kernels = match kernels {
        [] => None,
        [one] => Some(format!("{one} is not deterministic")),
        several => Some(format!("{} are not deterministic", several.join(", "))),
    };
    let why: Vec<String> = kernels.into_iter().chain(timed.map(String::from)).collect();
    (!why.is_empty()).then(|| {
        let why = why.join(" and ");
        format!(
            "resumed; {why}: later losses differ by rounding (deterministic=on from the start prevents it)"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A GPU on paper, one of whose kernels is not deterministic.
    fn gpu(is_deterministic: bool) -> Target {
        let mut target = Target { name: "h200".into(), landings: 2, ..flatout_ir::target::paper() };
        let row = target.kernels.iter_mut().find(|row| row.op == OpKind::AttentionGrad).expect("a row");
        row.deterministic = is_deterministic;
        target
    }

    fn compiled(overrides: &[&str], target: &Target) -> Result<Compiled, String> {
        let overrides: Vec<String> = overrides.iter().map(|o| o.to_string()).collect();
        let config = crate::recipes::resolve("tiny", &[], &overrides).unwrap();
        crate::resolve::compile::compile(&config, target).map_err(|failure| failure.to_string())
    }

    #[test]
    fn kernels_that_are_not_deterministic_are_named_from_the_plans() {
        let loose = compiled(&[], &gpu(false)).unwrap();
        assert_eq!(not_deterministic(&loose.plans, &loose.target), ["attention_grad"]);
        let state = |c: &Compiled, name: &str| {
            active(&c.plans, &c.target, Prepared::settled(&c.settled))[name].clone()
        };
        assert_eq!(
            (state(&loose, "deterministic").as_str(), state(&loose, "autotune").as_str()),
            ("off", "quick")
        );
        // A plan without the kernel has nothing to name.
        let naive = compiled(&["attention=naive"], &gpu(false)).unwrap();
        assert!(not_deterministic(&naive.plans, &naive.target).is_empty());
        let exact = compiled(&["deterministic=on"], &gpu(true)).unwrap();
        assert_eq!(
            (state(&exact, "deterministic").as_str(), state(&exact, "autotune").as_str()),
            ("on", "off")
        );
        let said = exact.settled.chosen.iter().find(|c| c.switch == "autotune").expect("it is said");
        assert_eq!(said.why, "deterministic=on takes algorithms by shape alone");
    }

    #[test]
    fn timing_everything_and_equal_bits_exclude_each_other_on_a_gpu() {
        let refused = compiled(&["deterministic=on", "autotune=full"], &gpu(true)).unwrap_err();
        assert!(refused.starts_with("`autotune=full` cannot run with `deterministic=on`"), "{refused}");
        let full = compiled(&["autotune=full"], &gpu(true)).unwrap();
        assert_eq!(full.settled.autotune, Autotune::Full);
        let cpu =
            compiled(&["deterministic=on", "autotune=full"], &crate::resolve::compile::target()).unwrap();
        assert_eq!(
            active(&cpu.plans, &cpu.target, Prepared::settled(&cpu.settled))["autotune"],
            NOTHING_TO_TIME
        );
    }

    #[test]
    fn a_kernel_that_cannot_run_is_refused_by_name() {
        let mut target = gpu(true);
        let forced = compiled(&["attention_kernel=wgmma"], &target).unwrap();
        assert_eq!(forced.settled.attention_kernel, AttentionKernel::Wgmma);
        let state = active(&forced.plans, &forced.target, Prepared::settled(&forced.settled));
        assert_eq!(state["attention_kernel"], "wgmma");
        target.missing.push(("wgmma", "its instructions are Hopper's, and this GPU is an sm_86".into()));
        for (overrides, target, why) in [
            (&["attention_kernel=wgmma"][..], &target, "cannot run: its instructions are Hopper's"),
            (&["attention_kernel=mma"], &crate::resolve::compile::target(), "cannot run on the CPU"),
            (&["attention_kernel=mma", "attention=naive"], &target, "cannot run with `attention=naive`"),
        ] {
            let refused = compiled(overrides, target).unwrap_err();
            assert!(refused.contains(why), "{refused}");
        }
        assert!(compiled(&["attention_kernel=mma"], &target).is_ok());
    }

    #[test]
    fn a_resumed_run_hears_what_is_not_deterministic() {
        assert_eq!(resumed(&[], Autotune::Off), None);
        let said = resumed(&["cuda.attention_grad"], Autotune::Off).unwrap();
        assert!(
            said.starts_with("resumed; cuda.attention_grad is not deterministic: later losses"),
            "{said}"
        );
        let said = resumed(&["a", "b"], Autotune::Quick).unwrap();
        let both = "resumed; a, b are not deterministic and autotune may choose other algorithms of products and attention: ";
        assert!(said.starts_with(both), "{said}");
        let said = resumed(&[], Autotune::Full).unwrap();
        assert!(said.starts_with("resumed; autotune may choose"), "{said}");
    }
}
