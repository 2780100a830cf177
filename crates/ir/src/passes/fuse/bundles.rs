//! Bundles small elementwise nodes that only the end of a plan reads into one launch: a micro-batch adds the gradients of every
//! norm and bias to their sums, and separate launches would take longer to start than to run.

use std::collections::{HashMap, HashSet};

use crate::graph::{Class, Graph, Init, NodeId, Slot, SlotId, Value};
use crate::ops::Op;
use crate::passes::fuse::regions;
use crate::passes::place::views;
use crate::region;
use crate::replay::{Replay, users};

/// The most elements of a small tensor.
const SMALL: usize = 1 << 15;
/// The most tensors per launch: each is an argument, and arguments are limited to 4 KiB.
const MOST_TENSORS: usize = 300;

/// Number of bundles, and of the regions and single nodes inside them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bundled {
    pub bundles: usize,
    pub nodes: usize,
}

pub fn bundles(g: &Graph) -> (Graph, Bundled) {
    let (mut chunks, mut tensors): (Vec<Vec<NodeId>>, usize) = (vec![], 0);
    for id in ends(g) {
        let count = g.node(id).ins.len() + g.node(id).outs.len();
        if chunks.is_empty() || tensors + count > MOST_TENSORS {
            chunks.push(vec![]);
            tensors = 0;
        }
        tensors += count;
        chunks.last_mut().expect("there is one").push(id);
    }
    chunks.retain(|chunk| chunk.len() > 1);
    let moved: HashSet<NodeId> = chunks.iter().flatten().copied().collect();
    let mut replay = Replay::new(g);
    for id in g.ids().filter(|id| !moved.contains(id)) {
        replay.copy(id);
    }
    for chunk in &chunks {
        bundle(&mut replay, chunk);
    }
    (replay.finish(), Bundled { bundles: chunks.len(), nodes: moved.len() })
}

/// Small elementwise nodes that no node reads and that may run last: only they themselves overwrite the slots that they read.
fn ends(g: &Graph) -> Vec<NodeId> {
    let users = users(g);
    let mut written: HashMap<SlotId, Vec<(SlotId, NodeId)>> = HashMap::new();
    for (slot, v) in &g.writes {
        written.entry(root(g, *slot)).or_default().push((*slot, v.node));
    }
    let may_wait = |id: NodeId, v: &Value| match g.node(source(g, *v).node).op {
        Op::Read { slot } => {
            let others = written.get(&root(g, slot)).into_iter().flatten();
            let own = |(of, by): &(SlotId, NodeId)| *of == slot && *by == id;
            let all: Vec<_> = others.collect();
            all.is_empty() || all.into_iter().any(own)
        }
        _ => true,
    };
    let is_end = |id: &NodeId| {
        let node = g.node(*id);
        let is_elementwise = match &node.op {
            Op::Map { .. } => true,
            Op::Region { body } => region::sums(body).next().is_none(),
            _ => false,
        };
        is_elementwise
            && node.outs.iter().all(|ty| ty.elements() <= SMALL)
            && (0..node.outs.len()).all(|out| !users.contains_key(&id.out(out as u8)))
            && node.ins.iter().all(|v| may_wait(*id, v))
    };
    g.ids().filter(is_end).collect()
}

/// The slot whose memory a slot is part of.
fn root(g: &Graph, slot: SlotId) -> SlotId {
    g.slot(slot).part.map_or(slot, |part| root(g, part.of))
}

/// The value that a chain of movements starts from.
fn source(g: &Graph, v: Value) -> Value {
    let node = g.node(v.node);
    if views::is_movement(&node.op) && node.ins.len() == 1 { source(g, node.ins[0]) } else { v }
}

/// Appends nodes as one bundle.
fn bundle(replay: &mut Replay<'_>, ids: &[NodeId]) {
    let g = replay.old;
    let (mut body, mut ins, mut outs) = (Graph::default(), vec![], vec![]);
    for id in ids {
        let node = g.node(*id);
        let (part, read) = match &node.op {
            Op::Region { body } => ((**body).clone(), node.ins.clone()),
            _ => regions::body(g, &[*id], &[id.out(0)]),
        };
        let slots = body.slots.len() as u32;
        for (i, slot) in part.slots.iter().enumerate() {
            let path = format!("in{}", slots as usize + i);
            body.add_slot(Slot {
                path,
                ty: slot.ty.clone(),
                class: Class::Input,
                init: Init::Zeros,
                part: None,
            });
        }
        let mut made: Vec<Value> = vec![];
        for inner in &part.nodes {
            let op = match inner.op {
                Op::Read { slot } => Op::Read { slot: SlotId(slots + slot.0) },
                _ => inner.op.clone(),
            };
            let args = inner.ins.iter().map(|v| made[v.node.0 as usize]).collect();
            made.push(body.push_keyed(op, args, &inner.path, inner.key).out(0));
        }
        for (i, (_, v)) in part.results.iter().enumerate() {
            body.results.push((format!("out{}", body.results.len()), made[v.node.0 as usize]));
            outs.push(id.out(i as u8));
        }
        ins.extend(read.iter().map(|v| replay.get(*v)));
    }
    let node = g.node(ids[0]);
    let new = replay.new.push_keyed(Op::Bundle { body: Box::new(body) }, ins, "end", node.key);
    for (i, v) in outs.iter().enumerate() {
        replay.set(*v, new.out(i as u8));
    }
}
