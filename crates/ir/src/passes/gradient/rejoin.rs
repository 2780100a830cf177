//! A gradient with the inputs of a recomputed operation also computes that operation's value, so the inputs cross memory once,
//! not twice. Readers of the value, such as a weight's gradient, move after it.

use std::collections::{HashMap, HashSet};

use crate::graph::{Graph, Node, NodeId, Value};
use crate::ops::Op;
use crate::ops::norm::{self, NormSpec};
use crate::ops::quantize::Source;
use crate::passes::readers::Readers;
use crate::replay::Replay;

/// Rewrites the backward pass; returns the number of operations recomputed inside a gradient.
pub fn rejoin(g: &Graph) -> (Graph, usize) {
    let pairs = pairs(g);
    let gone: HashSet<NodeId> = pairs.values().map(|joint| joint.again).collect();
    let mut replay = Replay::new(g);
    let mut waiting: Vec<NodeId> = vec![];
    for id in g.ids().filter(|id| !gone.contains(id)) {
        waiting.push(id);
        let is_ready = |replay: &Replay<'_>, id: &NodeId| g.node(*id).ins.iter().all(|v| replay.has(*v));
        while let Some(first) = waiting.iter().position(|id| is_ready(&replay, id)) {
            copy(&mut replay, waiting.remove(first), &pairs);
        }
    }
    (replay.finish(), pairs.len())
}

fn copy(replay: &mut Replay<'_>, id: NodeId, pairs: &HashMap<NodeId, Joint>) {
    let Some(joint) = pairs.get(&id) else {
        replay.copy(id);
        return;
    };
    let ins = replay.old.node(id).ins.iter().chain(&joint.further).map(|v| replay.get(*v)).collect();
    let new = replay.copy_as(id, joint.op.clone(), ins);
    replay.set(joint.again.out(0), new.out(joint.at));
}

/// A gradient and the recomputed operation that it absorbs.
struct Joint {
    /// The recomputed operation.
    again: NodeId,
    op: Op,
    /// Inputs of the operation that the gradient does not have.
    further: Vec<Value>,
    /// The output of the gradient that is the operation's value.
    at: u8,
}

/// Gradients and the recomputed operation that each absorbs.
fn pairs(g: &Graph) -> HashMap<NodeId, Joint> {
    let mut known = HashSet::new();
    let mut recomputed: HashMap<Value, Vec<NodeId>> = HashMap::new();
    let readers = Readers::new(g);
    for (id, node) in g.ids().zip(&g.nodes) {
        if matches!(node.op, Op::Gated { .. } | Op::RmsNorm { .. }) && !known.insert(node.key) {
            recomputed.entry(node.ins[0]).or_default().push(id);
        }
    }
    let Some(&first) = recomputed.values().flatten().min() else { return HashMap::new() };
    let mut pairs = HashMap::new();
    let mut made = Absorbed { first, at: HashMap::new() };
    for (id, node) in g.ids().zip(&g.nodes) {
        let Some(candidates) = node.ins.first().and_then(|v| recomputed.get_mut(v)) else { continue };
        let joins =
            |again: &NodeId| joint(g, node, *again).filter(|_| !is_better_apart(&readers, id, *again));
        let joint = candidates.iter().enumerate().find_map(|(i, again)| Some((i, joins(again)?)));
        // A gradient that depends on the value it would compute would be a cycle.
        if let Some((i, joint)) = joint
            && !made.depends(g, id, joint.again)
        {
            candidates.remove(i);
            made.at.insert(joint.again, id);
            pairs.insert(id, joint);
        }
    }
    pairs
}

/// Whether a norm that is only read in 8 bits is quantised in the same pass by itself, but not by its gradient, which would
/// store its rows.
fn is_better_apart(readers: &Readers<'_>, gradient: NodeId, again: NodeId) -> bool {
    let g = readers.g;
    let op = |id: NodeId| &g.node(id).op;
    let is_narrowed = |id: &NodeId| matches!(op(*id), Op::Quantize { current: false, .. });
    let is_only_narrowed = readers.sole(again.out(0)).is_some_and(|reader| is_narrowed(&reader));
    let Some((spec, add)) = NormSpec::of(op(gradient)).filter(|_| is_only_narrowed) else { return false };
    let takes = |of: Source| of.takes(g.ty(again.out(0)).last());
    let has_gradient_narrowed = readers.of(gradient).iter().any(is_narrowed);
    let joins = has_gradient_narrowed && takes(Source::NormGrad { spec, add, again: true });
    takes(Source::Norm(spec, false)) && !joins
}

/// The gradient `node` with the value of `again`, if it has the same inputs.
fn joint(g: &Graph, node: &Node, again: NodeId) -> Option<Joint> {
    let of = g.node(again);
    match (&node.op, &of.op) {
        (&Op::GatedGrad { act, again: false, p }, Op::Gated { .. }) => {
            let is_same = of.op == Op::Gated { act, p } && of.ins[..2] == node.ins[..2];
            // The key seeds a dropout mask.
            let is_drawn_alike = p == 0.0 || of.key == node.key;
            let op = Op::GatedGrad { act, again: true, p };
            (is_same && is_drawn_alike).then_some(Joint { again, op, further: vec![], at: 2 })
        }
        (&Op::RmsNormGrad { eps, center, weight, bias, add, again: false, sum }, Op::RmsNorm { .. }) => {
            let spec = NormSpec { eps, center, weight, bias };
            let shared = 1 + weight.is_some() as usize;
            let op = Op::RmsNormGrad { eps, center, weight, bias, add, again: true, sum };
            let at = norm::again_at(&op)? as u8;
            let is_same = of.op == spec.op(false) && of.ins[..shared] == node.ins[..shared];
            is_same.then(|| Joint { again, op, further: of.ins[shared..].to_vec(), at })
        }
        _ => None,
    }
}

/// The gradients that compute recomputed operations.
pub(in crate::passes) struct Absorbed {
    /// The first recomputed operation: no node before it depends on any.
    pub first: NodeId,
    /// The gradient that absorbed each.
    pub at: HashMap<NodeId, NodeId>,
}

impl Absorbed {
    /// Whether `id` depends on the value of `of`, directly or not.
    pub fn depends(&self, g: &Graph, id: NodeId, of: NodeId) -> bool {
        let mut seen = vec![false; g.nodes.len()];
        let mut open = vec![id];
        while let Some(at) = open.pop() {
            for v in g.node(*self.at.get(&at).unwrap_or(&at)).ins.iter().filter(|v| v.node >= self.first) {
                if v.node == of {
                    return true;
                }
                if !std::mem::replace(&mut seen[v.node.0 as usize], true) {
                    open.push(v.node);
                }
            }
        }
        false
    }
}
