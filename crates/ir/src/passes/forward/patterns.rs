//! Fuses neighbours that one kernel computes in one pass over memory: addition and norm, norm and rotation, gate, up and their
//! dropout.

use std::collections::{HashMap, HashSet};

use crate::graph::{Graph, NodeId, Value};
use crate::ops::Op;
use crate::ops::elementwise::Elementwise as E;
use crate::ops::gated::Act;
use crate::ops::norm::NormSpec;
use crate::replay::{Replay, users};

/// Counts of the joined patterns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Joined {
    pub add_norm: usize,
    pub norm_rope: usize,
    pub gated: usize,
}

pub fn patterns(g: &Graph, norms: bool, elementwise: bool) -> (Graph, Joined) {
    let users = users(g);
    let find = Finder { g, users: &users };
    let mut joined = Joined::default();
    let mut replay = Replay::new(g);
    // Slots can be read at any time: reading them first lets a fused node take the place of its first half.
    for id in g.ids().filter(|id| matches!(g.node(*id).op, Op::Read { .. })) {
        replay.copy(id);
    }
    let mut taken: HashSet<NodeId> = HashSet::new();
    for id in g.ids() {
        if taken.contains(&id) || matches!(g.node(id).op, Op::Read { .. }) {
            continue;
        }
        if norms && let Some(norm) = find.norm_after_add(id) {
            let (spec, _) = NormSpec::of(&g.node(norm).op).expect("found as a norm");
            let ins = g.node(id).ins.iter().chain(&g.node(norm).ins[1..]).map(|v| replay.get(*v)).collect();
            let path = &g.node(norm).path;
            let fused = replay.new.push(spec.op(true), ins, path);
            replay.set(norm.out(0), fused.out(0));
            replay.set(id.out(0), fused.out(1));
            taken.insert(norm);
            joined.add_norm += 1;
        } else if norms && let Some(op) = find.rope_after_norm(id) {
            let norm = g.node(id).ins[0].node;
            let ins = g.node(norm).ins.iter().chain(&g.node(id).ins[1..]).map(|v| replay.get(*v)).collect();
            replay.copy_as(id, op, ins);
            joined.norm_rope += 1;
        } else if elementwise && let Some((act, gate, up)) = find.gated(id) {
            let (at, p) = find.dropout_after(id).unwrap_or((id, 0.0));
            let drawn = g.node(at).ins[1..].iter().filter(|_| at != id);
            if !drawn.clone().all(|v| replay.has(*v)) {
                // The dropout's inputs come later: the two stay separate.
                replay.copy_as(id, Op::Gated { act, p: 0.0 }, vec![replay.get(gate), replay.get(up)]);
            } else {
                let ins = [&gate, &up].into_iter().chain(drawn).map(|v| replay.get(*v)).collect();
                // Under the key of the dropout.
                replay.copy_as(at, Op::Gated { act, p }, ins);
                taken.insert(at);
            }
            joined.gated += 1;
        } else {
            replay.copy(id);
        }
    }
    (crate::replay::without_dead(&replay.finish()), joined)
}

struct Finder<'a> {
    g: &'a Graph,
    users: &'a HashMap<Value, Vec<NodeId>>,
}

impl Finder<'_> {
    fn is_used_once(&self, v: Value) -> bool {
        let outside =
            self.g.writes.iter().any(|(_, w)| *w == v) || self.g.results.iter().any(|(_, r)| *r == v);
        !outside && self.users.get(&v).is_some_and(|u| u.len() == 1)
    }

    /// The norm that reads the sum computed by `id`. Its weight and bias are slots, so it can run where the sum does.
    fn norm_after_add(&self, id: NodeId) -> Option<NodeId> {
        let Op::Map { f: E::Add } = self.g.node(id).op else { return None };
        self.users.get(&id.out(0))?.iter().copied().find(|n| {
            let node = self.g.node(*n);
            let has_slots = node.ins[1..].iter().all(|w| matches!(self.g.node(w.node).op, Op::Read { .. }));
            matches!(node.op, Op::RmsNorm { residual: false, .. }) && node.ins[0] == id.out(0) && has_slots
        })
    }

    fn rope_after_norm(&self, id: NodeId) -> Option<Op> {
        let node = self.g.node(id);
        let Op::Rope { freq, axis_of_freq, pairs, inverse: false, table } = &node.op else { return None };
        let Op::RmsNorm { eps, weight, center: false, bias: false, residual: false } =
            self.g.node(node.ins[0].node).op
        else {
            return None;
        };
        let (freq, axis_of_freq) = (*freq, axis_of_freq.clone());
        self.is_used_once(node.ins[0]).then_some(Op::QkNormRope {
            eps,
            weight,
            first: 0,
            freq,
            axis_of_freq,
            pairs: *pairs,
            table: *table,
        })
    }

    /// The dropout that is the only reader of a node, and its probability.
    fn dropout_after(&self, id: NodeId) -> Option<(NodeId, f32)> {
        let [reader] = self.users.get(&id.out(0)).filter(|_| self.is_used_once(id.out(0)))?[..] else {
            return None;
        };
        match self.g.node(reader).op {
            Op::Dropout { p } if p > 0.0 => Some((reader, p)),
            _ => None,
        }
    }

    fn gated(&self, id: NodeId) -> Option<(Act, Value, Value)> {
        let node = self.g.node(id);
        let Op::Map { f: E::Mul } = node.op else { return None };
        let (a, b) = (node.ins[0], node.ins[1]);
        [(a, b), (b, a)].into_iter().find_map(|(gate, up)| {
            let activation = self.g.node(gate.node);
            let Op::Map { f } = activation.op else { return None };
            self.is_used_once(gate).then_some((Act::of(f)?, activation.ins[0], up))
        })
    }
}
