//! Gated activations and their gradients that are only quantised are computed by what quantises them: the tensor between
//! the two was a pass out and a pass in.

use crate::graph::{Graph, Value};
use crate::op::Op;
use crate::ops::quantize::Source;
use crate::replay::Replay;

/// Joins them; returns how many. What is left of the activations has no reader.
pub fn quantize_sources(g: &Graph) -> (Graph, usize) {
    let uses = g.uses();
    let once = |v: Value| uses[v.node.0 as usize][v.out as usize] == 1;
    let (mut replay, mut joined) = (Replay::new(g), 0);
    for (id, node) in g.ids().zip(&g.nodes) {
        let Op::Quantize { to, current: false, of: Source::Given } = node.op else {
            replay.copy(id);
            continue;
        };
        match source(g, node.ins[0], &once) {
            Some((of, ins)) => {
                let ins = ins.iter().chain(&node.ins[1..]).map(|v| replay.get(*v)).collect();
                replay.copy_as(id, Op::Quantize { to, current: false, of }, ins);
                joined += 1;
            }
            None => _ = replay.copy(id),
        }
    }
    (replay.finish(), joined)
}

/// What a value is made of, where nobody else reads it.
fn source<'g>(g: &'g Graph, x: Value, once: &impl Fn(Value) -> bool) -> Option<(Source, &'g [Value])> {
    let node = g.node(x.node);
    match node.op {
        Op::Gated { act } if once(x) => Some((Source::Gated(act), &node.ins)),
        Op::Concat { axis: 1 } if once(x) => {
            let [gate, up] = node.ins[..] else { return None };
            let Op::GatedGrad { act, again: false } = g.node(gate.node).op else { return None };
            let is_both = up.node == gate.node && (gate.out, up.out) == (0, 1) && once(gate) && once(up);
            is_both.then(|| (Source::GatedGrad(act), &g.node(gate.node).ins[..]))
        }
        _ => None,
    }
}
