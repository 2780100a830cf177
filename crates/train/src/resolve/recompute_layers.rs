//! The number of layers that `recompute=full` or `wide` recomputes: all, the number in `train.recompute_layers`, or, if
//! `recompute=auto` has to recompute layers, the fewest that fit the memory. The other layers keep what `cheap` keeps.

use flatout_ir::passes::recompute::layers_of;
use flatout_ir::{Options, PlanSet, Program, Recompute, Target, compile};

use crate::UserError;
use crate::config::Config;
use crate::refuse;
use crate::switches::memory::RECOMPUTE;
use crate::switches::{Auto, Settled};

pub const KEY: &str = "train.recompute_layers";

/// The given number, which is valid only with `recompute=full` and `wide`.
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

/// The plans with the least recomputation that fits, if any fits; records the choice in `settled`. Recomputing only the wide
/// products of layers gives back most of their memory at half the price of whole layers, so it is tried first.
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

/// The fewest layers whose recomputation fits (`None` for all of them), and the plans.
fn fewest_of(programs: &[Program], target: &Target, options: &Options) -> Option<(Option<usize>, PlanSet)> {
    let with = |layers: Option<usize>| {
        let options = Options { recompute_layers: layers, ..options.clone() };
        compile(programs, target, &options).ok().map(|plans| (layers, plans))
    };
    // The values of the last layer are read right away: recomputing them frees nothing.
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
