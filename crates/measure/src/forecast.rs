//! Forecasts a run before it starts, for `plan`: memory by layer and over the step, time by kind of work, the largest
//! micro-batch, and the cost or saving of every switch. All of it is arithmetic on compiled plans; nothing runs.

mod alternatives;
pub mod kept;
pub mod layers;
mod rows;
pub mod scaling;
pub mod timeline;

use flatout_ir::cost::Cost;
use flatout_ir::{Target, Work};
use rayon::prelude::*;

use flatout_train::config::Config;
use flatout_train::resolve::compile::Compiled;
use flatout_train::resolve::prediction;
use flatout_train::switches::Switches;

pub use alternatives::{Alternative, Outcome};
pub use layers::Layers;
pub use rows::Largest;
pub use timeline::Peak;

pub struct Forecast {
    pub step: Cost,
    /// The step's cost by kind of work.
    pub work: Vec<(Work, Cost)>,
    pub layers: Vec<Layers>,
    pub peak: Peak,
    /// The largest micro-batch for each setting of `recompute`.
    pub largest: Vec<Largest>,
    /// Every switch at every other value.
    pub alternatives: Vec<Alternative>,
}

/// Forecasts the plans of a config. `target_for` gives the target under other switches.
pub fn forecast(config: &Config, compiled: &Compiled, target_for: &dyn Fn(&Switches) -> Target) -> Forecast {
    let batch = config.train.batch;
    // Values that `auto` chose by memory are pinned, so that alternatives do the same work.
    let pinned = compiled.pinned(config);
    let mut jobs: Vec<Job<'_>> = rows::jobs(&pinned, compiled);
    jobs.extend(alternatives::jobs(&pinned, compiled, target_for));
    let (mut largest, mut alternatives) = (vec![], vec![]);
    for done in jobs.into_par_iter().with_max_len(1).map(|job| job()).collect::<Vec<Done>>() {
        match done {
            Done::Largest(one) => largest.push(one),
            Done::Alternative(one) => alternatives.extend(one),
        }
    }
    let work = prediction::step_by_work(compiled, batch);
    let step = prediction::step_cost(compiled, batch);
    let (layers, peak) = (layers::layers(&compiled.plans), timeline::describe(&compiled.plans));
    Forecast { step, work, layers, peak, largest, alternatives }
}

/// One or a few compilations, which run in parallel with other jobs.
type Job<'a> = Box<dyn FnOnce() -> Done + Send + 'a>;

enum Done {
    Largest(Largest),
    /// `None` where the value leads to the present plans.
    Alternative(Option<Alternative>),
}
