//! Scatter: gradients of a micro-batch that ranks add as soon as they are computed, each for its share.
//!
//! The gradients of a bucket lie side by side, so that one exchange adds them; `lower` lets them be computed there. The
//! exchange is placed after the last of them. So only the gradients of few buckets are in memory at a time, and each rank keeps
//! only its share of the sums. `totals` adds the shares of different shard groups once per update.
//!
//! Where a rank has several lanes, all other sums are added over the group as well, in one exchange after the last bucket: each
//! step of the group is then a node of the tree of lanes, for sharded and unsharded sums alike.

use std::collections::HashMap;

use crate::graph::{Class, NodeId, SlotId, Value};
use crate::mesh::Axis;
use crate::ops::Op;
use crate::ops::collective::Combine;
use crate::ops::elementwise::Elementwise as E;
use crate::passes::gradient::differentiate::Trained;
use crate::passes::gradient::lanes::sum_in_step;
use crate::passes::options::Options;
use crate::replay::{Replay, without_dead_before};
use crate::types::DType;

/// A bucket of gradients.
pub(super) struct Scattered {
    /// The slot of a rank's share of the sums.
    pub sums: SlotId,
    /// Number of elements of the bucket, including padding.
    pub elements: usize,
    /// The slots that would sum the gradients on a single rank, each with its start in the bucket.
    pub gradients: Vec<(SlotId, usize)>,
}

/// Adds the gradients of buckets over ranks instead of to sums on each rank.
pub(super) fn scatter(trained: &mut Trained, buckets: &[Scattered], o: &Options) {
    let g = &trained.graph;
    let slots: Vec<SlotId> = buckets.iter().flat_map(|b| &b.gradients).map(|(slot, _)| *slot).collect();
    let written: HashMap<SlotId, Value> =
        g.writes.iter().filter(|(slot, _)| slots.contains(slot)).copied().collect();
    let is_other = |class: Class, slot: &SlotId| class == Class::Carry && !slots.contains(slot);
    // The last node that computes a gradient of a bucket.
    let last = |bucket: &Scattered| bucket.gradients.iter().map(|(slot, _)| written[slot].node).max();
    let ends: HashMap<NodeId, Vec<&Scattered>> = buckets.iter().fold(HashMap::new(), |mut ends, bucket| {
        ends.entry(last(bucket).expect("a bucket has gradients")).or_default().push(bucket);
        ends
    });
    let others: Vec<(SlotId, Value)> = match sum_in_step(o) {
        true => g.writes.iter().filter(|(slot, _)| is_other(g.slot(*slot).class, slot)).copied().collect(),
        false => vec![],
    };
    let is_exchanged = |slot: &SlotId| slots.contains(slot) || others.iter().any(|(other, _)| other == slot);
    let is_base = |v: Value| matches!(g.node(v.node).op, Op::Read { slot } if is_exchanged(&slot));
    let mut replay = Replay::new(g);
    let mut sums = vec![];
    for id in g.ids() {
        match (&g.node(id).op, &g.node(id).ins[..]) {
            // The first term needs no addition: the exchange adds the base.
            (Op::Map { f: E::Add }, [base, term]) if is_base(*base) => {
                let term = replay.get(*term);
                replay.set(id.out(0), term);
            }
            _ => _ = replay.copy(id),
        }
        for bucket in ends.get(&id).into_iter().flatten() {
            sums.push((bucket.sums, exchanged(&mut replay, bucket, &written, o)));
        }
    }
    sums.extend(summed(&mut replay, &others, o));
    let mut new = replay.finish();
    new.writes.retain(|(slot, _)| !is_exchanged(slot));
    new.writes.extend(sums);
    (trained.graph, trained.forward) = without_dead_before(&new, trained.forward);
}

/// Unsharded sums with the terms of all ranks of the group added.
fn summed(replay: &mut Replay<'_>, sums: &[(SlotId, Value)], o: &Options) -> Vec<(SlotId, Value)> {
    if sums.is_empty() {
        return vec![];
    }
    let terms: Vec<Value> = sums.iter().map(|(_, v)| replay.get(*v)).collect();
    let g = &mut replay.new;
    let path = "sums";
    let flat: Vec<Value> = terms
        .iter()
        .map(|v| g.add(Op::Reshape { dims: vec![g.ty(*v).elements()] }, vec![*v], path))
        .collect();
    let joined = g.add(Op::Concat { axis: 0 }, flat, path);
    let (axis, order) = (Axis::Shard, o.order);
    let op = Op::AllReduce { axis, ways: o.mesh.ways(axis), by: Combine::Sum, order };
    let all = g.add(op, vec![joined], path);
    let mut start = 0;
    let with_base = |((slot, _), term): (&(SlotId, Value), &Value)| {
        let (dims, len) = (g.dims(*term).to_vec(), g.ty(*term).elements());
        let own = g.add(Op::Slice { axis: 0, start, len }, vec![all], path);
        let own = g.add(Op::Reshape { dims }, vec![own], path);
        let base = g.add(Op::Read { slot: *slot }, vec![], path);
        start += len;
        (*slot, g.add(Op::Map { f: E::Add }, vec![base, own], path))
    };
    sums.iter().zip(&terms).map(with_base).collect()
}

/// A rank's share of the sums plus the gradients of a bucket, which lie side by side with zeros between them.
fn exchanged(
    replay: &mut Replay<'_>,
    bucket: &Scattered,
    written: &HashMap<SlotId, Value>,
    o: &Options,
) -> Value {
    let path = replay.old.slot(bucket.sums).path.clone();
    let gradient = |slot: &SlotId| {
        let value = replay.get(written[slot]);
        (*slot, (value, replay.new.ty(value).elements()))
    };
    let gradients: HashMap<SlotId, (Value, usize)> =
        bucket.gradients.iter().map(|(slot, _)| gradient(slot)).collect();
    let mut add = |op: Op, ins: Vec<Value>| replay.new.add(op, ins, &path);
    let base = add(Op::Read { slot: bucket.sums }, vec![]);
    let zeros = |elements: usize| Op::Fill { value: 0.0, dtype: DType::F32, dims: vec![elements] };
    let (mut parts, mut end) = (vec![], 0);
    for (slot, start) in &bucket.gradients {
        if *start > end {
            parts.push(add(zeros(start - end), vec![]));
        }
        let elements = gradients[slot].1;
        parts.push(add(Op::Reshape { dims: vec![elements] }, vec![gradients[slot].0]));
        end = start + elements;
    }
    if bucket.elements > end {
        parts.push(add(zeros(bucket.elements - end), vec![]));
    }
    let all = add(Op::Concat { axis: 0 }, parts);
    let (axis, order) = (Axis::Shard, o.order);
    add(Op::ReduceScatter { axis, ways: o.mesh.ways(axis), order, base: true }, vec![all, base])
}
