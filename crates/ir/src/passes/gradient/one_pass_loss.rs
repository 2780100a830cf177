//! Computes a head's loss and its gradients in one pass over the logits. Where only the weighted sum of the loss is
//! differentiated, d logp = -weight is already known in the forward pass.

use crate::graph::{Graph, NodeId};
use crate::ops::Op;
use crate::ops::elementwise::Elementwise as E;
use crate::passes::gradient::differentiate::Trained;
use crate::replay::Replay;

/// Joins each loss with its gradient; returns the number of joined losses.
pub fn one_pass_loss(trained: &Trained) -> (Trained, usize) {
    let g = &trained.graph;
    let pairs: Vec<(NodeId, NodeId)> = g.ids().filter_map(|grad| Some((loss_of(g, grad)?, grad))).collect();
    let mut replay = Replay::new(g);
    let mut forward = 0;
    for id in g.ids() {
        if id.0 as usize == trained.forward {
            forward = replay.new.nodes.len();
        }
        if let Some((_, grad)) = pairs.iter().find(|(loss, _)| *loss == id) {
            let ins = g.node(id).ins.iter().map(|v| replay.get(*v)).collect();
            let Op::HeadLoss { compute, cap } = g.node(id).op else { unreachable!("found as a loss") };
            let fused = replay.copy_as(id, Op::HeadLossTrain { base: false, compute, cap }, ins);
            replay.set(grad.out(0), fused.out(3));
            replay.set(grad.out(1), fused.out(4));
        } else if !pairs.iter().any(|(_, grad)| *grad == id) {
            replay.copy(id);
        }
    }
    let graph = replay.finish();
    (Trained { graph, forward, weights: trained.weights.clone() }, pairs.len())
}

/// The loss of which this gradient differentiates only the sum.
fn loss_of(g: &Graph, grad: NodeId) -> Option<NodeId> {
    let Op::HeadLossGrad { base: false, .. } = g.node(grad).op else { return None };
    let ins = &g.node(grad).ins;
    let loss = ins[3].node;
    let weight = g.node(loss).ins[3];
    let minus = g.node(ins[4].node);
    let times = g.node(minus.ins.first()?.node);
    let mut one = g.node(times.ins.get(1)?.node);
    if let Op::Broadcast { .. } = one.op {
        one = g.node(one.ins[0].node);
    }
    let is_minus_weight = matches!(minus.op, Op::Map { f: E::Neg })
        && matches!(times.op, Op::Map { f: E::Mul })
        && times.ins[0] == weight
        && matches!(one.op, Op::Fill { value: 1.0, .. });
    let is_best_read = g.nodes.iter().any(|node| node.ins.contains(&loss.out(3)));
    (is_minus_weight && !is_best_read).then_some(loss)
}
