//! Switches of memory: `base`, `optimizer.state`, `shard`, `shard_keep`, `recompute`, `memory_plan`.

use std::collections::HashMap;

use flatout_ir::ops::product;
use flatout_ir::ops::quantize::Source;
use flatout_ir::passes::adapter;
use flatout_ir::passes::layout::{LEAST_BYTES, REGION};
use flatout_ir::plan::PlacedSlot;
use flatout_ir::{
    Axis, Class as SlotClass, Codes, DType, Launch, Moments, Op, OpKind, PlanSet, Recompute, Role, Shard,
};
use flatout_settings::choice;

use super::active::{CompiledView, on};
use super::value::{Auto, Named, Toggle, field};
use super::{Class, Difference, GUIDES, HF, ROW, Settle, Switch, TITAN, elsewhere, unless_nothing};
use crate::refuse;

choice! {
    /// The types that frozen weights of linear layers are kept in.
    pub enum Base { Bf16 = "bf16", Fp8 = "fp8", Nf4 = "nf4" }
}

impl Base {
    /// The format of the codes that weights are stored as; `None` for bf16.
    pub fn codes(self) -> Option<Codes> {
        match self {
            Base::Bf16 => None,
            Base::Fp8 => Some(Codes::Fp8),
            Base::Nf4 => Some(Codes::Nf4),
        }
    }

