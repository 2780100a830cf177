//! Gives adapters' products kernels of their own: those that read or write a dropped tensor with the dropout fused, because a
//! separate one would take another two passes over the wide tensor, longer than the product itself; and those that only add to a
//! wide tensor, because a product for matrix units moves its bytes at two thirds of the rate of a copy.

use std::collections::{HashMap, HashSet};

use crate::graph::{Graph, Node, NodeId, Value};
use crate::ops::epilogue::Epilogue;
use crate::ops::product::Compute;
use crate::ops::thin_product::{MOST_RANK, STEP, Thin};
use crate::ops::{Op, OpKind};
use crate::passes::readers::Readers;
use crate::replay::Replay;
use crate::target::Target;
use crate::types::DType;

/// Fuses dropouts with the thin product after or before them, where the target has a kernel for it; returns their number.
pub fn thin_products(g: &Graph, target: &Target) -> (Graph, usize) {
    if target.kernel(OpKind::ThinProduct, DType::BF16).is_none() {
        return (g.clone(), 0);
    }
    let readers = Readers::new(g);
    let joins: HashMap<NodeId, Join> =
        g.ids().filter_map(|id| join(&readers, id)).map(|join| (join.last, join)).collect();
    let gone: HashSet<NodeId> = joins.values().map(|join| join.first).collect();
    let mut replay = Replay::new(g);
    for id in g.ids().filter(|id| !gone.contains(id)) {
        let Some(join) = joins.get(&id) else {
            replay.copy(id);
            continue;
        };
        let ins = join.ins.iter().map(|v| replay.get(*v)).collect();
        let node = replay.new.push_keyed(join.op.clone(), ins, &g.node(id).path, join.key);
        replay.set(id.out(0), node.out(0));
    }
    (replay.finish(), joins.len())
}

/// Elements from which on a wide tensor does not stay in the cache, so that the bytes of a sum decide.
const LARGE: usize = 1 << 24;

/// Replaces thin products that add to a large wide tensor, where the target has a kernel for it; returns their number.
pub fn thin_sums(g: &Graph, target: &Target) -> (Graph, usize) {
    if target.kernel(OpKind::ThinProduct, DType::BF16).is_none() {
        return (g.clone(), 0);
    }
    let mut replay = Replay::new(g);
    let mut replaced = 0;
    for id in g.ids() {
        match sum(g, id) {
            Some(op) => {
                let ins = g.node(id).ins.iter().map(|v| replay.get(*v)).collect();
                replay.copy_as(id, op, ins);
                replaced += 1;
            }
            None => _ = replay.copy(id),
        }
    }
    (replay.finish(), replaced)
}

/// The operation that computes a thin product and adds it to its base.
fn sum(g: &Graph, id: NodeId) -> Option<Op> {
    let node = g.node(id);
    let (
        &Op::Product { ta: false, tb, out, base: true, compute: Compute::Full, epilogue: Epilogue::None },
        [left, right, _],
    ) = (&node.op, &node.ins[..])
    else {
        return None;
    };
    let form = if tb { Thin::Out } else { Thin::Up };
    let is_large = node.outs[0].elements() >= LARGE;
    (is_large && is_thin(g, form, id, [*left, *right])).then_some(Op::ThinProduct {
        form,
        p: 0.0,
        out,
        base: true,
    })
}

/// A dropout and a product, in either order, as one operation.
struct Join {
    first: NodeId,
    last: NodeId,
    op: Op,
    ins: [Value; 4],
    key: u64,
}

/// The product that a dropout is fused with: its only reader, or the product whose only reader it is.
fn join(readers: &Readers<'_>, dropout: NodeId) -> Option<Join> {
    let g = readers.g;
    let &Node { op: Op::Dropout { p }, ref ins, key, .. } = g.node(dropout) else { return None };
    let &[x, rng, rows] = &ins[..] else { unreachable!("what is dropped, and what it is drawn by") };
    let behind = || {
        let product = readers.sole(dropout.out(0))?;
        let [left, right] = factors(g.node(product))?;
        let is_left = left == dropout.out(0);
        let (form, pair) = if is_left { (Thin::Down, [x, right]) } else { (Thin::Weight, [left, x]) };
        is_thin(g, form, product, pair).then_some((form, product, [dropout, product], pair))
    };
    let before = || {
        readers.sole(x)?;
        let pair = factors(g.node(x.node))?;
        is_thin(g, Thin::Up, x.node, pair).then_some((Thin::Up, x.node, [x.node, dropout], pair))
    };
    let (form, product, [first, last], [left, right]) = behind().or_else(before)?;
    let op = Op::ThinProduct { form, p, out: g.node(product).outs[0].dtype, base: false };
    Some(Join { first, last, op, ins: [left, right, rng, rows], key })
}

/// The operands of a plain product.
fn factors(node: &Node) -> Option<[Value; 2]> {
    match node.op {
        Op::Product { base: false, compute: Compute::Full, epilogue: Epilogue::None, .. } => {
            Some([node.ins[0], node.ins[1]])
        }
        _ => None,
    }
}

/// Whether a product has this form, with types and extents that kernels support.
fn is_thin(g: &Graph, form: Thin, product: NodeId, factors: [Value; 2]) -> bool {
    let node = g.node(product);
    let Op::Product { ta, tb, out, .. } = node.op else { return false };
    let types = factors.map(|v| g.ty(v));
    let wanted = if form == Thin::Weight { DType::F32 } else { DType::BF16 };
    let has_form = [ta, tb] == form.transposed() && out == wanted;
    if !has_form || types.iter().any(|ty| ty.dtype != DType::BF16 || ty.rank() != 2) {
        return false;
    }
    let [rank, width] = form.extents(types);
    rank <= MOST_RANK && rank.is_multiple_of(STEP) && width.is_multiple_of(STEP) && width > rank
}
