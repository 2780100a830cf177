//! Weights of layers that nothing trains, in four bits (`nf4`). Each named weight has codes and magnitudes of its own, also
//! where weights are one slot and one product, so that its bits do not depend on what was merged.
//!
//! Every operation that reads such a weight has it made right before it, so that no more than one weight is there as numbers,
//! and what the backward pass reads is made again. The pass comes last: all others see the weights as they are.

use std::collections::{BTreeSet, HashSet};

use crate::graph::{Class, Graph, Init, NodeId, Slot, SlotId, SlotPart, Value};
use crate::nf4::{NESTED, blocks};
use crate::ops::{Op, OpKind};
use crate::passes::forward::adapter::SCOPE;
use crate::passes::gradient::recompute::layer_of;
use crate::plan::{Refusal, Role};
use crate::replay::{Replay, users};
use crate::types::{DType, TensorType};

/// The slot of the map by which magnitudes are coded, which all weights share.
pub const MAP: &str = "nf4.map";

/// The end of the slots of codes: the path before it is the weight's.
const CODES: &str = ".nf4";

/// The slots beside a weight's codes.
const BESIDE: [&str; 3] = [".nf4.absmax", ".nf4.nested_absmax", ".nf4.offset"];

/// The slot of a weight's codes.
pub fn codes_path(weight: &str) -> String {
    format!("{weight}{CODES}")
}

/// The slots of a weight's magnitudes: their codes, the largest ones and the mean.
pub fn magnitude_paths(weight: &str) -> [String; 3] {
    BESIDE.map(|end| format!("{weight}{end}"))
}

/// The weight whose codes a slot holds.
pub fn weight_of_codes(path: &str) -> Option<&str> {
    path.strip_suffix(CODES)
}

/// Whether a slot belongs to weights in four bits, and is none of codes.
pub fn is_beside_codes(path: &str) -> bool {
    path == MAP || BESIDE.iter().any(|end| path.ends_with(end))
}

/// The weights of a model that can be kept in four bits where nothing trains them: matrices of linear layers, of rows of even
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

/// Keeps the weights of these names in four bits, in all graphs alike; returns how many there are.
pub fn nf4(graphs: &mut [(Role, Graph)], names: &BTreeSet<String>) -> Result<usize, Refusal> {
    let mut known: BTreeSet<String> = BTreeSet::new();
    for (_, g) in graphs.iter_mut() {
        let chosen = chosen(g, names)?;
        known.extend(chosen.iter().flat_map(|slot| parts(g, *slot)).map(|part| g.slot(part).path.clone()));
        *g = quantized(g, &chosen);
    }
    Ok(known.len())
}

/// The slots that hold weights of these names and no others.
fn chosen(g: &Graph, names: &BTreeSet<String>) -> Result<HashSet<SlotId>, Refusal> {
    let is_named = |slot: SlotId| g.slot(slot).class == Class::Frozen && names.contains(&g.slot(slot).path);
    let is_chosen = |slot: SlotId| parts(g, slot).into_iter().all(is_named);
    let is_apart = |slot: SlotId| g.slot(slot).part.is_none_or(|part| is_chosen(part.of));
    let chosen: HashSet<SlotId> = g.slot_ids().filter(|slot| is_chosen(*slot) && is_apart(*slot)).collect();
    let users = users(g);
    for id in g.ids() {
        let Op::Read { slot } = g.node(id).op else { continue };
        let readers = users.get(&id.out(0)).into_iter().flatten();
        if let Some(reader) = readers.filter(|_| chosen.contains(&slot)).find(|user| !is_linear(g, **user)) {
            let (path, op) = (&g.slot(slot).path, g.node(*reader).op.name());
            return Err(Refusal(format!("{path} cannot be kept in nf4: {op} reads it")));
        }
    }
    Ok(chosen)
}

/// Whether an operation reads matrices of layers as such: it multiplies by them, or makes something of them that is.
fn is_linear(g: &Graph, id: NodeId) -> bool {
    matches!(
        g.node(id).op.kind(),
        OpKind::Product
            | OpKind::GatedProduct
            | OpKind::GatedProductGrad
            | OpKind::ActivatedProduct
            | OpKind::ActivatedProductGrad
            | OpKind::LowRankNorm
            | OpKind::Concat
            | OpKind::Slice
            | OpKind::Transpose
            | OpKind::Reshape
            | OpKind::Map
            | OpKind::Region
    )
}

/// The named weights that a slot holds, in the order in which they lie in it.
fn parts(g: &Graph, whole: SlotId) -> Vec<SlotId> {
    let offset = |part: SlotId| g.slot(part).part.filter(|part| part.of == whole).map(|part| part.offset);
    let mut parts: Vec<(usize, SlotId)> =
        g.slot_ids().filter_map(|part| Some((offset(part)?, part))).collect();
    parts.sort_unstable();
    if parts.is_empty() { vec![whole] } else { parts.into_iter().map(|(_, part)| part).collect() }
}

/// A graph whose weights in these slots are read from codes.
fn quantized(g: &Graph, chosen: &HashSet<SlotId>) -> Graph {
    let mut replay = Replay::new(g);
    for slot in chosen.iter().copied() {
        let Slot { path, ty, part, .. } = replay.new.slot_mut(slot);
        *path = codes_path(path);
        *ty = TensorType::new(DType::U8, [ty.dims[0], ty.dims[1] / 2]);
        *part = part.map(|SlotPart { of, offset }| SlotPart { of, offset: offset / 2 });
    }
    let of_weight = |v: Value| match g.node(v.node).op {
        Op::Read { slot } if chosen.contains(&slot) => Some(slot),
        _ => None,
    };
    for id in g.ids().filter(|id| of_weight(id.out(0)).is_none()) {
        let node = g.node(id);
        if node.ins.iter().all(|v| of_weight(*v).is_none()) {
            replay.copy(id);
            continue;
        }
        let ins = node.ins.iter().map(|v| match of_weight(*v) {
            Some(slot) => dequantized(&mut replay, slot, id),
            None => replay.get(*v),
        });
        let ins = ins.collect();
        replay.copy_as(id, node.op.clone(), ins);
    }
    replay.finish()
}

/// The weights of a slot as numbers, next to who reads them.
fn dequantized(replay: &mut Replay<'_>, slot: SlotId, at: NodeId) -> Value {
    let g = replay.old;
    let read = |replay: &mut Replay<'_>, path: String, ty: TensorType, init: Init| {
        let slot = replay.new.find_slot(&path).unwrap_or_else(|| {
            replay.new.add_slot(Slot { path, ty, class: Class::Frozen, init, part: None })
        });
        replay.add(Op::Read { slot }, vec![], at)
    };
    let mut ins = vec![replay.add(Op::Read { slot }, vec![], at)];
    ins.push(read(replay, MAP.into(), TensorType::new(DType::F32, [256]), Init::Data));
    let mut rows = vec![];
    for part in parts(g, slot) {
        let Slot { path, ty, .. } = g.slot(part);
        let blocks = blocks(ty.elements());
        let types = [(DType::U8, blocks), (DType::F32, blocks.div_ceil(NESTED)), (DType::F32, 1)];
        for (path, (dtype, count)) in magnitude_paths(path).into_iter().zip(types) {
            ins.push(read(replay, path, TensorType::new(dtype, [count]), Init::Data));
        }
        rows.push(ty.dims[0]);
    }
    replay.add(Op::Dequantize { rows, to: g.slot(slot).ty.dtype, nested: true }, ins, at)
}
