//! Frozen weights in four bits (`nf4`): the slots beside their codes, and the operation that dequantises them. Blocks belong to
//! one named weight, so that its bits do not depend on merging.

use crate::graph::{Class, Init, NodeId, Slot, SlotId, Value};
use crate::nf4::{NESTED, blocks};
use crate::ops::Op;
use crate::passes::types::base::{parts, slot_of};
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

/// The dequantised weights of a slot, next to a node that reads them.
pub(super) fn dequantized(replay: &mut Replay<'_>, slot: SlotId, at: NodeId) -> Value {
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
    replay.add(Op::Dequantize { rows, to: g.slot(slot).ty.dtype, nested: true }, ins, at)
}
