//! Section `adapter`: low-rank adapters beside frozen weights.

use flatout_settings::{Section, Setting, ValueKind};
use flatout_settings::{choice, section};
use serde::{Deserialize, Serialize};

use super::check::at_least_one;
use crate::UserError;
use crate::refuse;

choice! {
    /// The kind of adapter beside a frozen weight.
    pub enum AdapterKind {
        None = "none",
        /// An added product of low rank.
        Lora = "lora",
        /// An added product of low rank, and a learned length of every row.
        Dora = "dora",
    }
}

section! {
    /// Weights whose adapters differ from the section's.
    pub struct AdapterGroup {
        /// Adapters of one name replace each other where several groups match; those of different names add up.
        pub name: String = "default".into(),
        /// Patterns of weight paths.
        pub paths: Vec<String>,
        /// Rank instead of adapter.rank.
        pub rank: Option<usize>,
        /// Numerator of the scale instead of adapter.alpha.
        pub alpha: Option<f64>,
        /// Dropout probability instead of adapter.dropout.
        pub dropout: Option<f64>,
    }
}

/// A list of groups is written as a list of tables.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct AdapterGroups(pub Vec<AdapterGroup>);

impl Setting for AdapterGroups {
    fn kind() -> ValueKind {
        ValueKind::Tables(AdapterGroup::keys())
    }
}

section! {
    /// Low-rank adapters beside frozen weights.
    pub struct Adapter {
        /// Adapter beside frozen weights: none, an added product of low rank (lora), or that and a learned length of every row (dora).
        pub kind: AdapterKind = AdapterKind::None,
        /// Rank of the added product.
        pub rank: usize = 16,
        /// The added product is scaled by alpha / rank; defaults to twice the rank.
        pub alpha: Option<f64>,
        /// Dropout probability on an adapter's input in training.
        pub dropout: f64 = 0.0,
        /// Patterns of the paths of weights that get an adapter: linear weights of layers, and embed and head by name.
        pub paths: Vec<String> = vec!["layers".into()],
        /// Tables of further weights, or of weights with a rank, alpha or dropout of their own.
        pub groups: AdapterGroups = AdapterGroups::default(),
        /// Patterns of the paths of model parameters that are trained beside the adapters; a head of classes always is.
        pub also_train: Vec<String> = Vec::new(),
        /// A folder with an adapter in PEFT's layout to start from, which sets kind, rank, alpha and paths.
        pub from: Option<String>,
    }
}

/// The name of adapters without a given name.
pub const DEFAULT_ADAPTER: &str = "default";

impl Adapter {
    /// All groups, the section's own first.
    pub fn all(&self) -> Vec<AdapterGroup> {
        let own = AdapterGroup {
            name: DEFAULT_ADAPTER.into(),
            paths: self.paths.clone(),
            rank: None,
            alpha: None,
            dropout: None,
        };
        std::iter::once(own).chain(self.groups.0.iter().cloned()).collect()
    }

    pub(super) fn validate(&self) -> Result<(), UserError> {
        if self.kind == AdapterKind::None {
            let idle = [
                ("also_train", !self.also_train.is_empty()),
                ("groups", !self.groups.0.is_empty()),
                ("from", self.from.is_some()),
            ];
            if let Some((key, _)) = idle.into_iter().find(|(_, given)| *given) {
                refuse!(
                    "`adapter.{key}` is given but `adapter.kind` is none: give adapter.kind=lora or dora"
                );
            }
            return Ok(());
        }
        if self.paths.is_empty() && self.groups.0.is_empty() {
            refuse!(
                "`adapter.paths` is empty: name the weights that get an adapter, as in adapter.paths=layers"
            );
        }
        check("", Some(self.rank), self.alpha, Some(self.dropout))?;
        for AdapterGroup { name, paths, rank, alpha, dropout } in &self.groups.0 {
            let fits = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
            if name.is_empty() || !name.chars().all(fits) {
                refuse!("`adapter.groups` has the name `{name}`: use letters, digits, _ and -");
            }
            if paths.is_empty() {
                refuse!("`adapter.groups` has a table whose `paths` is empty");
            }
            check("groups.", *rank, *alpha, *dropout)?;
        }
        Ok(())
    }
}

fn check(of: &str, rank: Option<usize>, alpha: Option<f64>, dropout: Option<f64>) -> Result<(), UserError> {
    at_least_one(&format!("adapter.{of}rank"), rank.unwrap_or(1))?;
    if let Some(alpha) = alpha.filter(|alpha| !alpha.is_finite() || *alpha <= 0.0) {
        refuse!("`adapter.{of}alpha` is {alpha} and must be a number above 0");
    }
    if let Some(dropout) = dropout.filter(|dropout| !(0.0..1.0).contains(dropout)) {
        refuse!("`adapter.{of}dropout` is {dropout} and must be at least 0 and below 1");
    }
    Ok(())
}
