//! The switches: one declaration for their types and defaults, one table for everything else that is said of
//! them. Documentation, errors and measurements read the table.

use flatout_ir::{PlanSet, Target};
use flatout_models::config::key::{Key, Kind, Section, Setting};
use flatout_models::{choice, section};

use crate::switches::active::Prepared;

pub mod active;

choice! {
    pub enum Backend { Auto = "auto", Cuda = "cuda", Cpu = "cpu" }
}

choice! {
    pub enum Precision { Auto = "auto", Fp32 = "fp32", Tf32 = "tf32", Bf16 = "bf16", Fp8 = "fp8" }
}

choice! {
    pub enum Scaling { Auto = "auto", Delayed = "delayed", Current = "current" }
}

choice! {
    pub enum Attention { Auto = "auto", Flash = "flash", Naive = "naive" }
}

choice! {
    pub enum AttentionKernel { Auto = "auto", Cudnn = "cudnn", Wgmma = "wgmma", Mma = "mma", Fma = "fma" }
}

choice! {
    pub enum Recompute { Auto = "auto", Cheap = "cheap", None = "none", Wide = "wide", Full = "full" }
}

choice! {
    pub enum OptimizerState { Fp32 = "fp32", Bf16 = "bf16", Int8 = "int8" }
}

choice! {
    pub enum Autotune { Quick = "quick", Off = "off", Full = "full" }
}

choice! {
    /// A switch without `auto`.
    pub enum Toggle { Off = "off", On = "on" }
}

choice! {
    /// A switch that flatout settles where it is `auto`.
    pub enum Choose { Auto = "auto", On = "on", Off = "off" }
}

section! {
    /// What is switched on, by the names of the table. `fuse.qkv` is the field `fuse_qkv`, and so on.
    pub struct Switches {
        /// What computes: auto is the GPU where there is one.
        pub backend: Backend = Backend::Auto,
        /// Type of products and activations; auto is bf16 on GPUs and fp32 on the CPU. fp8 is of the layers' products.
        pub precision: Precision = Precision::Auto,
        /// Scales of 8-bit activations and gradients: from the steps before (delayed) or from themselves (current).
        pub fp8_scaling as "fp8.scaling": Scaling = Scaling::Auto,
        /// Attention without stored scores (flash) or with them (naive).
        pub attention: Attention = Attention::Auto,
        /// What attention runs on, on a GPU; auto is the fastest, or a rule where autotune is off.
        pub attention_kernel: AttentionKernel = AttentionKernel::Auto,
        /// Query, key and value projections as one product.
        pub fuse_qkv as "fuse.qkv": Toggle = Toggle::On,
        /// Gate and up projections as one product.
        pub fuse_gate_up as "fuse.gate_up": Toggle = Toggle::On,
        /// Residual add with the norm after it, and q/k norm with the rotation, in one pass over memory.
        pub fuse_norm as "fuse.norm": Toggle = Toggle::On,
        /// Chains of elementwise operations in one pass over memory.
        pub fuse_elementwise as "fuse.elementwise": Toggle = Toggle::On,
        /// Head and loss together, without storing the logits of all tokens.
        pub fuse_loss as "fuse.loss": Toggle = Toggle::On,
        /// The update of a contiguous region of parameters in one pass.
        pub fuse_optimizer as "fuse.optimizer": Toggle = Toggle::On,
        /// Type both moments of a parameter are kept in; weights and gradient sums stay fp32.
        pub optimizer_state as "optimizer.state": OptimizerState = OptimizerState::Fp32,
        /// What the backward pass computes again instead of keeping: cheap operations, nothing, or whole blocks.
        pub recompute: Recompute = Recompute::Auto,
        /// Buffers whose lifetimes do not meet share memory.
        pub memory_plan: Toggle = Toggle::On,
        /// Examples of unequal length one after another, each a segment, instead of a row each that is filled up.
        pub packing: Choose = Choose::Auto,
        /// Plans of up to four sizes for unequal lengths; on also puts examples of like length into the same update.
        pub length_buckets: Choose = Choose::Auto,
        /// Images of a small set on the device as one table of bytes, from which a step cuts its parts.
        pub image_table: Choose = Choose::Auto,
        /// Rotary angles from a table made once.
        pub rope_cache: Choose = Choose::Auto,
        /// A step's launches recorded once and replayed.
        pub cuda_graphs: Choose = Choose::Auto,
        /// Algorithms of each matrix product timed on a GPU, once: a few, none, all; unless none, attention's kernels too.
        pub autotune: Autotune = Autotune::Quick,
        /// Only kernels that give the same bits every time.
        pub deterministic: Toggle = Toggle::Off,
    }
}

