//! Joins: which compute launches wait for which exchanges, so that all others may run beside them.
//!
//! A launch waits for an exchange that writes what it touches or reads what it writes. That is decided by storages, before
//! these have offsets: a join is how long an exchange holds its memory.
//!
//! Nothing reads the sums of a bucket of gradients in the plan that adds them over ranks, and what is sent would be held to the end.
//! So launches behind such an exchange wait for the one before it, which has had a layer's time: a bucket is sent while the next
//! is made, and no more of them are in memory.

use crate::access::Access;
use crate::ops::Op;
use crate::passes::place::lower::{Draft, Lowered, Storage, StorageView};
use crate::plan::Queue;

/// Sets the joins of every draft. Without overlap the next compute launch behind an exchange waits for it.
pub fn join(lowered: &mut Lowered, overlaps: bool) {
    let Lowered { storages, drafts, .. } = lowered;
    // Exchanges that no launch so far waits for.
    let mut running: Vec<(usize, Access)> = vec![];
    // The last exchange that sends a bucket of gradients, and the one before it, which the next launch waits for.
    let (mut sent, mut due) = (None, None);
    for (at, draft) in drafts.iter_mut().enumerate() {
        let own = access(draft, storages);
        if draft.launch.queue == Queue::Wire {
            running.push((at, own));
            if sends_bucket(draft, storages) {
                due = sent.replace(at);
            }
            continue;
        }
        let meets = running.iter().rposition(|(_, exchange)| !overlaps || exchange.meets(&own));
        let waits = due.take().and_then(|due| running.iter().position(|(at, _)| *at == due));
        if let Some(last) = meets.max(waits) {
            draft.launch.joins = Some(running[last].0);
            running.drain(..=last);
        }
    }
}

/// Whether an exchange adds what was computed for it to a slot.
fn sends_bucket(draft: &Draft, storages: &[Storage]) -> bool {
    let is_slot = |place: &StorageView| storages[place.storage].fixed.is_some();
    let writes_slot = draft.outs.iter().flatten().all(is_slot);
    matches!(draft.launch.op, Op::ReduceScatter { base: true, .. }) && !is_slot(&draft.ins[0]) && writes_slot
}

fn access(draft: &Draft, storages: &[Storage]) -> Access {
    let bytes = |place: &StorageView| {
        let span = place.view.offset..place.view.offset + place.view.span_bytes();
        // Slots lie inside one another, so they are compared by where they lie in the arena.
        match storages[place.storage].fixed {
            Some(start) => (None, start + span.start..start + span.end),
            None => (Some(place.storage), span),
        }
    };
    let written = draft.outs.iter().flatten().chain(&draft.workspace);
    Access { reads: draft.ins.iter().map(bytes).collect(), writes: written.map(bytes).collect() }
}

/// The launch before which the exchange at an index has ended: the first that joins it or a later one, or the end.
pub fn held_until(drafts: &[Draft], exchange: usize) -> usize {
    let joins = |draft: &Draft| draft.launch.joins.is_some_and(|joined| joined >= exchange);
    drafts[exchange..].iter().position(joins).map_or(drafts.len(), |n| exchange + n)
}
