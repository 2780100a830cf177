//! One file an operation or family: shape rule, gradient, expansion to simpler operations.
//!
//! The expansion is the mathematics. It is the fallback where a fused form is switched off, and what kernels and
//! fused gradients are checked against; a gradient operation expands to the derivative of its forward's expansion.

pub mod adamw;
pub mod adamw8;
pub mod attention;
pub mod double_norm;
pub mod dropout;
pub mod elementwise;
pub mod epilogue;
pub mod frequency;
pub mod gated;
pub mod head_loss;
pub mod index;
pub mod linear_attention;
pub mod low_rank_norm;
pub mod movement;
pub mod norm;
pub mod normal;
pub mod product;
pub mod qk_norm_rope;
pub mod quantize;
pub mod reduce;
pub mod resample;
pub mod rope;
pub mod source;
pub mod thin_product;

use crate::types::{DType, TensorType};

/// Checks the number of inputs.
pub(crate) fn arity(ins: &[&TensorType], wanted: usize) -> Result<(), String> {
    if ins.len() == wanted { Ok(()) } else { Err(format!("takes {wanted} inputs, got {}", ins.len())) }
}

/// Checks an input's exact type.
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
