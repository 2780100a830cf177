//! Switches: a row each with its field, names, class and functions that settle it and read it back from plans.
//!
//! A file holds a group of switches: the fields and their defaults, and below them the rows. Documentation, errors,
//! settling and measurements read the table of all rows. This module knows neither the config nor the data.

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

use active::{Prepared, Reading};
pub use attention::Attention;
pub use compile::Compile;
pub use compute::Backend;
pub use settled::{Chosen, Settle, Settled, Settling, Step, settle};
pub use value::{AttentionKernel, Auto, Autotune, Choose, Field, Named, ProductKernel, Toggle, serialize};

/// The values that were asked for.
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

/// A row a switch, in the order of the groups, and the sugar `compile` at the end.
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
    /// As it is written after `switches.` or alone on the command line.
    pub name: &'static str,
    pub doc: &'static str,
    /// None for a sugar that stands for other switches and has no state of its own.
    pub field: Option<Field>,
    pub class: Class,
    /// Its values put other examples into an update, so that the losses of an update cannot be compared.
    pub reorders: bool,
    /// Its values read other tokens from the data: losses cannot be compared, and plans for the lengths there are say nothing
    /// of it.
    pub rereads: bool,
    /// The value without the optimisation, to price it by; none for what is no optimisation.
    pub off: Option<&'static str>,
    /// Why a value cannot run on a target, whatever the model: the end of a sentence that begins with switch and value.
    refusal: fn(&str, &Target) -> Option<String>,
    settle: Settle,
    /// Reads its state from compiled plans and not from what was asked for.
    active: fn(&Reading<'_>) -> &'static str,
    /// Judges a state that is another than was settled.
    differs: fn(settled: &str, state: &str) -> Difference,
    /// Its name in optimisation guides.
    pub guides_word: &'static str,
    pub elsewhere: &'static [Elsewhere],
}

/// A state of plans that is another than was settled.
pub enum Difference {
    Harmless,
    /// The model has nothing for it, in a sentence for the user.
    Refused(&'static str),
    Mistake,
}

/// The parts that most rows share.
const ROW: Switch = Switch {
    name: "",
    doc: "",
    field: None,
    class: Class::Bounded,
    reorders: false,
    rereads: false,
    off: None,
    refusal: |_, _| None,
    settle: Settle::Sugar,
    active: |_| unreachable!("a sugar has no state"),
    differs: unless_nothing,
    guides_word: "",
    elsewhere: &[],
};

/// A switch that has nothing to act on says so, and that is no harm.
fn unless_nothing(_settled: &str, state: &str) -> Difference {
    if state.starts_with("nothing ") { Difference::Harmless } else { Difference::Mistake }
}

impl Switch {
    pub fn values(&self) -> &'static [&'static str] {
        self.field.map_or(Compile::VALUES, |field| field.names)
    }

    /// Its full path among all keys.
    pub fn path(&self) -> String {
        format!("switches.{}", self.name)
    }

    /// Its name of the value that was asked for; `None` for a sugar.
    pub fn value(&self, switches: &Switches) -> Option<&'static str> {
        self.field.map(|field| (field.get)(switches))
    }

    pub fn default(&self) -> Option<&'static str> {
        self.value(&Switches::default())
    }

    /// Whether a value can run on a target, whatever the model; otherwise the sentence that says why not.
    pub fn available(&self, value: &str, target: &Target) -> Result<(), String> {
        let refusal = (self.refusal)(value, target);
        refusal.map_or(Ok(()), |why| Err(format!("`{}={value}` {why}", self.name)))
    }

    /// Its state in compiled plans; `None` for a sugar.
    pub fn active(&self, plans: &PlanSet, target: &Target, prepared: Prepared) -> Option<&'static str> {
        self.field.map(|_| (self.active)(&Reading::new(plans, target, prepared)))
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
    /// Every switch as a key of the config, the sugar too.
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

/// The promise a switch makes on numbers, relative to the backend's default precision.
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
            (Class::Bounded, Precision::F32) => 1e-5,
            (Class::Bounded, Precision::Tf32 | Precision::BF16) => 1e-3,
            // A last bit of bf16 may move a code by a whole step of 8-bit rounding.
            (Class::Bounded, Precision::FP8) | (Class::Statistical, _) => 1e-2,
        }
    }
}

/// A name in another tool, and what to write here instead.
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
                "{} is there twice",
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

    /// Each row reaches a field of its own: a value that is set is read by that row, and by no other.
    #[test]
    fn a_row_reaches_its_own_field() {
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
