//! Merges products of one input by several weights into one product: the weights lie side by side in memory and are parts of
//! the merged weight. The outputs are slices, which cost nothing. Where a bias follows each product, the biases are merged too:
//! one addition, and slices of the sum.
//!
//! Weights may be applied several times, to several inputs: they are one slot, and every application is one product. Every
//! input multiplied by one of them must be multiplied by all of them; of weights some of which are also read without the
//! others, those that are always read together are merged.

use std::collections::HashMap;

use crate::graph::{Graph, NodeId, Slot, SlotId, SlotPart, Value};
use crate::ops::Op;
use crate::ops::elementwise::Elementwise as E;
use crate::passes::options::Update;
use crate::replay::{Replay, users, without_dead};
use crate::types::TensorType;

/// Number of products merged, and of the products that they became, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Merged {
    pub qkv: usize,
    pub gate_up: usize,
}

/// Weights that are always applied together.
struct Family {
    weights: Vec<SlotId>,
    /// A bias vector for each weight that every application adds; empty unless all weights have one.
    biases: Vec<SlotId>,
    applications: Vec<Application>,
    is_qkv: bool,
}

/// One input times every weight of a family.
struct Application {
    products: Vec<NodeId>,
    /// The addition after each product, where the family has biases.
    sums: Vec<NodeId>,
}

pub fn merge(g: &Graph, qkv: bool, gate_up: bool, update: &Update) -> (Graph, Merged) {
    let find = Finder { g, users: users(g), update };
    let families: Vec<Family> =
        find.families().into_iter().filter(|of| if of.is_qkv { qkv } else { gate_up }).collect();
    let mut merged = Merged::default();
    // The application that a node belongs to, as indices of the family and of the application in it.
    let mut chosen: HashMap<NodeId, (usize, usize)> = HashMap::new();
    for (i, family) in families.iter().enumerate() {
        *(if family.is_qkv { &mut merged.qkv } else { &mut merged.gate_up }) += family.applications.len();
        for (k, Application { products, sums }) in family.applications.iter().enumerate() {
            products.iter().chain(sums).for_each(|id| _ = chosen.insert(*id, (i, k)));
        }
    }
    let mut replay = Replay::new(g);
    let mut wholes: HashMap<usize, Wholes> = HashMap::new();
    let mut applied: HashMap<(usize, usize), Value> = HashMap::new();
    for id in g.ids() {
        let Some(&at) = chosen.get(&id) else {
            replay.copy(id);
            continue;
        };
        let family = &families[at.0];
        let application = &family.applications[at.1];
        let whole = *applied.entry(at).or_insert_with(|| {
            let wholes = *wholes.entry(at.0).or_insert_with(|| Wholes::of(&mut replay, family));
            product(&mut replay, application, wholes)
        });
        // With biases, the slices replace the sums; nothing else reads the products.
        let ends = if family.biases.is_empty() { &application.products } else { &application.sums };
        let Some(place) = ends.iter().position(|end| *end == id) else { continue };
        let rows = |s: &SlotId| g.slot(*s).ty.dims[0];
        let start = family.weights[..place].iter().map(rows).sum();
        let slice = Op::Slice { axis: 1, start, len: rows(&family.weights[place]) };
        let out = replay.add(slice, vec![whole], id);
        replay.set(id.out(0), out);
    }
    (without_dead(&replay.finish()), merged)
}

/// The slots that the weights and the biases of a family become parts of.
#[derive(Clone, Copy)]
struct Wholes {
    weight: SlotId,
    bias: Option<SlotId>,
}

impl Wholes {
    fn of(replay: &mut Replay<'_>, family: &Family) -> Wholes {
        let weight = side_by_side(replay, &family.weights);
        let bias = (!family.biases.is_empty()).then(|| side_by_side(replay, &family.biases));
        Wholes { weight, bias }
    }
}

