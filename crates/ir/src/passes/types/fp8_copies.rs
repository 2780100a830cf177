//! Updates of the tensors that `fp8` reads: 8-bit copies of weights, quantised from their bf16 copies with the scale that fits,
//! and the scales of all other tensors, from the largest magnitudes of recent steps.
//!
//! `apply` does both after an update and `derive` after a load, with the same operations and therefore the same bits. The
//! history is state and part of checkpoints. A skipped update does not change it, and a magnitude that is not finite counts as
//! unknown. Magnitudes are maxima over all ranks, so the history is the same on each.

use crate::builder::{Builder, Tensor};
use crate::graph::{Class, Graph, Init, Slot, SlotId, SlotPart};
use crate::ops::Op;
use crate::ops::collective::Combine;
use crate::ops::elementwise::Elementwise as E;
use crate::ops::quantize::Source;
use crate::ops::reduce::Fold;
use crate::passes::gradient::totals::total;
use crate::passes::options::{Base, Options};
use crate::passes::types::base::{self, Codes};
use crate::passes::types::fp8::{TYPES, shared_path, weight_name, weight_path};
use crate::plan::Role;
use crate::types::{DType, TensorType};

/// Number of steps whose largest magnitude a scale must cover.
pub const HISTORY: usize = 16;

/// Adds the writes to `apply` and `derive`.
pub fn fp8_copies(graphs: &mut Vec<(Role, Graph)>, o: &Options) {
    let Some(grad) = graphs.iter().find(|(role, _)| *role == Role::GRAD).map(|(_, g)| g.clone()) else {
        return;
    };
    if !graphs.iter().any(|(role, _)| *role == Role::Derive) {
        graphs.push((Role::Derive, Graph::default()));
    }
    let codes = o.base.weights();
    for (role, g) in graphs.iter_mut().filter(|(role, _)| matches!(role, Role::Apply | Role::Derive)) {
        let b = Builder::from_graph(std::mem::take(g));
        b.scope("fp8", || {
            for dtype in TYPES {
                if let Some(scale) = grad.find_slot(&shared_path("scale", dtype)) {
                    scales(&b, &grad, (scale, dtype), *role, o);
                }
            }
            for id in grad.slot_ids() {
                let copy = grad.slot(id);
                match weight_name(copy) {
                    Some(name) if base::is_chosen(&grad, id, &codes) => match o.base {
                        Base::Nf4(_) => scale(&b, &grad, id, name, *role),
                        _ => columns(&b, &grad, copy, name, *role),
                    },
                    Some(name) => weight(&b, &grad, copy, name, *role),
                    None => {}
                }
            }
        });
        *g = b.finish();
    }
}

/// A slot of the gradient's graph in another graph, as a whole.
pub(super) fn slot(b: &Builder, slot: Slot) -> SlotId {
    b.edit(|g| g.find_slot(&slot.path).unwrap_or_else(|| g.add_slot(Slot { part: None, ..slot })))
}

/// The scales of a type from its history; in `apply` from the history with this step's magnitudes prepended.
fn scales(b: &Builder, grad: &Graph, (scale, dtype): (SlotId, DType), role: Role, o: &Options) {
    let scale = grad.slot(scale).clone();
    let n = scale.ty.elements();
    let state = Slot { class: Class::Moment, init: Init::Zeros, ..scale.clone() };
    let (path, ty) = (shared_path("history", dtype), TensorType::new(DType::F32, [HISTORY, n]));
    let history = slot(b, Slot { path, ty, ..state });
    let mut known = b.read(history);
    if role == Role::Apply {
        let amax = grad.find_slot(&shared_path("amax", dtype)).expect("a scale has a magnitude");
        let amax = slot(b, grad.slot(amax).clone());
        let (seen, nothing) = (b.read(amax), b.fill(0.0, DType::F32, &[n]));
        let seen = seen.map(E::Finite).select(seen, nothing);
        let seen = total(seen, Combine::Max, o).reshape(&[1, n]);
        let moved = b.concat(&[seen, known.slice(0, 0, HISTORY - 1)], 0);
        let is_finite =
            b.tensor(b.with_graph(|g| g.result("is_finite")).expect("an update says whether it was made"));
        known = is_finite.reshape(&[1, 1]).broadcast(&[HISTORY, n]).select(moved, known);
        b.write(history, known);
        b.write(amax, nothing);
    }
    b.write(slot(b, scale), known.reduce(0, Fold::Max).map(E::Fp8Scale(dtype)).reshape(&[n]));
}

