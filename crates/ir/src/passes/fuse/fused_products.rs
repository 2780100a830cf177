//! Fuses products with the bias and GELU of a layer, or its ReLU, and in the backward pass with GELU's slope. Each was a
//! separate pass over memory.

use std::collections::HashMap;

use crate::graph::{Graph, NodeId, Value};
use crate::ops::Op;
use crate::ops::elementwise::Elementwise as E;
use crate::ops::epilogue::{Epilogue, with};
use crate::passes::readers::Readers;
use crate::replay::{Replay, without_dead};

/// Fuses `product + bias`, `gelu(product + bias)` and `relu(product)` in a forward graph; returns the number of products with
/// an epilogue.
pub fn forward(g: &Graph) -> (Graph, usize) {
    let find = Readers::new(g);
    let mut replay = Replay::new(g);
    // Slots can be read at any time: reading them first lets a product stay in place and still have its bias.
    for id in g.ids().filter(|id| matches!(g.node(*id).op, Op::Read { .. })) {
        replay.copy(id);
    }
    let mut joined = 0;
    for id in g.ids().filter(|id| !matches!(g.node(*id).op, Op::Read { .. })) {
        if replay.has(id.out(0)) {
            continue;
        }
        if let Some(relu) = relu(&find, id) {
            let ins = g.node(id).ins.iter().map(|v| replay.get(*v)).collect();
            let op = with(&g.node(id).op, Epilogue::Relu).expect("found as a plain product");
            let product = replay.copy_as(id, op, ins);
            replay.set(relu.out(0), product.out(0));
            joined += 1;
            continue;
        }
        let Some(layer) = layer(&find, id) else {
            replay.copy(id);
            continue;
        };
        let epilogue = match (layer.bias, layer.gelu) {
            (Some(_), Some(_)) => Epilogue::BiasGelu,
            (Some(_), None) => Epilogue::Bias,
            (None, _) => Epilogue::Gelu,
        };
        let mut ins: Vec<Value> = g.node(id).ins.iter().map(|v| replay.get(*v)).collect();
        if let Some((_, bias)) = layer.bias {
            let columns = g.node(id).outs[0].dims[1];
            let mut bias = replay.get(bias);
            if replay.new.dims(bias) != [columns] {
                bias = replay.add(Op::Reshape { dims: vec![columns] }, vec![bias], id);
            }
            ins.push(bias);
        }
        let op = with(&g.node(id).op, epilogue).expect("found as a plain product");
        let (path, key) = (&g.node(id).path, g.node(id).key);
        let product = replay.new.push_keyed(op, ins, path, key);
        let before = layer.bias.map_or(id, |(add, _)| add);
        match layer.gelu {
            Some(gelu) => {
                replay.set(gelu.out(0), product.out(0));
                replay.set(before.out(0), product.out(1));
            }
            None => replay.set(before.out(0), product.out(0)),
        }
        // The original product has no reader left.
        if before != id {
            replay.set(id.out(0), product.out(0));
        }
        joined += 1;
    }
    (without_dead(&replay.finish()), joined)
}

/// A product with the bias addition (node and row) and the GELU after it.
struct Layer {
    bias: Option<(NodeId, Value)>,
    gelu: Option<NodeId>,
}

fn layer(find: &Readers<'_>, id: NodeId) -> Option<Layer> {
    let node = find.g.node(id);
    with(&node.op, Epilogue::Bias).filter(|_| node.outs[0].rank() == 2)?;
    let bias = find.bias(id);
    let is_gelu = |n: &&NodeId| matches!(find.g.node(**n).op, Op::Map { f: E::Gelu });
    let gelu = find.of(bias.map_or(id, |(add, _)| add)).iter().find(is_gelu).copied();
    (bias.is_some() || gelu.is_some()).then_some(Layer { bias, gelu })
}

/// The ReLU that is the only reader of a product.
fn relu(find: &Readers<'_>, id: NodeId) -> Option<NodeId> {
    let node = find.g.node(id);
    with(&node.op, Epilogue::Relu).filter(|_| node.outs[0].rank() == 2)?;
    find.only(id, E::Relu)
}

/// Fuses `product * gelu'(h)` in a graph with gradients; returns their number. The sum that is a bias's gradient stays a
/// separate pass: a library's product that also sums takes longer than both.
pub fn backward(g: &Graph) -> (Graph, usize) {
    let uses = g.uses();
    let once = |v: Value| uses[v.node.0 as usize][v.out as usize] == 1;
    let mut replay = Replay::new(g);
    let slopes: HashMap<NodeId, (NodeId, Value)> =
        g.ids().filter_map(|id| Some((id, slope(g, id, &once)?))).collect();
    for id in g.ids().filter(|id| !slopes.values().any(|(product, _)| product == id)) {
        if let Some((product, h)) = slopes.get(&id) {
            let node = g.node(*product);
            let ins = node.ins.iter().chain([h]).map(|v| replay.get(*v)).collect();
            replay.copy_as(id, with(&node.op, Epilogue::GeluGrad).expect("chosen because it can"), ins);
        } else if !replay.has(id.out(0)) {
            replay.copy(id);
        }
    }
    (replay.finish(), slopes.len())
}

/// The product and h, where a node multiplies a product by GELU's slope at h.
fn slope(g: &Graph, id: NodeId, once: &impl Fn(Value) -> bool) -> Option<(NodeId, Value)> {
    let Op::Map { f: E::Mul } = g.node(id).op else { return None };
    let [a, b] = g.node(id).ins[..] else { return None };
    [(a, b), (b, a)].into_iter().find_map(|(product, slope)| {
        let (p, s) = (g.node(product.node), g.node(slope.node));
        let Op::Map { f: E::GeluSlope } = s.op else { return None };
        let fits = p.outs[0].rank() == 2 && once(product) && *g.ty(s.ins[0]) == p.outs[0];
        with(&p.op, Epilogue::GeluGrad).filter(|_| fits).map(|_| (product.node, s.ins[0]))
    })
}
