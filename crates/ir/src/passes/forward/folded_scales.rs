//! Folds a learned scale after a linear layer into its weight and bias: (x W + b) s = x (W s) + b s. Scaling is then a pass
//! over the weight, not over the activations, and the scale's gradient comes from the weight's: the gradients of the scaled
//! weight and bias, times W and b and summed, are ds.

use std::collections::HashMap;

use crate::graph::{Graph, NodeId, Value};
use crate::ops::Op;
use crate::ops::elementwise::Elementwise as E;
use crate::ops::epilogue::Epilogue;
use crate::ops::product;
use crate::passes::readers::Readers;
use crate::replay::{Replay, without_dead};

/// Folds scales of columns in a forward graph; returns their number.
pub fn folded_scales(g: &Graph) -> (Graph, usize) {
    let find = Readers::new(g);
    let all: HashMap<NodeId, Scaled> =
        g.ids().filter_map(|id| scaled(&find, id)).map(|scaled| (scaled.product, scaled)).collect();
    let mut replay = Replay::new(g);
    // Slots can be read at any time: this makes the scale available at the product.
    for id in g.ids().filter(|id| matches!(g.node(*id).op, Op::Read { .. })) {
        replay.copy(id);
    }
    for id in g.ids().filter(|id| !matches!(g.node(*id).op, Op::Read { .. })) {
        match all.get(&id) {
            Some(scaled) => fold(&mut replay, scaled),
            None if replay.has(id.out(0)) => {}
            None => _ = replay.copy(id),
        }
    }
    (without_dead(&replay.finish()), all.len())
}

/// A product, the bias addition after it (node and row), and the scale after that.
struct Scaled {
    product: NodeId,
    bias: Option<(NodeId, Value)>,
    times: NodeId,
    /// The read of a slot of one axis.
    scale: Value,
}

fn fold(replay: &mut Replay<'_>, scaled: &Scaled) {
    let Scaled { product, bias, times, scale } = *scaled;
    let node = replay.old.node(product);
    let Op::Product { tb, .. } = node.op else { unreachable!("found as a product") };
    let (scale, columns) = (replay.get(scale), node.outs[0].dims[1]);
    let by = |replay: &mut Replay<'_>, x: Value, as_dims: [usize; 2], at: NodeId| {
        let dims = replay.new.dims(x).to_vec();
        let row = replay.add(Op::Reshape { dims: as_dims.into() }, vec![scale], at);
        let row = replay.add(Op::Broadcast { dims }, vec![row], at);
        replay.add(Op::Map { f: E::Mul }, vec![x, row], at)
    };
    let weight = replay.get(node.ins[1]);
    let weight = by(replay, weight, if tb { [columns, 1] } else { [1, columns] }, product);
    let row = bias.map(|(add, row)| {
        let row = replay.get(row);
        let row = replay.add(Op::Reshape { dims: vec![1, columns] }, vec![row], add);
        by(replay, row, [1, columns], add)
    });
    let ins = vec![replay.get(node.ins[0]), weight];
    let mut out = replay.copy_as(product, node.op.clone(), ins).out(0);
    if let (Some((add, _)), Some(row)) = (bias, row) {
        let repeated = replay.add(Op::Broadcast { dims: node.outs[0].dims.clone() }, vec![row], add);
        out = replay.copy_as(add, Op::Map { f: E::Add }, vec![out, repeated]).out(0);
    }
    replay.set(times.out(0), out);
}

/// The scaled product that begins with `product`. Only where there are more rows than in the weight: otherwise the pass over
/// the weight would be the longer one.
fn scaled(find: &Readers<'_>, product: NodeId) -> Option<Scaled> {
    let node = find.g.node(product);
    let Op::Product { ta, base: false, epilogue: Epilogue::None, .. } = node.op else { return None };
    let [rows, columns] = node.outs[0].dims[..] else { return None };
    if rows < product::inner(ta, find.g.ty(node.ins[0])) {
        return None;
    }
    let bias = find.bias(product);
    let last = bias.map_or(product, |(add, _)| add);
    let times = find.only(last, E::Mul)?;
    let scale = find.repeated_row(times, last)?;
    let is_slot = matches!(find.g.node(scale.node).op, Op::Read { .. });
    (is_slot && find.g.dims(scale) == [columns]).then_some(Scaled { product, bias, times, scale })
}
