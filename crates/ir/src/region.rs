//! The body of a `Region`: a graph whose input slots are the region's inputs in order, whose nodes are elementwise,
//! and whose results are the region's outputs in order.

use crate::builder::{Builder, Tensor};
use crate::graph::Graph;
use crate::op::Op;
use crate::types::TensorType;

pub fn infer(body: &Graph, ins: &[&TensorType]) -> Result<Vec<TensorType>, String> {
    if body.slots.len() != ins.len() {
        return Err(format!("takes {} inputs, got {}", body.slots.len(), ins.len()));
    }
    if let Some((slot, got)) = body.slots.iter().zip(ins).find(|(slot, got)| slot.ty != ***got) {
        return Err(format!("{} is {got}, wanted {}", slot.path, slot.ty));
    }
    if let Some(node) = body.nodes.iter().find(|n| !matches!(n.op, Op::Read { .. } | Op::Map { .. })) {
        return Err(format!("{} is not elementwise", node.op.name()));
    }
    Ok(body.results.iter().map(|(_, v)| body.ty(*v).clone()).collect())
}

/// The body's nodes in the open.
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
