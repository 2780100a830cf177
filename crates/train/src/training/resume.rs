//! Starting a run again with the command that began it: the one line for batch systems that requeue.

use crate::UserError;
use crate::config::Config;
use crate::config::resolved::Resolved;
use crate::refuse;
use crate::resolve::fp8_layers;
use crate::switches::Auto;
use crate::weights::pretrained;

/// The config a run goes on with when `asked` is given anew: its `own`, with what may change taken from `asked`. What the
/// run has `resolved` may be left open in both.
pub fn requeued(own: &Config, resolved: &Resolved, asked: &Config) -> Result<Config, UserError> {
    let changed = |config: &Config| {
        let mut config = config.clone();
        (config.train.steps, config.train.epochs) = (asked.train.steps, asked.train.epochs);
        (config.train.on_nonfinite, config.train.max_skipped) =
            (asked.train.on_nonfinite, asked.train.max_skipped);
        (config.eval, config.checkpoint, config.log) =
            (asked.eval.clone(), asked.checkpoint.clone(), asked.log.clone());
        config
    };
    let (goes_on, own) = (changed(own), &resolved.over(own));
    let config = changed(own);
    let mut comparable = asked.clone();
    // What the run's own config has pinned may still be open in the command.
    comparable.schedule.horizon_steps = config.schedule.horizon_steps;
    if comparable.train.micro_batch().is_none() {
        comparable.train.micro_batch = config.train.micro_batch;
    }
    if comparable.switches.memory.recompute == Auto::Auto {
        comparable.switches.memory.recompute = config.switches.memory.recompute;
        comparable.train.recompute_layers = config.train.recompute_layers;
    }
    if comparable.data.lengths.is_empty() {
        comparable.data.lengths = config.data.lengths.clone();
    }
    if fp8_layers::is_auto(&comparable) {
        comparable.train.fp8_layers = config.train.fp8_layers.clone();
    }
    if let (Some(began), Some(now)) = (own.model.from(), asked.model.from())
        && pretrained::same(began, now)
    {
        *comparable.model.from_mut() = own.model.from().cloned();
        comparable.data.tokenizer = own.data.tokenizer.clone();
    }
    if comparable != config {
        refuse!(
            "the run that is there was begun with other settings than these: give the same, or another --run (steps, \
             eval, checkpoint and log may differ)"
        );
    }
    Ok(goes_on)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipes::resolve;

    fn tiny(overrides: &[&str]) -> Config {
        resolve("tiny", &[], &overrides.iter().map(|o| o.to_string()).collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn the_same_command_goes_on_and_another_does_not() {
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
        // The same where what was asked for and what it came to lie apart.
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
}
