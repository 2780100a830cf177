//! Weights stored as codes, in NF4 (`ir::nf4`) or E4M3 (`ir::fp8`): quantises them when they are written into a session, and
//! reads them back as the values that products use.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use flatout_ir::fp8::{e4m3_from_f32, e4m3_to_f32};
use flatout_ir::nf4::{self, BLOCK, Magnitudes, NESTED};
use flatout_ir::passes::fp8_base::{self, Waiting, scale_of};
use flatout_ir::passes::nf4::{MAP, magnitude_paths};
use flatout_ir::types::{self, bf16_from_f32, bf16_to_f32};
use flatout_ir::{Codes, DType, Init, Op, PlanSet, TensorRange, TensorType};
use flatout_runtime::{RuntimeError, Session};
use rayon::prelude::*;

/// Values, or magnitudes, per parallel task: whole blocks of either.
const CHUNK: usize = 1 << 16;

/// A weight in NF4.
struct Quantized {
    codes: Vec<u8>,
    magnitudes: Magnitudes,
}

impl Quantized {
    /// The codes do not depend on the number of threads.
    fn of(values: &[f32]) -> Quantized {
        let mut codes = vec![0; values.len().div_ceil(2)];
        let mut absmax = vec![0.0; nf4::blocks(values.len())];
        values
            .par_chunks(CHUNK)
            .zip(codes.par_chunks_mut(CHUNK / 2))
            .zip(absmax.par_chunks_mut(CHUNK / BLOCK))
            .for_each(|((values, codes), absmax)| nf4::quantize(values, codes, absmax));
        let mut magnitudes = Magnitudes::empty(&absmax);
        let (map, offset) = (nf4::dynamic_map(), magnitudes.offset);
        absmax
            .par_chunks(CHUNK)
            .zip(magnitudes.codes.par_chunks_mut(CHUNK))
            .zip(magnitudes.nested.par_chunks_mut(CHUNK / NESTED))
            .for_each(|((absmax, codes), nested)| nf4::code_magnitudes(&map, offset, absmax, codes, nested));
        Quantized { codes, magnitudes }
    }

    /// A range of its values, as products in f32 or bf16 read them.
    fn values(&self, map: &[f32; 256], range: Range<usize>, narrow: bool) -> Vec<f32> {
        dequantized(&self.codes, |block| self.magnitudes.get(map, block), range, narrow)
    }
}

/// A range of dequantised values, given the magnitude of each block, as products in f32 or bf16 read them.
pub fn dequantized(
    codes: &[u8],
    magnitude: impl Fn(usize) -> f32 + Sync,
    range: Range<usize>,
    narrow: bool,
) -> Vec<f32> {
    let mut values = vec![0.0; range.len()];
    let round = |x: f32| if narrow { bf16_to_f32(bf16_from_f32(x)) } else { x };
    values.par_chunks_mut(CHUNK).enumerate().for_each(|(chunk, values)| {
        nf4::dequantize(codes, &magnitude, round, range.start + chunk * CHUNK, values);
    });
    values
}

/// The values that a weight has in NF4, as products in f32 or bf16 read them.
pub fn rounded_to_nf4(values: &[f32], narrow: bool) -> Vec<f32> {
    Quantized::of(values).values(&nf4::dynamic_map(), 0..values.len(), narrow)
}

/// The largest magnitude of a weight.
pub fn amax(values: &[f32]) -> f32 {
    values.par_chunks(CHUNK).map(types::amax).reduce(|| 0.0, f32::max)
}

/// The values that a weight has in E4M3 with a scale. They are exact in bf16.
pub fn rounded_to_e4m3(values: &[f32], scale: f32) -> Vec<f32> {
    values.par_iter().map(|x| e4m3_to_f32(e4m3_from_f32(x / scale)) * scale).collect()
}

/// The frozen weights that a run stored as codes: the run was trained with their dequantised values.
#[derive(Debug)]
pub enum StoredBase {
    /// In NF4; `narrow` if products read them as bf16.
    Nf4 { weights: BTreeSet<String>, narrow: bool },
    /// In E4M3, in groups with a common scale, with what is needed to read or draw the other weights of a group.
    Fp8(Vec<BTreeMap<String, (TensorType, Init)>>),
}

impl StoredBase {
    pub fn codes(&self) -> Codes {
        match self {
            StoredBase::Nf4 { .. } => Codes::Nf4,
            StoredBase::Fp8(_) => Codes::Fp8,
        }
    }

    /// Number of these weights.
    pub fn count(&self) -> usize {
        match self {
            StoredBase::Nf4 { weights, .. } => weights.len(),
            StoredBase::Fp8(groups) => groups.iter().map(BTreeMap::len).sum(),
        }
    }

    pub fn has(&self, name: &str) -> bool {
        match self {
            StoredBase::Nf4 { weights, .. } => weights.contains(name),
            StoredBase::Fp8(groups) => groups.iter().any(|group| group.contains_key(name)),
        }
    }
}

/// Writes parameters into a session, quantising those that the session stores as codes.
#[derive(Default)]
pub struct Writer {
    /// E4M3 weights of groups that are not complete yet.
    waiting: Waiting<Vec<f32>>,
}

impl Writer {
    /// Writes a piece of a parameter from bytes in its type.
    pub fn write(
        &mut self,
        session: &mut Session,
        piece: &TensorRange,
        bytes: &[u8],
    ) -> Result<(), RuntimeError> {
        if piece.codes().is_none() {
            return session.write_range(&piece.slot, piece.at, bytes);
        }
        let words = bytes.as_chunks::<4>().0.par_iter();
        self.write_codes(session, piece, words.map(|word| f32::from_le_bytes(*word)).collect())
    }

