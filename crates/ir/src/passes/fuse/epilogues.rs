//! Fuses additions into the operation that computes one of the terms: products, scatters and the loss's weight gradient can add
//! to a base. A gradient sum then needs no memory of its own and no second pass.

use crate::graph::{Graph, NodeId, Value};
use crate::ops::Op;
use crate::ops::elementwise::Elementwise as E;
use crate::ops::thin_product::Thin;
use crate::replay::Replay;

/// Fuses additions into the nodes before them; returns their number.
pub fn epilogues(g: &Graph) -> (Graph, usize) {
    let uses = g.uses();
    let once = |v: Value| uses[v.node.0 as usize][v.out as usize] == 1;
    let mut replay = Replay::new(g);
    let mut folded = 0;
    // For each node, the addition that it is deferred to.
    let mut waiting: Vec<Option<NodeId>> = vec![None; g.nodes.len()];
    for (id, node) in g.ids().zip(&g.nodes) {
        if !matches!(node.op, Op::Map { f: E::Add }) {
            continue;
        }
        let fits = |v: &Value| {
            let (term, base) = (g.node(v.node), if *v == node.ins[0] { node.ins[1] } else { node.ins[0] });
            let free = waiting[v.node.0 as usize].is_none() && base.node != v.node && once(*v);
            free && with_base(&term.op, v.out).is_some() && g.ty(*v).dtype == g.ty(base).dtype
                // A loss node also computes values that others read before the addition: the base must be a slot.
                && (term.outs.len() == 1 || matches!(g.node(base.node).op, Op::Read { .. }))
        };
        // The later term can take the earlier one as its base.
        let mut terms = [node.ins[1], node.ins[0]];
        terms.sort_by_key(|v| std::cmp::Reverse(v.node));
        if let Some(term) = terms.into_iter().find(fits) {
            waiting[term.node.0 as usize] = Some(id);
            folded += 1;
        }
    }
    for (id, node) in g.ids().zip(&g.nodes) {
        if let Some(sum) = waiting[id.0 as usize] {
            // Where the base already exists, the sum moves to the term and not the term to the sum: a weight gradient deferred
            // to the end of the backward pass would keep its operands alive until then.
            let (_, base) = sides(g, sum, id);
            if let Op::Read { slot } = g.node(base.node).op
                && !replay.has(base)
            {
                let early = replay.add(Op::Read { slot }, vec![], base.node);
                replay.set(base, early);
            }
            if replay.has(base) {
                fold(&mut replay, sum, id);
            }
        } else if let Some(term) = node.ins.iter().find(|v| waiting[v.node.0 as usize] == Some(id)) {
            if !replay.has(id.out(0)) {
                fold(&mut replay, id, term.node);
            }
        } else if !replay.has(id.out(0)) {
            replay.copy(id);
        }
    }
    (replay.finish(), folded)
}

/// Appends the node `of` with the other term of `sum` as its base; one of its outputs is then the sum.
fn fold(replay: &mut Replay<'_>, sum: NodeId, of: NodeId) {
    let (term, base) = sides(replay.old, sum, of);
    let node = replay.old.node(of);
    let mut ins: Vec<Value> = node.ins.iter().map(|v| replay.get(*v)).collect();
    // The base goes before the scales of 8-bit operands and the inputs of a dropout.
    let behind =
        if matches!(node.op, Op::Product { .. } | Op::ThinProduct { .. }) { node.ins.len() - 2 } else { 0 };
    ins.insert(ins.len() - behind, replay.get(base));
    let new = replay.copy_as(of, with_base(&node.op, term.out).expect("chosen because it can"), ins);
    replay.set(sum.out(0), new.out(term.out));
}

/// The term that `of` contributes to the addition, and the other one.
fn sides(g: &Graph, sum: NodeId, of: NodeId) -> (Value, Value) {
    let ins = &g.node(sum).ins;
    if ins[0].node == of { (ins[0], ins[1]) } else { (ins[1], ins[0]) }
}

/// The operation that adds output `out` to a base.
fn with_base(op: &Op, out: u8) -> Option<Op> {
    match (op, out) {
        (&Op::Product { ta, tb, out, base: false, compute, epilogue }, 0) if epilogue.takes_base() => {
            Some(Op::Product { ta, tb, out, base: true, compute, epilogue })
        }
        (&Op::ThinProduct { form, p, out, base: false }, 0) if form != Thin::Down => {
            Some(Op::ThinProduct { form, p, out, base: true })
        }
        (Op::ScatterAdd { rows, out, base: false }, 0) => {
            Some(Op::ScatterAdd { rows: *rows, out: *out, base: true })
        }
        (Op::HeadLossGrad { base: false, kept, compute, cap }, 1) => {
            Some(Op::HeadLossGrad { base: true, kept: *kept, compute: *compute, cap: *cap })
        }
        (Op::HeadLossTrain { base: false, compute, cap }, 4) => {
            Some(Op::HeadLossTrain { base: true, compute: *compute, cap: *cap })
        }
        _ => None,
    }
}
