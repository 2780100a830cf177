//! Recomputes values for the backward pass instead of keeping them. A recomputed node is a copy with the same key, placed right
//! before its first use, so it has the same bits and lives only there.

use std::collections::{HashMap, HashSet};

use crate::graph::{Class, Graph, Node, NodeId, Value};
use crate::ops::Op;
use crate::ops::elementwise::Elementwise as E;
use crate::ops::gated::Act;
use crate::ops::norm::NormSpec;
use crate::ops::product;
use crate::ops::quantize::Source;
use crate::ops::reduce::Fold;
use crate::passes::forward::adapters;
use crate::passes::options::Recompute;
use crate::replay::{Replay, users};

/// Rewrites the backward pass; returns the number of recomputed forward nodes. With `layers`, `Full` and `Wide` apply to that
/// many layers from the first, and the others keep what `Cheap` keeps; a layer that is not differentiated, such as one of a
/// frozen tower, keeps nothing and is not counted. With `regathers`, where ranks gather weights as layers read them, values
/// computed from a weight alone are recomputed too.
pub fn recompute(
    g: &Graph,
    forward: usize,
    mode: Recompute,
    layers: Option<usize>,
    regathers: bool,
) -> (Graph, usize) {
    let mut replay = Replay::new(g);
    let read: HashSet<Value> = g.nodes[forward..].iter().flat_map(|node| node.ins.iter().copied()).collect();
    let is_read =
        |node: &NodeId| (0..g.node(*node).outs.len() as u8).any(|out| read.contains(&node.out(out)));
    let kept = || (0..forward as u32).map(NodeId).filter(is_read).map(|id| g.node(id));
    let first = |count: usize| layers_of(kept()).into_iter().take(count).collect();
    let policy = Policy { all: mode, layers: layers.map(first) };
    let rows = row_gradients(g, forward).into_iter();
    let rows: HashMap<NodeId, RowGradient> = rows
        .filter(|(id, _)| matches!(policy.at(&g.node(*id).path), Recompute::Cheap | Recompute::Wide))
        .collect();
    let is_none = policy.all == Recompute::None;
    let boundary = boundary(g, forward);
    let mut again =
        Recomputation { g, forward, policy, boundary, read, regathers, made: HashMap::new(), count: 0 };
    let skipped: HashSet<NodeId> = rows.values().map(|row| row.product).collect();
    for id in g.ids().filter(|id| !skipped.contains(id)) {
        if (id.0 as usize) < forward || is_none {
            replay.copy(id);
        } else if let Some(of) = rows.get(&id) {
            let [d, z, row] = [of.d, of.z, of.row].map(|v| again.value(&mut replay, v));
            let product = replay.add(Op::Map { f: E::Mul }, vec![d, z], of.product);
            let sum = replay.add(g.node(id).op.clone(), vec![product], id);
            let inverse = replay.add(Op::Map { f: E::Recip }, vec![row], id);
            let gradient = replay.add(Op::Map { f: E::Mul }, vec![sum, inverse], id);
            replay.set(id.out(0), gradient);
        } else {
            let ins = g.node(id).ins.iter().map(|v| again.value(&mut replay, *v)).collect();
            replay.copy_as(id, g.node(id).op.clone(), ins);
        }
    }
    let count = again.count;
    (replay.finish(), count)
}

/// The recomputation policy, by layer.
struct Policy<'a> {
    all: Recompute,
    /// The layers that `Full` or `Wide` applies to; `None` for all.
    layers: Option<HashSet<&'a str>>,
}

impl Policy<'_> {
    fn at(&self, path: &str) -> Recompute {
        match (self.all, &self.layers) {
            (Recompute::Full | Recompute::Wide, Some(layers))
                if layer_of(path).is_none_or(|layer| !layers.contains(layer)) =>
            {
                Recompute::Cheap
            }
            (mode, _) => mode,
        }
    }
}

/// The layers that nodes lie in, in the order of their first nodes.
pub fn layers_of<'g>(nodes: impl IntoIterator<Item = &'g Node>) -> Vec<&'g str> {
    let mut found: Vec<&str> = vec![];
    for layer in nodes.into_iter().filter_map(|node| layer_of(&node.path)) {
        if !found.contains(&layer) {
            found.push(layer);
        }
    }
    found
}

