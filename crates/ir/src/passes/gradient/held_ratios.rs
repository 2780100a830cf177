//! Removes multiplications by m / stop_gradient(m), which equals 1 but has a gradient: once the gradient is in the graph, the
//! forward and the backward pass no longer need the factor, and every stop-gradient becomes its argument.

use crate::graph::{Graph, Value};
use crate::ops::Op;
use crate::ops::elementwise::Elementwise as E;
use crate::passes::gradient::differentiate::Trained;
use crate::replay::{Replay, without_dead_before};

/// Removes the multiplications; returns their number.
pub fn held_ratios(trained: &Trained) -> (Trained, usize) {
    // The divisor's gradient is in the graph as well, but nothing reads it.
    let (g, old_forward) = without_dead_before(&trained.graph, trained.forward);
    let g = &g;
    let mut replay = Replay::new(g);
    let (mut forward, mut count) = (g.nodes.len(), 0);
    for id in g.ids() {
        if id.0 as usize == old_forward {
            forward = replay.new.nodes.len();
        }
        let node = g.node(id);
        match (&node.op, &node.ins[..]) {
            (Op::Map { f: E::Mul }, [x, by]) if is_one(g, *by) => {
                let x = replay.get(*x);
                replay.set(id.out(0), x);
                count += 1;
            }
            (Op::Map { f: E::StopGradient }, [x]) => {
                let x = replay.get(*x);
                replay.set(id.out(0), x);
            }
            _ => _ = replay.copy(id),
        }
    }
    let (graph, forward) = without_dead_before(&replay.finish(), forward);
    (Trained { graph, forward, weights: trained.weights.clone() }, count)
}

fn is_one(g: &Graph, v: Value) -> bool {
    let node = g.node(v.node);
    match (&node.op, &node.ins[..]) {
        (Op::Broadcast { .. } | Op::Reshape { .. }, [of]) => is_one(g, *of),
        (Op::Map { f: E::Div }, [m, by]) => {
            let divisor = g.node(by.node);
            divisor.op == Op::Map { f: E::StopGradient } && divisor.ins[0] == *m
        }
        _ => false,
    }
}
