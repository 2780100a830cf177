//! The body of a `Region`: a graph of elementwise nodes whose input slots are the region's inputs and whose results are its
//! outputs, both in order. A result may also be the sum over rows of a [rows, columns] value, rounded as its node rounds it,
//! whether or not the value itself is a result.

use crate::builder::{Builder, Tensor};
use crate::graph::{Graph, Value};
use crate::ops::Op;
use crate::ops::reduce::Fold;
use crate::types::TensorType;

pub fn infer(body: &Graph, ins: &[&TensorType]) -> Result<Vec<TensorType>, String> {
    if body.slots.len() != ins.len() {
        return Err(format!("takes {} inputs, got {}", body.slots.len(), ins.len()));
    }
    if let Some((slot, got)) = body.slots.iter().zip(ins).find(|(slot, got)| slot.ty != ***got) {
        return Err(format!("{} is {got}, wanted {}", slot.path, slot.ty));
    }
    for node in &body.nodes {
        match node.op {
            Op::Read { .. } | Op::Map { .. } => {}
            Op::Reduce { axis: 0, by: Fold::Sum } if is_summed(body.ty(node.ins[0])) => {}
            _ => return Err(format!("{} is not elementwise", node.op.name())),
        }
        if let Some(v) = node.ins.iter().find(|v| matches!(body.node(v.node).op, Op::Reduce { .. })) {
            return Err(format!("{} reads {v}, a sum: sums are results alone", node.op.name()));
        }
    }
    Ok(body.results.iter().map(|(_, v)| body.ty(*v).clone()).collect())
}

/// Whether a region sums values of a type over their rows.
pub fn is_summed(ty: &TensorType) -> bool {
    ty.rank() == 2 && ty.dtype.is_float()
}

/// Pairs that may share memory. Kernels read a tile of all inputs of a region before they write one, so any output may
/// overwrite any input; pairs are listed for the first 16 inputs and 8 outputs.
pub fn in_place() -> Vec<(usize, usize)> {
    (0..16).flat_map(|input| (0..8).map(move |output| (input, output))).collect()
}

/// The value that a result sums, where it is a sum.
pub fn summed(body: &Graph, result: usize) -> Option<Value> {
    let node = body.node(body.results[result].1.node);
    matches!(node.op, Op::Reduce { .. }).then(|| node.ins[0])
}

/// The value that a result is, or that it sums.
pub fn value(body: &Graph, result: usize) -> Value {
    summed(body, result).unwrap_or(body.results[result].1)
}

pub fn sums(body: &Graph) -> impl Iterator<Item = usize> {
    (0..body.results.len()).filter(|result| summed(body, *result).is_some())
}

/// Replaces the region by the nodes of its body.
pub fn expand<'g>(b: &'g Builder, body: &Graph, ins: &[Tensor<'g>]) -> Vec<Tensor<'g>> {
    let mut made: Vec<Tensor<'g>> = Vec::with_capacity(body.nodes.len());
    for node in &body.nodes {
        let value = match &node.op {
            Op::Read { slot } => ins[slot.0 as usize],
            op => {
                let args: Vec<_> = node.ins.iter().map(|v| made[v.node.0 as usize]).collect();
                b.op(op.clone(), &args)
            }
        };
        made.push(value);
    }
    body.results.iter().map(|(_, v)| made[v.node.0 as usize]).collect()
}
