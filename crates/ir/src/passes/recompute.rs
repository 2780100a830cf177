//! What the backward pass computes again instead of keeping. A recomputed node is a copy with the same key, placed
//! right before its first use, so the same bits come out and the value lives only there.

use std::collections::{HashMap, HashSet};

use crate::graph::{Graph, Node, NodeId, Value};
use crate::op::Op;
use crate::ops::elementwise::Elementwise as E;
use crate::ops::gated::Act;
use crate::ops::norm::NormSpec;
use crate::passes::adapters;
use crate::passes::options::Recompute;
use crate::replay::{Replay, users};

/// Rewrites the backward pass; returns how many forward nodes run again.
pub fn recompute(g: &Graph, forward: usize, how: Recompute) -> (Graph, usize) {
    let mut replay = Replay::new(g);
    let mut again = Again {
        g,
        forward,
        how,
        boundary: boundary(g, forward),
        unscaled: unscaled(g, forward),
        made: HashMap::new(),
        count: 0,
    };
    for id in g.ids() {
        if (id.0 as usize) < forward || how == Recompute::None {
            replay.copy(id);
        } else {
            let ins = g.node(id).ins.iter().map(|v| again.value(&mut replay, *v)).collect();
            replay.copy_as(id, g.node(id).op.clone(), ins);
        }
    }
    let count = again.count;
    (replay.finish(), count)
}

struct Again<'a> {
    g: &'a Graph,
    forward: usize,
    how: Recompute,
    boundary: HashSet<Value>,
    unscaled: HashMap<Value, (Value, Value)>,
    made: HashMap<Value, Value>,
    count: usize,
}

impl Again<'_> {
    /// The value a backward node reads in place of `v`.
    fn value(&mut self, replay: &mut Replay<'_>, v: Value) -> Value {
        if v.node.0 as usize >= self.forward || self.is_kept(v) {
            return replay.get(v);
        }
        if let Some(made) = self.made.get(&v) {
            return *made;
        }
        let node = self.g.node(v.node);
        // The normed output of an addition and norm comes from the sum where that is kept.
        if let Some((spec, true)) = NormSpec::of(&node.op)
            && matches!(node.op, Op::RmsNorm { .. })
            && self.is_kept(v.node.out(1))
        {
            let ins = [v.node.out(1)].iter().chain(&node.ins[2..]).map(|v| replay.get(*v)).collect();
            let copy = replay.new.push_keyed(spec.op(false), ins, &node.path, node.key);
            self.made.insert(v, copy.out(0));
            self.count += 1;
            return copy.out(0);
        }
        if let (Recompute::Cheap, Some(&(scaled, row))) = (self.how, self.unscaled.get(&v)) {
            let made = self.unscale(replay, v, scaled, row);
            self.made.insert(v, made);
            return made;
        }
        let ins: Vec<Value> = node.ins.iter().map(|v| self.value(replay, *v)).collect();
        let copy = replay.new.push_keyed(node.op.clone(), ins, &node.path, node.key);
        for out in 0..node.outs.len() as u8 {
            self.made.insert(v.node.out(out), copy.out(out));
        }
        self.count += !is_view(&node.op) as usize;
        self.made[&v]
    }

    /// The value that was scaled by a row, from what came of it.
    fn unscale(&mut self, replay: &mut Replay<'_>, v: Value, scaled: Value, row: Value) -> Value {
        let (node, dtype) = (self.g.node(row.node), self.g.ty(row).dtype);
        self.count += 1;
        let (row, mut value) = (self.value(replay, node.ins[0]), self.value(replay, scaled));
        let mut add = |op: Op, ins: Vec<Value>| replay.add(op, ins, v.node);
        let inverse = add(Op::Map { f: E::Recip }, vec![row]);
        let inverse = add(node.op.clone(), vec![inverse]);
        if self.g.ty(scaled).dtype != dtype {
            value = add(Op::Map { f: E::Cast(dtype) }, vec![value]);
        }
        let value = add(Op::Map { f: E::Mul }, vec![value, inverse]);
        match self.g.ty(v).dtype {
            same if same == dtype => value,
            other => add(Op::Map { f: E::Cast(other) }, vec![value]),
        }
    }

    fn is_kept(&self, v: Value) -> bool {
        let node = self.g.node(v.node);
        match node.op {
            Op::Read { .. } | Op::Fill { .. } | Op::Iota { .. } => return true,
            // A loss computed in the forward pass already holds its gradients.
            Op::HeadLossTrain { .. } => return true,
            _ => {}
        }
        match self.how {
            Recompute::None => true,
            Recompute::Cheap if is_view(&node.op) => self.is_kept(node.ins[0]),
            Recompute::Cheap => match node.op {
                Op::RmsNorm { residual, .. } => residual && v.out == 1,
                Op::QkNormRope { .. } | Op::Rope { .. } | Op::Gated { .. } | Op::Dropout { .. } => false,
                _ if self.unscaled.contains_key(&v) => false,
                Op::Map { f } => Act::of(f).is_none(),
                _ => true,
            },
            Recompute::Full => layer_of(&node.path).is_none() || self.boundary.contains(&v),
        }
    }
}

