//! Switches: each is a row of a table with its field, names, class, and functions that resolve it and read it back from plans.
//!
//! A file has a group of switches: the fields with their defaults, then the rows. Documentation, errors, resolution and measurements
//! read the table of all rows. This module knows neither the config nor the data.

pub mod active;
pub mod attention;
pub mod compile;
pub mod compute;
pub mod data;
pub mod fuse;
pub mod kernels;
pub mod memory;
mod settled;
mod value;

use std::collections::BTreeMap;

use flatout_ir::{PlanSet, Precision, Target};
use flatout_settings::{Key, ValueKind};
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use active::{CompiledView, Prepared};
pub use attention::Attention;
pub use compile::Compile;
pub use compute::Backend;
pub use settled::{Chosen, Settle, Settled, Settling, Step, settle};
pub use value::{AttentionKernel, Auto, Autotune, Choose, Field, Named, ProductKernel, Toggle, serialize};

/// The requested value of every switch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Switches {
    pub compute: compute::Compute,
    pub attention: attention::AttentionSwitches,
    pub fuse: fuse::Fuse,
    pub memory: memory::Memory,
    pub data: data::Data,
    pub kernels: kernels::Kernels,
}

const COUNT: usize = compute::ROWS.len()
    + attention::ROWS.len()
    + fuse::ROWS.len()
    + memory::ROWS.len()
    + data::ROWS.len()
    + kernels::ROWS.len();

/// One row per switch, in the order of the groups, and the alias `compile` at the end.
pub static TABLE: &[Switch] = &{
    let groups: [&[Switch]; 6] =
        [&compute::ROWS, &attention::ROWS, &fuse::ROWS, &memory::ROWS, &data::ROWS, &kernels::ROWS];
    let mut rows = [compile::COMPILE; COUNT + 1];
    let (mut group, mut row, mut at) = (0, 0, 0);
    while group < groups.len() {
        if row == groups[group].len() {
            (group, row) = (group + 1, 0);
        } else {
            rows[at] = groups[group][row];
            (row, at) = (row + 1, at + 1);
        }
    }
    rows
};

/// A row of the table.
#[derive(Clone, Copy, Debug)]
pub struct Switch {
    /// Its name after `switches.`, or alone on the command line.
    pub name: &'static str,
    pub doc: &'static str,
    /// None for an alias, which sets other switches and has no state of its own.
    pub field: Option<Field>,
    pub class: Class,
    /// Other values put other examples into an update, so that losses of single updates cannot be compared.
    pub reorders: bool,
    /// Other values read other tokens from the data, so that losses cannot be compared, and plans for the present lengths do not show
    /// its effect.
    pub rereads: bool,
    /// The value without the optimisation, as the baseline of measurements; none if the switch is no optimisation.
    pub off: Option<&'static str>,
    /// Why a value cannot run on a target with any model: the end of a sentence that begins with switch and value.
    refusal: fn(&str, &Target) -> Option<String>,
    settle: Settle,
    /// Reads its state from compiled plans and not from the requested value.
    active: fn(&CompiledView<'_>) -> &'static str,
    /// Judges a state that differs from the resolved value.
    differs: fn(settled: &str, state: &str) -> Difference,
    /// Its name in optimisation guides.
    pub guides_word: &'static str,
    pub elsewhere: &'static [Elsewhere],
}

/// The judgement on a state of plans that differs from the resolved value.
pub enum Difference {
    Harmless,
    /// The model has nothing that the value applies to; an error for the user.
    Refused(&'static str),
    /// A bug of flatout.
    Mistake,
}

/// The defaults of a row.
const ROW: Switch = Switch {
    name: "",
    doc: "",
    field: None,
    class: Class::Bounded,
    reorders: false,
    rereads: false,
    off: None,
    refusal: |_, _| None,
    settle: Settle::Alias,
    active: |_| unreachable!("an alias has no state"),
    differs: unless_nothing,
    guides_word: "",
    elsewhere: &[],
};

/// A state that begins with `nothing` means that the switch has nothing to act on, which is harmless.
fn unless_nothing(_settled: &str, state: &str) -> Difference {
    if state.starts_with("nothing ") { Difference::Harmless } else { Difference::Mistake }
}

impl Switch {
    pub fn values(&self) -> &'static [&'static str] {
        self.field.map_or(Compile::VALUES, |field| field.names)
    }

    /// Its full path as a key.
    pub fn path(&self) -> String {
        format!("switches.{}", self.name)
    }

    /// The name of its requested value; `None` for an alias.
    pub fn value(&self, switches: &Switches) -> Option<&'static str> {
        self.field.map(|field| (field.get)(switches))
    }

