//! Switches of the device, its precision, and the exchange between ranks: `backend`, `precision`, `fp8.scaling`, `wire`,
//! `wire_window`.

use flatout_ir::ops::collective::Order;
use flatout_ir::ops::product::Compute as Arithmetic;
use flatout_ir::{Codes, DType, Launch, Op, OpKind, Precision, Scaling, Target};
use flatout_settings::choice;

use super::active::{CompiledView, on};
use super::value::{Auto, Toggle, field};
use super::{AXOLOTL, Class, GUIDES, HF, MEGATRON, ROW, Settle, Switch, TITAN, elsewhere};

choice! {
    pub enum Backend { Auto = "auto", Cuda = "cuda", Cpu = "cpu" }
}

choice! {
    /// The library or connection that moves tensors between ranks.
    pub enum Wire { Auto = "auto", Nccl = "nccl", Sockets = "sockets" }
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Compute {
    pub backend: Backend,
    pub precision: Auto<Precision>,
    pub fp8_scaling: Auto<Scaling>,
    pub wire: Wire,
    pub wire_window: Toggle,
}

pub(super) const ROWS: [Switch; 5] = [BACKEND, PRECISION, FP8_SCALING, WIRE, WIRE_WINDOW];

pub const BACKEND: Switch = Switch {
    name: "backend",
    doc: "Device that computes; auto is the GPU where there is one.",
    field: field!(compute.backend),
    class: Class::Bounded,
    off: None,
    refusal: |value, target| {
        let is_absent = value == Backend::Cuda.name() && target.name == "cpu";
        is_absent.then(|| "cannot run on the CPU: leave it out".into())
    },
    settle: Settle::ByTarget(|s| {
        match s.on_gpu() {
            _ if s.requested.compute.backend != Backend::Auto => {}
            true => s.choose("cuda", format!("there is an {} to use", s.target.name)),
            false => s.choose("cpu", "there is no NVIDIA GPU to use"),
        }
        Ok(())
    }),
    active: |view| if view.target.name == "cpu" { "cpu" } else { "cuda" },
    guides_word: "device",
    elsewhere: &[
        elsewhere(GUIDES, "device", "backend"),
        elsewhere(HF, "use_cpu", "backend=cpu"),
        elsewhere(HF, "no_cuda", "backend=cpu"),
    ],
    ..ROW
};

pub const PRECISION: Switch = Switch {
    name: "precision",
    doc: "Type of matrix products and activations; auto is bf16 on GPUs, or fp8 there with base=fp8, and fp32 on the CPU. fp8 applies to the layers' products only.",
    field: field!(compute.precision),
    class: Class::Statistical,
    off: Some("fp32"),
    refusal: missing_units,
    settle: Settle::ByTarget(|s| {
        s.settled.options.precision = match (s.requested.compute.precision, s.on_gpu()) {
            (Auto::Given(precision), _) => precision,
            (Auto::Auto, false) => {
                s.choose("fp32", "the CPU computes in fp32; bf16 would be widened to it");
                Precision::F32
            }
            (Auto::Auto, true) if s.requested.memory.codes() == Some(Codes::Fp8) => {
                s.choose("fp8", "products multiply the codes of base=fp8 as they are");
                Precision::FP8
            }
            (Auto::Auto, true) => {
                s.choose("bf16", "the GPU's matrix units are fastest in it; sums and weights stay fp32");
                Precision::BF16
            }
        };
        Ok(())
    }),
    active: precision,
    guides_word: "TF32, BF16 autocast, FP8 hybrid",
    elsewhere: &[
        elsewhere(HF, "bf16", "precision=bf16"),
        elsewhere(HF, "tf32", "precision=tf32"),
        elsewhere(HF, "fp16", "precision=bf16"),
        elsewhere(TITAN, "mixed_precision_param", "precision"),
        elsewhere(AXOLOTL, "bfloat16", "precision=bf16"),
        elsewhere(AXOLOTL, "fp8", "precision=fp8"),
        elsewhere(GUIDES, "dtype", "precision"),
        elsewhere(GUIDES, "torch_dtype", "precision"),
        elsewhere(GUIDES, "mixed_precision", "precision"),
        elsewhere(GUIDES, "use_bf16", "precision=bf16"),
        elsewhere(GUIDES, "use_amp", "precision=bf16"),
        elsewhere(GUIDES, "allow_tf32", "precision=tf32"),
        elsewhere(GUIDES, "use_tf32", "precision=tf32"),
        elsewhere(GUIDES, "enable_tf32", "precision=tf32"),
        elsewhere(GUIDES, "float32_matmul_precision", "precision"),
        elsewhere(GUIDES, "use_fp8", "precision=fp8"),
    ],
    ..ROW
};

fn missing_units(value: &str, target: &Target) -> Option<String> {
    if value == Precision::FP8.name() && target.rates.fp8_flops.is_none() {
        return Some(format!(
            "cannot run on {}: 8-bit floats begin with Ada and Hopper (compute capability 8.9); use precision=bf16",
            target.name
        ));
    }
    let is_absent = value == Precision::Tf32.name() && target.rates.tf32_flops.is_none();
    is_absent
        .then(|| "cannot run on the CPU: it is a mode of NVIDIA's matrix units; use precision=fp32".into())
}

fn precision(view: &CompiledView<'_>) -> &'static str {
    let products = || view.launches(OpKind::Product);
    let rounds = |l: &Launch| l.op.compute() == Some(Arithmetic::Tf32);
    let precision = if products().any(|l| l.ins[0].dtype.is_fp8()) {
        Precision::FP8
    } else if products().any(|l| l.ins[0].dtype == DType::BF16) {
        Precision::BF16
    } else if view.grad.launches.iter().any(rounds) {
        Precision::Tf32
    } else {
        Precision::F32
    };
    precision.name()
}

pub const FP8_SCALING: Switch = Switch {
    name: "fp8.scaling",
    doc: "Scales of 8-bit activations and gradients: from earlier steps (delayed) or from the tensors themselves (current).",
    field: field!(compute.fp8_scaling),
    class: Class::Statistical,
    off: Some("current"),
    settle: Settle::ByTarget(|s| {
        s.settled.options.fp8_scaling = match s.requested.compute.fp8_scaling {
            Auto::Given(scaling) => scaling,
            Auto::Auto => {
                if s.settled.options.precision == Precision::FP8 {
                    s.choose("delayed", "scales that are known beforehand save a pass over memory");
                }
                Scaling::Delayed
            }
        };
        Ok(())
    }),
    active: |view| match view.launches(OpKind::Quantize).next().map(|l| &l.op) {
        Some(Op::Quantize { current: true, .. }) => Scaling::Current.name(),
        Some(_) => Scaling::Delayed.name(),
        None => "nothing to scale",
    },
    guides_word: "delayed scaling",
    elsewhere: &[elsewhere(GUIDES, "fp8_recipe", "fp8.scaling")],
    ..ROW
};
pub const WIRE: Switch = Switch {
    name: "wire",
    doc: "Transport of tensors between ranks: NCCL between GPUs, sockets between CPUs. With nccl a single rank exchanges with itself.",
    field: field!(compute.wire),
    class: Class::Bitwise,
    off: None,
    refusal: |value, target| match (value, target.name.as_str()) {
        ("nccl", "cpu") => Some("cannot run on the CPU: NCCL connects GPUs; leave it out".into()),
        ("sockets", gpu) if gpu != "cpu" => {
            Some(format!("cannot run on {gpu}: GPUs exchange through NCCL; leave it out"))
        }
        _ => None,
    },
    settle: Settle::ByModel(|s| {
        let (ranks, requested) = (s.target.ranks, s.requested.compute.wire);
        match (s.on_gpu(), requested) {
            (true, Wire::Auto) if ranks > 1 => s.choose("nccl", "it connects GPUs directly"),
            (false, Wire::Auto) if ranks > 1 => s.choose("sockets", "they connect processes on CPUs"),
            _ => {}
        }
        let options = &mut s.settled.options;
        options.exchange_alone = ranks == 1 && requested == Wire::Nccl;
        // NCCL may add in any order, unless deterministic=on requires a fixed one.
        let is_free = s.target.name != "cpu" && !s.settled.deterministic;
        let is_exchanged = ranks > 1 || options.exchange_alone;
        options.order = if is_exchanged && is_free { Order::Any } else { Order::Tree };
        Ok(())
    }),
    active: |view| match exchanges(view) {
        false => "nothing to exchange",
        true if view.target.name == "cpu" => Wire::Sockets.name(),
        true => Wire::Nccl.name(),
    },
    guides_word: "NCCL backend",
    elsewhere: &[
        elsewhere(HF, "ddp_backend", "wire"),
        elsewhere(GUIDES, "dist_backend", "wire"),
        elsewhere(GUIDES, "distributed_backend", "wire"),
    ],
    ..ROW
};

fn exchanges(view: &CompiledView<'_>) -> bool {
    view.plans.plans.iter().flat_map(|plan| &plan.launches).any(|l| l.op.ways().is_some())
}

pub const WIRE_WINDOW: Switch = Switch {
    name: "wire_window",
    doc: "NCCL allocates the arena and registers it with all ranks, so that exchanges read and write it in place.",
    field: field!(compute.wire_window),
    class: Class::Bitwise,
    off: Some("off"),
    refusal: |value, target| {
        let is_absent = value == Toggle::On.name() && target.name == "cpu";
        is_absent
            .then(|| "cannot run on the CPU: windows are NCCL's, which connects GPUs; leave it out".into())
    },
    settle: Settle::ByTarget(|s| {
        let exchanges = s.target.ranks > 1 || s.requested.compute.wire == Wire::Nccl;
        s.settled.window = exchanges && s.requested.compute.wire_window == Toggle::On;
        Ok(())
    }),
    active: |view| match exchanges(view) {
        false => "nothing to exchange",
        true => on(view.prepared.window),
    },
    guides_word: "user buffer registration",
    elsewhere: &[
        elsewhere(MEGATRON, "use_nccl_ub", "wire_window"),
        elsewhere(MEGATRON, "nccl_ub", "wire_window"),
    ],
    ..ROW
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device;
    use crate::resolve::compile::{Compiled, compile};
    use crate::switches::active::{Prepared, active, not_deterministic};
    use flatout_ir::Role;

    /// Plans of `tiny` for a number of H200s, which need not be present.
    fn compiled(ranks: usize, words: &[&str]) -> Compiled {
        let words: Vec<String> = words.iter().map(|word| word.to_string()).collect();
        let config = crate::recipes::resolve("tiny", &[], &words).unwrap();
        let target = device::named("h200", &config.switches).unwrap();
        compile(&config, &crate::ranks::target_among(ranks, target)).unwrap()
    }

    fn kernels(compiled: &Compiled, kind: OpKind) -> Vec<&'static str> {
        let apply = compiled.plans.plan(Role::Apply).expect("an update");
        let mut names: Vec<_> =
            apply.launches.iter().filter(|l| l.op.kind() == kind).map(|l| l.kernel).collect();
        names.dedup();
        names
    }

    #[test]
    fn gpus_exchange_by_nccl_and_in_one_order_if_deterministic() {
        let state = |c: &Compiled| active(&c.plans, &c.target, Prepared::settled(&c.settled))["wire"].clone();
        let alone = compiled(1, &[]);
        assert_eq!((state(&alone).as_str(), alone.target.wire_bytes), ("nothing to exchange", 0));
        let free = compiled(2, &[]);
        assert_eq!(state(&free), "nccl");
        assert_eq!(kernels(&free, OpKind::ReduceScatter), ["cuda.reduce_scatter"]);
        assert_eq!(kernels(&free, OpKind::AllReduce), ["cuda.all_reduce"]);
        assert!(not_deterministic(&free.plans, &free.target).contains(&"cuda.all_reduce"));
        assert!(free.target.wire_bytes > 0 && free.settled.choice("wire").is_some());
        let fixed = compiled(2, &["deterministic=on"]);
        assert_eq!(kernels(&fixed, OpKind::ReduceScatter), ["cuda.reduce_scatter_tree"]);
        assert_eq!(kernels(&fixed, OpKind::AllReduce), ["cuda.all_reduce_tree"]);
        assert!(not_deterministic(&fixed.plans, &fixed.target).is_empty());
        let has_scratch = |c: &Compiled| {
            let apply = c.plans.plan(Role::Apply).expect("an update");
            apply.launches.iter().any(|l| l.kernel.ends_with("_tree") && l.workspace.is_some())
        };
        assert!(has_scratch(&fixed) && !has_scratch(&free), "the terms of a sum are in planned memory");
        let through = compiled(1, &["wire=nccl"]);
        assert_eq!(state(&through), "nccl");
        assert_eq!(kernels(&through, OpKind::AllReduce), ["cuda.all_reduce"]);
        assert!(kernels(&through, OpKind::ReduceScatter).is_empty(), "one rank divides nothing");
    }

    /// A window changes no plan: it is an option of the session, which reports whether NCCL has one.
    #[test]
    fn a_window_is_reported_if_something_is_exchanged() {
        let state =
            |c: &Compiled, prepared: Prepared| active(&c.plans, &c.target, prepared)["wire_window"].clone();
        let settled = |c: &Compiled| state(c, Prepared::settled(&c.settled));
        let [plain, windowed] = [compiled(2, &[]), compiled(2, &["wire_window=on"])];
        assert_eq!([settled(&plain), settled(&windowed)], ["off", "on"]);
        assert_eq!(format!("{:?}", plain.plans.plans), format!("{:?}", windowed.plans.plans));
        let without = Prepared { window: false, ..Prepared::settled(&windowed.settled) };
        assert_eq!(state(&windowed, without), "off", "a session that has none");
        assert_eq!(settled(&compiled(1, &["wire_window=on"])), "nothing to exchange");
        assert!(device::session_options(&windowed.settled).window);
        assert!(!device::session_options(&plain.settled).window);
    }
}
