//! Initial values of slots: weights from counter-based random numbers, tables from their formulas.

use std::ops::Range;

use flatout_ir::passes::adapter;
use flatout_ir::passes::average::averaged_weight;
use flatout_ir::types::{bf16_from_f32, bf16_to_f32};
use flatout_ir::{Class, DType, Init, TensorRange, TensorType, bicubic, random};
use flatout_runtime::cpu::normal;
use flatout_waits::{self as waits, Unit};

use crate::Failure;
use crate::run::state::{held, leaves};
use crate::weights::quantized;
use flatout_runtime::{RuntimeError, Session};
use rayon::prelude::*;

/// Writes every parameter and table. A weight depends only on the seed and its own path.
pub fn write(session: &mut Session, seed: u64) -> Result<(), RuntimeError> {
    write_drawn(session, seed, |_| true)?;
    write_row_norms(session, |piece| Ok::<_, RuntimeError>(drawn_for(piece, seed)))?;
    write_tables(session)
}

/// Writes the initial adapters of weights that are loaded already; `source` provides weights of which the session holds only a
/// shard.
pub fn write_adapters(
    session: &mut Session,
    seed: u64,
    source: impl Fn(&TensorRange) -> Result<Vec<u8>, Failure>,
) -> Result<(), Failure> {
    write_drawn(session, seed, |path| path.starts_with(adapter::SCOPE))?;
    write_row_norms(session, source)
}

fn write_drawn(session: &mut Session, seed: u64, wanted: impl Fn(&str) -> bool) -> Result<(), RuntimeError> {
    let pieces = held(session, Class::is_parameter);
    let bytes: usize = pieces.iter().map(TensorRange::bytes).sum();
    let wait = waits::begin("drawing first weights", Unit::Bytes, Some(bytes as u64));
    let mut writer = quantized::Writer::default();
    for piece in pieces.into_iter().filter(|piece| piece.init != Init::RowNorms && wanted(&piece.path)) {
        match piece.codes() {
            Some(_) => {
                let values = drawn(&piece.path, &piece.init, seed, piece.range.clone());
                writer.write_codes(session, &piece, values)?;
            }
            None => session.write_range(&piece.slot, piece.at, &drawn_for(&piece, seed))?,
        }
        wait.add(piece.bytes() as u64);
    }
    writer.finish();
    Ok(())
}

/// The initial values of a piece in the type of its slot.
fn drawn_for(piece: &TensorRange, seed: u64) -> Vec<u8> {
    match piece.ty.dtype {
        DType::BF16 => narrow(&piece.path, &piece.init, seed, piece.range.clone()),
        _ => bytes_of(&drawn(&piece.path, &piece.init, seed, piece.range.clone())),
    }
}

/// Writes DoRA magnitudes: the row norms of the weights in the session. For a sharded weight, `source` provides all rows.
fn write_row_norms<E: From<RuntimeError>>(
    session: &mut Session,
    source: impl Fn(&TensorRange) -> Result<Vec<u8>, E>,
) -> Result<(), E> {
    let pieces = held(session, Class::is_parameter);
    for piece in pieces.iter().filter(|piece| piece.init == Init::RowNorms && piece.elements() > 0) {
        let weight = adapter::weight_beside(&piece.path).expect("a magnitude belongs to a weight");
        let weight = pieces.iter().find(|piece| piece.path == weight).expect("its weight is a parameter");
        let columns = weight.ty.elements() / piece.ty.elements();
        let rows = columns * piece.range.start..columns * piece.range.end;
        let wide = match weight.covering(&rows) {
            Some(rows) => quantized::read_f32(session, &rows)?,
            None => as_f32(weight.ty.dtype, &source(&TensorRange { range: rows, ..weight.clone() })?),
        };
        session.write_range(&piece.slot, piece.at, &bytes_of(&row_norms(&wide, piece.elements())))?;
    }
    Ok(())
}

/// The norms of the rows of a matrix.
pub fn row_norms(values: &[f32], rows: usize) -> Vec<f32> {
    let norm = |row: &[f32]| row.iter().map(|x| (*x as f64).powi(2)).sum::<f64>().sqrt() as f32;
    values.par_chunks(values.len() / rows).map(norm).collect()
}

/// Initialises running averages with the weights that they average.
pub fn write_averages(session: &mut Session) -> Result<(), RuntimeError> {
    let pieces = held(session, |class| class == Class::Average || class.is_parameter());
    for average in pieces.iter().filter(|piece| piece.class == Class::Average) {
        let weight = averaged_weight(&average.path).expect("an average is named after its weight");
        let weight = pieces.iter().find(|piece| piece.path == weight).expect("its weight is a parameter");
        let same = weight.covering(&average.range).expect("an average lies where its weight does");
        let bytes = session.read_range(&same.slot, same.within())?;
        session.write_range(&average.slot, average.at, &bytes)?;
    }
    Ok(())
}

/// Writes the constants, which no checkpoint contains.
pub fn write_tables(session: &mut Session) -> Result<(), RuntimeError> {
    let tables = leaves(session.plans(), |class| class == Class::Const);
    for slot in tables.into_iter().filter(|slot| slot.init != Init::Data) {
        session.write_f32(&slot.path, &values(&slot.path, &slot.ty, &slot.init, 0))?;
    }
    Ok(())
}

