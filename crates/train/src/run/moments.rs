//! Moments in eight bits on their way to a checkpoint and back. A checkpoint has them in bf16, in which all their values are
//! exact: a scale belongs to 256 neighbours in memory, and which those are depends on what is merged, as names may not.

use std::ops::Range;

use flatout_ir::block8::{BLOCK, Code};
use flatout_ir::optimizers::scales_path;
use flatout_ir::plan::PlacedSlot;
use flatout_ir::{DType, PlanSet};
use flatout_runtime::Session;
use rayon::prelude::*;

use crate::Failure;
use crate::run::checkpoint::TensorFile;

/// How a slot's moments are coded; `None` where they are plain numbers.
pub fn code(dtype: DType) -> Option<Code> {
    match dtype {
        DType::E4M3 => Some(Code::Signed),
        DType::E4M4 => Some(Code::Unsigned),
        _ => None,
    }
}

/// A region of moments in eight bits.
pub struct Coded {
    slot: PlacedSlot,
    code: Code,
}

/// The regions of these plans.
pub fn coded(plans: &PlanSet) -> Vec<Coded> {
    let regions = plans.slots.iter().filter(|slot| slot.path.starts_with("region."));
    regions.filter_map(|slot| Some(Coded { code: code(slot.ty.dtype)?, slot: slot.clone() })).collect()
}

impl Coded {
    /// The slot of the scales of all its blocks.
    pub fn scales(&self) -> String {
        scales_path(&self.slot.path)
    }

    /// Which of its elements a slot is.
    fn range(&self, slot: &PlacedSlot) -> Option<Range<usize>> {
        let start = slot.view.offset.checked_sub(self.slot.view.offset)?;
        let range = start..start + slot.ty.elements();
        (range.end <= self.slot.ty.elements() && slot.ty.dtype == self.slot.ty.dtype).then_some(range)
    }

    /// The values of a slot that lies in this region, in bf16, from its codes and the region's scales as they lie in
    /// memory; `None` where it lies elsewhere.
    pub fn widened(&self, slot: &PlacedSlot, codes: &[u8], scales: &[u8]) -> Option<Vec<u8>> {
        let range = self.range(slot)?;
        let scale = |block: usize| {
            let at = 4 * block;
            f32::from_le_bytes(scales[at..at + 4].try_into().expect("four bytes"))
        };
        let mut bytes = Vec::with_capacity(2 * codes.len());
        let mut values = [0; BLOCK];
        let (mut at, mut rest) = (range.start, codes);
        while !rest.is_empty() {
            // The first may begin, and the last end, within a block.
            let (now, later) = rest.split_at(rest.len().min(BLOCK - at % BLOCK));
            self.code.widened(now, scale(at / BLOCK), &mut values);
            bytes.extend(values[..now.len()].iter().flat_map(|x| x.to_le_bytes()));
            (at, rest) = (at + now.len(), later);
        }
        Some(bytes)
    }

    /// Reads those of `slots` that lie in this region, and writes the region's codes and scales; nothing where none does.
    pub fn load(
        &self,
        session: &mut Session,
        file: &mut TensorFile,
        slots: &[PlacedSlot],
    ) -> Result<(), Failure> {
        let inside: Vec<_> = slots.iter().filter_map(|slot| Some((slot, self.range(slot)?))).collect();
        if inside.is_empty() {
            return Ok(());
        }
        let elements = self.slot.ty.elements();
        let mut values = vec![0_u16; elements];
        for (slot, range) in inside {
            let mut bytes = vec![0; 2 * range.len()];
            file.read_into(&slot.path, &mut bytes).map_err(Failure::io(&slot.path))?;
            for (value, bytes) in values[range].iter_mut().zip(bytes.chunks_exact(2)) {
                *value = u16::from_le_bytes([bytes[0], bytes[1]]);
            }
        }
        let mut codes = vec![0; elements];
        let blocks = codes.par_chunks_mut(BLOCK).zip(values.par_chunks(BLOCK));
        let scales: Vec<f32> = blocks.map(|(codes, values)| self.code.narrowed(values, codes)).collect();
        session.write_slot(&self.slot.path, &codes)?;
        Ok(session.write_f32(&self.scales(), &scales)?)
    }
}
