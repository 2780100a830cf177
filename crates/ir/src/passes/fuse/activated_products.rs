//! Fuses products with the activation after them and, in the backward pass, with its slope, the row sum that is the gradient of
//! a bias, and the recomputed activation: all while the product's rows are still in registers.

use std::collections::{HashMap, HashSet};

use crate::graph::{Graph, NodeId, Value};
use crate::ops::elementwise::Elementwise as E;
use crate::ops::epilogue::Epilogue;
use crate::ops::gated::Act;
use crate::ops::product::Compute;
use crate::ops::reduce::Fold;
use crate::ops::{Op, OpKind, activated_product};
use crate::passes::gradient::rejoin::Absorbed;
use crate::passes::readers::Readers;
use crate::region;
use crate::replay::{Replay, without_dead};
use crate::target::Target;
use crate::types::DType;

/// Fuses products with activations and with slopes, where the target has kernels; returns both numbers.
pub fn activated_products(g: &Graph, target: &Target) -> (Graph, [usize; 2]) {
    let has = |op: OpKind| target.kernel(op, DType::BF16).is_some();
    if !has(OpKind::ActivatedProduct) || !has(OpKind::ActivatedProductGrad) {
        return (g.clone(), [0, 0]);
    }
    let find = Readers::new(g);
    let layers: HashMap<NodeId, Layer> = g.ids().filter_map(|id| Some((id, layer(&find, id)?))).collect();
    let applied: HashSet<NodeId> = layers.values().map(|layer| layer.value.node).collect();
    let slopes = slopes(&find, &applied);
    let counts = [layers.len(), slopes.len()];
    let of_layers = layers.iter().map(|(id, layer)| (layer.value.node, *id));
    let of_slopes = slopes.iter().flat_map(|(id, slope)| slope.taken().map(move |taken| (taken, *id)));
    // Nodes that become part of another node. Not the node itself, where an epilogue stays in place.
    let gone: HashSet<NodeId> =
        of_layers.chain(of_slopes).filter(|(part, whole)| part != whole).map(|(part, _)| part).collect();
    let mut replay = Replay::new(g);
    // Readers of an activation that is recomputed inside a gradient move after the gradient.
    let mut waiting: Vec<NodeId> = vec![];
    for id in g.ids().filter(|id| !gone.contains(id)) {
        waiting.push(id);
        let is_ready = |replay: &Replay<'_>, id: &NodeId| match slopes.get(id) {
            Some(slope) => slope.ins.iter().all(|v| replay.has(*v)),
            None => g.node(*id).ins.iter().all(|v| replay.has(*v)),
        };
        while let Some(first) = waiting.iter().position(|id| is_ready(&replay, id)) {
            let id = waiting.remove(first);
            match (layers.get(&id), slopes.get(&id)) {
                (Some(layer), _) => layer.write(&mut replay, id),
                (None, Some(slope)) => slope.write(&mut replay, id),
                (None, None) => _ = replay.copy(id),
            }
        }
    }
    (without_dead(&replay.finish()), counts)
}

/// Whether a node is a product of two bf16 matrices in bf16, the first not transposed; if so, whether the second is transposed,
/// and the epilogue.
fn product(g: &Graph, id: NodeId) -> Option<(bool, Epilogue)> {
    let node = g.node(id);
    let Op::Product { ta: false, tb, out: DType::BF16, base: false, compute: Compute::Full, epilogue } =
        node.op
    else {
        return None;
    };
    let is_bf16 = node.ins[..2].iter().all(|v| g.ty(*v).dtype == DType::BF16);
    (is_bf16 && node.outs[0].rank() == 2).then_some((tb, epilogue))
}

/// A product with its bias and the activation after it.
struct Layer {
    act: Act,
    tb: bool,
    bias: bool,
    h: Value,
    value: Value,
}

fn layer(find: &Readers<'_>, id: NodeId) -> Option<Layer> {
    let g = find.g;
    let (tb, epilogue) = product(g, id)?;
    let bias = epilogue.has_bias();
    if epilogue.has_gelu() {
        return Some(Layer { act: Act::Gelu, tb, bias, h: id.out(1), value: id.out(0) });
    }
    matches!(epilogue, Epilogue::None | Epilogue::Bias).then_some(())?;
    // The first node that applies one is the forward pass; others are recomputations.
    let (act, value) =
        find.of(id).iter().filter_map(|reader| Some((gelu(g, *reader)?, *reader))).min_by_key(|x| x.1)?;
    Some(Layer { act, tb, bias, h: id.out(0), value: value.out(0) })
}

/// The form of GELU that a node applies.
fn gelu(g: &Graph, id: NodeId) -> Option<Act> {
    match g.node(id).op {
        Op::Map { f: E::Gelu } => Some(Act::Gelu),
        Op::Map { f: E::GeluExact } => Some(Act::GeluExact),
        _ => None,
    }
}

