//! Section `optimizer`: the update rule, its constants, and checks of them.

use flatout_ir::optimizers::Name;
use flatout_ir::{Adjust, Muon};
use flatout_settings::{Setting, ValueKind, section};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::UserError;
use crate::config::Config;
use crate::config::check::within;
use crate::refuse;
use crate::switches::Named;

/// A value that is written by name, of an enum of another crate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Word<T>(pub T);

impl<T: Named> Setting for Word<T> {
    fn kind() -> ValueKind {
        ValueKind::Choice(T::NAMES)
    }
}

impl<T: Named> std::fmt::Display for Word<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.0.name())
    }
}

impl<T: Named> Serialize for Word<T> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(self.0.name())
    }
}

impl<'de, T: Named> Deserialize<'de> for Word<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        let unknown = || serde::de::Error::custom(format!("`{text}` is not one of {}", T::NAMES.join(", ")));
        T::named(&text).map(Word).ok_or_else(unknown)
    }
}

section! {
    /// The optimiser and its constants.
    pub struct Optimizer {
        /// The update rule. muon makes the updates of layers' matrices nearly orthogonal and leaves everything else to adamw.
        pub name: Word<Name> = Word(Name::AdamW),
        /// Peak learning rate; with muon that of the matrices it updates.
        pub lr: f64,
        /// With muon: peak learning rate of the parameters that adamw updates; defaults to lr.
        pub adamw_lr: Option<f64>,
        /// Decay of the running means of the gradient and of its square.
        pub betas: [f64; 2] = [0.9, 0.95],
        /// Added to the root of the second moment.
        pub eps: f64 = 1e-8,
        /// With muon: decay of the running mean of the gradient.
        pub momentum: f64 = 0.95,
        /// With muon: use Nesterov momentum.
        pub nesterov: bool = true,
        /// With muon: iterations of Newton-Schulz, which bring singular values near 1.
        pub ns_steps: usize = 5,
        /// With muon: factor on lr, sqrt(max(1, rows / columns)) (original), or 0.2 sqrt(max(rows, columns)) (match_rms_adamw), with which a learning rate for adamw fits.
        pub muon_adjust: Word<Adjust> = Word(Adjust::MatchRmsAdamW),
        /// Decoupled weight decay of matrices, embeddings included; vectors are not decayed.
        pub weight_decay: f64 = 0.1,
        /// Largest norm of the gradient; a larger gradient is scaled down to it. 0 turns clipping off.
        pub clip: f64 = 1.0,
    }
}

/// The same limit as PyTorch's. More steps than about five only take time.
const MAX_NS_STEPS: usize = 99;

impl Optimizer {
    /// Muon's constants.
    pub fn muon(&self) -> Muon {
        let Optimizer { momentum, nesterov, ns_steps: steps, muon_adjust: Word(adjust), .. } = *self;
        Muon { momentum, nesterov, steps, adjust }
    }

    /// The peak learning rate of the parameters that the rule leaves to AdamW; `None` if there are none.
    pub fn rate_of_rest(&self) -> Option<f64> {
        (self.name.0 == Name::Muon).then(|| self.adamw_lr.unwrap_or(self.lr))
    }

    /// The first key of Muon that does not have its default value.
    fn key_of_muon(&self) -> Option<&'static str> {
        let (given, default) = (self.muon(), Muon::default());
        let keys = [
            ("adamw_lr", self.adamw_lr.is_some()),
            ("momentum", given.momentum != default.momentum),
            ("nesterov", given.nesterov != default.nesterov),
            ("ns_steps", given.steps != default.steps),
            ("muon_adjust", given.adjust != default.adjust),
        ];
        keys.into_iter().find(|(_, is_given)| *is_given).map(|(key, _)| key)
    }
}

