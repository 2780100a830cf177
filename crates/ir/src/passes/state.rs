//! A program between two passes, and the reports of the passes behind it.

use crate::graph::{Graph, SlotId};
use crate::passes::gradient::differentiate::Trained;
use crate::passes::gradient::shards::Divided;
use crate::plan::{PassReport, Refusal, Role};

#[derive(Clone, Debug)]
pub(super) struct State {
    pub role: Role,
    pub graph: Graph,
    /// How many of the first nodes are the forward pass, once gradients are taken.
    forward: usize,
    /// The trained slots and the sums of their gradients, once they are taken.
    weights: Vec<(SlotId, SlotId)>,
    /// The graph of the update, once there is one.
    pub apply: Option<Graph>,
    /// The slots of state that ranks divide, once there is an update.
    pub divided: Vec<Divided>,
    pub reports: Reports,
    /// The pass that runs.
    pub pass: &'static str,
}

impl State {
    pub fn new(role: Role, graph: Graph, reports: Reports) -> State {
        State { role, graph, forward: 0, weights: vec![], apply: None, divided: vec![], reports, pass: "" }
    }

    /// How many of the first nodes are the forward pass: of a program without gradients, all.
    pub fn forward(&self) -> usize {
        if self.role.is_grad() { self.forward } else { self.graph.nodes.len() }
    }

    /// Hands the graph with its gradients to a pass that keeps account of both; `set_trained` takes it back.
    pub fn take_trained(&mut self) -> Trained {
        let (graph, weights) = (std::mem::take(&mut self.graph), std::mem::take(&mut self.weights));
        Trained { graph, forward: self.forward, weights }
    }

    pub fn set_trained(&mut self, trained: Trained) {
        Trained { graph: self.graph, forward: self.forward, weights: self.weights } = trained;
    }

    /// Takes a pass's graph and where its forward part ends.
    pub fn set_graph(&mut self, graph: Graph, forward: usize) {
        (self.graph, self.forward) = (graph, forward);
    }

    /// Takes a pass's graph and reports how often it found what it looks for.
    pub fn rewrite(
        &mut self,
        (graph, count): (Graph, usize),
        did: impl FnOnce(usize) -> String,
    ) -> Result<(), Refusal> {
        self.graph = graph;
        self.say(count, || did(count));
        Ok(())
    }

    /// Reports for the pass that runs.
    pub fn say(&mut self, count: usize, did: impl FnOnce() -> String) {
        self.reports.say(self.role, self.pass, count, did);
    }
}

#[derive(Clone, Debug, Default)]
pub(super) struct Reports(pub Vec<PassReport>);

impl Reports {
    /// A pass that found nothing says nothing.
    pub fn say(&mut self, role: Role, pass: &'static str, count: usize, did: impl FnOnce() -> String) {
        if count > 0 {
            self.0.push(PassReport { pass, role, count, did: did() });
        }
    }
}
