//! Products by an adapter's A, fused with the dropout beside them: the wide tensor crosses memory once, and its dropped version
//! is never stored.
//!
//! x, dx [M, K] are wide, u, du [M, R] thin and a [R, K]. `passes/fuse/thin_products.rs` creates the operation from a dropout
//! and a product after autodiff, with the dropout's key.

use super::dropout;
use crate::attr::named;
use crate::builder::{Builder, Tensor};
use crate::ops::Op;
use crate::ops::epilogue::Epilogue;
use crate::ops::product::{self, Compute, plain};
use crate::types::{DType, TensorType};

named! {
    /// The adapter product, and the factor that dropout applies to.
    pub enum Thin {
        /// (x, a) -> drop(x) a^T.
        Down = "down",
        /// (du, a) -> drop(du a).
        Up = "up",
        /// (du, x) -> du^T drop(x).
        Weight = "weight",
    }
}

/// The largest rank that kernels support.
pub const MOST_RANK: usize = 64;
/// Ranks and widths are multiples of this, the number of elements that share a draw.
pub const STEP: usize = 8;

impl Thin {
    /// Whether the operands are stored transposed.
    pub fn turned(self) -> [bool; 2] {
        match self {
            Thin::Down => [false, true],
            Thin::Up => [false, false],
            Thin::Weight => [true, false],
        }
    }

    /// The rank and the width of the product of two operands.
    pub fn extents(self, ins: [&TensorType; 2]) -> [usize; 2] {
        let a_or_x = ins[1].dims[1];
        match self {
            Thin::Down => [ins[1].dims[0], a_or_x],
            Thin::Up | Thin::Weight => [ins[0].dims[1], a_or_x],
        }
    }
}

pub fn infer(
    form: Thin,
    p: f32,
    out: DType,
    base: bool,
    ins: &[&TensorType],
) -> Result<Vec<TensorType>, String> {
    super::arity(ins, 4 + base as usize)?;
    if base && form == Thin::Down {
        return Err("what is narrowed is added to nothing".into());
    }
    let ([ta, tb], (operands, drawn)) = (form.turned(), ins.split_at(ins.len() - 2));
    let result = product::infer(ta, tb, out, base, Epilogue::None, operands)?;
    let dropped = match form {
        Thin::Down => ins[0],
        Thin::Up => &result[0],
        Thin::Weight => ins[1],
    };
    dropout::infer(p, &[dropped, drawn[0], drawn[1]])?;
    Ok(result)
}

pub fn expand<'g>(b: &'g Builder, op: &Op, key: u64, ins: &[Tensor<'g>]) -> Tensor<'g> {
    let &Op::ThinProduct { form, p, out, base } = op else { unreachable!("called for thin products") };
    let ([ta, tb], (operands, drawn)) = (form.turned(), ins.split_at(ins.len() - 2));
    let drop = |x| b.op_keyed(Op::Dropout { p }, &[x, drawn[0], drawn[1]], key);
    let times = |left, right| b.op(plain(ta, tb, out, Compute::Full), &[left, right]);
    let product = match form {
        Thin::Down => times(drop(ins[0]), ins[1]),
        Thin::Up => drop(times(ins[0], ins[1])),
        Thin::Weight => times(ins[0], drop(ins[1])),
    };
    if base { product + operands[2].cast(out) } else { product }
}

/// Arithmetic: the product and the dropout.
pub fn flops(form: Thin, ins: &[&TensorType], out: &TensorType) -> usize {
    let wide = if form == Thin::Down { ins[0] } else { ins[1] };
    let dropped = if form == Thin::Up { out.elements() } else { wide.elements() };
    2 * product::inner(form.turned()[0], ins[0]) * out.elements() + 2 * dropped
}
