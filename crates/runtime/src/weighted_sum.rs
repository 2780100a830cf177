//! Linear attention, forward and backward, written as weighted sums of a single form for both backends.
//!
//! A sum computes out_i = sum over j of W_ij x_j, where W = M(scale a b^T) weights row j of the opposite side for row i of the
//! result: o, dq, dk and dv differ only in which tensors are a, b and x and in which side holds the queries. The gradient of
//! queries that double as keys adds both weights: row i as a query and row i as a key.
//!
//! An output head takes the sum over all heads that share it. Head h reads head h * HX / H of a tensor with HX heads.

use flatout_ir::ops::linear_attention::{Keys, LinearAttend};

/// The side that owns the rows of a result; the sum runs over the opposite side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// Queries, which attend to keys.
    Queries,
    /// Keys, which queries attend to.
    Keys,
    /// Both at once: W_ij = M(scale a_i b_j) + M(scale a_j b_i).
    Both,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightedSum {
    /// Indices of the inputs: `left` is a, on the side of the result; `right` is b and `rows` is x, on the side summed over.
    pub left: usize,
    pub right: usize,
    pub rows: usize,
    /// Index of the output.
    pub out: usize,
    pub owner: Owner,
}

/// The sums that compute an operation, one per output.
pub fn sums(attend: &LinearAttend, is_grad: bool) -> Vec<WeightedSum> {
    let (q, k, v, d) = (0, attend.tensors() - 2, attend.tensors() - 1, attend.inputs());
    if !is_grad {
        return vec![WeightedSum { left: q, right: k, rows: v, out: 0, owner: Owner::Queries }];
    }
    let dv = WeightedSum { left: k, right: q, rows: d, out: v, owner: Owner::Keys };
    match attend.k {
        Keys::Queries => vec![WeightedSum { left: d, right: v, rows: q, out: q, owner: Owner::Both }, dv],
        Keys::Given(_) => vec![
            WeightedSum { left: d, right: v, rows: k, out: q, owner: Owner::Queries },
            WeightedSum { left: v, right: d, rows: q, out: k, owner: Owner::Keys },
            dv,
        ],
    }
}
