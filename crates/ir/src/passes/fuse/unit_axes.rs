//! An axis of extent 1 that comes or goes does not part small elementwise neighbours: the first is computed in the shape the
//! second reads it in. Gradients of biases are rows [1, N] on the way to vectors [N].

use crate::graph::{Graph, Value};
use crate::ops::Op;
use crate::replay::{Replay, users, without_dead};

/// Elements of what is small: larger values stay where they are computed, for the sake of what they are made of.
const SMALL: usize = 1 << 15;

pub fn unit_axes(g: &Graph) -> Graph {
    let (uses, users) = (g.uses(), users(g));
    let is_map = |v: Value| matches!(g.node(v.node).op, Op::Map { .. });
    // A value read by other movements may have its neighbours in the shape it has.
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
