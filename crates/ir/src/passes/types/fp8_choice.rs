//! Chooses the layers that gain from 8-bit products on a target. Quantising costs passes over memory that a small product does
//! not recover, and the cost depends on the operation that computes the tensor and on its other readers. So whole graphs are
//! priced, with and without a unit of layers in 8 bits, by the target's measured times, or by its roofline where there are
//! none.

use std::collections::BTreeSet;

use crate::cost;
use crate::passes::options::Options;
use crate::passes::state::{Reports, State};
use crate::passes::types::fp8::{Unit, units};
use crate::passes::{JOINED, Program, TYPED, add_copies, add_gathers, run};
use crate::plan::{Refusal, Role};
use crate::replay::without_dead;
use crate::target::Target;

/// A unit of layers, and its gain from 8 bits.
#[derive(Clone, Debug, PartialEq)]
pub struct Priced {
    pub names: BTreeSet<String>,
    pub products: usize,
    /// Seconds that 8 bits save per micro-batch with its update; negative where they cost more.
    pub gain_seconds: f64,
}

/// The units that gain from 8 bits and those that do not, each sorted by names.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Choice {
    pub gain: Vec<Priced>,
    pub lose: Vec<Priced>,
}

impl Choice {
    /// The names of the layers that gain, for `Options::fp8_layers`.
    pub fn layers(&self) -> BTreeSet<String> {
        self.gain.iter().flat_map(|unit| unit.names.iter().cloned()).collect()
    }
}

/// Prices the layers of a training program: starting from all in 8 bits, it removes the unit that gains least until every
/// remaining unit gains. `options` are those of a run in fp8.
pub fn choose(program: &Program, target: &Target, options: &Options) -> Result<Choice, Refusal> {
    if !program.role.is_grad() {
        return Ok(Choice::default());
    }
    let mut typed = State::new(program.role, program.graph.clone(), Reports::default());
    run(TYPED, &mut typed, options, target)?;
    let seconds = |taken: &[Unit]| -> Result<f64, Refusal> {
        let names: BTreeSet<String> = taken.iter().flat_map(|unit| unit.names.iter().cloned()).collect();
        let options = Options { fp8_layers: Some(names), ..options.clone() };
        let mut joined = typed.clone();
        run(JOINED, &mut joined, &options, target)?;
        let mut graphs = vec![(Role::GRAD, without_dead(&joined.graph))];
        graphs.extend(joined.apply.take().map(|apply| (Role::Apply, apply)));
        add_copies(&mut graphs, &joined.divided, &options);
        add_gathers(&mut graphs, &mut joined.divided, &options);
        let priced = graphs.iter().filter(|(role, _)| *role != Role::Derive);
        Ok(priced.map(|(_, g)| cost::of_graph(g, target).predicted_seconds).sum())
    };
    let mut taken = units(&typed.graph, typed.forward());
    let mut choice = Choice::default();
    while !taken.is_empty() {
        let with = seconds(&taken)?;
        let mut gains = vec![];
        for i in 0..taken.len() {
            let mut rest = taken.clone();
            rest.remove(i);
            gains.push(seconds(&rest)? - with);
        }
        let priced = |unit: &Unit, gain_seconds: f64| Priced {
            names: unit.names.clone(),
            products: unit.products.len(),
            gain_seconds,
        };
        let least = (0..gains.len()).min_by(|a, b| gains[*a].total_cmp(&gains[*b])).expect("a unit is left");
        if gains[least] > 0.0 {
            choice.gain = taken.iter().zip(gains).map(|(unit, gain)| priced(unit, gain)).collect();
            break;
        }
        choice.lose.push(priced(&taken.remove(least), gains[least]));
    }
    choice.lose.sort_by(|a, b| a.names.cmp(&b.names));
    Ok(choice)
}
