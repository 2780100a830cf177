//! Frozen weights in four bits (`nf4`): the slots beside their codes, and the operations that dequantise them. Blocks belong to
//! one named weight, so that its bits do not depend on merging.
//!
//! With `precision=fp8` a product reads a weight as E4M3 codes of its dequantised values, along rows or along columns. They are
//! computed right before the product, with a scale that `derive` finds once (`fp8_copies`), because the values never change.

use std::collections::{HashMap, HashSet};

use crate::graph::{Class, Graph, Init, NodeId, Slot, SlotId, Value};
use crate::nf4::{NESTED, blocks};
use crate::ops::Op;
use crate::passes::types::base::{self, Codes, Replaced, parts, slot_of};
use crate::passes::types::fp8::weight_path;
use crate::replay::Replay;
use crate::types::{DType, TensorType};

/// The slot of the map that decodes magnitudes, which all weights share.
pub const MAP: &str = "nf4.map";

const BESIDE: [&str; 3] = [".nf4.absmax", ".nf4.nested_absmax", ".nf4.offset"];

/// The slots of a weight's magnitudes: their codes, the largest ones and the mean.
pub fn magnitude_paths(weight: &str) -> [String; 3] {
    BESIDE.map(|end| format!("{weight}{end}"))
}

/// Whether a slot belongs to weights in four bits but does not hold codes.
pub(super) fn is_beside_codes(path: &str) -> bool {
    path == MAP || BESIDE.iter().any(|end| path.ends_with(end))
}

/// The graph with NF4 codes for the weights in these slots, also where 8-bit products read them.
pub(super) fn coded(g: &Graph, chosen: &HashSet<SlotId>) -> Graph {
    // The slots in which `fp8` reads E4M3 codes, each with its weight and whether the codes are transposed.
    let mut narrow: HashMap<SlotId, (SlotId, bool)> = HashMap::new();
    for weight in chosen.iter().copied() {
        for (what, is_transposed) in [("rows", false), ("columns", true)] {
            let codes = g.find_slot(&weight_path(what, &g.slot(weight).path));
            narrow.extend(codes.map(|codes| (codes, (weight, is_transposed))));
        }
    }
    let computed: HashSet<SlotId> = chosen.iter().chain(narrow.keys()).copied().collect();
    let compute = |replay: &mut Replay<'_>, slot: SlotId, at: NodeId| match narrow.get(&slot) {
        Some((weight, is_transposed)) => requantized(replay, *weight, *is_transposed, at),
        None => dequantized(replay, slot, at),
    };
    base::coded(g, chosen, Codes::Nf4, &Replaced { slots: &HashMap::new(), computed: &computed, compute })
}

/// The E4M3 codes of a slot's weights, next to a product that reads them.
fn requantized(replay: &mut Replay<'_>, slot: SlotId, is_transposed: bool, at: NodeId) -> Value {
    let path = weight_path("scale", &replay.old.slot(slot).path);
    let scale = replay.old.find_slot(&path).expect("a product that reads codes reads their scale");
    let scale = replay.add(Op::Read { slot: scale }, vec![], at);
    let (rows, mut ins) = stored(replay, slot, at);
    ins.push(scale);
    replay.add(Op::Requantize { rows, transposed: is_transposed }, ins, at)
}

/// The dequantised weights of a slot, next to a node that reads them.
fn dequantized(replay: &mut Replay<'_>, slot: SlotId, at: NodeId) -> Value {
    let (rows, ins) = stored(replay, slot, at);
    let to = replay.old.slot(slot).ty.dtype;
    replay.add(Op::Dequantize { rows, to, nested: true }, ins, at)
}

/// The number of rows of each named weight in a slot, and the inputs of an operation that dequantises them.
fn stored(replay: &mut Replay<'_>, slot: SlotId, at: NodeId) -> (Vec<usize>, Vec<Value>) {
    let g = replay.old;
    let read = |replay: &mut Replay<'_>, path: String, ty: TensorType| {
        let beside = Slot { path, ty, class: Class::Frozen, init: Init::Data, part: None };
        let slot = slot_of(&mut replay.new, &beside);
        replay.add(Op::Read { slot }, vec![], at)
    };
    let mut ins = vec![replay.add(Op::Read { slot }, vec![], at)];
    ins.push(read(replay, MAP.into(), TensorType::new(DType::F32, [256])));
    let mut rows = vec![];
    for part in parts(g, slot) {
        let Slot { path, ty, .. } = g.slot(part);
        let blocks = blocks(ty.elements());
        let types = [(DType::U8, blocks), (DType::F32, blocks.div_ceil(NESTED)), (DType::F32, 1)];
        for (path, (dtype, count)) in magnitude_paths(path).into_iter().zip(types) {
            ins.push(read(replay, path, TensorType::new(dtype, [count])));
        }
        rows.push(ty.dims[0]);
    }
    (rows, ins)
}
