//! Values of switches: their names, `auto`, and access to a switch's field by name.

use flatout_ir::{Adjust, Moments, Precision, Recompute, Scaling, Shard, optimizers};
pub use flatout_runtime::cuda::{AttentionKernel, Autotune, ProductKernel};
use flatout_settings::choice;

use super::Switches;
use super::attention::Attention;
use super::compute::{Backend, Wire};
use super::data::{HeadRows, VisualTokens};
use super::memory::Base;

choice! {
    /// A switch without `auto`.
    pub enum Toggle { Off = "off", On = "on" }
}

choice! {
    /// A switch that flatout resolves if it is `auto`.
    pub enum Choose { Auto = "auto", On = "on", Off = "off" }
}

/// An enum whose values users write by name. The enum itself belongs to the crate that acts on it.
pub trait Named: Copy + 'static {
    /// The names in the order of help and errors.
    const NAMES: &'static [&'static str];
    fn name(self) -> &'static str;
    fn named(text: &str) -> Option<Self>;
}

macro_rules! named {
    ($($enum:ty),*) => {$(
        impl Named for $enum {
            const NAMES: &'static [&'static str] = &{
                let mut names = [""; <$enum>::ALL.len()];
                let mut i = 0;
                while i < names.len() {
                    names[i] = <$enum>::ALL[i].name();
                    i += 1;
                }
                names
            };
            fn name(self) -> &'static str {
                <$enum>::name(self)
            }
            fn named(text: &str) -> Option<Self> {
                <$enum>::ALL.iter().copied().find(|value| value.name() == text)
            }
        }
    )*};
}
named!(Toggle, Choose, Backend, Wire, Attention, Base, HeadRows, VisualTokens);
named!(Precision, Scaling, Recompute, Moments, Shard, Adjust, optimizers::Name, Autotune, AttentionKernel);
named!(ProductKernel);

/// A given value, or `auto`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Auto<T> {
    #[default]
    Auto,
    Given(T),
}

impl<T: Named> Auto<T> {
    /// `auto` and the names of `T`, and then `auto` again: the length of an array cannot depend on `T`.
    const PADDED: &'static [&'static str; 8] = &{
        let mut names = ["auto"; 8];
        let mut i = 0;
        while i < T::NAMES.len() {
            names[i + 1] = T::NAMES[i];
            i += 1;
        }
        names
    };
}

impl<T: Named> Named for Auto<T> {
    const NAMES: &'static [&'static str] = Self::PADDED.split_at(T::NAMES.len() + 1).0;
    fn name(self) -> &'static str {
        match self {
            Auto::Auto => "auto",
            Auto::Given(value) => value.name(),
        }
    }
    fn named(text: &str) -> Option<Self> {
        if text == "auto" { Some(Auto::Auto) } else { T::named(text).map(Auto::Given) }
    }
}

impl<T: Named> std::fmt::Display for Auto<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

/// Writes a value as its name, for `serialize_with`.
pub fn serialize<T: Named, S: serde::Serializer>(value: &T, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(value.name())
}

/// Access to the field of a switch in [`Switches`], by the names of its values.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    pub names: &'static [&'static str],
    pub get: fn(&Switches) -> &'static str,
    /// Sets the value with this name; returns whether there is one.
    pub set: fn(&mut Switches, &str) -> bool,
}

/// The field of a group as a [`Field`].
macro_rules! field {
    ($group:ident.$field:ident) => {
        Some($crate::switches::value::Field {
            names: $crate::switches::value::names_of(|switches| switches.$group.$field),
            get: |switches| $crate::switches::value::Named::name(switches.$group.$field),
            set: |switches, text| {
                let value = $crate::switches::value::Named::named(text);
                value.map(|value| switches.$group.$field = value).is_some()
            },
        })
    };
}
pub(super) use field;

pub(super) const fn names_of<T: Named>(_: fn(&Switches) -> T) -> &'static [&'static str] {
    T::NAMES
}
