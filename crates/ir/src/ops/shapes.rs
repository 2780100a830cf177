//! Checks of inputs that shape rules share.

use crate::types::{DType, TensorType};

pub(crate) fn arity(ins: &[&TensorType], wanted: usize) -> Result<(), String> {
    if ins.len() == wanted { Ok(()) } else { Err(format!("takes {wanted} inputs, got {}", ins.len())) }
}

pub(crate) fn expect(what: &str, got: &TensorType, dtype: DType, dims: &[usize]) -> Result<(), String> {
    let wanted = TensorType::new(dtype, dims);
    if *got == wanted { Ok(()) } else { Err(format!("{what} is {got}, wanted {wanted}")) }
}

/// Checks that an input has rows: a first and a last axis.
pub(crate) fn expect_axes(what: &str, got: &TensorType) -> Result<(), String> {
    if got.rank() > 0 { Ok(()) } else { Err(format!("{what} is {got}, wanted at least one axis")) }
}

/// Checks an input's extents, leaving its float type open.
pub(crate) fn expect_float(what: &str, got: &TensorType, dims: &[usize]) -> Result<(), String> {
    if !got.dtype.is_float() {
        return Err(format!("{what} is {got}, wanted floats"));
    }
    expect(what, got, got.dtype, dims)
}