/// What a switch may do to numbers, relative to the backend's default precision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Class {
    /// The same bits.
    Bitwise,
    /// Rounding, within a bound that is tested.
    Bounded,
    /// The same loss curve within noise. `auto` never crosses into it.
    Statistical,
}

impl Class {
    /// Largest relative difference of a loss that the class allows in a run of this precision. `tests/passes.rs` tests
    /// it over the first updates of a small decoder: fifty in fp32, and twenty in bf16, whose roundings are larger and
    /// whose bound serves tf32 too.
    pub fn bound(self, precision: Precision) -> f64 {
        match (self, precision) {
            (Class::Bitwise, _) => 0.0,
            (Class::Bounded, Precision::Auto | Precision::Fp32) => 1e-5,
            (Class::Bounded, Precision::Tf32 | Precision::Bf16) => 1e-3,
            // A last bit of bf16 may move a code by a whole step of 8-bit rounding.
            (Class::Bounded, Precision::Fp8) | (Class::Statistical, _) => 1e-2,
        }
    }
}

/// What another tool calls it, and what to write here instead.
#[derive(Clone, Copy, Debug)]
pub struct Elsewhere {
    pub tool: &'static str,
    pub name: &'static str,
    pub here: &'static str,
}

/// A row of the table.
#[derive(Clone, Copy, Debug)]
pub struct Switch {
    /// As it is written after `switches.` or alone on the command line.
    pub name: &'static str,
    pub class: Class,
    /// The value without the optimisation, to price it by; none for what is no optimisation.
    pub off: Option<&'static str>,
    /// Why a value cannot run on a target, whatever the model: the end of a sentence that begins with switch and value.
    refusal: fn(&str, &Target) -> Option<String>,
    /// What optimisation guides call it.
    pub guides_word: &'static str,
    pub elsewhere: &'static [Elsewhere],
}

const fn elsewhere(tool: &'static str, name: &'static str, here: &'static str) -> Elsewhere {
    Elsewhere { tool, name, here }
}

const HF: &str = "HF Trainer";
const TITAN: &str = "torchtitan";
const AXOLOTL: &str = "Axolotl";
const GUIDES: &str = "the guides";

fn runs_anywhere(_: &str, _: &Target) -> Option<String> {
    None
}

fn no_such_backend(value: &str, target: &Target) -> Option<String> {
    let is_absent = value == Backend::Cuda.name() && target.name == "cpu";
    is_absent.then(|| "cannot run on the CPU: leave it out".into())
}

fn no_such_units(value: &str, target: &Target) -> Option<String> {
    let is_absent = value == Precision::Tf32.name() && target.rates.tf32_flops.is_none();
    if value == Precision::Fp8.name() && target.rates.fp8_flops.is_none() {
        return Some(format!(
            "cannot run on {}: 8-bit floats begin with Ada and Hopper (compute capability 8.9); use precision=bf16",
            target.name
        ));
    }
    is_absent
        .then(|| "cannot run on the CPU: it is a mode of NVIDIA's matrix units; use precision=fp32".into())
}

fn no_such_kernel(value: &str, target: &Target) -> Option<String> {
    if value == AttentionKernel::Auto.name() {
        return None;
    }
    if target.name == "cpu" {
        return Some("cannot run on the CPU: it names a kernel of a GPU; leave it out".into());
    }
    let missing = target.missing.iter().find(|(name, _)| *name == value);
    missing.map(|(_, why)| format!("cannot run: {why}"))
}

fn no_graphs(value: &str, target: &Target) -> Option<String> {
    let is_absent = value == Choose::On.name() && target.name == "cpu";
    is_absent.then(|| "cannot run on the CPU: it records launches of a GPU; leave it out".into())
}

