//! Building a new graph from an old one node by node, as every rewriting pass does.

use std::collections::HashMap;

use crate::graph::{Graph, Node, NodeId, Slot, SlotId, SlotPart, Value};
use crate::ops::Op;

/// A rewrite in progress. Slots are carried over, so slot ids stay valid.
pub struct Replay<'a> {
    pub old: &'a Graph,
    pub new: Graph,
    /// The new value of each output of the old graph.
    map: Vec<Option<Value>>,
    /// Index in `map` of each old node's first output.
    starts: Vec<usize>,
}

impl<'a> Replay<'a> {
    pub fn new(old: &'a Graph) -> Self {
        let new = Graph { slots: old.slots.clone(), next_key: old.unused_key(), ..Graph::default() };
        let mut outs = 0;
        let starts = old.nodes.iter().map(|node| (outs, outs += node.outs.len()).0).collect();
        Replay { old, new, map: vec![None; outs], starts }
    }

    fn place(&self, old: Value) -> usize {
        self.starts[old.node.0 as usize] + old.out as usize
    }

    /// The new value of an old one.
    #[track_caller]
    pub fn get(&self, v: Value) -> Value {
        self.map[self.place(v)].unwrap_or_else(|| panic!("{v} is not rewritten yet"))
    }

    pub fn has(&self, v: Value) -> bool {
        self.map[self.place(v)].is_some()
    }

    pub fn set(&mut self, old: Value, new: Value) {
        let place = self.place(old);
        self.map[place] = Some(new);
    }

    /// Copies a node unchanged.
    pub fn copy(&mut self, id: NodeId) -> NodeId {
        let node = self.old.node(id);
        let ins: Vec<Value> = node.ins.iter().map(|v| self.get(*v)).collect();
        let is_typed_alike = |(old, new): (&Value, &Value)| self.old.ty(*old) == self.new.ty(*new);
        // Equal input types give equal output types, unless it reads a slot whose type has changed.
        if matches!(node.op, Op::Read { .. }) || !node.ins.iter().zip(&ins).all(is_typed_alike) {
            return self.copy_as(id, node.op.clone(), ins);
        }
        let Node { op, outs, path, key, .. } = node;
        let (op, outs, path) = (op.clone(), outs.clone(), path.clone());
        let new = self.new.push_typed(Node { op, ins, outs, path, key: *key });
        self.map_outputs(id, new);
        new
    }

    /// Copies a node with another operation or inputs; outputs correspond one for one.
    pub fn copy_as(&mut self, id: NodeId, op: Op, ins: Vec<Value>) -> NodeId {
        let node = self.old.node(id);
        let new = self.new.push_keyed(op, ins, &node.path, node.key);
        self.map_outputs(id, new);
        new
    }

    fn map_outputs(&mut self, old: NodeId, new: NodeId) {
        let outs = self.old.node(old).outs.len().min(self.new.node(new).outs.len());
        (0..outs as u8).for_each(|out| self.set(old.out(out), new.out(out)));
    }

    /// Appends a node at the path of an old one.
    pub fn add(&mut self, op: Op, ins: Vec<Value>, at: NodeId) -> Value {
        let path = self.old.node(at).path.clone();
        self.new.add(op, ins, &path)
    }

    /// Finishes the rewrite: carries writes and results over.
    pub fn finish(mut self) -> Graph {
        self.new.writes = self.old.writes.iter().map(|(s, v)| (*s, self.get(*v))).collect();
        self.new.results = self.old.results.iter().map(|(n, v)| (n.clone(), self.get(*v))).collect();
        self.new
    }
}

/// The graph without nodes that no write and no result depends on.
pub fn without_dead(g: &Graph) -> Graph {
    without_dead_before(g, 0).0
}

/// `without_dead`, and how many of the first `forward` nodes are left.
pub fn without_dead_before(g: &Graph, forward: usize) -> (Graph, usize) {
    let mut alive = vec![false; g.nodes.len()];
    for v in g.writes.iter().map(|(_, v)| v).chain(g.results.iter().map(|(_, v)| v)) {
        alive[v.node.0 as usize] = true;
    }
    for id in g.ids().rev() {
        if alive[id.0 as usize] {
            g.node(id).ins.iter().for_each(|v| alive[v.node.0 as usize] = true);
        }
    }
    let mut replay = Replay::new(g);
    for id in g.ids().filter(|id| alive[id.0 as usize]) {
        replay.copy(id);
    }
    (replay.finish(), alive[..forward].iter().filter(|is| **is).count())
}

/// Removes slots that nothing reads or writes, and joins slots of one path.
pub(crate) fn without_slots(g: &mut Graph, is_gone: impl Fn(&Slot) -> bool) {
    let mut by_path: HashMap<&str, SlotId> = HashMap::new();
    let mut slots: Vec<Slot> = vec![];
    let mut moved: Vec<Option<SlotId>> = vec![];
    for slot in &g.slots {
        let stays = !is_gone(slot);
        let id = stays.then(|| {
            *by_path.entry(&slot.path).or_insert_with(|| {
                slots.push(slot.clone());
                SlotId(slots.len() as u32 - 1)
            })
        });
        moved.push(id);
    }
    let moved = |id: SlotId| {
        let path = &g.slot(id).path;
        moved[id.0 as usize].unwrap_or_else(|| panic!("`{path}` is used and was removed"))
    };
    for slot in &mut slots {
        // A part of a removed slot is removed too.
        slot.part = slot.part.map(|part| SlotPart { of: moved(part.of), ..part });
    }
    let writes = g.writes.iter().map(|(slot, value)| (moved(*slot), *value)).collect();
    let reads = g.nodes.iter().map(|node| match node.op {
        Op::Read { slot } => Op::Read { slot: moved(slot) },
        _ => node.op.clone(),
    });
    let ops: Vec<Op> = reads.collect();
    g.nodes.iter_mut().zip(ops).for_each(|(node, op)| node.op = op);
    (g.slots, g.writes) = (slots, writes);
}

/// Each value's users: the nodes that take it as an input.
pub fn users(g: &Graph) -> HashMap<Value, Vec<NodeId>> {
    let mut users: HashMap<Value, Vec<NodeId>> = HashMap::new();
    for (id, node) in g.ids().zip(&g.nodes) {
        for v in &node.ins {
            users.entry(*v).or_default().push(id);
        }
    }
    users
}