/// Values drawn per parallel task; even, so that pairs stay together.
const CHUNK: usize = 1 << 16;

/// The initial values of one slot.
pub fn values(path: &str, ty: &TensorType, init: &Init, seed: u64) -> Vec<f32> {
    match *init {
        Init::RopeTable { freq } => {
            return freq.table(ty.dims[0], ty.dims[1]).map(|value| value as f32).collect();
        }
        Init::Bicubic { from, to, antialias } => {
            return bicubic::matrix(from, to, antialias).into_iter().map(|value| value as f32).collect();
        }
        _ => {}
    }
    drawn(path, init, seed, 0..ty.elements())
}

/// The initial values of a range of a slot's elements, in row-major order: each depends only on its index.
pub fn drawn(path: &str, init: &Init, seed: u64, range: Range<usize>) -> Vec<f32> {
    let (stream, mut values) = (stream(path), vec![0.0; range.len()]);
    values
        .par_chunks_mut(CHUNK)
        .enumerate()
        .for_each(|(chunk, values)| draw(init, seed, stream, range.start + chunk * CHUNK, values));
    values
}

/// The same in bf16, as bytes. Large models have frozen weights in bf16, so nothing of the slot's size is allocated in f32.
fn narrow(path: &str, init: &Init, seed: u64, range: Range<usize>) -> Vec<u8> {
    let (stream, mut bytes) = (stream(path), vec![0; 2 * range.len()]);
    bytes.par_chunks_mut(2 * CHUNK).enumerate().for_each_init(
        || vec![0.0; CHUNK],
        |wide, (chunk, bytes)| {
            let wide = &mut wide[..bytes.len() / 2];
            draw(init, seed, stream, range.start + chunk * CHUNK, wide);
            for (narrow, x) in bytes.as_chunks_mut::<2>().0.iter_mut().zip(wide) {
                *narrow = bf16_from_f32(*x).to_le_bytes();
            }
        },
    );
    bytes
}

/// Converts the bytes of a slot of this type.
fn as_f32(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        DType::BF16 => bytes.as_chunks::<2>().0.iter().map(|x| bf16_to_f32(u16::from_le_bytes(*x))).collect(),
        _ => bytes.as_chunks::<4>().0.iter().map(|x| f32::from_le_bytes(*x)).collect(),
    }
}

fn bytes_of(values: &[f32]) -> Vec<u8> {
    let mut bytes = vec![0; 4 * values.len()];
    let words = bytes.as_chunks_mut::<4>().0.par_iter_mut();
    words.zip(values).for_each(|(word, value)| *word = value.to_le_bytes());
    bytes
}

/// The values of a slot from an element on. They are drawn in pairs.
fn draw(init: &Init, seed: u64, stream: u64, from: usize, values: &mut [f32]) {
    if !from.is_multiple_of(2) && !values.is_empty() {
        let mut pair = [0.0; 2];
        draw(init, seed, stream, from - 1, &mut pair);
        values[0] = pair[1];
        return draw(init, seed, stream, from + 1, &mut values[1..]);
    }
    let first = (from / 2) as u64;
    match *init {
        Init::Zeros => values.fill(0.0),
        Init::Ones => values.fill(1.0),
        Init::Constant { value } => values.fill(value),
        Init::Normal { std } => {
            normal::fill(seed, stream, first, values);
            values.iter_mut().for_each(|value| *value *= std);
        }
        Init::Uniform { bound } => {
            for (pair, i) in values.chunks_mut(2).zip(first..) {
                let drawn = random::unit_pair(seed, stream, i);
                pair.iter_mut().zip(drawn).for_each(|(value, x)| *value = bound * (2.0 * x - 1.0) as f32);
            }
        }
        Init::RowNorms => unreachable!("magnitudes are known when their weights are"),
        Init::Data => unreachable!("data is written by who opens it"),
        Init::RopeTable { .. } | Init::Bicubic { .. } => unreachable!("tables are in f32"),
    }
}

/// FNV-1a hash of a path.
fn stream(path: &str) -> u64 {
    path.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ b as u64).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn narrow_values_are_the_wide_ones_rounded() {
        let ty = TensorType::new(DType::F32, [3, CHUNK / 2 + 1]);
        for init in [Init::Normal { std: 0.02 }, Init::Uniform { bound: 0.5 }, Init::Ones, Init::Zeros] {
            let wide = values("layers.0.wq", &ty, &init, 7);
            let rounded: Vec<u8> = wide.iter().flat_map(|x| bf16_from_f32(*x).to_le_bytes()).collect();
            let elements = wide.len();
            assert_eq!(narrow("layers.0.wq", &init, 7, 0..elements), rounded, "{init:?}");
            // Any range can be drawn alone.
            for range in [0..1, 1..2, 1..1, 5..CHUNK + 8, CHUNK - 1..CHUNK + 1, elements - 1..elements] {
                assert_eq!(
                    drawn("layers.0.wq", &init, 7, range.clone()),
                    wide[range.clone()],
                    "{init:?} {range:?}"
                );
                let bytes = 2 * range.start..2 * range.end;
                assert_eq!(narrow("layers.0.wq", &init, 7, range), rounded[bytes], "{init:?}");
            }
        }
    }
}
