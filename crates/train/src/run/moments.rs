//! Converts 8-bit moments for checkpoints and back. A checkpoint stores them in bf16, which holds all their values exactly: a
//! scale belongs to 256 neighbours in memory, and which those are depends on how tensors are merged, whereas the names in a
//! checkpoint may not.

use std::ops::Range;

use flatout_ir::block8::{BLOCK, Code};
use flatout_ir::optimizers::scales_path;
use flatout_ir::passes::gradient::layout::REGION;
use flatout_ir::plan::PlacedSlot;
use flatout_ir::{Class, DType, PlanSet, TensorRange};
use flatout_runtime::Session;
use rayon::prelude::*;

use crate::Failure;
use crate::run::checkpoint::TensorFile;

/// The code of a slot's moments; `None` where they are plain floats.
pub fn code(dtype: DType) -> Option<Code> {
    match dtype {
        DType::E4M3 => Some(Code::Signed),
        DType::E4M4 => Some(Code::Unsigned),
        _ => None,
    }
}

/// A region of 8-bit moments.
pub struct CodedRegion {
    slot: PlacedSlot,
    code: Code,
}

/// The 8-bit regions of these plans, or a rank's shards of them. Parameters use the scales of their region.
pub fn coded_regions(plans: &PlanSet) -> Vec<CodedRegion> {
    let is_region = |slot: &&PlacedSlot| slot.class == Class::Moment && slot.path.starts_with(REGION);
    let moments = plans.slots.iter().filter(is_region);
    let eight_bits = moments.filter_map(|slot| Some((slot, code(slot.ty.dtype)?)));
    let regions = eight_bits.filter(|(slot, _)| plans.slot(&scales_path(&slot.path)).is_some());
    regions.map(|(slot, code)| CodedRegion { slot: slot.clone(), code }).collect()
}

/// Dequantises a piece of 8-bit moments.
pub struct CodedPiece {
    code: Code,
    /// The slot of the scales, and the range of scales of the blocks that the piece covers.
    pub scales: (String, Range<usize>),
    /// Offset of its first element in the first of these blocks.
    first: usize,
}

impl CodedPiece {
    /// For a piece inside one of these regions; `None` if it is in none.
    pub fn of(regions: &[CodedRegion], plans: &PlanSet, piece: &TensorRange) -> Option<CodedPiece> {
        code(piece.ty.dtype)?;
        regions.iter().find_map(|region| {
            let range = region.range(plans, piece)?;
            let blocks = range.start / BLOCK..range.end.div_ceil(BLOCK);
            let scales = (region.scales(), blocks);
            Some(CodedPiece { code: region.code, scales, first: range.start % BLOCK })
        })
    }

    /// The values in bf16, from codes and scales in the layout of device memory.
    pub fn widened(&self, codes: &[u8], scales: &[u8]) -> Vec<u8> {
        let scale = |block: usize| {
            let at = 4 * block;
            f32::from_le_bytes(scales[at..at + 4].try_into().expect("four bytes"))
        };
        let mut bytes = Vec::with_capacity(2 * codes.len());
        let mut values = [0; BLOCK];
        let (mut at, mut rest) = (self.first, codes);
        while !rest.is_empty() {
            // The first block may be entered, and the last one left, in the middle.
            let (now, later) = rest.split_at(rest.len().min(BLOCK - at % BLOCK));
            self.code.widened(now, scale(at / BLOCK), &mut values);
            bytes.extend(values[..now.len()].iter().flat_map(|x| x.to_le_bytes()));
            (at, rest) = (at + now.len(), later);
        }
        bytes
    }
}

impl CodedRegion {
    /// The slot with the scales of all its blocks.
    fn scales(&self) -> String {
        scales_path(&self.slot.path)
    }

    /// The elements of the region that a piece covers.
    fn range(&self, plans: &PlanSet, piece: &TensorRange) -> Option<Range<usize>> {
        let slot = plans.slot(&piece.slot)?;
        // Elements are bytes.
        let start = (slot.view.offset + piece.at).checked_sub(self.slot.view.offset)?;
        let range = start..start + piece.elements();
        (range.end <= self.slot.ty.elements() && slot.ty.dtype == self.slot.ty.dtype).then_some(range)
    }

    /// Reads those of `pieces` that are inside this region and writes the region's codes and scales; does nothing if there are
    /// none.
    pub fn load(
        &self,
        session: &mut Session,
        file: &TensorFile,
        pieces: &[TensorRange],
    ) -> Result<(), Failure> {
        let plans = session.plans();
        let inside: Vec<_> =
            pieces.iter().filter_map(|piece| Some((piece, self.range(plans, piece)?))).collect();
        if inside.is_empty() {
            return Ok(());
        }
        let elements = self.slot.ty.elements();
        let mut values = vec![0_u16; elements];
        for (piece, range) in inside {
            let mut bytes = vec![0; 2 * range.len()];
            file.read_range(&piece.path, piece.range.clone(), &mut bytes)
                .map_err(Failure::io(&piece.path))?;
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
