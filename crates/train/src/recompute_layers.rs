//! How many layers `recompute=full` or `wide` runs again: all, as many as `train.recompute_layers` says, or, where `recompute=auto` has
//! to go that far, the fewest that the memory asks for. The others keep what `cheap` keeps.

use flatout_ir::passes::recompute::layers_of;
use flatout_ir::{Options, PlanSet, Program, Recompute, Target, compile};

use crate::config::{Config, Count};
use crate::settle::{Chosen, Settled};
use crate::switches::Recompute as Switch;
use crate::{UserError, refuse};

pub const KEY: &str = "train.recompute_layers";

/// The number that is given, which only `recompute=full` and `wide` have a use for.
pub fn given(config: &Config) -> Result<Option<usize>, UserError> {
    let layers = config.train.recompute_layers.given();
    if let Some(layers) = layers
        && !matches!(config.switches.recompute, Switch::Full | Switch::Wide)
    {
        refuse!(
            "`{KEY}={layers}` is for `recompute=full` and `wide`, and recompute is {}: give one of them, or leave it out",
            config.switches.recompute
        );
    }
    Ok(layers)
}

/// The plans with as few layers run again as fit, where any number does; `settled` says how many that is.
pub fn fewest(programs: &[Program], target: &Target, settled: &mut Settled) -> Option<PlanSet> {
    let mut options = Options { recompute: Recompute::Full, ..settled.options.clone() };
    let mut with = |layers: Option<usize>| {
        options.recompute_layers = layers;
        compile(programs, target, &options).ok().map(|plans| (layers, plans))
    };
    // What the last layer makes is read at once: running it again frees nothing.
    let (mut too_few, mut enough) = (0, layers_of(&programs[0].graph.nodes).len().saturating_sub(1));
    let mut best = with(Some(enough)).filter(|_| enough > 0).or_else(|| with(None))?;
    while best.0.is_some() && too_few + 1 < enough {
        let middle = (too_few + enough) / 2;
        match with(Some(middle)) {
            Some(fits) => (best, enough) = (fits, middle),
            None => too_few = middle,
        }
    }
    (settled.options.recompute, settled.options.recompute_layers) = (Recompute::Full, best.0);
    let chosen =
        settled.chosen.iter_mut().find(|c| c.switch == "recompute").expect("auto says what it chose");
    (chosen.value, chosen.why) = ("full".into(), "keeping more does not fit the memory".into());
    if let Some(count) = best.0 {
        let why = "the fewest that fit the memory; the others keep more".into();
        settled.chosen.push(Chosen { switch: KEY, value: count.to_string(), why });
    }
    Some(best.1)
}

/// Writes down how many it was.
pub fn pin(settled: &Settled, config: &mut Config) {
    if let Some(layers) = settled.options.recompute_layers {
        config.train.recompute_layers = Count::Given(layers);
    }
}