impl Layer {
    fn write(&self, replay: &mut Replay<'_>, id: NodeId) {
        let node = replay.old.node(id);
        let ins = node.ins.iter().map(|v| replay.get(*v)).collect();
        let op = Op::ActivatedProduct { act: self.act, tb: self.tb, bias: self.bias };
        let both = replay.new.push_keyed(op, ins, &node.path, node.key);
        replay.set(self.h, both.out(0));
        replay.set(self.value, both.out(1));
    }
}

/// A product times the slope of an activation, with other values computed from the same inputs.
struct Slope {
    act: Act,
    tb: bool,
    /// The product, where it is a separate node, and the slope.
    parts: Vec<NodeId>,
    /// d, w, h.
    ins: Vec<Value>,
    again: Option<NodeId>,
    sum: Option<NodeId>,
}

/// Every product times a slope, by its last node.
fn slopes(find: &Readers<'_>, applied: &HashSet<NodeId>) -> HashMap<NodeId, Slope> {
    let g = find.g;
    let mut slopes: HashMap<NodeId, Slope> =
        g.ids().filter_map(|id| Some((id, slope(find, id, applied)?))).collect();
    let Some(first) = slopes.values().filter_map(|slope| slope.again).min() else { return slopes };
    let mut made = Absorbed { first, at: HashMap::new() };
    for id in g.ids() {
        let Some(slope) = slopes.get_mut(&id) else { continue };
        // A gradient that depends on the value it would compute would be a cycle.
        slope.again = slope.again.filter(|again| !made.depends(g, id, *again));
        made.at.extend(slope.again.map(|again| (again, id)));
    }
    slopes
}

/// The product times a slope that ends in node `id`. An activation in `applied` is part of the forward pass.
fn slope(find: &Readers<'_>, id: NodeId, applied: &HashSet<NodeId>) -> Option<Slope> {
    let g = find.g;
    let (act, tb, parts, ins) = match (&g.node(id).op, product(g, id)) {
        (_, Some((tb, Epilogue::GeluGrad))) => (Act::Gelu, tb, vec![], g.node(id).ins.clone()),
        (Op::Map { f: E::Mul }, _) => {
            let [a, b] = g.node(id).ins[..] else { return None };
            [(a, b), (b, a)].into_iter().find_map(|(dy, slope)| {
                let (tb, epilogue) = product(g, dy.node)?;
                let act = match g.node(slope.node).op {
                    Op::Map { f: E::GeluExactSlope } => Act::GeluExact,
                    _ => return None,
                };
                let h = g.node(slope.node).ins[0];
                let is_alone = find.sole(dy) == Some(id) && find.sole(slope) == Some(id);
                let fits = epilogue == Epilogue::None && is_alone && *g.ty(h) == g.node(dy.node).outs[0];
                let ins = g.node(dy.node).ins.iter().copied().chain([h]).collect();
                fits.then(|| (act, tb, vec![dy.node, slope.node], ins))
            })?
        }
        _ => return None,
    };
    let is_again = |reader: &&NodeId| gelu(g, **reader) == Some(act) && !applied.contains(reader);
    let again = find.of_value(ins[2]).0.iter().find(is_again).copied();
    let is_sum = |reader: &&NodeId| matches!(g.node(**reader).op, Op::Reduce { axis: 0, by: Fold::Sum });
    let sum = find.of(id).iter().find(is_sum).copied().filter(|_| region::is_summed(&g.node(id).outs[0]));
    // A gradient that is only summed needs no store: an elementwise pass can sum it without writing it.
    let is_stored = find.of_value(id.out(0)).1 > sum.is_some() as u32;
    is_stored.then_some(Slope { act, tb, parts, ins, again, sum })
}

impl Slope {
    /// The nodes that it replaces, other than the one in whose place it stands.
    fn taken(&self) -> impl Iterator<Item = NodeId> {
        self.parts.iter().copied().chain(self.again).chain(self.sum)
    }

    fn write(&self, replay: &mut Replay<'_>, id: NodeId) {
        let node = replay.old.node(id);
        let ins = self.ins.iter().map(|v| replay.get(*v)).collect();
        let (again, sum) = (self.again.is_some(), self.sum.is_some());
        let op = Op::ActivatedProductGrad { act: self.act, tb: self.tb, again, sum };
        let new = replay.new.push_keyed(op, ins, &node.path, node.key);
        replay.set(id.out(0), new.out(0));
        if let Some(again) = self.again {
            replay.set(again.out(0), new.out(1));
        }
        if let (Some(of), Some(at)) = (self.sum, activated_product::sum_at(again, sum)) {
            replay.set(of.out(0), new.out(at as u8));
        }
    }
}
