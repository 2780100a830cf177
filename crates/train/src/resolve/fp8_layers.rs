//! Selects the layers that multiply in 8-bit floats: those that `train.fp8_layers` names, all, or those that gain by it on the
//! target. The choice is recorded with the run, because every 8-bit tensor has a history in the state.

use std::collections::BTreeSet;

use flatout_ir::passes::fp8::{names, weight_path};
use flatout_ir::passes::fp8_choice::{Choice, Priced, choose};
use flatout_ir::{OpKind, PlanSet, Precision, Program, Role, Target};

use crate::Failure;
use crate::UserError;
use crate::config::Config;
use crate::config::resolved::Resolved;
use crate::refuse;
use crate::switches::Settled;

pub const KEY: &str = "train.fp8_layers";
const AUTO: &str = "auto";
const ALL: &str = "all";

/// Whether the choice is left to `auto`, the default of the key.
pub fn is_auto(config: &Config) -> bool {
    config.train.fp8_layers == [AUTO]
}

/// The given names; `None` for `auto` and `all`.
pub fn named(config: &Config) -> Result<Option<BTreeSet<String>>, UserError> {
    let given = &config.train.fp8_layers;
    match &given[..] {
        [] => refuse!("`{KEY}` is empty: name layers, or give precision=bf16"),
        [one] if one == AUTO || one == ALL => Ok(None),
        _ if given.iter().any(|name| name == AUTO || name == ALL) => {
            refuse!("`{KEY}` has `{AUTO}` or `{ALL}` among names: give one of them alone, or names")
        }
        _ => Ok(Some(given.iter().cloned().collect())),
    }
}

/// Resolves `auto` for a training program: the layers that gain, or all if none does, because fp8 was requested.
pub fn settle(
    config: &Config,
    program: &Program,
    target: &Target,
    settled: &mut Settled,
) -> Result<(), Failure> {
    if settled.options.precision != Precision::FP8 || !is_auto(config) {
        return Ok(());
    }
    let has_units = target.rates.fp8_flops.is_some_and(|fp8| fp8 > target.rates.bf16_flops);
    let (value, why) = if !has_units {
        (ALL.into(), format!("{} has no units for 8-bit floats: nothing is to be gained", target.name))
    } else {
        let choice = choose(program, target, &settled.options)?;
        let layers = choice.layers();
        let why = why(&choice, target.timings.knows_kernels());
        if layers.is_empty() || choice.lose.is_empty() {
            (ALL.into(), why)
        } else {
            let value = layers.iter().cloned().collect::<Vec<_>>().join(",");
            settled.options.fp8_layers = Some(layers);
            (value, why)
        }
    };
    settled.choose(KEY, value, why);
    Ok(())
}

/// Records the layers in 8 bits.
pub fn pin(settled: &Settled, config: &Config, resolved: &mut Resolved) {
    if settled.options.precision == Precision::FP8 && is_auto(config) {
        resolved.fp8_layers = Some(match &settled.options.fp8_layers {
            Some(layers) => layers.iter().cloned().collect(),
            None => vec![ALL.into()],
        });
    }
}

fn why(choice: &Choice, was_timed: bool) -> String {
    let by = if was_timed { "by what was timed here" } else { "by the roofline: nothing was timed here" };
    let change = |unit: &Priced| format!("{} {:+.3} ms", list(&unit.names), -1e3 * unit.gain_seconds);
    let all = |units: &[Priced]| units.iter().map(change).collect::<Vec<_>>().join("; ");
    match (&choice.gain[..], &choice.lose[..]) {
        ([], []) => "no layer can run in it".into(),
        ([], lose) => format!("none would gain, so precision=bf16 is faster ({by}: {})", all(lose)),
        (gain, []) => format!("every layer gains ({by}: {})", all(gain)),
        (gain, lose) => format!(
            "the layers that gain ({by}: {}), without those that would lose ({})",
            all(gain),
            all(lose)
        ),
    }
}

/// Names of one scope share its prefix: `attn.wk+wq+wv`.
fn list(names: &BTreeSet<String>) -> String {
    let mut out = String::new();
    let mut before = "";
    for name in names {
        let (scope, last) = name.rsplit_once('.').unwrap_or(("", name));
        match out.is_empty() {
            true => out.push_str(name),
            false if scope == before => out.push_str(&format!("+{last}")),
            false => out.push_str(&format!("+{name}")),
        }
        before = scope;
    }
    out
}

/// The layers that the plans compute in 8 bits, the number of their products, and the reason for the choice; `None` if nothing is
/// in 8 bits.
pub fn sentence(plans: &PlanSet, settled: &Settled) -> Option<String> {
    let grad = plans.plan(Role::GRAD)?;
    let is_product = |kind: OpKind| matches!(kind, OpKind::Product | OpKind::GatedProduct);
    let products = || grad.launches.iter().filter(|l| is_product(l.op.kind()));
    let narrow = products().filter(|l| l.ins[0].dtype.is_fp8()).count();
    let layers = active(plans);
    if narrow == 0 {
        return None;
    }
    let layers = layers.into_iter().collect::<Vec<_>>().join(", ");
    let why = settled.choice(KEY).map_or(format!("{KEY} names them"), |chosen| chosen.why.clone());
    Some(format!("fp8 for {narrow} of {} products, {layers}: {why}", products().count()))
}

/// The layers whose weights have 8-bit copies.
fn active(plans: &PlanSet) -> BTreeSet<String> {
    let copies = [weight_path("rows", ""), weight_path("columns", "")];
    let weight = |path: &str| copies.iter().find_map(|copy| path.strip_prefix(copy.as_str()).map(names));
    plans.slots.iter().filter_map(|slot| weight(&slot.path)).flatten().collect()
}
