//! Continues a run with the command that began it, so that a batch system can requeue that one line.

use std::collections::BTreeSet;

use crate::config::Config;
use crate::config::may_change;
use crate::config::resolved::Resolved;
use crate::refuse;
use crate::resolve::compile::Compiled;
use crate::run::{Run, asked_and_resolved};
use crate::weights::pretrained;
use crate::{Failure, UserError};

/// Keys whose resolved values earlier versions wrote into a run's config.
const ONCE_PINNED: [&str; 7] = [
    "data.classes",
    "data.lengths",
    "schedule.horizon_steps",
    "switches.recompute",
    "train.fp8_layers",
    "train.micro_batch",
    "train.recompute_layers",
];

/// The key of the target at which a run ends.
const GOAL: &str = "eval.goal";

/// Trains an entered run, new or existing, by calling `train` with its config and the plans that were compiled from it. A new run
/// that is refused is removed again.
pub fn begin_or_continue<T>(
    run: &Run,
    is_fresh: bool,
    asked: &Config,
    compiled: Option<Compiled>,
    train: impl FnOnce(&Config, Option<Compiled>) -> Result<T, Failure>,
) -> Result<T, Failure> {
    if !is_fresh {
        let (own, resolved) = asked_and_resolved(run.dir())?;
        return train(&requeued(&own, &resolved, asked)?, None);
    }
    let result = train(asked, compiled);
    if let Err(Failure::User(_)) = &result {
        run.discard();
    }
    result
}

/// The config with which a run continues when `asked` is given again: the run's `own` config, with the keys that may change taken
/// from `asked`. The request is compared with the original request; a value that the run has `resolved` may also be spelled out.
pub fn requeued(own: &Config, resolved: &Resolved, asked: &Config) -> Result<Config, UserError> {
    check_begun(own, resolved, asked, "steps, eval, checkpoint and log may differ", may_change)?;
    Ok(with_changes(own, asked))
}

/// Refuses an existing run for `asked` where runs are compared by when they reach `eval.goal`: only the goal may differ, not what
/// its updates and evaluations compute.
pub fn check_compared(own: &Config, resolved: &Resolved, asked: &Config) -> Result<(), UserError> {
    let is_measured = |key: &str| key.starts_with("train.") || key.starts_with("eval.");
    let may_change = |key: &str| key == GOAL || (may_change(key) && !is_measured(key));
    check_begun(own, resolved, asked, "the goal, checkpoint and log may differ", may_change)
}

/// Refuses an existing run with other settings than those asked for, except keys that `may_change`; `but` names these in words.
fn check_begun(
    own: &Config,
    resolved: &Resolved,
    asked: &Config,
    but: &str,
    may_change: impl Fn(&str) -> bool,
) -> Result<(), UserError> {
    let here = std::env::current_dir().unwrap_or_default();
    let from_there = resolved.folder.as_deref().filter(|folder| folder.is_dir()).unwrap_or(&here);
    let began = own.based_at(from_there).values();
    let now = asked.based_at(&here).values();
    let pinned = resolved.over(own);
    let is_same_model = own.model.from() == asked.model.from()
        || pinned
            .model
            .from()
            .zip(asked.model.from())
            .is_some_and(|(began, now)| pretrained::same(began, now));
    let tower = |config: &Config| config.model.as_fovea().and_then(|tower| tower.from.clone());
    let is_same_tower =
        tower(&pinned).zip(tower(asked)).is_some_and(|(began, now)| pretrained::same(&began, &now));
    let came_to = pinned.based_at(&here).values();
    let is_open = |key: &str| {
        let nothing = ["\"auto\"", "[]", "[\"auto\"]"];
        now.get(key).is_none_or(|value| nothing.contains(&value.as_str()))
    };
    let may_differ = |key: &str| match key {
        "model.from" | "data.tokenizer" => is_same_model,
        "model.vision.from" => is_same_tower,
        "schedule.warmup_steps" | "schedule.warmup_share" => is_same_warmup(&pinned, asked),
        // A recipe may give the value that plans assume; the actual value is found when the data is opened.
        "data.decoded" => true,
        _ => may_change(key) || (ONCE_PINNED.contains(&key) && is_open(key)),
    };
    for key in began.keys().chain(now.keys()).collect::<BTreeSet<_>>() {
        let (then, value) = (began.get(key), now.get(key));
        if then == value || (value.is_some() && came_to.get(key) == value) || may_differ(key) {
            continue;
        }
        // A recipe shortens its warm-up in a run that has no room for it, so a larger number of steps resolves to another
        // warm-up.
        let is_span = ["schedule.warmup_steps", "schedule.decay_steps"].contains(&key.as_str());
        let is_longer = is_span && own.train.steps != asked.train.steps;
        let but = if is_longer { "flatout resume RUN train.steps=N gives a run more steps" } else { but };
        let shown = |value: Option<&String>| value.map_or("not given", |value| value.as_str()).to_string();
        refuse!(
            "the run that is there was begun with other settings than these: `{key}` is {} now and was {}; give the same, or \
             another --run ({but})",
            shown(value),
            shown(then)
        );
    }
    Ok(())
}

/// Whether the run's warm-up has the number of updates that the requested share gives.
fn is_same_warmup(pinned: &Config, asked: &Config) -> bool {
    let horizon = pinned.schedule.horizon_steps.or(pinned.train.steps);
    let warmup = horizon.and_then(|horizon| asked.schedule.resolved_warmup(horizon));
    warmup == Some(pinned.schedule.warmup_steps)
}