/// One row a switch, in the order of [`Switches`], and the sugar `compile` at the end.
pub static TABLE: &[Switch] = &[
    Switch {
        name: "backend",
        class: Class::Bounded,
        off: None,
        refusal: no_such_backend,
        guides_word: "device",
        elsewhere: &[
            elsewhere(GUIDES, "device", "backend"),
            elsewhere(HF, "use_cpu", "backend=cpu"),
            elsewhere(HF, "no_cuda", "backend=cpu"),
        ],
    },
    Switch {
        name: "precision",
        class: Class::Statistical,
        off: Some("fp32"),
        refusal: no_such_units,
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
            elsewhere(GUIDES, "use_fp8", "precision=fp8"),
        ],
    },
    Switch {
        name: "fp8.scaling",
        class: Class::Statistical,
        off: Some("current"),
        refusal: runs_anywhere,
        guides_word: "delayed scaling",
        elsewhere: &[elsewhere(GUIDES, "fp8_recipe", "fp8.scaling")],
    },
    Switch {
        name: "attention",
        class: Class::Bounded,
        off: Some("naive"),
        refusal: runs_anywhere,
        guides_word: "SDPA, flash attention",
        elsewhere: &[
            elsewhere(HF, "attn_implementation", "attention"),
            elsewhere(AXOLOTL, "flash_attention", "attention=flash"),
            elsewhere(AXOLOTL, "sdp_attention", "attention=flash"),
            elsewhere(TITAN, "attn_type", "attention"),
            elsewhere(GUIDES, "use_flash_attention", "attention=flash"),
            elsewhere(GUIDES, "flash_attn", "attention=flash"),
        ],
    },
    Switch {
        name: "attention_kernel",
        class: Class::Bounded,
        off: Some("fma"),
        refusal: no_such_kernel,
        guides_word: "SDPA backend",
        elsewhere: &[elsewhere(GUIDES, "sdpa_kernel", "attention_kernel")],
    },
    Switch {
        name: "fuse.qkv",
        class: Class::Bounded,
        off: Some("off"),
        refusal: runs_anywhere,
        guides_word: "fused QKV",
        elsewhere: &[
            elsewhere(GUIDES, "fused_qkv", "fuse.qkv"),
            elsewhere(GUIDES, "use_fused_qkv", "fuse.qkv"),
        ],
    },
    Switch {
        name: "fuse.gate_up",
        class: Class::Bounded,
        off: Some("off"),
        refusal: runs_anywhere,
        guides_word: "fused gate/up",
        elsewhere: &[
            elsewhere(GUIDES, "fused_mlp", "fuse.gate_up"),
            elsewhere(AXOLOTL, "liger_glu_activation", "fuse.gate_up"),
        ],
    },
    Switch {
        name: "fuse.norm",
        class: Class::Bounded,
        off: Some("off"),
        refusal: runs_anywhere,
        guides_word: "fused norms",
        elsewhere: &[
            elsewhere(AXOLOTL, "liger_rms_norm", "fuse.norm"),
            elsewhere(GUIDES, "fused_rmsnorm", "fuse.norm"),
            elsewhere(GUIDES, "fused_norm", "fuse.norm"),
        ],
    },
    Switch {
        name: "fuse.elementwise",
        class: Class::Bounded,
        off: Some("off"),
        refusal: runs_anywhere,
        guides_word: "torch.compile default",
        elsewhere: &[elsewhere(GUIDES, "fuse_pointwise", "fuse.elementwise")],
    },
    Switch {
        name: "fuse.loss",
        class: Class::Bounded,
        off: Some("off"),
        refusal: runs_anywhere,
        guides_word: "fused cross entropy",
        elsewhere: &[
            elsewhere(AXOLOTL, "liger_fused_linear_cross_entropy", "fuse.loss"),
            elsewhere(AXOLOTL, "cut_cross_entropy", "fuse.loss"),
            elsewhere(HF, "use_liger_kernel", "fuse.loss"),
            elsewhere(GUIDES, "fused_cross_entropy", "fuse.loss"),
        ],
    },
    Switch {
        name: "fuse.optimizer",
        class: Class::Bitwise,
        off: Some("off"),
        refusal: runs_anywhere,
        guides_word: "fused AdamW",
        elsewhere: &[
            elsewhere(HF, "adamw_torch_fused", "fuse.optimizer=on"),
            elsewhere(GUIDES, "fused_adamw", "fuse.optimizer"),
            elsewhere(GUIDES, "use_fused_adamw", "fuse.optimizer"),
            elsewhere(GUIDES, "foreach", "fuse.optimizer"),
        ],
    },
    Switch {
        name: "optimizer.state",
        class: Class::Statistical,
        off: Some("fp32"),
        refusal: runs_anywhere,
        guides_word: "8-bit AdamW",
        elsewhere: &[
            elsewhere(HF, "adamw_bnb_8bit", "optimizer.state=int8"),
            elsewhere(HF, "adamw_8bit", "optimizer.state=int8"),
            elsewhere(HF, "adamw_torch_8bit", "optimizer.state=int8"),
            elsewhere(TITAN, "state_dtype", "optimizer.state"),
            elsewhere(GUIDES, "use_8bit_adam", "optimizer.state=int8"),
            elsewhere(GUIDES, "AdamW8bit", "optimizer.state=int8"),
            elsewhere(GUIDES, "exp_avg_dtype", "optimizer.state"),
        ],
    },
    Switch {
        name: "recompute",
        class: Class::Bitwise,
        off: Some("none"),
        refusal: runs_anywhere,
        guides_word: "gradient checkpointing",
        elsewhere: &[
            elsewhere(HF, "gradient_checkpointing", "recompute=full"),
            elsewhere(TITAN, "activation_checkpoint", "recompute"),
            elsewhere(TITAN, "activation_checkpointing", "recompute"),
            elsewhere(GUIDES, "use_checkpoint", "recompute=full"),
        ],
    },
    Switch {
        name: "memory_plan",
        class: Class::Bitwise,
        off: Some("off"),
        refusal: runs_anywhere,
        guides_word: "expandable segments, set_to_none",
        elsewhere: &[
            elsewhere(GUIDES, "expandable_segments", "memory_plan"),
            elsewhere(GUIDES, "set_to_none", "memory_plan"),
        ],
    },
    Switch {
        name: "packing",
        class: Class::Bounded,
        off: Some("off"),
        refusal: runs_anywhere,
        guides_word: "packing",
        elsewhere: &[
            elsewhere(AXOLOTL, "sample_packing", "packing"),
            elsewhere(GUIDES, "padding_free", "packing"),
        ],
    },
    Switch {
        name: "length_buckets",
        class: Class::Statistical,
        off: Some("off"),
        refusal: runs_anywhere,
        guides_word: "bucketed padding, length-sorted batching",
        elsewhere: &[
            elsewhere(HF, "group_by_length", "length_buckets=on"),
            elsewhere(GUIDES, "dynamic_padding", "length_buckets"),
        ],
    },
    Switch {
        name: "image_table",
        class: Class::Bitwise,
        off: Some("off"),
        refusal: runs_anywhere,
        guides_word: "the whole set on the GPU",
        elsewhere: &[elsewhere(GUIDES, "gpu_dataset", "image_table")],
    },
    Switch {
        name: "rope_cache",
        class: Class::Bounded,
        off: Some("off"),
        refusal: runs_anywhere,
        guides_word: "cached RoPE",
        elsewhere: &[elsewhere(GUIDES, "cache_rope", "rope_cache")],
    },
    Switch {
        name: "cuda_graphs",
        class: Class::Bitwise,
        off: Some("off"),
        refusal: no_graphs,
        guides_word: "reduce-overhead",
        elsewhere: &[
            elsewhere(GUIDES, "use_cuda_graphs", "cuda_graphs"),
            elsewhere(GUIDES, "cudagraphs", "cuda_graphs"),
        ],
    },
    Switch {
        name: "autotune",
        class: Class::Bounded,
        off: Some("off"),
        refusal: runs_anywhere,
        guides_word: "max-autotune, cuDNN benchmark",
        elsewhere: &[
            elsewhere(GUIDES, "cudnn_benchmark", "autotune"),
            elsewhere(GUIDES, "max_autotune", "autotune=full"),
        ],
    },
    Switch {
        name: "deterministic",
        class: Class::Bounded,
        off: Some("off"),
        refusal: runs_anywhere,
        guides_word: "--deterministic",
        elsewhere: &[
            elsewhere(HF, "full_determinism", "deterministic=on"),
            elsewhere(GUIDES, "use_deterministic_algorithms", "deterministic=on"),
            elsewhere(GUIDES, "cudnn_deterministic", "deterministic=on"),
        ],
    },
    Switch {
        name: "compile",
        class: Class::Bounded,
        off: Some("off"),
        refusal: runs_anywhere,
        guides_word: "torch.compile modes",
        elsewhere: &[
            elsewhere(HF, "torch_compile", "compile=default"),
            elsewhere(HF, "torch_compile_mode", "compile"),
            elsewhere(GUIDES, "use_compile", "compile=default"),
            elsewhere(GUIDES, "compile_mode", "compile"),
        ],
    },
];

