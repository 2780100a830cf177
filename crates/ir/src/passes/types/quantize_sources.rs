//! Fuses quantisation with the operation that computes its input: gated activations and norms that are only read in 8 bits,
//! which saves a write and a read of the tensor, and their gradients. A gradient that also computes the activation or the
//! norm again writes only its codes along columns.

use std::collections::{HashMap, HashSet};

use crate::graph::{Graph, NodeId, Value};
use crate::ops::Op;
use crate::ops::norm::{self, NormSpec};
use crate::ops::quantize::{FORWARD, Source};
use crate::passes::readers::Readers;
use crate::replay::Replay;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Joined {
    /// Activations and their gradients.
    pub gated: usize,
    /// Norms and their gradients.
    pub norms: usize,
    /// Gradients among them that also write codes of the activation or of the norm.
    pub again: usize,
}

/// Fuses them. The nodes left over have no reader.
pub fn quantize_sources(g: &Graph) -> (Graph, Joined) {
    let readers = Readers::new(g);
    let pairs = g.ids().filter_map(|id| pair(&readers, id));
    let pairs: HashMap<NodeId, Pair> = pairs.map(|pair| (pair.at, pair)).collect();
    let gone: HashSet<NodeId> = pairs.values().flat_map(Pair::gone).collect();
    let (mut replay, mut joined) = (Replay::new(g), Joined::default());
    for id in g.ids() {
        if let Some(pair) = pairs.get(&id) {
            pair.place(&mut replay);
            match pair.of {
                Source::Norm(..) | Source::NormGrad { .. } => joined.norms += 1,
                _ => joined.gated += 1,
            }
            joined.again += pair.again.is_some() as usize;
        } else if !gone.contains(&id) {
            replay.copy(id);
        }
    }
    (replay.finish(), joined)
}

/// An operation and the node that quantises its result.
struct Pair {
    /// The operation, where the fused one stands.
    at: NodeId,
    of: Source,
    quantize: NodeId,
    /// The concatenation in between.
    concat: Option<NodeId>,
    /// The node that quantises what a gradient computes again.
    again: Option<NodeId>,
}

/// The pair of an operation whose result `quantize` quantises.
fn pair(readers: &Readers<'_>, quantize: NodeId) -> Option<Pair> {
    let g = readers.g;
    let Op::Quantize { current: false, of: Source::Given, .. } = g.node(quantize).op else { return None };
    let x = g.node(quantize).ins[0];
    let is_sole = readers.sole(x) == Some(quantize);
    let pair = |of: Source| Pair { at: x.node, of, quantize, concat: None, again: None };
    let op = &g.node(x.node).op;
    match *op {
        Op::Gated { act, p: 0.0 } if is_sole => Some(pair(Source::Gated(act))),
        Op::Concat { axis: 1 } if is_sole => gated_gradient(readers, x.node, quantize),
        Op::RmsNorm { residual, .. } if x.out == 0 && is_sole => {
            let of = Source::Norm(NormSpec::of(op)?.0, residual);
            of.takes(g.ty(x).last()).then(|| pair(of))
        }
        // Something else may read a gradient, which is then stored as well.
        Op::RmsNormGrad { add, .. } if x.out == 0 => {
            let norm = norm::again_at(op).map(|at| x.node.out(at as u8));
            let again = match norm {
                Some(norm) => Some(sole_columns(readers, norm)?),
                None => None,
            };
            let of = Source::NormGrad { spec: NormSpec::of(op)?.0, add, again: again.is_some() };
            of.takes(g.ty(x).last()).then(|| Pair { again, ..pair(of) })
        }
        _ => None,
    }
}

/// The pair of a gated activation's gradient, if all its outputs are only read in 8 bits.
fn gated_gradient(readers: &Readers<'_>, concat: NodeId, quantize: NodeId) -> Option<Pair> {
    let g = readers.g;
    let [gate, up] = g.node(concat).ins[..] else { return None };
    let Op::GatedGrad { act, again, p: 0.0 } = g.node(gate.node).op else { return None };
    let is_both = (gate, up) == (gate.node.out(0), gate.node.out(1));
    let are_sole = [gate, up].iter().all(|half| readers.sole(*half) == Some(concat));
    let of_again = || sole_columns(readers, gate.node.out(2));
    let again = if again { Some(of_again()?) } else { None };
    let of = Source::GatedGrad { act, again: again.is_some() };
    (is_both && are_sole).then_some(Pair { at: gate.node, of, quantize, concat: Some(concat), again })
}

/// The node that quantises a value which nothing else reads, if only its codes along columns are wanted.
fn sole_columns(readers: &Readers<'_>, x: Value) -> Option<NodeId> {
    let id = readers.sole(x)?;
    let is_given =
        matches!(readers.g.node(id).op, Op::Quantize { to: FORWARD, current: false, of: Source::Given });
    let is_read = |out: u8| readers.of_value(id.out(out)).1 > 0;
    (is_given && !is_read(0) && !is_read(2)).then_some(id)
}

impl Pair {
    /// The nodes that the fused one replaces.
    fn gone(&self) -> impl Iterator<Item = NodeId> {
        [Some(self.at), Some(self.quantize), self.concat, self.again].into_iter().flatten()
    }

    /// Adds the operation, quantised as `quantize` would quantise it.
    fn place(&self, replay: &mut Replay<'_>) {
        let Pair { at, of, quantize, .. } = *self;
        let g = replay.old;
        let Op::Quantize { to, .. } = g.node(quantize).op else { unreachable!("found because it quantises") };
        let mut ins: Vec<Value> = g.node(at).ins.iter().map(|v| replay.get(*v)).collect();
        // Scales and largest magnitudes are slots, which can be read at any node.
        let mut read = |v: Value| ins.push(replay.add(g.node(v.node).op.clone(), vec![], quantize));
        self.again.iter().for_each(|again| read(g.node(*again).ins[1]));
        g.node(quantize).ins[1..].iter().for_each(|v| read(*v));
        let is_norm = matches!(of, Source::Norm(..) | Source::NormGrad { .. });
        let path = &g.node(if is_norm { at } else { quantize }).path;
        let op = Op::Quantize { to, current: false, of };
        let new = replay.new.push_keyed(op, ins, path, g.node(quantize).key);
        (0..3).for_each(|out| replay.set(quantize.out(out), new.out(out)));
        let outs = replay.new.node(new).outs.len() as u8;
        if let Some(again) = self.again {
            replay.set(again.out(1), new.out(outs - 1));
        }
        // The first output of a norm is dropped, that of a gradient becomes the fourth.
        if is_norm {
            let skipped = matches!(of, Source::Norm(..)) as u8;
            for out in 3..outs - self.again.is_some() as u8 {
                replay.set(at.out(out - 3 + skipped), new.out(out));
            }
        }
    }
}
