//! The variants to measure: the base, every switch off alone, its other values, the ladder, and other models.

use std::collections::BTreeMap;
use std::hash::Hasher;

use flatout_ir::Precision;
use flatout_models::config::{Activation, DecoderConfig, Norm, Positions};
use xxhash_rust::xxh3::Xxh3;

use crate::bench::Stage;
use flatout_train::Failure;
use flatout_train::UserError;
use flatout_train::config::Config;
use flatout_train::resolve::compile::Compiled;
use flatout_train::switches::active;
use flatout_train::switches::{AttentionKernel, Class, Switch, TABLE, attention, compute, fuse, kernels};

/// The section of the table that a row belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Group {
    /// Controls of the method: the base again, and the base with its times scaled.
    Control,
    /// A switch turned off alone.
    Off,
    /// Another value of a switch.
    Instead,
    /// The guides' ladder: everything off, then one more switch on at each rung.
    Ladder,
    /// Another model.
    Model,
}

#[derive(Clone, Debug)]
pub struct Variant {
    pub group: Group,
    pub name: String,
    /// The switch or key that varies.
    pub about: &'static str,
    /// Overrides over the base.
    pub settings: Vec<String>,
    /// The promise of how close losses stay to the base's; none for another model or other examples.
    pub class: Option<Class>,
    /// Factor applied to every time: 1 except for a control.
    pub stretch: f64,
    pub fate: Fate,
}

/// Whether a variant is measured.
#[derive(Clone, Debug)]
pub enum Fate {
    /// Measured, under a key that variants with the same plans share.
    Measured { key: String, config: Box<Config> },
    /// Not measured, because the plans are those of another row; the reason.
    Same(String),
    /// It cannot run here; the reason.
    Refused(String),
}

/// The key of the base's own measurements.
pub const BASE: &str = "base";

/// The base that variants are made from: values that `auto` chose by memory are pinned, so that a variant does the same work.
pub struct Base {
    pub config: Config,
    pub compiled: Compiled,
    pub active: BTreeMap<String, String>,
    fingerprint: u64,
}

impl Base {
    pub fn new(config: &Config, stage: &Stage) -> Result<Base, Failure> {
        let compiled = stage.compile(config)?;
        let config = compiled.pinned(config);
        let prepared = active::Prepared::settled(&compiled.settled);
        let active = active::active(&compiled.plans, &compiled.target, prepared);
        Ok(Base { config, active, fingerprint: fingerprint(&compiled), compiled })
    }
}

/// The requested rows.
#[derive(Clone, Debug, Default)]
pub struct RowSelection {
    /// Only rows of this switch or key of the model.
    pub only: Option<String>,
    /// Include other models.
    pub models: bool,
    /// Include a control that is 10% slower.
    pub slowed: bool,
}

/// All rows in the table's order, those that cannot be measured with the reason.
pub fn variants(base: &Base, stage: &Stage, wanted: &RowSelection) -> Result<Vec<Variant>, Failure> {
    let mut all = controls(base, wanted.slowed);
    all.extend(off(base, stage));
    all.extend(instead(base, stage));
    all.extend(ladder(base, stage));
    if wanted.models {
        let Some(model) = base.config.model.as_decoder() else {
            let kind = base.config.model.kind();
            return Err(
                UserError(format!("--model measures other decoders, and `model.kind` is {kind}")).into()
            );
        };
        if let Some(from) = &model.from {
            return Err(UserError(format!(
                "--model measures other models, and model.from={from} has no other shape"
            ))
            .into());
        }
        all.extend(models(base, model, stage));
    }
    if let Some(only) = &wanted.only {
        if !all.iter().any(|variant| variant.about == only) {
            let mut names: Vec<&str> = TABLE.iter().filter(|s| s.off.is_some()).map(|s| s.name).collect();
            names.extend(wanted.models.then_some(MODEL_KEYS).into_iter().flatten());
            let near = flatout_train::config::nearest(only, names.iter().copied());
            let hint = near.map_or_else(
                || format!("there is {}", names.join(", ")),
                |near| format!("did you mean `{near}`?"),
            );
            return Err(UserError(format!("--only: there is no switch `{only}` to turn off; {hint}")).into());
        }
        all.retain(|variant| variant.about == only || variant.group == Group::Control);
    }
    Ok(all)
}

