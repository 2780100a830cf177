//! Reverse-mode differentiation, by appending to the graph. It visits only nodes between the inputs to differentiate and the
//! seeds, so frozen weights and everything below the first trained one cost nothing.

use std::collections::HashMap;

use crate::builder::{Builder, Tensor};
use crate::graph::{NodeId, Value};
use crate::ops::{Op, Vjp};

/// Gradients of the sum of `seeds` (value, its gradient) with respect to `wrt`; zeros where no gradient flows.
pub fn gradients<'g>(
    b: &'g Builder,
    seeds: &[(Tensor<'g>, Tensor<'g>)],
    wrt: &[Tensor<'g>],
) -> Vec<Tensor<'g>> {
    let zeros = |t: &Tensor<'g>| b.fill(0.0, t.dtype(), &t.dims());
    let Some(last) = seeds.iter().map(|(y, _)| y.v.node.0).max() else {
        return wrt.iter().map(zeros).collect();
    };
    let dependents = dependents(b, wrt, last);
    let mut found: HashMap<Value, Vec<Tensor<'g>>> = HashMap::new();
    for (y, dy) in seeds {
        found.entry(y.v).or_default().push(*dy);
    }
    for id in (0..=last).rev().map(NodeId) {
        let node = b.with_graph(|g| g.node(id).clone());
        let is_wrt = |v: Value| wrt.iter().any(|t| t.v == v);
        let needs: Vec<bool> = node.ins.iter().map(|v| dependents[v.node.0 as usize].get(*v)).collect();
        if !needs.contains(&true) {
            continue;
        }
        let outs = b.outputs(id);
        let d: Vec<Option<Tensor<'g>>> = b.at_path(&node.path, || {
            outs.iter()
                .map(|out| if is_wrt(out.v) { None } else { found.remove(&out.v).map(|parts| sum(b, parts)) })
                .collect()
        });
        if d.iter().all(Option::is_none) {
            continue;
        }
        let ins: Vec<Tensor<'g>> = node.ins.iter().map(|v| b.tensor(*v)).collect();
        let at = Vjp { ins: &ins, outs: &outs, d: &d, needs: &needs, key: node.key };
        let grads = b.at_path(&node.path, || node.op.vjp(b, &at));
        for ((input, need), grad) in node.ins.iter().zip(&needs).zip(grads) {
            if let (true, Some(grad)) = (need, grad) {
                found.entry(*input).or_default().push(grad);
            }
        }
    }
    let gradient = |t: &Tensor<'g>| match found.get(&t.v) {
        Some(parts) => b.at_path(&t.source().path, || sum(b, parts.clone())),
        None => zeros(t),
    };
    wrt.iter().map(gradient).collect()
}

/// The inputs of a gradient operation, each as a distinct value: where one tensor is passed twice, each position has its own
/// derivative, and the rule of the forward operation adds them up.
pub fn distinct<'g>(b: &'g Builder, ins: &[Tensor<'g>]) -> Vec<Tensor<'g>> {
    let own = |(i, t): (usize, &Tensor<'g>)| {
        let stands_before = ins[..i].iter().any(|earlier| earlier.v == t.v);
        if stands_before { b.op(Op::Reshape { dims: t.dims() }, &[*t]) } else { *t }
    };
    ins.iter().enumerate().map(own).collect()
}

/// The outputs of a node that depend on the tensors to differentiate.
#[derive(Clone, Default)]
struct Dependent {
    all: bool,
    some: Vec<u8>,
}

impl Dependent {
    fn get(&self, v: Value) -> bool {
        self.all || self.some.contains(&v.out)
    }
}

fn dependents(b: &Builder, wrt: &[Tensor<'_>], last: u32) -> Vec<Dependent> {
    b.with_graph(|g| {
        let mut dependents = vec![Dependent::default(); last as usize + 1];
        for t in wrt.iter().filter(|t| t.v.node.0 <= last) {
            dependents[t.v.node.0 as usize].some.push(t.v.out);
        }
        for (i, node) in g.nodes[..=last as usize].iter().enumerate() {
            let float = node.outs.iter().any(|t| t.dtype.is_float());
            if float && node.ins.iter().any(|v| dependents[v.node.0 as usize].get(*v)) {
                dependents[i].all = true;
            }
        }
        dependents
    })
}

/// Adds up the contributions to one gradient. Gradients of slices that tile the whole are joined, not padded and added:
/// the gradient of a fused q, k, v product is one tensor its three producers write side by side.
fn sum<'g>(b: &'g Builder, parts: Vec<Tensor<'g>>) -> Tensor<'g> {
    let (slices, mut rest): (Vec<_>, Vec<_>) =
        parts.into_iter().partition(|t| matches!(t.source().op, Op::Pad { .. }));
    match tiles(&slices) {
        Some((axis, pieces)) => rest.push(cut_from(&pieces, axis).unwrap_or_else(|| b.concat(&pieces, axis))),
        None => rest.extend(slices),
    }
    rest.into_iter().reduce(|a, b| a + b).expect("a gradient has at least one contribution")
}

/// The axis and pieces of padded slices that cover an axis once without gaps.
fn tiles<'g>(slices: &[Tensor<'g>]) -> Option<(usize, Vec<Tensor<'g>>)> {
    let mut pieces = vec![];
    let mut along = None;
    for t in slices {
        let node = t.source();
        let Op::Pad { axis, before, .. } = node.op else { return None };
        if *along.get_or_insert(axis) != axis {
            return None;
        }
        pieces.push((before, t.b.tensor(node.ins[0])));
    }
    let axis = along?;
    pieces.sort_by_key(|(before, _)| *before);
    let mut end = 0;
    for (before, piece) in &pieces {
        if *before != end {
            return None;
        }
        end += piece.dims()[axis];
    }
    (end == slices[0].dims()[axis]).then(|| (axis, pieces.into_iter().map(|(_, t)| t).collect()))
}

/// The tensor that pieces were sliced from, where they are all of it in order: then no concat is needed.
fn cut_from<'g>(pieces: &[Tensor<'g>], axis: usize) -> Option<Tensor<'g>> {
    let whole = pieces.first()?.source().ins.first().map(|v| pieces[0].b.tensor(*v))?;
    let mut end = 0;
    for piece in pieces {
        let node = piece.source();
        let Op::Slice { axis: along, start, len } = node.op else { return None };
        if along != axis || start != end || node.ins[0] != whole.v {
            return None;
        }
        end += len;
    }
    (end == whole.dims()[axis]).then_some(whole)
}