    /// Writes a weight that the session stores as codes from its values.
    pub fn write_codes(
        &mut self,
        session: &mut Session,
        piece: &TensorRange,
        values: Vec<f32>,
    ) -> Result<(), RuntimeError> {
        let codes = piece.codes().expect("the session stores this weight as codes");
        assert!(piece.is_whole(), "ranks divide no weight that is stored as codes");
        if !values.par_iter().all(|x| x.is_finite()) {
            let (path, codes) = (&piece.path, if codes == Codes::Nf4 { "nf4" } else { "fp8" });
            return Err(RuntimeError::Name(format!(
                "`{path}` has values that are not finite, which {codes} cannot hold: give base=bf16"
            )));
        }
        match codes {
            Codes::Nf4 => {
                let Quantized { codes, magnitudes } = Quantized::of(&values);
                write_nf4(session, piece, &codes, &magnitudes, &nf4::dynamic_map())
            }
            Codes::Fp8 => match self.waiting.add(session.plans(), piece.clone(), values) {
                Some((scale, group)) => write_e4m3(session, &scale, &group),
                None => Ok(()),
            },
        }
    }

    /// Ends the writing; panics if a group is incomplete.
    pub fn finish(self) {
        let left = self.waiting.first();
        assert!(
            left.is_none(),
            "`{}` was written without the weights that share its scale",
            left.unwrap_or("")
        );
    }
}

/// Writes a group of weights and the slot of their scale.
fn write_e4m3(
    session: &mut Session,
    scale_slot: &str,
    group: &[(TensorRange, Vec<f32>)],
) -> Result<(), RuntimeError> {
    let scale = fp8_base::scale(group.iter().map(|(_, values)| amax(values)));
    session.write_f32(scale_slot, &[scale])?;
    for (piece, values) in group {
        let codes: Vec<u8> = values.par_iter().map(|x| e4m3_from_f32(x / scale)).collect();
        session.write_range(&piece.slot, piece.at, &codes)?;
    }
    Ok(())
}

/// Writes given NF4 codes, magnitudes and their map into a session that stores the weight in NF4.
pub fn write_nf4(
    session: &mut Session,
    piece: &TensorRange,
    codes: &[u8],
    magnitudes: &Magnitudes,
    map: &[f32; 256],
) -> Result<(), RuntimeError> {
    assert_eq!(piece.codes(), Some(Codes::Nf4), "{} is kept otherwise", piece.path);
    let [absmax, nested, offset] = magnitude_paths(&piece.path);
    session.write_u8(&piece.slot, codes)?;
    session.write_u8(&absmax, &magnitudes.codes)?;
    session.write_f32(&nested, &magnitudes.nested)?;
    session.write_f32(&offset, &[magnitudes.offset])?;
    session.write_f32(MAP, map)
}

/// The values of a piece as f32, as products read them.
pub fn read_f32(session: &Session, piece: &TensorRange) -> Result<Vec<f32>, RuntimeError> {
    let stored = || session.read_range_f32(&piece.slot, piece.within());
    match piece.codes() {
        None => stored(),
        Some(Codes::Fp8) => {
            let scale = session.read_f32(&scale_of(session.plans(), &piece.path))?[0];
            Ok(stored()?.into_iter().map(|x| x * scale).collect())
        }
        Some(Codes::Nf4) => read_nf4(session, piece),
    }
}

fn read_nf4(session: &Session, piece: &TensorRange) -> Result<Vec<f32>, RuntimeError> {
    let [absmax, nested, offset] = magnitude_paths(&piece.path);
    let (codes, offset) = (session.read_slot(&absmax)?, session.read_f32(&offset)?[0]);
    let magnitudes = Magnitudes { codes, nested: session.read_f32(&nested)?, offset };
    let whole = Quantized { codes: session.read_slot(&piece.slot)?, magnitudes };
    let map: [f32; 256] = session.read_f32(MAP)?.try_into().expect("a map of 256 values");
    debug_assert_eq!(whole.magnitudes.nested.len(), whole.magnitudes.codes.len().div_ceil(NESTED));
    Ok(whole.values(&map, piece.range.clone(), reads_bf16(session.plans())))
}

/// Whether plans dequantise NF4 weights to bf16.
fn reads_bf16(plans: &PlanSet) -> bool {
    let mut launches = plans.plans.iter().flat_map(|plan| &plan.launches);
    launches.any(|launch| matches!(launch.op, Op::Dequantize { to: DType::BF16, .. } | Op::Requantize { .. }))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Weights are divided among threads at block boundaries, and any range equals that of the whole.
    #[test]
    fn chunks_have_the_codes_of_the_whole() {
        let values: Vec<f32> = (0..3 * CHUNK as u32 + 7 * 64 + 30)
            .map(|i| (i.wrapping_mul(2_654_435_761) >> 8) as f32 / 1e7 - 0.8)
            .collect();
        let (mut codes, mut absmax) = (vec![0; values.len() / 2], vec![0.0; nf4::blocks(values.len())]);
        nf4::quantize(&values, &mut codes, &mut absmax);
        let quantized = Quantized::of(&values);
        assert!(quantized.codes == codes && quantized.magnitudes == Magnitudes::of(&absmax));
        let map = nf4::dynamic_map();
        for narrow in [false, true] {
            let all = rounded_to_nf4(&values, narrow);
            assert!(all.iter().zip(&values).all(|(a, b)| (a - b).abs() < 0.2));
            for range in [0..1, 63..65, CHUNK - 1..2 * CHUNK + 1, 100..values.len()] {
                assert_eq!(quantized.values(&map, range.clone(), narrow), all[range]);
            }
        }
    }
}