struct Recomputation<'a> {
    g: &'a Graph,
    forward: usize,
    policy: Policy<'a>,
    boundary: HashSet<Value>,
    /// Values of the forward pass that the original backward pass reads.
    read: HashSet<Value>,
    /// Whether weights are gathered for the forward pass and again for the backward pass.
    regathers: bool,
    made: HashMap<Value, Value>,
    count: usize,
}

impl Recomputation<'_> {
    /// The value that a backward node reads in place of `v`.
    fn value(&mut self, replay: &mut Replay<'_>, v: Value) -> Value {
        if v.node.0 as usize >= self.forward || self.is_kept(v) {
            return replay.get(v);
        }
        if let Some(made) = self.made.get(&v) {
            return *made;
        }
        let node = self.g.node(v.node);
        // The normed output of a fused addition and norm is recomputed from the sum, where that is kept.
        let of_sum = match node.op {
            Op::RmsNorm { residual: true, .. } => {
                NormSpec::of(&node.op).map(|(spec, _)| (spec, &node.ins[2..]))
            }
            Op::DoubleNorm { outer, .. } => Some((outer, &node.ins[3..])),
            _ => None,
        };
        if let Some((spec, vectors)) = of_sum
            && self.is_kept(v.node.out(1))
        {
            let ins = [v.node.out(1)].iter().chain(vectors).map(|v| replay.get(*v)).collect();
            let copy = replay.new.push_keyed(spec.op(false), ins, &node.path, node.key);
            self.made.insert(v, copy.out(0));
            self.count += 1;
            return copy.out(0);
        }
        let mut ins: Vec<Value> = node.ins.iter().map(|v| self.value(replay, *v)).collect();
        // The largest magnitude was recorded in the forward pass. The copy's is not read, and in its place stands the scale, so
        // that the one recorded may be overwritten.
        if let (Op::Quantize { current: false, .. }, [.., scale, amax]) = (&node.op, &mut ins[..]) {
            *amax = *scale;
        }
        let copy = replay.new.push_keyed(node.op.clone(), ins, &node.path, node.key);
        for out in 0..node.outs.len() as u8 {
            self.made.insert(v.node.out(out), copy.out(out));
        }
        self.count += !is_view(&node.op) as usize;
        self.made[&v]
    }

    fn is_kept(&self, v: Value) -> bool {
        let node = self.g.node(v.node);
        match node.op {
            Op::Read { .. } | Op::Fill { .. } | Op::Iota { .. } => return true,
            // A loss computed in the forward pass already has its gradients.
            Op::HeadLossTrain { .. } => return true,
            _ => {}
        }
        match self.policy.at(&node.path) {
            Recompute::None => true,
            Recompute::Cheap | Recompute::Wide if is_view(&node.op) => self.is_kept(node.ins[0]),
            mode @ (Recompute::Cheap | Recompute::Wide) => match node.op {
                Op::Product { ta, .. } => {
                    mode == Recompute::Cheap
                        || layer_of(&node.path).is_none()
                        || !product::is_wide(node.outs[0].last(), product::inner(ta, self.g.ty(node.ins[0])))
                }
                Op::RmsNorm { residual, .. } => residual && v.out == 1,
                Op::DoubleNorm { .. } => v.out == 1 && self.read.contains(&v),
                Op::Quantize { current: false, .. } => !self.makes_codes_again(node.ins[0], mode),
                Op::QkNormRope { .. } | Op::Rope { .. } | Op::Gated { .. } | Op::Dropout { .. } => false,
                Op::Map { f } => Act::of(f).is_none() && !self.is_of_weight(node),
                _ => true,
            },
            Recompute::Full => layer_of(&node.path).is_none() || self.boundary.contains(&v),
        }
    }

    /// Whether the codes of a value are made again: of gated activations and of norms, because an operation that reads the same
    /// writes them, except for norms of wide rows, which take two passes; and of values that are kept for another reader.
    fn makes_codes_again(&self, x: Value, mode: Recompute) -> bool {
        match &self.g.node(x.node).op {
            Op::Gated { p, .. } => *p == 0.0,
            op @ Op::RmsNorm { .. } => {
                let (spec, _) = NormSpec::of(op).expect("a norm");
                mode == Recompute::Wide || Source::Norm(spec, false).takes(self.g.ty(x).last())
            }
            _ => {
                let source = self.source(x);
                self.read.contains(&source) && self.is_kept(source)
            }
        }
    }

    /// The value that a view shows.
    fn source(&self, v: Value) -> Value {
        let node = self.g.node(v.node);
        if is_view(&node.op) { self.source(node.ins[0]) } else { v }
    }

    /// Whether a node scales or casts a frozen or gathered weight: keeping all such results would keep the model twice.
    fn is_of_weight(&self, node: &Node) -> bool {
        let is_read_again = |class: Class| match class {
            Class::Frozen => true,
            Class::Weight | Class::Derived => self.regathers,
            _ => false,
        };
        node.outs[0].rank() >= 2
            && node.ins.first().is_some_and(|v| match &self.g.node(v.node).op {
                Op::Read { slot } => is_read_again(self.g.slot(*slot).class),
                Op::Map { .. } => self.is_of_weight(self.g.node(v.node)),
                _ => false,
            })
    }
}

