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
    let rows = w.dims()[0];
    let squares = slot(
        b,
        Slot {
            path: format!("{}.squares", adapter.inverse_norm()),
            ty: TensorType::new(DType::F32, [rows, 1]),
            class: Class::Derived,
            init: Init::Zeros,
            part: None,
        },
    );
    let own = match role {
        Role::Derive => {
            let own = w.reduce(1, Fold::SumSquares);
            b.write(squares, own);
            own
        }
        _ => b.read(squares),
    };
    let times = |x: Tensor<'_>, y: Tensor<'_>, tb: bool| {
        b.op(plain(false, tb, DType::F32, Compute::Full), &[b.tensor(x.v), b.tensor(y.v)])
    };
    let gram = times(a_new, a_new, true).scale(0.5 * adapter.scale);
    let low = times(b_new, gram, false);
    let h = times(w, a_new.cast(w.dtype()), true) + low;
    let crossed = (h * b_new).sum(1).scale(2.0 * adapter.scale);
    let inverse = (own + crossed).rsqrt().reshape(&[rows]);
    b.write(slot(b, known(&adapter.inverse_norm())), inverse);
}