/// A run's config with the keys that may change taken from the new request.
fn with_changes(own: &Config, asked: &Config) -> Config {
    let mut config = own.clone();
    (config.train.steps, config.train.epochs) = (asked.train.steps, asked.train.epochs);
    (config.train.on_nonfinite, config.train.max_skipped) =
        (asked.train.on_nonfinite, asked.train.max_skipped);
    config.train.patience = asked.train.patience;
    (config.eval, config.checkpoint, config.log) =
        (asked.eval.clone(), asked.checkpoint.clone(), asked.log.clone());
    config.mesh = asked.mesh.clone();
    let memory = &mut config.switches.memory;
    (memory.shard, memory.shard_keep) = (asked.switches.memory.shard, asked.switches.memory.shard_keep);
    config
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipes::resolve;
    use crate::switches::Auto;

    fn tiny(overrides: &[&str]) -> Config {
        resolve("tiny", &[], &overrides.iter().map(|o| o.to_string()).collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn the_same_command_continues_and_another_is_refused() {
        let mut own = tiny(&["lr=1e-3"]);
        own.schedule.horizon_steps = own.train.steps;
        own.train.micro_batch = crate::config::Count::Given(8);
        own.switches.memory.recompute = Auto::Given(flatout_ir::Recompute::Cheap);
        own.train.fp8_layers = vec!["ffn.down".into()];
        assert_eq!(requeued(&own, &Resolved::default(), &tiny(&["lr=1e-3"])).unwrap(), own);
        let longer = requeued(&own, &Resolved::default(), &tiny(&["lr=1e-3", "train.steps=900"])).unwrap();
        assert_eq!((longer.train.steps, longer.schedule.horizon_steps), (Some(900), own.train.steps));
        assert!(
            requeued(&own, &Resolved::default(), &tiny(&["lr=2e-3"]))
                .unwrap_err()
                .0
                .contains("other settings")
        );
        // The same where the request and the resolved values are kept apart.
        let asked = tiny(&["lr=1e-3"]);
        let resolved = Resolved {
            horizon_steps: asked.train.steps,
            micro_batch: Some(8),
            recompute: Some("cheap".into()),
            fp8_layers: Some(vec!["ffn.down".into()]),
            ..Resolved::default()
        };
        assert_eq!(resolved.over(&asked), own);
        assert_eq!(Resolved::parse(&resolved.to_toml(), "resolved.toml").unwrap(), resolved);
        let longer = requeued(&asked, &resolved, &tiny(&["lr=1e-3", "train.steps=900"])).unwrap();
        assert_eq!((longer.train.steps, longer.schedule.horizon_steps), (Some(900), None));
        assert_eq!(resolved.over(&longer).schedule.horizon_steps, own.train.steps);
        assert!(requeued(&asked, &resolved, &tiny(&["lr=2e-3"])).is_err());
    }

    #[test]
    fn runs_that_are_compared_differ_in_their_goal_alone() {
        let own = tiny(&["lr=1e-3", "eval.goal=1.6"]);
        let check = |words: &[&str]| check_compared(&own, &Resolved::default(), &tiny(words));
        check(&["lr=1e-3", "eval.goal=1.5", "checkpoint.every=7"]).unwrap();
        for (word, key) in [
            ("train.steps=900", "`train.steps` is 900 now"),
            ("train.patience=3", "`train.patience`"),
            ("eval.rows=7", "`eval.rows`"),
            ("eval.every=7", "`eval.every`"),
            ("lr=2e-3", "`optimizer.lr` is 0.002 now and was 0.001"),
        ] {
            let sentence = check(&["lr=1e-3", "eval.goal=1.6", word]).unwrap_err().0;
            assert!(sentence.contains(key) && sentence.contains("another --run"), "{word}: {sentence}");
        }
    }

    /// Earlier versions wrote values resolved from the data and the horizon into the run's config.
    #[test]
    fn runs_with_resolved_values_in_their_config_continue_with_the_same_command() {
        let pairs = |words: &[&str]| {
            resolve("gemma3-1b-pairs", &[], &words.iter().map(|w| w.to_string()).collect::<Vec<_>>()).unwrap()
        };
        let mut own = pairs(&[]);
        own.data.classes = vec!["no".into(), "yes".into()];
        own.data.lengths = vec![3, 9];
        own.schedule.horizon_steps = Some(200);
        (own.schedule.warmup_steps, own.schedule.warmup_share) = (20, None);
        let resumed = Resolved { classes: Some(own.data.classes.clone()), ..Resolved::default() };
        for resolved in [Resolved::default(), resumed] {
            assert_eq!(requeued(&own, &resolved, &pairs(&[])).unwrap(), own);
            let patient = requeued(&own, &resolved, &pairs(&["train.patience=3"])).unwrap();
            assert_eq!(patient.train.patience, Some(3));
            for (word, key) in [
                ("schedule.warmup_share=0.2", "`schedule.warmup_s"),
                ("data.classes=[yes,no]", "`data.classes`"),
                ("train.micro_batch=2", "`train.micro_batch`"),
            ] {
                let sentence = requeued(&own, &resolved, &pairs(&[word])).unwrap_err().0;
                assert!(sentence.contains(key), "{word}: {sentence}");
            }
        }
        let mut images = resolve("bdh-cifar10", &[], &[]).unwrap();
        images.data.decoded = vec![90, 32, 32];
        let asked = resolve("bdh-cifar10", &[], &[]).unwrap();
        assert_eq!(requeued(&images, &Resolved::default(), &asked).unwrap(), images);
    }
}
