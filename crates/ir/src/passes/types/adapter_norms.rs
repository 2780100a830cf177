//! Updates of the row norms that DoRA divides by: `apply` writes them after every update and `derive` after a load, with the
//! same operations and therefore the same bits.
//!
//! Each norm reads W once, and W + s B A is never stored.

use crate::builder::{Builder, Tensor};
use crate::graph::Graph;
use crate::ops::Op;
use crate::passes::forward::adapter::Adapter;
use crate::passes::types::fp8_copies::{slot, written};
use crate::plan::Role;

/// Adds the writes to `apply` and `derive`.
pub fn adapter_norms(graphs: &mut Vec<(Role, Graph)>, adapters: &[Adapter]) {
    let reads_norm = |g: &Graph| adapters.iter().any(|a| a.dora && g.find_slot(&a.inverse_norm()).is_some());
    let Some(model) = graphs.iter().map(|(_, g)| g).find(|g| reads_norm(g)).cloned() else { return };
    if !graphs.iter().any(|(role, _)| *role == Role::Derive) {
        graphs.push((Role::Derive, Graph::default()));
    }
    for (role, g) in graphs.iter_mut().filter(|(role, _)| matches!(role, Role::Apply | Role::Derive)) {
        let b = Builder::from_graph(std::mem::take(g));
        for adapter in adapters.iter().filter(|a| a.dora) {
            b.at_path(&adapter.weight, || norm(&b, &model, adapter, *role));
        }
        *g = b.finish();
    }
}

/// Writes 1 / ||W + s B A|| of one weight.
fn norm(b: &Builder, model: &Graph, adapter: &Adapter, role: Role) {
    let known = |path: &str| model.slot(model.find_slot(path).expect("the pass made it")).clone();
    // In `apply` the value just written, otherwise the stored one.
    let value = |path: &str| {
        let of = known(path);
        let updated = if role == Role::Apply { written(b, model, &of) } else { None };
        updated.unwrap_or_else(|| b.read(slot(b, of)))
    };
    let w = b.read(slot(b, known(&adapter.weight)));
    let inverse = inverse(b, w, [value(&adapter.a()), value(&adapter.b())], adapter.scale);
    b.write(slot(b, known(&adapter.inverse_norm())), inverse);
}

/// 1 / ||W + s B A|| for an A and a B in slots of these paths, computed where it is read.
pub(crate) fn of<'g>(b: &'g Builder, adapter: &Adapter, beside: [String; 2]) -> Tensor<'g> {
    let read = |path: &str| b.read(b.with_graph(|g| g.find_slot(path)).expect("the pass made it"));
    inverse(b, read(&adapter.weight), beside.map(|path| read(&path)), adapter.scale)
}

fn inverse<'g>(b: &'g Builder, w: Tensor<'g>, [a_new, b_new]: [Tensor<'g>; 2], scale: f64) -> Tensor<'g> {
    b.op(Op::LowRankNorm { scale }, &[w, a_new, b_new])
}
