//! Plans a recipe and reports on the plan, for this machine or a GPU that need not be here, for one rank or several.

mod object;
pub mod world;

use std::collections::BTreeMap;

use flatout_ir::Target;
use flatout_train::Config;
use flatout_train::Failure;
use flatout_train::device::{self, Device, Facts, attention_kernels, gpus};
use flatout_train::resolve::compile::{self, Compiled};
use flatout_train::resolve::fit::{Fit, fit};
use flatout_train::resolve::tower;
use flatout_train::switches::Switches;

use crate::forecast::{Forecast, forecast};
pub use object::object;
use world::World;

/// The devices that a plan is made for; by default those of this machine.
#[derive(Clone, Debug, Default)]
pub struct PlanRequest {
    /// A GPU by name, which need not be here.
    pub gpu: Option<String>,
    /// GPUs per node, one rank each.
    pub gpus: Option<usize>,
    /// With `gpus`: the number of such nodes.
    pub nodes: Option<usize>,
    /// With `gpus`: the link between the GPUs of a node, where it is not the default.
    pub link: Option<String>,
    /// With `nodes`: the network between them.
    pub net: Option<String>,
    /// Ranks on CPUs.
    pub ranks: Option<usize>,
    /// The presets of the config, one of which may name a GPU.
    pub with: Vec<String>,
}

/// A plan and everything reported about it.
pub struct PlanReport<'a> {
    pub config: &'a Config,
    pub compiled: Compiled,
    pub forecast: Forecast,
    /// The kernels attention may run on, by direction.
    pub attention: BTreeMap<&'static str, Vec<&'static str>>,
    pub on_paper: Option<OnPaper>,
    /// The forecast of cached image features, where the config caches them.
    pub features: Option<tower::Forecast>,
    /// Present for several ranks.
    pub world: Option<world::RanksReport>,
}

/// The fit on a GPU that need not be here.
pub struct OnPaper {
    pub name: String,
    pub fits: bool,
    pub largest: Option<usize>,
    pub bytes: u64,
}

/// Plans a recipe and runs nothing.
pub fn report<'a>(config: &'a Config, request: &PlanRequest) -> Result<PlanReport<'a>, Failure> {
    let on_paper = request.on_paper();
    let world = World::of(request, config, on_paper)?;
    Ok(match on_paper {
        Some(name) => {
            let alone = device::named(name, &config.switches)?;
            let Fit { compiled, fits, largest } = fit(config, &world.target(alone.clone())?)?;
            let bytes = compiled.plans.arena_bytes as u64 + compiled.target.bytes_beside();
            let target_for = |switches: &_| {
                let named = device::named(name, switches).expect("it is in the table");
                world.target(named).expect("its links were found")
            };
            let on_paper = OnPaper { name: name.into(), fits, largest, bytes };
            let of_world = world.told(config, &compiled, &alone);
            let facts = gpus::find(name).map(gpus::facts);
            PlanReport {
                world: of_world,
                ..PlanReport::new(config, compiled, &target_for, facts, Some(on_paper))?
            }
        }
        None => {
            let device = Device::open(config.switches.compute.backend)?;
            let alone = device.target(&config.switches);
            let compiled = compile::compile(config, &world.target(alone.clone())?)?;
            let target_for =
                |switches: &_| world.target(device.target(switches)).expect("its links were found");
            let of_world = world.told(config, &compiled, &alone);
            PlanReport {
                world: of_world,
                ..PlanReport::new(config, compiled, &target_for, device.facts(), None)?
            }
        }
    })
}

impl<'a> PlanReport<'a> {
    fn new(
        config: &'a Config,
        compiled: Compiled,
        target_for: &dyn Fn(&Switches) -> Target,
        facts: Option<Facts>,
        on_paper: Option<OnPaper>,
    ) -> Result<PlanReport<'a>, Failure> {
        let forecast = forecast(config, &compiled, target_for);
        let largest = compiled.capacities[0].largest_image;
        let features = tower::forecast(config, &compiled.target, largest, forecast.step.predicted_seconds)?;
        let attention = facts.map(|facts| attention_kernels(&compiled.plans, &facts, &compiled.settled));
        let attention = attention.unwrap_or_default();
        Ok(PlanReport { config, compiled, forecast, attention, on_paper, features, world: None })
    }
}

impl PlanRequest {
    /// The GPU named by `gpu`, or by a preset where this machine has none.
    fn on_paper(&self) -> Option<&str> {
        let preset = || self.with.iter().rev().find(|name| gpus::find(name).is_some());
        self.gpu.as_ref().or_else(|| preset().filter(|_| !device::has_gpu())).map(String::as_str)
    }
}
