//! Decides which compute launches wait for which exchanges, so that all others may overlap them.
//!
//! A launch waits for an exchange that writes memory it touches or reads memory it writes. This is decided by storages, before
//! these have offsets, because joins determine how long an exchange holds its memory.
//!
//! In the plan that adds a bucket of gradients over ranks nothing reads the sums, so what is sent would be held until the end.
//! Therefore a launch after such an exchange waits for the previous one, which has had the time of a layer: one bucket is sent
//! while the next is computed, and no more than these two are in memory.

use crate::access::Access;
use crate::ops::Op;
use crate::passes::place::lower::{Draft, Lowered, Storage, StorageView};
use crate::plan::Queue;

/// Sets the joins of every draft. Without overlap the next compute launch after an exchange waits for it.
pub fn join(lowered: &mut Lowered, overlaps: bool) {
    let Lowered { storages, drafts, .. } = lowered;
    // Exchanges that no launch waits for yet.
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

/// Whether an exchange adds computed gradients to a slot.
fn sends_bucket(draft: &Draft, storages: &[Storage]) -> bool {
    let is_slot = |place: &StorageView| storages[place.storage].fixed.is_some();
    let writes_slot = draft.outs.iter().flatten().all(is_slot);
    matches!(draft.launch.op, Op::ReduceScatter { base: true, .. }) && !is_slot(&draft.ins[0]) && writes_slot
}

fn access(draft: &Draft, storages: &[Storage]) -> Access {
    let bytes = |place: &StorageView| {
        let span = place.view.offset..place.view.offset + place.view.span_bytes();
        // Slots may lie inside one another, so they are compared by arena offsets.
        match storages[place.storage].fixed {
            Some(start) => (None, start + span.start..start + span.end),
            None => (Some(place.storage), span),
        }
    };
    let written = draft.outs.iter().flatten().chain(&draft.workspace);
    Access { reads: draft.ins.iter().map(bytes).collect(), writes: written.map(bytes).collect() }
}

/// The launch before which the exchange at an index has ended: the first that joins it or a later one, or else the end.
pub fn held_until(drafts: &[Draft], exchange: usize) -> usize {
    let joins = |draft: &Draft| draft.launch.joins.is_some_and(|joined| joined >= exchange);
    drafts[exchange..].iter().position(joins).map_or(drafts.len(), |n| exchange + n)
}
