//! A program in compilation, and the reports of the passes so far.

use crate::graph::{Graph, SlotId};
use crate::passes::gradient::differentiate::Trained;
use crate::passes::gradient::shards::Divided;
use crate::plan::{PassReport, Refusal, Role};

#[derive(Clone, Debug)]
pub(super) struct State {
    pub role: Role,
    pub graph: Graph,
    /// Number of nodes of the forward pass, which come first, once gradients are taken.
    forward: usize,
    /// The trained slots and the slots of their gradient sums, once gradients are taken.
    weights: Vec<(SlotId, SlotId)>,
    /// The graph of the update, once there is one.
    pub apply: Option<Graph>,
    /// The slots of state that ranks divide, once there is an update.
    pub divided: Vec<Divided>,
    pub reports: Reports,
    pub pass: &'static str,
}

impl State {
    pub fn new(role: Role, graph: Graph, reports: Reports) -> State {
        State { role, graph, forward: 0, weights: vec![], apply: None, divided: vec![], reports, pass: "" }
    }

    /// Number of nodes of the forward pass, which come first; all nodes in a program without gradients.
    pub fn forward(&self) -> usize {
        if self.role.is_grad() { self.forward } else { self.graph.nodes.len() }
    }

    /// Moves the graph and its gradients out for a pass; `set_trained` moves them back.
    pub fn take_trained(&mut self) -> Trained {
        let (graph, weights) = (std::mem::take(&mut self.graph), std::mem::take(&mut self.weights));
        Trained { graph, forward: self.forward, weights }
    }

    pub fn set_trained(&mut self, trained: Trained) {
        Trained { graph: self.graph, forward: self.forward, weights: self.weights } = trained;
    }

    /// Replaces the graph, and the number of its forward nodes.
    pub fn set_graph(&mut self, graph: Graph, forward: usize) {
        (self.graph, self.forward) = (graph, forward);
    }

    /// Replaces the graph, and reports how many rewrites the pass made.
    pub fn rewrite(
        &mut self,
        (graph, count): (Graph, usize),
        did: impl FnOnce(usize) -> String,
    ) -> Result<(), Refusal> {
        self.graph = graph;
        self.report(count, || did(count));
        Ok(())
    }

    /// Reports for the pass that is running.
    pub fn report(&mut self, count: usize, did: impl FnOnce() -> String) {
        self.reports.add(self.role, self.pass, count, did);
    }
}

#[derive(Clone, Debug, Default)]
pub(super) struct Reports(pub Vec<PassReport>);

impl Reports {
    /// Adds a report unless `count` is 0.
    pub fn add(&mut self, role: Role, pass: &'static str, count: usize, did: impl FnOnce() -> String) {
        if count > 0 {
            self.0.push(PassReport { pass, role, count, did: did() });
        }
    }
}
