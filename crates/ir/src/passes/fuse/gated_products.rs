//! Fuses products with the gated activation after them and, in the backward pass, with its gradient: gate and up are activated
//! while the product still has them in registers, and the gradient of the activation's value is never stored.

use std::collections::{HashMap, HashSet};

use crate::graph::{Graph, NodeId, Value};
use crate::ops::epilogue::Epilogue;
use crate::ops::product::Compute;
use crate::ops::{Op, OpKind};
use crate::passes::readers::Readers;
use crate::replay::{Replay, without_dead};
use crate::target::Target;
use crate::types::DType;

/// Fuses products with gated activations and with their gradients, where the target has kernels; returns both numbers.
pub fn gated_products(g: &Graph, target: &Target) -> (Graph, [usize; 2]) {
    let has = |op: OpKind| target.kernel(op, DType::BF16).is_some();
    if !has(OpKind::GatedProduct) || !has(OpKind::GatedProductGrad) {
        return (g.clone(), [0, 0]);
    }
    let readers = Readers::new(g);
    let gates: HashMap<NodeId, NodeId> =
        g.ids().filter_map(|id| Some((id, activation(&readers, id)?))).collect();
    let slopes: HashMap<NodeId, NodeId> =
        g.ids().filter_map(|id| Some((id, gradient(&readers, id)?))).collect();
    let gone: HashSet<NodeId> = gates.values().chain(slopes.values()).copied().collect();
    let mut replay = Replay::new(g);
    for id in g.ids() {
        let node = g.node(id);
        if let Some(gated) = gates.get(&id) {
            let Op::Gated { act, .. } = g.node(*gated).op else {
                unreachable!("found as a gated activation")
            };
            let ins = node.ins.iter().map(|v| replay.get(*v)).collect();
            let both = replay.new.push_keyed(Op::GatedProduct { act }, ins, &node.path, node.key);
            replay.set(id.out(0), both.out(0));
            replay.set(gated.out(0), both.out(1));
        } else if let Some(product) = slopes.get(&id) {
            let Op::GatedGrad { act, again, .. } = node.op else { unreachable!("found as a gradient") };
            let ins = g.node(*product).ins.iter().chain(&node.ins[..2]).map(|v| replay.get(*v)).collect();
            replay.copy_as(id, Op::GatedProductGrad { act, again }, ins);
        } else if !gone.contains(&id) {
            replay.copy(id);
        }
    }
    (without_dead(&replay.finish()), [gates.len(), slopes.len()])
}

/// Whether a node is a plain product of two bf16 matrices in bf16, with the second stored as `transposed` says.
fn is_product(g: &Graph, id: NodeId, transposed: bool) -> bool {
    let node = g.node(id);
    let is_plain = matches!(
        node.op,
        Op::Product {
            ta: false,
            tb,
            out: DType::BF16,
            base: false,
            compute: Compute::Full,
            epilogue: Epilogue::None
        } if tb == transposed
    );
    is_plain && node.outs[0].rank() == 2 && node.ins.iter().all(|v| g.ty(*v).dtype == DType::BF16)
}

/// The activation that reads a product's first half as the gate and the other half as up, where both halves are read again: by
/// its gradient.
fn activation(readers: &Readers<'_>, product: NodeId) -> Option<NodeId> {
    let g = readers.g;
    is_product(g, product, true).then_some(())?;
    let half = g.node(product).outs[0].dims[1] / 2;
    let is_half = |v: Value, from: usize| {
        let node = g.node(v.node);
        node.op == Op::Slice { axis: 1, start: from, len: half } && node.ins == [product.out(0)]
    };
    let is_gated = |id: &&NodeId| {
        let node = g.node(**id);
        let is_kept = matches!(node.op, Op::Gated { p: 0.0, .. });
        is_kept && is_half(node.ins[0], 0) && is_half(node.ins[1], half)
    };
    let (halves, _) = readers.of_value(product.out(0));
    // Halves that nothing else reads would not have to be stored, which would take another kernel.
    let is_read_again = halves.iter().any(|half| readers.of_value(half.out(0)).1 > 1);
    halves.iter().flat_map(|half| readers.of(*half)).find(is_gated).copied().filter(|_| is_read_again)
}

/// The product whose only use is as the gradient of a gated activation's value.
fn gradient(readers: &Readers<'_>, id: NodeId) -> Option<NodeId> {
    let g = readers.g;
    let node = g.node(id);
    let Op::GatedGrad { p: 0.0, .. } = node.op else { return None };
    let dy = node.ins[2];
    let is_both_wanted = [0, 1].into_iter().all(|out| readers.of_value(id.out(out)).1 > 0);
    (is_both_wanted && is_product(g, dy.node, false) && readers.sole(dy) == Some(id)).then_some(dy.node)
}