/// Appends the merged product of an application, and the merged addition where there are biases.
fn product(replay: &mut Replay<'_>, application: &Application, wholes: Wholes) -> Value {
    let at = application.products[0];
    let node = replay.old.node(at);
    let x = replay.get(node.ins[0]);
    let weight = replay.add(Op::Read { slot: wholes.weight }, vec![], at);
    let y = replay.add(node.op.clone(), vec![x, weight], at);
    let Some(slot) = wholes.bias else { return y };
    let dims = replay.new.dims(y).to_vec();
    let bias = replay.add(Op::Read { slot }, vec![], at);
    let row = replay.add(Op::Reshape { dims: vec![1, dims[1]] }, vec![bias], at);
    let repeated = replay.add(Op::Broadcast { dims }, vec![row], at);
    replay.add(Op::Map { f: E::Add }, vec![y, repeated], at)
}

/// A slot with these parts, stacked along the first axis.
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
        replay.new.slot_mut(*part).part = Some(SlotPart { of: whole, offset });
        offset += g.slot(*part).ty.elements();
    }
    whole
}

fn last_name(path: &str) -> &str {
    path.rsplit('.').next().unwrap_or(path)
}

struct Finder<'a> {
    g: &'a Graph,
    users: HashMap<Value, Vec<NodeId>>,
    update: &'a Update,
}