impl Switch {
    /// Its declaration: values, default's place, doc line.
    pub fn key(&self) -> Key {
        let mut keys = Switches::keys().into_iter().chain([compile_key()]);
        keys.find(|key| key.name == self.name).expect("every row of the table has a declaration")
    }

    pub fn doc(&self) -> &'static str {
        self.key().doc
    }

    pub fn values(&self) -> &'static [&'static str] {
        match self.key().kind {
            Kind::Choice(values) => values,
            other => unreachable!("a switch is a choice, not {other}"),
        }
    }

    /// Whether a value can run on a target, whatever the model; otherwise the sentence that says why not.
    pub fn available(&self, value: &str, target: &Target) -> Result<(), String> {
        let refusal = (self.refusal)(value, target);
        refusal.map_or(Ok(()), |why| Err(format!("`{}={value}` {why}", self.name)))
    }

    /// What it comes to in compiled plans; `None` for `compile`, which has no state of its own.
    pub fn active(&self, plans: &PlanSet, target: &Target, prepared: Prepared) -> Option<String> {
        active::active(plans, target, prepared).remove(self.name)
    }

    /// `None` for `compile`, which has no state of its own.
    pub fn default(&self) -> Option<String> {
        Switches::default().get(self.name)
    }
}

impl Switches {
    /// The switch's value by its name.
    pub fn get(&self, name: &str) -> Option<String> {
        let written = toml::Table::try_from(self).expect("switches have a TOML form");
        written.get(name).and_then(|value| value.as_str()).map(String::from)
    }
}

