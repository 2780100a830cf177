//! Collectives: the operations in which ranks exchange tensors, each within the group along one axis of the mesh.
//!
//! Every rank of a group runs them in the same order with the same extents. Tensors are flat: a caller slices and reshapes,
//! which costs nothing. With one rank they are the identity, plus the base. They are added after autodiff, so none has a
//! gradient, and no pass moves them into a region, a bundle or an epilogue.

use super::{arity, expect};
use crate::attr::named;
use crate::builder::{Builder, Tensor};
use crate::ops::Op;
use crate::types::{DType, TensorType};

named! {
    pub enum Combine { Sum = "sum", Max = "max" }
}

named! {
    pub enum Order {
        /// Whichever is fastest.
        Any = "any",
        /// The order of `tree`, with each sum rounded to the type.
        Tree = "tree",
    }
}

/// Adds terms by the balanced tree over them, ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)), or one after the other where their
/// number is not a power of two. Calls `add(to, from)`; at the end the first term is the sum.
pub fn tree(terms: usize, mut add: impl FnMut(usize, usize)) {
    if !terms.is_power_of_two() {
        (1..terms).for_each(|term| add(0, term));
        return;
    }
    let mut apart = 1;
    while apart < terms {
        (0..terms).step_by(2 * apart).for_each(|onto| add(onto, onto + apart));
        apart *= 2;
    }
}

pub fn infer(op: &Op, ins: &[&TensorType]) -> Result<Vec<TensorType>, String> {
    let Some(ways) = op.ways() else {
        arity(ins, 0)?;
        return Ok(vec![TensorType::new(DType::I32, [1])]);
    };
    let has_base = matches!(op, Op::ReduceScatter { base: true, .. });
    arity(ins, 1 + has_base as usize)?;
    let x = ins[0];
    if x.rank() != 1 || ways == 0 {
        return Err(format!("{x} among {ways} ranks: collectives take flat tensors, and one rank at least"));
    }
    if !matches!(op, Op::AllGather { .. }) && !x.dtype.is_float() {
        return Err(format!("{x} is not added over ranks: only floats are"));
    }
    let extent = match op {
        Op::AllGather { .. } => ways * x.dims[0],
        Op::ReduceScatter { .. } if x.dims[0].is_multiple_of(ways) => x.dims[0] / ways,
        Op::ReduceScatter { .. } => return Err(format!("{x} does not divide among {ways} ranks")),
        _ => x.dims[0],
    };
    let out = TensorType::new(x.dtype, [extent]);
    if has_base {
        expect("the base", ins[1], out.dtype, &out.dims)?;
    }
    Ok(vec![out])
}

/// The value itself for one rank; a base is added after the exchange. `None` for the exchange alone.
pub fn expand<'g>(b: &'g Builder, op: &Op, ins: &[Tensor<'g>]) -> Option<Vec<Tensor<'g>>> {
    let own = |x: Tensor<'g>| b.op(Op::Reshape { dims: x.dims() }, &[x]);
    Some(vec![match *op {
        Op::AllGather { ways: 1, .. } | Op::AllReduce { ways: 1, .. } => own(ins[0]),
        Op::ReduceScatter { ways: 1, base: false, .. } => own(ins[0]),
        Op::ReduceScatter { ways: 1, base: true, .. } => ins[1] + ins[0],
        Op::ReduceScatter { axis, ways, order, base: true } => {
            ins[1] + b.op(Op::ReduceScatter { axis, ways, order, base: false }, &ins[..1])
        }
        _ => return None,
    }])
}

/// The values of the exchange at the rank with coordinate `at`, from the inputs of all ranks of its group, each rounded by
/// `round`.
pub(crate) fn evaluate(op: &Op, at: usize, terms: &[&[f64]], round: impl Fn(f64) -> f64) -> Vec<f64> {
    match *op {
        Op::Rank { .. } => vec![at as f64],
        Op::AllGather { .. } => terms.concat(),
        Op::ReduceScatter { ways, order, .. } => {
            let extent = terms[0].len() / ways;
            let blocks: Vec<&[f64]> = terms.iter().map(|term| &term[at * extent..][..extent]).collect();
            combined(Combine::Sum, order, &blocks, round)
        }
        Op::AllReduce { by, order, .. } => combined(by, order, terms, round),
        _ => unreachable!("{} is no collective", op.name()),
    }
}

fn combined(by: Combine, order: Order, terms: &[&[f64]], round: impl Fn(f64) -> f64) -> Vec<f64> {
    let of_one = |i: usize| {
        let mut own: Vec<f64> = terms.iter().map(|term| term[i]).collect();
        match (by, order) {
            (Combine::Max, _) => own.into_iter().fold(f64::NEG_INFINITY, f64::max),
            (Combine::Sum, Order::Any) => own.into_iter().sum(),
            (Combine::Sum, Order::Tree) => {
                tree(terms.len(), |onto, term| own[onto] = round(own[onto] + own[term]));
                own[0]
            }
        }
    };
    (0..terms[0].len()).map(of_one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_over_powers_of_two_are_balanced_trees() {
        let written = |terms: usize| {
            let mut sums: Vec<String> = (0..terms).map(|i| i.to_string()).collect();
            tree(terms, |onto, term| sums[onto] = format!("({}+{})", sums[onto], sums[term]));
            sums.remove(0)
        };
        assert_eq!(written(1), "0");
        assert_eq!(written(2), "(0+1)");
        assert_eq!(written(3), "((0+1)+2)");
        assert_eq!(written(4), "((0+1)+(2+3))");
        assert_eq!(written(5), "((((0+1)+2)+3)+4)");
        assert_eq!(written(8), "(((0+1)+(2+3))+((4+5)+(6+7)))");
    }
}
