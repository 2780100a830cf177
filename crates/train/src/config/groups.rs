//! Groups of parameters with their own training settings, and the learning rates that follow from them.

use flatout_settings::section;
use flatout_settings::{Section, Setting, ValueKind};
use serde::{Deserialize, Serialize};

use crate::UserError;
use crate::config::check::within;
use crate::config::{Config, ScheduleName};
use crate::refuse;

section! {
    /// Parameters with their own training settings, by patterns of their paths (see `resolve::groups`).
    pub struct Group {
        /// Patterns of parameter paths.
        pub paths: Vec<String>,
        /// The group's name in logs and plots; its patterns where not given.
        pub name: Option<String>,
        /// Peak learning rate instead of optimizer.lr.
        pub lr: Option<f64>,
        /// Learning rate at the end of the schedule, instead of schedule.final_lr or final_ratio of the peak.
        pub final_lr: Option<f64>,
        /// Factor on the learning rate.
        pub lr_scale: f64 = 1.0,
        /// Weight decay instead of optimizer.weight_decay, on matrices and vectors alike.
        pub weight_decay: Option<f64>,
    }
}

/// A list of groups is written as a list of tables.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Groups(pub Vec<Group>);

impl Setting for Groups {
    fn kind() -> ValueKind {
        ValueKind::Tables(Group::keys())
    }
}

/// A learning rate over time: its peak, and its end if that is not `schedule.final_ratio` of the peak.
#[derive(Clone, Debug, PartialEq)]
pub struct Rate {
    pub name: String,
    pub peak: f64,
    pub end: Option<f64>,
}

/// The name of the learning rate of parameters whose group has none of its own.
const BASE: &str = "base";
/// The name of the learning rate of parameters that the optimiser leaves to AdamW.
const REST: &str = "adamw";

impl Group {
    /// Whether its parameters have a learning rate of their own over time.
    pub fn has_rate(&self) -> bool {
        self.lr.is_some() || self.final_lr.is_some()
    }

    fn named(&self) -> String {
        self.name.clone().unwrap_or_else(|| self.paths.join(","))
    }
}

impl Config {
    /// The learning rates of a run: first the base rate, then those of groups that have one, in their order, and last that of parameters
    /// that the optimiser leaves to AdamW. A parameter's rule refers to its rate by the index in this list.
    pub fn rates(&self) -> Vec<Rate> {
        let (peak, end) = (self.optimizer.lr, self.schedule.final_lr);
        let of_group = |group: &Group| Rate {
            name: group.named(),
            peak: group.lr.unwrap_or(peak),
            end: group.final_lr.or(end),
        };
        let groups = self.train.groups.0.iter().filter(|group| group.has_rate());
        let rest = self.optimizer.rate_of_rest().map(|peak| Rate { name: REST.into(), peak, end });
        std::iter::once(Rate { name: BASE.into(), peak, end })
            .chain(groups.map(of_group))
            .chain(rest)
            .collect()
    }

    pub(super) fn validate_groups(&self) -> Result<(), UserError> {
        let schedule = &self.schedule;
        for group in &self.train.groups.0 {
            let Group { paths, name, lr, final_lr, lr_scale, weight_decay } = group;
            if paths.is_empty() {
                refuse!("`train.groups` has a table whose `paths` is empty");
            }
            if name.as_ref().is_some_and(|name| name.trim().is_empty()) {
                refuse!("`train.groups` has a table whose `name` is empty: drop it, or give one");
            }
            if let Some(lr) = lr.filter(|lr| !lr.is_finite() || *lr <= 0.0) {
                refuse!(
                    "`train.groups.lr` is {lr} and must be a number above 0; to train nothing, use `train.freeze`"
                );
            }
            within("train.groups.final_lr", final_lr.unwrap_or(0.0), 0.0, f64::MAX)?;
            within("train.groups.lr_scale", *lr_scale, 0.0, f64::MAX)?;
            within("train.groups.weight_decay", weight_decay.unwrap_or(0.0), 0.0, f64::MAX)?;
            if *lr_scale != 1.0 && (group.has_rate() || schedule.name == ScheduleName::Converge) {
                let why = match group.has_rate() {
                    true => "and the group has a learning rate of its own",
                    false => "and converge brings all groups to one learning rate",
                };
                refuse!("`train.groups.lr_scale` is {lr_scale} {why}: give `lr` instead");
            }
            if final_lr.is_some() && schedule.name == ScheduleName::Constant {
                refuse!(
                    "`train.groups.final_lr` is given and the schedule is constant: drop it, or take another schedule"
                );
            }
        }
        let rates = self.rates();
        if let Some(twice) =
            rates.iter().enumerate().find(|(i, rate)| rates[..*i].iter().any(|other| other.name == rate.name))
        {
            refuse!(
                "`train.groups` has two learning rates named `{}`: give the groups a `name` each, and none of them {BASE} or {REST}",
                twice.1.name
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::recipes::resolve;

    fn rates(overrides: &[&str]) -> Vec<(String, f64, Option<f64>)> {
        let overrides: Vec<String> = overrides.iter().map(|s| s.to_string()).collect();
        let rates = resolve("tiny", &[], &overrides).unwrap().rates();
        rates.into_iter().map(|rate| (rate.name, rate.peak, rate.end)).collect()
    }

    #[test]
    fn groups_with_a_rate_follow_the_base() {
        let base = |end| ("base".to_string(), 0.005, end);
        assert_eq!(rates(&[]), [base(None)]);
        assert_eq!(rates(&["groups=[{paths=['embed'],lr_scale=0.5}]"]), [base(None)]);
        let two = "groups=[{paths=['embed'],lr=1e-3,name='table'},{paths=['layers'],weight_decay=0.0},{paths=['**.wq','**.wk'],final_lr=0.0}]";
        let named = |name: &str, peak, end| (name.to_string(), peak, end);
        assert_eq!(
            rates(&[two]),
            [base(None), named("table", 1e-3, None), named("**.wq,**.wk", 0.005, Some(0.0))]
        );
        let converging = ["schedule.name=converge", "schedule.final_lr=3e-5", two];
        assert_eq!(
            rates(&converging),
            [base(Some(3e-5)), named("table", 1e-3, Some(3e-5)), named("**.wq,**.wk", 0.005, Some(0.0))]
        );
    }
}
