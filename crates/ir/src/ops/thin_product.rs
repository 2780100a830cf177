//! An adapter's products between a wide tensor and a thin one. Products by its A are fused with the dropout beside them: the wide
//! tensor crosses memory once, and its dropped version is never stored. Products that widen may also be added to a base without a
//! dropout (p = 0), and then take no inputs of one.
//!
//! x, dx [M, K] are wide, u, du [M, R] thin, a [R, K] and b [K, R]. `passes/fuse/thin_products.rs` creates the operation after
//! autodiff from a dropout and a product, with the dropout's key, or from a sum.

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
        /// (u, b) -> u b^T, never with a dropout.
        Out = "out",
    }
}

/// The largest rank that kernels support.
pub const MOST_RANK: usize = 64;
/// Ranks and widths are multiples of this, the number of elements that share a draw.
pub const STEP: usize = 8;

impl Thin {
    /// Whether the operands are stored transposed.
    pub fn transposed(self) -> [bool; 2] {
        match self {
            Thin::Down => [false, true],
            Thin::Up => [false, false],
            Thin::Weight => [true, false],
            Thin::Out => [false, true],
        }
    }

    /// Whether a dropout of probability p is part of the operation, which then takes the inputs of `Op::Dropout`.
    pub fn drops(p: f32) -> bool {
        p > 0.0
    }

    /// The rank and the width of the product of two operands.
    pub fn extents(self, ins: [&TensorType; 2]) -> [usize; 2] {
        let [rows, columns] = [ins[1].dims[0], ins[1].dims[1]];
        match self {
            Thin::Down => [rows, columns],
            Thin::Up | Thin::Weight => [ins[0].dims[1], columns],
            Thin::Out => [columns, rows],
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
    let operands = 2 + base as usize;
    super::arity(ins, if Thin::drops(p) { operands + 2 } else { operands })?;
    if base && form == Thin::Down {
        return Err("what is narrowed is added to nothing".into());
    }
    let ([ta, tb], (operands, drawn)) = (form.transposed(), ins.split_at(operands));
    let result = product::infer(ta, tb, out, base, Epilogue::None, operands)?;
    let dropped = match (form, Thin::drops(p)) {
        (Thin::Up | Thin::Out, false) => return Ok(result),
        (Thin::Down, true) => ins[0],
        (Thin::Up, true) => &result[0],
        (Thin::Weight, true) => ins[1],
        (Thin::Out, true) => return Err("a product by b drops nothing".into()),
        (Thin::Down | Thin::Weight, false) => return Err("without a dropout this is a product".into()),
    };
    dropout::infer(p, &[dropped, drawn[0], drawn[1]])?;
    Ok(result)
}

pub fn expand<'g>(b: &'g Builder, op: &Op, key: u64, ins: &[Tensor<'g>]) -> Tensor<'g> {
    let &Op::ThinProduct { form, p, out, base } = op else { unreachable!("called for thin products") };
    let ([ta, tb], (operands, drawn)) = (form.transposed(), ins.split_at(2 + base as usize));
    let drop = |x| match drawn {
        [rng, rows] => b.op_keyed(Op::Dropout { p }, &[x, *rng, *rows], key),
        _ => x,
    };
    let times = |left, right| b.op(plain(ta, tb, out, Compute::Full), &[left, right]);
    let product = match form {
        Thin::Down => times(drop(ins[0]), ins[1]),
        Thin::Up => drop(times(ins[0], ins[1])),
        Thin::Weight => times(ins[0], drop(ins[1])),
        Thin::Out => times(ins[0], ins[1]),
    };
    if base { product + operands[2].cast(out) } else { product }
}

/// Arithmetic: the product and the dropout.
pub fn flops(form: Thin, p: f32, ins: &[&TensorType], out: &TensorType) -> usize {
    let dropped = match form {
        _ if !Thin::drops(p) => 0,
        Thin::Down => ins[0].elements(),
        Thin::Up | Thin::Out => out.elements(),
        Thin::Weight => ins[1].elements(),
    };
    2 * product::inner(form.transposed()[0], ins[0]) * out.elements() + 2 * dropped
}
