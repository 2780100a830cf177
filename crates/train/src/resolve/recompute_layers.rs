//! How many layers `recompute=full` or `wide` runs again: all, as many as `train.recompute_layers` says, or, where `recompute=auto` has
//! to go that far, the fewest that the memory asks for. The others keep what `cheap` keeps.

use flatout_ir::passes::recompute::layers_of;
use flatout_ir::{Options, PlanSet, Program, Recompute, Target, compile};

use crate::UserError;
use crate::config::Config;
use crate::refuse;
use crate::switches::memory::RECOMPUTE;
use crate::switches::{Auto, Settled};

pub const KEY: &str = "train.recompute_layers";

/// The number that is given, which only `recompute=full` and `wide` have a use for.
pub fn given(config: &Config) -> Result<Option<usize>, UserError> {
    let (layers, recompute) = (config.train.recompute_layers.given(), config.switches.memory.recompute);
    if let Some(layers) = layers
        && !matches!(recompute, Auto::Given(Recompute::Full | Recompute::Wide))
    {
        refuse!(
            "`{KEY}={layers}` is for `recompute=full` and `wide`, and recompute is {recompute}: give one of them, or leave it out"
        );
    }
    Ok(layers)
}

/// The plans with as little run again as fits, where anything does; `settled` says how much that is. Wide products of layers give
/// back most of their memory at half the price of whole layers, so these come first.
pub fn fewest(programs: &[Program], target: &Target, settled: &mut Settled) -> Option<PlanSet> {
    let (how, (layers, plans)) = [Recompute::Wide, Recompute::Full].into_iter().find_map(|how| {
        let options = Options { recompute: how, ..settled.options.clone() };
        Some((how, fewest_of(programs, target, &options)?))
    })?;
    (settled.options.recompute, settled.options.recompute_layers) = (how, layers);
    settled.choose(RECOMPUTE.name, how.name(), "keeping more does not fit the memory");
    if let Some(count) = layers {
        settled.choose(KEY, count.to_string(), "the fewest that fit the memory; the others keep more");
    }
    Some(plans)
}

/// The fewest layers whose recomputation fits, all of them where that is `None`, and the plans.
fn fewest_of(programs: &[Program], target: &Target, options: &Options) -> Option<(Option<usize>, PlanSet)> {
    let with = |layers: Option<usize>| {
        let options = Options { recompute_layers: layers, ..options.clone() };
        compile(programs, target, &options).ok().map(|plans| (layers, plans))
    };
    // Values that the last layer makes are read at once: running it again frees nothing.
    let (mut too_few, mut enough) = (0, layers_of(&programs[0].graph.nodes).len().saturating_sub(1));
    let mut best = with(Some(enough)).filter(|_| enough > 0).or_else(|| with(None))?;
    while best.0.is_some() && too_few + 1 < enough {
        let middle = (too_few + enough) / 2;
        match with(Some(middle)) {
            Some(fits) => (best, enough) = (fits, middle),
            None => too_few = middle,
        }
    }
    Some(best)
}