fn controls(base: &Base, slowed: bool) -> Vec<Variant> {
    let control = |name: &str, key: &str, stretch: f64| Variant {
        group: Group::Control,
        name: name.into(),
        about: "control",
        settings: vec![],
        class: Some(Class::Bitwise),
        stretch,
        fate: Fate::Measured { key: key.into(), config: Box::new(base.config.clone()) },
    };
    let mut all = vec![control("the base again", "control", 1.0)];
    if slowed {
        all.push(control("the base, its times 10% longer", "slowed", 1.1));
    }
    all
}

/// The promise of how close the losses of a switch's values stay to the base's; none where the switch changes which examples, or
/// which of their tokens, an update has.
fn compared(switch: &Switch) -> Option<Class> {
    (!switch.reorders && !switch.rereads).then_some(switch.class)
}

fn off(base: &Base, stage: &Stage) -> Vec<Variant> {
    let row = |switch: &'static Switch| {
        let value = switch.off?;
        let mut variant = one(base, stage, Group::Off, switch.name, value, compared(switch));
        if base.active.get(switch.name).map(String::as_str) == Some(value) {
            variant.fate = Fate::Same("off in the base already".into());
        }
        Some(variant)
    };
    TABLE.iter().filter_map(row).collect()
}

/// Switches of the exchanges between ranks that have no value for off.
const OF_RANKS: [Switch; 1] = [compute::WIRE];

/// Values that are neither the base's nor off. `auto` resolves to one of the others.
fn instead(base: &Base, stage: &Stage) -> Vec<Variant> {
    let mut all = vec![];
    let of_ranks = OF_RANKS.iter().filter(|_| stage.ranks() > 1);
    let can_be_off = TABLE.iter().filter(|switch| switch.off.is_some() && switch.field.is_some());
    for switch in can_be_off.chain(of_ranks) {
        let taken = base.active.get(switch.name).map(String::as_str);
        let others = switch.values().iter().filter(|value| **value != "auto" && Some(**value) != taken);
        for value in others.filter(|value| switch.off != Some(**value)) {
            all.push(one(base, stage, Group::Instead, switch.name, value, compared(switch)));
        }
    }
    all
}

/// A variant that differs in one key.
fn one(
    base: &Base,
    stage: &Stage,
    group: Group,
    key: &'static str,
    value: &str,
    class: Option<Class>,
) -> Variant {
    let section = if group == Group::Model { "model" } else { "switches" };
    let settings = vec![format!("{section}.{key}={value}")];
    let fate = fate(base, stage, &settings);
    Variant { group, name: format!("{key}={value}"), about: key, settings, class, stretch: 1.0, fate }
}

fn fate(base: &Base, stage: &Stage, settings: &[String]) -> Fate {
    let compiled = base.config.with(settings).map_err(Failure::User).and_then(|config| {
        let compiled = stage.compile(&config)?;
        Ok((config, compiled))
    });
    match compiled {
        Err(why) => Fate::Refused(why.to_string()),
        Ok((config, compiled)) => match fingerprint(&compiled) {
            same if same == base.fingerprint => {
                Fate::Same("changes nothing here: the plans are the base's".into())
            }
            other => Fate::Measured { key: format!("{other:016x}"), config: Box::new(config) },
        },
    }
}

/// A hash that is equal where the same launches run in the same memory, prepared the same way.
pub(crate) fn fingerprint(compiled: &Compiled) -> u64 {
    let mut hash = Xxh3::new();
    let plans = &compiled.plans;
    hash.write(format!("{:?}{:?}{}", plans.plans, plans.slots, plans.arena_bytes).as_bytes());
    if compiled.target.name != "cpu" {
        hash.write(format!("{:?}", active::Prepared::settled(&compiled.settled)).as_bytes());
        hash.write_u8(compiled.settled.deterministic as u8);
    }
    hash.finish()
}

/// A rung of the ladder, with the switches that it sets to the base's values.
struct Rung {
    name: &'static str,
    switches: &'static [Switch],
    /// The precision that it introduces.
    precision: Option<Precision>,
}

const fn rung(name: &'static str, switches: &'static [Switch]) -> Rung {
    Rung { name, switches, precision: None }
}

