//! Products of one input by several weights become one product: the weights lie side by side in memory and the
//! merged weight is the whole they are parts of. The outputs are slices, which cost nothing. Where each product is
//! followed by a bias, so are the biases: one addition, and slices of the sum.

use std::collections::HashMap;

use crate::graph::{Graph, NodeId, Part, Slot, SlotId, Value};
use crate::op::Op;
use crate::ops::elementwise::Elementwise as E;
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
    /// The addition after each product and what it adds; empty unless all have one.
    biases: Vec<(NodeId, SlotId)>,
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
            let ends = set.biases.iter().map(|(sum, _)| sum);
            set.products.iter().chain(ends).for_each(|p| _ = chosen.insert(*p, sets.len()));
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
        let ends = || set.biases.iter().map(|(sum, _)| *sum);
        // With biases, the slices stand for the sums; nothing else reads the products.
        let place = match set.biases.is_empty() {
            true => set.products.iter().position(|p| *p == id),
            false => ends().position(|sum| sum == id),
        };
        let Some(place) = place else { continue };
        let start = set.weights[..place].iter().map(rows).sum();
        let slice = Op::Slice { axis: 1, start, len: rows(&set.weights[place]) };
        let out = replay.add(slice, vec![whole], id);
        replay.set(id.out(0), out);
    }
    (without_dead(&replay.finish()), merged)
}

/// Lays the weights side by side and appends the one product, and the one addition where there are biases.
fn product(replay: &mut Replay<'_>, set: &Set) -> Value {
    let g = replay.old;
    let at = set.products[0];
    let node = g.node(at);
    let whole = side_by_side(replay, &set.weights);
    let x = replay.get(node.ins[0]);
    let weight = replay.add(Op::Read { slot: whole }, vec![], at);
    let y = replay.add(node.op.clone(), vec![x, weight], at);
    if set.biases.is_empty() {
        return y;
    }
    let biases: Vec<SlotId> = set.biases.iter().map(|(_, slot)| *slot).collect();
    let whole = side_by_side(replay, &biases);
    let dims = replay.new.dims(y).to_vec();
    let bias = replay.add(Op::Read { slot: whole }, vec![], at);
    let row = replay.add(Op::Reshape { dims: vec![1, dims[1]] }, vec![bias], at);
    let repeated = replay.add(Op::Broadcast { dims }, vec![row], at);
    replay.add(Op::Map { f: E::Add }, vec![y, repeated], at)
}

/// A slot whose parts are these, one after the other along the first axis.
pub(super) fn side_by_side(replay: &mut Replay<'_>, parts: &[SlotId]) -> SlotId {
    let g = replay.old;
    let first = g.slot(parts[0]);
    let names: Vec<&str> = parts.iter().map(|s| last_name(&g.slot(*s).path)).collect();
    let scope = &first.path[..first.path.len() - names[0].len()];
    let mut dims = first.ty.dims.clone();
    dims[0] = parts.iter().map(|s| g.slot(*s).ty.dims[0]).sum();
    let whole = replay.new.add_slot(Slot {
        path: format!("{scope}{}", names.join("+")),
        ty: TensorType::new(first.ty.dtype, dims),
        ..first.clone()
    });
    let mut offset = 0;
    for part in parts {
        replay.new.slot_mut(*part).part = Some(Part { of: whole, offset });
        offset += g.slot(*part).ty.elements();
    }
    whole
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
            None => {
                let set = Set { products: vec![id], weights: vec![slot], biases: vec![] };
                by_input.push((node.ins[0], set));
            }
        }
    }
    let sets = by_input.into_iter().map(|(_, set)| set).filter(|set| set.products.len() > 1);
    sets.map(|set| Set { biases: biases(g, users, update, &set.products), ..set }).collect()
}

/// The additions of vectors that follow products, where all are followed by one and all vectors are trained alike.
fn biases(
    g: &Graph,
    users: &HashMap<Value, Vec<NodeId>>,
    update: &Update,
    products: &[NodeId],
) -> Vec<(NodeId, SlotId)> {
    let ends = |v: Value| g.writes.iter().any(|(_, w)| *w == v) || g.results.iter().any(|(_, r)| *r == v);
    let alone = |v: Value| users.get(&v).is_some_and(|u| u.len() == 1) && !ends(v);
    let bias = |product: &NodeId| -> Option<(NodeId, SlotId)> {
        let [sum] = users.get(&product.out(0))?[..] else { return None };
        let Op::Map { f: E::Add } = g.node(sum).op else { return None };
        let ins = &g.node(sum).ins;
        let other = if ins[0].node == *product { ins[1] } else { ins[0] };
        // A vector, as a row, repeated.
        let row = g.node(other.node);
        let vector = g.node(row.ins.first()?.node);
        let read = vector.ins.first()?;
        let (Op::Broadcast { .. }, Op::Reshape { .. }) = (&row.op, &vector.op) else { return None };
        let Op::Read { slot } = g.node(read.node).op else { return None };
        let s = g.slot(slot);
        let is_vector = s.class.is_parameter() && s.part.is_none() && s.ty.rank() == 1;
        let path = [product.out(0), other, row.ins[0], *read];
        (is_vector && path.into_iter().all(alone)).then_some((sum, slot))
    };
    let Some(found) = products.iter().map(bias).collect::<Option<Vec<_>>>() else { return vec![] };
    let alike = |s: &SlotId| {
        let (first, s) = (g.slot(found[0].1), g.slot(*s));
        update.rule(&first.path, 1) == update.rule(&s.path, 1) && first.class == s.class
    };
    if found.iter().all(|(_, slot)| alike(slot)) { found } else { vec![] }
}

/// Whether a value enters attention after nothing but a bias, reshapes, norms and rotations.
fn reaches_attention(g: &Graph, users: &HashMap<Value, Vec<NodeId>>, v: Value) -> bool {
    users.get(&v).into_iter().flatten().any(|id| match g.node(*id).op {
        Op::Attention { .. } => true,
        Op::Product { .. } => false,
        Op::Reshape { .. }
        | Op::Transpose { .. }
        | Op::Map { f: E::Add }
        | Op::RmsNorm { .. }
        | Op::Rope { .. }
        | Op::QkNormRope { .. } => reaches_attention(g, users, id.out(0)),
        _ => false,
    })
}
