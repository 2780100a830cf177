//! Writes the gradient of queries that attend to themselves as the sum of all their gradients, and as 0 where the ReLU that
//! computed them was 0: this saves a sum and a slope over the largest tensors of a layer.
//!
//! Only gradients that are rotated back on output (`rotated_scores`) support this, because each of their elements is written
//! once.

use std::collections::{HashMap, HashSet};

use crate::graph::{Graph, NodeId, Value};
use crate::ops::Op;
use crate::ops::attention::Segments;
use crate::ops::elementwise::Elementwise as E;
use crate::ops::linear_attention::{Accumulate, LinearAttend, Rotary};
use crate::replay::{Replay, users, without_dead};

/// Fuses sums, and slopes after them, with the gradients before them; returns the number of sums.
pub fn score_gradients(g: &Graph) -> (Graph, usize) {
    let find = Finder { g, users: users(g) };
    let joins: HashMap<NodeId, Join> = g.ids().filter_map(|id| Some((id, find.join(id)?))).collect();
    let gone: HashSet<NodeId> = joins.values().flat_map(|join| join.gone.iter().copied()).collect();
    let mut replay = Replay::new(g);
    for id in g.ids().filter(|id| !gone.contains(id)) {
        let Some(join) = joins.get(&id) else {
            replay.copy(id);
            continue;
        };
        let node = g.node(id);
        let (attend, _) = LinearAttend::of(&node.op).expect("joins are of linear attention");
        let shaped = |replay: &mut Replay<'_>, v: Value, like: Value| {
            let dims = g.dims(like).into();
            if replay.new.dims(v) == g.dims(like) { v } else { replay.add(Op::Reshape { dims }, vec![v], id) }
        };
        let base = replay.get(join.base);
        let base = shaped(&mut replay, base, node.ins[0]);
        let ins = node.ins.iter().map(|v| replay.get(*v)).chain([base]).collect();
        let grad = replay.copy_as(id, attend.accumulating_grad(join.accumulate), ins);
        let sum = shaped(&mut replay, grad.out(0), join.sum);
        replay.set(join.sum, sum);
    }
    (without_dead(&replay.finish()), joins.len())
}

/// The sum that a gradient absorbs.
struct Join {
    base: Value,
    accumulate: Accumulate,
    /// The value that replaces the gradient's own output, and the nodes between the two.
    sum: Value,
    gone: Vec<NodeId>,
}

struct Finder<'a> {
    g: &'a Graph,
    users: HashMap<Value, Vec<NodeId>>,
}

impl Finder<'_> {
    /// The only reader of a value.
    fn reader(&self, v: Value) -> Option<NodeId> {
        let mut ends = self.g.writes.iter().map(|(_, w)| w).chain(self.g.results.iter().map(|(_, r)| r));
        match self.users.get(&v).map(Vec::as_slice) {
            Some([one]) if ends.all(|end| *end != v) => Some(*one),
            _ => None,
        }
    }

    /// The only reader of a value, or of the value after reshapes; reshapes in between are added to `gone`.
    fn reader_after_reshapes(&self, mut v: Value, gone: &mut Vec<NodeId>) -> Option<(NodeId, Value)> {
        loop {
            let id = self.reader(v)?;
            if !matches!(self.g.node(id).op, Op::Reshape { .. }) {
                return Some((id, v));
            }
            gone.push(id);
            v = id.out(0);
        }
    }

    fn before_reshapes(&self, mut v: Value) -> Value {
        while let Op::Reshape { .. } = self.g.node(v.node).op {
            v = self.g.node(v.node).ins[0];
        }
        v
    }

    fn join(&self, id: NodeId) -> Option<Join> {
        let node = self.g.node(id);
        let (attend, true) = LinearAttend::of(&node.op)? else { return None };
        let is_even = matches!(attend.q, Segments::Uniform { .. });
        if attend.rotary == Rotary::None || !is_even || Accumulate::of(&node.op) != Accumulate::Nothing {
            return None;
        }
        let mut gone = vec![];
        let (add, term) = self.reader_after_reshapes(id.out(0), &mut gone)?;
        let Op::Map { f: E::Add } = self.g.node(add).op else { return None };
        let base = self.other(add, term);
        // The base must exist where the gradient is computed.
        if base.node >= id || self.g.ty(base) != self.g.ty(term) {
            return None;
        }
        gone.push(add);
        let (mut accumulate, mut sum) = (Accumulate::Base, add.out(0));
        if let Some(slope) = self.slope(sum, node.ins[0]) {
            gone.push(slope);
            (accumulate, sum) = (Accumulate::Relu, slope.out(0));
        }
        Some(Join { base, accumulate, sum, gone })
    }

    fn other(&self, id: NodeId, v: Value) -> Value {
        let ins = &self.g.node(id).ins;
        if ins[0] == v { ins[1] } else { ins[0] }
    }

    /// The node that multiplies a sum by the slope of the ReLU that computed the queries, if it is the sum's only reader.
    fn slope(&self, sum: Value, queries: Value) -> Option<NodeId> {
        let mul = self.reader(sum)?;
        let Op::Map { f: E::Mul } = self.g.node(mul).op else { return None };
        let step = self.g.node(self.other(mul, sum).node);
        let Op::Map { f: E::Step } = step.op else { return None };
        let queries = self.before_reshapes(queries);
        let made = self.g.node(queries.node);
        let is_relu = matches!(made.op, Op::Map { f: E::Relu });
        // A ReLU is positive exactly where its argument is.
        (step.ins[0] == queries || (is_relu && step.ins[0] == made.ins[0])).then_some(mul)
    }
}
