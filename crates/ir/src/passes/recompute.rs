//! What the backward pass computes again instead of keeping. A recomputed node is a copy with the same key, placed
//! right before its first use, so the same bits come out and the value lives only there.

use std::collections::{HashMap, HashSet};

use crate::graph::{Graph, NodeId, Value};
use crate::op::Op;
use crate::ops::gated::Act;
use crate::ops::norm::NormSpec;
use crate::passes::options::Recompute;
use crate::replay::Replay;

/// Rewrites the backward pass; returns how many forward nodes run again.
pub fn recompute(g: &Graph, forward: usize, how: Recompute) -> (Graph, usize) {
    let mut replay = Replay::new(g);
    let mut again = Again { g, forward, how, boundary: boundary(g, forward), made: HashMap::new(), count: 0 };
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
        let ins: Vec<Value> = node.ins.iter().map(|v| self.value(replay, *v)).collect();
        let copy = replay.new.push_keyed(node.op.clone(), ins, &node.path, node.key);
        for out in 0..node.outs.len() as u8 {
            self.made.insert(v.node.out(out), copy.out(out));
        }
        self.count += !is_view(&node.op) as usize;
        self.made[&v]
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
                Op::QkNormRope { .. } | Op::Rope { .. } | Op::Gated { .. } => false,
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