impl Finder<'_> {
    /// Sets of weights with the same update rule that several two-axis products `x w^T` apply to a shared x. Every such x is
    /// multiplied by all weights of the set, and by no other weight that is also read elsewhere. In the order of the graph.
    fn families(&self) -> Vec<Family> {
        let reads = reads(self.g);
        let together = self.products_by_input();
        // The inputs that a weight is multiplied with, where these are all that read it.
        let inputs_of = |w: SlotId| -> Option<Vec<usize>> {
            let having = together.iter().enumerate().filter(|(_, of)| of.weights.contains(&w));
            let having: Vec<usize> = having.map(|(input, _)| input).collect();
            (having.len() == reads[&w]).then_some(having)
        };
        let whole = |of: &InputProducts| of.weights.iter().all(|w| inputs_of(*w).is_some());
        let is_whole: Vec<bool> = together.iter().map(whole).collect();
        let mut families: Vec<Family> = vec![];
        for InputProducts { weights, .. } in &together {
            let mut sets: Vec<(Vec<usize>, Vec<SlotId>)> = vec![];
            for weight in weights.iter().copied() {
                let Some(inputs) = inputs_of(weight) else { continue };
                match sets.iter_mut().find(|(of, _)| *of == inputs) {
                    Some((_, set)) => set.push(weight),
                    None => sets.push((inputs, vec![weight])),
                }
            }
            for (inputs, weights) in sets {
                let is_known = families.iter().any(|family| family.weights.contains(&weights[0]));
                if weights.len() < 2 || is_known || !inputs.iter().all(|input| is_whole[*input]) {
                    continue;
                }
                let product = |of: &InputProducts, weight: &SlotId| {
                    let at = of.weights.iter().position(|own| own == weight);
                    of.products[at.expect("an input of every weight of the set")]
                };
                let application = |input: &usize| Application {
                    products: weights.iter().map(|weight| product(&together[*input], weight)).collect(),
                    sums: vec![],
                };
                let applications = inputs.iter().map(application).collect();
                families.push(Family { biases: vec![], applications, is_qkv: false, weights });
            }
        }
        for family in &mut families {
            self.add_biases(family, &reads);
            let mut products = family.applications.iter().flat_map(|of| &of.products);
            family.is_qkv = products.any(|p| reaches_attention(self.g, &self.users, p.out(0)));
        }
        families
    }

    /// Products of one input, each weight once.
    fn products_by_input(&self) -> Vec<InputProducts> {
        let g = self.g;
        let mut all: Vec<InputProducts> = vec![];
        for (id, node) in g.ids().zip(&g.nodes) {
            let Op::Product { ta: false, tb: true, base: false, .. } = node.op else { continue };
            let Op::Read { slot } = g.node(node.ins[1].node).op else { continue };
            let s = g.slot(slot);
            if !s.class.is_parameter() || s.part.is_some() || node.outs[0].rank() != 2 {
                continue;
            }
            let fits = |of: &InputProducts| {
                let first = g.slot(of.weights[0]);
                of.x == node.ins[0]
                    && !of.weights.contains(&slot)
                    && self.update.rule(&first.path, 2) == self.update.rule(&s.path, 2)
                    && first.class == s.class
                    && first.ty.dtype == s.ty.dtype
                    && g.node(of.products[0]).op == node.op
            };
            match all.iter_mut().find(|of| fits(of)) {
                Some(of) => {
                    of.products.push(id);
                    of.weights.push(slot);
                }
                None => all.push(InputProducts { x: node.ins[0], products: vec![id], weights: vec![slot] }),
            }
        }
        all
    }

    /// Finds the vectors that follow a family's products, where all are followed by one, every application by the same, and
    /// all are trained alike.
    fn add_biases(&self, family: &mut Family, reads: &HashMap<SlotId, usize>) {
        let times = family.applications.len();
        let of = |application: &Application| -> Option<(Vec<NodeId>, Vec<SlotId>)> {
            application.products.iter().map(|product| self.bias(*product)).collect()
        };
        let Some(found) = family.applications.iter().map(of).collect::<Option<Vec<_>>>() else { return };
        let biases = found[0].1.clone();
        let first = self.g.slot(biases[0]);
        let is_alike = |slot: &SlotId| {
            let s = self.g.slot(*slot);
            let rule = |path: &str| self.update.rule(path, 1);
            rule(&first.path) == rule(&s.path) && first.class == s.class && reads[slot] == times
        };
        if !found.iter().all(|(_, slots)| *slots == biases) || !biases.iter().all(is_alike) {
            return;
        }
        family.biases = biases;
        for (application, (sums, _)) in family.applications.iter_mut().zip(found) {
            application.sums = sums;
        }
    }

    /// The addition of a vector that is all that follows a product, and the vector.
    fn bias(&self, product: NodeId) -> Option<(NodeId, SlotId)> {
        let g = self.g;
        let ends = |v: Value| g.writes.iter().any(|(_, w)| *w == v) || g.results.iter().any(|(_, r)| *r == v);
        let alone = |v: Value| self.users.get(&v).is_some_and(|u| u.len() == 1) && !ends(v);
        let [sum] = self.users.get(&product.out(0))?[..] else { return None };
        let Op::Map { f: E::Add } = g.node(sum).op else { return None };
        let ins = &g.node(sum).ins;
        let other = if ins[0].node == product { ins[1] } else { ins[0] };
        // A vector, as a row, repeated.
        let row = g.node(other.node);
        let vector = g.node(row.ins.first()?.node);
        let read = vector.ins.first()?;
        let (Op::Broadcast { .. }, Op::Reshape { .. }) = (&row.op, &vector.op) else { return None };
        let Op::Read { slot } = g.node(read.node).op else { return None };
        let s = g.slot(slot);
        let is_vector = s.class.is_parameter() && s.part.is_none() && s.ty.rank() == 1;
        (is_vector && [product.out(0), other, row.ins[0]].into_iter().all(alone)).then_some((sum, slot))
    }
}

struct InputProducts {
    x: Value,
    products: Vec<NodeId>,
    weights: Vec<SlotId>,
}

/// How often each slot is used: by nodes, by writes and as a result.
pub(super) fn reads(g: &Graph) -> HashMap<SlotId, usize> {
    let uses = g.uses();
    let mut reads: HashMap<SlotId, usize> = HashMap::new();
    for (id, node) in g.ids().zip(&g.nodes) {
        if let Op::Read { slot } = node.op {
            *reads.entry(slot).or_default() += uses[id.0 as usize][0] as usize;
        }
    }
    reads
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
