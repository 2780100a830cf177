//! Groups elementwise nodes of one shape into regions: one launch that runs tile by tile, so values inside stay in cache and
//! use no memory.

use std::collections::HashMap;

use crate::graph::{Class, Graph, Init, NodeId, Slot, SlotId, Value};
use crate::ops::Op;
use crate::ops::gated::Act;
use crate::passes::fuse::unit_axes::unit_axes;
use crate::passes::place::views;
use crate::replay::{Replay, users};

/// A region reads at most this many tensors, because each needs a tile.
const MAX_INPUTS: usize = 12;
const MAX_NODES: usize = 32;
/// Number of elements up to which values are small.
const FEW: usize = 4096;
/// The most launches between an activation and its slope in one region, such as a weight's gradient and a sum.
const NEAR: usize = 3;

/// Number of regions, and of the elementwise nodes inside them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gathered {
    pub regions: usize,
    pub nodes: usize,
    /// Number of elementwise nodes that stay single, with no neighbour to join.
    pub single: usize,
}

pub fn regions(g: &Graph) -> (Graph, Gathered) {
    let g = &early(&unit_axes(g));
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

/// Moves slot reads, constants, views of early values and small values up to their sources, so that they do not separate
/// elementwise neighbours.
fn early(g: &Graph) -> Graph {
    let mut at: Vec<u32> = vec![0; g.nodes.len()];
    for (id, node) in g.ids().zip(&g.nodes) {
        at[id.0 as usize] = match node.op {
            Op::Read { .. } | Op::Fill { .. } => 0,
            Op::Reshape { .. } | Op::Transpose { .. } | Op::Slice { .. } | Op::Broadcast { .. } => {
                at[node.ins[0].node.0 as usize]
            }
            // Inputs of few elements may be far away, because keeping them costs nothing. Exchanges stay in place.
            Op::Map { .. } => id.0,
            _ if node.op.kind().is_collective() => id.0,
            _ if node.outs.iter().all(|out| out.elements() <= FEW) => {
                node.ins.iter().map(|v| at[v.node.0 as usize]).max().unwrap_or(0)
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

/// Elementwise nodes in groups, by the index of each group's first node.
fn groups(g: &Graph) -> Vec<Vec<NodeId>> {
    let mut grouping = Grouping { g, groups: vec![], member: HashMap::new(), activated: HashMap::new() };
    let mut launches: Vec<usize> = vec![];
    for (id, node) in g.ids().zip(&g.nodes) {
        launches.push(launches.last().map_or(0, |n| n + is_launch(&node.op) as usize));
        let Op::Map { f } = node.op else { continue };
        let is_near = |first: NodeId| launches[id.0 as usize] - launches[first.0 as usize] <= NEAR;
        grouping.add(id, Act::with_slope(f).map(|act| (act, node.ins[0])), is_near);
    }
    grouping.groups
}

/// Groups of nodes. A node joins the groups of its inputs, all of them or one; a nearby activation and slope at the same input
/// also form a group.
struct Grouping<'a> {
    g: &'a Graph,
    groups: Vec<Vec<NodeId>>,
    member: HashMap<NodeId, usize>,
    activated: HashMap<(Act, Value), usize>,
}

impl Grouping<'_> {
    fn add(&mut self, id: NodeId, activation: Option<(Act, Value)>, is_near: impl Fn(NodeId) -> bool) {
        let mut of_inputs: Vec<usize> = vec![];
        for group in self.g.node(id).ins.iter().filter_map(|v| self.member.get(&v.node)) {
            if !of_inputs.contains(group) {
                of_inputs.push(*group);
            }
        }
        let beside = activation.and_then(|of| self.activated.get(&of)).copied();
        let beside = beside.filter(|group| is_near(self.groups[*group][0]));
        let candidates =
            [of_inputs.clone()].into_iter().chain(of_inputs.iter().chain(&beside).map(|one| vec![*one]));
        let joined = candidates.filter(|chosen| !chosen.is_empty()).find_map(|chosen| {
            let mut ids: Vec<NodeId> =
                chosen.iter().flat_map(|group| &self.groups[*group]).copied().collect();
            ids.push(id);
            ids.sort();
            self.may_be_one(&ids).then_some((chosen, ids))
        });
        let (group, ids) = match joined {
            None => {
                self.groups.push(vec![]);
                (self.groups.len() - 1, vec![id])
            }
            Some((chosen, ids)) => {
                chosen.iter().for_each(|group| self.groups[*group].clear());
                self.activated.values_mut().filter(|of| chosen.contains(of)).for_each(|of| *of = chosen[0]);
                (chosen[0], ids)
            }
        };
        ids.iter().for_each(|id| _ = self.member.insert(*id, group));
        self.groups[group] = ids;
        self.activated.extend(activation.map(|of| (of, group)));
    }

    /// Whether nodes, in order, can run in place of the first: all their outside inputs exist before it.
    fn may_be_one(&self, ids: &[NodeId]) -> bool {
        let dims = |id: &NodeId| &self.g.node(*id).outs[0].dims;
        let outside = outside(self.g, ids);
        ids.len() <= MAX_NODES
            && outside.len() <= MAX_INPUTS
            && outside.iter().all(|v| v.node < ids[0])
            && ids.iter().all(|id| dims(id) == dims(&ids[0]))
    }
}

fn is_launch(op: &Op) -> bool {
    !matches!(op, Op::Read { .. } | Op::Fill { .. } | Op::Map { .. }) && !views::is_movement(op)
}

/// The values that a set of nodes reads from outside, each once.
fn outside(g: &Graph, ids: &[NodeId]) -> Vec<Value> {
    let mut found = vec![];
    for v in ids.iter().flat_map(|id| &g.node(*id).ins) {
        if !ids.contains(&v.node) && !found.contains(v) {
            found.push(*v);
        }
    }
    found
}

/// Nodes as the body of a region with the outputs `outs`, and the values that it reads.
pub(super) fn body(g: &Graph, ids: &[NodeId], outs: &[Value]) -> (Graph, Vec<Value>) {
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