    pub fn default(&self) -> Option<&'static str> {
        self.value(&Switches::default())
    }

    /// Checks that a value can run on a target with some model; the error says why not.
    pub fn available(&self, value: &str, target: &Target) -> Result<(), String> {
        let refusal = (self.refusal)(value, target);
        refusal.map_or(Ok(()), |why| Err(format!("`{}={value}` {why}", self.name)))
    }

    /// Its state in compiled plans; `None` for an alias.
    pub fn active(&self, plans: &PlanSet, target: &Target, prepared: Prepared) -> Option<&'static str> {
        self.field.map(|_| (self.active)(&CompiledView::new(plans, target, prepared)))
    }

    fn key(&self) -> Key {
        let optional = self.field.is_none();
        Key {
            name: self.name,
            kind: ValueKind::Choice(self.values()),
            required: false,
            optional,
            doc: self.doc,
        }
    }
}

impl Switches {
    /// Every switch as a key of the config, the alias too.
    pub fn keys() -> Vec<Key> {
        TABLE.iter().map(Switch::key).collect()
    }
}

impl Serialize for Switches {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_map(TABLE.iter().filter_map(|row| Some((row.name, row.value(self)?))))
    }
}

impl<'de> Deserialize<'de> for Switches {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Switches, D::Error> {
        let mut switches = Switches::default();
        for (name, value) in BTreeMap::<String, String>::deserialize(from)? {
            let field = TABLE.iter().find(|row| row.name == name).and_then(|row| row.field);
            let Some(field) = field else {
                return Err(D::Error::custom(format!("there is no switch `{name}`")));
            };
            if !(field.set)(&mut switches, &value) {
                let names = field.names.join(", ");
                return Err(D::Error::custom(format!("`{name}` is not one of {names}: `{value}`")));
            }
        }
        Ok(switches)
    }
}

/// The largest change of numbers that a switch may cause, relative to the backend's default precision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Class {
    /// The same bits.
    Bitwise,
    /// Differences by rounding, within a bound that is tested.
    Bounded,
    /// The same loss curve within noise. `auto` never chooses a value of this class.
    Statistical,
}

impl Class {
    /// The largest relative difference of a loss that the class allows in a run of this precision. `tests/passes.rs` tests it over the
    /// first updates of a small decoder: fifty in fp32, and twenty in bf16, whose roundings are larger and whose bound also holds for
    /// tf32.
    pub fn bound(self, precision: Precision) -> f64 {
        match (self, precision) {
            (Class::Bitwise, _) => 0.0,
            (Class::Bounded, Precision::F32) => 1e-5,
            (Class::Bounded, Precision::Tf32 | Precision::BF16) => 1e-3,
            // A difference in the last bit of bf16 may move a code by a whole step of 8-bit rounding.
            (Class::Bounded, Precision::FP8) | (Class::Statistical, _) => 1e-2,
        }
    }
}

/// A name in another tool, with the setting here.
#[derive(Clone, Copy, Debug)]
pub struct Elsewhere {
    pub tool: &'static str,
    pub name: &'static str,
    pub here: &'static str,
}

const fn elsewhere(tool: &'static str, name: &'static str, here: &'static str) -> Elsewhere {
    Elsewhere { tool, name, here }
}

const HF: &str = "HF Trainer";
const TITAN: &str = "torchtitan";
const AXOLOTL: &str = "Axolotl";
const DEEPSPEED: &str = "DeepSpeed";
const MEGATRON: &str = "Megatron-LM";
const GUIDES: &str = "the guides";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_knows_its_values_and_default() {
        for (i, switch) in TABLE.iter().enumerate() {
            assert!(!switch.doc.is_empty() && !switch.guides_word.is_empty());
            assert!(
                TABLE[..i].iter().all(|other| other.name != switch.name),
                "{} is listed twice",
                switch.name
            );
            match switch.default() {
                Some(default) => assert!(switch.values().contains(&default), "{}", switch.name),
                None => assert_eq!(switch.name, "compile"),
            }
        }
        let row = |name| TABLE.iter().find(|switch| switch.name == name).unwrap();
        assert_eq!(row("precision").values(), ["auto", "fp32", "tf32", "bf16", "fp8"]);
        assert_eq!(row("fuse.qkv").default(), Some("on"));
        assert_eq!(row("deterministic").default(), Some("off"));
    }

    /// Each row has a field of its own: a value that is set through one row changes no other row.
    #[test]
    fn a_row_sets_only_its_own_field() {
        for switch in TABLE {
            let Some(field) = switch.field else { continue };
            let other = field.names.iter().find(|name| Some(**name) != switch.default()).expect("two values");
            let mut switches = Switches::default();
            assert!((field.set)(&mut switches, other) && !(field.set)(&mut switches, "perhaps"));
            let changed: Vec<_> = TABLE.iter().filter(|row| row.value(&switches) != row.default()).collect();
            assert_eq!(changed.iter().map(|row| row.name).collect::<Vec<_>>(), [switch.name]);
            assert_eq!(switch.value(&switches), Some(*other));
            let written = toml::to_string(&switches).unwrap();
            assert_eq!(toml::from_str::<Switches>(&written).unwrap(), switches);
        }
        assert!(toml::from_str::<Switches>("compile = \"off\"").is_err());
    }
}
