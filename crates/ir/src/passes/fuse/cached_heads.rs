//! Writes keys and values to their caches in the operation that norms and rotates queries and keys. For the few tokens of a
//! decoding step the two separate launches take longer than what they move.

use std::collections::{HashMap, HashSet};

use crate::graph::{Graph, Node, NodeId, Value};
use crate::ops::cached_qk_norm_rope::MOST_TOKENS;
use crate::ops::{Op, OpKind};
use crate::passes::readers::Readers;
use crate::replay::Replay;
use crate::target::Target;

/// Fuses the rotations whose keys are cached, with the values beside them, where the target has a kernel for it; returns their
/// number.
pub fn cached_heads(g: &Graph, target: &Target) -> (Graph, usize) {
    let has_kernel = |group: &Group| {
        let dtype = g.ty(group.values).dtype;
        target.kernel(OpKind::CachedQkNormRope, dtype).is_some()
    };
    let readers = Readers::new(g);
    let groups = g.ids().filter_map(|id| group(&readers, id)).filter(has_kernel);
    let groups: HashMap<NodeId, Group> = groups.map(|group| (group.last(), group)).collect();
    let gone: HashSet<NodeId> = groups.values().flat_map(Group::nodes).collect();
    let mut replay = Replay::new(g);
    for id in g.ids() {
        if let Some(group) = groups.get(&id) {
            let ins = group.ins(g).into_iter().map(|v| replay.get(v)).collect();
            let joint = replay.new.push_keyed(group.op.clone(), ins, &g.node(id).path, g.node(id).key);
            let outs = [group.queries, group.scatters[0], group.scatters[1]];
            outs.iter().zip(0..).for_each(|(old, out)| replay.set(old.out(0), joint.out(out)));
        } else if !gone.contains(&id) {
            replay.copy(id);
        }
    }
    (replay.finish(), groups.len())
}

/// A rotation of queries and keys, and what it is fused with.
struct Group {
    op: Op,
    rotation: NodeId,
    /// The slices of the rotated heads.
    queries: NodeId,
    keys: NodeId,
    /// The replacements of rows of the caches of keys and values.
    scatters: [NodeId; 2],
    values: Value,
}

impl Group {
    fn nodes(&self) -> [NodeId; 5] {
        let [k, v] = self.scatters;
        [self.rotation, self.queries, self.keys, k, v]
    }

    /// Where all inputs exist.
    fn last(&self) -> NodeId {
        self.nodes().into_iter().max().expect("five nodes")
    }

    fn ins(&self, g: &Graph) -> Vec<Value> {
        let [k, v] = self.scatters.map(|id| g.node(id));
        [&g.node(self.rotation).ins[..], &[self.values, k.ins[0], v.ins[0], k.ins[2]]].concat()
    }
}

/// The group of an attention over cached keys and values.
fn group(readers: &Readers<'_>, attention: NodeId) -> Option<Group> {
    let g = readers.g;
    let Node { op: Op::Attention { .. }, ins, .. } = g.node(attention) else { return None };
    let scatters = [ins[1].node, ins[2].node];
    let [k, v] = scatters.map(|id| g.node(id));
    let is_scatter = |node: &Node| matches!(node.op, Op::RowScatter {});
    if !is_scatter(k) || !is_scatter(v) || scatters[0] == scatters[1] || k.ins[2] != v.ins[2] {
        return None;
    }
    let (queries, keys, values) = (ins[0].node, k.ins[1].node, v.ins[1]);
    let rotation = g.node(keys).ins.first()?.node;
    let &Op::QkNormRope { eps, weight, first: first @ 1.., freq, ref axis_of_freq, pairs, table } =
        &g.node(rotation).op
    else {
        return None;
    };
    let heads = g.dims(rotation.out(0))[1];
    let is_slice = |id: NodeId, from: usize, count: usize| {
        let node = g.node(id);
        node.op == Op::Slice { axis: 1, start: from, len: count } && node.ins[0] == rotation.out(0)
    };
    let op =
        Op::CachedQkNormRope { eps, weight, first, freq, axis_of_freq: axis_of_freq.clone(), pairs, table };
    let group = Group { op, rotation, queries, keys, scatters, values };
    let last = group.last();
    // Nothing else reads the rotated heads, and whatever reads the results comes after the last input.
    let is_sole = |id: NodeId, reader: NodeId| readers.sole(id.out(0)) == Some(reader);
    let is_late = |id: &NodeId| readers.of(*id).iter().all(|reader| *reader > last);
    let is_joint = is_slice(queries, 0, first)
        && is_slice(keys, first, heads - first)
        && readers.of_value(rotation.out(0)).1 == 2
        && is_sole(queries, attention)
        && is_sole(keys, scatters[0])
        && scatters.iter().all(is_late);
    let is_alike = g.dims(values) == g.dims(keys.out(0)) && g.ty(values).dtype == g.ty(keys.out(0)).dtype;
    (is_joint && is_alike && g.dims(values)[0] <= MOST_TOKENS).then_some(group)
}