/// The 8-bit copies of a weight that products read, where the graph writes its bf16 copy. `derive` quantises frozen weights
/// once.
fn weight(b: &Builder, grad: &Graph, copy: &Slot, name: &str, role: Role) {
    let read = ["rows", "columns", "scale"].map(|what| grad.find_slot(&weight_path(what, name)));
    let narrow = || match copy.class {
        Class::Frozen => (role == Role::Derive).then(|| b.read(slot(b, copy.clone()))),
        _ => written(b, grad, copy),
    };
    let Some(narrow) = read.iter().flatten().next().and_then(|_| narrow()) else { return };
    let outs = b.at_path(name, || {
        b.ops(Op::Quantize { to: DType::E4M3, current: true, of: Source::Given }, &[narrow])
    });
    for (out, id) in outs.into_iter().zip(read).filter_map(|(out, id)| Some((out, id?))) {
        b.write(slot(b, grad.slot(id).clone()), out);
    }
}

/// The codes along columns of a weight that is stored as codes along rows.
fn columns(b: &Builder, grad: &Graph, weight: &Slot, name: &str, role: Role) {
    let columns = grad.find_slot(&weight_path("columns", name)).filter(|_| role == Role::Derive);
    let Some(columns) = columns else { return };
    let codes = Slot { path: Codes::Fp8.path(&weight.path), ty: Codes::Fp8.ty(&weight.ty), ..weight.clone() };
    let transposed = b.at_path(name, || b.read(slot(b, codes)).transpose(&[1, 0]));
    b.write(slot(b, grad.slot(columns).clone()), transposed);
}

/// The scale of a weight that is stored in NF4, of which products read E4M3 codes that are computed next to them.
fn scale(b: &Builder, grad: &Graph, id: SlotId, name: &str, role: Role) {
    let scale = grad.find_slot(&weight_path("scale", name)).filter(|_| role == Role::Derive);
    let Some(scale) = scale else { return };
    let weight = slot(b, grad.slot(id).clone());
    // Each named weight has its own codes.
    for part in base::parts(grad, id).into_iter().filter(|part| *part != id) {
        let part = grad.slot(part).clone();
        let place = part.part.map(|SlotPart { offset, .. }| SlotPart { of: weight, offset });
        b.edit(|g| _ = base::slot_of(g, &Slot { part: place, ..part }));
    }
    let op = Op::Quantize { to: DType::E4M3, current: true, of: Source::Given };
    let outs = b.at_path(name, || b.ops(op, &[b.read(weight)]));
    b.write(slot(b, grad.slot(scale).clone()), outs[2]);
}

/// The value that the graph writes to a slot, possibly as part of a larger one.
pub(super) fn written<'g>(b: &'g Builder, grad: &Graph, of: &Slot) -> Option<Tensor<'g>> {
    let (mut whole, mut offset) = (of, 0);
    loop {
        let found = b.with_graph(|g| {
            let id = g.find_slot(&whole.path)?;
            g.writes.iter().find(|(slot, _)| *slot == id).map(|(_, v)| *v)
        });
        if let Some(value) = found {
            let value = b.tensor(value).reshape(&[whole.ty.elements()]);
            return Some(value.slice(0, offset, of.ty.elements()).reshape(&of.ty.dims));
        }
        let part = whole.part?;
        offset += part.offset;
        whole = grad.slot(part.of);
    }
}
