//! Linear attention, forward and backward, as weighted sums of one form, for both backends.
//!
//! A sum gives out_i = sum over j of W_ij x_j, where W = M(scale a b^T) is the weight between a row i that the result
//! belongs to and a row j of the other side: o, dq, dk and dv differ only in what stands for a, b and x and in who is
//! the query. The gradient of queries that are their own keys has both weights, of i as a query and of i as a key.
//!
//! An output head takes the sum over all heads that share it. Tensor X of HX heads is read by head h at h * HX / H.

use flatout_ir::ops::linear_attention::{Keys, LinearAttend};

/// The side that the rows of a result are on; the sum runs over the other side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// Queries, that look at keys.
    Queries,
    /// Keys, that queries look at.
    Keys,
    /// Both at once: W_ij = M(scale a_i b_j) + M(scale a_j b_i).
    Both,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightedSum {
    /// Inputs: a, on the side of the result, b and x, on the side that is summed over.
    pub left: usize,
    pub right: usize,
    pub rows: usize,
    /// The output.
    pub out: usize,
    pub owner: Owner,
}

/// The sums of an operation, by output.
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
