//! Keeps the logits of a loss for its gradient, which otherwise computes them again. That is one of four products of the head,
//! for rows times vocabulary of memory. A loss that computes its gradient in the same pass has no use for it.

use crate::graph::{Graph, NodeId, Value};
use crate::ops::Op;
use crate::replay::Replay;
use crate::types::DType;

/// The kernels read rows of whole 16 bytes, in any type.
const WHOLE: usize = 8;

/// Gives every gradient the logits of its loss; returns the number of losses. `narrow` also keeps those of a type narrower
/// than f32: the CPU, which computes them in f32 again, would get other bits from them.
pub fn kept_logits(g: &Graph, narrow: bool) -> (Graph, usize) {
    let mut replay = Replay::new(g);
    let mut count = 0;
    for id in g.ids() {
        let kept = logits_for(g, id).filter(|logits| narrow || g.ty(*logits).dtype == DType::F32);
        let (Some(logits), Op::HeadLossGrad { compute, cap, .. }) = (kept, &g.node(id).op) else {
            replay.copy(id);
            continue;
        };
        let ins = g.node(id).ins.iter().chain([&logits]).map(|v| replay.get(*v)).collect();
        replay.copy_as(id, Op::HeadLossGrad { base: false, kept: true, compute: *compute, cap: *cap }, ins);
        count += 1;
    }
    (replay.finish(), count)
}

/// The logits of the loss that a gradient belongs to.
fn logits_for(g: &Graph, grad: NodeId) -> Option<Value> {
    let Op::HeadLossGrad { base: false, kept: false, .. } = g.node(grad).op else { return None };
    let loss = g.node(grad).ins[3].node;
    let is_of_loss = matches!(g.node(loss).op, Op::HeadLoss { .. });
    let logits = loss.out(4);
    (is_of_loss && g.ty(logits).last().is_multiple_of(WHOLE)).then_some(logits)
}
