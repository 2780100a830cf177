//! Invariants of every graph after every pass, and of the queues of every plan. A violation is a bug of the pass, so
//! debug builds panic with it.

use std::collections::HashSet;

use crate::access::Access;
use crate::graph::{Graph, SlotId, Value};
use crate::ops::Op;
use crate::plan::{Launch, Plan, Queue};

/// The first violated invariant, in words.
pub fn verify(g: &Graph) -> Result<(), String> {
    verify_slots(g)?;
    for (i, node) in g.nodes.iter().enumerate() {
        let at = || format!("%{i} {} at `{}`", node.op.name(), node.path);
        for v in &node.ins {
            if v.node.0 as usize >= i {
                return Err(format!("{} uses {v}, which comes later", at()));
            }
            if v.out as usize >= g.node(v.node).outs.len() {
                return Err(format!("{} uses {v}, which does not exist", at()));
            }
        }
        if let Op::Read { slot } = node.op
            && slot.0 as usize >= g.slots.len()
        {
            return Err(format!("{} reads a slot that does not exist", at()));
        }
        if let Op::Region { body } | Op::Bundle { body } = &node.op {
            verify(body).map_err(|why| format!("{}: {why}", at()))?;
        }
        let outs = node.op.infer(g, &node.ins).map_err(|why| format!("{}: {why}", at()))?;
        if outs != node.outs {
            return Err(format!("{} has types that its inputs do not give", at()));
        }
    }
    let exists = |v: &Value| g.nodes.get(v.node.0 as usize).is_some_and(|n| (v.out as usize) < n.outs.len());
    if let Some((name, v)) = g.results.iter().find(|(_, v)| !exists(v)) {
        return Err(format!("the result {name} is {v}, which does not exist"));
    }
    for (slot, v) in &g.writes {
        let Some(s) = g.slots.get(slot.0 as usize) else {
            return Err(format!("${} is written and does not exist", slot.0));
        };
        if !exists(v) {
            return Err(format!("{} is written with {v}, which does not exist", s.path));
        }
        if *g.ty(*v) != s.ty {
            return Err(format!("{} is written with {}, wanted {}", s.path, g.ty(*v), s.ty));
        }
    }
    verify_writes(g)
}

/// No two writes share memory.
fn verify_writes(g: &Graph) -> Result<(), String> {
    let mut written: Vec<_> = g.writes.iter().map(|(slot, _)| (extent(g, *slot), *slot)).collect();
    written.retain(|((_, range), _)| !range.is_empty());
    written.sort_by_key(|((root, range), slot)| (*root, range.start, *slot));
    for pair in written.windows(2) {
        let [((root, range), slot), ((next_root, next), other)] = pair else { unreachable!("two at a time") };
        if root == next_root && next.start < range.end {
            let [a, b] = [slot, other].map(|slot| &g.slot(*slot).path);
            return Err(format!("{a} and {b} are both written and share memory"));
        }
    }
    Ok(())
}

/// Paths are unique, parts lie inside their slots, and no slot is a part of itself.
fn verify_slots(g: &Graph) -> Result<(), String> {
    let mut names = HashSet::new();
    for s in &g.slots {
        if !names.insert(&s.path) {
            return Err(format!("two slots are named `{}`", s.path));
        }
        let (mut inner, mut depth) = (s, 0);
        while let Some(part) = inner.part {
            let Some(whole) = g.slots.get(part.of.0 as usize) else {
                return Err(format!("{} is a part of ${}, which does not exist", inner.path, part.of.0));
            };
            if part.offset + inner.ty.elements() > whole.ty.elements() || inner.ty.dtype != whole.ty.dtype {
                return Err(format!("{} does not lie inside {}", inner.path, whole.path));
            }
            depth += 1;
            if depth > g.slots.len() {
                return Err(format!("{} is a part of itself", s.path));
            }
            inner = whole;
        }
    }
    Ok(())
}

/// Root slot and element range of a slot.
pub fn extent(g: &Graph, slot: SlotId) -> (SlotId, std::ops::Range<usize>) {
    let (mut root, mut offset) = (slot, 0);
    while let Some(part) = g.slot(root).part {
        offset += part.offset;
        root = part.of;
    }
    (root, offset..offset + g.slot(slot).ty.elements())
}

/// Between an exchange and the launch that waits for it, no launch writes what the exchange reads or touches what it writes. A
/// launch waits only for exchanges before it, and exchanges, which run in order, for none.
pub fn queues(plan: &Plan) -> Result<(), String> {
    let named = |at: usize| {
        let Launch { kernel, path, .. } = &plan.launches[at];
        format!("launch {at}, {kernel} at `{path}`,")
    };
    let mut running: Vec<(usize, Access)> = vec![];
    for (at, launch) in plan.launches.iter().enumerate() {
        if let Some(joined) = launch.joins {
            let is_before = joined < at && plan.launches[joined].queue == Queue::Wire;
            if launch.queue == Queue::Wire || !is_before {
                return Err(format!(
                    "{} waits for launch {joined}, which is no exchange before it",
                    named(at)
                ));
            }
            running.retain(|(exchange, _)| *exchange > joined);
        }
        let own = Access::of(launch);
        if launch.queue == Queue::Wire {
            running.push((at, own));
        } else if let Some((exchange, _)) = running.iter().find(|(_, exchange)| exchange.meets(&own)) {
            return Err(format!("{} runs beside {} which uses the same memory", named(at), named(*exchange)));
        }
    }
    Ok(())
}
