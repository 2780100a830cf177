//! Dequantises weights in NF4 (`nf4`).
//!
//! (codes u8 [M, N / 2], map f32 [256], for every part (magnitudes u8 [blocks], nested f32 [blocks / 256], offset f32 [1])) ->
//! [M, N] in f32 or bf16. A part is a named weight, given by its number of rows, with blocks of its own; weights that are read
//! together lie one after the other. Without `nested` a part has its magnitudes in f32 instead, and there is no map. Numbers of
//! blocks are rounded up.
//!
//! The codes are frozen, so nothing is differentiated through it. Values must have the same bits on every backend, so the
//! arithmetic of `nf4` is part of the definition.

use std::ops::Range;

use super::{arity, expect};
use crate::nf4::{NESTED, blocks};
use crate::types::{DType, TensorType};

/// Number of inputs per part.
pub fn inputs_of_a_part(nested: bool) -> usize {
    if nested { 3 } else { 1 }
}

/// Number of inputs before those of the first part.
pub fn inputs_before_parts(nested: bool) -> usize {
    1 + nested as usize
}

/// The row range of each part.
pub fn parts(rows: &[usize]) -> impl Iterator<Item = Range<usize>> {
    rows.iter().scan(0, |start, rows| {
        *start += rows;
        Some(*start - rows..*start)
    })
}

pub fn infer(
    rows: &[usize],
    to: DType,
    nested: bool,
    ins: &[&TensorType],
) -> Result<Vec<TensorType>, String> {
    let (before, of_a_part) = (inputs_before_parts(nested), inputs_of_a_part(nested));
    arity(ins, before + of_a_part * rows.len())?;
    let [m, bytes] = ins[0].dims[..] else { return Err(format!("the codes are {}", ins[0])) };
    expect("the codes", ins[0], DType::U8, &[rows.iter().sum(), bytes])?;
    if nested {
        expect("the map", ins[1], DType::F32, &[256])?;
    }
    for (rows, of) in rows.iter().zip(ins[before..].chunks(of_a_part)) {
        let blocks = blocks(rows * 2 * bytes);
        let dtype = if nested { DType::U8 } else { DType::F32 };
        expect("the magnitudes", of[0], dtype, &[blocks])?;
        if nested {
            expect("the largest magnitudes", of[1], DType::F32, &[blocks.div_ceil(NESTED)])?;
            expect("the mean of magnitudes", of[2], DType::F32, &[1])?;
        }
    }
    if !matches!(to, DType::F32 | DType::BF16) {
        return Err(format!("weights are f32 or bf16, not {}", to.name()));
    }
    Ok(vec![TensorType::new(to, [m, 2 * bytes])])
}