impl Config {
    pub(super) fn validate_optimizer(&self) -> Result<(), UserError> {
        let optimizer = &self.optimizer;
        let rates = [("optimizer.lr", Some(optimizer.lr)), ("optimizer.adamw_lr", optimizer.adamw_lr)];
        for (key, value) in rates.into_iter().chain([("optimizer.eps", Some(optimizer.eps))]) {
            if let Some(value) = value.filter(|value| !value.is_finite() || *value <= 0.0) {
                refuse!("`{key}` is {value} and must be a number above 0");
            }
        }
        for beta in optimizer.betas {
            if !(0.0..1.0).contains(&beta) {
                refuse!("`optimizer.betas` has {beta}, and each must be at least 0 and below 1");
            }
        }
        if !(0.0..1.0).contains(&optimizer.momentum) {
            refuse!("`optimizer.momentum` is {} and must be at least 0 and below 1", optimizer.momentum);
        }
        if !(1..=MAX_NS_STEPS).contains(&optimizer.ns_steps) {
            refuse!("`optimizer.ns_steps` is {} and must be from 1 to {MAX_NS_STEPS}", optimizer.ns_steps);
        }
        let is_muon = optimizer.name.0 == Name::Muon;
        if let Some(key) = optimizer.key_of_muon().filter(|_| !is_muon) {
            refuse!(
                "`optimizer.{key}` is given and `optimizer.name` is {}: only muon has it",
                optimizer.name
            );
        }
        if is_muon && optimizer.muon_adjust.0 == Adjust::Original && optimizer.adamw_lr.is_none() {
            refuse!(
                "`optimizer.muon_adjust` is original, with which muon and adamw need different learning rates: give \
                 optimizer.adamw_lr too, as in lr=0.02 adamw_lr=3e-4"
            );
        }
        let ends_alone = |group: &&super::Group| group.final_lr.is_some() && group.lr.is_none();
        if let Some(group) = self.train.groups.0.iter().find(ends_alone).filter(|_| is_muon) {
            refuse!(
                "`train.groups` has `final_lr` without `lr` for {}, and with muon there are two learning rates it may belong to: give \
                 `lr` too",
                group.paths.join(", ")
            );
        }
        within("optimizer.weight_decay", optimizer.weight_decay, 0.0, f64::MAX)?;
        within("optimizer.clip", optimizer.clip, 0.0, f64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use crate::config::check::tests::refused;
    use crate::recipes::resolve;

    #[test]
    fn keys_of_muon_require_muon_and_have_bounds() {
        let cases = [
            (
                "optimizer.momentum=0.9",
                "`optimizer.momentum` is given and `optimizer.name` is adamw: only muon has it",
            ),
            ("adamw_lr=1e-3", "`optimizer.adamw_lr` is given"),
            (
                "optimizer.name=muon momentum=1",
                "`optimizer.momentum` is 1 and must be at least 0 and below 1",
            ),
            ("optimizer.name=muon ns_steps=0", "`optimizer.ns_steps` is 0 and must be from 1 to 99"),
            ("optimizer.name=muon adamw_lr=0", "`optimizer.adamw_lr` is 0 and must be a number above 0"),
            ("optimizer.name=muon muon_adjust=original", "give optimizer.adamw_lr too"),
            ("optimizer.name=muon muon_adjust=spectral", "original, match_rms_adamw"),
            (
                "optimizer.name=muon groups=[{paths=['embed'],final_lr=0.0}]",
                "two learning rates it may belong to",
            ),
        ];
        for (overrides, words) in cases {
            let sentence = refused(overrides);
            assert!(sentence.contains(words), "{overrides}: {sentence}");
        }
    }

    #[test]
    fn what_muon_leaves_to_adamw_has_the_last_rate() {
        let rates = |overrides: &[&str]| {
            let overrides: Vec<String> = overrides.iter().map(|s| s.to_string()).collect();
            let rates = resolve("tiny", &[], &overrides).unwrap().rates();
            rates.into_iter().map(|rate| (rate.name, rate.peak)).collect::<Vec<_>>()
        };
        let named = |name: &str, peak: f64| (name.to_string(), peak);
        assert_eq!(rates(&["optimizer.name=muon"]), [named("base", 0.005), named("adamw", 0.005)]);
        let grouped = ["optimizer.name=muon", "adamw_lr=1e-3", "groups=[{paths=['embed'],lr=2e-3}]"];
        assert_eq!(rates(&grouped), [named("base", 0.005), named("embed", 2e-3), named("adamw", 1e-3)]);
    }
}
