//! Fuses products with the gated activation after them and, in the backward pass, with its gradient: gate and up are activated
//! while the product still has them in registers, and the gradient of the activation's value is never stored. Products of 8 bits
//! are fused with activations that are quantised, if only their codes along rows are wanted.

use std::collections::{HashMap, HashSet};

use crate::graph::{Graph, NodeId, Value};
use crate::ops::epilogue::Epilogue;
use crate::ops::product::Compute;
use crate::ops::quantize::{FORWARD, Source};
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

/// Fuses products of 8-bit operands with gated activations that are quantised by a given scale, where the target has a kernel;
/// returns their number.
pub fn gated_codes(g: &Graph, target: &Target) -> (Graph, usize) {
    if target.kernel(OpKind::GatedProduct, FORWARD).is_none() {
        return (g.clone(), 0);
    }
    let readers = Readers::new(g);
    let gates: HashMap<NodeId, NodeId> =
        g.ids().filter_map(|id| Some((id, quantized_activation(&readers, id)?))).collect();
    let gone: HashSet<NodeId> = gates.values().copied().collect();
    let mut replay = Replay::new(g);
    for id in g.ids() {
        let node = g.node(id);
        if let Some(quantize) = gates.get(&id) {
            let Op::Quantize { of: Source::Gated(act), .. } = g.node(*quantize).op else {
                unreachable!("found as a quantised activation")
            };
            let mut ins: Vec<Value> = node.ins.iter().map(|v| replay.get(*v)).collect();
            // Slots, which can be read at any node.
            for v in &g.node(*quantize).ins[2..] {
                ins.push(replay.add(g.node(v.node).op.clone(), vec![], id));
            }
            let all = replay.new.push_keyed(Op::GatedProduct { act }, ins, &node.path, node.key);
            replay.set(id.out(0), all.out(0));
            replay.set(quantize.out(0), all.out(1));
            replay.set(quantize.out(2), all.out(2));
        } else if !gone.contains(&id) {
            replay.copy(id);
        }
    }
    (without_dead(&replay.finish()), gates.len())
}

/// Whether a node is a plain product of two bf16 matrices in bf16, with the second stored as `transposed` says.
fn is_product(g: &Graph, id: NodeId, transposed: bool) -> bool {
    is_product_of(g, id, transposed) && g.node(id).ins.iter().all(|v| g.ty(*v).dtype == DType::BF16)
}

/// Whether a node is a plain product of two matrices in bf16, with the second stored as `transposed` says.
fn is_product_of(g: &Graph, id: NodeId, transposed: bool) -> bool {
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
    is_plain && node.outs[0].rank() == 2
}

/// The activation that reads a product's first half as the gate and the other half as up, where both halves are read again: by
/// its gradient.
fn activation(readers: &Readers<'_>, product: NodeId) -> Option<NodeId> {
    is_product(readers.g, product, true).then_some(())?;
    reader_of_halves(readers, product, |op| matches!(op, Op::Gated { p: 0.0, .. }))
}

/// The node that quantises such an activation of a product of 8-bit operands by a scale that is a slot, where its codes along
/// columns are not wanted.
fn quantized_activation(readers: &Readers<'_>, product: NodeId) -> Option<NodeId> {
    let g = readers.g;
    let is_narrow = g.node(product).ins.iter().take(2).all(|v| g.ty(*v).dtype == FORWARD);
    (is_product_of(g, product, true) && is_narrow).then_some(())?;
    let is_quantized =
        |op: &Op| matches!(op, Op::Quantize { to: FORWARD, current: false, of: Source::Gated(_) });
    let quantize = reader_of_halves(readers, product, is_quantized)?;
    let is_slot = |v: &Value| matches!(g.node(v.node).op, Op::Read { .. });
    let is_read = |out: u8| readers.of_value(quantize.out(out)).1 > 0;
    let has_outputs = is_read(0) && is_read(2) && !is_read(1);
    (has_outputs && g.node(quantize).ins[2..].iter().all(is_slot)).then_some(quantize)
}

/// The node of a kind that reads a product's first half and its other half, where both halves are read again.
fn reader_of_halves(
    readers: &Readers<'_>,
    product: NodeId,
    is_wanted: impl Fn(&Op) -> bool,
) -> Option<NodeId> {
    let g = readers.g;
    let half = g.node(product).outs[0].dims[1] / 2;
    let is_half = |v: Value, from: usize| {
        let node = g.node(v.node);
        node.op == Op::Slice { axis: 1, start: from, len: half } && node.ins == [product.out(0)]
    };
    let is_gated = |id: &&NodeId| {
        let node = g.node(**id);
        is_wanted(&node.op) && is_half(node.ins[0], 0) && is_half(node.ins[1], half)
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