fn is_view(op: &Op) -> bool {
    matches!(op, Op::Reshape { .. } | Op::Transpose { .. } | Op::Slice { .. } | Op::Broadcast { .. })
}

/// What adapters scaled by a row: the value before, and after it with the row as it is repeated. One of the two is kept,
/// and the other follows from it inside whatever elementwise operation reads it.
fn unscaled(g: &Graph, forward: usize) -> HashMap<Value, (Value, Value)> {
    let users = users(g);
    let cast = |v: Value| matches!(g.node(v.node).op, Op::Map { f: E::Cast(_) });
    let scales = |node: &Node| {
        let by = node.ins.get(1).map(|v| g.node(v.node));
        let is_row = by.is_some_and(|by| matches!(by.op, Op::Broadcast { .. }) && g.dims(by.ins[0])[0] == 1);
        matches!(node.op, Op::Map { f: E::Mul }) && is_row && node.path.ends_with(adapters::NODES)
    };
    let mut found = HashMap::new();
    for id in (0..forward as u32).map(NodeId).filter(|id| scales(g.node(*id))) {
        let [before, row] = g.node(id).ins[..] else { continue };
        let before = if cast(before) { g.node(before.node).ins[0] } else { before };
        let rounded = users.get(&id.out(0)).and_then(|u| u.iter().map(|u| u.out(0)).find(|v| cast(*v)));
        found.insert(before, (rounded.unwrap_or(id.out(0)), row));
    }
    found
}

/// Values that one layer makes and another reads. Where the reader is an addition fused with a norm, the sum stands
/// for both of its terms: one tensor a layer is kept, not two.
fn boundary(g: &Graph, forward: usize) -> HashSet<Value> {
    let layer: Vec<Option<&str>> = g.nodes[..forward].iter().map(|n| layer_of(&n.path)).collect();
    let mut boundary = HashSet::new();
    for id in (0..forward as u32).map(NodeId) {
        let node = g.node(id);
        let crosses = |v: &&Value| layer[v.node.0 as usize] != layer[id.0 as usize];
        match node.op {
            Op::RmsNorm { residual: true, .. } if node.ins[..2].iter().any(|v| crosses(&v)) => {
                boundary.insert(id.out(1));
            }
            _ => boundary.extend(node.ins.iter().filter(crosses)),
        }
    }
    boundary
}

/// The path up to its first number: `layers.3.attn.wq` lies in `layers.3`.
pub(super) fn layer_of(path: &str) -> Option<&str> {
    let mut end = 0;
    for piece in path.split('.') {
        end += piece.len();
        if !piece.is_empty() && piece.bytes().all(|b| b.is_ascii_digit()) {
            return Some(&path[..end]);
        }
        end += 1;
    }
    None
}
