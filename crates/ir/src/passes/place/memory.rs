//! The memory planner: assigns offsets to storages by their lifetimes.
//!
//! Storages that live at the same time do not overlap. The largest is placed first, each at the lowest offset that is free for
//! its whole life. A storage that an exchange touches lives until a compute launch joins the exchange.

use std::ops::Range;

use crate::passes::place::lower::{Lowered, StorageView};
use crate::passes::place::queues::held_until;
use crate::plan::{Buffer, Launch, Plan, Queue, Role, View};

/// A plan with offsets in the transient region, and the number of bytes it needs there.
pub struct Placed {
    pub plan: Plan,
    pub bytes: usize,
    pub buffers: Vec<Buffer>,
}

/// Gives every transient storage an offset from `base` and turns drafts into launches.
pub fn place(lowered: Lowered, role: Role, base: usize, align: usize, reuse: bool) -> Placed {
    let Lowered { storages, drafts, results, .. } = lowered;
    let mut life: Vec<Option<Lifetime>> = vec![None; storages.len()];
    for (at, draft) in drafts.iter().enumerate() {
        let places = draft.ins.iter().chain(draft.outs.iter().flatten()).chain(&draft.workspace);
        let is_exchange = draft.launch.queue == Queue::Wire;
        let until = if is_exchange { held_until(&drafts, at) } else { at + 1 };
        for place in places {
            let life = life[place.storage].get_or_insert_with(|| Lifetime::beginning(at));
            life.touched.end = at + 1;
            life.held_until = life.held_until.max(until);
            life.computed_from = life.computed_from.min(if is_exchange { usize::MAX } else { at });
        }
    }
    for (_, place) in &results {
        if let Some(life) = &mut life[place.storage] {
            (life.touched.end, life.held_until) = (drafts.len(), drafts.len());
        }
    }

    let mut order: Vec<usize> =
        (0..storages.len()).filter(|i| storages[*i].fixed.is_none() && life[*i].is_some()).collect();
    order.sort_by_key(|i| (std::cmp::Reverse(storages[*i].bytes), *i));
    let mut offsets: Vec<usize> = storages.iter().map(|s| s.fixed.unwrap_or(0)).collect();
    let (mut bytes, mut buffers, mut occupied) = (0, vec![], Vec::<Occupied>::new());
    for i in order {
        let size = storages[i].bytes.next_multiple_of(align);
        let live = life[i].clone().expect("filtered");
        let start = if reuse { lowest(&occupied, &live, size) } else { bytes };
        offsets[i] = base + start;
        bytes = bytes.max(start + size);
        let at = occupied.partition_point(|s| s.start < start);
        occupied.insert(at, Occupied { start, end: start + size, live: live.clone() });
        buffers.push(Buffer {
            name: storages[i].name.clone(),
            category: storages[i].category,
            offset: base + start,
            bytes: size,
            live: Some((0, live.held())),
        });
    }

    let view = |p: StorageView| View { offset: offsets[p.storage] + p.view.offset, ..p.view };
    let launches = drafts
        .into_iter()
        .map(|d| Launch {
            ins: d.ins.into_iter().map(view).collect(),
            outs: d.outs.into_iter().map(|o| o.map(view)).collect(),
            workspace: d.workspace.map(view),
            ..d.launch
        })
        .collect();
    let results = results.into_iter().map(|(name, p)| (name, view(p))).collect();
    Placed { plan: Plan { role, launches, results }, bytes, buffers }
}

/// The launches between which a storage is in use.
#[derive(Clone)]
struct Lifetime {
    /// From the first launch that touches it to after the last.
    touched: Range<usize>,
    /// All launches that touch it have ended before the compute launch at this index.
    held_until: usize,
    /// The first compute launch that touches it; `usize::MAX` where only exchanges do.
    computed_from: usize,
}

impl Lifetime {
    fn beginning(at: usize) -> Lifetime {
        Lifetime { touched: at..at + 1, held_until: at + 1, computed_from: usize::MAX }
    }

    fn held(&self) -> Range<usize> {
        self.touched.start..self.held_until
    }

    /// Whether the two may not share memory. An exchange may reuse memory of earlier launches, which have ended when it begins;
    /// a compute launch only memory that no exchange holds.
    fn conflicts_with(&self, other: &Lifetime) -> bool {
        let (first, second) =
            if self.touched.start <= other.touched.start { (self, other) } else { (other, self) };
        second.touched.start < first.touched.end || second.computed_from < first.held_until
    }
}

struct Occupied {
    start: usize,
    end: usize,
    live: Lifetime,
}

/// The lowest offset with `size` free bytes among storages, sorted by start, that live at the same time.
fn lowest(occupied: &[Occupied], live: &Lifetime, size: usize) -> usize {
    let mut start = 0;
    for s in occupied.iter().filter(|s| s.live.conflicts_with(live)) {
        if s.start >= start + size {
            break;
        }
        start = start.max(s.end);
    }
    start
}
