//! Products of one input by several weights become one product: the weights lie side by side in memory and the
//! merged weight is the whole they are parts of. The outputs are slices, which cost nothing.

use std::collections::HashMap;

use crate::graph::{Graph, NodeId, Part, Slot, SlotId, Value};
use crate::op::Op;
use crate::passes::options::Update;
use crate::replay::{Replay, users, without_dead};
use crate::types::TensorType;

/// How many products were merged into how many, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Merged {
    pub qkv: usize,
    pub gate_up: usize,
}

/// One set of products that share an input.
struct Set {
    products: Vec<NodeId>,
    weights: Vec<SlotId>,
}

pub fn merge(g: &Graph, qkv: bool, gate_up: bool, update: &Update) -> (Graph, Merged) {
    let users = users(g);
    let mut merged = Merged::default();
    let mut chosen: HashMap<NodeId, usize> = HashMap::new();
    let mut sets = vec![];
    for set in candidates(g, &users, update) {
        let is_qkv = set.products.iter().any(|p| reaches_attention(g, &users, p.out(0)));
        if if is_qkv { qkv } else { gate_up } {
            *(if is_qkv { &mut merged.qkv } else { &mut merged.gate_up }) += 1;
            set.products.iter().for_each(|p| _ = chosen.insert(*p, sets.len()));
            sets.push((set, None));
        }
    }
    let mut replay = Replay::new(g);
    for id in g.ids() {
        let Some(&at) = chosen.get(&id) else {
            replay.copy(id);
            continue;
        };
        let (set, whole) = &mut sets[at];
        let whole = *whole.get_or_insert_with(|| product(&mut replay, set));
        let rows = |s: &SlotId| g.slot(*s).ty.dims[0];
        let place = set.products.iter().position(|p| *p == id).expect("chosen from this set");
        let start = set.weights[..place].iter().map(rows).sum();
        let slice = Op::Slice { axis: 1, start, len: rows(&set.weights[place]) };
        let out = replay.add(slice, vec![whole], id);
        replay.set(id.out(0), out);
    }
    (without_dead(&replay.finish()), merged)
}

/// Lays the weights side by side and appends the one product.
fn product(replay: &mut Replay<'_>, set: &Set) -> Value {
    let g = replay.old;
    let first = g.slot(set.weights[0]);
    let rows: usize = set.weights.iter().map(|s| g.slot(*s).ty.dims[0]).sum();
    let names: Vec<&str> = set.weights.iter().map(|s| last_name(&g.slot(*s).path)).collect();
    let scope = &first.path[..first.path.len() - names[0].len()];
    let whole = replay.new.add_slot(Slot {
        path: format!("{scope}{}", names.join("+")),
        ty: TensorType::new(first.ty.dtype, [rows, first.ty.dims[1]]),
        ..first.clone()
    });
    let mut offset = 0;
    for weight in &set.weights {
        replay.new.slot_mut(*weight).part = Some(Part { of: whole, offset });
        offset += g.slot(*weight).ty.elements();
    }
    let node = g.node(set.products[0]);
    let x = replay.get(node.ins[0]);
    let weight = replay.add(Op::Read { slot: whole }, vec![], set.products[0]);
    replay.add(node.op.clone(), vec![x, weight], set.products[0])
}

fn last_name(path: &str) -> &str {
    path.rsplit('.').next().unwrap_or(path)
}

/// Products `x w^T` of two axes that share x, each with a weight nothing else reads and all trained alike, in the
/// order of the graph.
fn candidates(g: &Graph, users: &HashMap<Value, Vec<NodeId>>, update: &Update) -> Vec<Set> {
    let mut reads: HashMap<SlotId, usize> = HashMap::new();
    for node in &g.nodes {
        if let Op::Read { slot } = node.op {
            *reads.entry(slot).or_default() += 1;
        }
    }
    let mut by_input: Vec<(Value, Set)> = vec![];
    for (id, node) in g.ids().zip(&g.nodes) {
        let Op::Product { ta: false, tb: true, base: false, .. } = node.op else { continue };
        let Op::Read { slot } = g.node(node.ins[1].node).op else { continue };
        let s = g.slot(slot);
        let alone = reads[&slot] == 1 && users[&node.ins[1]].len() == 1;
        if !alone || !s.class.is_parameter() || s.part.is_some() || node.outs[0].rank() != 2 {
            continue;
        }
        let fits = |set: &Set| {
            let first = g.slot(set.weights[0]);
            update.rule(&first.path, 2) == update.rule(&s.path, 2)
                && first.class == s.class
                && first.ty.dtype == s.ty.dtype
                && g.node(set.products[0]).op == node.op
        };
        match by_input.iter_mut().find(|(x, set)| *x == node.ins[0] && fits(set)) {
            Some((_, set)) => {
                set.products.push(id);
                set.weights.push(slot);
            }
            None => by_input.push((node.ins[0], Set { products: vec![id], weights: vec![slot] })),
        }
    }
    by_input.into_iter().map(|(_, set)| set).filter(|set| set.products.len() > 1).collect()
}

/// Whether a value enters attention after nothing but reshapes, norms and rotations.
fn reaches_attention(g: &Graph, users: &HashMap<Value, Vec<NodeId>>, v: Value) -> bool {
    users.get(&v).into_iter().flatten().any(|id| match g.node(*id).op {
        Op::Attention { .. } => true,
        Op::Product { .. } => false,
        Op::Reshape { .. }
        | Op::Transpose { .. }
        | Op::RmsNorm { .. }
        | Op::Rope { .. }
        | Op::QkNormRope { .. } => reaches_attention(g, users, id.out(0)),
        _ => false,
    })
}
