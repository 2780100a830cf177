//! Differentiation: turns a forward graph with results `loss` (a weighted sum) and `weight` into the graph of one micro-batch,
//! with forward and backward pass, and sums of gradients, loss and weight that accumulate over micro-batches.
//!
//! Results whose names begin with `sum.` are accumulated like the loss. Nothing is normalised here: `apply` does that once a
//! step, so any split into micro-batches gives the same update.

use std::collections::BTreeSet;

use crate::autodiff::gradients;
use crate::builder::{Builder, Tensor};
use crate::graph::{Class, Graph, Init, Slot, SlotId};
use crate::ops::Op;
use crate::ops::elementwise::Elementwise;
use crate::types::{DType, TensorType};

/// A graph whose first `forward` nodes are the forward pass.
#[derive(Clone, Debug, PartialEq)]
pub struct Trained {
    pub graph: Graph,
    pub forward: usize,
    /// The trained slots, each with the slot of its gradient sum.
    pub weights: Vec<(SlotId, SlotId)>,
}

pub const LOSS_SUM: &str = "carry.loss";
pub const WEIGHT_SUM: &str = "carry.weight";
/// The prefix of results that are accumulated over samples like the loss, and of the slots that accumulate them.
pub const SUM: &str = "sum.";
pub const CARRIED_SUM: &str = "carry.sum.";

/// The slot that accumulates a parameter's gradient.
pub fn gradient_path(weight: &str) -> String {
    format!("gradient.{weight}")
}

/// Excludes parameters from training; returns the number of tensors.
pub fn freeze(g: &mut Graph, paths: &BTreeSet<String>) -> usize {
    let frozen = |s: &&mut Slot| s.class == Class::Weight && paths.contains(&s.path);
    g.slots.iter_mut().filter(frozen).map(|s| s.class = Class::Frozen).count()
}

/// Adds the gradients of trained parameters, the loss and the weight of samples to their sums.
pub fn differentiate(g: &Graph) -> Trained {
    with_gradients(g, false)
}

/// Whether the gradient of a parameter is written instead of added to a sum. Those of vectors are small, and their last step is
/// often part of a launch that also adds.
pub(super) fn is_written(parameter: &Slot, one_run: bool) -> bool {
    one_run && parameter.ty.rank() >= 2
}

/// Adds the gradients of trained parameters, or writes them where nothing is added before or after.
pub(crate) fn with_gradients(g: &Graph, one_run: bool) -> Trained {
    let (loss, weight) = (g.result("loss").expect("a loss"), g.result("weight").expect("a weight"));
    let trained: Vec<(SlotId, _)> = g
        .ids()
        .filter_map(|id| match g.node(id).op {
            Op::Read { slot } if g.slot(slot).class == Class::Weight => Some((slot, id.out(0))),
            _ => None,
        })
        .collect();
    let forward = g.nodes.len();
    let b = Builder::from_graph(Graph { results: vec![], ..g.clone() });
    let (loss, weight) = (b.tensor(loss), b.tensor(weight));
    let wrt: Vec<_> = trained.iter().map(|(_, v)| b.tensor(*v)).collect();
    let one = b.fill(1.0, loss.dtype(), &[1]);
    let grads = gradients(&b, &[(loss, one)], &wrt);

    let mut sums: Vec<(SlotId, Tensor<'_>)> = vec![];
    for ((slot, _), grad) in trained.iter().zip(grads) {
        match sums.iter_mut().find(|(s, _)| s == slot) {
            Some((_, sum)) => *sum = *sum + grad,
            None => sums.push((*slot, grad)),
        }
    }
    let add_to = |path: &str, value: Tensor<'_>, replaces: bool| {
        let ty = value.ty();
        let slot = b.edit(|g| {
            g.add_slot(Slot { path: path.into(), ty, class: Class::Carry, init: Init::Zeros, part: None })
        });
        // Adds term by term onto the sum, so that each producer can add to it in place.
        let sum = b.at_path(path, || {
            let before = (!replaces).then(|| b.read(slot));
            let terms = before.into_iter().chain(terms(&b, value, forward));
            terms.reduce(|sum, term| sum + term).expect("a gradient has a term")
        });
        b.write(slot, sum);
        slot
    };
    let gradient = |(slot, grad): &(SlotId, Tensor<'_>)| {
        let parameter = b.with_graph(|g| g.slot(*slot).clone());
        (*slot, add_to(&gradient_path(&parameter.path), *grad, is_written(&parameter, one_run)))
    };
    let weights = sums.iter().map(gradient).collect();
    add_to(LOSS_SUM, loss, false);
    add_to(WEIGHT_SUM, weight, false);
    for (name, value) in &g.results {
        if let Some(name) = name.strip_prefix(SUM) {
            add_to(&format!("{CARRIED_SUM}{name}"), b.tensor(*value), false);
        }
    }
    Trained { graph: b.finish(), forward, weights }
}

/// The terms of a sum that the backward pass built.
fn terms<'g>(b: &'g Builder, value: Tensor<'_>, forward: usize) -> Vec<Tensor<'g>> {
    let node = value.source();
    match node.op {
        Op::Map { f: Elementwise::Add } if value.v.node.0 as usize >= forward => {
            node.ins.iter().flat_map(|v| terms(b, b.tensor(*v), forward)).collect()
        }
        _ => vec![b.tensor(value.v)],
    }
}

/// The type of a flat slot of `n` elements.
pub(super) fn flat(n: usize) -> TensorType {
    TensorType::new(DType::F32, [n])
}
