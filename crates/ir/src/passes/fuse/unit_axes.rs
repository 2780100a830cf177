//! Computes small elementwise values in the shape in which they are read, so that adding or removing an axis of extent 1 does
//! not separate neighbours. Gradients of biases are rows [1, N] that become vectors [N].

use crate::graph::{Graph, Value};
use crate::ops::Op;
use crate::replay::{Replay, users, without_dead};

/// The most elements of a small value. Larger values stay where they are computed, so that their inputs need not be kept.
const SMALL: usize = 1 << 15;

pub fn unit_axes(g: &Graph) -> Graph {
    let (uses, users) = (g.uses(), users(g));
    let is_map = |v: Value| matches!(g.node(v.node).op, Op::Map { .. });
    // A value that other movements read may have neighbours in its present shape.
    let is_for_maps = |v: Value| users.get(&v).is_some_and(|by| by.iter().all(|id| is_map(id.out(0))));
    let is_read_once = |v: Value| uses[v.node.0 as usize][v.out as usize] == 1;
    let mut replay = Replay::new(g);
    for (id, node) in g.ids().zip(&g.nodes) {
        match &node.op {
            Op::Reshape { dims } if is_for_maps(id.out(0)) => {
                let v = reshaped(&mut replay, &is_read_once, node.ins[0], dims);
                replay.set(id.out(0), v);
            }
            _ => _ = replay.copy(id),
        }
    }
    without_dead(&replay.finish())
}

/// A value in other extents, through elementwise nodes that only this reshape reads.
fn reshaped(replay: &mut Replay<'_>, once: &impl Fn(Value) -> bool, v: Value, dims: &[usize]) -> Value {
    let node = replay.old.node(v.node);
    let long = |dims: &[usize]| dims.iter().copied().filter(|n| *n != 1).collect::<Vec<usize>>();
    let ty = replay.old.ty(v);
    let is_moved = matches!(node.op, Op::Map { .. })
        && once(v)
        && ty.elements() <= SMALL
        && long(&ty.dims) == long(dims);
    if !is_moved {
        let from = replay.get(v);
        return replay.add(Op::Reshape { dims: dims.to_vec() }, vec![from], v.node);
    }
    let ins = node.ins.iter().map(|input| reshaped(replay, once, *input, dims)).collect();
    replay.new.push_keyed(node.op.clone(), ins, &node.path, node.key).out(0)
}
