//! Fuses a norm, the residual addition after it and the norm after that into one operation, and likewise their gradients where
//! the weights are frozen: the values between them no longer cross memory.
//!
//! A sum h = x + norm(y) can be recomputed from x and y, and the gradient then reads those instead. Where x is kept for the
//! previous gradient anyway this is free, so every other sum of the residual stream need not be kept.

use std::collections::{HashMap, HashSet};

use crate::graph::{Graph, NodeId, Value};
use crate::ops::double_norm::DoubleNorm;
use crate::ops::norm::NormSpec;
use crate::ops::{Op, OpKind};
use crate::passes::readers::Readers;
use crate::replay::Replay;
use crate::target::Target;
use crate::types::DType;

/// Fuses norms in pairs where the target has kernels for it. Also returns the new number of forward nodes, and the numbers of
/// pairs fused forward and backward.
pub fn double_norms(g: &Graph, forward: usize, target: &Target) -> (Graph, usize, [usize; 2]) {
    let has = |op: OpKind| target.kernel(op, DType::BF16).is_some();
    if !has(OpKind::DoubleNorm) || !has(OpKind::DoubleNormGrad) {
        return (g.clone(), forward, [0, 0]);
    }
    let readers = Readers::new(g);
    let mut pairs: HashMap<NodeId, Pair> = HashMap::new();
    let mut slopes: HashMap<NodeId, Slope> = HashMap::new();
    let mut unkept: HashSet<Value> = HashSet::new();
    for pair in (0..forward as u32).filter_map(|id| pair(&readers, NodeId(id))) {
        if let Some(found) = slope(&readers, &pair) {
            let of_sum = unkept.contains(&pair.x);
            if !of_sum {
                unkept.insert(pair.last.out(1));
            }
            slopes.insert(found.first, Slope { of_sum, ..found });
        }
        pairs.insert(pair.last, pair);
    }
    let gone: HashSet<NodeId> =
        pairs.values().map(|pair| pair.first).chain(slopes.values().map(|slope| slope.last)).collect();
    let mut replay = Replay::new(g);
    let mut translated = forward;
    for id in g.ids() {
        if id.0 as usize == forward {
            translated = replay.new.nodes.len();
        }
        if let Some(pair) = pairs.get(&id) {
            let DoubleNorm { inner, outer } = pair.norms;
            let ins = [pair.y, pair.x, pair.weights[0], pair.weights[1]].map(|v| replay.get(v));
            replay.copy_as(id, Op::DoubleNorm { inner, outer }, ins.to_vec());
        } else if let Some(slope) = slopes.get(&id) {
            let Slope { ref pair, add, of_sum, .. } = *slope;
            let DoubleNorm { inner, outer } = pair.norms;
            let x = if of_sum { pair.last.out(1) } else { pair.x };
            let ins = [pair.y, x, pair.weights[0], pair.weights[1]];
            let ins = ins.iter().chain(&g.node(id).ins[2..]).map(|v| replay.get(*v)).collect();
            let op = Op::DoubleNormGrad { inner, outer, add, of_sum };
            let node = g.node(id);
            let both = replay.new.push_keyed(op, ins, &node.path, node.key);
            replay.set(id.out(0), both.out(0));
            replay.set(slope.last.out(0), both.out(1));
        } else if !gone.contains(&id) {
            replay.copy(id);
        }
    }
    (replay.finish(), translated, [pairs.len(), slopes.len()])
}

/// A norm whose result is only added to x and normed again.
#[derive(Clone)]
struct Pair {
    norms: DoubleNorm,
    first: NodeId,
    last: NodeId,
    y: Value,
    x: Value,
    weights: [Value; 2],
}

fn pair(readers: &Readers<'_>, last: NodeId) -> Option<Pair> {
    let g = readers.g;
    let node = g.node(last);
    let Op::RmsNorm { residual: true, .. } = node.op else { return None };
    let (outer, _) = NormSpec::of(&node.op)?;
    [0, 1].into_iter().find_map(|i| {
        let (n, x) = (node.ins[i], node.ins[1 - i]);
        let first = g.node(n.node);
        let Op::RmsNorm { residual: false, .. } = first.op else { return None };
        let (inner, _) = NormSpec::of(&first.op)?;
        let norms = DoubleNorm::of(inner, outer)?;
        let weights = [first.ins[1], node.ins[2]];
        let is_alike = g.ty(n) == g.ty(x) && g.ty(weights[0]) == g.ty(weights[1]);
        (is_alike && readers.of_value(n).1 == 1).then_some(Pair {
            norms,
            first: n.node,
            last,
            y: first.ins[0],
            x,
            weights,
        })
    })
}

/// The gradients of a pair: `first` is that of the norm after the addition, and `last` reads its result.
struct Slope {
    pair: Pair,
    first: NodeId,
    last: NodeId,
    add: bool,
    /// Whether the sum is read rather than recomputed.
    of_sum: bool,
}

fn slope(readers: &Readers<'_>, pair: &Pair) -> Option<Slope> {
    let g = readers.g;
    // Trained weights need sums over rows, which the fused gradient does not compute.
    let is_grad = |id: &&NodeId, of: Value, spec: NormSpec| {
        let node = g.node(**id);
        let is_plain = matches!(node.op, Op::RmsNormGrad { sum: false, .. });
        is_plain
            && node.ins[0] == of
            && NormSpec::of(&node.op).is_some_and(|(norm, _)| norm == spec)
            && readers.of_value(id.out(1)).1 == 0
    };
    let h = pair.last.out(1);
    let first = *readers.of_value(h).0.iter().find(|id| is_grad(id, h, pair.norms.outer))?;
    let is_last = |id: &&NodeId| is_grad(id, pair.y, pair.norms.inner) && g.node(**id).ins[2] == first.out(0);
    let last = *readers.of_value(first.out(0)).0.iter().find(is_last)?;
    let &Op::RmsNormGrad { add, .. } = &g.node(first).op else { return None };
    let is_alike = g.node(first).ins[2..].iter().all(|d| g.ty(*d) == g.ty(h)) && g.ty(pair.y) == g.ty(h);
    let is_inner_plain = matches!(g.node(last).op, Op::RmsNormGrad { add: false, .. });
    (is_alike && is_inner_plain).then(|| Slope { pair: pair.clone(), first, last, add, of_sum: false })
}
