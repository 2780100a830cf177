//! Products of f32 in TF32: operands keep 10 bits of their mantissa; sums and all stored values stay f32. This includes the
//! head's products; attention's own kernel stays in full f32.

use crate::graph::Graph;
use crate::ops::Op;
use crate::ops::product::Compute;
use crate::types::DType;

/// Sets the mode of every product of f32; returns the graph and the number of products. No node is added or moved.
pub fn tf32(g: &Graph) -> (Graph, usize) {
    let (mut out, mut count) = (g.clone(), 0);
    for node in &mut out.nodes {
        let is_f32 = node.ins.first().is_some_and(|v| g.ty(*v).dtype == DType::F32);
        if let (true, Some(compute)) = (is_f32, compute_of(&mut node.op)) {
            *compute = Compute::Tf32;
            count += 1;
        }
    }
    (out, count)
}

/// The compute mode of an operation with matrix products.
fn compute_of(op: &mut Op) -> Option<&mut Compute> {
    match op {
        Op::Product { compute, .. }
        | Op::HeadLoss { compute, .. }
        | Op::HeadLossGrad { compute, .. }
        | Op::HeadLossTrain { compute, .. } => Some(compute),
        _ => None,
    }
}
