//! Switches of how kernels run: `rope_cache`, `cuda_graphs`, `overlap`, `product_kernel`, `autotune`, `deterministic`.

use flatout_ir::access::Access;
use flatout_ir::ops::linear_attention::LinearAttend;
use flatout_ir::{Launch, Op, Plan, Queue};

use super::active::{CompiledView, not_deterministic, on};
use super::value::{Autotune, Choose, ProductKernel, Toggle, field};
use super::{Class, DEEPSPEED, Difference, GUIDES, HF, MEGATRON, ROW, Settle, Switch, elsewhere};
use crate::UserError;
use crate::refuse;
use crate::switches::settled::Settling;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Kernels {
    pub rope_cache: Choose,
    pub cuda_graphs: Choose,
    pub overlap: Choose,
    pub product: ProductKernel,
    pub autotune: Autotune,
    pub deterministic: Toggle,
}

impl Default for Kernels {
    fn default() -> Kernels {
        Kernels {
            rope_cache: Choose::Auto,
            cuda_graphs: Choose::Auto,
            overlap: Choose::Auto,
            product: ProductKernel::Auto,
            autotune: Autotune::Quick,
            deterministic: Toggle::Off,
        }
    }
}

pub(super) const ROWS: [Switch; 6] = [ROPE_CACHE, CUDA_GRAPHS, OVERLAP, PRODUCT, AUTOTUNE, DETERMINISTIC];

pub const ROPE_CACHE: Switch = Switch {
    name: "rope_cache",
    doc: "Reads rotary angles from a table that is computed once.",
    field: field!(kernels.rope_cache),
    class: Class::Bounded,
    off: Some("off"),
    settle: Settle::ByModel(rope_positions),
    active: |view| on(reads_table(view)),
    guides_word: "cached RoPE",
    elsewhere: &[elsewhere(GUIDES, "cache_rope", "rope_cache")],
    ..ROW
};

fn rope_positions(s: &mut Settling<'_>) -> Result<(), UserError> {
    let context = s.model.tokens();
    let rotates = s.model.rotates();
    s.settled.options.rope_positions = match s.requested.kernels.rope_cache {
        Choose::Off => None,
        Choose::On if !rotates => {
            refuse!("`rope_cache=on` has nothing to cache: the model has no rotary positions; leave it out")
        }
        Choose::On => Some(context),
        Choose::Auto if rotates => {
            s.choose("on", format!("a table of {context} positions is small"));
            Some(context)
        }
        Choose::Auto => {
            s.choose("off", "the model has no rotary positions");
            None
        }
    };
    Ok(())
}

fn reads_table(view: &CompiledView<'_>) -> bool {
    let turns = |op: &Op| LinearAttend::of(op).is_some_and(|(attend, _)| attend.rotary.has_table());
    let reads = |op: &Op| {
        matches!(op, Op::Rope { table: true, .. } | Op::QkNormRope { table: true, .. }) || turns(op)
    };
    view.grad.launches.iter().any(|l| reads(&l.op))
}

pub const CUDA_GRAPHS: Switch = Switch {
    name: "cuda_graphs",
    doc: "Records a step's launches once as a CUDA graph and replays them.",
    field: field!(kernels.cuda_graphs),
    class: Class::Bitwise,
    off: Some("off"),
    refusal: |value, target| {
        let is_absent = value == Choose::On.name() && target.name == "cpu";
        is_absent.then(|| "cannot run on the CPU: it records launches of a GPU; leave it out".into())
    },
    settle: Settle::ByTarget(|s| {
        let requested = s.requested.kernels.cuda_graphs;
        match s.on_gpu() {
            _ if requested != Choose::Auto => {}
            true => s.choose("on", "a step's launches replay without the host"),
            false => s.choose("off", "there is no GPU in use"),
        }
        s.settled.cuda_graphs = requested == Choose::On || requested == Choose::Auto && s.on_gpu();
        Ok(())
    }),
    active: |view| on(view.prepared.cuda_graphs),
    guides_word: "reduce-overhead",
    elsewhere: &[
        elsewhere(GUIDES, "use_cuda_graphs", "cuda_graphs"),
        elsewhere(GUIDES, "cudagraphs", "cuda_graphs"),
    ],
    ..ROW
};

