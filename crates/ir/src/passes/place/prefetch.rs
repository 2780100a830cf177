//! Moves each exchange directly after the last launch that computes its input, so that later launches that do not read its
//! output may overlap it.
//!
//! Gathers of weights are left where `gradient::gathers` put them: all of them could begin with the plan, which would then hold
//! all gathered weights at once.

use crate::graph::{Graph, NodeId};
use crate::ops::Op;
use crate::passes::place::views::is_movement;
use crate::replay::Replay;

/// The reordered graph, and the number of exchanges moved; `is_placed` excludes exchanges. A graph with none to move stays
/// unchanged.
pub fn prefetch(g: &Graph, is_placed: impl Fn(NodeId) -> bool) -> (Graph, usize) {
    let is_free = |id: &NodeId| g.node(*id).op.ways().is_some() && !is_placed(*id);
    let exchanges: Vec<NodeId> = g.ids().filter(is_free).collect();
    if exchanges.is_empty() {
        return (g.clone(), 0);
    }
    let mut ordered = Ordered { g, is_placed: vec![false; g.nodes.len()], order: vec![] };
    for id in g.ids() {
        for exchange in exchanges.iter().filter(|exchange| **exchange > id) {
            if !ordered.has(*exchange) && ordered.is_ready(*exchange) {
                ordered.place(*exchange);
            }
        }
        ordered.place(id);
    }
    let mut replay = Replay::new(g);
    ordered.order.into_iter().for_each(|id| _ = replay.copy(id));
    (replay.finish(), exchanges.len())
}

struct Ordered<'a> {
    g: &'a Graph,
    is_placed: Vec<bool>,
    order: Vec<NodeId>,
}

impl Ordered<'_> {
    fn has(&self, id: NodeId) -> bool {
        self.is_placed[id.0 as usize]
    }

    /// Whether all inputs of a node are computed, or are views of computed values.
    fn is_ready(&self, id: NodeId) -> bool {
        let is_there = |id: NodeId| {
            let op = &self.g.node(id).op;
            let is_free = matches!(op, Op::Read { .. } | Op::Fill { .. }) || is_movement(op);
            self.has(id) || (is_free && self.is_ready(id))
        };
        self.g.node(id).ins.iter().all(|v| is_there(v.node))
    }

    /// Places a node after its inputs.
    fn place(&mut self, id: NodeId) {
        if !self.has(id) {
            self.g.node(id).ins.iter().for_each(|v| self.place(v.node));
            self.is_placed[id.0 as usize] = true;
            self.order.push(id);
        }
    }
}
