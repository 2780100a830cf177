//! A gradient that reads what a recomputed operation reads gives that operation's value as well: the inputs cross memory
//! once, not twice. Whoever reads the value, a weight's gradient, moves behind it.

use std::collections::{HashMap, HashSet};

use crate::graph::{Graph, NodeId, Value};
use crate::op::Op;
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
        let Op::GatedGrad { act, p, .. } = g.node(id).op else {
            unreachable!("pairs are of gated's gradient")
        };
        let ins = g.node(id).ins.iter().map(|v| replay.get(*v)).collect();
        let grad = replay.copy_as(id, Op::GatedGrad { act, again: true, p }, ins);
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
    let mut recomputed: HashMap<&[Value], (Op, u64, NodeId)> = HashMap::new();
    for (id, node) in g.ids().zip(&g.nodes) {
        if let Op::Gated { .. } = node.op
            && !known.insert(node.key)
        {
            recomputed.insert(&node.ins[..2], (node.op.clone(), node.key, id));
        }
    }
    let mut depends: HashSet<NodeId> = recomputed.values().map(|(.., id)| *id).collect();
    for (id, node) in g.ids().zip(&g.nodes) {
        if node.ins.iter().any(|v| depends.contains(&v.node)) {
            depends.insert(id);
        }
    }
    let mut pairs = HashMap::new();
    for (id, node) in g.ids().zip(&g.nodes).filter(|(id, _)| !depends.contains(id)) {
        let Op::GatedGrad { act, again: false, p } = node.op else { continue };
        // What is dropped is drawn by the key.
        let same =
            |(op, key, _): &(Op, u64, NodeId)| *op == Op::Gated { act, p } && (p == 0.0 || *key == node.key);
        if recomputed.get(&node.ins[..2]).is_some_and(same) {
            pairs.extend(recomputed.remove(&node.ins[..2]).map(|(.., again)| (id, again)));
        }
    }
    pairs
}
