//! Fuses quantisation with the operation that computes its input: gated activations and norms that are only read in 8 bits,
//! which saves a write and a read of the tensor, and gradients of norms, which saves a read.

use std::collections::HashMap;

use crate::graph::{Graph, NodeId, Value};
use crate::ops::Op;
use crate::ops::norm::NormSpec;
use crate::ops::quantize::Source;
use crate::replay::Replay;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Joined {
    /// Activations and their gradients.
    pub gated: usize,
    /// Norms and their gradients.
    pub norms: usize,
}

/// Fuses them. The nodes left over have no reader.
pub fn quantize_sources(g: &Graph) -> (Graph, Joined) {
    let uses = g.uses();
    let once = |v: Value| uses[v.node.0 as usize][v.out as usize] == 1;
    let norms = norms(g, &once);
    let (mut replay, mut joined) = (Replay::new(g), Joined::default());
    for (id, node) in g.ids().zip(&g.nodes) {
        if let Some((of, quantize)) = norms.get(&id) {
            norm(&mut replay, id, *of, *quantize);
            joined.norms += 1;
            continue;
        }
        let Op::Quantize { to, current: false, of: Source::Given } = node.op else {
            replay.copy(id);
            continue;
        };
        match gated(g, node.ins[0], &once) {
            Some((of, ins)) => {
                let ins = ins.iter().chain(&node.ins[1..]).map(|v| replay.get(*v)).collect();
                replay.copy_as(id, Op::Quantize { to, current: false, of }, ins);
                joined.gated += 1;
            }
            // The norm before it already quantised.
            None if replay.has(id.out(0)) => {}
            None => _ = replay.copy(id),
        }
    }
    (replay.finish(), joined)
}

/// The source operation and inputs of a gated value that nothing else reads.
fn gated<'g>(g: &'g Graph, x: Value, once: &impl Fn(Value) -> bool) -> Option<(Source, &'g [Value])> {
    let node = g.node(x.node);
    match node.op {
        Op::Gated { act, p: 0.0 } if once(x) => Some((Source::Gated(act), &node.ins)),
        Op::Concat { axis: 1 } if once(x) => {
            let [gate, up] = node.ins[..] else { return None };
            let Op::GatedGrad { act, again: false, p: 0.0 } = g.node(gate.node).op else { return None };
            let is_both = up.node == gate.node && (gate.out, up.out) == (0, 1) && once(gate) && once(up);
            is_both.then(|| (Source::GatedGrad(act), &g.node(gate.node).ins[..]))
        }
        _ => None,
    }
}

/// Norms, and gradients of norms, each with the node that quantises its result. A norm has no other reader; a gradient may.
fn norms(g: &Graph, once: &impl Fn(Value) -> bool) -> HashMap<NodeId, (Source, NodeId)> {
    let mut found = HashMap::new();
    for (id, node) in g.ids().zip(&g.nodes) {
        let Op::Quantize { current: false, of: Source::Given, .. } = node.op else { continue };
        let x = node.ins[0];
        let Some((spec, adds)) = NormSpec::of(&g.node(x.node).op).filter(|_| x.out == 0) else { continue };
        let of = match g.node(x.node).op {
            Op::RmsNorm { .. } if once(x) => Source::Norm(spec, adds),
            Op::RmsNormGrad { again: false, .. } => Source::NormGrad(spec, adds),
            _ => continue,
        };
        if of.takes(g.ty(x).last()) {
            found.insert(x.node, (of, id));
        }
    }
    found
}

/// The norm `id`, in place, quantised as `quantize` would quantise it.
fn norm(replay: &mut Replay<'_>, id: NodeId, of: Source, quantize: NodeId) {
    let g = replay.old;
    let Op::Quantize { to, .. } = g.node(quantize).op else { unreachable!("found because it quantises") };
    let mut ins: Vec<Value> = g.node(id).ins.iter().map(|v| replay.get(*v)).collect();
    // Scale and largest magnitude are slots, which can be read at any node.
    for v in &g.node(quantize).ins[1..] {
        ins.push(replay.add(g.node(v.node).op.clone(), vec![], quantize));
    }
    let (path, key) = (&g.node(id).path, g.node(quantize).key);
    let new = replay.new.push_keyed(Op::Quantize { to, current: false, of }, ins, path, key);
    (0..3).for_each(|out| replay.set(quantize.out(out), new.out(out)));
    // The first output of a norm is dropped, that of a gradient becomes the fourth.
    let skipped = matches!(of, Source::Norm(..)) as u8;
    for out in skipped..g.node(id).outs.len() as u8 {
        replay.set(id.out(out), new.out(3 + out - skipped));
    }
}
