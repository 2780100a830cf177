//! Linear attention rotates queries that are also the keys as it reads them, and rotates their gradient back as it writes it:
//! the rotated tensor is never stored and not recomputed for the backward pass.
//!
//! Pairs must be interleaved, so that any piece of a row can be rotated. Segments must fit in one tile: longer ones are read
//! once for each tile and would be rotated as often.

use crate::graph::{Graph, NodeId, Value};
use crate::ops::Op;
use crate::ops::attention::Segments;
use crate::ops::linear_attention::{Keys, LinearAttend, Rotary};
use crate::ops::rope::Pairs;
use crate::replay::{Replay, users, without_dead};

/// The longest segment for which the two are fused.
pub const MOST_ROWS: usize = 128;

/// Fuses rotations into the linear attention that is their only reader; returns their number.
pub fn rotated_scores(g: &Graph) -> (Graph, usize) {
    let users = users(g);
    let is_read_once = |v: Value| {
        let mut ends = g.writes.iter().map(|(_, w)| w).chain(g.results.iter().map(|(_, r)| r));
        ends.all(|end| *end != v) && users.get(&v).is_some_and(|u| u.len() == 1)
    };
    let mut replay = Replay::new(g);
    let mut joined = 0;
    for id in g.ids() {
        let node = g.node(id);
        match turn_of(g, id).filter(|_| is_read_once(node.ins[0])) {
            Some(attend) => {
                let rope = g.node(node.ins[0].node);
                let ins = rope.ins[..1].iter().chain(&node.ins[1..]).chain(&rope.ins[1..]);
                let ins = ins.map(|v| replay.get(*v)).collect();
                replay.copy_as(id, attend.op(), ins);
                joined += 1;
            }
            None => _ = replay.copy(id),
        }
    }
    (without_dead(&replay.finish()), joined)
}

/// Linear attention with the rotation of its queries, where it has one that it can absorb.
fn turn_of(g: &Graph, id: NodeId) -> Option<LinearAttend> {
    let node = g.node(id);
    let (attend, false) = LinearAttend::of(&node.op)? else { return None };
    let longest = match attend.q {
        Segments::Uniform { len } => len,
        Segments::Ragged { max_len, .. } => max_len,
    };
    if attend.k != Keys::Queries || attend.rotary != Rotary::None || longest > MOST_ROWS {
        return None;
    }
    let Op::Rope { freq, axis_of_freq, pairs: Pairs::Interleaved, inverse: false, table } =
        &g.node(node.ins[0].node).op
    else {
        return None;
    };
    let rotary = if *table { Rotary::Table(*freq) } else { Rotary::Angles(*freq) };
    axis_of_freq.iter().all(|axis| *axis == 0).then_some(LinearAttend { rotary, ..attend })
}
