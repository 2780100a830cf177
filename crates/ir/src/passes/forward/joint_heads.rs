//! Norms and rotates queries and keys that lie side by side in one pass over memory, with weights that then lie side by side as
//! well. Readers take slices, which cost nothing.

use std::collections::HashMap;

use crate::graph::{Graph, NodeId, SlotId, Value};
use crate::ops::Op;
use crate::passes::forward::merge::{reads, side_by_side};
use crate::passes::options::Update;
use crate::replay::{Replay, without_dead};

/// Heads that are normed and rotated.
struct Heads {
    node: NodeId,
    /// The tensor that has the heads as columns, and the column range.
    whole: Value,
    start: usize,
    heads: usize,
    size: usize,
    weight: SlotId,
}

/// Joins pairs of neighbours; returns their number.
pub fn joint_heads(g: &Graph, update: &Update) -> (Graph, usize) {
    let all: Vec<Heads> = g.ids().filter_map(|id| heads(g, id)).collect();
    let mut pairs: HashMap<NodeId, (&Heads, &Heads)> = HashMap::new();
    for a in &all {
        let is_next = |b: &&Heads| {
            a.whole == b.whole && a.start + a.heads * a.size == b.start && is_alike(g, a, b, update)
        };
        if let Some(b) = all.iter().find(is_next).filter(|_| !pairs.contains_key(&a.node)) {
            pairs.insert(a.node, (a, b));
            pairs.insert(b.node, (a, b));
        }
    }
    // Whatever reads one of two weights, in each application of a block, must read the other beside it.
    let reads = reads(g);
    let of_weights = |w: [SlotId; 2]| pairs.values().filter(|(a, b)| [a.weight, b.weight] == w).count() / 2;
    let is_whole = |a: &Heads, b: &Heads| {
        let w = [a.weight, b.weight];
        w.iter().all(|slot| reads[slot] == of_weights(w))
    };
    let pairs: HashMap<NodeId, (&Heads, &Heads)> =
        pairs.iter().filter(|(_, (a, b))| is_whole(a, b)).map(|(id, pair)| (*id, *pair)).collect();
    let mut wholes: HashMap<SlotId, SlotId> = HashMap::new();
    let mut replay = Replay::new(g);
    let mut joined = 0;
    for id in g.ids() {
        match pairs.get(&id) {
            None => _ = replay.copy(id),
            // The joint operation replaces the later of the two, where all inputs of both exist.
            Some((a, b)) if id == a.node.max(b.node) => {
                let weights = [a.weight, b.weight];
                let whole = *wholes.entry(a.weight).or_insert_with(|| side_by_side(&mut replay, &weights));
                join(&mut replay, a, b, whole);
                joined += 1;
            }
            Some(_) => {}
        }
    }
    (without_dead(&replay.finish()), joined)
}

/// The heads that a node norms and rotates, where they are columns of a wider tensor and the weight is a slot of its own.
fn heads(g: &Graph, id: NodeId) -> Option<Heads> {
    let node = g.node(id);
    let Op::QkNormRope { weight, first: 0, .. } = node.op else { return None };
    let Op::Read { slot } = g.node(node.ins[1].node).op else { return None };
    let is_own = weight.is_some() && g.slot(slot).part.is_none();
    let split = g.node(node.ins[0].node);
    let Op::Reshape { ref dims } = split.op else { return None };
    let columns = g.node(split.ins[0].node);
    let Op::Slice { axis: 1, start, len } = columns.op else { return None };
    let (heads, size) = (*dims.get(1)?, *dims.get(2)?);
    let is_split = is_own && g.dims(columns.ins[0]).len() == 2 && len == heads * size;
    is_split.then_some(Heads { node: id, whole: columns.ins[0], start, heads, size, weight: slot })
}

/// Whether both are rotated by the same angles, and their weights have the same update rule.
fn is_alike(g: &Graph, a: &Heads, b: &Heads, update: &Update) -> bool {
    let (one, other) = (g.node(a.node), g.node(b.node));
    let (w, v) = (g.slot(a.weight), g.slot(b.weight));
    let is_same = one.op == other.op && one.ins[2..] == other.ins[2..] && a.weight != b.weight;
    is_same && w.class == v.class && w.ty == v.ty && update.rule(&w.path, 1) == update.rule(&v.path, 1)
}

fn join(replay: &mut Replay<'_>, a: &Heads, b: &Heads, weight: SlotId) {
    let g = replay.old;
    let node = g.node(a.node);
    let (tokens, heads) = (g.dims(a.whole)[0], a.heads + b.heads);
    let w = replay.add(Op::Read { slot: weight }, vec![], a.node);
    let whole = replay.get(a.whole);
    let columns = Op::Slice { axis: 1, start: a.start, len: heads * a.size };
    let columns = replay.add(columns, vec![whole], a.node);
    let split = replay.add(Op::Reshape { dims: vec![tokens, heads, a.size] }, vec![columns], a.node);
    let mut op = node.op.clone();
    if let Op::QkNormRope { first, .. } = &mut op {
        *first = a.heads;
    }
    let rest = node.ins[2..].iter().map(|v| replay.get(*v));
    let ins = [split, w].into_iter().chain(rest).collect();
    let y = replay.add(op, ins, a.node);
    for (own, start) in [(a, 0), (b, a.heads)] {
        let slice = replay.add(Op::Slice { axis: 1, start, len: own.heads }, vec![y], own.node);
        replay.set(own.node.out(0), slice);
    }
}
