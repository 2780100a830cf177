//! Frozen weights of linear layers that are stored as codes (`Base`), of four bits or eight. Each named weight has codes of its
//! own, even where weights are merged into one slot and one product.
//!
//! For an operation that cannot multiply codes, the weight is dequantised right before it, so that no more than one weight is
//! in memory in full; the backward pass dequantises again. The pass comes last: all others see the plain weights.

use std::collections::{BTreeSet, HashMap, HashSet};

use crate::graph::{Class, Graph, NodeId, Slot, SlotId, SlotPart, Value};
use crate::ops::{Op, OpKind};
use crate::passes::forward::adapter::SCOPE;
use crate::passes::gradient::recompute::layer_of;
use crate::passes::options::Base;
use crate::passes::types::{fp8_base, nf4};
use crate::plan::{Refusal, Role};
use crate::replay::{Replay, users, without_slots};
use crate::types::{DType, TensorType};

/// The format of a weight's codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Codes {
    /// Two per byte, with a magnitude for every 64 (`nf4`).
    Nf4,
    /// E4M3, with one scale.
    Fp8,
}

impl Codes {
    /// The suffix of the slots of codes; the rest of the path is the weight's.
    fn end(self) -> &'static str {
        match self {
            Codes::Nf4 => ".nf4",
            Codes::Fp8 => ".fp8",
        }
    }

    /// The slot of a weight's codes.
    pub fn path(self, weight: &str) -> String {
        format!("{weight}{}", self.end())
    }

    /// Number of values in an element of the slot.
    pub fn packed(self) -> usize {
        match self {
            Codes::Nf4 => 2,
            Codes::Fp8 => 1,
        }
    }

    /// The type of the codes of a matrix.
    pub fn ty(self, weight: &TensorType) -> TensorType {
        let dtype = match self {
            Codes::Nf4 => DType::U8,
            Codes::Fp8 => DType::E4M3,
        };
        TensorType::new(dtype, [weight.dims[0], weight.dims[1] / self.packed()])
    }
}

/// The weight whose codes a slot holds.
pub fn weight_of_codes(path: &str) -> Option<(Codes, &str)> {
    [Codes::Nf4, Codes::Fp8].into_iter().find_map(|codes| Some((codes, path.strip_suffix(codes.end())?)))
}

/// Whether a slot holds magnitudes or scales of codes, or the map that decodes magnitudes.
pub fn is_beside_codes(path: &str) -> bool {
    nf4::is_beside_codes(path) || fp8_base::weights_of_scale(path).is_some()
}

/// The weights of a model that can be stored as codes where they are frozen: matrices of linear layers with rows of even
/// length.
pub fn linear(model: &Graph) -> BTreeSet<String> {
    let users = users(model);
    let mut names = BTreeSet::new();
    for id in model.ids() {
        let Op::Read { slot } = model.node(id).op else { continue };
        let Slot { path, ty, class, .. } = model.slot(slot);
        let is_even = ty.rank() == 2 && ty.last().is_multiple_of(2);
        let is_named = class.is_parameter() && layer_of(path).is_some() && !path.starts_with(SCOPE);
        let is_multiplied = |user: &NodeId| {
            let node = model.node(*user);
            matches!(node.op, Op::Product { ta: false, tb: true, .. }) && node.ins[1] == id.out(0)
        };
        let readers = users.get(&id.out(0));
        if is_even && is_named && readers.is_some_and(|readers| readers.iter().all(is_multiplied)) {
            names.insert(path.clone());
        }
    }
    names
}

/// Stores the weights of a base as codes, in all graphs alike; returns the number of weights.
pub fn base(graphs: &mut [(Role, Graph)], base: &Base) -> Result<usize, Refusal> {
    let names = base.weights();
    let mut known: BTreeSet<String> = BTreeSet::new();
    for (_, g) in graphs.iter_mut() {
        let chosen = chosen(g, &names)?;
        known.extend(chosen.iter().flat_map(|slot| parts(g, *slot)).map(|part| g.slot(part).path.clone()));
        *g = match base {
            Base::Full => continue,
            Base::Nf4(_) => nf4::coded(g, &chosen),
            Base::Fp8(groups) => fp8_base::coded(g, &chosen, groups),
        };
    }
    Ok(known.len())
}

/// The slots that hold weights of these names and no others.
fn chosen(g: &Graph, names: &BTreeSet<&str>) -> Result<HashSet<SlotId>, Refusal> {
    let chosen: HashSet<SlotId> = g.slot_ids().filter(|slot| is_chosen(g, *slot, names)).collect();
    let users = users(g);
    for id in g.ids() {
        let Op::Read { slot } = g.node(id).op else { continue };
        let readers = users.get(&id.out(0)).into_iter().flatten();
        if let Some(reader) = readers.filter(|_| chosen.contains(&slot)).find(|user| !is_linear(g, **user)) {
            let (path, op) = (&g.slot(slot).path, g.node(*reader).op.name());
            return Err(Refusal(format!("{path} cannot be stored as codes: {op} reads it")));
        }
    }
    Ok(chosen)
}