fn is_view(op: &Op) -> bool {
    matches!(op, Op::Reshape { .. } | Op::Transpose { .. } | Op::Slice { .. } | Op::Broadcast { .. })
}

/// The gradient of a row that adapters scale columns by, z = v row: the sum over tokens of d v.
struct RowGradient {
    /// The product whose columns are summed.
    product: NodeId,
    d: Value,
    /// The result of the scaling.
    z: Value,
    /// The row before it was broadcast.
    row: Value,
}

/// All such gradients, by the node that sums. They also equal sum(d z) / row, and others read z anyway, so v need not be kept.
fn row_gradients(g: &Graph, forward: usize) -> HashMap<NodeId, RowGradient> {
    let users = users(g);
    let cast = |v: Value| matches!(g.node(v.node).op, Op::Map { f: E::Cast(_) });
    let is_row = |v: Value| {
        let by = g.node(v.node);
        matches!(by.op, Op::Broadcast { .. }) && g.dims(by.ins[0])[0] == 1
    };
    let mut scaled: HashMap<Value, (Value, Value)> = HashMap::new();
    for id in (0..forward as u32).map(NodeId).filter(|id| g.node(*id).path.ends_with(adapters::NODES)) {
        let (Op::Map { f: E::Mul }, [v, row]) = (&g.node(id).op, &g.node(id).ins[..]) else { continue };
        if !is_row(*row) {
            continue;
        }
        let v = if cast(*v) { g.node(v.node).ins[0] } else { *v };
        let rounded = users.get(&id.out(0)).and_then(|u| u.iter().map(|u| u.out(0)).find(|v| cast(*v)));
        scaled.insert(v, (rounded.unwrap_or(id.out(0)), g.node(row.node).ins[0]));
    }
    let mut found = HashMap::new();
    for id in g.ids().skip(forward) {
        let Op::Reduce { axis: 0, by: Fold::Sum } = g.node(id).op else { continue };
        let product = g.node(id).ins[0].node;
        let (Op::Map { f: E::Mul }, [d, v]) = (&g.node(product).op, &g.node(product).ins[..]) else {
            continue;
        };
        let Some(&(z, row)) = scaled.get(v) else { continue };
        if users[&product.out(0)].len() == 1 && g.ty(*d).dtype == g.ty(z).dtype {
            found.insert(id, RowGradient { product, d: *d, z, row });
        }
    }
    found
}

/// Values that one layer computes and another reads. Where the reader is an addition fused with a norm, its sum replaces both
/// of its terms: one tensor per layer is kept, not two.
fn boundary(g: &Graph, forward: usize) -> HashSet<Value> {
    let layer: Vec<Option<&str>> = g.nodes[..forward].iter().map(|n| layer_of(&n.path)).collect();
    let mut boundary = HashSet::new();
    for id in (0..forward as u32).map(NodeId) {
        let node = g.node(id);
        let crosses = |v: &&Value| layer[v.node.0 as usize] != layer[id.0 as usize];
        match node.op {
            Op::RmsNorm { residual: true, .. } | Op::DoubleNorm { .. }
                if node.ins[..2].iter().any(|v| crosses(&v)) =>
            {
                boundary.insert(id.out(1));
            }
            _ => boundary.extend(node.ins.iter().filter(crosses)),
        }
    }
    boundary
}

/// The path up to its first number: `layers.3` for `layers.3.attn.wq`.
pub fn layer_of(path: &str) -> Option<&str> {
    let mut end = 0;
    for piece in path.split('.') {
        end += piece.len();
        if !piece.is_empty() && piece.bytes().all(|b| b.is_ascii_digit()) {
            return Some(&path[..end]);
        }
        end += 1;
    }
    None
}