/// Rungs in the guides' order. Every rung plans memory and recomputes as the base does; otherwise the lowest ones would not fit.
const LADDER: &[Rung] = &[
    Rung { name: "plain FP32", switches: &[], precision: Some(Precision::F32) },
    Rung { name: "TF32", switches: &[], precision: Some(Precision::Tf32) },
    Rung { name: "BF16", switches: &[], precision: Some(Precision::BF16) },
    rung("flash attention", &[attention::ATTENTION]),
    rung("fused AdamW", &[fuse::OPTIMIZER]),
    rung("fused QKV and gate/up", &[fuse::QKV, fuse::GATE_UP]),
    rung("fused norms", &[fuse::NORM]),
    rung("cached RoPE", &[kernels::ROPE_CACHE]),
    rung("fused elementwise (compile)", &[fuse::ELEMENTWISE]),
    rung("fused cross entropy", &[fuse::LOSS]),
    rung("CUDA graphs (reduce-overhead)", &[kernels::CUDA_GRAPHS]),
    rung("autotune (max-autotune)", &[kernels::AUTOTUNE]),
    Rung { name: "FP8", switches: &[], precision: Some(Precision::FP8) },
];

fn ladder(base: &Base, stage: &Stage) -> Vec<Variant> {
    let of_base = base.compiled.settled.options.precision;
    let mut precision = Precision::F32;
    let mut below: Option<String> = None;
    let mut all = vec![];
    for (height, rung) in LADDER.iter().enumerate() {
        let beyond = rung.precision.filter(|wanted| *wanted > of_base);
        if beyond.is_none() {
            precision = rung.precision.unwrap_or(precision);
        }
        let mut settings = vec![format!("{}={}", compute::PRECISION.path(), precision.name())];
        let above = || LADDER[height + 1..].iter().flat_map(|rung| rung.switches);
        let is_above = |switch: &Switch| above().any(|other| other.name == switch.name);
        for switch in LADDER.iter().flat_map(|rung| rung.switches) {
            let value = if is_above(switch) { switch.off } else { switch.value(&base.config.switches) };
            settings.push(format!("{}={}", switch.path(), value.expect("a switch that can be off")));
        }
        if is_above(&attention::ATTENTION) {
            // A kernel can be named for flash attention only.
            settings.push(format!("{}={}", attention::KERNEL.path(), AttentionKernel::Auto.name()));
        }
        let fate = match beyond {
            Some(_) => Fate::Refused(format!("the base computes in {}", of_base.name())),
            None => match fate(base, stage, &settings) {
                Fate::Measured { key, .. } if below.as_ref() == Some(&key) => {
                    Fate::Same("changes nothing here: the plans are those of the rung below".into())
                }
                // The last rung is the base, and is measured as the base.
                Fate::Same(_) if below.as_deref() == Some(BASE) => {
                    Fate::Same("changes nothing here: the plans are the base's already".into())
                }
                Fate::Same(_) => Fate::Measured { key: BASE.into(), config: Box::new(base.config.clone()) },
                other => other,
            },
        };
        if let Fate::Measured { key, .. } = &fate {
            below = Some(key.clone());
        }
        let class = if precision == of_base { Class::Bounded } else { Class::Statistical };
        let name = rung.name.to_string();
        all.push(Variant {
            group: Group::Ladder,
            name,
            about: "ladder",
            settings,
            class: Some(class),
            stretch: 1.0,
            fate,
        });
    }
    all
}

const MODEL_KEYS: [&str; 6] = ["norm", "activation", "positions", "qk_norm", "tied", "kv_heads"];

fn models(base: &Base, model: &DecoderConfig, stage: &Stage) -> Vec<Variant> {
    let mut all = vec![];
    let mut add = |key, value: String| all.push(one(base, stage, Group::Model, key, &value, None));
    for norm in Norm::ALL.iter().filter(|norm| **norm != model.norm) {
        add("norm", norm.to_string());
    }
    for activation in Activation::ALL.iter().filter(|activation| **activation != model.activation) {
        add("activation", activation.to_string());
    }
    for positions in Positions::ALL.iter().filter(|positions| **positions != model.positions) {
        add("positions", positions.to_string());
    }
    add("qk_norm", (!model.qk_norm).to_string());
    add("tied", (!model.tied).to_string());
    // As many key heads as query heads, half as many, a quarter, and one.
    let mut ratios = vec![model.heads, model.heads / 2, model.heads / 4, 1];
    ratios.dedup();
    ratios.retain(|kv_heads| *kv_heads > 0 && *kv_heads != model.kv_heads());
    for kv_heads in ratios.into_iter().filter(|kv_heads| model.heads.is_multiple_of(*kv_heads)) {
        add("kv_heads", kv_heads.to_string());
    }
    all
}
