//! A gradient that reads what a recomputed operation reads gives that operation's value as well: the inputs cross memory
//! once, not twice. Whoever reads the value, a weight's gradient, moves behind it.

use std::collections::{HashMap, HashSet};

use crate::graph::{Graph, NodeId, Value};
use crate::op::Op;
use crate::ops::gated::Act;
use crate::replay::Replay;

/// Rewrites the backward pass; returns how many operations run again inside a gradient.
pub fn rejoin(g: &Graph) -> (Graph, usize) {
    let joined = pairs(g);
    let gone: HashSet<NodeId> = joined.values().copied().collect();
    let mut replay = Replay::new(g);
    let mut waiting: Vec<NodeId> = vec![];
    for id in g.ids().filter(|id| !gone.contains(id)) {
        if !g.node(id).ins.iter().all(|v| replay.has(*v)) {
            waiting.push(id);
            continue;
        }
        let Some(again) = joined.get(&id) else {
            replay.copy(id);
            continue;
        };
        let Op::GatedGrad { act, .. } = g.node(id).op else { unreachable!("pairs are of gated's gradient") };
        let ins = g.node(id).ins.iter().map(|v| replay.get(*v)).collect();
        let grad = replay.copy_as(id, Op::GatedGrad { act, again: true }, ins);
        replay.set(again.out(0), grad.out(2));
        waiting.retain(|id| {
            let is_ready = g.node(*id).ins.iter().all(|v| replay.has(*v));
            if is_ready {
                replay.copy(*id);
            }
            !is_ready
        });
    }
    (replay.finish(), joined.len())
}

/// Gradients and the recomputed operation each takes over. A gradient that depends on a recomputed operation would wait
/// for itself, or for another that waits: it takes none over.
fn pairs(g: &Graph) -> HashMap<NodeId, NodeId> {
    let mut known = HashSet::new();
    let mut recomputed: HashMap<&[Value], (Act, NodeId)> = HashMap::new();
    for (id, node) in g.ids().zip(&g.nodes) {
        if let Op::Gated { act } = node.op
            && !known.insert(node.key)
        {
            recomputed.insert(&node.ins, (act, id));
        }
    }
    let mut depends: HashSet<NodeId> = recomputed.values().map(|(_, id)| *id).collect();
    for (id, node) in g.ids().zip(&g.nodes) {
        if node.ins.iter().any(|v| depends.contains(&v.node)) {
            depends.insert(id);
        }
    }
    let mut pairs = HashMap::new();
    for (id, node) in g.ids().zip(&g.nodes).filter(|(id, _)| !depends.contains(id)) {
        if let Op::GatedGrad { act, again: false } = node.op
            && recomputed.get(&node.ins[..2]).is_some_and(|(other, _)| *other == act)
        {
            pairs.extend(recomputed.remove(&node.ins[..2]).map(|(_, again)| (id, again)));
        }
    }
    pairs
}