    pub fn of(codes: Codes) -> Base {
        match codes {
            Codes::Fp8 => Base::Fp8,
            Codes::Nf4 => Base::Nf4,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Memory {
    pub base: Auto<Base>,
    pub optimizer_state: Moments,
    pub shard: Auto<Shard>,
    pub shard_keep: Toggle,
    pub recompute: Auto<Recompute>,
    pub plan: Toggle,
}

impl Default for Memory {
    fn default() -> Memory {
        Memory {
            base: Auto::Auto,
            optimizer_state: Moments::F32,
            shard: Auto::Auto,
            shard_keep: Toggle::Off,
            recompute: Auto::Auto,
            plan: Toggle::On,
        }
    }
}

impl Memory {
    /// The format of codes that is requested for frozen weights of linear layers, or was resolved from `auto`.
    pub fn codes(&self) -> Option<Codes> {
        match self.base {
            Auto::Auto => None,
            Auto::Given(base) => base.codes(),
        }
    }
}

pub(super) const ROWS: [Switch; 6] = [BASE, OPTIMIZER_STATE, SHARD, SHARD_KEEP, RECOMPUTE, PLAN];

/// `resolve::settle` decides which weights it applies to. `auto` is bf16; with adapters `resolve::compile` changes it to nf4 if plans fit
/// in no other way.
pub const BASE: Switch = Switch {
    name: "base",
    doc: "Type that frozen weights of linear layers are stored in: bf16, 8-bit floats, or nf4 with 4.13 bits a value; they are dequantised where a product reads a wider type.",
    field: field!(memory.base),
    class: Class::Statistical,
    off: Some("bf16"),
    refusal: |value, target| {
        let is_absent = value == Base::Fp8.name() && target.rates.fp8_flops.is_none();
        is_absent.then(|| {
            format!(
                "cannot run on {}: 8-bit floats begin with Ada and Hopper (compute capability 8.9); use base=nf4",
                target.name
            )
        })
    },
    settle: Settle::ByModel(|s| {
        let Some(codes) = s.requested.memory.codes() else { return Ok(()) };
        if s.requested.memory.shard == Auto::Given(Shard::Parameters) {
            let base = Base::of(codes).name();
            refuse!(
                "`base={base}` cannot run with `shard=parameters`: quantised weights are whole on each rank; give shard=gradients"
            );
        }
        Ok(())
    }),
    active: |view| {
        let frozen = || view.plans.slots.iter().filter(|slot| slot.class == SlotClass::Frozen);
        let has_nf4 = [OpKind::Dequantize, OpKind::Requantize].into_iter().any(|kind| view.has(kind));
        match has_nf4 {
            true => Base::Nf4.name(),
            false if frozen().any(|slot| slot.ty.dtype == DType::E4M3) => Base::Fp8.name(),
            false if frozen().any(|slot| !slot.is_whole) => Base::Bf16.name(),
            false => "nothing frozen",
        }
    },
    differs: |settled, state| match (settled, state) {
        ("auto", "bf16") => Difference::Harmless,
        _ => unless_nothing(settled, state),
    },
    guides_word: "QLoRA, NF4, 4-bit base",
    elsewhere: &[
        elsewhere(HF, "load_in_4bit", "base=nf4"),
        elsewhere(GUIDES, "bnb_4bit_quant_type", "base=nf4"),
        elsewhere(GUIDES, "bnb_4bit_use_double_quant", "base=nf4"),
    ],
    ..ROW
};

pub const OPTIMIZER_STATE: Switch = Switch {
    name: "optimizer.state",
    doc: "Type that both moments of a parameter are stored in; weights and gradient sums stay fp32.",
    field: field!(memory.optimizer_state),
    class: Class::Statistical,
    off: Some("fp32"),
    settle: Settle::ByModel(|s| {
        s.settled.options.update.moments = s.requested.memory.optimizer_state;
        Ok(())
    }),
    active: moments,
    guides_word: "8-bit AdamW",
    elsewhere: &[
        elsewhere(HF, "adamw_bnb_8bit", "optimizer.state=int8"),
        elsewhere(HF, "adamw_8bit", "optimizer.state=int8"),
        elsewhere(HF, "adamw_torch_8bit", "optimizer.state=int8"),
        elsewhere(TITAN, "state_dtype", "optimizer.state"),
        elsewhere(GUIDES, "use_8bit_adam", "optimizer.state=int8"),
        elsewhere(GUIDES, "use_8bit_optim", "optimizer.state=int8"),
        elsewhere(GUIDES, "use_8bit_optimizer", "optimizer.state=int8"),
        elsewhere(GUIDES, "AdamW8bit", "optimizer.state=int8"),
        elsewhere(GUIDES, "exp_avg_dtype", "optimizer.state"),
    ],
    ..ROW
};

/// The type that moments are stored in, the widest if they differ. Moments without an update launch of their own are found by their
/// slots.
fn moments(view: &CompiledView<'_>) -> &'static str {
    let of_launches = view.updates().flat_map(|l| &l.ins[2..4]).map(|moment| moment.dtype);
    let is_state = |s: &&PlacedSlot| s.class == SlotClass::Moment && s.path.starts_with(REGION);
    let of_slots = view.plans.slots.iter().filter(is_state).map(|slot| slot.ty.dtype);
    let bytes = of_launches.chain(of_slots).map(|dtype| dtype.bytes()).max();
    let moments = match bytes {
        Some(1) => Moments::Int8,
        Some(2) => Moments::BF16,
        _ => Moments::F32,
    };
    moments.name()
}

/// If no trained tensor is large enough, `resolve::settle` changes `auto` to `none`; if plans do not fit, `resolve::compile` changes it to
/// `gradients` and then `parameters`.
pub const SHARD: Switch = Switch {
    name: "shard",
    doc: "State that ranks divide besides the rows: nothing (none), weights, moments and averages of large tensors (optimizer), their gradients as well (gradients), or all that layers read (parameters).",
    field: field!(memory.shard),
    class: Class::Bounded,
    off: Some("none"),
    settle: Settle::ByModel(|s| {
        let (is_whole, ranks) = (s.settled.options.fuse_optimizer, s.target.ranks);
        s.settled.options.shard = match s.requested.memory.shard {
            Auto::Given(level) if level != Shard::None && ranks > 1 && !is_whole => refuse!(
                "`shard={}` cannot run with `fuse.optimizer=off`: a rank's share may end inside a parameter; leave one of \
                 them out",
                level.name()
            ),
            Auto::Given(shard) => shard,
            Auto::Auto if ranks == 1 => Shard::None,
            Auto::Auto if is_whole => {
                s.choose(
                    "optimizer",
                    format!("each of {ranks} ranks then keeps a share of weights and moments"),
                );
                Shard::Optimizer
            }
            Auto::Auto => {
                s.choose("none", "fuse.optimizer=off updates parameters one by one");
                Shard::None
            }
        };
        Ok(())
    }),
    active: shard,
    guides_word: "ZeRO-1, ZeRO-2, ZeRO-3, FSDP",
    ..ROW
};

/// `parameters` if layers gather what they read; `gradients` or `optimizer` if gradients are reduce-scattered at every micro-batch or at
/// every update, and weights are gathered after it; `none` if every rank updates everything.
fn shard(view: &CompiledView<'_>) -> &'static str {
    let plans = view.plans;
    let has = |role: Role, kind: OpKind| {
        plans.plan(role).is_some_and(|plan| plan.launches.iter().any(|l| l.op.kind() == kind))
    };
    let gathers = [Role::Apply, Role::Derive].into_iter().all(|role| has(role, OpKind::AllGather));
    match gathers {
        _ if has(Role::GRAD, OpKind::AllGather) => Shard::Parameters.name(),
        true if has(Role::GRAD, OpKind::ReduceScatter) => Shard::Gradients.name(),
        true if has(Role::Apply, OpKind::ReduceScatter) => Shard::Optimizer.name(),
        true => "shares without totals",
        false if plans.mesh.ways(Axis::Shard) > 1 && may_be_divided(plans) => Shard::None.name(),
        false => "nothing to share",
    }
}

pub const SHARD_KEEP: Switch = Switch {
    name: "shard_keep",
    doc: "Keeps the weights that layers gather with shard=parameters until the backward pass has read them, instead of gathering them again.",
    field: field!(memory.shard_keep),
    class: Class::Bitwise,
    settle: Settle::ByModel(|s| {
        s.settled.options.keep_gathered = s.requested.memory.shard_keep == Toggle::On;
        Ok(())
    }),
    active: shard_keep,
    // A plan that reads every layer once, for example to train only a head, has nothing to gather again.
    differs: |settled, state| match settled == Toggle::Off.name() {
        true => Difference::Harmless,
        false => unless_nothing(settled, state),
    },
    guides_word: "reshard_after_forward",
    ..ROW
};

/// `on` if the gradient plan gathers no share twice.
fn shard_keep(view: &CompiledView<'_>) -> &'static str {
    let mut gathered: Vec<usize> = view.launches(OpKind::AllGather).map(|l| l.ins[0].offset).collect();
    gathered.sort_unstable();
    match gathered.windows(2).any(|pair| pair[0] == pair[1]) {
        _ if gathered.is_empty() => "nothing to gather",
        false if gathered.len() == 1 => "nothing to gather twice",
        is_again => on(!is_again),
    }
}

/// Whether a region that is not divided is large enough to be, and has matrices that are trained and are no adapters.
fn may_be_divided(plans: &PlanSet) -> bool {
    let weights = || plans.slots.iter().filter(|slot| slot.class == SlotClass::Weight);
    let is_region =
        |slot: &&PlacedSlot| slot.path.starts_with(REGION) && slot.view.span_bytes() >= LEAST_BYTES;
    weights().filter(is_region).any(|region| {
        let range = region.view.offset..region.view.offset + region.view.span_bytes();
        let is_divided = |slot: &PlacedSlot| {
            let is_own = !slot.is_whole && slot.ty.rank() >= 2 && !slot.path.starts_with(adapter::SCOPE);
            is_own && range.contains(&slot.view.offset)
        };
        weights().any(is_divided)
    })
}

/// `auto` begins with `cheap`; `resolve::recompute_layers` recomputes more if plans do not fit.
pub const RECOMPUTE: Switch = Switch {
    name: "recompute",
    doc: "Activations that the backward pass computes again instead of keeping them: none, those of cheap operations (cheap), of wide products as well (wide), or of whole blocks (full).",
    field: field!(memory.recompute),
    class: Class::Bitwise,
    off: Some("none"),
    settle: Settle::ByModel(|s| {
        s.settled.options.recompute = match s.requested.memory.recompute {
            Auto::Given(recompute) => recompute,
            Auto::Auto => {
                s.choose("cheap", "the plans fit without recomputing more");
                Recompute::Cheap
            }
        };
        Ok(())
    }),
    active: recompute,
    differs: |settled, state| match (Recompute::named(settled), Recompute::named(state)) {
        (Some(Recompute::Wide), Some(Recompute::Cheap | Recompute::None)) => Difference::Refused(
            "`recompute=wide` has nothing to run again: no product of a layer is twice as wide as what it reads; \
             give recompute=cheap, which does the same, or recompute=full",
        ),
        _ => unless_nothing(settled, state),
    },
    guides_word: "gradient checkpointing",
    elsewhere: &[
        elsewhere(HF, "gradient_checkpointing", "recompute=full"),
        elsewhere(TITAN, "activation_checkpoint", "recompute"),
        elsewhere(TITAN, "activation_checkpointing", "recompute"),
        elsewhere(GUIDES, "use_checkpoint", "recompute=full"),
        elsewhere(GUIDES, "use_gradient_checkpointing", "recompute=full"),
    ],
    ..ROW
};

/// Launches that are recomputed share key and kind with another launch, or a gradient launch also returns the value again, or its
/// codes.
fn recompute(view: &CompiledView<'_>) -> &'static str {
    const CHEAP: [OpKind; 5] =
        [OpKind::RmsNorm, OpKind::QkNormRope, OpKind::Rope, OpKind::Gated, OpKind::Quantize];
    let launches = &view.grad.launches;
    let mut seen: HashMap<(u64, OpKind), usize> = HashMap::new();
    for l in launches {
        // If the sum before a double norm is kept, only its second norm is recomputed.
        let kind = match l.op.kind() {
            OpKind::DoubleNorm => OpKind::RmsNorm,
            OpKind::GatedProduct => OpKind::Product,
            kind => kind,
        };
        *seen.entry((l.key, kind)).or_default() += 1;
    }
    // Tensors that layers read in 8 bits are not recomputed themselves, but their codes along columns are, by given scales.
    let is_narrow =
        |kind: OpKind| view.has(OpKind::Quantize) && [OpKind::RmsNorm, OpKind::Gated].contains(&kind);
    let may_run_again = |kind: OpKind| match kind {
        OpKind::Quantize => view.launches(kind).any(|l| {
            let is_made_here = matches!(l.op, Op::Quantize { of: Source::Gated(_) | Source::Norm(..), .. });
            is_made_here && l.outs[1].is_some()
        }),
        _ => view.has(kind) && !is_narrow(kind),
    };
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
    let gives_again = |l: &Launch| {
        matches!(
            l.op,
            Op::GatedGrad { again: true, .. }
                | Op::GatedProductGrad { again: true, .. }
                | Op::RmsNormGrad { again: true, .. }
                | Op::Quantize { of: Source::GatedGrad { again: true, .. }, .. }
        )
    };
    // No gradient goes through frozen layers if only the head is trained.
    let gradients = [
        OpKind::AttentionGrad,
        OpKind::LinearAttentionGrad,
        OpKind::GatedGrad,
        OpKind::GatedProductGrad,
        OpKind::RmsNormGrad,
        OpKind::DoubleNormGrad,
        OpKind::QkNormRopeGrad,
    ];
    let goes_back = gradients.into_iter().any(|kind| view.has(kind));
    let is_narrow_again = view.launches(OpKind::Product).filter(again).any(|l| !is_wide(l));
    let recompute = if is_narrow_again || [OpKind::Attention, OpKind::LinearAttention].into_iter().any(twice)
    {
        Recompute::Full
    } else if twice(OpKind::Product) {
        Recompute::Wide
    } else if CHEAP.into_iter().any(twice) || launches.iter().any(gives_again) {
        Recompute::Cheap
    } else if goes_back && CHEAP.into_iter().any(may_run_again) {
        Recompute::None
    } else {
        return "nothing cheap to recompute";
    };
    recompute.name()
}

pub const PLAN: Switch = Switch {
    name: "memory_plan",
    doc: "Lets buffers whose lifetimes do not overlap share memory.",
    field: field!(memory.plan),
    class: Class::Bitwise,
    off: Some("off"),
    settle: Settle::ByModel(|s| {
        s.settled.options.memory_plan = s.requested.memory.plan == Toggle::On;
        Ok(())
    }),
    active: |view| on(shares_memory(view)),
    // A plan may have no buffers that can share memory.
    differs: |_, state| if state == "off" { Difference::Harmless } else { Difference::Mistake },
    guides_word: "expandable segments, set_to_none",
    elsewhere: &[
        elsewhere(GUIDES, "expandable_segments", "memory_plan"),
        elsewhere(GUIDES, "set_to_none", "memory_plan"),
    ],
    ..ROW
};

/// Whether two transient buffers of the largest plan overlap in memory.
fn shares_memory(view: &CompiledView<'_>) -> bool {
    let plans = view.plans;
    let mut transient: Vec<(usize, usize)> =
        plans.transients(plans.largest_plan()).map(|b| (b.offset, b.offset + b.bytes)).collect();
    transient.sort_unstable();
    transient.windows(2).any(|pair| pair[1].0 < pair[0].1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resolve::compile::{self, Compiled};
    use crate::switches::active::{Prepared, active};
    use flatout_ir::Target;

    fn compiled(ranks: usize, words: &[&str]) -> Result<Compiled, String> {
        let words: Vec<String> = words.iter().map(|word| word.to_string()).collect();
        let config = crate::recipes::resolve("tiny", &[], &words).unwrap();
        let target = Target { ranks, ..compile::target() };
        compile::compile(&config, &target).map_err(|failure| failure.to_string())
    }

    /// Gathered weights are kept on request, which plans show; without shard=parameters there is nothing to keep.
    #[test]
    fn gathered_weights_are_kept_on_request() {
        let state = |ranks: usize, words: &[&str]| {
            let compiled = compiled(ranks, words).unwrap();
            active(&compiled.plans, &compiled.target, Prepared::settled(&compiled.settled))[SHARD_KEEP.name]
                .clone()
        };
        assert_eq!(state(2, &["shard=parameters"]), "off");
        assert_eq!(state(2, &["shard=parameters", "shard_keep=on"]), "on");
        assert_eq!(state(2, &["shard=gradients", "shard_keep=on"]), "nothing to gather");
        assert_eq!(state(1, &["shard=parameters", "shard_keep=on"]), "nothing to gather");
        // No gradient goes through frozen layers, so that each is read once.
        let head = ["model.tied=false", "train.freeze=[embed, layers, norm]", "model.width=256"];
        assert_eq!(state(2, &[&head[..], &["shard=parameters"]].concat()), "on");
    }

    /// Each rank has a share of a frozen base, which is gathered for the layers.
    #[test]
    fn frozen_weights_are_divided_beside_adapters() {
        let lora = ["adapter.kind=lora", "adapter.rank=2", "model.width=256"];
        let of = |level: &str| compiled(4, &[&lora[..], &[level]].concat()).unwrap();
        let [whole, cut] = ["shard=optimizer", "shard=parameters"].map(of);
        let frozen = |compiled: &Compiled| compiled.plans.categories()["frozen"] as f64;
        let part = frozen(&cut) / frozen(&whole);
        assert!(part > 0.25 && part < 0.28, "{part} of a frozen base on each of four ranks");
        assert_eq!(cut.trained(), whole.trained());
        assert_eq!(shard_of(4, &[&lora[..], &["shard=parameters"]].concat()).0, "parameters");
    }

    /// The state of `shard` in the plans, and the value that `auto` resolved to, with the first words of the reason.
    fn shard_of(ranks: usize, words: &[&str]) -> (String, Option<(String, String)>) {
        let compiled = compiled(ranks, words).unwrap();
        let state = active(&compiled.plans, &compiled.target, Prepared::settled(&compiled.settled));
        let chosen = compiled.settled.choice(SHARD.name);
        let chosen =
            chosen.map(|c| (c.value.clone(), c.why.split(' ').take(3).collect::<Vec<_>>().join(" ")));
        (state[SHARD.name].clone(), chosen)
    }

    #[test]
    fn shards_are_read_from_plans_and_chosen_where_there_is_something_to_divide() {
        let chose = |value: &str, why: &str| Some((value.to_string(), why.to_string()));
        for value in ["shard=auto", "shard=none", "shard=optimizer", "shard=gradients", "shard=parameters"] {
            assert_eq!(shard_of(1, &[value]), ("nothing to share".into(), None), "{value} on one rank");
        }
        assert_eq!(shard_of(2, &[]), ("optimizer".into(), chose("optimizer", "each of 2")));
        assert_eq!(shard_of(2, &["shard=optimizer"]), ("optimizer".into(), None));
        assert_eq!(shard_of(2, &["shard=gradients"]), ("gradients".into(), None));
        assert_eq!(shard_of(2, &["shard=parameters"]), ("parameters".into(), None));
        assert_eq!(shard_of(2, &["shard=none"]), ("none".into(), None));
        let apart = ["fuse.optimizer=off"];
        assert_eq!(
            shard_of(2, &apart),
            ("none".into(), chose("none", "fuse.optimizer=off updates parameters"))
        );
        let refused = compiled(2, &["fuse.optimizer=off", "shard=optimizer"]).unwrap_err();
        assert!(refused.starts_with("`shard=optimizer` cannot run with `fuse.optimizer=off`"), "{refused}");
        assert!(compiled(1, &["fuse.optimizer=off", "shard=optimizer"]).is_ok(), "one rank divides nothing");
        let small = ["model.width=16", "model.layers=1", "model.heads=2", "model.kv_heads=1", "model.ffn=24"];
        assert_eq!(shard_of(2, &small), ("nothing to share".into(), chose("none", "nothing that is")));
        for level in ["shard=optimizer", "shard=gradients", "shard=parameters"] {
            let words = [&small[..], &[level]].concat();
            assert_eq!(shard_of(2, &words), ("nothing to share".into(), None), "{level}");
        }
        let trained = compiled(2, &[]).unwrap().trained();
        assert_eq!(
            trained,
            compiled(1, &[]).unwrap().trained(),
            "a tensor counts once, whichever ranks have it"
        );
    }

    /// If the plans of `optimizer` do not fit, `auto` changes to `gradients`, then to `parameters`, and gives the reason.
    #[test]
    fn more_is_divided_if_memory_does_not_suffice() {
        let words =
            ["model.width=256", "model.ffn=512", "train.batch=4", "train.micro_batch=1", "recompute=full"];
        let bytes = |level: &str| compiled(4, &[&words[..], &[level]].concat()).unwrap().plans.arena_bytes;
        let [optimizer, gradients, parameters] =
            ["shard=optimizer", "shard=gradients", "shard=parameters"].map(bytes);
        assert!(
            parameters < gradients && gradients < optimizer,
            "{parameters}, {gradients} and {optimizer} bytes"
        );
        let config = crate::recipes::resolve("tiny", &[], &words.map(String::from)).unwrap();
        let of = |memory_bytes: usize| {
            let target = Target { ranks: 4, memory_bytes: memory_bytes as u64, ..compile::target() };
            compile::compile(&config, &target)
        };
        let chosen = |compiled: Compiled| compiled.settled.choice(SHARD.name).expect("chosen").clone();
        assert_eq!(chosen(of(optimizer).unwrap()).value, "optimizer");
        let further = chosen(of(gradients).unwrap());
        assert_eq!(further.value, "gradients");
        assert!(further.why.contains("memory does not suffice"), "{}", further.why);
        let last = chosen(of(parameters).unwrap());
        assert_eq!(last.value, "parameters");
        assert!(last.why.contains("memory suffices no other way"), "{}", last.why);
        assert!(of(parameters / 2).is_err());
    }
}
