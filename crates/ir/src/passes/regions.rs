//! Elementwise nodes of one shape become regions: one launch that runs tile by tile, so what flows inside stays in
//! cache and owns no memory.

use std::collections::HashMap;

use crate::graph::{Class, Graph, Init, NodeId, Slot, SlotId, Value};
use crate::op::Op;
use crate::replay::{Replay, users};

/// A region reads at most this many tensors: each needs a tile.
const MAX_INPUTS: usize = 12;
const MAX_NODES: usize = 32;

/// What was gathered: regions, and the elementwise nodes inside them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gathered {
    pub regions: usize,
    pub nodes: usize,
    /// Elementwise nodes that stand alone: nothing beside them to join.
    pub single: usize,
}

pub fn regions(g: &Graph) -> (Graph, Gathered) {
    let g = &early(g);
    let groups = groups(g);
    let users = users(g);
    let mut member: HashMap<NodeId, usize> = HashMap::new();
    for (i, group) in groups.iter().enumerate() {
        group.iter().for_each(|id| _ = member.insert(*id, i));
    }
    let is_read_outside = |v: Value, group: usize| {
        let ends = g.writes.iter().map(|(_, v)| v).chain(g.results.iter().map(|(_, v)| v));
        let by_nodes = users.get(&v).into_iter().flatten().any(|u| member.get(u) != Some(&group));
        by_nodes || ends.into_iter().any(|end| *end == v)
    };
    let mut gathered = Gathered::default();
    let mut replay = Replay::new(g);
    for id in g.ids() {
        let Some(&group) = member.get(&id) else {
            replay.copy(id);
            continue;
        };
        let ids = &groups[group];
        if ids.len() == 1 {
            replay.copy(id);
            gathered.single += 1;
        } else if ids[0] == id {
            let outs: Vec<Value> =
                ids.iter().map(|n| n.out(0)).filter(|v| is_read_outside(*v, group)).collect();
            let (body, ins) = body(g, ids, &outs);
            let ins = ins.iter().map(|v| replay.get(*v)).collect();
            let node = g.node(id);
            let region =
                replay.new.push_keyed(Op::Region { body: Box::new(body) }, ins, &node.path, node.key);
            for (i, out) in outs.iter().enumerate() {
                replay.set(*out, region.out(i as u8));
            }
            gathered.regions += 1;
            gathered.nodes += ids.len();
        }
    }
    (replay.finish(), gathered)
}

/// The same graph with slots, constants and views of early values moved up to where their source is, so that they do
/// not part elementwise neighbours.
fn early(g: &Graph) -> Graph {
    let mut at: Vec<u32> = vec![0; g.nodes.len()];
    for (id, node) in g.ids().zip(&g.nodes) {
        at[id.0 as usize] = match node.op {
            Op::Read { .. } | Op::Fill { .. } => 0,
            Op::Reshape { .. } | Op::Transpose { .. } | Op::Slice { .. } | Op::Broadcast { .. } => {
                at[node.ins[0].node.0 as usize]
            }
            _ => id.0,
        };
    }
    let mut order: Vec<NodeId> = g.ids().collect();
    order.sort_by_key(|id| (at[id.0 as usize], id.0));
    let mut replay = Replay::new(g);
    for id in order {
        replay.copy(id);
    }
    replay.finish()
}

/// Elementwise nodes in groups. A node joins the group of an input where all its other inputs exist before the
/// group's first node: the group can then run there, and nothing it needs comes later.
fn groups(g: &Graph) -> Vec<Vec<NodeId>> {
    let mut groups: Vec<Vec<NodeId>> = vec![];
    let mut member: HashMap<NodeId, usize> = HashMap::new();
    for (id, node) in g.ids().zip(&g.nodes) {
        if !matches!(node.op, Op::Map { .. }) {
            continue;
        }
        let joined = node.ins.iter().filter_map(|v| member.get(&v.node)).copied().find(|&group| {
            let ids = &groups[group];
            let fits = |v: &Value| v.node < ids[0] || member.get(&v.node) == Some(&group);
            let alike = g.node(ids[0]).outs[0].dims == node.outs[0].dims;
            alike
                && ids.len() < MAX_NODES
                && node.ins.iter().all(fits)
                && inputs_with(g, ids, id) <= MAX_INPUTS
        });
        let group = joined.unwrap_or_else(|| {
            groups.push(vec![]);
            groups.len() - 1
        });
        groups[group].push(id);
        member.insert(id, group);
    }
    groups
}

fn inputs_with(g: &Graph, ids: &[NodeId], extra: NodeId) -> usize {
    let all: Vec<NodeId> = ids.iter().copied().chain([extra]).collect();
    outside(g, &all).len()
}

/// The values a set of nodes reads from elsewhere, each once.
fn outside(g: &Graph, ids: &[NodeId]) -> Vec<Value> {
    let mut found = vec![];
    for v in ids.iter().flat_map(|id| &g.node(*id).ins) {
        if !ids.contains(&v.node) && !found.contains(v) {
            found.push(*v);
        }
    }
    found
}

fn body(g: &Graph, ids: &[NodeId], outs: &[Value]) -> (Graph, Vec<Value>) {
    let ins = outside(g, ids);
    let mut body = Graph::default();
    let mut made: HashMap<Value, Value> = HashMap::new();
    for (i, v) in ins.iter().enumerate() {
        let path = format!("in{i}");
        body.add_slot(Slot {
            path: path.clone(),
            ty: g.ty(*v).clone(),
            class: Class::Input,
            init: Init::Zeros,
            part: None,
        });
        made.insert(*v, body.add(Op::Read { slot: SlotId(i as u32) }, vec![], &path));
    }
    for id in ids {
        let node = g.node(*id);
        let args = node.ins.iter().map(|v| made[v]).collect();
        let copy = body.push_keyed(node.op.clone(), args, &node.path, node.key);
        made.insert(id.out(0), copy.out(0));
    }
    body.results = outs.iter().enumerate().map(|(i, v)| (format!("out{i}"), made[v])).collect();
    (body, ins)
}
