//! Who writes the row norms that DoRA divides by: `apply` after every update and `derive` after a load, with the same
//! operations, so the bits are the same.
//!
//! With H = W A^T + s/2 B (A A^T), the squared norm of a row of W + s B A is ||w||^2 + 2 s sum(H * B): two thin products
//! and one of rank by rank, so W is read once an update and W + s B A is never made. ||w||^2 of frozen weights stays
//! what `derive` found.

use super::adapters::Adapter;
use super::fp8_copies::{slot, written};
use crate::builder::{Builder, Tensor};
use crate::graph::{Class, Graph, Init, Slot};
use crate::ops::product::{Compute, plain};
use crate::ops::reduce::Fold;
use crate::plan::Role;
use crate::types::{DType, TensorType};

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
    // In `apply` what was just written, otherwise what is there.
    let value = |path: &str| {
        let of = known(path);
        let updated = if role == Role::Apply { written(b, model, &of) } else { None };
        updated.unwrap_or_else(|| b.read(slot(b, of)))
    };
    let w = b.read(slot(b, known(&adapter.weight)));
    let (a_new, b_new) = (value(&adapter.a()), value(&adapter.b()));
    let squares = slot(b, squares(adapter, w.dims()[0]));
    let own = match role {
        Role::Derive => {
            let own = w.reduce(1, Fold::SumSquares);
            b.write(squares, own);
            own
        }
        _ => b.read(squares),
    };
    let inverse = inverse(b, w, own, [a_new, b_new], adapter.scale);
    b.write(slot(b, known(&adapter.inverse_norm())), inverse);
}

/// 1 / ||W + s B A|| for an A and a B in slots of these paths, which an update need not have written. Computed where it
/// is read, after `derive`.
pub(super) fn of<'g>(b: &'g Builder, adapter: &Adapter, beside: [String; 2]) -> Tensor<'g> {
    let read = |path: &str| b.read(b.with_graph(|g| g.find_slot(path)).expect("the pass made it"));
    let w = read(&adapter.weight);
    let own = b.read(slot(b, squares(adapter, w.dims()[0])));
    inverse(b, w, own, beside.map(|path| read(&path)), adapter.scale)
}

/// The slot of ||w||^2 by rows.
fn squares(adapter: &Adapter, rows: usize) -> Slot {
    Slot {
        path: format!("{}.squares", adapter.inverse_norm()),
        ty: TensorType::new(DType::F32, [rows, 1]),
        class: Class::Derived,
        init: Init::Zeros,
        part: None,
    }
}

fn inverse<'g>(
    b: &'g Builder,
    w: Tensor<'g>,
    own: Tensor<'g>,
    [a_new, b_new]: [Tensor<'g>; 2],
    scale: f64,
) -> Tensor<'g> {
    let times =
        |x: Tensor<'g>, y: Tensor<'g>, tb: bool| b.op(plain(false, tb, DType::F32, Compute::Full), &[x, y]);
    let gram = times(a_new, a_new, true).scale(0.5 * scale);
    let low = times(b_new, gram, false);
    let h = times(w, a_new.cast(w.dtype()), true) + low;
    let crossed = (h * b_new).sum(1).scale(2.0 * scale);
    (own + crossed).rsqrt().reshape(&[w.dims()[0]])
}