pub const OVERLAP: Switch = Switch {
    name: "overlap",
    doc: "Runs exchanges between ranks beside launches that do not wait for them.",
    field: field!(kernels.overlap),
    class: Class::Bitwise,
    off: Some("off"),
    settle: Settle::ByTarget(|s| {
        let requested = s.requested.kernels.overlap;
        match s.on_gpu() {
            _ if requested != Choose::Auto || s.target.ranks == 1 => {}
            true => s.choose("on", "exchanges have a stream of their own"),
            false => s.choose(
                "off",
                "the CPU runs an exchange in the order of launches, and would only hold its memory longer",
            ),
        }
        s.settled.options.overlap = requested == Choose::On || requested == Choose::Auto && s.on_gpu();
        Ok(())
    }),
    active: overlap,
    guides_word: "overlap_comm",
    elsewhere: &[
        elsewhere(DEEPSPEED, "overlap_comm", "overlap"),
        elsewhere(MEGATRON, "overlap_grad_reduce", "overlap"),
        elsewhere(MEGATRON, "overlap_param_gather", "overlap"),
    ],
    ..ROW
};

/// `on` if launches run between an exchange and the launch that waits for it. Otherwise there may be nothing to overlap, because the next
/// launch needs the result of the exchange.
fn overlap(view: &CompiledView<'_>) -> &'static str {
    let plans = &view.plans.plans;
    let waits_needlessly = |plan: &Plan| {
        let next = |at: usize| plan.launches[at..].iter().find(|launch| launch.queue == Queue::Compute);
        // Memory outside slots may be shared only because no launch was planned to run beside the exchange.
        let of_slots = |launch: &Launch| {
            let mut access = Access::of(&Launch { workspace: None, ..launch.clone() });
            access.writes.retain(|(_, bytes)| bytes.start < view.plans.persistent_bytes);
            access
        };
        let reads = |at: usize, next: &Launch| {
            let access = Access { writes: vec![], ..Access::of(next) };
            access.meets(&Access::of(&Launch { workspace: None, ..plan.launches[at].clone() }))
        };
        let needs =
            |at: usize, next: &Launch| reads(at, next) || of_slots(next).meets(&of_slots(&plan.launches[at]));
        plan.exchanges().into_iter().any(|(at, _)| {
            let is_last = plan.launches.get(at + 1).is_none_or(|after| after.queue == Queue::Compute);
            is_last && next(at).is_some_and(|next| !needs(at, next))
        })
    };
    // This includes one rank that exchanges with itself.
    match view.plans.mesh.ranks() == 1 {
        true => "nothing to share",
        false if plans.iter().any(|plan| plan.launches_beside_exchanges() > 0) => "on",
        false if plans.iter().any(waits_needlessly) => "off",
        false => "nothing to overlap",
    }
}

pub const PRODUCT: Switch = Switch {
    name: "product_kernel",
    doc: "Kernel of products in bf16 and 8 bits on a GPU: cuBLASLt, or flatout's own where it can (wgmma on Hopper; mma from Ampere on, in bf16); auto is the fastest, or follows a rule where autotune is off.",
    field: field!(kernels.product),
    class: Class::Bounded,
    off: Some("cublaslt"),
    refusal: |value, target| {
        if value == ProductKernel::Auto.name() {
            return None;
        }
        if target.name == "cpu" {
            return Some("cannot run on the CPU: it names a kernel of a GPU; leave it out".into());
        }
        let missing = target.missing.iter().find(|(name, _)| *name == value);
        missing.map(|(_, why)| format!("cannot run: {why}"))
    },
    settle: Settle::ByModel(|s| {
        s.settled.product_kernel = s.requested.kernels.product;
        Ok(())
    }),
    active: |view| view.prepared.product_kernel.name(),
    guides_word: "cuBLAS, CUTLASS",
    ..ROW
};

pub const AUTOTUNE: Switch = Switch {
    name: "autotune",
    doc: "Times algorithms of each matrix product on a GPU, once: a few (quick), none (off) or all (full). Unless off, flatout's own kernels and attention's are timed too.",
    field: field!(kernels.autotune),
    class: Class::Bounded,
    off: Some("off"),
    settle: Settle::ByModel(|s| {
        s.settled.autotune = match s.requested.kernels.autotune {
            requested if !(s.settled.deterministic && s.on_gpu()) => requested,
            Autotune::Full => refuse!(
                "`autotune=full` cannot run with `deterministic=on`: timing may choose other algorithms each time; leave one out"
            ),
            Autotune::Quick => {
                s.choose("off", "deterministic=on takes algorithms by shape alone");
                Autotune::Off
            }
            Autotune::Off => Autotune::Off,
        };
        Ok(())
    }),
    active: |view| match view.target.name.as_str() {
        "cpu" => "nothing to time",
        _ => view.prepared.autotune.name(),
    },
    guides_word: "max-autotune, cuDNN benchmark",
    elsewhere: &[
        elsewhere(GUIDES, "cudnn_benchmark", "autotune"),
        elsewhere(GUIDES, "max_autotune", "autotune=full"),
    ],
    ..ROW
};

pub const DETERMINISTIC: Switch = Switch {
    name: "deterministic",
    doc: "Uses only kernels that give the same bits every time.",
    field: field!(kernels.deterministic),
    class: Class::Bounded,
    off: Some("off"),
    settle: Settle::ByTarget(|s| {
        s.settled.deterministic = s.requested.kernels.deterministic == Toggle::On;
        match s.target.kernels.iter().find(|kernel| !kernel.deterministic) {
            Some(kernel) if s.settled.deterministic => {
                refuse!(
                    "`deterministic=on` cannot run: {} may give other bits each time; leave it out",
                    kernel.name
                )
            }
            _ => Ok(()),
        }
    }),
    active: |view| on(not_deterministic(view.plans, view.target).is_empty()),
    // Plans may be deterministic without the request.
    differs: |_, state| if state == "on" { Difference::Harmless } else { Difference::Mistake },
    guides_word: "--deterministic",
    elsewhere: &[
        elsewhere(HF, "full_determinism", "deterministic=on"),
        elsewhere(GUIDES, "use_deterministic_algorithms", "deterministic=on"),
        elsewhere(GUIDES, "cudnn_deterministic", "deterministic=on"),
    ],
    ..ROW
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resolve::compile;
    use crate::switches::active::{Prepared, active};
    use flatout_ir::Target;

    /// The state of `overlap` in the plans, and the value that `auto` resolved to.
    fn overlap_of(ranks: usize, words: &[&str]) -> (String, Option<String>) {
        let words: Vec<String> = words.iter().map(|word| word.to_string()).collect();
        let config = crate::recipes::resolve("tiny", &[], &words).unwrap();
        let target = Target { ranks, ..compile::target() };
        let compiled = compile::compile(&config, &target).unwrap();
        let state = active(&compiled.plans, &compiled.target, Prepared::settled(&compiled.settled));
        (state[OVERLAP.name].clone(), compiled.settled.choice(OVERLAP.name).map(|c| c.value.clone()))
    }

    #[test]
    fn overlap_is_read_from_the_launches_beside_exchanges() {
        for value in ["overlap=auto", "overlap=on", "overlap=off"] {
            assert_eq!(overlap_of(1, &[value]), ("nothing to share".into(), None), "{value} on one rank");
        }
        assert_eq!(
            overlap_of(2, &[]),
            ("off".into(), Some("off".into())),
            "the CPU runs exchanges in the order of launches"
        );
        for shard in ["shard=none", "shard=optimizer"] {
            assert_eq!(overlap_of(2, &[shard, "overlap=on"]), ("on".into(), None), "{shard}");
            assert_eq!(overlap_of(2, &[shard, "overlap=off"]), ("off".into(), None), "{shard}");
        }
    }
}