/// Whether a slot, and the slot that it lies in, hold frozen weights of these names and no others.
pub fn is_chosen(g: &Graph, slot: SlotId, names: &BTreeSet<&str>) -> bool {
    let is_named = |slot: SlotId| {
        let Slot { class, path, .. } = g.slot(slot);
        *class == Class::Frozen && names.contains(path.as_str())
    };
    let are_named = |slot: SlotId| parts(g, slot).into_iter().all(is_named);
    are_named(slot) && g.slot(slot).part.is_none_or(|part| are_named(part.of))
}

/// Whether an operation uses a weight as the matrix of a linear layer: multiplies by it, or derives from it a matrix that is
/// used so.
fn is_linear(g: &Graph, id: NodeId) -> bool {
    matches!(
        g.node(id).op.kind(),
        OpKind::Product
            | OpKind::GatedProduct
            | OpKind::GatedProductGrad
            | OpKind::ActivatedProduct
            | OpKind::ActivatedProductGrad
            | OpKind::LowRankNorm
            | OpKind::Quantize
            | OpKind::Concat
            | OpKind::Slice
            | OpKind::Transpose
            | OpKind::Reshape
            | OpKind::Map
            | OpKind::Region
    )
}

/// The named weights in a slot, in memory order.
pub fn parts(g: &Graph, whole: SlotId) -> Vec<SlotId> {
    let offset = |part: SlotId| g.slot(part).part.filter(|part| part.of == whole).map(|part| part.offset);
    let mut parts: Vec<(usize, SlotId)> =
        g.slot_ids().filter_map(|part| Some((offset(part)?, part))).collect();
    parts.sort_unstable();
    if parts.is_empty() { vec![whole] } else { parts.into_iter().map(|(_, part)| part).collect() }
}

/// Replacements of the reads of slots that are not stored as they are read.
pub(super) struct Replaced<'a, F> {
    /// Slots that are read instead of others.
    pub slots: &'a HashMap<SlotId, Slot>,
    /// Slots whose values are computed next to each reader.
    pub computed: &'a HashSet<SlotId>,
    /// Computes the values of such a slot next to a node that reads it.
    pub compute: F,
}

/// The graph with codes in the slots `chosen`, and with reads replaced. Slots that were replaced, other than those that now
/// hold codes, are gone.
pub(super) fn coded<F: Fn(&mut Replay<'_>, SlotId, NodeId) -> Value>(
    g: &Graph,
    chosen: &HashSet<SlotId>,
    codes: Codes,
    replaced: &Replaced<'_, F>,
) -> Graph {
    let mut replay = Replay::new(g);
    for slot in chosen.iter().copied() {
        let Slot { path, ty, part, .. } = replay.new.slot_mut(slot);
        *path = codes.path(path);
        *ty = codes.ty(ty);
        *part = part.map(|SlotPart { of, offset }| SlotPart { of, offset: offset / codes.packed() });
    }
    let of_weight = |v: Value| match g.node(v.node).op {
        Op::Read { slot } if replaced.computed.contains(&slot) => Some(slot),
        _ => None,
    };
    for id in g.ids().filter(|id| of_weight(id.out(0)).is_none()) {
        let node = g.node(id);
        if let Op::Read { slot } = node.op
            && let Some(other) = replaced.slots.get(&slot)
        {
            let slot = slot_of(&mut replay.new, other);
            replay.copy_as(id, Op::Read { slot }, vec![]);
            continue;
        }
        if node.ins.iter().all(|v| of_weight(*v).is_none()) {
            replay.copy(id);
            continue;
        }
        let ins = node.ins.iter().map(|v| match of_weight(*v) {
            Some(slot) => (replaced.compute)(&mut replay, slot, id),
            None => replay.get(*v),
        });
        let ins = ins.collect();
        replay.copy_as(id, node.op.clone(), ins);
    }
    let gone = replaced.slots.keys().chain(replaced.computed.difference(chosen));
    let gone: HashSet<&str> = gone.map(|id| g.slot(*id).path.as_str()).collect();
    let mut coded = replay.finish();
    // `derive` already has the codes of a weight if it writes their columns: slots of one path are joined.
    without_slots(&mut coded, |slot| gone.contains(slot.path.as_str()));
    coded
}

/// The slot of a graph with another slot's path, added if there is none.
pub(super) fn slot_of(g: &mut Graph, slot: &Slot) -> SlotId {
    g.find_slot(&slot.path).unwrap_or_else(|| g.add_slot(slot.clone()))
}
