//! When exchanges begin: each right behind the last launch that makes something of what it sends, so that all that comes later
//! and does not read what it brings may run beside it. Gathers of weights could all begin with the plan, which would then hold
//! all of them: they have their places already (`gradient::gathers`).

use crate::graph::{Graph, NodeId};
use crate::ops::Op;
use crate::passes::place::views::is_movement;
use crate::replay::Replay;

/// The graph in this order, and how many exchanges it has that had no place. A graph without any stays as it is.
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

    /// Whether all that a node reads is computed, or is a view of what is.
    fn is_ready(&self, id: NodeId) -> bool {
        let is_there = |id: NodeId| {
            let op = &self.g.node(id).op;
            let is_free = matches!(op, Op::Read { .. } | Op::Fill { .. }) || is_movement(op);
            self.has(id) || (is_free && self.is_ready(id))
        };
        self.g.node(id).ins.iter().all(|v| is_there(v.node))
    }

    /// Places a node behind what it reads.
    fn place(&mut self, id: NodeId) {
        if !self.has(id) {
            self.g.node(id).ins.iter().for_each(|v| self.place(v.node));
            self.is_placed[id.0 as usize] = true;
            self.order.push(id);
        }
    }
}