/// Path of the sugar that stands for several switches.
pub(crate) const COMPILE: &str = "switches.compile";

choice! {
    /// `torch.compile`'s modes as settings of switches.
    pub enum Compile {
        Off = "off",
        Default = "default",
        ReduceOverhead = "reduce-overhead",
        MaxAutotune = "max-autotune",
    }
}

/// The sugar as a key. It has no field: what it stands for is laid down in its place.
pub(crate) fn compile_key() -> Key {
    Key {
        name: "compile",
        kind: Compile::kind(),
        required: false,
        optional: true,
        doc: "Sets every fuse.*, cuda_graphs and autotune: off, fused, with graphs, with graphs and all algorithms timed.",
    }
}

impl Compile {
    /// The switches it sets, as full paths and values.
    pub fn settings(self) -> Vec<(String, &'static str)> {
        let (fuse, graphs, tune) = match self {
            Compile::Off => (Toggle::Off, Choose::Off, Autotune::Off),
            Compile::Default => (Toggle::On, Choose::Off, Autotune::Quick),
            Compile::ReduceOverhead => (Toggle::On, Choose::On, Autotune::Quick),
            Compile::MaxAutotune => (Toggle::On, Choose::On, Autotune::Full),
        };
        let fused = Switches::keys().into_iter().filter(|key| key.name.starts_with("fuse."));
        let mut settings: Vec<_> = fused.map(|key| (format!("switches.{}", key.name), fuse.name())).collect();
        settings.push(("switches.cuda_graphs".into(), graphs.name()));
        settings.push(("switches.autotune".into(), tune.name()));
        settings
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_exactly_the_declared_switches() {
        let declared: Vec<_> = Switches::keys().iter().map(|key| key.name).chain(["compile"]).collect();
        let rows: Vec<_> = TABLE.iter().map(|switch| switch.name).collect();
        assert_eq!(rows, declared);
    }

    #[test]
    fn a_row_knows_its_values_and_default() {
        for switch in TABLE {
            assert!(!switch.doc().is_empty() && !switch.guides_word.is_empty());
            match switch.default() {
                Some(default) => assert!(switch.values().contains(&default.as_str()), "{}", switch.name),
                None => assert_eq!(switch.name, "compile"),
            }
        }
        let row = |name| TABLE.iter().find(|switch| switch.name == name).unwrap();
        assert_eq!(row("precision").values(), ["auto", "fp32", "tf32", "bf16", "fp8"]);
        assert_eq!(row("fuse.qkv").default().as_deref(), Some("on"));
        assert_eq!(row("deterministic").default().as_deref(), Some("off"));
    }

    #[test]
    fn compile_stands_for_fusions_graphs_and_autotune() {
        let off = Compile::Off.settings();
        assert_eq!(off.len(), 8);
        assert!(off.iter().all(|(_, value)| *value == "off"));
        let mut most = Compile::MaxAutotune.settings();
        assert_eq!(most.pop(), Some(("switches.autotune".into(), "full")));
        assert!(most.iter().all(|(_, value)| *value == "on"));
    }
}
